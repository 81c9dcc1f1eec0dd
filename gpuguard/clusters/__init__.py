"""What an outer scheduler or a container has decided already, and what Slurm tells of its jobs.

Start reading in visible_devices.  Claims nothing: see jobs.slurm_claim, and gpuguard.ray for Ray.
"""
