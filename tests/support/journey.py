"""The way of a job through a whole machine, with the claim directory that this machine has; run by scripts/matrix.

    python tests/support/journey.py /run/lock|/run/gpuguard UID

As root, where /run is empty: `gpuguard setup` makes /run/gpuguard if it is wanted.  Under drivers of three ages: who
starts at once gets different devices, the others are told so; who shows them; exit codes come through; after the last
job no lock is held.  Ends with a sentence that says where the claims were.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fake_nvml import DRIVERS, GIB, FakeNvml

from gpuguard.claims import directory as lockfiles
from gpuguard.claims.records import locked_devices

DEVICES = 4
SECONDS = 300  # far beyond any answer
JOB = ("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"; read -r line')


def gpuguard(fake: FakeNvml, user: int, *words: str) -> subprocess.Popen[str]:
    """Start it as that user."""
    environment = {**os.environ, **fake.environment(), "GPUGUARD_EVENTS": os.devnull}
    environment["LD_LIBRARY_PATH"] = os.path.dirname(fake.path)  # where everybody may read it
    options: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if user else {}
    options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-m", "gpuguard", *words], env=environment, text=True, **options)


def journey(fake: FakeNvml, user: int) -> str:
    """Returns the directory of the locks."""
    fake.devices[0].memory_used = 20 * GIB  # by nobody whom one can see: not free
    starters = [gpuguard(fake, user, "run", "--no-wait", "--", *JOB) for _ in range(6)]
    given = sorted(starter.stdout.readline().strip() for starter in starters)
    assert given == ["", "", "", "1", "2", "3"], (given, [starter.communicate()[1] for starter in starters])
    asked = gpuguard(fake, user, "who", "--json").communicate(timeout=SECONDS)[0]
    claimed = [device["index"] for device in json.loads(asked)["devices"] if device["claims"]]
    assert claimed == [1, 2, 3], claimed
    codes = []
    for starter in starters:
        said = starter.communicate("\n", timeout=SECONDS)[1]
        assert "Traceback" not in said, said
        codes.append(starter.returncode)
    assert sorted(codes) == [0, 0, 0, 75, 75, 75], codes
    last = gpuguard(fake, user, "run", "-n", "3", "--no-wait", "--", "sh", "-c", "exit 7")
    assert (last.communicate(timeout=SECONDS), last.returncode)[1] == 7
    directory = lockfiles.lock_directory(None)
    left = locked_devices(directory, [device.uuid for device in fake.devices[:DEVICES]])
    assert not left, left
    return directory.path


def main() -> int:
    wanted, user = sys.argv[1], int(sys.argv[2])
    for driver in sorted(DRIVERS):
        with tempfile.TemporaryDirectory() as place, FakeNvml(Path(place), DEVICES, driver=driver) as fake:
            Path(place).chmod(0o755)
            Path(fake.path).chmod(0o666)  # the library counts its calls in there
            Path(place, Path(fake.library).name).write_bytes(Path(fake.library).read_bytes())
            if wanted == lockfiles.ADMIN_DIRECTORY:
                done = gpuguard(fake, 0, "setup")
                assert (done.communicate(timeout=SECONDS), done.returncode)[1] == 0
            place_of_claims = journey(fake, user)
            assert place_of_claims == wanted, place_of_claims
    print(f"Python {sys.version.split()[0]}, uid {user}, drivers {sorted(DRIVERS)}: claims in {wanted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
