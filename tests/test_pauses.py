"""A pause is a debt: whatever ends the escalation, the policy or the guard, what was stopped goes on."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GIB, a_device, a_process
from guard_scene import Listing, a_child, a_scene, somebody, started
from nodes import Gpuguard, until
from proc import state

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.service import single_daemon
from gpuguard.enforcement import pauses, signals
from gpuguard.enforcement.guard_limits import ActionLimits
from gpuguard.enforcement.pauses import Pause, Pauses
from gpuguard.model import Event
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.thresholds import TemperatureRule
from gpuguard.procfs import boot_clock
from gpuguard.watchdog import Watchdog

HOT = Policy(
    "hot", (TemperatureRule(above=85.0, per="process"),), hold=0.0, steps=(Step("warn"), Step("pause")), enforce=True
)


class Site:
    """A hot GPU with one process, the guard's directory, and its log, which may be full."""

    def __init__(self, path, pid, uid):
        self.pid, self.uid, self.start_time = pid, uid, started(pid)
        row = a_process(pid, start_time=self.start_time, uid=uid, memory_used=10 * GIB)
        self.machine = Listing(a_device(0, processes=(row,), memory_used=10 * GIB, temperature=95.0))
        self.directory = lock_directory(str(path))
        self.events, self.disk_full = [], False

    def write(self, event):
        if not self.disk_full:
            self.events.append(event)
        return not self.disk_full

    def guard(self, *policies, enforce=True):
        """One that has just begun, as after a restart."""
        options = {"enforce": enforce, "append": self.write, "share_host_pids": True}
        guard = Watchdog(self.machine, policies or (HOT,), self.directory, **options)
        guard._context = replace(guard._context, jobs=frozenset({(self.pid, self.start_time)}), interactive_grace=0.0)
        guard.run(ended())  # no sample: only what begins it
        return guard

    def temperature(self, celsius):
        self.machine.change(0, temperature=celsius)

    def paused(self):
        """A guard that has paused the process."""
        guard = self.guard()
        for _ in range(3):
            guard.step()
        until(lambda: state(self.pid) == "T")
        return guard

    def whose_end_is_unwritten(self):
        """A guard that has let the process go on, while the disk was full for a moment."""
        guard = self.paused()
        self.disk_full = True
        self.temperature(60.0)
        guard.step()
        assert self.goes_on()
        self.disk_full = False
        return guard

    def goes_on(self):
        until(lambda: state(self.pid) in "SR", seconds=10.0)
        return True

    def told(self):
        """What the log says of pauses, in order."""
        return [(event.kind, event.outcome) for event in self.events if event.kind in ("pause", "resume")]

    def owed(self):
        return [pause.process for pause in Pauses(self.directory, self.write).read()]


def ended():
    stop = threading.Event()
    stop.set()
    return stop


@pytest.fixture
def site(tmp_path):
    with a_child() as child:
        yield Site(tmp_path / "claims", child.pid, somebody() or os.getuid())


GONE = [(2**22 + number, float(start)) for number, start in ((3, 20), (2, 20), (1, 30))]


@pytest.fixture
def of_the_gone(tmp_path):
    """What is owed to three processes that have ended, and what is written down."""
    events = []
    owed = Pauses(lock_directory(str(tmp_path / "claims")), lambda event: events.append(event) or True)
    made = [Pause(process, "hot", 7, "al", ("GPU-1",), "c1", traced=True, on_terminal=True) for process in GONE]
    return owed, made, events


def an_end(process, outcome, why):
    facts = (("policy", "hot"), ("uid", 7), ("start_time_seconds", process[1]))
    return Event(
        time=0.0, kind="resume", outcome=outcome, user="al", devices=("GPU-1",), pid=process[0], claim="c1",
        message=why, facts=facts,
    )  # fmt: skip


def test_pauses_come_back_as_they_were_written_the_oldest_process_first(of_the_gone):
    owed, made, _ = of_the_gone
    for pause in made:
        owed.begin(pause)
    owed.rehearse(other := replace(made[0], process=(2**22 + 9, 1.0)))

    assert owed.read() == (made[1], made[0], made[2])
    assert owed.processes(rehearsed=False) == frozenset(GONE)
    assert owed.processes(rehearsed=True) == frozenset([*GONE, other.process])
    assert owed.of(GONE[0], live=True) == made[0]
    assert owed.of(GONE[0], live=False) is owed.of(other.process, live=True) is None
    assert owed.of(other.process, live=False) == other
    owed.drop(GONE[0])
    assert owed.read() == (made[1], made[2])


@pytest.mark.parametrize("live", [True, False])
def test_the_end_of_each_pause_is_written_down_with_its_reason_the_oldest_process_first(of_the_gone, live):
    owed, made, events = of_the_gone
    for pause in made:
        owed.begin(pause) if live else owed.rehearse(pause)
    asked = []

    def why_over(pause, is_live):
        asked.append((pause, is_live))
        return "the policy is gone" if pause == made[0] else None

    owed.settle(why_over)
    in_order = [made[1], made[0], made[2]]
    assert asked == [(pause, live) for pause in in_order]
    assert [replace(event, time=0.0) for event in events] == [
        an_end(pause.process, "gone", "the policy is gone" if pause == made[0] else "its pause is over")
        for pause in in_order
    ]
    assert owed.read() == () and owed.processes(rehearsed=True) == frozenset()


def test_the_process_goes_on_when_the_condition_holds_no_more(site):
    guard = site.paused()
    assert site.owed() == [(site.pid, site.start_time)]
    site.temperature(60.0)
    guard.step()

    assert site.goes_on()
    assert site.told() == [("pause", "about to"), ("resume", "done")]
    assert not site.owed()
    [why] = [event.message for event in site.events if event.kind == "resume"]
    assert why == "the condition does not hold any more"


WAYS = {
    "an edited policy": lambda site, guard: edit(guard, replace(HOT, hold=1.0)),
    "another mode": lambda site, guard: edit(guard, replace(HOT, enforce=False)),
    "no policy any more": lambda site, guard: edit(guard),
    "a user who keeps it": lambda site, guard: (guard.keep(boot_clock() + 600.0, uid=site.uid), guard.step()),
    "a sensor that cannot be read": lambda site, guard: (site.temperature(None), guard.step()),
    "the end of the daemon": lambda site, guard: guard.stop(),
    "a start after a kill": lambda site, guard: site.guard(),
    "a start without --enforce": lambda site, guard: site.guard(enforce=False),
}


def edit(guard, *policies):
    guard.policies = policies
    guard.step()


@pytest.mark.parametrize("way", WAYS)
def test_whatever_ends_the_escalation_pays_the_debt(site, way):
    guard = site.paused()
    WAYS[way](site, guard)

    assert site.goes_on()
    assert site.told() == [("pause", "about to"), ("resume", "done")]
    assert not site.owed()


@pytest.mark.parametrize("steps", [("warn", "pause"), ("pause", "resume")])
def test_a_rehearsed_pause_is_written_down_with_its_end_and_stops_nobody(site, steps):
    guard = site.guard(replace(HOT, steps=tuple(map(Step, steps)), cooldown=1000.0), enforce=False)
    for _ in range(4):
        guard.step()
    site.temperature(60.0)
    guard.step()

    assert state(site.pid) in "SR"
    assert site.told() == [("pause", "dry run"), ("resume", "dry run")]
    assert not site.owed()


def test_the_end_of_a_rehearsed_pause_says_nothing_of_a_real_one_of_the_same_process(site):
    site.paused()
    [pause] = (book := Pauses(site.directory, site.write)).read()
    book.settle(lambda *_: None)  # which sees that it stands
    book.rehearse(pause)
    os.kill(site.pid, signal.SIGCONT)
    site.goes_on()

    assert book.end(pause, "it is over", live=False) == "dry run"


def test_a_guard_that_only_looks_ends_no_pause_of_another_guard(site):
    site.paused()
    beside = Watchdog(site.machine, (HOT,), site.directory, append=site.write)
    for _ in range(3):
        beside.step()

    assert state(site.pid) == "T"
    assert site.owed()


def test_the_pause_lasts_as_long_as_the_condition_also_behind_the_last_step_and_is_not_done_twice(site):
    guard = site.paused()
    for _ in range(5):
        guard.step()

    assert state(site.pid) == "T"
    assert site.told() == [("pause", "about to")]


def test_a_step_resumes_what_its_own_policy_has_paused_alone(site):
    """What another one has paused it for may still be so."""
    other = replace(HOT, name="other", steps=(Step("log"), Step("resume")), cooldown=1000.0)
    guard = site.guard(replace(HOT, steps=(Step("pause"),), cooldown=1000.0), other)
    for _ in range(4):
        guard.step()

    assert set(site.told()) == {("pause", "about to"), ("resume", "refused")} and site.owed()
    [why] = {event.message for event in site.events if event.kind == "resume"}
    assert "this policy has not paused it" in why


def test_a_step_that_resumes_needs_no_rate_and_the_condition_may_still_hold(site):
    guard = site.guard(replace(HOT, steps=(Step("pause"), Step("resume")), cooldown=1000.0))
    guard._context = replace(guard._context, limits=NoMore())
    for _ in range(3):
        guard.step()
    site.goes_on()
    guard.step()

    assert site.told() == [("pause", "about to"), ("resume", "done")]
    assert state(site.pid) in "SR"


class NoMore(ActionLimits):
    """Limits that refuse each signal but a pause."""

    def failed(self, action, effect_seen):
        assert action.action == "pause"
        return iter(())


def test_on_a_full_disk_it_goes_on_at_once_and_that_is_written_down_later_once(site, monkeypatch):
    monkeypatch.setattr(pauses, "AGAIN_SECONDS", 0.0)
    guard = site.paused()
    site.disk_full = True
    site.temperature(60.0)
    guard.step()
    assert site.goes_on()
    os.kill(site.pid, signal.SIGSTOP)  # its user stops it: that is no matter of ours any more
    until(lambda: state(site.pid) == "T")
    guard.step()
    site.disk_full = False
    guard.step()

    assert site.told() == [("pause", "about to"), ("resume", "done")]
    assert state(site.pid) == "T"
    assert not site.owed()


def test_before_that_line_is_written_it_is_not_taken_to_be_paused_nor_paused_again(site):
    guard = site.whose_end_is_unwritten()
    site.temperature(95.0)
    guard.policies = (replace(HOT, steps=(Step("pause"),)),)
    guard._context = replace(guard._context, limits=ActionLimits())
    for _ in range(3):
        guard.step()

    assert state(site.pid) in "SR"
    assert site.told() == [("pause", "about to"), ("pause", "failed")]
    assert not guard._memory.cooling


def test_without_a_place_for_the_debt_nothing_is_stopped(site, monkeypatch):
    monkeypatch.setattr(pauses, "write_file", full)
    guard = site.guard()
    for _ in range(4):
        guard.step()

    assert state(site.pid) in "SR"
    assert site.told() == [("pause", "failed")]
    [why] = [event.message for event in site.events if event.kind == "pause" and event.outcome == "failed"]
    assert "it must go on again: No space left" in why


def full(*_, **__):
    raise OSError(28, os.strerror(28))


def test_without_room_for_its_line_nothing_is_stopped_and_there_is_no_debt(site):
    guard = site.guard()
    site.disk_full = True
    for _ in range(4):
        guard.step()

    assert state(site.pid) in "SR"
    assert not site.told() and not site.owed()


def test_a_signal_that_does_not_arrive_leaves_no_debt(site, monkeypatch):
    monkeypatch.setattr(signals, "forward", lambda *_: "not permitted")
    guard = site.guard()
    for _ in range(3):
        guard.step()

    assert not site.owed()


def test_who_is_stopped_already_is_not_paused_and_stays_as_they_are(site):
    os.kill(site.pid, signal.SIGSTOP)
    until(lambda: state(site.pid) == "T")
    guard = site.guard()
    for _ in range(4):
        guard.step()
    site.temperature(60.0)
    guard.step()

    assert state(site.pid) == "T"
    assert site.told() == [("pause", "refused")]


def test_who_goes_on_by_another_hand_owes_and_is_owed_nothing(site):
    guard = site.paused()
    guard.step()  # which sees that it stands
    os.kill(site.pid, signal.SIGCONT)
    site.goes_on()
    guard.step()

    assert site.told() == [("pause", "about to"), ("resume", "left")]
    assert not site.owed()


@pytest.mark.parametrize(("enforce", "word"), [(True, "done"), (False, "dry run")])
def test_who_is_asked_to_end_goes_on_for_that_and_by_no_other_hand(site, enforce, word):
    guard = site.guard(replace(HOT, steps=(Step("pause"), Step("terminate")), cooldown=1000.0), enforce=enforce)
    for _ in range(6):
        guard.step()

    assert [event.outcome for event in site.events if event.kind == "resume"] == [word]
    assert [event.message for event in site.events if event.kind == "resume"] == ["it has been asked to end"]
    assert not site.owed()


def test_who_was_let_go_on_and_stopped_by_another_hand_stays_stopped(tmp_path):
    with a_child("sh", "-c", "while :; do :; done") as child:
        site = Site(tmp_path / "claims", child.pid, somebody() or os.getuid())
        guard = site.paused()
        guard.step()
        spent = cpu(site.pid)
        os.kill(site.pid, signal.SIGCONT)
        until(lambda: cpu(site.pid) > spent + pauses.LATE_CPU_SECONDS * os.sysconf("SC_CLK_TCK"))
        os.kill(site.pid, signal.SIGSTOP)
        until(lambda: state(site.pid) == "T")
        site.temperature(60.0)
        guard.step()

        assert state(site.pid) == "T"
        assert site.told() == [("pause", "about to"), ("resume", "left")]


def cpu(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(") ")[2].split()[11:13]))


def test_an_ended_process_is_forgotten_with_a_line_and_who_has_its_pid_is_not_touched(site):
    book = Pauses(site.directory, site.write)
    book.begin(Pause((site.pid, site.start_time - 1.0), policy="hot", user="alice"))
    os.kill(site.pid, signal.SIGSTOP)
    until(lambda: state(site.pid) == "T")
    book.settle(lambda *_: None)

    assert state(site.pid) == "T"
    assert [(event.kind, event.outcome, event.user) for event in site.events] == [("resume", "gone", "alice")]
    assert not site.owed()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"process": [1, 2.0]}', b"\xff", b"x" * 5000])
def test_a_damaged_file_is_paid_by_its_name_alone(site, content):
    guard = site.paused()
    (path,) = (path for path in os.listdir(site.directory.path) if "paused." in path)
    with open(f"{site.directory.path}/{path}", "wb") as file:
        file.write(content)
    guard.stop()

    assert site.goes_on()
    assert not site.owed()


def test_a_file_of_another_boot_names_nobody(site):
    path = f"{site.directory.path}/{site.directory.prefix}paused.0123abcd.{site.pid}.{site.start_time!r}"
    with open(path, "w"):
        pass
    os.kill(site.pid, signal.SIGSTOP)
    until(lambda: state(site.pid) == "T")
    site.guard()

    assert state(site.pid) == "T"
    assert not os.path.exists(path)


@pytest.mark.root
def test_a_file_that_another_user_made_continues_nobody(site):
    path = f"{site.directory.path}/{site.directory.prefix}paused.{pauses.boot_id()}.{site.pid}.{site.start_time!r}"
    with open(path, "w"):
        os.chown(path, 20002, 20002)
    os.kill(site.pid, signal.SIGSTOP)
    until(lambda: state(site.pid) == "T")
    site.guard()

    assert state(site.pid) == "T"


def test_what_others_could_have_written_into_a_file_is_not_believed_but_its_name_is(site):
    site.paused()
    [path] = Path(site.directory.path).glob("*paused.*")
    path.chmod(0o666)

    assert Pauses(site.directory, site.write).read() == (Pause((site.pid, site.start_time)),)


def test_without_a_directory_nothing_is_stopped():
    with a_scene() as scene:
        scene.context(pauses=Pauses(None, scene.write))
        outcome = scene.act("pause")

        assert (outcome.word, outcome.why) == (
            "failed",
            "it cannot be written down that it must go on again: there is no directory of claims",
        )
        assert state(scene.pid) == "S"


def test_a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_is_let_go_on_later(site, monkeypatch):
    site.paused()
    (pause,) = (book := Pauses(site.directory, site.write)).read()
    for broken in (("os.pidfd_open", too_many), ("gpuguard.enforcement.pauses.stat_of", lambda pid: None)):
        with monkeypatch.context() as patch:
            patch.setattr(*broken)
            assert book.end(pause, "ended by root") == ""
            assert site.owed()

    assert book.end(pause, "ended by root") == "done"
    assert site.goes_on()


def too_many(pid):
    raise OSError(24, os.strerror(24))


def test_a_policy_resumes_nobody_whom_it_has_not_paused(tmp_path):
    with a_scene() as scene:
        os.kill(scene.pid, signal.SIGSTOP)
        until(lambda: state(scene.pid) == "T")
        scene.context(pauses=Pauses(lock_directory(str(tmp_path)), scene.write))

        assert scene.act("resume").word == "refused"
        assert state(scene.pid) == "T"


def test_root_ends_pauses_without_a_daemon(site, tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    site.paused()  # and its daemon is killed

    assert gpuguard("resume", "--list").stdout == f"{site.pid}  alice  paused by the policy hot\n"
    assert gpuguard("resume", "1").stderr == "gpuguard: gpuguard has not paused 1: see `gpuguard resume --list`.\n"
    assert state(site.pid) == "T"
    assert gpuguard("resume", str(site.pid)).stdout == f"{site.pid}  alice  paused by the policy hot: it goes on\n"
    assert site.goes_on()
    assert gpuguard("resume").stdout == "nothing is paused.\n"
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["outcome"], event["pid"]) == ("resume", "done", site.pid)
    assert event["message"].startswith("let go on by ")


def test_doctor_is_red_while_something_is_paused_that_no_daemon_will_end(site, tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    site.paused()
    with single_daemon(site.directory):
        guarded = gpuguard("doctor")
    alone = gpuguard("doctor")
    gpuguard("resume")

    assert (guarded.returncode, "is paused" in guarded.stdout) == (0, False)
    assert (alone.returncode, "1 process is paused by a policy, and no daemon runs" in alone.stdout) == (1, True)
    assert "is paused" not in gpuguard("doctor").stdout
