"""Other hosts: each one's own gpuguard is queried over the system's ssh, and nothing is written there.

hosts says which names and queries are allowed, ssh runs the processes, answers reads what comes back.
"""
