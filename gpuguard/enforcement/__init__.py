"""From a verdict to an action: who the process is, all checks before a signal, the limits on the guard, the actions.

Nothing else in gpuguard signals a process, and in here only signals.py does.  Decides nothing: see policies.  Start at
actions.act(), then preflight.
"""
