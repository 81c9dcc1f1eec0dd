"""What an outer scheduler or a container has already decided, and what Slurm says about its jobs.

Start reading in device_variables.  Claims nothing: see jobs.slurm_claim, and gpuguard.ray for Ray.
"""
