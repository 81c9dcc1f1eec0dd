"""One look at this machine with all that policies judge by, for a recording.  Judges nothing and writes nothing."""

from __future__ import annotations

from dataclasses import replace

from gpuguard.ancestry import look_up, stats_of
from gpuguard.backends import Backend
from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.claims.records import probe
from gpuguard.errors import ClaimError
from gpuguard.model import CLOCKS, ECC, WHO_FIELDS, Gap, Snapshot
from gpuguard.policies.view import View
from gpuguard.readings.hostuse import HostUses

FIELDS = WHO_FIELDS | {CLOCKS, ECC}  # what any rule can ask for


class Camera:
    """Looks again and again; rates are since the look before."""

    def __init__(self, backend: Backend, directory: LockDirectory | None) -> None:
        self._backend, self._directory, self._hosts = backend, directory, HostUses()

    def look(self) -> View:
        """The machine now.  Raises BackendError."""
        snapshot = self._with_claims(self._backend.sample(FIELDS))
        stats = stats_of({process.pid for device in snapshot.devices for process in device.processes or ()})
        host, groups = self._hosts.look(snapshot, stats), self._hosts.groups(snapshot)
        return View(snapshot, host=host, groups=groups, seen=look_up(snapshot, stats))

    def _with_claims(self, snapshot: Snapshot) -> Snapshot:
        try:
            if self._directory is None:
                raise ClaimError("no directory of claims can be read")
            claims = tuple(probe(self._directory, [device.uuid for device in snapshot.devices]))
        except (ClaimError, OSError) as error:
            gap = Gap(None, "claims", " ".join(str(error).split()))
            return replace(snapshot, gaps=(*snapshot.gaps, gap))
        return replace(snapshot, claims=claims)
