"""What happened: the audit log, the usage store with 400 days of sums, its queries, and the report.

Start at audit_log and queries.  schema says what is summed and how long each sum is kept.
"""
