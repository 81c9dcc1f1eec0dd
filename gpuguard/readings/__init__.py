"""Looks at a machine that take more than its driver: the host beside a GPU, numbers for a log, a recording."""
