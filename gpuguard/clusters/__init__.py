"""What an outer scheduler or a container has decided already, and what Slurm and Ray tell of their jobs.

Start reading in visible_devices.  Claims nothing: see jobs.slurm_claim and ray.
"""
