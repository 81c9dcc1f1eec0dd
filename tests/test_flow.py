"""How far a reader has to go from file to file, as benchmarks/flow.py counts it."""

import os
import re
import subprocess
import sys

import pytest
from sources import ROOT

# Files, moves between them.  An ordinary user's rights are looked at on the way, which takes a little more.
FILES, MOVES = (0, 0) if os.geteuid() == 0 else (1, 5)
BOUNDS = {"run -n 2 -- true": (24 + FILES, 210 + MOVES), "a tick with one SIGTERM": (26 + FILES, 160 + MOVES)}


def test_a_start_and_a_tick_go_through_few_files_and_seldom_back():
    words = [sys.executable, "benchmarks/flow.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if "needs a user with a name" in done.stderr:  # for the process that the tick ends
        pytest.skip("how far a reader has to go (no user: useradd somebody)")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(.+): (\d+) files, (\d+) moves", done.stdout, re.MULTILINE)
    counted = {name: (int(files), int(moves)) for name, files, moves in rows}

    assert counted.keys() == BOUNDS.keys()
    for name, (files, moves) in counted.items():
        assert 10 < files <= BOUNDS[name][0] and 100 < moves <= BOUNDS[name][1], f"`flow.py --list`: {done.stdout}"
