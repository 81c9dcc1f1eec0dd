"""Who a pid is, and which process lists are believed."""

import builtins
import io
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import GIB, TOTAL, a_device, a_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuguard import host, procfs, users
from gpuguard.backends import plausibility
from gpuguard.claims import holders
from gpuguard.claims.unlock import is_supervisor
from gpuguard.clusters import slurm_jobs
from gpuguard.enforcement import identity
from gpuguard.model import GpuProcess

Rows = Sequence[tuple[int, int | None]]
PID_MAX = 4_194_304
ALIVE = range(2, 5000)  # the pids that exist in these tests


def judged(rows: Rows, gate: Callable[..., str | None] = plausibility.implausibility, **facts: Any) -> str | None:
    known = {"alive": ALIVE.__contains__, "pid_max": PID_MAX, "memory_total": TOTAL, "memory_used": TOTAL, **facts}
    return gate(rows, **known)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(0, 1)], "pid 0 cannot"),
        ([(1, 1)], "pid 1 cannot"),
        ([(-1, 1)], "pid -1 cannot"),
        ([(4294967295, 1)], "pid 4294967295 cannot"),
        ([(2**31, 1)], "cannot"),
        ([(PID_MAX + 1, 1)], "cannot"),
        ([(100, 1), (200, 1), (100, 1)], "pid 100 is listed twice"),
        ([(6000, 1)], "pid 6000 is not in this pid namespace"),
        ([(100, TOTAL + 1)], "pid 100 has more memory than the GPU"),
        ([(100, -1)], "pid 100 has -1 bytes"),
        ([(100, 60 * GIB), (200, 60 * GIB)], "more memory than is used"),
    ],
)
def test_one_bad_element_makes_the_list_implausible(rows: Rows, reason: str) -> None:
    assert reason in (judged([(42, GIB), *rows]) or "")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(6000, GIB)], None),
        ([(6000, None), (6001, 0), (6002, GIB)], None),  # how many there are is for users to choose
        ([(6000, 4711)], "pid 6000"),  # a pid stands where memory belongs: rows of another length
        ([(6000, GIB), (0, GIB)], "pid 0 cannot"),
        ([(6000, GIB), (6000, GIB)], "listed twice"),
        ([(6000, TOTAL + 4096)], "more memory than the GPU"),
    ],
)
def test_where_the_pids_are_our_own_a_process_that_has_ended_condemns_no_list(rows: Rows, reason: str | None) -> None:
    told = judged([(42, GIB), *rows], own_pids=True)

    assert (reason in (told or "")) if reason else told is None


def test_processes_that_need_more_than_the_device_has_are_not_believed_whatever_is_used() -> None:
    rows = [(100, TOTAL - GIB), (200, GIB)]

    assert judged(rows, memory_used=None) is None
    assert "more memory than the GPU" in (judged([*rows, (300, 1)], memory_used=None) or "")


def test_a_process_that_grew_between_two_calls_is_within_the_slack() -> None:
    assert judged([(100, GIB + plausibility.SLACK)], memory_used=GIB) is None
    assert judged([(100, GIB + plausibility.SLACK + 1)], memory_used=GIB)


def test_what_is_not_known_of_the_device_is_not_checked() -> None:
    assert judged([(100, 2**43)], memory_total=None, memory_used=None) is None
    assert judged([(100, 2**60)], memory_total=None, memory_used=None)  # no device has as much


# What drivers have been seen to write in the place of a pid or of a size, and anything else.
bad_elements = st.one_of(
    st.tuples(st.integers(max_value=1), st.none()),
    st.tuples(st.integers(min_value=PID_MAX + 1), st.none()),
    st.tuples(st.sampled_from([0, 1, -1, 2**31, 2**32 - 1, 1073741824]), st.integers(0, TOTAL)),
    st.tuples(st.integers(ALIVE.stop, PID_MAX), st.none()),
    st.tuples(st.sampled_from(ALIVE), st.integers(min_value=TOTAL + 1)),
    st.tuples(st.sampled_from(ALIVE), st.integers(max_value=-1)),
)
good_elements = st.tuples(st.sampled_from(ALIVE), st.none() | st.integers(0, TOTAL // 100))
lists_with_a_bad_element = st.tuples(st.lists(good_elements, max_size=50), bad_elements, st.randoms()).map(
    lambda parts: shuffled([*parts[0], parts[1]], parts[2])
)


def shuffled(rows: list[Any], random: Any) -> list[Any]:
    random.shuffle(rows)
    return rows


@given(lists_with_a_bad_element)
def test_the_gate_never_passes_a_list_with_a_bad_element(rows: Rows) -> None:
    assert judged(rows)


@given(st.lists(good_elements, max_size=50, unique_by=lambda row: row[0]))
def test_the_gate_passes_every_good_list(rows: Rows) -> None:
    assert judged(rows) is None


def judges_the_first_only(rows: Rows, **facts: Any) -> str | None:
    return plausibility.implausibility(rows[:1], **facts)


def forgets_the_upper_bound(rows: Rows, *, pid_max: int, **facts: Any) -> str | None:
    facts["alive"] = lambda pid: pid in ALIVE or pid > PID_MAX
    return plausibility.implausibility(rows, pid_max=2**40, **facts)


def believes_the_dead(rows: Rows, *, alive: object, **facts: Any) -> str | None:
    return plausibility.implausibility(rows, alive=lambda pid: True, **facts)


def drops_what_is_bad(rows: Rows, **facts: Any) -> str | None:
    return plausibility.implausibility([row for row in rows if row[0] > 0], **facts)


@pytest.mark.parametrize("gate", [judges_the_first_only, forgets_the_upper_bound, believes_the_dead, drops_what_is_bad])
def test_a_broken_gate_is_caught(gate: Callable[..., str | None]) -> None:
    @settings(max_examples=2000)  # of 100 there may be none that it gets wrong: seen once
    @given(lists_with_a_bad_element)
    def the_law(rows: Rows) -> None:
        assert judged(rows, gate)

    with pytest.raises(AssertionError):
        the_law()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "CONDA_DEFAULT_ENV": "torch2"}
    script = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "--lr", "0.1"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout
        child.stdout.readline()
        yield child
        child.kill()


def test_a_process_of_ours_is_described_in_full(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    seen, known = procfs.described(GpuProcess(job.pid, GIB)), psutil.Process(job.pid)

    assert seen.uid == os.getuid()
    assert seen.user == users.user_name(os.getuid())
    assert seen.command == tuple(known.cmdline())
    assert (seen.executable, seen.working_directory) == (known.exe(), str(tmp_path))
    assert seen.conda_environment == "torch2"
    assert seen.memory_used == GIB


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"", ()),
        (b"\0", ()),
        (b"python\0train.py\0--lr=0.1\0", ("python", "train.py", "--lr=0.1")),
        (b"sh\0-c\0a  b\0\0", ("sh", "-c", "a  b", "")),
        (b"sleep\0", ("sleep",)),
        (b"nginx: master process", ("nginx:", "master", "process")),  # it wrote a title over its words
        (b"ray::train step\0", ("ray::train", "step")),
        (b"a\xff\0", ("a\udcff",)),
    ],
)
def test_a_command_line_is_its_words(written: bytes, words: tuple[str, ...]) -> None:
    assert procfs._words(written) == words


def test_a_program_that_was_replaced_on_disk_keeps_its_name(tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as child:
        before = procfs.described(GpuProcess(child.pid)).executable
        program.unlink()
        after = procfs.described(GpuProcess(child.pid)).executable
        child.kill()

    assert before == after == str(program)


CHANGES = {
    "another program": "os.execv('/bin/cat', ['cat'])",
    "the same one with as many other words": "os.execv(sys.executable, [sys.executable, '-c', code, 'b'])",
    "a title that it writes over its words": """
begin = int(open('/proc/self/stat').read().rpartition(')')[2].split()[45])
memory = os.open('/proc/self/mem', os.O_RDWR)
os.pwrite(memory, b'title', begin)
""",
}
CHANGING = """
import os, sys
code = os.environ['CODE']
print(flush=True)
if os.read(0, 3) and sys.argv[1] == 'a':
    exec(os.environ['CHANGE'])
    print(flush=True)
while os.read(0, 99):
    pass
"""
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}


def hidden(stat: procfs.Stat | None) -> procfs.Stat | None:
    return stat and stat._replace(layout=None)


@pytest.fixture
def described_twice(request: pytest.FixtureRequest) -> Iterator[tuple[GpuProcess, GpuProcess, GpuProcess]]:
    """A process before it changes, just afterwards, and when its command line is old."""
    change, places_are_shown = request.param
    environment = {**os.environ, "CODE": CHANGING, "CHANGE": CHANGES[change]}
    words = [sys.executable, "-c", CHANGING, "a"]
    real, owners = procfs.stat_of, itertools.count(1000)
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(words, env=environment, **PIPES) as job:
        patch.setattr(procfs, "uid_of", lambda pid: next(owners))
        if not places_are_shown:
            patch.setattr(procfs, "stat_of", lambda pid: hidden(real(pid)))
        assert job.stdin and job.stdout
        job.stdout.readline()
        before = procfs.described(GpuProcess(job.pid))
        job.stdin.write(b"go\nthere\n")
        job.stdout.readline()
        after = procfs.described(GpuProcess(job.pid))
        patch.setattr(procfs, "COMMAND_SECONDS", -1.0)
        later = procfs.described(GpuProcess(job.pid))
        job.kill()
        yield before, after, later


@pytest.mark.parametrize(
    "described_twice",
    [
        ("another program", True),
        ("the same one with as many other words", True),
        *((change, False) for change in CHANGES),
    ],
    indirect=True,
)
def test_another_command_line_is_seen_at_once(described_twice: tuple[GpuProcess, GpuProcess, GpuProcess]) -> None:
    before, after, later = described_twice

    assert before.command and after.command and before.start_time == after.start_time
    assert before.command != after.command == later.command
    assert before.uid != after.uid


@pytest.mark.parametrize("described_twice", [("a title that it writes over its words", True)], indirect=True)
def test_a_title_is_seen_when_the_command_line_is_read_again(described_twice):
    before, after, later = described_twice

    assert before.command == after.command
    assert later.command and later.command[0].startswith("title")


def test_a_process_whose_memory_is_not_shown_to_us_is_known_by_its_start_alone(
    job: subprocess.Popen[bytes], monkeypatch: Any
) -> None:
    told = procfs.read_proc(f"/proc/{job.pid}/stat") or b""
    words = told.split()
    started = int(words[21]) / os.sysconf("SC_CLK_TCK")
    hidden = b" ".join([*words[:44], *[b"0"] * 7, words[51]])

    for shown in (hidden, b" ".join(words[:44])):  # the kernel before 3.5 shows nobody
        monkeypatch.setattr(procfs, "read_proc", lambda path, shown=shown: shown)
        stat = procfs.stat_of(1)
        assert stat and (stat.start_time, stat.layout) == (started, None)
    monkeypatch.setattr(procfs, "read_proc", lambda path: told)
    stat = procfs.stat_of(1)
    assert stat and stat.layout is not None


def test_a_process_that_is_gone_is_described_as_what_the_driver_said() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()

    assert procfs.described(GpuProcess(gone.pid, GIB)) == GpuProcess(gone.pid, GIB)
    assert not procfs.alive(gone.pid)


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**32 - 1, 2**64])
def test_a_number_that_is_no_pid_is_nobody(pid: int) -> None:
    assert not procfs.alive(pid)
    assert procfs.described(GpuProcess(pid)) == GpuProcess(pid)


def test_a_pid_that_changes_hands_while_we_look_is_nobody(job: subprocess.Popen[bytes], monkeypatch: Any) -> None:
    monkeypatch.setattr(procfs, "start_time", lambda pid: 200.0)

    assert procfs.described(GpuProcess(job.pid)) == GpuProcess(job.pid)


def test_a_process_that_proc_hides_from_us_is_alive(job: subprocess.Popen[bytes], monkeypatch: Any) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: False)

    assert procfs.alive(job.pid)


ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        (f"0::/system.slice/docker-{ID}.scope", ID),
        (f"12:devices:/docker/{ID}\n0::/", ID),
        (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container", None),
        (f"1:name=systemd:/user.slice/user-7.slice/user@7.service/docker-{ID}.scope\n0::/", None),
        (f"0::/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}", ID),
        (f"0::/kubepods.slice/kubepods-pod12ab.slice/cri-containerd-{ID}.scope", ID),
        (f"0::/kubepods/burstable/pod6f1c-22/{ID}", ID),
        (f"0::/kubepods.slice/kubepods-burstable.slice/crio-{ID}.scope", ID),
        ("0::/lxc.payload.lab-node/init.scope", "lab-node"),
        ("3:cpu:/lxc/lab-node/user", "lab-node"),
        ("0::/machine.slice/machine-debian.scope/payload", "debian"),
        ("9:memory:/slurm/uid_1000/job_4711/step_0", "job_4711"),
        ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user", "job_4711"),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
        ("0::/", None),
        ("", None),
    ],
)
def test_the_cgroup_names_the_container(cgroup: str, container: str | None) -> None:
    assert procfs.container_of(cgroup) == container


def test_what_only_a_poll_of_the_details_keeps_is_never_kept_where_it_decides(sleeper: int) -> None:
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "uid_of", lambda pid: read.append(pid) or os.getuid())
        for _ in range(3):
            procfs.identified(GpuProcess(sleeper))

    assert len(read) == 3


NAMED = """
import ctypes, os, sys, time
library = ctypes.CDLL(None)
library.prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)
print(flush=True)
time.sleep(600)
"""
# At most 15 bytes; behind a name that its owner chose the kernel writes ") S 4711 ...".
NAMES = (
    b"", b")", b") Z 1 1 1", b"x) S 1 1 1 0 ", b") R 0 0 0 0 0 0", b"a b c", b"\n", b"a\nUid:\t7\t7", b"\nUid: 7 7 7 7",
    b"\nTracerPid: 1", b"\rUid:\t7\r", b"\x0bUid:\t7", b"\x0cNSpid: 1 2", b"\nSigCgt:\tff",
    b"\rSigCgt: x", b"\rSigCgt:400000", b"a\nUid: 3", b"\xff\xfe",
    b"\xe2\x80\xa8Uid: 7", b"slurmstepd: [7.", b"kworker/0:0", b"\x1b[2J", b"\\n\\t\\", b"\t\t", b"(" * 15,
    b")" * 15,
)  # fmt: skip


@contextmanager
def a_process_called(name: bytes) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", NAMED, name.hex()], stdout=subprocess.PIPE) as child:
        assert child.stdout
        try:
            assert child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def snapshot_of(pid: int) -> Any:
    return a_snapshot(a_device(processes=(GpuProcess(pid),)))


def facts(pid: int) -> Any:
    found = identity.facts_of(pid)
    return found and (found.start_time, found.uids, found.group, found.tracer, found.terminal)


# Each says who a process is; None: it cannot tell.
READERS: dict[str, Callable[[int], Any]] = {
    "start_time": procfs.start_time,
    "identified": lambda pid: (one := procfs.identified(GpuProcess(pid))) and (one.start_time, one.uid),
    "described": lambda pid: (one := procfs.described(GpuProcess(pid))) and (one.start_time, one.uid),
    "uid_behind": procfs.uid_behind,
    "owner": procfs.uid_of,
    "facts": facts,
    "ancestors": lambda pid: set(procfs.ancestors(pid)),
    "look_up": lambda pid: (one := procfs.process_facts(snapshot_of(pid)).get(pid)) and (one.parent, one.start_time),
    "tree": lambda pid: (one := procfs.read_stat(pid)) and (one.parent, one.group, one.session, one.start_time),
    "below": lambda pid: (one := procfs.descendants(os.getpid()).get(pid)) and (one.parent, one.start_time),
    "numbers": lambda pid: host.HostNumbers().tree(pid, host.members_of(pid)).get("processes"),
    "step": slurm_jobs.step_of,
    "job": lambda pid: slurm_jobs.job_of([pid]),
    "holder": lambda pid: holders.locked_inode(str(pid), "1"),
}


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has nobody known from before."""

    def forget() -> None:
        monkeypatch.setattr(procfs, "_known", {})
        monkeypatch.setattr(procfs, "_hanging", {})

    forget()
    return forget


def truth_of(pid: int) -> dict[str, Any]:
    """What the readers must say of a child of ours."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    told = stat[stat.rindex(b")") + 2 :].split()
    start, uid, me = int(told[19]) / os.sysconf("SC_CLK_TCK"), os.getuid(), os.getpid()
    return {
        "start_time": start,
        "identified": (start, uid),
        "described": (start, uid),
        "uid_behind": uid,
        "owner": uid,
        "facts": (start, (uid,) * 4, os.getpgid(pid), 0, int(told[4])),
        "ancestors": {me, *procfs.ancestors(me)},
        "look_up": (me, start),
        "tree": (me, os.getpgid(pid), os.getsid(pid), start),
        "below": (me, start),
        "numbers": 1.0,
        "step": None,
        "job": None,
        "holder": "",
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_name_makes_a_process_another_one(name: bytes, forgetful: object) -> None:
    with a_process_called(name) as pid:
        assert {what: reader(pid) for what, reader in READERS.items()} == truth_of(pid)
        assert not is_supervisor(pid)


def test_a_reader_that_takes_the_first_bracket_for_the_end_of_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = procfs.parse_stat
    monkeypatch.setattr(
        procfs, "parse_stat", lambda line: read(b"1 (x) " + line.partition(b") ")[2].replace(b")", b""))
    )

    with pytest.raises(AssertionError):
        test_no_name_makes_a_process_another_one(b") Z 1 1 1", None)


# What becomes of a read: it fails, tells nothing, or less than there is.
Fate = Callable[[bytes], bytes]


def fails(code: int) -> Fate:
    def fate(_: bytes) -> bytes:
        raise OSError(code, os.strerror(code))

    return fate


FATES: dict[str, Fate] = {
    **{f"error {code}": fails(code) for code in (1, 2, 3, 5, 13, 22)},  # EPERM, ENOENT, ESRCH, EIO, EACCES, EINVAL
    "nothing": lambda told: b"",
    "half": lambda told: told[: len(told) // 2],
    "a line": lambda told: told.partition(b"\n")[0],
    "NULs": lambda told: bytes(len(told)),
    "no text": lambda told: b"\xff\xfe" * 40,
    "lines alone": lambda told: b"\n" * 40,
    "no numbers": lambda told: bytes(120 if 48 <= one < 58 else one for one in told),
}


@contextmanager
def fated(pid: int, which: int, fate: Fate, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The read number *which* of a file of *pid*'s has that fate; [how many there were]."""
    count, opened = [0], {}
    really = {name: getattr(os, name) for name in ("open", "read", "pread", "close")}
    plainly = builtins.open

    def met(told: bytes) -> bytes:
        count[0] += 1
        return fate(told) if count[0] == which + 1 else told

    def open_it(path: Any, *more: Any, **options: Any) -> int:
        descriptor: int = really["open"](path, *more, **options)
        opened[descriptor] = str(path).startswith(f"/proc/{pid}/")
        return descriptor

    def read_it(descriptor: int, *more: Any) -> bytes:
        told: bytes = really["pread" if len(more) > 1 else "read"](descriptor, *more)
        return met(told) if opened.get(descriptor) else told

    def open_file(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if not str(path).startswith(f"/proc/{pid}/"):
            return plainly(path, mode, *more, **options)
        with plainly(path, "rb") as file:
            told = io.BytesIO(met(file.read()))
        return told if "b" in mode else io.TextIOWrapper(told, **options)

    with patch.context() as now:
        for name, ours in {"open": open_it, "read": read_it, "pread": read_it}.items():
            now.setattr(os, name, ours)
        now.setattr("builtins.open", open_file)
        yield count


@pytest.mark.parametrize("what", READERS)
def test_a_read_that_fails_or_tells_a_part_makes_nobody_another_one(what, forgetful, monkeypatch):
    """Each read of it in turn; what was read in part counts for nothing, or is as true as before."""
    with a_process_called(b"x") as pid:
        true = truth_of(pid)[what]
        for name, fate in FATES.items():
            which, reads = 0, 1
            while which < reads:
                forgetful()
                with fated(pid, which, fate, monkeypatch) as count:
                    found = READERS[what](pid)
                reads, which = count[0], which + 1
                assert is_part_of(found, true), f"{what}: read {which}: {name}: {found}"


def is_part_of(found: Any, true: Any) -> bool:
    """Whether all that is told is true."""
    if isinstance(found, frozenset | set):
        return bool(found <= true)
    if isinstance(found, tuple) and isinstance(true, tuple):
        return all(one is None or one == other for one, other in zip(found, true, strict=True))
    return bool(found == true) or not found


def test_a_reader_that_lets_a_failing_read_through_is_found(forgetful, monkeypatch):
    def read(path: str, limit: int = 4096) -> bytes:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, limit)
        finally:
            os.close(descriptor)

    monkeypatch.setattr(procfs, "read_proc", read)
    with pytest.raises(PermissionError):
        test_a_read_that_fails_or_tells_a_part_makes_nobody_another_one("start_time", forgetful, monkeypatch)
