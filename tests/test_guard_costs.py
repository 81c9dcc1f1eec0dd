"""What one look of the guard may cost: files of /proc that are opened, calls of the driver.  Counted, not timed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot
from fake_nvml import GIB, FakeNvml
from nvml_child import answer_of

from gpuguard import ancestry
from gpuguard.attribution import Seen
from gpuguard.backends import processes
from gpuguard.backends.nvml_calls import NOT_SUPPORTED
from gpuguard.model import GpuProcess
from gpuguard.policies import view
from gpuguard.policies.sight import look
from gpuguard.policies.view import View, process_subject
from gpuguard.readings import hostuse
from gpuguard.readings.hostuse import HostUses

OPENED = """
opened = []
sys.addaudithook(lambda event, facts: opened.append(str(facts[0])) if event == "open" else None)
backend = nvml.open(); backend.sample(WHO_FIELDS)
fake.reset_calls(); opened.clear(); backend.sample(WHO_FIELDS)
answer = [path for path in opened if path.startswith("/proc/")], fake.calls()
"""


@pytest.fixture
def jobs() -> Iterator[list[int]]:
    with ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(6)]
        while not all(_sleeps(child.pid) for child in children):  # one that only begins changes from look to look
            time.sleep(0.01)
        yield [child.pid for child in children]
        for child in children:
            child.kill()


def _sleeps(pid: int) -> bool:
    return (processes.read_proc(f"/proc/{pid}/stat") or b"").rpartition(b") ")[2].startswith(b"S")


def test_a_sample_opens_one_file_per_process_and_asks_the_driver_no_more_than_it_must(
    fake: FakeNvml, jobs: list[int]
) -> None:
    for number, pid in enumerate(jobs):
        fake.add_process(number % 2, pid, GIB)
    opened, calls = answer_of(fake, OPENED)

    # What makes sure that a pid is who it was a second ago: its start, and the program that it runs.
    assert sorted(opened) == sorted(f"/proc/{pid}/stat" for pid in jobs)
    assert sum(calls.values()) <= 8 * 12


def test_from_the_third_sample_on_no_file_of_a_process_is_opened(fake: FakeNvml, jobs: list[int]) -> None:
    for pid in jobs:
        fake.add_process(0, pid, GIB)
    opened, _ = answer_of(fake, OPENED.replace("fake.reset", "backend.sample(WHO_FIELDS); fake.reset"))

    assert opened == []


STATS_OF_TWO = """
backend = nvml.open()
answer = [dict(backend.sample(WHO_FIELDS | groups).stats or ()) for groups in ({STATS}, set())]
"""


def test_a_sampler_hands_over_what_it_read_of_each_process_to_who_asks_for_it(fake: FakeNvml, jobs: list[int]) -> None:
    fake.add_mig(1, "3g.40gb", gi=1)
    fake.add_process(1, jobs[0], GIB, gi=1, ci=0)
    for pid in jobs[1:]:
        fake.add_process(0, pid, GIB)
    given, unasked = answer_of(fake, STATS_OF_TWO)

    assert unasked == {}
    assert given.keys() == set(jobs)
    assert ancestry.stats_of(jobs, given) == ancestry.stats_of(jobs)


def test_the_guard_reads_the_state_of_each_process_once_per_look(jobs: list[int], monkeypatch: Any) -> None:
    read: Counter[str] = Counter()
    real = processes.read_proc
    monkeypatch.setattr(ancestry, "read_proc", lambda path, *limit: read.update([path]) or real(path, *limit))
    rows = tuple(a_process(pid, start_time=processes.start_time(pid)) for pid in jobs)
    snapshot = a_snapshot(a_device(0, processes=rows), a_device(1, processes=rows))

    stats = ancestry.stats_of(jobs)
    uses = HostUses().look(snapshot, stats)
    seen = ancestry.look_up(snapshot, stats)

    assert len(uses) == len(jobs)
    assert seen.keys() >= set(jobs)
    assert {read[f"/proc/{pid}/stat"] for pid in jobs} == {1}
    assert set(read.values()) == {1}


def test_the_nouns_of_processes_that_have_not_changed_are_made_once(
    jobs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ancestry, "_nouns", {})
    snapshot = a_snapshot(a_device(0, processes=tuple(map(a_process, jobs))))
    first, again = ancestry.look_up(snapshot), ancestry.look_up(snapshot)
    assert all(again[pid] is first[pid] for pid in jobs)


def test_nouns_of_processes_that_have_ended_are_not_kept(jobs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = a_snapshot(a_device(0, processes=tuple(map(a_process, jobs))))
    ended = {(b"S", b"1", b"%d" % number): Seen(1, "S", float(number)) for number in range(1000)}
    monkeypatch.setattr(ancestry, "_nouns", ended)
    seen = ancestry.look_up(snapshot)

    assert seen.keys() >= set(jobs)
    assert len(ancestry._nouns) < 100


def test_subjects_of_processes_that_have_ended_are_not_kept() -> None:
    for number in range(1000):
        job = a_process(1000 + number)
        look(View(a_snapshot(a_device(0, processes=(job,)))))
        process_subject(a_device(0), job)

    assert view._process_subject.cache_info().currsize < 100


def test_subjects_of_many_living_processes_are_made_once() -> None:
    devices = [a_device(index, processes=tuple(map(a_process, range(1000, 3000)))) for index in range(3)]
    subjects = []
    for _ in range(2):
        look(View(a_snapshot(*devices)))
        subjects.append([process_subject(each, job) for each in devices for job in each.processes])

    assert all(first is again for first, again in zip(*subjects, strict=True))


def test_a_process_in_the_network_of_the_host_is_asked_about_it_once_a_minute(
    jobs: list[int], monkeypatch: Any
) -> None:
    asked: Counter[int | str] = Counter()
    own: set[int | str] = set()
    monkeypatch.setattr(
        hostuse, "_network_namespace", lambda pid: asked.update([pid]) or ("own" if pid in own else "host")
    )
    rows = tuple(a_process(pid, start_time=processes.start_time(pid)) for pid in jobs)
    uses = HostUses()

    for second in range(60):
        uses.look(a_snapshot(a_device(0, processes=rows), clock=100.0 + second))
    assert {asked[pid] for pid in jobs} == {1}

    own.update(jobs)  # it has moved: of such a one every look reads how much it received
    for second in (60, 61):
        found = uses.look(a_snapshot(a_device(0, processes=rows), clock=100.0 + second))
    assert {asked[pid] for pid in jobs} == {3}
    assert {use.network is not None for use in found.values()} == {True}


def test_a_user_id_is_kept_for_a_while_and_read_again_then(jobs: list[int], monkeypatch: Any) -> None:
    read: list[int] = []
    monkeypatch.setattr(processes, "uid_of", lambda pid: read.append(pid) or 1000 + len(read))

    assert [processes.described(GpuProcess(jobs[0])).uid for _ in range(3)] == [1001, 1001, 1001]
    monkeypatch.setattr(processes, "UID_SECONDS", -1.0)
    assert processes.described(GpuProcess(jobs[0])).uid == 1002


@pytest.fixture
def described_pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids about which everything was read; every pid is a process."""
    read: list[int] = []
    monkeypatch.setattr(processes, "_kept", processes._Kept())
    monkeypatch.setattr(processes, "life_of", lambda pid: (1.0, b"name", b"places"))
    monkeypatch.setattr(processes, "read_proc", lambda path, *limit: None)
    monkeypatch.setattr(processes, "uid_of", lambda pid: 0)
    monkeypatch.setattr(processes, "_described", lambda pid: read.append(pid) or {})
    return read


def test_a_look_at_five_thousand_processes_knows_them_from_the_look_before(described_pids: list[int]) -> None:
    for _ in range(3):
        for pid in range(2, 5002):
            processes.described(GpuProcess(pid))

    assert described_pids == list(range(2, 5002))


def test_a_process_is_described_anew_only_when_something_about_it_has_changed(
    described_pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = processes.described(GpuProcess(2, 5))

    assert processes.described(GpuProcess(2, 5)) is first
    assert processes.described(GpuProcess(2, 6)).memory_used == 6
    monkeypatch.setattr(processes, "uid_of", lambda pid: 7)
    monkeypatch.setattr(processes, "UID_SECONDS", -1.0)
    assert (first.uid, processes.described(GpuProcess(2, 6)).uid) == (0, 7)


def test_processes_that_are_gone_are_forgotten(described_pids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kept, most = processes._kept, processes.KEPT_AT_MOST
    for pid in range(2, 5 * most):
        processes.described(GpuProcess(pid))
    full = len(kept.young) + len(kept.old)
    monkeypatch.setattr(processes.time, "monotonic", lambda: kept.began + 1.01 * processes.FACTS_SECONDS)
    processes.described(GpuProcess(2))

    assert most <= full <= 2 * most
    assert len(kept.young) == 1


def test_another_program_under_the_same_pid_is_asked_anew_who_it_is(monkeypatch: Any) -> None:
    script = "import os; print(flush=True); os.read(0, 3); os.execvp('cat', ['cat'])"
    read: list[int] = []
    monkeypatch.setattr(processes, "uid_of", lambda pid: read.append(pid) or 1000 + len(read))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as job:
        assert job.stdin and job.stdout
        job.stdout.readline()
        before = processes.described(GpuProcess(job.pid))
        job.stdin.write(b"go\nthere\n")
        job.stdout.readline()  # by cat
        after = processes.described(GpuProcess(job.pid))
        job.kill()

    assert (before.uid, after.uid, after.command) == (1001, 1002, ("cat",))
    assert before.start_time == after.start_time


def test_what_only_a_poll_of_the_details_keeps_is_never_kept_where_it_decides(jobs: list[int]) -> None:
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "uid_of", lambda pid: read.append(pid) or os.getuid())
        for _ in range(3):
            processes.identified(GpuProcess(jobs[0]))

    assert len(read) == 3


SETTINGS = """
FIELDS = WHO_FIELDS | {CLOCKS}
backend = nvml.open()
def asked(devices=None):
    fake.reset_calls()
    found = backend.sample(FIELDS, devices).devices[0]
    short = {name.removeprefix("nvmlDeviceGet"): count for name, count in fake.calls().items()}
    names = "ComputeMode EnforcedPowerLimit PersistenceMode RemappedRows MigMode FanSpeed".split()
    return [short.get(name, 0) for name in names], found
"""


def test_what_changes_seldom_is_not_asked_at_every_look(fake: FakeNvml) -> None:
    first, again = answer_of(fake, f"{SETTINGS}\nanswer = asked(), asked()")

    assert (first[0], again[0]) == ([8] * 6, [0] * 6)
    assert first[1] == again[1]


def test_what_is_kept_of_a_device_is_asked_anew_once_somebody_new_computes_on_it(fake: FakeNvml) -> None:
    begin = "fake.add_process(3, os.getpid(), GIB)"
    counts = answer_of(fake, f"import os\n{SETTINGS}\nasked()\n{begin}\nanswer = asked()[0], asked()[0]")

    assert counts == ([1] * 6, [0] * 6)


@pytest.mark.parametrize("look", ["[first[1].uuid]", "after ten seconds"])
def test_a_setting_is_asked_anew_by_who_names_a_device_and_after_a_while(fake: FakeNvml, look: str) -> None:
    change = "row = fake.devices[0]; row.compute_mode, row.power_limit_mw, row.remap_pending = 2, 300_000, 1"
    if look == "after ten seconds":
        look, change = "", f"{change}; nvml.SETTINGS_SECONDS = -1.0"
    then, now, later = answer_of(
        fake, f"{SETTINGS}\nfirst = asked()\n{change}\nanswer = first[1], asked({look})[1], asked()[1]"
    )

    assert (then.compute_mode, then.power_limit, then.problems) == ("default", 700, ())
    assert (now.compute_mode, now.power_limit, now.problems) == ("prohibited", 300, ("row remap pending",))
    assert later == now


def test_a_setting_that_could_not_be_read_is_asked_at_the_next_look(fake: FakeNvml) -> None:
    fault = "fake.fail('nvmlDeviceGetComputeMode', UNKNOWN, device=0)"
    before, after = answer_of(fake, f"{SETTINGS}\n{fault}\nanswer = asked()[1], [fake.heal(), asked()[1]][1]")

    assert before.compute_mode is None and before.problems
    assert (after.compute_mode, after.problems) == ("default", ())


@pytest.mark.parametrize(
    ("between", "asked"), [("pass", 7), ("nvml.SETTINGS_SECONDS = -1.0", 8), ("uuids = [first[1].uuid]", 1)]
)
def test_a_device_that_does_not_tell_its_pstate_is_asked_again_only_after_a_while_or_by_its_name(
    fake: FakeNvml, between: str, asked: int
) -> None:
    fake.fail("nvmlDeviceGetPerformanceState", NOT_SUPPORTED, device=0)
    count, clock = answer_of(
        fake,
        f"{SETTINGS}\nfirst, uuids = asked(), None\n{between}\nfound = asked(uuids)[1]\n"
        "answer = fake.calls()['nvmlDeviceGetPerformanceState'], found.clock_memory",
    )

    assert count == asked
    assert clock is not None
