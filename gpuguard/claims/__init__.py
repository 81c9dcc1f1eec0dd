"""Claims: the locks and records that say who holds which device, and how a claim is released.

Start at directory (the lock files and their trust), then claim (a claim in the hands of a process: what its record says
and what its job has in its environment).  records reads them, and keeps requests for a release and decisions on them
behind a record, as long as that is there.  unlock releases a claim whose job lives on.  How many share a device: see
gpuguard.request.
"""
