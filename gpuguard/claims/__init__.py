"""Claims: the locks and records that say who holds which device, and how a claim is released.

Start at directory (the lock files and their trust), then claim (a claim in the hands of a process).
"""
