"""Claims: the files and locks that say who holds which device, and what is given, wished and released there.

lockfiles comes first: the directory and its trust; hold is a claim in the hands of a process.
"""
