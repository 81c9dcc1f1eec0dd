"""A job under gpuguard: its start, its limits and numbers, its isolation, its end.  See run; adopt is for a job that
runs already.
"""
