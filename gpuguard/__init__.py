"""Pick free GPUs, claim them so that nobody else gets them, and see who holds what."""

__version__ = "0.1.0"
