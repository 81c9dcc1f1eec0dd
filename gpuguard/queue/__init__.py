"""The queue: tickets, their priority, who starts when and why not earlier, and reservations.

backfill, priority and calendar decide and read nothing; waiter and leader sleep and wake; explain puts it in words.
"""
