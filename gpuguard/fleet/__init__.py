"""Other machines: each is asked over the system's ssh what its own gpuguard says, and nothing is written there.

hosts says which names can be asked, questions what can be asked, asking runs the ssh processes, answers reads what
comes back, which strangers wrote.  No daemon of ours listens for this, and nothing is kept: the store
at scale is Prometheus.
"""
