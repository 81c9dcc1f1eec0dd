"""The policy file: keys is its language with its defaults, loader reads it, checks finds what cannot be meant.

last_good keeps the last text that had no fault.
"""
