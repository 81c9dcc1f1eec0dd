"""What an admin wrote: files that only root may change, names made numbers, YAML made dataclasses.

A fault is told with its place, and all faults in one go.
"""
