"""The action warn: what appears on the terminal of a process, in whose words, and on which terminals nothing does."""

import contextlib
import os
import signal
import time
import tty
from collections.abc import Iterator
from dataclasses import replace

import pytest
from builders import a_claim_record
from guard_scene import Scene, a_scene, python, somebody
from nodes import until

from gpuguard.claims.directory import lock_directory
from gpuguard.enforcement import actions, identity
from gpuguard.enforcement.pauses import Pauses
from gpuguard.enforcement.terminals import write_to_terminal
from gpuguard.notify.templates import Template


@contextlib.contextmanager
def at_a_terminal() -> Iterator[tuple[Scene, int, int]]:
    """A process on a pseudo-terminal that is its user's, and both ends of that."""
    ours, theirs = os.openpty()
    os.fchown(theirs, somebody() or os.getuid(), -1)
    os.fchmod(theirs, 0o620)
    code = "import fcntl, termios, time; fcntl.ioctl(0, termios.TIOCSCTTY, 0); time.sleep(600)"
    try:
        with a_scene(python(), "-c", code, stdin=theirs) as scene:
            until(lambda: (facts := identity.facts_of(scene.pid)) and facts.terminal)
            yield scene, ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def terminal_of(scene: Scene) -> int:
    facts = identity.facts_of(scene.pid)
    assert facts
    return facts.terminal


@pytest.mark.terminal
def test_a_warning_appears_on_the_terminal_of_the_process():
    with at_a_terminal() as (scene, ours, _):
        os.set_blocking(ours, False)
        assert scene.act("warn", enforce=False).word == "dry run"
        with pytest.raises(BlockingIOError):
            os.read(ours, 4096)

        assert scene.act("warn").word == "done"
        assert b"uses 41.0GiB, 40.0GiB are allowed" in os.read(ours, 65536)


@pytest.mark.terminal
@pytest.mark.parametrize(
    ("options", "context", "said"),
    [
        ({}, {}, "What was seen:"),
        ({}, {"templates": {"en": Template(body="leave, $user")}}, "leave, alice"),
        ({"language": "zh"}, {}, "发现情况："),
        ({"language": "zh"}, {"templates": {"zh": Template(body="请离开，$user")}}, "请离开，alice"),
        ({}, {"language": "zh"}, "发现情况："),
        ({"language": "en"}, {"language": "zh"}, "What was seen:"),
    ],
)
def test_a_warning_uses_the_texts_of_the_administrator_in_the_language_of_the_step(options, context, said):
    with at_a_terminal() as (scene, ours, _):
        scene.context(**context)

        assert scene.act("warn", options=tuple(options.items())).word == "done"
        assert said in os.read(ours, 65536).decode()


@pytest.mark.terminal
def test_the_event_of_a_warning_names_the_step_that_harms_and_when():
    with at_a_terminal() as (scene, _, _):
        verdict = replace(scene.verdict("warn"), harm_action="terminate", harm_after=60.0)
        before = time.time()
        actions.act(verdict, scene.snapshot, scene.context())
        after = time.time()

        facts = dict(scene.events[-1].facts)
        assert facts["harm_action"] == "terminate"
        assert before + 59.9 <= float(facts["harm_unix_seconds"] or 0) <= after + 60.1


@pytest.mark.terminal
def test_mesg_n_is_honoured_until_the_last_notice():
    with at_a_terminal() as (scene, _, theirs):
        os.fchmod(theirs, 0o600)

        assert (outcome := scene.act("warn", next_action="notify")).word == "undelivered"
        assert outcome.why == "the terminal takes no messages"
        assert scene.act("warn", next_action="terminate", next_after=60.0).word == "done"


@pytest.mark.terminal
@pytest.mark.root
def test_a_terminal_of_somebody_else_is_not_written_to():
    with at_a_terminal() as (scene, _, theirs):
        os.fchown(theirs, 20002, -1)

        assert (
            write_to_terminal(terminal_of(scene), scene.process.uid or 0, "hello")
            == "the terminal belongs to another user"
        )
        assert scene.act("warn").word == "undelivered"


@pytest.mark.terminal
@pytest.mark.parametrize("other", [{"start_time": 1.0}, {"uid": 4711}])
def test_a_process_that_was_not_judged_gets_no_warning(other):
    with at_a_terminal() as (scene, _, _):
        scene.subject = replace(scene.subject, **other)

        assert (outcome := scene.act("warn")).word == "undelivered"
        assert outcome.why == scene.events[-1].message.rpartition(": ")[2] == "no terminal"


@pytest.mark.terminal
def test_the_real_user_of_a_process_is_warned_whatever_rights_it_has_taken(monkeypatch):
    with at_a_terminal() as (scene, _, _):
        changed(monkeypatch, lambda uids: (uids[0], 4711, 4711, 4711))

        assert scene.act("warn").word == "done"
        assert about_a_claim(scene).word == "done"


def changed(patch, change):
    read = identity.facts_of
    patch.setattr(identity, "facts_of", lambda *of: (facts := read(*of)) and replace(facts, uids=change(facts.uids)))


def about_a_claim(scene: Scene, **facts) -> actions.ActionOutcome:
    """What becomes of a warning about an idle claim that the process holds."""
    subject = replace(scene.subject, kind="claim", device=None, pid=None, start_time=None, claim="1dea")
    claim = a_claim_record(id="1dea", uid=scene.process.uid, holders=(scene.pid,), **facts)
    verdict = scene.verdict("warn")
    verdict = replace(verdict, finding=replace(verdict.finding, subject=subject, processes=()))
    return actions.act(verdict, replace(scene.snapshot, claims=(claim,)), scene.context())[0]


@pytest.mark.terminal
def test_a_holder_of_another_user_gets_no_warning_about_the_claim(monkeypatch):
    with at_a_terminal() as (scene, _, _):
        changed(monkeypatch, lambda uids: (4711, *uids[1:]))

        assert ((outcome := about_a_claim(scene)).word, outcome.why) == ("undelivered", "no terminal")


@pytest.fixture
def pseudo_terminal() -> Iterator[tuple[int, int, int]]:
    """Our end of one, its number, and the user whose it is."""
    ours, theirs = os.openpty()
    os.fchmod(theirs, 0o620)
    yield ours, os.fstat(theirs).st_rdev, os.fstat(theirs).st_uid
    os.close(ours)
    os.close(theirs)


@pytest.mark.terminal
def test_nothing_in_a_warning_can_steer_the_terminal(pseudo_terminal):
    ours, number, uid = pseudo_terminal

    assert write_to_terminal(number, uid, "a\x1b[2J\r\u202eb\nc") == "written"
    seen = os.read(ours, 4096)
    assert b"a\\x1b[2J" in seen and b"\x1b" not in seen and "\u202e".encode() not in seen


@pytest.mark.terminal
def test_a_warning_stands_on_lines_of_its_own_and_is_twenty_lines_at_most(pseudo_terminal):
    ours, number, uid = pseudo_terminal
    tty.setraw(ours)  # what is read is what was written

    assert write_to_terminal(number, uid, "  Häuser\n\ud800 and\nmore \n\n") == "written"
    assert os.read(ours, 4096).decode() == "\r\n  Häuser\r\n\\ud800 and\r\nmore\r\n"
    assert write_to_terminal(number, uid, "\n".join(map(str, range(30)))) == "written"
    assert os.read(ours, 4096).decode().split() == [str(line) for line in range(20)]


@pytest.mark.terminal
def test_whoever_wants_no_messages_gets_the_last_notice_alone(pseudo_terminal):
    _, number, uid = pseudo_terminal
    os.chmod(f"/dev/pts/{os.minor(number)}", 0o600)

    assert write_to_terminal(number, uid, "hello") == "the terminal takes no messages"
    assert write_to_terminal(number, uid, "hello", last=True) == "written"


def test_what_is_no_terminal_any_more_once_it_is_open_is_not_written_to(monkeypatch):
    opened = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags: opened("/dev/null", flags))
        outcome = write_to_terminal(os.makedev(136, 3), os.stat("/dev/null").st_uid, "hello")

    assert outcome == "no terminal"


@pytest.mark.terminal
def test_a_terminal_that_nobody_reads_does_not_hold_up_the_guard(pseudo_terminal):
    _, number, uid = pseudo_terminal

    until(lambda: write_to_terminal(number, uid, "x" * 4000) == "the terminal does not read")


@pytest.mark.terminal
def test_a_terminal_that_its_owner_keeps_to_themselves_is_left_alone_by_a_guard_without_root(
    pseudo_terminal, monkeypatch
):
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(path)

    _, number, uid = pseudo_terminal
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        outcome = write_to_terminal(number, uid, "hello", last=True)

    assert outcome == "the terminal takes no messages"


@pytest.mark.parametrize("terminal", [0, os.makedev(4, 1), os.makedev(1, 3), os.makedev(136, 250_000)])
def test_only_a_pseudo_terminal_that_exists_is_written_to(terminal):
    assert write_to_terminal(terminal, os.getuid(), "hello") == "no terminal"


def test_a_file_in_the_place_of_a_terminal_is_not_written_to(tmp_path):
    (tmp_path / "3").touch()

    assert write_to_terminal(os.makedev(136, 3), os.getuid(), "hello", place=str(tmp_path)) == "no terminal"
    assert (tmp_path / "3").read_text() == ""


@pytest.mark.terminal
def test_a_process_without_a_supervisor_is_told_on_its_terminal_what_was_done_to_it_and_why():
    with at_a_terminal() as (scene, ours, _):
        scene.context(interactive_grace=0.0)

        assert scene.act("terminate").word == "sent"
        said = os.read(ours, 65536).decode()
        assert f"gpuguard: policy a-policy asked pid {scene.pid} to end (SIGTERM): uses 41.0GiB" in said


@pytest.mark.terminal
def test_where_its_supervisor_tells_it_nothing_more_is_written_on_the_terminal():
    with at_a_terminal() as (scene, ours, _):
        scene.context(interactive_grace=0.0)
        supervised = a_claim_record(id="1dea", uid=scene.process.uid, pid=os.getpid(), holders=(scene.pid,))
        scene.snapshot = replace(scene.snapshot, claims=(supervised,))
        before = signal.signal(signal.SIGURG, lambda *_: None)  # as `gpuguard run` waits for
        outcome = scene.act("terminate")
        signal.signal(signal.SIGURG, before)

        os.set_blocking(ours, False)
        assert outcome.word == "sent"
        with pytest.raises(BlockingIOError):
            os.read(ours, 4096)


@pytest.mark.terminal
def test_the_end_of_a_pause_appears_on_the_terminal_as_its_beginning_did(tmp_path):
    with at_a_terminal() as (scene, ours, _):
        pauses = Pauses(lock_directory(str(tmp_path)), scene.write)
        scene.context(pauses=pauses, interactive_grace=0.0)
        assert scene.act("pause").word == "sent"
        pauses.settle(lambda *_: "the condition does not hold any more")

        read = list[bytes]()
        until(lambda: read.append(os.read(ours, 65536)) or b"go on" in b"".join(read))
        text = b"".join(read).decode()
        assert f"gpuguard: policy a-policy stopped pid {scene.pid} (SIGSTOP): uses 41.0GiB" in text
        assert f"policy a-policy let pid {scene.pid} go on (SIGCONT): the condition does not hold any more" in text


def test_a_warning_that_the_log_of_the_job_has_is_delivered(monkeypatch):
    with a_scene() as scene:
        assert scene.act("warn").word == "undelivered"

        claim = a_claim_record(*scene.machine.devices, uid=scene.process.uid, pid=scene.pid)
        scene.snapshot = replace(scene.snapshot, claims=(claim,))
        monkeypatch.setattr(actions.unlock, "is_supervisor", lambda pid: pid == scene.pid)
        assert scene.act("warn").word == "logged"
