"""Goes on in the python of the checkout's .venv where this one has no gpuguard, as that of the system."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / ".venv"


def hand_on() -> None:
    """Start what runs anew in that python.  Where it has no gpuguard either, end it and say what to do first."""
    if find_spec("gpuguard"):
        return
    python = VENV / "bin/python"
    if not python.exists() or Path(sys.prefix) == VENV:
        sys.exit("gpuguard is not installed for this python.  Run scripts/test first, then this again.")
    os.execv(python, [str(python), *sys.argv])
