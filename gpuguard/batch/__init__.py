"""Jobs that outlive the terminal: what was submitted, what became of it, and what may start next.

There is no server.  A job is a record in its user's home, and everything else is read from facts: a job runs as long as
its claim is held, and it has ended when its supervisor has written so.  One process of each user, the dispatcher, waits
in the queue for all of the user's jobs.  Start reading with records; states decides (pure).  This package parses no
command line and starts no program: see cli.jobs.
"""
