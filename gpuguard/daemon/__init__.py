"""The watchdog as a service of a machine: its socket, the requests that it answers, the locks that it grants.

Start at service, which also checks whether the policy file has changed.  Other processes talk to it through client.
"""
