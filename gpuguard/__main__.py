"""``python -m gpuguard``."""

from gpuguard.cli import main

main()
