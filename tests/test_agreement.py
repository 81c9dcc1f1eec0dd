"""explain, queue, run --no-wait, select and grab_gpus agree on random machines and requests.

Whether the request starts, waits or can never be met, on which devices, and what speaks first against each other one.
What the commands call is called, on a driver that tells no more than it is asked; a few machines see the real commands.
`GPUGUARD_CHANCE=1 pytest tests/test_agreement.py` looks at 5,000 machines.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, MIB, Reticent
from chances import IN_CAMPAIGNS, NUMBER, luck
from claimholders import a_ready_child
from nodes import Gpuguard, a_user, change, start, until
from random_machines import a_random_machine
from users import ALICE, BOB

import gpuguard
from gpuguard.claims import restrictions
from gpuguard.claims.claim import JobDetails
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.claims.records import slot_names
from gpuguard.cli import build_parser
from gpuguard.cli.options import request_of
from gpuguard.cli.run import wait_for_claim
from gpuguard.clusters.device_variables import Outer, outer_devices
from gpuguard.errors import ImpossibleRequest, InvalidRequest, NotEnoughGpus
from gpuguard.model import HEALTH, MEMORY, MODEL, THERMAL, UTILIZATION, Device, Snapshot
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.reservations import remove_reservation, write_reservation
from gpuguard.queue.tickets import OwnTicket, new_ticket, ticket_content
from gpuguard.request import Request, spelled
from gpuguard.select import Choice, not_enough
from gpuguard.source import SnapshotSource
from gpuguard.top.scene import ScreenView
from gpuguard.top.scene_source import SceneFeed
from gpuguard.views.who import LABELS
from gpuguard.web.feed import FrameFeed

MACHINES = 5000 if NUMBER else 60
REAL = 40 if NUMBER else 4  # of the real commands
OWNERS = (os.geteuid(), ALICE.pw_uid, BOB.pw_uid) if os.geteuid() == 0 else (os.geteuid(),) * 3
pytest.importorskip("textual")
from gpuguard.top.app import Board, Top  # noqa: E402

# Holds the claims that it is told to, until it is told others.
HOLD = """
import json, os, socket, sys
from gpuguard.claims.claim import Claim, JobDetails, lock_parts
from gpuguard.claims.directory import lock_directory
from gpuguard.model import Device
from gpuguard.request import Request
if (uid := int(sys.argv[2])) != os.geteuid():
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
directory, claims, flights = lock_directory(sys.argv[1]), [], []
while True:
    print("ready", flush=True)
    told = json.loads(sys.stdin.readline())
    for held in (*claims, *flights):
        held.release() if isinstance(held, Claim) else held.close()
    claims, flights = [], []
    for name, kind, memory, devices in told:
        request = Request(share=memory is not None, memory=memory)
        parts = [(device := Device(**facts), lock_parts(directory, device, request, None)) for facts in devices]
        devices = tuple(device for device, locks in parts if locks)
        claim = Claim(name, devices, tuple(lock for _, locks in parts for lock in locks or ()), memory=memory)
        claims.append(claim)
        if kind == "recorded" and devices:
            claim.write_record(directory, JobDetails("a note", ["python"]))
        if kind == "in flight" and devices:
            flights += (ends := socket.socketpair())
            socket.send_fds(ends[0], [b"x"], [lock.descriptor for lock in claim.locks])
            for lock in claim.locks:
                os.close(lock.descriptor)
            claims.remove(claim)
"""


# What is told only where its group is asked for, beside what Reticent keeps to itself.
UNASKED = {UTILIZATION: ("utilization",), THERMAL: ("temperature",), MODEL: ("name",)}


class Driver(Reticent):
    """What a command gets for a worker."""

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        snapshot = super().sample(fields, devices)
        unread = {name: None for group, names in UNASKED.items() if group not in fields for name in names}
        told = tuple(replace(device, **unread) for device in snapshot.devices)
        return replace(snapshot, devices=told, taken_at=time.time())

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass
class Site:
    """A claim directory, three users who claim in it, and what the commands find there."""

    directory: LockDirectory
    holders: list[subprocess.Popen[str]]
    command: Callable[..., tuple[int, str, str]]

    def hold(self, number: int, claims: list[Any]) -> None:
        """Let user *number* hold these and no others."""
        holder = self.holders[number]
        assert holder.stdin and holder.stdout
        holder.stdin.write(json.dumps(claims) + "\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "ready\n"

    @contextmanager
    def with_machine(self, seed: int, *, limits: bool = True) -> Iterator[tuple[Driver, Request]]:
        """Machine *seed* with its claims, restrictions, reservations and outer *limits*, and a request."""
        snapshot, _ = a_random_machine(seed)
        dice = luck(f"request {seed}")
        driver = Driver(*(_calmed(device) if dice.random() < 0.5 else device for device in snapshot.devices))
        devices = {device.uuid: device for device in snapshot.devices}
        own: list[str] = []
        told: list[list[Any]] = [[], [], []]
        for number, record in enumerate(snapshot.claims if dice.random() < 0.6 else ()):
            owner, kind = dice.randrange(3), dice.choice(("recorded",) * 4 + ("without a record", "in flight"))
            memory = dice.choice((None, None, 10 * GIB, 30 * GIB))
            names = [_identity(devices[uuid]) for uuid in record.devices]
            told[owner].append((f"c0ffee{number:02}", kind, memory, names))
            own += [f"c0ffee{number:02}"] if owner == 0 and kind == "recorded" else []
        for uuid in devices:
            for name in (uuid, *slot_names(uuid)):
                os.close(open_lock(self.directory, name))  # other users make none
        with ExitStack() as stack:
            for number, claims in enumerate(told):
                self.hold(number, claims)
                stack.callback(self.hold, number, [])
            for uuid, _ in snapshot.quarantined:
                self.restrict(stack, restrictions.QUARANTINED, uuid)
            if limits and dice.random() < 0.05:
                self.restrict(stack, restrictions.DENIED, str(os.geteuid()))
            if snapshot.reserved:
                self.reserve(stack, dice, [uuid for uuid, _ in snapshot.reserved])
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in _outer(dice, snapshot.devices, own).items() if limits else ():
                patch.setenv(name, value)
            for opener in ("gpuguard.cli.options.open_worker", "gpuguard.api.open_worker"):
                patch.setattr(opener, lambda *_, **__: driver)
            yield driver, _a_request(dice, snapshot.devices)

    def restrict(self, stack: ExitStack, kind: str, name: str) -> None:
        """Until *stack* is left."""
        restriction = restrictions.Restriction(name, time.time(), reason="tested")
        restrictions.change(self.directory, kind, lambda known: known.update({name: restriction}))
        stack.callback(restrictions.change, self.directory, kind, lambda known: known.pop(name, None))

    def reserve(self, stack: ExitStack, dice: random.Random, uuids: list[str]) -> None:
        """These for another user, or for this one, until *stack* is left."""
        now, uid = time.time(), dice.choice((ALICE.pw_uid, ALICE.pw_uid, os.geteuid()))
        begins = now + dice.choice((-60.0, -60.0, 600.0))
        wanted = Reservation("", os.geteuid(), uid, "alice", len(uuids), begins, now + 3600.0, tuple(uuids))
        stack.callback(remove_reservation, self.directory, write_reservation(self.directory, wanted))


def _calmed(device: Device) -> Device:
    """The same device healthy and idle: else hardly a request could start."""
    idle: dict[str, Any] = {"memory_used": 4 * MIB, "memory_free": (device.memory_total or 0) - 4 * MIB}
    idle |= {
        "utilization": 0.0,
        "processes": (),
        "processes_plausible": True,
        "problems": (),
        "compute_mode": "default",
    }
    return replace(device, **idle)


def _identity(device: Device) -> dict[str, Any]:
    return {"index": device.index, "uuid": device.uuid, "parent_uuid": device.parent_uuid}


def _outer(dice: random.Random, devices: tuple[Device, ...], own: list[str]) -> dict[str, str]:
    """What limits the command: mostly nothing."""
    named = dice.choice(devices)
    limits: list[dict[str, str]] = [
        {"CUDA_VISIBLE_DEVICES": named.uuid},
        {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in dice.sample(range(4), dice.randrange(4)))},
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": str(named.index)},
        *({"GPUGUARD_CLAIM": claim} for claim in own),
    ]
    return dice.choice([{}] * 2 * len(limits) + limits)


def _a_request(dice: random.Random, devices: tuple[Device, ...]) -> Request:
    def some(*values: Any, often: float = 0.1) -> Any:
        return dice.choice(values) if dice.random() < often else None

    named = dice.sample(devices, dice.randrange(1, len(devices) + 1))
    selectors = tuple(dict.fromkeys(dice.choice((d.label, d.uuid, str(d.index), d.uuid[:12])) for d in named))
    selectors = ("9",) if dice.random() < 0.05 else selectors
    memory = some(GIB, 20 * GIB, 50 * GIB, often=0.25)
    chosen = some("devices", "exclude", "prefer", often=0.3)
    number = dice.choice((1, 1, 1, 2, 3))
    conditions = {
        "min_free": some(20 * GIB, 60 * GIB, 90 * GIB),
        "min_total": some(40 * GIB, 90 * GIB),
        "max_util": some(0.0, 10.0),
        "max_temperature": some(30.0, 60.0),
        "max_processes": some(0, 1, 2),
        "mig": some("3g.40gb", "1g.10gb"),
        "strategy": some("pack", "first"),
        "tolerance": some(0, 2 * GIB),
        "models": some(("H100",), ("A100*",)),
        "allow_mig_set": some(True, often=0.5),
        "mine_as_free": some(frozenset({os.getuid()})),
        "slots": some(2, 3) if memory else None,
        "memory": memory,
        "share": True if memory else None,
        chosen: selectors if chosen else None,
    }
    given = {name: value for name, value in conditions.items() if value is not None and name is not None}
    return Request(num_gpus=min(number, len(selectors)) if chosen == "devices" else number, **given)


Said = tuple[str, tuple[str, ...], Any]  # what becomes of it, the devices, device -> the first reason against it
INVALID, START, WAIT, NEVER = "invalid", "start", "wait", "never"


def explained(site: Site, words: list[str]) -> tuple[str, tuple[str, ...], dict[str, list[str]]]:
    """As explain says it: with all reasons."""
    status, out, _ = site.command("explain", "--json", *words)
    if status == 2:
        return INVALID, (), {}
    said = json.loads(out)
    assert (status == 0) == (said["outcome"] == START)
    return said["outcome"], tuple(said["chosen"]), {row["uuid"]: row["reasons"] for row in said["devices"]}


def selected(site: Site, words: list[str]) -> tuple[str, tuple[str, ...], list[str]]:
    """As select says it: without the reasons of single devices, but with the lines of the error."""
    status, out, error = site.command("select", "--json", *words)
    if status:
        return (INVALID if status == 2 else WAIT), (), error.removeprefix("gpuguard: ").splitlines()
    return START, tuple(device["uuid"] for device in json.loads(out)["devices"]), []


def claimed(claim: Callable[[], Any]) -> tuple[str, tuple[str, ...], dict[str, str], list[str]]:
    """What becomes of a real claim: with the first reasons, and the lines of the error."""
    try:
        with claim() as held:
            return START, tuple(device.uuid for device in held), {}, []
    except InvalidRequest as error:
        return INVALID, (), {}, str(error).splitlines()
    except NotEnoughGpus as error:
        kind = NEVER if isinstance(error, ImpossibleRequest) else WAIT
        first = {refusal.device.uuid: refusal.reasons[0].text for refusal in error.refused}
        return kind, (), first, str(error).splitlines()


def queued(site: Site, driver: Driver, request: Request) -> dict[str, Any]:
    """The position in an empty queue of a process that waits within the same limits."""
    limits = outer_devices(os.environ, driver.devices)
    if limits.uuids is not None:
        request = replace(request, within=limits.uuids, within_reason=limits.reason)
    ticket = OwnTicket(site.directory, ticket_content(new_ticket([request])))
    try:
        [position] = json.loads(site.command("queue", "--json")[1])["places"]
    finally:
        ticket.withdraw()
    return dict(position)


def ageless(texts: Any) -> Any:
    """Without ", 2s ago", which may be 3 a moment later."""
    if isinstance(texts, str):
        return re.sub(r", \d+s ago", "", texts)
    if isinstance(texts, Mapping):
        return {name: ageless(text) for name, text in texts.items()}
    return [ageless(text) for text in texts]


def check(site: Site, seed: int) -> str:
    """What all say of machine *seed*."""
    with site.with_machine(seed) as (driver, request):
        words = shlex.split(spelled(request))
        args = build_parser("run").parse_args([*words, "--no-wait", "--", "true"])
        assert request_of(args) == request
        outcome, chosen, reasons = explained(site, words)
        against = {uuid: ageless(texts) for uuid, texts in reasons.items() if texts}
        first = {uuid: texts[0] for uuid, texts in against.items()}

        said, devices, lines = selected(site, words)
        assert (said, devices) == (WAIT if outcome == NEVER else outcome, chosen), ("select", lines, against)
        conditions = {name: value for name, value in vars(request).items() if value != vars(Request())[name]}
        ways: dict[str, Callable[[], Any]] = {
            "run": lambda: wait_for_claim(args, driver, site.directory, [request], JobDetails(), 0.0),
            "grab_gpus": lambda: gpuguard.claim(**conditions),
        }
        for name, way in ways.items():  # "queue": a run says where it would stand, if there is one
            said, devices, found, errors = claimed(way)
            assert (said, devices) == (outcome, chosen), (name, said, devices, errors, against)
            if said == WAIT:
                assert ageless(found) == first, (name, ageless(found), first)
            assert not found or all(ageless(text) in against[uuid] for uuid, text in found.items()), (name, found)
            assert "queue" in "".join(errors[:1]) or errors[:1] == lines[:1], (name, errors, lines)
        if "GPUGUARD_CLAIM" not in os.environ and outcome != INVALID:
            position = queued(site, driver, request)
            says = START if position["starts_now"] else NEVER if "no GPUs" in position["why"] else WAIT
            is_denied = "new claims of" in position["why"]
            assert says == outcome or (is_denied and outcome != START), ("queue", position["why"], outcome, against)
            assert says != START or not first.keys() & set(position["devices"]), ("queue", position["devices"], first)
            if kept := re.search(r"unknown|GPU \S+?: (.*)", position["why"]):
                assert kept[1] is None or any(kept[1] in texts for texts in reasons.values()), position["why"]
        return outcome


@pytest.fixture
def site(open_place: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    directory = lock_directory(str(open_place / "claims"))
    monkeypatch.setenv("GPUGUARD_DIR", directory.path)
    with ExitStack() as stack:
        words = [[sys.executable, "-c", HOLD, directory.path, str(uid)] for uid in OWNERS]
        holders = [stack.enter_context(a_ready_child(line)) for line in words]
        yield Site(directory, holders, command)


def check_all(site: Site, seeds: range, checked: Callable[[Site, int], Any] = check) -> set[Any]:
    outcomes = set()
    for seed in seeds:
        try:
            outcomes.add(checked(site, seed))
        except AssertionError as error:
            raise AssertionError(f"machine {seed}: {error}") from error
    return outcomes


@pytest.mark.root
def test_explain_queue_run_select_and_grab_gpus_agree_on_random_machines(site):
    assert check_all(site, range(NUMBER, NUMBER + MACHINES)) == {INVALID, START, WAIT, NEVER}


def nothing(*_: object, **__: object) -> dict[str, str]:
    return {}


def reversed_reasons(snapshot: Snapshot, request: Request, choice: Choice) -> NotEnoughGpus:
    refused = (replace(refusal, reasons=refusal.reasons[::-1]) for refusal in choice.refused)
    return not_enough(snapshot, request, replace(choice, refused=tuple(refused)))


FAULTS = {
    "select and explain see no claim": ("gpuguard.lock.claimed_by", nothing),
    "the queue sees no claim": ("gpuguard.queue.state.claimed_by", nothing),
    "all but the queue see no restriction": ("gpuguard.lock.restrictions_against", nothing),
    "CUDA_VISIBLE_DEVICES does not count": ("gpuguard.lock.outer_devices", lambda *_: Outer()),
    "explain never says never": ("gpuguard.views.explain.outcome", lambda *said: START if said[2].devices else WAIT),
    "a claim is refused for another reason": ("gpuguard.lock.not_enough", reversed_reasons),
}


@pytest.mark.root
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=IN_CAMPAIGNS if place % 2 else ()) for place, name in enumerate(FAULTS)]
)
def test_a_command_that_disagrees_is_found(site, monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])

    with pytest.raises(AssertionError, match="machine"):
        check_all(site, range(MACHINES))


STATES = 200 if NUMBER else 12  # machines


def by_metrics(site: Site) -> dict[str, str]:
    """uuid -> state, as it is scraped."""
    lines = re.findall(r"gpuguard_device_state\{(.*)\} 1(?:\.0)?$", site.command("metrics")[1], re.MULTILINE)
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    return {label["uuid"]: label["state"] for label in labels}


async def by_the_page(driver: Driver, directory: LockDirectory) -> dict[str, str]:
    """uuid -> state, as /api/now serves it."""
    source = SnapshotSource("machine", lambda: driver, lambda: directory)
    feed = FrameFeed(source, source, directory, lambda labels: ())
    running = asyncio.create_task(feed.run())
    frame = json.loads((await feed.next(0)).text)
    running.cancel()
    feed.close()
    return {row["uuid"]: row["exact_state"] for row in frame["devices"]}


async def by_top(driver: Driver, directory: LockDirectory) -> list[str]:
    """The lines that textual draws."""
    feed = SceneFeed("machine", lambda: driver, lambda: directory, lambda: None)
    top = Top(feed, ScreenView(mode="compact"), feed.sample(), 60.0)
    async with top.run_test(size=(240, 60)) as pilot:
        await pilot.pause()
        return [line.text for line in top.query_one(Board).lines]


def check_states(site: Site, seed: int) -> None:
    with site.with_machine(seed, limits=False) as (driver, _):
        told = json.loads(site.command("who", "--json")[1])["devices"]
        states = {row["uuid"]: row["exact_state"] for row in told}
        explained = json.loads(site.command("explain", "--json")[1])["devices"]
        reasons = {row["uuid"]: " ".join(row["reasons"]) for row in explained}
        screens = {"who": site.command("who")[1].splitlines(), "top": asyncio.run(by_top(driver, site.directory))}

        assert asyncio.run(by_the_page(driver, site.directory)) == states
        assert by_metrics(site) == {row["uuid"]: row["state"] for row in told}
        for row in told:
            for name, lines in screens.items():
                words = LABELS[row["exact_state"]][0]
                assert any(line.split()[:1] == [row["label"]] and words in line for line in lines), (name, words, lines)
            state, why = row["exact_state"], reasons[row["uuid"]]
            free = not why or "'s reservation from" in why
            could = {"free": free, "asleep": free, "reserved": True}.get(state, why != "")
            assert could, ("explain", state, why)


@pytest.mark.root
def test_who_top_the_page_metrics_json_and_explain_agree_on_the_state_of_each_device(site):
    check_all(site, range(NUMBER, NUMBER + STATES), check_states)


ALL_FREE = dict.fromkeys(LABELS, ("free", ""))


@pytest.mark.root  # some machines have reservations for others
@pytest.mark.parametrize(
    ("name", "copy"),
    [("top.devices.LABELS", ALL_FREE), ("views.who.LABELS", ALL_FREE), ("lock.claimed_by", nothing)],
)
def test_a_view_that_disagrees_is_found(site, monkeypatch, name, copy):
    monkeypatch.setattr(f"gpuguard.{name}", copy)

    with pytest.raises(AssertionError, match="machine"):
        check_all(site, range(100), check_states)


GRAB = """
import sys, gpuguard
try:
    print(*(device.uuid for device in gpuguard.grab_gpus(**eval(sys.argv[1]))))
except gpuguard.ImpossibleRequest:
    sys.exit(125)
except gpuguard.NotEnoughGpus:
    sys.exit(75)
"""
OUTCOMES = {0: START, 75: WAIT, 125: NEVER}
SPECS = ("4xH100-80GB", "1xH100-80GB:mig=3g.40gb,3g.40gb+2xA100-40GB", "2xH100-80GB")


@pytest.mark.parametrize("number", range(REAL))
def test_the_real_commands_agree_on_a_simulated_node(tmp_path, number):
    dice, place = luck(f"node {number}"), str(tmp_path / "node")
    devices = start(place, dice.choice(SPECS)).sample({HEALTH, MODEL, MEMORY}).devices
    on = Gpuguard(tmp_path, None, **_outer(dice, devices, []))
    whole = [device for device in devices if not device.parent_uuid]
    change(place, dice.choice(whole).index, **dice.choice(({}, {"faults": ("lost",)}, {"compute_mode": "prohibited"})))
    if dice.random() < 0.3:
        on("quarantine", str(dice.choice(whole).index))
    request = replace(_a_request(dice, devices), models=())
    words = shlex.split(spelled(request))
    with ExitStack() as stack:
        if dice.random() < 0.6:
            with suppress(AssertionError):  # it is lost
                stack.enter_context(a_user(place, str(dice.choice(whole).index), dice.choice((0, 20 * GIB)), 50.0))
        if dice.random() < 0.6:
            job = stack.enter_context(on.start("run", "--no-wait", "--", "sh", "-c", "echo ready; exec sleep 60"))
            stack.callback(job.terminate)
            job.stdout.readline()
        explained = on("explain", "--json", *words)
        selected = on("select", *words, "--format", "uuid")
        asked = {name: value for name, value in vars(request).items() if value != vars(Request())[name]}
        grab = [sys.executable, "-c", GRAB, repr(asked)]
        grabbed = subprocess.run(grab, env=on.environment, capture_output=True, text=True, check=False)
        ran = on("run", "--no-wait", "--quiet", *words, "--", "sh", "-c", "echo $GPUGUARD_GPUS")

        if explained.returncode == 2:  # wrong usage: a GPU is named twice
            assert (selected.returncode, ran.returncode, grabbed.returncode) == (2, 125, 1)
            assert explained.stderr == selected.stderr == ran.stderr
            return
        outcome, chosen = operator.itemgetter("outcome", "chosen")(json.loads(explained.stdout))
        assert selected.returncode == (outcome != START) and selected.stdout.replace(",", " ").split() == chosen
        assert (OUTCOMES[grabbed.returncode], grabbed.stdout.split()) == (outcome, chosen), grabbed.stderr
        assert (OUTCOMES[ran.returncode], ran.stdout.replace(",", " ").split()) == (outcome, chosen), ran.stderr
        if outcome == WAIT:
            waiting = stack.enter_context(on.start("run", *words, "--", "true"))
            stack.callback(waiting.terminate)
            [position] = until(lambda: on.json("queue")["places"])
            assert not position["starts_now"] and "no GPUs" not in position["why"], position["why"]
