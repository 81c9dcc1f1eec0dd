"""What happened: the audit log, and the usage store with 400 days of sums, its queries and the report.

Start at audit_log and queries.  schema says what is summed and for how long each sum is kept.
"""
