"""A job for which other GPUs do not exist: bubblewrap for a user, a device filter of its cgroup for root."""
