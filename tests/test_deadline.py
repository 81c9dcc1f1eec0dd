"""What a process has in its memory keeps nobody waiting who asks for it, however long its owner lets them wait."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from builders import a_process
from guard_scene import SLEEP, a_child

from gpuguard import procfs
from gpuguard.enforcement import identity
from gpuguard.procfs import MOST_HANGING, in_time

UNKNOWN = 20002  # another user


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look is late because the machine is busy."""
    monkeypatch.setattr(procfs, "FILE_SECONDS", 60.0)
    monkeypatch.setattr(procfs, "SECONDS_AGAIN", 12.0)
    monkeypatch.setattr(procfs, "_hanging", {})
    monkeypatch.setattr(procfs, "_free", [])
    monkeypatch.setattr(procfs, "_spent", {})


@pytest.fixture
def comes_back() -> Iterator[threading.Event]:
    """What a look that hangs waits for."""
    event = threading.Event()
    yield event
    event.set()


def hangs(event: threading.Event) -> Callable[[], bytes]:
    return lambda: b"late" if event.wait(600) else b"never"


def given_up(pid: int, kind: str, event: threading.Event) -> None:
    """A look that hangs, and that is waited for no longer than a look of the guard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "FILE_SECONDS", 0.1)
        patch.setattr(procfs, "SECONDS_AGAIN", 0.02)
        assert in_time(pid, kind, hangs(event)) is None


def test_a_look_that_hangs_finds_nothing_and_no_other_one_of_its_kind_is_tried(comes_back):
    given_up(os.getpid(), "memory", comes_back)
    assert in_time(os.getpid(), "memory", lambda: pytest.fail("who hangs once is not asked again")) is None
    assert in_time(os.getpid(), "facts", lambda: "found") == "found"


@pytest.mark.root
def test_other_users_are_looked_at_meanwhile(comes_back):
    with a_child(*SLEEP, uid=UNKNOWN) as other:
        given_up(other.pid, "memory", comes_back)

        assert in_time(os.getpid(), "memory", lambda: "found") == "found"


def test_who_came_back_is_looked_at_again_by_the_same_thread(comes_back):
    given_up(os.getpid(), "memory", comes_back)
    threads = threading.active_count()
    comes_back.set()
    while (found := in_time(os.getpid(), "memory", lambda: "found")) is None:
        continue

    assert (found, threading.active_count()) == ("found", threads)


def test_many_without_a_name_who_hang_take_a_bounded_number_of_threads_and_hide_nobody_else(comes_back, monkeypatch):
    monkeypatch.setattr(procfs, "user_name", str)
    for number in range(2 * MOST_HANGING):
        given_up(os.getpid(), str(number), comes_back)
    assert len(procfs._hanging) == MOST_HANGING

    monkeypatch.setattr(procfs, "user_name", lambda uid: "alice")
    assert in_time(os.getpid(), "memory", lambda: "found") == "found"


def test_a_copy_of_a_process_has_a_thread_of_its_own(comes_back):
    given_up(os.getpid(), "memory", comes_back)
    in_time(os.getpid(), "facts", lambda: "found")
    procfs._spent[os.getuid(), "memory"] = 100.0, time.monotonic()
    if (child := os.fork()) == 0:
        found = [in_time(os.getpid(), kind, lambda: 5) for kind in ("facts", "memory")]
        os._exit(sum(one or 0 for one in found))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10


def test_an_error_is_that_of_whoever_asked_and_what_cannot_be_read_is_nothing():
    with pytest.raises(ZeroDivisionError):
        in_time(os.getpid(), "memory", lambda: 1 // 0)
    assert in_time(os.getpid(), "memory", lambda: os.stat("/proc/0")) is None
    assert in_time(os.getpid(), "memory", lambda: "found") == "found"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, comes_back: threading.Event) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose memory keeps its readers waiting, as one can that maps a file of FUSE."""
    read_proc = procfs.read_proc

    def read(path: str, limit: int = 4096) -> bytes | None:
        own = [f"/proc/{child.pid}/{name}" for name in ("cmdline", "environ")]
        return hangs(comes_back)() if path in own else read_proc(path, limit)

    monkeypatch.setattr(procfs, "read_proc", read)
    monkeypatch.setattr(procfs, "FILE_SECONDS", 1.0)
    monkeypatch.setattr(procfs, "SECONDS_AGAIN", 0.1)
    with a_child(*SLEEP) as child:
        yield child


def test_a_process_whose_command_line_keeps_its_readers_waiting_is_described_without_it(silent):
    found = procfs.described(a_process(silent.pid, uid=None, start_time=None, command=None))

    assert (found.pid, found.command, found.conda_environment) == (silent.pid, None, None)
    assert found.uid is not None and found.start_time is not None and found.executable


def test_the_guard_knows_it_by_everything_else(silent):
    facts = identity.facts_of(silent.pid)

    assert facts is not None and facts.command is None and facts.executable and facts.uids


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time; looks that take long move it on, and no test waits for them."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def taking(seconds: float, clock: list[float]) -> Callable[[], str]:
    def look() -> str:
        clock[0] += seconds
        time.sleep(1e-5)  # it waits for something
        return "found"

    return look


def test_who_lets_each_look_come_back_just_in_time_gets_no_more_time_than_who_never_does(clock):
    looks = [in_time(os.getpid(), "memory", taking(54.0, clock)) for _ in range(50)]

    assert looks.count("found") == 2
    clock[0] += 120 / procfs.SHARE
    assert in_time(os.getpid(), "memory", taking(54.0, clock)) == "found"


@pytest.mark.parametrize(("takes", "found"), [(False, 50), (True, 2)], ids=["waits for one", "takes it"])
def test_what_a_look_takes_of_a_processor_counts_and_no_wait_for_one(clock, monkeypatch, takes, found):
    def look() -> str:
        clock[0] += 54.0  # others have it meanwhile, or it is taken by a very long list of mappings
        return "found"

    if takes:
        monkeypatch.setattr(time, "thread_time", lambda: clock[0])

    assert [in_time(os.getpid(), "memory", look) for _ in range(50)].count("found") == found


@pytest.mark.root
def test_several_who_do_so_together_get_hardly_more_and_hide_nobody_else(clock):
    with a_child(*SLEEP, uid=UNKNOWN) as other, a_child(*SLEEP, uid=UNKNOWN + 1) as honest:
        for pid in (os.getpid(), other.pid) * 50:
            in_time(pid, "memory", taking(54.0, clock))

        assert clock[0] < 240
        assert {in_time(honest.pid, "memory", taking(0.0001, clock)) for _ in range(500)} == {"found"}


def test_where_a_program_lies_is_looked_for_only_if_it_may_be_gone(monkeypatch, tmp_path, comes_back):
    never, sought = hangs(comes_back), []
    monkeypatch.setattr(procfs, "FILE_SECONDS", 1.0)
    monkeypatch.setattr(procfs, "SECONDS_AGAIN", 0.1)
    monkeypatch.setattr(os.path, "lexists", lambda path: sought.append(path) or never())  # no answer, as of a server
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ("sh", "-c", 'cd "$1"; rmdir "$1"; exec sleep 100', "sh", str(gone))
    with a_child(*SLEEP) as there, a_child(*words, uid=os.getuid()) as left:
        while not os.readlink(f"/proc/{left.pid}/cwd").endswith(" (deleted)"):
            continue
        found = [procfs.described(a_process(child.pid, uid=None, start_time=None)) for child in (there, left)]

    assert found[0].executable and found[0].working_directory == "/"
    assert found[1].working_directory == str(gone)
    assert sought == [f"{gone} (deleted)"]
