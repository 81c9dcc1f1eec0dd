"""Before a signal: for each check an innocent whom it alone protects, and who is hit when it is switched off."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import GIB, MIB, a_device, a_process
from guard_scene import AMD_HERE, CARD, KFD, OTHER_RENDER, RENDER, SOMEBODY, Scene, a_child, a_scene, on_a_gpu_of
from nodes import until

from gpuguard import procfs
from gpuguard.enforcement import actions, identity, preflight, signals
from gpuguard.errors import DriverUnresponsive
from gpuguard.model import Event, GpuProcess
from gpuguard.vendors import AMD, INTEL, MTHREADS, NVIDIA, VENDORS, Vendor

Patch = pytest.MonkeyPatch
Innocent = Callable[[Scene, Patch], object]


def test_an_offender_whom_nothing_protects_is_hit(scene):
    assert scene.against() == set()
    assert scene.act().word == "sent"
    assert scene.dies()


def test_a_file_of_the_users_own_at_the_path_of_a_protected_program_protects_no_offender(scene, monkeypatch):
    scene.context(protected_executables=("/*/sleep",))
    monkeypatch.setattr(identity, "runs_one_of", lambda *_: False)

    assert scene.against() == set()


def successor_of_the_pid(scene: Scene, patch: Patch) -> None:
    scene.row(start_time=scene.start_time - 1)
    scene.subject = replace(scene.subject, start_time=scene.process.start_time)
    scene.context(jobs=frozenset({(scene.pid, scene.process.start_time)}))


def without_the_driver(scene: Scene, patch: Patch) -> None:
    patch.setattr(preflight, "driver_nodes", lambda devices: (frozenset({os.stat("/dev/full").st_rdev}),))
    patch.setattr(scene.machine, "simulated", False)


def graphics_on_another_device(scene: Scene, patch: Patch) -> None:
    other = a_device(1, processes=(replace(scene.process, kind="graphics"),))
    scene.snapshot = replace(scene.snapshot, devices=(*scene.snapshot.devices, other))
    scene.machine.devices.append(a_device(1, processes=(scene.process,)))


def of_another_user_than_judged(scene: Scene, patch: Patch) -> None:
    scene.row(uid=SOMEBODY + 1)
    scene.subject = replace(scene.subject, uid=SOMEBODY + 1)


def of_a_program_where_nobody_answers(scene: Scene, patch: Patch) -> None:
    scene.context(protected_executables=("/*/sleep",))
    for name, value in (("FILE_SECONDS", 1.0), ("_hanging", {}), ("_spent", {})):
        patch.setattr(procfs, name, value)
    patch.setattr(identity, "runs_one_of", lambda *_: threading.Event().wait(20))


def facts_become(**change: Any) -> Innocent:
    """What /proc says of the offender from now on."""
    read = identity.facts_of
    return lambda scene, patch: patch.setattr(
        identity, "facts_of", lambda *of: (facts := read(*of)) and replace(facts, **change)
    )


def found(**change: Any) -> Innocent:
    """What stands in the sample that was judged."""

    def innocent(scene: Scene, patch: Patch) -> None:
        scene.snapshot = replace(scene.snapshot, **change)

    return innocent


def answers(**change: Any) -> Innocent:
    """What stands in the driver's second answer."""

    def innocent(scene: Scene, patch: Patch) -> None:
        sample = scene.machine.sample
        patch.setattr(scene.machine, "sample", lambda *of: replace(sample(*of), **change))

    return innocent


def list_was_implausible(scene: Scene, patch: Patch) -> None:
    scene.snapshot = replace(scene.snapshot, devices=(replace(scene.snapshot.devices[0], processes_plausible=False),))


def sampled_at(clock: Callable[[Scene], float]) -> Innocent:
    return lambda scene, patch: found(clock=clock(scene))(scene, patch)


def owner_unknown_to_the_rule(scene: Scene, patch: Patch) -> None:
    scene.subject = replace(scene.subject, uid=None)


def at_the_own_screen(**row: Any) -> Innocent:
    def innocent(scene: Scene, patch: Patch) -> None:
        patch.setattr(identity, "is_at_the_seat", lambda facts: True)
        scene.row(**row)

    return innocent


SERVER = "/usr/bin/nvidia-cuda-mps-server"
ROOTS_SERVER = a_process(900_001, uid=0, user="root", executable=SERVER, memory_used=66 * MIB)
ANOTHERS_CLIENT = a_process(900_002, uid=1002, user="bob", kind="mps", memory_used=GIB)


def beside_mps(*others: GpuProcess) -> Innocent:
    """A client of MPS with *others* on its device."""

    def innocent(scene: Scene, _: Patch) -> None:
        scene.row(kind="mps")
        scene.listed(scene.process, *others)

    return innocent


# who -> what makes them so, the check that protects them, and those that would as well
INNOCENTS: dict[str, tuple[Innocent, str, tuple[str, ...]]] = {
    "of a recording": (found(recorded=True), "live", ()),
    "answer from a recording": (answers(recorded=True), "listed", ()),
    "pid beyond all": (lambda scene, patch: patch.setattr(procfs, "pid_max", lambda: scene.pid - 1), "pid", ()),
    "owner unknown to the rule": (owner_unknown_to_the_rule, "known", ("owner",)),
    "stale sample": (lambda scene, _: scene.context(interval=1e-6), "fresh", ()),
    "sample from the future": (sampled_at(lambda scene: scene.snapshot.clock + 3600), "fresh", ("listed",)),
    "list was implausible": (list_was_implausible, "sampled", ()),
    "pids of another namespace": (
        lambda _, patch: patch.setattr(preflight, "in_first_pid_namespace", lambda: False), "namespace", ()
    ),
    "successor of the pid": (successor_of_the_pid, "start time", ()),
    "started at the time of the sample": (sampled_at(lambda scene: scene.start_time + 0.015), "sample time", ()),
    "off the GPU by now": (lambda scene, _: scene.listed(), "listed", ("owner",)),
    "list is implausible now": (lambda scene, _: scene.machine.change(0, processes_plausible=False), "listed", ()),
    "older answer of the driver": (
        lambda scene, patch: answers(clock=scene.snapshot.clock - 1)(scene, patch), "listed", ()
    ),
    "without the driver": (without_the_driver, "driver", ()),
    "a desktop": (lambda scene, _: scene.row(kind="graphics", memory_used=2 * GIB), "kind", ()),
    "a desktop with video": (lambda scene, _: scene.row(kind="compute+graphics", memory_used=2 * GIB), "kind", ()),
    "a large desktop at the machine's own screen": (at_the_own_screen(kind="graphics"), "kind", ()),
    "graphics and more at the machine's own screen": (at_the_own_screen(kind="compute+graphics"), "kind", ()),
    "a desktop at the own screen on another GPU": (
        lambda scene, patch: [at_the_own_screen()(scene, patch), graphics_on_another_device(scene, patch)], "kind", ()
    ),
    "mps client beside one of another user": (beside_mps(ROOTS_SERVER, ANOTHERS_CLIENT), "kind", ()),
    "mps client beside one of a user who is not known": (
        beside_mps(ROOTS_SERVER, replace(ANOTHERS_CLIENT, uid=None)), "kind", ()
    ),
    "mps client of a server that cannot be seen": (
        beside_mps(replace(ROOTS_SERVER, executable=None), ANOTHERS_CLIENT), "kind", ()
    ),
    "of another user than judged": (of_another_user_than_judged, "owner", ()),
    "of a user without a name": (lambda scene, _: scene.row(user=str(scene.process.uid)), "owner", ()),
    "of a user whose name cannot be read": (lambda scene, _: scene.row(user=None), "owner", ()),
    "of a protected user": (lambda scene, _: scene.context(protected={scene.process.uid}), "protected", ()),
    "with the rights of root": (
        lambda scene, patch: facts_become(uids=(scene.process.uid, 0, 0, 0))(scene, patch), "protected", ()
    ),
    "of a system account": (lambda _, patch: patch.setattr(identity, "uid_min", lambda: 2**31), "protected", ()),
    "of nobody": (
        lambda scene, patch: patch.setattr(identity, "overflow_uid", lambda: scene.process.uid), "protected", ()
    ),
    "program unreadable": (
        lambda _, patch: patch.setattr(identity, "_executable", lambda pid: (None, None, False)), "program", ()
    ),
    "of a protected program": (lambda scene, _: scene.context(protected_executables=("/*/sleep",)), "program", ()),
    "of a program where nobody answers": (of_a_program_where_nobody_answers, "program", ()),
    "beyond our power": (
        lambda _, patch: patch.setattr(preflight, "may_signal", lambda uids: False), "power", ()
    ),
    "child of the guard": (lambda scene, _: scene.context(jobs=frozenset()), "family", ()),
    "notebook": (facts_become(command="python -m ipykernel_launcher -f kernel.json"), "interactive", ()),
    "on a terminal": (facts_become(terminal=os.makedev(136, 3)), "interactive", ()),
    "debugged": (facts_become(tracer=1), "interactive", ()),
    "changed their ways": (lambda scene, _: scene.context(still_true=lambda *_: False), "rule", ()),
}  # fmt: skip


def switch_off(patch: Patch, *checks: str) -> None:
    for check in checks:
        table = preflight.EARLY if check in preflight.EARLY else preflight.LATE
        patch.setitem(table, check, preflight.PreflightCheck(lambda target: None))


@pytest.mark.parametrize(("innocent", "check", "others"), INNOCENTS.values(), ids=INNOCENTS)
def test_an_innocent_lives(scene, monkeypatch, innocent, check, others):
    innocent(scene, monkeypatch)

    assert scene.act().word == "refused"
    assert check in scene.against() <= {check, *others}
    assert scene.lives()
    assert [event.outcome for event in scene.events] == ["refused"]


@pytest.mark.parametrize(("innocent", "check", "others"), INNOCENTS.values(), ids=INNOCENTS)
def test_without_its_check_that_innocent_is_hit(scene, monkeypatch, innocent, check, others):
    innocent(scene, monkeypatch)
    switch_off(monkeypatch, check, *others)

    assert scene.act().word == "sent"
    assert scene.dies()


MOORE = replace(MTHREADS, nodes=(KFD,))
DESKTOP = {"kind": "graphics", "memory_used": GIB}
OF_OTHER_VENDORS: dict[str, tuple[Vendor, int | None, str, dict[str, Any], set[str]]] = {
    "computes by KFD": (AMD_HERE, 5, KFD, {}, set()),
    "computes by Vulkan": (AMD_HERE, 5, RENDER, {}, set()),
    "computes by the card node": (AMD_HERE, 5, CARD, {}, set()),
    "a shell with a pid that KFD remembers": (AMD_HERE, 5, os.devnull, {}, {"driver"}),
    "has another GPU open": (AMD_HERE, 5, OTHER_RENDER, {}, {"driver"}),
    "a desktop": (AMD_HERE, 5, CARD, DESKTOP, {"kind"}),
    "computes on Intel's": (INTEL, 5, RENDER, {}, set()),
    "uses the driver of another vendor": (INTEL, 5, KFD, {}, {"driver"}),
    "on a GPU whose node is not known": (INTEL, None, RENDER, {}, {"driver"}),
    "computes on one of Moore Threads": (MOORE, 0, KFD, {}, set()),
    "is not on one of Moore Threads": (MOORE, 0, RENDER, {}, {"driver"}),
}


@pytest.mark.parametrize(
    ("vendor", "minor", "opened", "row", "against"), OF_OTHER_VENDORS.values(), ids=OF_OTHER_VENDORS
)
def test_on_a_gpu_of_another_vendor_only_who_has_its_own_node_open_is_hit(
    monkeypatch, tmp_path, vendor, minor, opened, row, against
):
    with on_a_gpu_of(vendor, monkeypatch, tmp_path, minor, opened) as scene:
        scene.row(**row)

        assert scene.against() == against
        switch_off(monkeypatch, *against)
        assert scene.act().word == "sent", "and only that check protects it"
        assert scene.dies()


def test_a_driver_without_a_node_is_doubt_unless_it_is_nvidias(monkeypatch):
    missing = "/dev/there-is-none"
    for vendor in (NVIDIA, AMD, INTEL, MTHREADS):
        patched = replace(vendor, control_node=missing, nodes=(missing,))
        monkeypatch.setitem(VENDORS, vendor.name, patched)
    nodes = [identity.driver_nodes([a_device(vendor=name, minor_number=None)]) for name in VENDORS]

    assert dict(zip(VENDORS, nodes, strict=True)) == {
        "nvidia": (), **dict.fromkeys(("amd", "intel", "mthreads"), (frozenset(),))
    }  # fmt: skip


def test_whoever_is_on_gpus_of_two_vendors_must_have_both_drivers_open():
    zero, full = (frozenset({os.stat(path).st_rdev}) for path in ("/dev/zero", "/dev/full"))
    with open("/dev/zero", "rb"):
        one, both = (identity.facts_of(os.getpid(), drivers) for drivers in ((zero,), (zero, full)))
        with open("/dev/full", "rb"):
            now = identity.facts_of(os.getpid(), (zero, full))

    assert [facts and facts.uses_driver for facts in (one, both, now)] == [True, False, True]
    unknown = identity.facts_of(os.getpid(), (frozenset(),))
    assert unknown and unknown.uses_driver is None, "of a driver whose nodes are not known nothing can be said"


def under_mps_of_their_own(scene: Scene, _: Patch) -> None:
    server = a_process(900_001, uid=scene.process.uid, executable=SERVER, memory_used=66 * MIB)
    scene.row(kind="mps")
    scene.listed(scene.process, server, a_process(900_003, uid=scene.process.uid, kind="mps"))


# What any user can arrange -> how; none of it is a sanctuary.
ARRANGED: dict[str, Innocent] = {
    "to draw": lambda scene, _: scene.row(kind="graphics"),
    "to draw and to compute": lambda scene, _: scene.row(kind="compute+graphics"),
    "to draw on another GPU": graphics_on_another_device,
    "an MPS server of their own": under_mps_of_their_own,
    "an MPS server of their own, beside an accomplice's": beside_mps(
        a_process(900_001, uid=1002, executable=SERVER), ANOTHERS_CLIENT
    ),
    "to be the only client of root's MPS server": beside_mps(ROOTS_SERVER),
    "to have an accomplice with an MPS server": lambda scene, _: scene.listed(scene.process, ANOTHERS_CLIENT),
    "to be no client of root's MPS server": lambda scene, _: scene.listed(scene.process, ROOTS_SERVER, ANOTHERS_CLIENT),
}


@pytest.mark.parametrize("arranged", ARRANGED.values(), ids=ARRANGED)
def test_no_kind_and_no_neighbour_that_a_user_can_arrange_shelters_them(scene, monkeypatch, arranged):
    arranged(scene, monkeypatch)

    assert scene.act().word == "sent"
    assert scene.dies()


SEAT = {"UID": "1001", "SEAT": "seat0", "STATE": "active", "SCOPE": "session-2.scope"}
SLICE = "0::/user.slice/user-1001.slice"


@pytest.mark.parametrize(
    ("cgroup", "session", "at_the_seat"),
    [
        (f"{SLICE}/session-2.scope\n", {}, True),
        (f"{SLICE}/user@1001.service/app.slice/app-gnome-firefox-7.scope\n", {}, True),
        (f"{SLICE}/session-2.scope\n", {"STATE": "online"}, True),  # another session is on the screen now
        (f"{SLICE}/session-2.scope\n", {"STATE": "closing"}, False),
        (f"{SLICE}/session-2.scope\n", {"SEAT": ""}, False),
        (f"{SLICE}/session-3.scope\n", {}, False),  # over ssh, while the user sits at the machine, too
        (f"{SLICE}/session-3.scope/session-2.scope\n", {}, False),
        (f"{SLICE}/session-2.scope\n", {"UID": "1002"}, False),
        ("0::/user.slice/user-1002.slice/session-2.scope\n", {}, False),
        ("0::/system.slice/docker-*.scope/user.slice/user-1001.slice/session-2.scope\n", {}, False),
        ("0::/system.slice/backup.service\n", {}, False),
        (None, {}, False),
    ],
)
def test_who_sits_at_the_machine_is_told_by_logind_and_the_kernel(monkeypatch, tmp_path, cgroup, session, at_the_seat):
    facts = identity.facts_of(os.getpid())
    assert facts
    monkeypatch.setattr(identity, "SESSIONS", str(tmp_path))
    (tmp_path / "2").write_text("".join(f"{name}={value}\n" for name, value in {**SEAT, **session}.items()))
    (tmp_path / "3").write_text("UID=1001\nSTATE=active\nREMOTE=1\nSCOPE=session-3.scope\n")

    assert identity.is_at_the_seat(replace(facts, uids=(1001,) * 4, cgroup=cgroup)) is at_the_seat


def test_where_there_is_no_logind_nobody_sits_at_the_machine(monkeypatch):
    facts = identity.facts_of(os.getpid())
    monkeypatch.setattr(identity, "SESSIONS", "/nowhere")

    assert facts and not identity.is_at_the_seat(replace(facts, uids=(1001,) * 4, cgroup=f"{SLICE}/session-2.scope"))


def test_every_check_has_an_innocent():
    tested = {check for _, check, _ in INNOCENTS.values()} | {"catches", "limits"}  # these two: below
    tested |= {"slurm", "stopped", "requeue"}  # in test_slurm_jobs, test_pauses, test_requeue

    of_processes = {name for name, check in {**preflight.EARLY, **preflight.LATE}.items() if check.process}
    assert tested == of_processes


def test_a_job_that_would_not_survive_a_checkpoint_signal_is_spared(scene, monkeypatch):
    assert scene.act("checkpoint").word == "refused"
    assert scene.lives()

    switch_off(monkeypatch, "catches")
    assert scene.act("checkpoint").word == "sent"
    assert scene.dies()


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

    monkeypatch.setattr(signals, "forward", lambda pidfd, signum: sent.append(signum) or "sent")
    scene.row(pid=pid, start_time=procfs.start_time(pid), uid=os.getuid())
    scene.subject = replace(scene.subject, pid=pid, start_time=scene.process.start_time, uid=os.getuid())
    switch_off(monkeypatch, "protected", "program", "interactive", "owner")

    assert scene.act().word == "refused"
    assert sent == []
    switch_off(monkeypatch, "family")
    assert scene.act().word == "sent"


def test_a_process_with_the_driver_open_is_hit(monkeypatch):
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
def test_a_program_of_the_system_is_known_by_who_put_it_where(monkeypatch, open_place, name, owner, spared):
    monkeypatch.setattr(identity, "SYSTEM_PLACES", (*identity.SYSTEM_PLACES, f"{open_place}/"))
    program = shutil.copy(shutil.which("sleep") or "", f"{open_place}/{name}")
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
    seen = identity.facts_of(scene.pid)
    assert seen is not None
    facts = replace(seen, foreign_code="nowhere")

    assert not identity.belongs_to_the_system(replace(facts, command="/usr/bin/Xorg :0"))
    assert identity.belongs_to_the_system(replace(facts, executable="/usr/lib/xorg/Xorg", executable_owner=0))
    assert identity.belongs_to_the_system(
        replace(facts, executable="/usr/bin/nv-hostengine (deleted)", executable_owner=0)
    )
    assert not identity.belongs_to_the_system(replace(facts, executable="/home/eve/Xorg", executable_owner=0))


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


@pytest.mark.parametrize(
    ("before", "signum", "returncode"),
    [
        ("signal.pthread_sigmask(0, ())", 2, -2),
        ("signal.pthread_sigmask(0, (2,))", 2, -2),
        ("signal.signal(2, signal.SIG_IGN)", 2, -2),
        ("signal.signal(2, signal.default_int_handler)", 2, -2),
        ("pass", int(signal.SIGWINCH), 128 + signal.SIGWINCH),  # it ends nobody: the code of shells
    ],
)
def test_dying_of_a_signal_is_seen_by_the_parent_whatever_was_done_with_it_before(before, signum, returncode):
    script = f"import signal; from gpuguard.enforcement import signals; {before}; signals.die_of({signum})"

    assert subprocess.run([sys.executable, "-c", script]).returncode == returncode


def test_a_process_that_stops_itself_stops_until_it_is_continued():
    with subprocess.Popen(
        [sys.executable, "-c", "from gpuguard.enforcement import signals; signals.stop_self()"]
    ) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

        child.send_signal(signal.SIGCONT)
        assert child.wait() == 0


def test_a_pid_that_cannot_be_held_is_left_alone(scene, monkeypatch):
    def fail(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)

    assert scene.against() == {"pidfd"}
    assert "Too many open files" in scene.act().why


def test_a_process_that_has_ended_before_it_could_be_held_is_gone(scene):
    os.kill(scene.pid, signal.SIGKILL)
    os.waitpid(scene.pid, 0)

    assert [scene.act().word, scene.act().word] == ["gone", "gone"]
    assert scene.against() == {"alive"}
    assert [event.outcome for event in scene.events] == ["gone", "gone"]


def test_a_driver_that_cannot_be_asked_again_is_said_and_nothing_else_is_looked_at(scene):
    def fail() -> None:
        raise DriverUnresponsive("a driver call did not come back")

    scene.machine.before_sample = fail

    assert scene.act().why == "the driver cannot be asked again: a driver call did not come back"


def test_no_descriptor_is_left_open(scene):
    scene.against()
    before = len(os.listdir("/proc/self/fd"))
    scene.against()

    assert len(os.listdir("/proc/self/fd")) == before


def a_slow_log(scene: Scene, patch: Patch, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> None:
    """An audit log each of whose lines takes so many seconds, as on a server that does not answer."""
    behind = 0.0

    def write(event: Event) -> bool:
        nonlocal behind
        meanwhile()
        behind += seconds
        return scene.write(event)

    patch.setattr(actions, "boot_clock", lambda: procfs.boot_clock() + behind)
    scene.context(append=write)


@pytest.mark.parametrize(("enforce", "announced", "word"), [(True, "about to", "sent"), (False, "dry run", "dry run")])
def test_what_was_decided_before_the_audit_log_hung_is_decided_anew(scene, monkeypatch, enforce, announced, word):
    scene.context(enforce=enforce)
    a_slow_log(scene, monkeypatch, 60.0)

    late = scene.act()
    assert (late.word, late.wait) == ("refused", 0.0)
    assert late.why == "its line in the audit log took 1m to write: what was decided before is too old"
    assert [event.outcome for event in scene.events] == [announced, "refused"]

    a_slow_log(scene, monkeypatch, 0.0)
    assert scene.act().word == word  # nothing was done before, so no limit is in the way


def test_a_step_that_came_too_late_after_its_sample_is_tried_again_after_the_next(scene):
    scene.context(interval=1e-6)  # as for all who come behind a line that took long to write
    late = scene.act()
    scene.context(interval=10.0)

    assert (late.word, late.wait, scene.act().word) == ("refused", 0.0, "sent")


@pytest.mark.parametrize("enforce", [True, False])
def test_a_log_that_is_a_little_slow_holds_up_nothing(scene, monkeypatch, enforce):
    scene.context(enforce=enforce)
    a_slow_log(scene, monkeypatch, 0.5)

    assert scene.act().word == ("sent" if enforce else "dry run")


ANOTHER = ("sh", "-c", "read go; exec sleep 600")  # becomes another program when it is told to


def test_a_process_that_runs_another_program_by_the_time_its_line_is_written_is_not_hit(monkeypatch):
    reader, writer = os.pipe()
    with open(reader, "rb") as words, open(writer, "wb", buffering=0) as say, a_scene(*ANOTHER, stdin=words) as scene:

        def goes_on() -> None:
            say.write(b"go\n")
            until(lambda: os.readlink(f"/proc/{scene.pid}/exe").endswith("/sleep"))

        a_slow_log(scene, monkeypatch, 60.0, goes_on)

        assert scene.act().word == "refused"
        assert scene.lives()


def test_who_breaks_no_rule_any_more_when_their_line_is_written_is_not_hit(scene, monkeypatch):
    offending = True

    def ends() -> None:
        nonlocal offending
        offending = False

    scene.context(still_true=lambda *_: offending)
    a_slow_log(scene, monkeypatch, 60.0, ends)

    assert scene.act().word == "refused"
    a_slow_log(scene, monkeypatch, 0.0)
    assert scene.act().why == "the condition does not hold any more"
    assert scene.lives()
