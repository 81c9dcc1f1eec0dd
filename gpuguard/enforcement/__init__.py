"""From a verdict to an action: who the process is, all checks before a signal, the limits on the guard, the actions.

Nothing else in gpuguard signals a process.  Start at preflight, then actions.
"""
