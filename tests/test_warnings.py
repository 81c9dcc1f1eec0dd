"""The action warn: what appears on the terminal of a process, in whose words, and on which terminals nothing does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest
from guarded import Scene, a_scene, somebody, until
from users import interpreter

from gpuguard.guards import identity
from gpuguard.guards.terminals import write
from gpuguard.messages import Template


def python() -> str:
    return interpreter() if os.geteuid() == 0 else sys.executable


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
def test_mesg_n_is_honoured_until_the_last_notice():
    with at_a_terminal() as (scene, _, theirs):
        os.fchmod(theirs, 0o600)

        assert scene.act("warn", next_action="notify").word == "failed"
        assert scene.act("warn", next_action="terminate", next_after=60.0).word == "done"


@pytest.mark.terminal
@pytest.mark.root
def test_a_terminal_of_somebody_else_is_not_written_to():
    with at_a_terminal() as (scene, _, theirs):
        os.fchown(theirs, 20002, -1)

        assert write(terminal_of(scene), scene.process.uid or 0, "hello") == "the terminal belongs to somebody else"
        assert scene.act("warn").word == "failed"
