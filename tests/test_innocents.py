"""No innocent is hit: thousands of machines with hostile users, lying drivers and lost claims, under all rules at once.

Who is innocent is written at each process by the scene that starts it, never asked of the code under test.  A scene is
a few users with what they do; a machine is some scenes at once, disturbed by chance: garbled lists, pauses, suspend,
restarts of the guard, claims that cannot be read.  The guard enforces, and is real down to the system call: neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, MIB
from chances import luck, often
from neighbours import CULPRIT, INNOCENT, NAMELESS, SUBUIDS, UNCLEAR, Board, Machinery, furnish, pretended
from policies import good

from gpuguard import device_state
from gpuguard.backends import plausibility
from gpuguard.enforcement import identity, preflight
from gpuguard.errors import BackendError
from gpuguard.model import Snapshot
from gpuguard.policies import engine, usage
from gpuguard.policies.policy import Policy
from gpuguard.policies.view import Arrivals
from gpuguard.watchdog import Watchdog

SCENARIOS = often(400)
TICKS, INTERVAL = 36, 10.0
SHIPPED = Path(__file__).resolve().parent.parent / "packaging" / "policy.yaml"
# Each after some samples, with SIGKILL where SIGTERM does not help.
WHEN = {
    "unclaimed": "{unclaimed: {min_memory: 1GiB}}",
    "trespass": "{trespass: {}}",
    "users": "{users: {deny_groups: [staff]}}",
    "memory": "{memory: {above: 60GiB}}",
    "memory-of-user": "{memory: {above: 70GiB, per: user}}",
    "memory-of-claim": "{memory: {above: 70GiB, per: claim}}",
    "idle": "{idle: {below: 5%}}",
    "age": "{age: {run_time_above: 72h}}",
    "quota": "{quota: {devices: 2}}",
    "quota-of-group": "{quota: {devices: 3, shared_by: [students]}}",
    "processes": "{processes: {above: 6, per: user}}",
    "too-hot": "{temperature: {above: 95C, per: process}}",
    "expression": '{expression: {expr: "memory_used > 76GiB"}}',
}
HOLD = {"idle": "60s", "age": "30s"}
STEPS = "[warn, {after: 10s, do: terminate, even_if_innocent: true}, {after: 40s, do: kill, even_if_innocent: true}]"


def all_policies() -> tuple[Policy, ...]:
    own = "".join(
        f"  - {{name: {name}, when: {when}, for: {HOLD.get(name, '20s')}, steps: {STEPS}}}\n"
        for name, when in WHEN.items()
    )
    files = [good(f"version: 1\nmode: enforce\npolicies:\n{own}"), good(SHIPPED.read_text())]
    return tuple(replace(policy, enforce=True) for file in files for policy in file.policies)


ALL = all_policies()

# Scenes.  Each yields what happens next, with the tick at which it does.

Plot = Iterator[int]
Scene = Callable[[Machinery], Plot]
HOURS = 3600.0


def an_owner(machine: Machinery, scene: str) -> Board:
    """A GPU with a job of a user who has claimed it: innocent."""
    board, uid, age = machine.board(), machine.user(), machine.dice.uniform(1, 40) * HOURS
    job = machine.start(uid, INNOCENT, scene, {board: ("compute", 20 * GIB)}, age=age)
    machine.claim(uid, board, holders=[job], age=age + 60)
    return board


def owners(machine: Machinery) -> Plot:
    """Jobs under claims, nothing else."""
    for _ in range(machine.dice.randrange(1, 3)):
        an_owner(machine, "owners")
    yield 0


def a_later_claim(machine: Machinery) -> Plot:
    """A user claims the GPU of an older process, in whatever words, and gives that a descriptor of the lock."""
    board, dice = machine.board(), machine.dice
    voluntary = machine.start(machine.user(), INNOCENT, "a later claim", {board: ("compute", 900 * MIB)}, age=HOURS)
    yield dice.randrange(1, 6)
    hostile = machine.user()
    rows = {board: ("compute", 30 * GIB)} if dice.random() < 0.5 else {}
    job = machine.start(hostile, UNCLEAR, "a later claim", rows)
    holders = [job, voluntary] if dice.random() < 0.5 else [job]
    machine.claim(hostile, board, holders=holders, since=dice.choice([0.0, None, 4e9, 1.6e9]))
    yield dice.randrange(3, 5)
    machine.start(machine.user(), CULPRIT, "a newcomer", {board: ("compute", 5 * GIB)})
    yield dice.randrange(3, 9)
    if dice.random() < 0.5:  # the record is written anew, as if the claim were older
        machine.claims = [replace(each, since=0.0) if each.uid == hostile else each for each in machine.claims]


def a_copied_id(machine: Machinery) -> Plot:
    """A user over a limit has a record with the id of an innocent's claim, and the innocent among its holders."""
    board, own = an_owner(machine, "a copied id"), machine.board()
    innocent, claim = machine.all[-1], machine.claims[-1]
    uid = machine.user()
    hog = machine.start(uid, CULPRIT, "a copied id", {own: ("compute", 74 * GIB)}, age=HOURS)
    machine.claim(uid, own, holders=[hog, innocent], age=HOURS, id=claim.id)
    board.exact = False
    yield 0


def desktops(machine: Machinery) -> Plot:
    """Several users draw a little on the GPU of another's claim, and one draws more than a desktop does."""
    board, dice = an_owner(machine, "desktops"), machine.dice
    yield dice.randrange(1, 4)
    for _ in range(dice.randrange(1, 4)):
        uid = machine.user()
        kinds = [dice.choice(["graphics", "compute+graphics"]) for _ in range(dice.randrange(1, 4))]
        for kind in kinds:
            of = uid if dice.random() < 0.7 else SUBUIDS[uid]
            machine.start(of, INNOCENT, "a desktop", {board: (kind, 600 * MIB)})
    uid = machine.user()
    machine.start(uid, CULPRIT, "Vulkan", {board: (dice.choice(["graphics", "compute+graphics"]), 5 * GIB)})
    machine.start(uid, INNOCENT, "a desktop beside", {board: ("graphics", 500 * MIB)})


def at_the_seat(machine: Machinery) -> Plot:
    """3 GiB of graphics: of a person at the machine's own screen, and of a user over ssh."""
    board, dice = an_owner(machine, "at the seat"), machine.dice
    yield dice.randrange(1, 4)
    for seated, role in ((True, INNOCENT), (False, CULPRIT)):
        uid = machine.user(seated=seated)
        scope = dice.choice([f"user@{uid}.service/app.slice", f"session-{uid}.scope"])
        facts = {"cgroup": f"0::/user.slice/user-{uid}.slice/{scope}\n"}
        kind = dice.choice(["graphics", "compute+graphics"])
        machine.start(uid, role, "3 GiB of graphics", {board: (kind, 3 * GIB)}, facts=facts)


def display_servers(machine: Machinery) -> Plot:
    """3 GiB of one into which its user has brought nothing, and of one that only looks like it."""
    board, dice = an_owner(machine, "display servers"), machine.dice
    yield dice.randrange(1, 4)
    xorg: dict[str, Any] = {"executable": "/usr/lib/xorg/Xorg", "executable_owner": 0, "in_place": True}
    false: dict[str, Any] = dice.choice([{"foreign_code": "file"}, {"executable_owner": 31050}, {"in_place": False}])
    for role in (INNOCENT, CULPRIT):
        own = {**xorg, "foreign_code": "memory"} | (false if role == CULPRIT else {})
        machine.start(machine.user(), role, "a display server", {board: ("graphics", 3 * GIB)}, facts=own)


def a_server_of_roots(machine: Machinery) -> Plot:
    """Clients of several users of one MPS server: whom one takes along is innocent.  A plain process beside is not."""
    board = machine.board()
    machine.start(0, INNOCENT, "MPS of root", {board: ("compute", 30 * MIB)}, age=9 * HOURS,
                  facts={"executable": "/usr/bin/nvidia-cuda-mps-server"})  # fmt: skip
    owner = machine.user()
    job = machine.start(owner, INNOCENT, "MPS of root", {board: ("mps", 10 * GIB)}, age=5 * HOURS)
    machine.claim(owner, board, holders=[job], age=6 * HOURS)
    yield machine.dice.randrange(1, 5)
    machine.start(machine.user(), INNOCENT, "MPS of root", {board: ("mps", 10 * GIB)})
    machine.start(machine.user(), CULPRIT, "beside MPS", {board: ("compute", 12 * GIB)})


def a_server_of_ones_own(machine: Machinery) -> Plot:
    """A trespasser with an MPS server of their own; a claim's owner beside them."""
    board = an_owner(machine, "MPS of one's own")
    yield machine.dice.randrange(1, 5)
    uid = machine.user()
    server = {"executable": "/home/x/nvidia-cuda-mps-server"}
    machine.start(uid, CULPRIT, "MPS of one's own", {board: ("mps", 9 * GIB)})
    machine.start(uid, UNCLEAR, "MPS of one's own", {board: ("compute", 30 * MIB)}, facts=server)


def a_pid_used_again(machine: Machinery) -> Plot:
    """A trespasser ends between the decision and the signal, and a process of the claim's owner has their pid."""
    board = an_owner(machine, "a pid used again")
    owner = machine.all[-1]
    yield machine.dice.randrange(1, 5)
    culprit = machine.start(machine.user(), UNCLEAR, "a pid used again", {board: ("compute", 9 * GIB)})
    moment = machine.dice.choice(["before", "held", "asked", "read", "written"])

    def used_again() -> None:
        machine.end(culprit)
        machine.start(owner.uid, INNOCENT, f"a pid used again ({moment})", {board: ("compute", 9 * GIB)},
                      age=machine.dice.choice([0.0, 0.005]), pid=culprit.pid)  # fmt: skip

    machine.moments[moment, culprit.pid] = used_again


def rows_of_strangers(machine: Machinery) -> Plot:
    """Pids of another namespace, which here are processes that use no GPU; and rows of the dead, used again."""
    board, dice = an_owner(machine, "rows of strangers"), machine.dice
    lonely = machine.board()
    yield dice.randrange(0, 4)
    for where in (board, lonely):
        stranger = machine.start(machine.user(), INNOCENT, "a stranger's row", age=dice.choice([0.0, HOURS]))
        where.phantoms.append((stranger.pid, "compute", 9 * GIB))
    dead = machine.start(machine.user(), UNCLEAR, "dead", {board: ("compute", 4 * GIB)})
    yield 1
    machine.end(dead)  # a child of it holds the GPU: the row stays
    board.phantoms.append((dead.pid, "compute", 4 * GIB))
    machine.start(machine.user(), CULPRIT, "beside a dead row", {board: ("compute", 9 * GIB)})
    yield dice.randrange(1, 4)
    hides = dice.choice([{}, {"uses_driver": None, "hides": True}])
    machine.start(machine.user(), INNOCENT, "the pid of a dead row", pid=dead.pid, facts=hides)


def garbage(machine: Machinery) -> Plot:
    """A list that stays garbage: impossible pids beside those of jobs elsewhere, with more memory than is allowed."""
    board, elsewhere, dice = machine.board(), an_owner(machine, "garbage"), machine.dice
    job = machine.all[-1]
    yield dice.randrange(0, 4)
    bad = dice.choice([(0, 0), (2**32 - 1, 0), (2**34, 4096), (job.pid, 70 * GIB), (job.pid + 1, 2**45), (1, GIB)])
    board.garbage = [(job.pid, "compute", 70 * GIB), (bad[0], "compute", bad[1])]
    elsewhere.exact = True
    yield dice.randrange(8, 20)
    board.garbage = []


def uids_of_users(machine: Machinery) -> Plot:
    """Processes with sub-uids: of a claim's owner, and of a trespasser with many, who are one user."""
    board, other, dice = machine.board(), machine.board(), machine.dice
    owner, culprit = machine.user(), machine.user()
    files, runs = (owner, SUBUIDS[owner] + 7) if dice.random() < 0.5 else (SUBUIDS[owner] + 7, owner)
    job = machine.start(runs, INNOCENT, "sub-uids", {board: ("compute", 9 * GIB)}, age=HOURS)
    machine.claim(files, board, holders=[job] if dice.random() < 0.5 else [], age=2 * HOURS)
    yield dice.randrange(1, 5)
    for number in range(5):
        where = (board, other)[number % 2]
        machine.start(SUBUIDS[culprit] + number, CULPRIT, "sub-uids", {where: ("compute", (2 + number) * GIB)})


def nameless(machine: Machinery) -> Plot:
    """Ten uids without a name on the GPU of another's claim, of whom nothing is known, and a user who has one."""
    board = an_owner(machine, "nameless")
    yield machine.dice.randrange(1, 5)
    for number in range(10):
        machine.start(NAMELESS + number, INNOCENT, "nameless", {board: ("compute", 200 * MIB)})
    machine.start(machine.user(), CULPRIT, "beside the nameless", {board: ("compute", 30 * GIB)})


def six_tiny_ones(machine: Machinery) -> Plot:
    """Six tiny processes of one user, who is a trespasser, and a large one of another."""
    board, other = an_owner(machine, "six tiny ones"), an_owner(machine, "six tiny ones")
    yield machine.dice.randrange(1, 5)
    uid = machine.user()
    for _ in range(6):
        machine.start(uid, UNCLEAR, "tiny", {board: ("compute", 120 * MIB)})
    machine.start(machine.user(), CULPRIT, "beside six tiny ones", {other: ("compute", 40 * GIB)})


def unkillable(machine: Machinery) -> Plot:
    """A trespasser whom no signal ends, and another one beside."""
    board = an_owner(machine, "unkillable")
    yield machine.dice.randrange(1, 4)
    machine.start(machine.user(), CULPRIT, "unkillable", {board: ("compute", 9 * GIB)},
                  survives=frozenset(range(65)) - ({9} if machine.dice.random() < 0.5 else set()))  # fmt: skip
    machine.start(machine.user(), UNCLEAR, "beside the unkillable", {board: ("compute", 2 * GIB)})


def quotas(machine: Machinery) -> Plot:
    """A user with three claims, and a group that has one too many: the newest alone are in excess."""
    uid, dice = machine.user(), machine.dice
    for number in range(3):
        board = machine.board()
        role = CULPRIT if number == 2 else INNOCENT
        job = machine.start(uid, role, "quota", {board: ("compute", 9 * GIB)}, age=(9 - number) * HOURS)
        machine.claim(uid, board, holders=[job], age=(9 - number) * HOURS, since=dice.choice([0.0, None]))
    yield 0


def a_group(machine: Machinery) -> Plot:
    """A group with one GPU too many: the newest claim is in excess."""
    first, second = machine.user("students"), machine.user("students")
    for number, uid in enumerate((first, first, second, second)):
        board = machine.board()
        role = CULPRIT if number == 3 else INNOCENT
        job = machine.start(uid, role, "group", {board: ("compute", 9 * GIB)}, age=(9 - number) * HOURS)
        machine.claim(uid, board, holders=[job], age=(20 - number) * HOURS)
    yield 0


def limits(machine: Machinery) -> Plot:
    """One user each who is too long there, holds too much, rests, may not compute; and is hidden in /proc."""
    dice = machine.dice
    for kind in dice.sample(["age", "memory", "expression", "idle", "denied", "processes", "hidden"], 3):
        uid, board = machine.user("staff") if kind == "denied" else machine.user(), machine.board()
        age = {"age": 80 * HOURS}.get(kind, 3 * HOURS)
        if kind == "hidden":
            yield 1  # the guard has seen the list without it
            machine.start(uid, CULPRIT, kind, {board: ("compute", 9 * GIB)}, facts={"uses_driver": None, "hides": True})
            continue
        memory = {"memory": 65 * GIB, "expression": 77 * GIB, "processes": GIB}.get(kind, 9 * GIB)
        board.utilization = 0.0 if kind == "idle" else 80.0
        jobs = [
            machine.start(uid, CULPRIT if not number else UNCLEAR, kind, {board: ("compute", memory)}, age=age)
            for number in range(7 if kind == "processes" else 1)
        ]
        machine.claim(uid, board, holders=jobs, age=100 * HOURS)
    yield 0


def short_rests(machine: Machinery) -> Plot:
    """A job that rests before and after a pause of the guard: nobody knows what it did in between."""
    board = an_owner(machine, "short rests")
    board.exact = True
    while True:
        yield machine.dice.randrange(4, 8)
        board.utilization = 0.0
        yield 3
        board.utilization = 80.0


SCENES: tuple[Scene, ...] = (
    owners, a_later_claim, a_copied_id, desktops, at_the_seat, display_servers, a_server_of_roots, a_server_of_ones_own,
    a_pid_used_again, rows_of_strangers, garbage, uids_of_users, nameless, six_tiny_ones, unkillable, quotas, a_group,
    limits, short_rests,
)  # fmt: skip


def lost_claims(machine: Machinery) -> Plot:
    """The claims of ten users are lost, and come back."""
    for _ in range(10):
        an_owner(machine, "lost claims").exact = True
    yield machine.dice.randrange(2, 9)
    machine.claims_are = "lost"
    yield machine.dice.randrange(6, 20)
    machine.claims_are = "there"


def unreadable_claims(machine: Machinery) -> Plot:
    """Nobody can say for a while what is claimed."""
    an_owner(machine, "unreadable claims")
    yield machine.dice.randrange(2, 9)
    machine.claims_are = "unreadable"
    yield machine.dice.randrange(6, 20)
    machine.claims_are = "there"


def lying_sensors(machine: Machinery) -> Plot:
    """A sensor says the same wrong thing of five users at once."""
    boards = [an_owner(machine, "lying sensors") for _ in range(5)]
    for board in boards:
        board.exact = True
    yield machine.dice.randrange(2, 9)
    name, lie, truth = machine.dice.choice([("utilization", 0.0, 80.0), ("temperature", 99.0, 60.0)])
    for value in (lie, truth):
        for board in boards:
            setattr(board, name, value)
        yield machine.dice.randrange(8, 20)


EVERYWHERE: tuple[Scene | None, ...] = (None, None, None, lost_claims, unreadable_claims, lying_sensors)
PAUSES = [INTERVAL] * 60 + [2.0, 25.0, 45.0, 400.0, 700.0]


def play(seed: int, place: Path, scene: Scene | None = None) -> Machinery:
    """One machine, from its first look to its last; with that *scene* alone, or with some by chance."""
    dice = luck(seed)
    machine, shown = Machinery(dice), list[Snapshot]()
    with pretended(machine, place):
        chosen = [*dice.sample(SCENES, dice.randrange(1, 4)), *filter(None, [dice.choice(EVERYWHERE)])]
        plots = [(0, each(machine)) for each in ([scene] if scene else chosen)]
        guard = a_guard(machine, shown)
        for tick in range(TICKS):
            plots = [later for due, plot in plots for later in advanced(tick, due, plot)]
            with a_disturbance(machine):
                if dice.random() < 0.03:
                    guard = a_guard(machine, shown)
                with suppress(BackendError):
                    guard.step()
    return machine


def advanced(tick: int, due: int, plot: Plot) -> list[tuple[int, Plot]]:
    """*plot* with the tick at which it goes on; empty when it is over."""
    if due > tick:
        return [(due, plot)]
    pause = next(plot, None)
    return [] if pause is None else [(tick + pause, plot)] if pause else advanced(tick, tick, plot)


def a_guard(machine: Machinery, shown: list[Snapshot]) -> Watchdog:
    """One that begins now; sometimes it knows what the one before saw last."""
    guard = Watchdog(
        machine, ALL, enforce=True, append=machine.append, interval=(INTERVAL, INTERVAL), share_host_pids=True,
        on_sample=lambda snapshot, pause: shown.append(snapshot),
    )  # fmt: skip
    if shown and machine.dice.random() < 0.5:
        guard.remember((), shown[-1])
    return guard


@contextmanager
def a_disturbance(machine: Machinery) -> Iterator[None]:
    """The time until the next look, and what goes wrong at that look."""
    dice = machine.dice
    asleep = dice.random() < 0.01
    machine.wait(5000.0 if asleep else dice.choice(PAUSES), asleep=asleep)
    machine.silent = dice.random() < 0.02
    claims_are, unreadable = machine.claims_are, dice.random() < 0.02
    if unreadable:
        machine.claims_are = "unreadable"
    garbled = [board for board in machine.boards if not (board.exact or board.garbage) and dice.random() < 0.02]
    for board in garbled:
        pid = dice.choice(sorted(machine.living) or [1])
        board.garbage = [(dice.choice([0, 2**32 - 1]), "compute", 0), (pid, "compute", 70 * GIB)]
    yield
    if unreadable:
        machine.claims_are = claims_are
    for board in garbled:
        board.garbage = []


@dataclass
class Tally:
    """What became of everybody."""

    scenarios: int = 0
    events: Counter[str] = field(default_factory=Counter)
    signals: int = 0
    innocents: int = 0
    innocents_hit: list[str] = field(default_factory=list)  # in which run, and in which scene
    culprits: Counter[str] = field(default_factory=Counter)  # by scene
    culprits_hit: Counter[str] = field(default_factory=Counter)

    def take(self, seed: int, machine: Machinery) -> None:
        self.scenarios += 1
        self.events += machine.events
        self.signals += len(machine.hits)
        for actor in machine.all:
            if actor.role == INNOCENT:
                self.innocents += 1
                self.innocents_hit += [f"run {seed}: {actor.scene}"] if actor.signals else []
            elif actor.role == CULPRIT:
                self.culprits[actor.scene] += 1
                self.culprits_hit[actor.scene] += bool(actor.signals)

    def __str__(self) -> str:
        hit, all_of_them = self.culprits_hit.total(), self.culprits.total()
        return (
            f"{self.scenarios} machines, {self.events.total()} events, {self.signals} signals, "
            f"{len(self.innocents_hit)} of {self.innocents} innocents hit, {hit} of {all_of_them} culprits hit"
        )


def campaign(scenarios: int, place: Path, first: int = 0, scene: Scene | None = None) -> Tally:
    tally = Tally()
    for seed in range(first, first + scenarios):
        tally.take(seed, play(seed, place, scene))
    return tally


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    furnish(made := tmp_path_factory.mktemp("machine"))
    return made


def test_no_innocent_is_hit_and_most_culprits_of_every_kind_are(place: Path) -> None:
    tally = campaign(SCENARIOS, place)

    print(tally)
    assert tally.innocents_hit == []
    assert tally.culprits_hit.total() > 0.6 * tally.culprits.total(), (tally.culprits, tally.culprits_hit)
    assert not [scene for scene, count in tally.culprits.items() if count >= 10 and not tally.culprits_hit[scene]]


@pytest.mark.parametrize("spared", ["a display server", "a stranger's row"])
def test_who_is_spared_is_no_shelter_for_others_on_the_same_gpu(
    place: Path, monkeypatch: pytest.MonkeyPatch, spared: str
) -> None:
    without_kill = tuple(replace(policy, steps=policy.steps[:2]) for policy in ALL)
    monkeypatch.setattr("test_innocents.ALL", without_kill)  # the ladder begins again before an effect is given up
    machine = Machinery(luck(spared))
    with pretended(machine, place):
        board, guard = an_owner(machine, "owners"), a_guard(machine, [])
        guard.step()
        machine.wait(INTERVAL)
        if spared == "a display server":
            facts = {"executable": "/usr/lib/xorg/Xorg", "foreign_code": "memory"}
            machine.start(machine.user(), INNOCENT, spared, {board: ("graphics", 9 * GIB)}, facts=facts)
        else:
            board.phantoms = [(machine.start(machine.user(), INNOCENT, spared).pid, "compute", 9 * GIB)]
        culprit = machine.start(machine.user(), CULPRIT, "beside", {board: ("compute", 5 * GIB)})
        for _ in range(25):
            machine.wait(INTERVAL)
            guard.step()

    assert {actor for actor, _ in machine.hits} == {culprit}


def off(*checks: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Without these checks before a signal."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for name in checks:
            patch.setitem(preflight.LATE, name, preflight.PreflightCheck(lambda target: None))

    return plant


def put(where: object, name: str, broken: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, broken)


def no_breaker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("test_innocents.ALL", tuple(replace(policy, at_most_users=1000) for policy in ALL))


def every_pause_counts(patch: pytest.MonkeyPatch) -> None:
    for name in ("stop_clocks", "start_anew"):
        patch.setattr(engine.EngineMemory, name, lambda *_: None)


PLANTED: dict[str, tuple[Scene, Callable[[pytest.MonkeyPatch], None]]] = {
    "who was there first is a trespasser": (a_later_claim, put(Arrivals, "was_there_before", lambda *_: False)),
    "no graphics are a desktop": (desktops, put(device_state, "desktop_limit", lambda *_: 0)),
    "no one sits at the machine": (at_the_seat, put(identity, "is_at_the_seat", lambda facts: False)),
    "no program is the system's": (display_servers, put(identity, "belongs_to_the_system", lambda *_: False)),
    "MPS clients are like others": (a_server_of_roots, put(preflight, "MPS_SERVER", "none")),
    "claims are lost, and no breaker": (lost_claims, no_breaker),
    "sensors lie, and no breaker": (lying_sensors, no_breaker),
    "unreadable claims are no claims": (unreadable_claims, put(usage, "claims_readable", lambda snapshot: True)),
    "garbled lists are believed": (garbage, put(plausibility, "implausibility", lambda *_, **__: None)),
    "a pid is a process": (a_pid_used_again, off("start time", "sample time", "listed", "owner", "rule")),
    "who does not use the driver is on the GPU": (rows_of_strangers, off("driver")),
    "users without a name": (nameless, off("owner")),
    "all time counts": (short_rests, every_pause_counts),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_protection_that_is_missing_is_noticed(place: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    scene, plant = PLANTED[fault]
    plant(monkeypatch)

    assert any(campaign(10, place, first, scene).innocents_hit for first in range(0, 200, 10))
