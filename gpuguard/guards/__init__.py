"""What stands between a verdict and a deed: the keys of actions, who a process is, all checks before a signal.

The limits on the guard itself are here too; the deeds are in actions.
"""
