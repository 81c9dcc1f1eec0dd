"""Before a signal: for each check an innocent whom it alone protects, and who is hit when it is switched off."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import a_device, a_process
from guarded import SOMEBODY, Scene, a_child, a_scene

from gpuguard import capabilities, deadline, procfs
from gpuguard.enforcement import identity, preflight, signals

Patch = pytest.MonkeyPatch


def test_an_offender_whom_nothing_protects_is_hit(scene):
    assert scene.against() == set()
    assert scene.act().word == "sent"
    assert scene.dies()


# Each takes a scene in which the offender would be hit, and makes them an innocent.


def pid_beyond_all(scene: Scene, patch: Patch) -> None:
    patch.setattr(procfs, "pid_max", lambda: scene.pid - 1)


def owner_unknown_to_the_rule(scene: Scene, patch: Patch) -> None:
    scene.subject = replace(scene.subject, uid=None)


def stale_sample(scene: Scene, patch: Patch) -> None:
    scene.context(interval=1e-6)


def sample_from_the_future(scene: Scene, patch: Patch) -> None:
    scene.snapshot = replace(scene.snapshot, clock=scene.snapshot.clock + 3600)


def list_was_implausible(scene: Scene, patch: Patch) -> None:
    scene.snapshot = replace(scene.snapshot, devices=(replace(scene.snapshot.devices[0], processes_plausible=False),))


def pids_of_another_namespace(scene: Scene, patch: Patch) -> None:
    patch.setattr(preflight, "in_first_pid_namespace", lambda: False)


def successor_of_the_pid(scene: Scene, patch: Patch) -> None:
    scene.row(start_time=scene.start_time - 1)
    scene.subject = replace(scene.subject, start_time=scene.process.start_time)
    scene.context(jobs=frozenset({(scene.pid, scene.process.start_time)}))


def of_a_recording(scene: Scene, patch: Patch) -> None:
    scene.snapshot = replace(scene.snapshot, recorded=True)


def answer_from_a_recording(scene: Scene, patch: Patch) -> None:
    sample = scene.machine.sample
    patch.setattr(scene.machine, "sample", lambda *of: replace(sample(*of), recorded=True))


def started_at_the_time_of_the_sample(scene: Scene, patch: Patch) -> None:
    scene.snapshot = replace(scene.snapshot, clock=scene.start_time + 0.015)


def off_the_device_by_now(scene: Scene, patch: Patch) -> None:
    scene.listed()


def list_is_implausible_now(scene: Scene, patch: Patch) -> None:
    scene.machine.change(0, processes_plausible=False)


def older_answer_of_the_driver(scene: Scene, patch: Patch) -> None:
    sample = scene.machine.sample
    patch.setattr(scene.machine, "sample", lambda *of: replace(sample(*of), clock=scene.snapshot.clock - 1))


def without_the_driver(scene: Scene, patch: Patch) -> None:
    patch.setattr(identity, "DRIVER_FILE", "/dev/full")
    patch.setattr(scene.machine, "simulated", False)


def graphics(scene: Scene, patch: Patch) -> None:
    scene.row(kind="graphics")


def graphics_too(scene: Scene, patch: Patch) -> None:
    scene.row(kind="compute+graphics")


def graphics_on_another_device(scene: Scene, patch: Patch) -> None:
    other = a_device(1, processes=(replace(scene.process, kind="graphics"),))
    scene.snapshot = replace(scene.snapshot, devices=(*scene.snapshot.devices, other))
    scene.machine.devices.append(a_device(1, processes=(scene.process,)))


def mps_client(scene: Scene, patch: Patch) -> None:
    scene.row(kind="mps")


def beside_an_mps_client(scene: Scene, patch: Patch) -> None:
    scene.listed(scene.process, a_process(2, kind="mps"))


def of_another_user_than_judged(scene: Scene, patch: Patch) -> None:
    scene.row(uid=SOMEBODY + 1)
    scene.subject = replace(scene.subject, uid=SOMEBODY + 1)


def of_a_user_without_a_name(scene: Scene, patch: Patch) -> None:
    scene.row(user=str(scene.process.uid))


def of_a_user_whose_name_cannot_be_read(scene: Scene, patch: Patch) -> None:
    scene.row(user=None)


def of_a_protected_user(scene: Scene, patch: Patch) -> None:
    assert scene.process.uid is not None
    scene.context(protected=frozenset({scene.process.uid}))


def beyond_our_power(scene: Scene, patch: Patch) -> None:
    patch.setattr(capabilities, "may_signal", lambda uids: False)


def with_the_rights_of_root(scene: Scene, patch: Patch) -> None:
    change_facts(patch, uids=(scene.process.uid, 0, 0, 0))


def of_a_system_account(scene: Scene, patch: Patch) -> None:
    patch.setattr(identity, "uid_min", lambda: (scene.process.uid or 0) + 1)


def of_nobody(scene: Scene, patch: Patch) -> None:
    patch.setattr(identity, "overflow_uid", lambda: scene.process.uid)


def program_unreadable(scene: Scene, patch: Patch) -> None:
    patch.setattr(identity, "_executable", lambda pid: (None, None, False))


def of_a_protected_program(scene: Scene, patch: Patch) -> None:
    scene.context(protected_executables=("/*/sleep",))


def of_a_program_where_nobody_answers(scene: Scene, patch: Patch) -> None:
    scene.context(protected_executables=("/none",))
    for name, value in (("SECONDS", 0.05), ("_hanging", {}), ("_spent", {})):
        patch.setattr(deadline, name, value)
    patch.setattr(identity, "runs_one_of", lambda *_: threading.Event().wait(20))


def child_of_the_guard(scene: Scene, patch: Patch) -> None:
    scene.context(jobs=frozenset())


def notebook(scene: Scene, patch: Patch) -> None:
    change_facts(patch, command="python -m ipykernel_launcher -f kernel.json")


def on_a_terminal(scene: Scene, patch: Patch) -> None:
    change_facts(patch, terminal=os.makedev(136, 3))


def debugged(scene: Scene, patch: Patch) -> None:
    change_facts(patch, tracer=1)


def changed_their_ways(scene: Scene, patch: Patch) -> None:
    scene.context(still_true=lambda verdict, snapshot: False)


def change_facts(patch: Patch, **change: Any) -> None:
    read = identity.facts_of
    patch.setattr(identity, "facts_of", lambda pid: (facts := read(pid)) and replace(facts, **change))


INNOCENTS: list[tuple[Callable[[Scene, Patch], None], str, tuple[str, ...]]] = [
    # who, the check that protects them, and those that would as well
    (of_a_recording, "live", ()),
    (answer_from_a_recording, "listed", ()),
    (pid_beyond_all, "pid", ()),
    (owner_unknown_to_the_rule, "known", ("owner",)),
    (stale_sample, "fresh", ()),
    (sample_from_the_future, "fresh", ("listed",)),
    (list_was_implausible, "sampled", ()),
    (pids_of_another_namespace, "namespace", ()),
    (successor_of_the_pid, "start time", ()),
    (started_at_the_time_of_the_sample, "sample time", ()),
    (off_the_device_by_now, "listed", ("owner",)),
    (list_is_implausible_now, "listed", ()),
    (older_answer_of_the_driver, "listed", ()),
    (without_the_driver, "driver", ()),
    (graphics, "kind", ()),
    (graphics_too, "kind", ()),
    (graphics_on_another_device, "kind", ()),
    (mps_client, "kind", ()),
    (beside_an_mps_client, "kind", ()),
    (of_another_user_than_judged, "owner", ()),
    (of_a_user_without_a_name, "owner", ()),
    (of_a_user_whose_name_cannot_be_read, "owner", ()),
    (of_a_protected_user, "protected", ()),
    (with_the_rights_of_root, "protected", ()),
    (of_a_system_account, "protected", ()),
    (of_nobody, "protected", ()),
    (program_unreadable, "program", ()),
    (of_a_protected_program, "program", ()),
    (of_a_program_where_nobody_answers, "program", ()),
    (beyond_our_power, "power", ()),
    (child_of_the_guard, "family", ()),
    (notebook, "interactive", ()),
    (on_a_terminal, "interactive", ()),
    (debugged, "interactive", ()),
    (changed_their_ways, "rule", ()),
]
NAMES = [innocent.__name__ for innocent, _, _ in INNOCENTS]


def switch_off(patch: Patch, *checks: str) -> None:
    for check in checks:
        table = preflight.EARLY if check in preflight.EARLY else preflight.LATE
        patch.setitem(table, check, preflight.PreflightCheck(lambda target: None))


@pytest.mark.parametrize(("innocent", "check", "others"), INNOCENTS, ids=NAMES)
def test_an_innocent_lives(scene, monkeypatch, innocent, check, others):
    innocent(scene, monkeypatch)

    assert scene.act().word == "refused"
    assert check in scene.against() <= {check, *others}
    assert scene.lives()
    assert [event.outcome for event in scene.events] == ["refused"]


@pytest.mark.parametrize(("innocent", "check", "others"), INNOCENTS, ids=NAMES)
def test_without_its_check_that_innocent_is_hit(scene, monkeypatch, innocent, check, others):
    innocent(scene, monkeypatch)
    switch_off(monkeypatch, check, *others)

    assert scene.act().word == "sent"
    assert scene.dies()


def test_every_check_has_an_innocent():
    tested = {check for _, check, _ in INNOCENTS} | {"catches", "limits"}  # these two: below
    tested.add("slurm")  # in test_slurm_jobs

    of_processes = {name for name, check in {**preflight.EARLY, **preflight.LATE}.items() if check.process}
    assert tested == of_processes


def test_a_job_that_would_not_survive_a_checkpoint_signal_is_spared(scene, monkeypatch):
    assert scene.act("checkpoint").word == "refused"
    assert scene.lives()

    switch_off(monkeypatch, "catches")
    assert scene.act("checkpoint").word == "sent"
    assert scene.dies()


# Who may not even be looked at.


@pytest.mark.parametrize("pid", [0, -1, 1, 2**22 + 1, 2**31, 2**32 - 1, 2**64])
def test_a_pid_that_cannot_be_one_reaches_no_system_call(scene, monkeypatch, pid):
    monkeypatch.setattr(os, "pidfd_open", lambda *of: pytest.fail("a system call"))
    scene.row(pid=pid)
    scene.subject = replace(scene.subject, pid=pid)

    assert scene.act().word == "refused"
    assert scene.lives()


@pytest.mark.parametrize("who", ["itself", "its parent"])
def test_gpuguard_and_what_it_stands_on_are_never_hit(scene, monkeypatch, who):
    sent: list[int] = []
    pid, child = os.getpid(), scene.pid
    if who == "its parent":  # our own may be pid 1, which many checks protect
        monkeypatch.setattr(os, "getpid", lambda: child)

    def record(pidfd: int, signum: int) -> str:
        sent.append(signum)
        return "sent"

    monkeypatch.setattr(signals, "forward", record)
    scene.row(pid=pid, start_time=procfs.start_time(pid), uid=os.getuid())
    scene.subject = replace(scene.subject, pid=pid, start_time=scene.process.start_time, uid=os.getuid())
    switch_off(monkeypatch, "protected", "program", "interactive", "owner")

    assert scene.act().word == "refused"
    assert sent == []
    switch_off(monkeypatch, "family")
    assert scene.act().word == "sent"


def test_whoever_is_in_our_process_group_is_never_hit(monkeypatch):
    with a_scene(session=False) as scene:
        monkeypatch.setattr(procfs, "ancestors", lambda pid: frozenset())
        scene.context(jobs=frozenset())

        assert scene.against() == {"family"}


def test_whoever_has_the_driver_open_is_hit(monkeypatch):
    with open("/dev/full", "wb") as driver, a_scene(stdin=driver) as scene:
        without_the_driver(scene, monkeypatch)

        assert scene.act().word == "sent"


@pytest.mark.root
@pytest.mark.parametrize(("uid", "word"), [(0, "refused"), (999, "refused"), (1000, "sent"), (65534, "refused")])
def test_users_are_hit_and_accounts_of_the_system_are_not(uid, word):
    with a_scene(uid=uid) as scene:
        assert scene.act().word == word


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "owner", "spared"),
    [
        ("nvidia-cuda-mps-server", 0, True),
        ("Xorg", 0, True),
        ("gnome-shell", 0, True),
        ("gnome-shell", SOMEBODY, False),  # anybody can call their program so
        ("train", 0, False),
    ],
)
def test_a_program_of_the_system_is_known_by_who_put_it_where(monkeypatch, name, owner, spared):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # everybody can get there, unlike tmp_path
        os.chmod(place, 0o755)
        monkeypatch.setattr(identity, "SYSTEM_PLACES", (f"{place}/",))
        program = shutil.copy(shutil.which("sleep") or "", f"{place}/{name}")
        os.chmod(program, 0o755)
        os.chown(program, owner, owner)

        with a_scene(program, "600") as scene:
            assert (scene.against() == {"program"}) is spared
            assert (scene.act().word == "sent") is not spared


@pytest.mark.root
def test_a_name_protects_nobody_outside_of_the_places_of_the_system():
    with a_child("Xorg", "600", executable=shutil.which("sleep")) as child:
        scene = Scene(child.pid, SOMEBODY)

        assert scene.act().word == "sent"
        assert child.wait() == -signal.SIGTERM
        os.close(scene.pidfd)


def test_a_name_is_matched_by_path_and_not_by_what_is_in_its_arguments(scene):
    facts = identity.facts_of(scene.pid)
    assert facts is not None

    assert not identity.belongs_to_the_system(replace(facts, command="/usr/bin/Xorg :0"))
    assert identity.belongs_to_the_system(replace(facts, executable="/usr/lib/xorg/Xorg", executable_owner=0))
    assert identity.belongs_to_the_system(
        replace(facts, executable="/usr/bin/nv-hostengine (deleted)", executable_owner=0)
    )
    assert not identity.belongs_to_the_system(replace(facts, executable="/home/eve/Xorg", executable_owner=0))


# Signals go to the one process that is meant, and what became of it is said and not raised.


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_signal_reaches_the_process_behind_the_pidfd(child):
    pidfd = os.pidfd_open(child.pid)

    assert signals.forward(pidfd, signal.SIGUSR1) == "sent"
    assert child.wait() == -signal.SIGUSR1
    os.close(pidfd)


def test_a_process_that_has_ended_is_gone_and_no_error(child):
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    child.wait()

    assert signals.forward(pidfd, signal.SIGTERM) == "gone"
    os.close(pidfd)


@pytest.mark.root
def test_a_process_of_another_user_is_not_permitted_and_no_error():
    with a_child(uid=SOMEBODY) as child:
        pidfd = os.pidfd_open(child.pid)
        os.seteuid(SOMEBODY + 1)  # takes the capabilities of root away until it is root's again
        try:
            assert signals.forward(pidfd, signal.SIGTERM) == "not permitted"
        finally:
            os.seteuid(0)
            os.close(pidfd)
        assert child.poll() is None


@pytest.mark.parametrize("blocked", ["()", "(2,)"])
def test_dying_of_a_signal_is_seen_by_the_parent_even_when_it_was_blocked(blocked):
    dying = f"signal.pthread_sigmask(0, {blocked}); signals.die_of(2)"
    script = f"import signal; from gpuguard.enforcement import signals; {dying}"

    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGINT


@pytest.mark.parametrize("before", ["SIG_IGN", "default_int_handler"])
def test_dying_of_a_signal_heeds_no_handler(before):
    script = (
        f"import signal; from gpuguard.enforcement import signals; signal.signal(2, signal.{before}); signals.die_of(2)"
    )

    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGINT


def test_of_a_signal_that_ends_nobody_one_dies_by_the_code_of_shells():
    script = f"from gpuguard.enforcement import signals; signals.die_of({int(signal.SIGWINCH)})"

    assert subprocess.run([sys.executable, "-c", script]).returncode == 128 + signal.SIGWINCH


def test_whoever_stops_themselves_stops_until_somebody_continues_them():
    with subprocess.Popen(
        [sys.executable, "-c", "from gpuguard.enforcement import signals; signals.stop_self()"]
    ) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

        child.send_signal(signal.SIGCONT)
        assert child.wait() == 0
