"""A job under gpuguard: its start, its limits and numbers, its isolation, its end.

run puts them together; adopt is for a job that runs already.
"""
