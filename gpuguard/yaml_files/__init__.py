"""Files that an administrator wrote: YAML into values, with every fault at its line and column.

source reads text with places, decoder makes values of it.
"""
