"""The python that has gpuguard and what its tests need: the one that runs this, else that of the checkout's .venv."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

OF_CHECKOUT = Path(__file__).resolve().parent.parent / ".venv/bin/python"


def python() -> str:
    """Its path.  Ends the program where there is none."""
    if find_spec("gpuguard"):
        return sys.executable
    if not OF_CHECKOUT.exists():
        sys.exit("gpuguard is not installed for this python.  Run scripts/test first, then this again.")
    return str(OF_CHECKOUT)
