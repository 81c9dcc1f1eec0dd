"""Files that an administrator wrote: YAML into values, with every fault at its line and column.

source reads text with places, decoder makes values of it, keys is the language of policies with its defaults, loader
puts them together, within a time.
"""
