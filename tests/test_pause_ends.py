"""When a paused process is let go on, and when another hand has it: what /proc says of it is the test's."""

import os
import signal
from typing import Any

import pytest

from gpuguard.enforcement import pauses
from gpuguard.enforcement.pauses import AGAIN_SECONDS, LATE_CPU_SECONDS, Pause, Pauses
from gpuguard.locale import translated
from gpuguard.procfs import Stat

PROCESS = (4711, 100.0)
BIT = {signum: 1 << (signum - 1) for signum in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)}


class Process:
    """A process that stands, as /proc shows it, and the signals that it gets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.state, self.cpu, self.start, self.shown = "T", 5.0, PROCESS[1], True
        self.tracer: list[bytes] = [b"0"]
        self.masks: dict[bytes, int | None] = {b"ShdPnd": 0, b"SigPnd": 0, b"SigBlk": 0}
        self.threads: list[str] = ["T", "T"]
        self.ended, self.word, self.clock, self.alive = False, "sent", 1000.0, True
        self.signals, self.terminal = list[int](), list[tuple[Any, ...]]()
        patch.setattr(pauses.os, "pidfd_open", lambda pid: os.open("/dev/null", os.O_RDONLY))
        patch.setattr(pauses.os, "cpu_count", lambda: 4)
        patch.setattr(pauses.time, "monotonic", lambda: self.clock)
        patch.setattr(pauses.time, "time", lambda: 7.0)
        patch.setattr(pauses.identity, "has_ended", lambda pidfd: os.fstat(pidfd) and self.ended)
        patch.setattr(pauses.identity, "is_alive", lambda process: self.alive)
        patch.setattr(pauses, "stat_of", self.stat_of)
        patch.setattr(pauses, "status_words", self.status_words)
        patch.setattr(pauses.glob, "glob", self.tasks)
        patch.setattr(
            pauses, "read_proc", lambda path: path.removesuffix("/stat").encode() if "gone" not in path else None
        )
        patch.setattr(pauses, "parse_stat", lambda line: self.stat(line.decode()) if line else None)
        patch.setattr(pauses.signals, "forward", self.forward)
        patch.setattr(pauses, "write_to_terminal", lambda *words: self.terminal.append(words))

    def stat(self, state: str) -> Stat:
        return Stat(b"4711 (a b", state, 1, 1, 1, 34816, self.cpu, self.start, 0, None)

    def stat_of(self, pid: int) -> Stat | None:
        assert pid == PROCESS[0]
        return self.stat(self.state) if self.shown else None

    def tasks(self, pattern: str) -> list[str]:
        assert pattern == "/proc/4711/task/*"
        return self.threads

    def status_words(self, pid: int, name: bytes) -> list[bytes]:
        assert pid == PROCESS[0]
        if name == b"TracerPid":
            return self.tracer
        mask = self.masks[name]
        return [] if mask is None else [b"%x" % mask]

    def forward(self, pidfd: int, signum: int) -> str:
        os.fstat(pidfd)
        self.signals.append(signum)
        return self.word


class Book:
    """What is owed to one process, and what is written down."""

    def __init__(self, directory: Any) -> None:
        self.events, self.room = list[Any](), True
        self.pauses = Pauses(directory, self.write)
        self.pause = Pause(PROCESS, "hot", 7, "al", ("gpu0",), "c1")
        self.pauses.begin(self.pause)

    def write(self, event: Any) -> bool:
        if self.room:
            self.events.append(event)
        return self.room

    def settle(self, why: str | None = None, **more: Any) -> None:
        self.pauses.settle(lambda pause, live: why, **more)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(event.outcome, translated(event.message)) for event in self.events]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


@pytest.fixture
def book(directory: Any) -> Book:
    return Book(directory)


STOPPED = 5.0 + 2 * LATE_CPU_SECONDS  # CPU seconds that two threads may have when they stand
DEBUGGED, ANOTHER = "a debugger has it", "another signal stops it"
ANEW, WENT_ON = "another hand let it go on meanwhile, and stopped it", "another hand let it go on"

SEEN: dict[str, tuple[dict[str, Any], str | None]] = {
    "as it was stopped": ({}, None),
    "with a debugger": ({"tracer": [b"17"]}, DEBUGGED),
    "of which the debugger is not shown": ({"tracer": []}, None),
    "with a stop that waits": ({"masks": {b"ShdPnd": BIT[signal.SIGTSTP]}}, ANOTHER),
    "with a stop of its thread": ({"masks": {b"SigPnd": BIT[signal.SIGTTIN]}}, ANOTHER),
    "with a stop from its terminal": ({"masks": {b"ShdPnd": BIT[signal.SIGTTOU]}}, ANOTHER),
    "with another SIGSTOP": ({"masks": {b"ShdPnd": BIT[signal.SIGSTOP]}}, ANOTHER),
    "with a stop that it blocks": (
        {"masks": {b"ShdPnd": BIT[signal.SIGTSTP], b"SigBlk": BIT[signal.SIGTSTP]}}, None
    ),
    "with another signal that waits": ({"masks": {b"ShdPnd": 1 << (signal.SIGTERM - 1)}}, None),
    "with a mask of many digits": ({"masks": {b"ShdPnd": 1 << (signal.SIGIO - 1)}}, None),
    "with masks that are not shown": ({"masks": {b"ShdPnd": None, b"SigPnd": None, b"SigBlk": None}}, None),
    "with all the CPU that may be counted late": ({"cpu": STOPPED}, None),
    "with more CPU": ({"cpu": STOPPED + 0.01}, ANEW),
    "that runs": ({"state": "R"}, WENT_ON),
    "that sleeps": ({"state": "S"}, WENT_ON),
    "that waits for a disk": ({"state": "D"}, WENT_ON),
    "that is traced": ({"state": "t", "cpu": STOPPED + 1.0}, None),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "left"), SEEN.values(), ids=SEEN)
def test_a_process_goes_on_unless_another_hand_has_it(process, book, seen, left):
    book.settle()
    assert book.events == []
    masks = {**process.masks, **seen.get("masks", {})}
    for name, value in {**seen, "masks": masks}.items():
        setattr(process, name, value)
    word = book.pauses.end(book.pause, "it is over")

    assert word == ("left" if left else "done")
    assert process.signals == ([] if left else [signal.SIGCONT])
    assert book.told == [(word, f"it is over: {left}" if left else "it is over")]
    assert book.pauses.read() == ()


def test_the_end_of_a_pause_is_written_down_whole(process, book):
    book.pauses.end(book.pause, "it is over")

    [event] = book.events
    assert (event.time, event.kind, event.user, event.devices) == (7.0, "resume", "al", ("gpu0",))
    assert (event.pid, event.claim) == (4711, "c1")
    assert event.facts == (("policy", "hot"), ("uid", 7), ("start_time_seconds", 100.0))


def test_one_that_had_a_debugger_before_goes_on(process, book):
    process.tracer = [b"17"]
    traced = Pause(PROCESS, "hot", traced=True)

    assert book.pauses.end(traced, "it is over") == "done"


def test_as_long_as_it_was_not_seen_to_stand_its_state_says_nothing(process, book):
    process.state, process.cpu = "R", 99.0

    assert book.pauses.end(book.pause, "it is over") == "done"


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        ({"ended": True}, "gone"),
        ({"start": 101.0}, "gone"),
        ({"shown": False}, ""),
        ({"shown": False, "ended": True}, "gone"),
        ({"word": "gone"}, "gone"),
        ({"word": "not permitted"}, "not permitted"),
    ],
)
def test_one_that_does_not_go_on_is_told_or_looked_at_again(process, book, seen, word):
    for name, value in seen.items():
        setattr(process, name, value)

    assert book.pauses.end(book.pause, "it is over") == word
    assert book.told == ([(word, "it is over")] if word else [])
    assert bool(book.pauses.read()) is (word == "")


THREADS = {
    "stopped and traced, dead and unreaped": (["T", "t", "X", "Z"], True),
    "one that runs": (["T", "R"], False),
    "one that has just ended": (["T", "gone"], False),
}


@pytest.mark.parametrize(("threads", "stands"), THREADS.values(), ids=THREADS)
def test_it_stands_when_all_its_threads_do(process, book, threads, stands):
    process.threads = threads
    book.settle()
    process.state = "S"
    book.settle()

    assert book.told == ([("left", f"its pause is over: {WENT_ON}")] if stands else [])


def test_its_cpu_time_is_that_when_it_first_stood_with_what_each_cpu_may_count_late(process, book):
    process.threads = ["T"] * 6
    book.settle()
    process.cpu += 4 * LATE_CPU_SECONDS
    book.settle()
    process.threads = ["T"]
    assert book.pauses.end(book.pause, "it is over") == "done", "four CPUs count late"

    book.pauses.begin(book.pause)
    book.settle("it is over")
    assert book.told == [("done", "it is over")] * 2


def test_one_that_is_not_shown_does_not_stand(process, book):
    process.shown = False
    book.settle()
    process.shown, process.state, process.threads = True, "S", ["S"]
    book.settle()

    assert book.events == []


def test_a_process_that_goes_on_is_noticed_unless_a_stop_still_waits(process, book):
    book.settle()
    process.state, process.masks[b"ShdPnd"] = "S", BIT[signal.SIGTSTP]
    book.settle()
    assert book.events == []
    process.masks[b"ShdPnd"] = 0
    book.settle()
    assert book.told == [("left", f"its pause is over: {WENT_ON}")]


def test_one_that_has_ended_is_settled_and_pauses_of_another_guard_are_not(process, book):
    process.alive = False
    book.settle("any", owed=False)
    assert book.events == []
    book.settle()

    assert book.told == [("done", "its pause is over")]


def test_an_end_that_cannot_be_written_down_is_kept_and_written_a_minute_later(process, book):
    other = Pause((4711, 200.0), "hot")
    book.room = False
    book.settle("it is over")
    assert process.signals == [signal.SIGCONT]
    assert book.pauses.of(PROCESS, live=True) is None
    with pytest.raises(OSError, match="the end of its last pause is not written down yet"):
        book.pauses.begin(book.pause)
    book.pauses.begin(other)
    book.room, process.start = True, 200.0
    process.clock += AGAIN_SECONDS - 1.0
    book.settle("it is over")
    assert [event.facts[-1][1] for event in book.events] == [200.0], "the other one need not wait"
    process.clock += 1.0
    book.settle("it is over")

    assert book.told == [("done", "it is over")] * 2
    assert process.signals == [signal.SIGCONT] * 2, "each once"
    assert book.pauses.read() == ()


@pytest.mark.parametrize(
    ("fields", "shown", "told"),
    [
        ({"on_terminal": True}, True, True),
        ({}, True, False),
        ({"on_terminal": True, "uid": None}, True, False),
        ({"on_terminal": True, "policy": ""}, True, False),
        ({"on_terminal": True}, False, False),
    ],
)
def test_the_owner_is_told_on_the_terminal_where_no_run_does_so(process, book, monkeypatch, fields, shown, told):
    pause = Pause(**{"process": PROCESS, "policy": "hot", "uid": 7, **fields})
    book.pauses.begin(pause)
    monkeypatch.setattr(pauses, "_continue", lambda *_, **more: ("done", ""))
    process.shown = shown
    book.pauses.end(pause, "it is over")

    text = "gpuguard: policy hot let pid 4711 go on (SIGCONT): it is over"
    assert process.terminal == ([(34816, 7, text)] if told else [])


def test_a_file_that_cannot_be_removed_is_no_error(process, book, monkeypatch):
    def refused(path: str) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(pauses.os, "unlink", refused)
        book.pauses.drop(PROCESS)

        assert book.pauses.end(book.pause, "it is over") == "done"


def test_a_directory_that_cannot_be_listed_has_no_pauses(process, book, monkeypatch):
    def refused(path: str) -> list[str]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(pauses.os, "listdir", refused)

        assert book.pauses.read() == ()
