"""Where `gpuguard top` gets its scenes from: what the daemon saw while that is fresh, else the driver.

The driver is asked in a process of its own, which is copied off before any thread is started.  Every call here may
take seconds, when a driver hangs: top_app makes them in a thread.  Draws nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuguard import history
from gpuguard.actions import Outcome
from gpuguard.ancestry import look_up
from gpuguard.backends import Backend
from gpuguard.backends.processes import read_memory
from gpuguard.byhand import Hand, signal_process
from gpuguard.claims.lookout import Lookout
from gpuguard.cli import mark_options, top_rota
from gpuguard.cli.looking import of_daemon
from gpuguard.cli.options import directory_of
from gpuguard.errors import GpuguardError
from gpuguard.guards.identity import Protected
from gpuguard.guards.ledger import Ledger
from gpuguard.model import Seen, Snapshot
from gpuguard.readings.hostuse import HostUses
from gpuguard.views.top_scene import Ancestor, Identity, Scene, Thresholds, Waits
from gpuguard.views.usage import uses

POLICY_FILE = "/etc/gpuguard/policy.yaml"
LINE_SECONDS = 5.0  # a plan of the waiting line costs more than a look, and changes slowly


class Feed:
    """Looks at the machine again and again; used by one thread at a time.

    Args:
        args: with backend, dir, fresh.
        opened: opens the backend, at the first look that needs the driver.
    """

    def __init__(self, args: argparse.Namespace, opened: Callable[[], Backend]) -> None:
        self._args, self._open = args, opened
        self.fresh: bool = args.fresh
        self.tree: bool = args.tree
        self._backend: Backend | None = None
        self._former: Snapshot | None = None  # of the driver
        self._looks = 0
        self._lookout = Lookout()
        self._host = HostUses()
        self._line: tuple[float, tuple[Waits, ...]] = (float("-inf"), ())
        self._ledger = Ledger()
        self._ancestors: dict[Identity, Ancestor] = {}
        self._thresholds, self._protected = site_rules(POLICY_FILE)

    def look(self) -> Scene:
        """The machine now.  Raises GpuguardError when neither the daemon nor the driver tells."""
        from gpuguard.cli import who

        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        snapshot = None if self.fresh else of_daemon(self._args, clock)
        age = clock - snapshot.clock if snapshot else None
        snapshot = who.with_claims(self._args, snapshot or self._drivers(), self._lookout)
        if snapshot.recorded:
            return Scene(snapshot, uses(snapshot), thresholds=self._thresholds)
        seen = look_up(snapshot)
        # The daemon's look may be the same as before: rates need the time of ours.
        host = self._host.look(replace(snapshot, clock=time.clock_gettime(time.CLOCK_BOOTTIME)))
        return Scene(
            snapshot,
            uses(snapshot, seen),
            host,
            self._waiting(snapshot),
            self._above(seen) if self.tree else {},
            age,
            os.getloadavg()[0],
            self._thresholds,
        )

    def send(self, action: str, process: Identity, devices: tuple[str, ...]) -> Outcome:
        """Signal a process by hand.  Raises GpuguardError when the driver cannot be asked about it."""
        mark_options.choose_log(self._args)
        hand = Hand(self._driver(), history.append, self._ledger, self._protected)
        return signal_process(hand, action, process, devices)

    def close(self) -> None:
        """Let go of the driver."""
        if self._backend:
            self._backend.close()

    def _driver(self) -> Backend:
        if self._backend is None:
            self._backend = self._open()
        return self._backend

    def _drivers(self) -> Snapshot:
        before, driver, read = self._former, self._driver(), top_rota.groups(self._former)
        self._looks += 1
        try:
            now = top_rota.merged(before, driver.sample(read), read)
            if before and (turn := top_rota.turn(self._looks, now)):
                now = top_rota.refreshed(now, driver.sample(top_rota.IN_TURNS, turn))
            self._former = now
        except GpuguardError:
            self._former = None  # once it answers again, everything is read anew
            raise
        return self._former

    def _waiting(self, snapshot: Snapshot) -> tuple[Waits, ...]:
        """Who waits, in order, and when each is expected to start."""
        if snapshot.clock - self._line[0] >= LINE_SECONDS or snapshot.clock < self._line[0]:
            self._line = snapshot.clock, self._planned(snapshot)
        return self._line[1]

    def _planned(self, snapshot: Snapshot) -> tuple[Waits, ...]:
        from gpuguard.line.tickets import read_tickets

        try:
            directory = directory_of(self._args)
            if not read_tickets(directory)[0]:
                return ()
            from gpuguard.line.file import read_line_file
            from gpuguard.line.turn import in_words, stand

            line = stand(directory, snapshot, read_line_file().rules)
        except (GpuguardError, OSError):
            return ()  # the claims are missing too, and that is said
        tickets = [(place.ticket, in_words(place, line)) for place in line.places]
        return tuple(Waits(one.user, one.num_gpus, one.since, when, one.note) for one, when in tickets)

    def _above(self, seen: Mapping[int, Seen | None]) -> dict[int, Ancestor]:
        """Every process that was looked up, with its command; read once per process."""
        from gpuguard.users import user_name

        found: dict[int, Ancestor] = {}
        kept: dict[Identity, Ancestor] = {}
        for pid, process in seen.items():
            if process is None or process.start_time is None:
                continue
            identity = (pid, process.start_time)
            known = self._ancestors.get(identity)
            if known is None:
                words = (read_memory(int(pid), "cmdline") or b"").rstrip(b"\0")
                command = (
                    tuple(word.decode("utf-8", "surrogateescape") for word in words.split(b"\0")) if words else None
                )
                try:
                    user = user_name(os.stat(f"/proc/{pid}").st_uid)
                except OSError:
                    user = None
                known = Ancestor(process.parent, user, command)
            kept[identity] = found[pid] = Ancestor(process.parent, known.user, known.command)
        self._ancestors = kept
        return found


def site_rules(path: str) -> tuple[Thresholds, Protected]:
    """What the site's policies find too much, and whom they never touch; nothing of both where we may not read them."""
    if not os.access(path, os.R_OK):
        return Thresholds(), Protected()
    from gpuguard.policies.memory import Memory
    from gpuguard.policies.power import Power
    from gpuguard.policies.temperature import Temperature
    from gpuguard.policyfile import load_policies

    file = load_policies(path)
    rules = [rule for policy in file.policies for rule in policy.rules]
    power = [rule.above for rule in rules if isinstance(rule, Power)]
    memory = [rule.above for rule in rules if isinstance(rule, Memory) and not rule.above.promised]
    return (
        Thresholds(
            temperature=min((rule.above for rule in rules if isinstance(rule, Temperature)), default=None),
            power=min((one.value for one in power if not one.relative), default=None),
            power_share=min((one.value / 100 for one in power if one.relative), default=None),
            memory=min((one.value for one in memory if not one.relative), default=None),
            memory_share=min((one.value / 100 for one in memory if one.relative), default=None),
        ),
        file.protected,
    )
