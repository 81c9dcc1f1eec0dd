"""The watchdog as a service of a machine: its socket, the requests that it answers, the locks that it grants.

Start at service.  client is how other processes talk to it.
"""
