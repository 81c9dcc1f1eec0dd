"""The action release: a policy takes a claim back under which nobody computes, and no other one."""

import errno
import fcntl
import os
import tempfile
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_mig_instance, a_process
from claimholders import Holder, a_holder, a_ready_child, by_hand
from guard_scene import SOMEBODY, Guard, Listing
from nodes import remove

from gpuguard import procfs, users
from gpuguard.claims import unlock as releasing
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.claims.records import FULL_BYTES, locked_devices, probe, record_path
from gpuguard.clusters import slurm_jobs
from gpuguard.enforcement import actions, signals
from gpuguard.enforcement.guard_limits import ActionLimits, PastAction
from gpuguard.enforcement.preflight import ActionContext
from gpuguard.errors import ClaimError, DriverUnresponsive
from gpuguard.model import ClaimRecord, Finding, Snapshot, Subject, Verdict
from gpuguard.source import with_claims

pytestmark = pytest.mark.root


class Claimed(Guard):
    """Three idle devices, of which claims can be made, and a guard that enforces."""

    def __init__(self, directory: LockDirectory, vendor: str = "nvidia") -> None:
        devices = [a_device(number, vendor=vendor) for number in range(3)]
        if vendor == "amd":
            devices = [replace(device, uuid=f"GPU-e3aa140f9a5f9e3{device.index}") for device in devices]
        super().__init__(Listing(*devices), directory=directory)
        self.directory = directory
        self.uuids = [device.uuid for device in self.machine.devices]
        for uuid in self.uuids:
            os.close(open_lock(directory, uuid))

    def act(
        self, holder: Holder | ClaimRecord, action: str = "release", snapshot: Snapshot | None = None, **fields: Any
    ) -> actions.ActionOutcome:
        """What became of it; *fields* of the guard's context, else of the verdict."""
        snapshot = snapshot or self.machine.sample((), None)
        own = ActionContext.__dataclass_fields__.keys() - {"enforce"}
        context = ActionContext(**{**self.facts, **{key: fields.pop(key) for key in own & fields.keys()}})
        self.facts["limits"] = context.limits
        subject = fields.pop("subject", Subject("claim", uid=holder.uid, claim=holder.id, user="alice"))
        finding = Finding("age", subject, "held for 3h without a process", fields.pop("processes", ()))
        verdict = Verdict(
            policy="idle-claims", finding=finding, action=action, step=0, since=0.0, **{"enforce": True, **fields}
        )
        (outcome,) = actions.act(verdict, snapshot, context)
        return outcome

    def locked(self) -> int:
        return len(locked_devices(self.directory, self.uuids))


@pytest.fixture
def claimed(request: pytest.FixtureRequest) -> Iterator[Claimed]:
    place = tempfile.mkdtemp(prefix="gpuguard-release-")  # pytest's own tmp_path lets nobody else in
    os.chmod(place, 0o755)
    yield Claimed(lock_directory(f"{place}/claims"), getattr(request, "param", "nvidia"))
    remove(place)


@pytest.fixture
def holder(claimed: Claimed) -> Iterator[Holder]:
    with a_holder(claimed.directory, *claimed.uuids[:2], uid=SOMEBODY) as one:
        yield one


@pytest.mark.parametrize("claimed", ["nvidia", "amd"], indirect=True)
def test_the_devices_are_free_at_once_the_line_was_written_before_and_the_program_lives_on(claimed, holder):
    written = []
    claimed.facts["append"] = lambda event: not written.append((event, claimed.locked()))
    outcome = claimed.act(holder)

    assert (outcome.word, claimed.locked(), holder.lives()) == ("done", 0, True)
    [(event, locked)] = written
    assert (event.kind, event.outcome, event.user, event.claim, locked) == (
        "release", "about to", "alice", holder.id, 2,
    )  # fmt: skip
    assert dict(event.facts)["policy"] == "idle-claims" and dict(event.facts)["uid"] == SOMEBODY
    reassert = holder.does("claim.reassert()")
    assert reassert.startswith("ClaimLost: the claim 1dea1234 was released by the policy idle-claims")
    assert claimed.locked() == 0
    [done] = claimed.facts["limits"].past  # it counts for the limits of the guard
    assert (done.action, done.process[0], set(done.devices), done.live, done.uid) == (
        "release", holder.pid, set(claimed.uuids[:2]), True, SOMEBODY,
    )  # fmt: skip


def test_a_claim_with_a_uid_that_root_has_given_to_a_user_is_that_users(claimed, monkeypatch, tmp_path):
    (tmp_path / "subuid").write_text(f"{SOMEBODY}:100000:65536\n")
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "subuid"))
    with a_holder(claimed.directory, claimed.uuids[0], uid=100_001) as holder:
        snapshot = with_claims(claimed.machine.sample((), None), lambda: claimed.directory)
        [claim] = snapshot.claims
        protected = claimed.act(claim, snapshot=snapshot, protected=frozenset({SOMEBODY}))
        released = claimed.act(claim, snapshot=snapshot)

        assert (claim.uid, claim.id, claim.holders) == (SOMEBODY, holder.id, (holder.pid,))
        assert (protected.word, protected.why) == ("refused", f"uid {SOMEBODY} is protected")
        assert (released.word, claimed.locked(), holder.lives()) == ("done", 0, True)


def test_a_lock_is_its_owners_while_one_of_their_uids_alone_has_it_open(claimed, monkeypatch, tmp_path):
    """The job of a container without root, whose `gpuguard run` was killed."""
    (tmp_path / "subuid").write_text(f"{SOMEBODY}:100000:65536\n")
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "subuid"))
    with a_holder(claimed.directory, claimed.uuids[0], uid=100_001) as holder:
        record = Path(record_path(claimed.directory, 100_001, holder.id))
        os.chown(record, SOMEBODY, SOMEBODY)
        record.rename(record_path(claimed.directory, SOMEBODY, holder.id))

        assert [(claim.uid, claim.id) for claim in probe(claimed.directory, claimed.uuids)] == [(SOMEBODY, holder.id)]


@pytest.mark.parametrize(
    ("facts", "enforce", "word", "lines"),
    [
        ({"enforce": False}, True, "dry run", ["dry run"]),
        ({}, False, "dry run", ["dry run"]),
        ({"append": lambda event: False}, True, "not recorded", []),
    ],
    ids=["the daemon rehearses", "the policy rehearses", "no line"],
)
def test_a_dry_run_takes_the_same_path_and_leaves_the_claim_as_does_a_log_that_takes_no_line(
    claimed, holder, facts, enforce, word, lines
):
    claimed.facts |= facts
    outcome = claimed.act(holder, enforce=enforce)

    assert (outcome.word, claimed.locked()) == (word, 2)
    assert holder.does("claim.reassert()") == "None"
    assert [event.outcome for event in claimed.events] == lines


def test_the_claim_of_a_mig_instance_is_released_while_another_instance_of_its_gpu_is_busy(claimed):
    parent = a_device(0, mig_mode=True, memory_used=30 * GIB)
    idle, busy = a_mig_instance(parent, 0), a_mig_instance(parent, 1, memory_used=30 * GIB, processes=(a_process(7),))
    claimed.machine.devices = [parent, idle, busy]
    os.close(open_lock(claimed.directory, idle.uuid))
    whole, claimed.machine.sample = claimed.machine.sample, lambda fields, devices=None: whole(fields)  # type: ignore

    with a_holder(claimed.directory, idle.uuid, uid=SOMEBODY) as holder:
        assert claimed.act(holder).word == "done"


def older_answer(c: Claimed, *_: object) -> dict[str, Any]:
    """A driver that answers the second question with what it said before the first."""
    sample, snapshot = c.machine.sample, c.machine.sample((), None)
    c.machine.sample = lambda *of: replace(sample(*of), clock=snapshot.clock - 1)  # type: ignore[method-assign]
    return {"snapshot": snapshot}


def loses_a_device(c: Claimed, holder: Holder, _: object) -> dict[str, Any]:
    """While it is checked."""
    snapshot = c.machine.sample((), None)
    c.machine.before_sample = lambda: holder.does("fcntl.flock(locks[0].descriptor, fcntl.LOCK_UN)")  # type: ignore
    return {"snapshot": snapshot}


def holder_ends(c: Claimed, holder: Holder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Before its files are lent."""

    def gone(pid: int) -> int:
        raise ProcessLookupError(3, "No such process")

    patch.setattr(os, "pidfd_open", gone)
    return {}


def runs_gpuguard(c: Claimed, holder: Holder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(procfs, "ancestors", lambda pid: frozenset({holder.pid}))
    return {}


def device(index: int, **fields: Any) -> Callable[..., dict[str, Any]]:
    """What has become of a device since the sample."""
    return lambda c, *_: c.machine.change(index, **fields) or {}


def judged(**facts: Any) -> Callable[..., dict[str, Any]]:
    return lambda *_: facts


REFUSED: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "a process computes since the sample": (device(0, processes=(a_process(7, uid=SOMEBODY),)), "unused"),
    "a process of a container": (device(1, processes=(a_process(7, uid=0),)), "unused"),
    "a process of nobody knows whom": (device(1, processes=(a_process(7, uid=None),)), "unused"),
    "no list of processes": (device(1, processes=None), "unused"),
    "a list that cannot be right": (device(0, processes_plausible=False), "unused"),
    "memory of nobody who is listed": (device(0, memory_used=3 * GIB), "unused"),
    "memory that cannot be read": (device(1, memory_used=None), "unused"),
    "an older answer of the driver": (older_answer, "listed"),
    "an old sample": (lambda c, *_: {"snapshot": replace(c.snapshot, clock=c.snapshot.clock - 60)}, "fresh"),
    "a sample from the future": (lambda c, *_: {"snapshot": replace(c.snapshot, clock=c.snapshot.clock + 60)}, "fresh"),
    "a protected user": (judged(protected=frozenset({SOMEBODY})), "protected"),
    "a rule that holds no more": (judged(still_true=lambda verdict, snapshot: False), "rule"),
    "no directory": (judged(directory=None), "claim"),
    "processes": (judged(processes=(a_process(7),)), "claim"),
    "another's claim": (judged(subject=Subject("claim", uid=SOMEBODY + 1, claim="1dea1234")), "claim"),
    "another claim": (judged(subject=Subject("claim", uid=SOMEBODY, claim="1dea")), "claim"),
    "no claim": (lambda c, *_: {"subject": Subject("device", device=c.uuids[0])}, "claim"),
    "a path": (judged(subject=Subject("claim", uid=SOMEBODY, claim="../1dea1234")), "claim"),
    "a claim that loses a GPU": (loses_a_device, "claim"),
    "a claim whose holder ends": (holder_ends, "files"),
    "a claim that gpuguard runs in": (runs_gpuguard, "family"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_whatever_is_not_exactly_as_it_was_judged_is_left_alone(claimed, holder, monkeypatch, what):
    make, check = REFUSED[what]
    outcome = claimed.act(holder, **make(claimed, holder, monkeypatch))

    [against] = outcome.failed
    assert (outcome.word, against.check, bool(against.text)) == ("refused", check, True)
    assert [event.outcome for event in claimed.events] == ["refused"]
    assert claimed.locked() == (1 if what == "a claim that loses a GPU" else 2)


def test_an_idle_claim_of_no_slurm_job_is_not_cancelled(claimed, holder):
    outcome = claimed.act(holder, "cancel")

    assert (outcome.word, outcome.why, claimed.locked()) == ("refused", "it belongs to no Slurm job", 2)


def test_a_driver_that_does_not_answer_the_second_question_protects(claimed, holder):
    snapshot = claimed.machine.sample((), None)

    def silent() -> None:
        raise DriverUnresponsive("it hangs")

    claimed.machine.before_sample = silent
    outcome = claimed.act(holder, snapshot=snapshot)

    assert (outcome.word, claimed.locked()) == ("refused", 2) and "it hangs" in outcome.why


def test_the_warning_before_it_goes_to_the_terminal_of_the_holder(claimed):
    ours, theirs = os.openpty()
    os.fchown(theirs, SOMEBODY, -1)
    os.fchmod(theirs, 0o600)  # mesg n: the last notice before something is taken away is written all the same
    own = {"preexec_fn": lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)}
    with a_holder(claimed.directory, claimed.uuids[0], uid=SOMEBODY, **own) as one:
        snapshot = replace(claimed.machine.sample((), None), claims=probe(claimed.directory, claimed.uuids))
        outcome = claimed.act(one, "warn", snapshot, next_action="release", next_after=600.0)
        said = os.read(ours, 4096).decode()

    assert outcome.word == "done" and "held for 3h without a process" in said
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES])
def test_where_the_kernel_lends_no_files_the_line_says_what_the_unit_lacks(claimed, holder, monkeypatch, code):
    refusing = SimpleNamespace(syscall=lambda *_: -1)
    monkeypatch.setattr(releasing, "ctypes", SimpleNamespace(CDLL=lambda *_, **__: refusing, get_errno=lambda: code))
    outcome = claimed.act(holder)

    assert (outcome.word, claimed.locked()) == ("refused", 2) and "pidfd_getfd" in claimed.events[0].message


def test_a_claim_that_only_the_daemon_knows_is_over_when_nothing_is_locked(claimed):
    """Where a broker hands the locks out, a claim need not have a record."""
    claim = a_claim_record(*claimed.uuids[:2], id="1dea1234", uid=SOMEBODY)
    snapshot = replace(claimed.snapshot, claims=(claim,))
    outcome = claimed.act(claim, snapshot=snapshot, directory=replace(claimed.directory, keeper=os.geteuid()))

    assert (outcome.word, outcome.why) == ("refused", "it has ended")


def test_a_lock_that_was_taken_by_hand_and_has_no_record_is_released(claimed):
    with a_ready_child(by_hand(claimed.directory.lock_path(claimed.uuids[0]), SOMEBODY)) as child:
        snapshot = with_claims(claimed.machine.sample((), None), lambda: claimed.directory)
        (claim,) = snapshot.claims
        outcome = claimed.act(claim, snapshot=snapshot)

        assert (claim.written, outcome.word, claimed.locked(), child.poll()) == (None, "done", 0, None)


def test_claims_of_the_system_are_never_taken(claimed):
    with a_holder(claimed.directory, *claimed.uuids[:2]) as root:
        outcome = claimed.act(root)

        assert (outcome.word, outcome.failed[0].check, claimed.locked()) == ("refused", "protected", 2)


def test_the_rate_of_the_guard_holds_for_releases_and_the_step_is_tried_again(claimed, holder):
    claimed.facts["limits"], now = ActionLimits(), claimed.snapshot.clock
    for pid in (2, 3, 4):
        claimed.facts["limits"].record(PastAction(now, "terminate", (pid, 1.0), (), True))
    limited = claimed.act(holder)

    assert (limited.word, claimed.locked()) == ("refused", 2)
    assert limited.wait is not None and limited.wait > 0


@pytest.mark.parametrize("lie", ['"devices": ["GPU-of-nobody", ', '"descriptors": [], "devices": ['])
def test_a_record_that_lies_about_what_its_claim_holds_keeps_nothing(claimed, lie):
    with a_holder(claimed.directory, *claimed.uuids[:2], uid=SOMEBODY) as one:
        one.does("fcntl.flock(locks[0].descriptor, fcntl.LOCK_UN)")
        path = Path(record_path(claimed.directory, SOMEBODY, one.id))
        path.write_text(path.read_text().replace('"devices": [', lie).replace('"descriptors": [3', '"x": [3'))
        with open(path, "a") as file:
            file.write("\n" + "junk" * FULL_BYTES)
        outcome = claimed.act(one)

        assert (outcome.word, claimed.locked()) == ("done", 0)
        assert one.does("claim.reassert()").startswith("ClaimLost: the claim 1dea1234 was released by the policy")


def test_whose_share_of_the_hour_is_used_up_has_their_job_of_slurm_live(claimed, holder, monkeypatch):
    monkeypatch.setattr(slurm_jobs, "against_cancelling", lambda job, uid: None)
    monkeypatch.setattr(slurm_jobs, "cancel", lambda job: pytest.fail("it was cancelled"))
    claimed.facts["limits"], now = ActionLimits(), claimed.snapshot.clock
    for pid in range(2, 7):
        claimed.facts["limits"].record(PastAction(now - 600, "terminate", (pid, 1.0), (), True, uid=SOMEBODY))
    outcome = claimed.act(holder, "cancel")

    assert outcome.word == "refused" and "are for other users: of this one 5 were ended" in outcome.why


def test_a_claim_that_cannot_be_released_is_a_failure(claimed, holder, monkeypatch):
    def fail(*of: object) -> None:
        raise ClaimError("no room for the request")

    monkeypatch.setattr(releasing, "release_locks", fail)

    assert claimed.act(holder).word == "failed"
    assert [event.outcome for event in claimed.events] == ["about to", "failed"]
    assert "no room for the request" in claimed.events[-1].message


@pytest.mark.parametrize("listens", [True, False])
def test_a_supervisor_is_sent_the_signal_that_its_claim_has_changed(claimed, holder, monkeypatch, listens):
    sent: list[int] = []
    monkeypatch.setattr(signals, "forward", lambda pidfd, signum: sent.append(signum) or "sent")
    monkeypatch.setattr(releasing, "is_supervisor", lambda pid: listens and pid == holder.pid)
    its_job = "subprocess.Popen('cat', stdin=-1, pass_fds=claim.pass_fds).pid"  # has the record, too
    assert holder.does(its_job).isdecimal()
    claimed.act(holder)

    assert sent == [signals.CHECK_CLAIM] * listens


@pytest.mark.parametrize(
    ("name", "answer", "word", "asked"),
    [
        ("slurm12", None, "done", ["12"]),
        ("slurm12", "scancel fails", "failed", ["12"]),
        ("1dea1234", None, "failed", []),
    ],
)
def test_cancel_ends_the_job_of_an_idle_claim_and_nothing_else(claimed, monkeypatch, name, answer, word, asked):
    cancelled: list[str] = []
    monkeypatch.setattr(slurm_jobs, "against_cancelling", lambda job, uid: None)
    monkeypatch.setattr(slurm_jobs, "cancel", lambda job: cancelled.append(job) or answer)
    with a_holder(claimed.directory, claimed.uuids[0], uid=SOMEBODY, name=name) as one:
        outcome = claimed.act(one, "cancel")

        assert (outcome.word, cancelled, claimed.locked()) == (word, asked, 1)
