"""The queue: tickets, their priority, which request starts when and why not earlier, and reservations.

priority, backfill and calendar decide and read nothing; tickets, reservations, settings and state read; waiter sleeps,
leader wakes; reasons puts the plan into words.  Start at state.  Claims nothing: see lock.
"""
