"""From a verdict to an action: who the process is, all checks before a signal, the limits on the guard, the actions.

Nothing else in gpuguard signals a process, and in here only signals.py does.  Decides nothing: see policies, where
the least time between SIGTERM and SIGKILL stands, too.  identity names the programs that are never signalled.  Start at
actions.act(), then preflight.
"""
