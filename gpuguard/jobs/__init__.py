"""A job under gpuguard: its start, its limits and numbers, its isolation, its end.  See run; adopt is for a job that
runs already.  processes has the steps that end a job; the time between them is in gpuguard.run.
"""
