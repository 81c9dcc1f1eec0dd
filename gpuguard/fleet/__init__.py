"""Other hosts: each is asked over the system's ssh what its own gpuguard says, and nothing is written there.

hosts says which names and questions are allowed, ssh runs the processes, answers reads what comes back.
"""
