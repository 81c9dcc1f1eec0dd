"""Recordings: what was seen comes back, however the recorder ended; nobody acts on it; masks let no name through."""

import gzip
import json
import os
import random
import signal
import subprocess
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot
from chances import luck
from nodes import Gpuguard, eventually

from gpuguard import model
from gpuguard.backends import open_backend
from gpuguard.backends.client import open_worker
from gpuguard.backends.replay import RecordingWriter, read_samples
from gpuguard.backtest.backtest import backtest, rehearse
from gpuguard.backtest.masking import KEPT, MASKED, Mask
from gpuguard.backtest.recordings import pack, people, read_recording, unpack, views
from gpuguard.backtest.unit_tests import accounts
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.model import ALL_FIELDS, WHO_FIELDS, Gap, ProcessStat
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.view import HostUse, RuleView, UserUse
from gpuguard.policy_files.loader import parse
from gpuguard.procfs import described, process_facts
from gpuguard.watchdog import Watchdog

SECRETS = {
    "host": "hilbert.example.org", "user": "wolfgang", "note": "for the reviewers", "command": "secret_project.py",
    "executable": "/home/wolfgang/bin/python", "container": "c0ffee" * 10, "working_directory": "/home/wolfgang/runs",
    "conda_environment": "wolfenv", "group": "bosonlab", "terminal": "/dev/pts/77", "reason": "/var/tmp/wolf is full",
    "problem": "wolf:XID 79 (GPU-77)", "bus": "00000000:5E:00.0", "uid": "4242",
}  # fmt: skip


def a_view(second: int = 0, chance: random.Random | None = None) -> RuleView:
    """Eight devices with forty processes, with everything that can be known of them."""
    chance = chance or random.Random(second)
    devices = []
    for index in range(8):
        rows = tuple(
            a_process(
                5000 + 8 * row + index, memory_used=chance.randrange(2**30), utilization=float(chance.randrange(20)),
                start_time=1000.25 + row, uid=4242 + row % 3, user=f"{SECRETS['user']}{row % 3}",
                command=("python", SECRETS["command"], f"--seed={row}"), executable=SECRETS["executable"],
                container=SECRETS["container"], working_directory=SECRETS["working_directory"],
                conda_environment=SECRETS["conda_environment"],
            )
            for row in range(5)
        )  # fmt: skip
        devices.append(
            a_device(
                index, processes=rows, utilization=float(chance.randrange(101)),
                power_draw=300 + chance.randrange(99999) / 1000,
                temperature=60.0 + chance.randrange(5), memory_used=40 * GIB + chance.randrange(64) * 2**20,
                total_energy=1e6 * second, clock_sm=1500 + 15 * chance.randrange(20), pci_bus_id=SECRETS["bus"],
                problems=(SECRETS["problem"],) if index == 7 else (), nvlink_links=((0, SECRETS["bus"]),),
            )
        )  # fmt: skip
    parent = replace(devices[7], mig_mode=True)
    claim = a_claim_record(devices[0], note=SECRETS["note"], user=f"{SECRETS['user']}0", uid=4242,
                           slots=(f"{devices[0].uuid}.1",), command=(SECRETS["command"],),
                           holders=(4700, 5000))  # fmt: skip
    gaps = (Gap(devices[0].uuid, f"topology to {devices[1].uuid}", SECRETS["reason"]), Gap(None, "claims", "none"))
    snapshot = a_snapshot(
        *devices[:7], parent, a_mig_instance(parent), host=SECRETS["host"], clock=10_000.0 + second,
        taken_at=1_700_000_000.5 + second, claims=(claim,), gaps=gaps, simulated=True,
        topology=((devices[0].uuid, devices[1].uuid, "NVLINK"),),
    )  # fmt: skip
    host = {(5000, 1000.25): HostUse(cpu=99.5 + second, memory=2**30, network=12.0, terminal=SECRETS["terminal"])}
    return RuleView(
        snapshot,
        host=host,
        groups={4242: frozenset({SECRETS["group"], "users"})},
        seen={5000: ProcessStat(4700, "R", 1000.25, 17, group=4999, session=4700, is_shell=True), 5001: None},
    )


def write(path: Path, *seen: RuleView, **options: Any) -> str:
    tape = RecordingWriter(str(path), {"interval_seconds": 1.0}, **options)
    for view in seen:
        tape.write(pack(view))
    tape.close()
    return str(path)


def recorded(view: RuleView) -> RuleView:
    return replace(view, snapshot=model.replace(view.snapshot, recorded=True))


def test_what_was_seen_comes_back(tmp_path):
    seen = [a_view(second) for second in range(150)]  # over two whole samples in between
    path = write(tmp_path / "a.rec", *seen)

    assert list(views(path)) == [recorded(view) for view in seen]
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_devices_and_processes_that_come_and_go_come_back(tmp_path):
    seen = []
    for second in range(40):
        chance = random.Random(second)
        devices = [a_device(index, processes=tuple(a_process(100 + n) for n in range(chance.randrange(4))))
                   for index in range(chance.randrange(1, 5))]  # fmt: skip
        devices[0] = replace(devices[0], processes=chance.choice((None, (), devices[0].processes)),
                             utilization=chance.choice((None, 0.0, 1.0)))  # fmt: skip
        seen.append(RuleView(a_snapshot(*devices, clock=float(second))))
    path = write(tmp_path / "a.rec", *seen)

    assert list(views(path)) == [recorded(view) for view in seen]


def test_a_recording_of_an_idle_machine_has_all_its_samples_and_no_pause(tmp_path):
    idle = (RuleView(a_snapshot(a_device(0), clock=100.0 + at, taken_at=1_700_000_000.0 + at)) for at in range(9))

    recording = read_recording(write(tmp_path / "night", *idle))

    assert (len(recording.rows), recording.jobs(), recording.holes(longest=3.0)) == (9, {}, 0)


def test_a_file_that_was_cut_off_anywhere_is_read_up_to_there(tmp_path):
    seen = [a_view(second) for second in range(70)]
    whole = Path(write(tmp_path / "a.rec", *seen)).read_bytes()
    cut, counts = tmp_path / "cut.rec", []
    for end in range(60, len(whole), len(whole) // 40):
        cut.write_bytes(whole[:end])
        found = list(read_samples(str(cut)))
        assert [unpack(one).clock for one in found] == [view.clock for view in seen[: len(found)]]
        counts.append(len(found))

    assert counts == sorted(counts)
    assert counts[-1] >= 65


def test_a_file_with_a_damaged_byte_never_leads_to_another_error(tmp_path):
    whole = Path(write(tmp_path / "a.rec", *(a_view(second) for second in range(3)))).read_bytes()
    text = gzip.decompress(whole)
    chance, broken = luck(3), tmp_path / "broken.rec"
    for round_ in range(500):
        content = bytearray(text if round_ % 2 else whole)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.choice((0, 34, 44, 57, 91, 123, 125, 255))
        broken.write_bytes(gzip.compress(bytes(content), 1) if round_ % 2 else bytes(content))
        try:
            assert all(isinstance(view, RuleView) for view in views(str(broken)))
        except BackendError:
            continue


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_used", "many"), ("index", 1.5), ("uuid", None), ("processes", {}), ("throttle_reasons", "x"),
     ("utilization", float("nan")), ("mig_mode", 1), ("nvlink_links", [[1]]), ("problems", [1])],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused(tmp_path, name, value):
    sample = pack(a_view())
    sample["snapshot"]["devices"][0][name] = value

    with pytest.raises(BackendError, match=name):
        unpack(json.loads(json.dumps(sample)))


def test_what_a_later_version_adds_is_passed_over_and_another_format_is_not(tmp_path):
    sample = pack(a_view())
    sample["snapshot"]["devices"][0]["flux"] = 3
    assert unpack(json.loads(json.dumps(sample))) == recorded(a_view())

    path = tmp_path / "b.rec"
    path.write_bytes(gzip.compress(b'{"gpuguard_recording":2}\n'))
    with pytest.raises(BackendError, match="version 2, and this gpuguard reads 1"):
        list(read_samples(str(path)))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "empty"), (b"time,job\n", "no recording"), (gzip.compress(b'{"a":1}\n'), "no recording"),
     (gzip.compress(b"hello\n"), "no sample"), (gzip.compress(b"[" * 10**6 + b"\n"), "no sample"),
     (gzip.compress(b" " * (40 * 2**20)), "longer than any sample")],
    ids=("nothing", "text", "no header", "no lines of JSON", "too deep", "too long"),  # gzip's bytes hold the time
)  # fmt: skip
def test_a_file_that_is_no_recording_is_a_sentence(tmp_path, content, said):
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(BackendError, match=said):
        list(read_samples(str(tmp_path / "x")))


def test_a_recording_is_never_written_over_and_can_be_continued(tmp_path):
    path = write(tmp_path / "a.rec", a_view(0))
    with pytest.raises(InvalidRequest, match="--append"):
        write(tmp_path / "a.rec", a_view(1))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write(tmp_path / "link", a_view(1), append=True)

    write(tmp_path / "a.rec", a_view(1), append=True)
    assert [view.clock for view in views(path)] == [10_000.0, 10_001.0]


def test_a_recording_that_is_bounded_keeps_the_newest(tmp_path):
    path = write(tmp_path / "a.rec", *(a_view(second) for second in range(200)), most=30_000)

    assert sorted(os.listdir(tmp_path)) == ["a.rec", "a.rec.1"]
    assert sum(os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)) < 2 * 34_000
    kept = [view.clock for name in (f"{path}.1", path) for view in views(name)]
    assert kept == [10_000.0 + second for second in range(200 - len(kept), 200)]


def test_a_recorder_that_is_killed_leaves_a_readable_file(gpuguard, tmp_path):
    path = tmp_path / "a.rec"
    words = gpuguard.words("record", str(path), "--every", "100ms")

    def has_samples() -> bool:
        with suppress(BackendError):  # its file is not there yet, or is still empty
            return len(list(read_samples(str(path)))) >= 4
        return False

    with subprocess.Popen(words, env=gpuguard.environment, stderr=subprocess.DEVNULL) as recorder:
        assert eventually(has_samples)
        recorder.send_signal(signal.SIGKILL)

    clocks = [view.clock for view in views(str(path))]
    assert len(clocks) >= 4 and clocks == sorted(clocks)


def test_the_command_says_what_it_has_done_and_the_views_work_on_it(gpuguard, tmp_path):
    path = str(tmp_path / "a.rec")
    done = gpuguard("record", path, "--every", "100ms", "--for", "500ms")
    assert done.returncode == 0 and "samples over" in done.stderr

    shown = gpuguard("who", "--backend", f"replay:{path}?at=end", "--json")
    who = json.loads(shown.stdout)
    assert (who["backend"], who["recorded"], who["simulated"], len(who["devices"])) == ("replay", True, True, 2)
    refused = gpuguard("release", "--backend", f"replay:{path}")
    assert refused.returncode and "another time or machine" in refused.stderr


def test_a_replay_goes_on_with_time_and_brings_the_claims_along(tmp_path):
    path = write(tmp_path / "a.rec", *(a_view(second) for second in range(100)))
    backend = open_worker(f"replay:{path}?speed=1000&at=3s")
    try:
        first = backend.sample(WHO_FIELDS)
        assert 10_003.0 <= first.clock <= 10_099 and first.recorded
        assert [claim.note for claim in first.claims] == [SECRETS["note"]]
        assert eventually(lambda: backend.sample(ALL_FIELDS).clock == 10_099.0)
    finally:
        backend.close()

    slow = open_backend(f"replay:{path}")
    assert slow.sample(WHO_FIELDS).clock == slow.sample(WHO_FIELDS).clock == 10_000.0
    uuid = first.devices[1].uuid
    assert [device.uuid for device in slow.sample((), [uuid]).devices] == [uuid]
    assert len(slow.sample((), [first.devices[8].uuid]).devices) == 2  # an instance and its parent


def test_who_shows_the_claims_of_then_and_nobody_of_now(tmp_path):
    mine = a_process(os.getpid(), memory_used=GIB)
    claimed = a_device(processes=(mine,), memory_used=GIB, utilization=50.0)
    machine = a_snapshot(claimed, claims=(a_claim_record(claimed, note="then", pid=None),))
    gpuguard = Gpuguard(tmp_path, None)
    done = gpuguard("who", "--json", "--backend", f"replay:{write(tmp_path / 'a.rec', RuleView(machine))}")
    (device,) = json.loads(done.stdout)["devices"]

    assert ([claim["note"] for claim in device["claims"]], device["state"]) == (["then"], "in_use")
    assert process_facts(recorded(RuleView(machine)).snapshot) == {}


@pytest.mark.parametrize("spec", ["", "x?speed=0", "x?speed=fast", "x?loop=1", "x?at=10"])
def test_an_option_of_a_replay_that_cannot_be_understood_is_told(spec):
    with pytest.raises(InvalidRequest):
        open_backend(f"replay:{spec}")


POLICY = """
version: 1
policies:
  - name: idle
    mode: enforce
    when: {idle: {below: 30%}}
    for: 5s
    cooldown: 0s
    steps: [warn, {after: 10s, do: terminate}]
  - name: hot
    when: {temperature: {above: 61C}}
    for: 3s
    steps: [log]
  - name: boson
    when: {memory: {above: 10MiB}}
    only: {groups: [bosonlab]}
    steps: [log]
"""


def test_the_verdicts_on_a_recording_are_those_of_the_dry_run_that_was_recorded(tmp_path):
    uid_of = people({f"{SECRETS['user']}{number}": 4242 + number for number in range(3)})
    file = parse(POLICY, accounts=accounts(uid_of))
    assert file.faults == ()
    seen = [a_view(second) for second in range(120)]
    memory = EngineMemory()
    live = [evaluate(view, file.policies, memory, interval=1.0, zone=0.0) for view in seen]

    path = write(tmp_path / "a.rec", *seen)
    replayed = []
    memory = EngineMemory()
    for view in views(path):
        replayed.append(evaluate(view, file.policies, memory, interval=1.0, zone=0.0))
    assert [one.verdicts for one in replayed] == [one.verdicts for one in live]
    assert sum(len(one.verdicts) for one in live) >= 8

    rehearsed = [judged.verdicts for _, judged in rehearse(iter(seen), file.policies, interval=1.0)]
    result = backtest(read_recording(path), file.policies, people(read_recording(path).people))
    assert [(act.policy, act.action, act.why) for act in result.acts] == [
        (verdict.policy, verdict.action, verdict.finding.why) for verdicts in rehearsed for verdict in verdicts
    ]


HARSH = """
version: 1
policies:
  - {name: end, mode: enforce, when: {memory: {above: 10MiB}}, for: 2s, steps: [terminate]}
  - {name: say, mode: enforce, when: {memory: {above: 10MiB}}, for: 2s, steps: [warn]}
  - {name: close, mode: enforce, when: {utilization: {below: 50%}}, for: 2s, steps: [quarantine]}
"""


def test_a_user_who_is_in_no_recording_is_none_of_those_who_are():
    """A policy for them ended the jobs of a user whose uid was given to them again."""
    recorded = {"alice": 100_002, "bob": 100_004}
    uid_of = people(recorded)

    others = {uid_of(name) for name in ("carol", "dave", "erin")}
    assert len(others) == 3 and others.isdisjoint({0, *recorded.values()})


def test_nobody_is_touched_because_of_a_recording(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as job:
        try:
            process = described(a_process(job.pid, memory_used=GIB))
            seen = [
                RuleView(
                    a_snapshot(a_device(utilization=0.0, processes=(process,), memory_used=GIB), clock=float(clock))
                )
                for clock in range(100)
            ]
            backend = open_backend(f"replay:{write(tmp_path / 'a.rec', *seen)}?speed=100")
            events: list[model.Event] = []
            guard = Watchdog(
                backend, parse(HARSH).policies, enforce=True, append=lambda event: bool(events.append(event)) or True
            )

            def refused() -> set[object]:
                guard.step()
                return {dict(event.facts)["policy"] for event in events if event.outcome == "refused"}

            assert eventually(lambda: refused() == {"end", "say", "close"})
            assert {event.outcome for event in events if event.kind != "note"} == {"refused"}
            assert job.poll() is None
        finally:
            job.kill()


def masked_text(path: Path) -> str:
    mask, tape = Mask(), RecordingWriter(str(path), {})
    for second in range(3):
        tape.write(mask(pack(a_view(second))))
    tape.close()
    return gzip.decompress(path.read_bytes()).decode("ascii")


def test_a_mask_lets_no_name_through(tmp_path):
    text = masked_text(tmp_path / "m.rec")
    view = a_view()

    names = {*SECRETS.values(), *("wolf", "boson", "hilbert", "pts/77", "python")}
    names |= {device.uuid for device in view.snapshot.devices}
    assert [name for name in names if name in text] == []
    assert [json.dumps(name) for name in names if json.dumps(name)[1:-1] in text] == []


def test_a_masked_recording_still_tells_who_is_the_same(tmp_path):
    masked_text(tmp_path / "m.rec")
    plain, masked = a_view(2).snapshot, list(views(str(tmp_path / "m.rec")))[2].snapshot

    def people_of(snapshot: model.Snapshot) -> list[list[int]]:
        users = [process.user for device in snapshot.devices for process in device.processes or ()]
        return [[place for place, user in enumerate(users) if user == one] for one in dict.fromkeys(users)]

    assert people_of(masked) == people_of(plain)
    assert masked.devices[8].parent_uuid == masked.devices[7].uuid
    assert masked.claims[0].devices == (masked.devices[0].uuid,)
    assert [device.memory_used for device in masked.devices] == [device.memory_used for device in plain.devices]
    assert masked.devices[7].problems == ("masked problem",)


@pytest.mark.parametrize(
    ("noun", "kind"),
    [("snapshot", model.Snapshot), ("device", model.Device), ("process", model.GpuProcess),
     ("claim", model.ClaimRecord), ("host", HostUse), ("use", UserUse)],
)  # fmt: skip
def test_every_field_is_either_masked_or_known_to_be_harmless(noun, kind):
    names = {field.name for field in fields(kind)}

    assert KEPT[noun] | MASKED[noun] == names
    assert not KEPT[noun] & MASKED[noun]


def test_a_field_that_the_mask_does_not_know_does_not_pass():
    sample = pack(a_view())
    sample["snapshot"]["devices"][0]["serial"] = "1650522003820"

    assert "1650522003820" not in json.dumps(Mask()(sample))
