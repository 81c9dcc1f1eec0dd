"""Claims: the locks and records that say who holds which device, and how a claim is released.

Start at directory (the lock files and why they can be trusted), then claim (a claim in the hands of a process: what its
record says and what its job has in its environment).  records reads the records; it also keeps release requests and the
decisions on them behind a record in the same file, as long as that exists.  unlock releases a claim whose job lives on.
gpuguard.request says how many claims can share a device.
"""
