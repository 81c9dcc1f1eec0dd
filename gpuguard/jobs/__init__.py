"""A job under gpuguard: its start, its limits and numbers, what it does when asked to give up, its end.

run puts them together; family and adopt are for a job that runs already.
"""
