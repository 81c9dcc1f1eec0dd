"""A real daemon that enforces its policies on the fake driver library, against a process of a user with a name.

with driven(tmp_path, fake, POLICY) as daemon: daemon.until("terminate")
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from daemons import DaemonUnderTest
from fake_nvml import FakeNvml

# As root the command refuses a library of its caller's choice, which the fake driver is; and nobody here has the
# driver's device file open.
COMMAND = """
import sys
from gpuguard.daemon import service as daemon
from gpuguard.enforcement import preflight
daemon.clean_environment = lambda environ, root: None
preflight.driver_nodes = lambda devices: ()
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""
# The shortest times that are allowed take a minute and a half, in which nothing happens.
IMPATIENT = """
from gpuguard.policy_files import checks as policychecks
from gpuguard.enforcement import actions, guard_limits
from gpuguard.policies import engine, policy
policychecks.KILL_AFTER = policy.KILL_AFTER = engine.KILL_AFTER = guard_limits.KILL_AFTER = 1.0
actions.UNKILLABLE_SECONDS, guard_limits.BETWEEN_ACTIONS = 2.0, 0.5
"""
HEAD = "version: 1\nmode: enforce\ninterval: {shortest: 200ms, longest: 200ms}\n"


class DrivenDaemon(DaemonUnderTest):
    """As DaemonUnderTest, with `gpuguard` as it runs on a machine whose driver is the fake one."""

    def __init__(self, place: Path, fake: FakeNvml, before: str = "") -> None:
        super().__init__(place)
        self.before = before
        self.gpuguard.environment |= {**fake.environment(), "GPUGUARD_BACKEND": "nvml"}

    def start(self, *options: str, named: bool = True, under: Sequence[str] = (), **more: object) -> None:
        self.gpuguard.words = lambda *words: [sys.executable, "-c", self.before + COMMAND, *words]  # type: ignore[method-assign]
        options = "--enforce", "--i-share-host-pids", *options
        super().start(*options, named=named, under=under, **more)


@contextmanager
def driven(
    place: Path, fake: FakeNvml, policies: str, *options: str, under: Sequence[str] = (), before: str = ""
) -> Iterator[DrivenDaemon]:
    """A daemon that enforces *policies*: the further text of the file; *before*: Python that runs first."""
    daemon = DrivenDaemon(place, fake, before)
    daemon.policy.write_text(HEAD + policies)
    daemon.start(*options, under=under)
    with daemon.begun():
        yield daemon
