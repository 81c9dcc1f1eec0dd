"""A job under gpuguard: its start, its limits and numbers, its isolation, its end.  Start at gpuguard.run, which also
has the time between the steps that end a job; processes has these steps.  adopt is for a job that is already running.
"""
