"""Hand a command to the engine of a cluster, which runs it where and when there is room: Slurm or Ray.

gpuguard submit --via slurm -n 2 --min-free 20GiB --time-limit 4h -- python train.py     queued, as with sbatch
gpuguard submit --via slurm --attach -n 2 -- python train.py    stays, as srun: output here, exit code of the command
gpuguard submit --via slurm --with '--partition=a100' -- ...    more words for sbatch or srun
gpuguard submit --via slurm --print -n 2 -- python train.py     shows the command line, and submits nothing
gpuguard submit --via ray -n 2 -- python tune.py                through Ray's job API

The engine chooses the machine and its GPUs; there the command runs under `gpuguard run`, with the same options, limits
and exit codes.  Exit codes: 0 submitted; with --attach those of `gpuguard run`, 125 also when the engine refuses.
"""

from __future__ import annotations
