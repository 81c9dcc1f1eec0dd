"""The watchdog as a service of a machine: its socket, the requests that it answers, the locks that it grants.

Start at service, which also looks whether the policy file has changed.  client is how other processes talk to it.
"""
