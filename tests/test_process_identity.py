"""What is made of what /proc says of a process: each line of it is the test's."""

import errno
import io
import os
import stat
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from gpuguard.enforcement import identity
from gpuguard.enforcement.identity import ProcessFacts, Protected
from gpuguard.procfs import Stat

FACTS = ProcessFacts(
    start_time=100.0,
    uids=(1001,) * 4,
    group=17,
    terminal=34816,
    tracer=18,
    caught=0x4002,
    executable="/usr/bin/python3",
    executable_owner=0,
    command="python3 -u train.py ",
    uses_driver=True,
    cgroup="0::/user.slice/*/x",
    in_place=True,
    state="S",
    hides=False,
)
FILES = {
    "/proc/4711/status": "Name:\tpython3\nUid:\t1001\t1001\t1001\t1001\nTracerPid:\t18\nSigCgt:\t0000000000004002\n",
    "/proc/4711/cgroup": "0::/user.slice/0123456789ab0123/x",
}


class Proc:
    """What /proc says of process 4711, and what takes too long."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files, self.command = dict(FILES), b"python3\0-u\0train.py\0"
        self.results: dict[str, Any] = {"program": ("/usr/bin/python3", 0, True), "files": (), "code": "nowhere"}
        self.asked = list[tuple[str, int]]()
        self.stat: Stat | None = Stat(b"4711 (python3", "S", 1, 17, 17, 34816, 0.0, 100.0, 0, None)
        patch.setattr(identity, "stat_of", lambda pid: self.stat if pid == 4711 else None)
        patch.setattr(identity, "read_text", self.files.get)
        patch.setattr(identity, "read_memory", self.read_memory)
        patch.setattr(identity, "read_link", {"/proc/4711/exe": "/a link"}.get)
        patch.setattr(identity, "certain_owner", lambda uid: uid)
        patch.setattr(identity, "in_time", self.in_time)

    def read_memory(self, pid: int, name: str, most: int) -> bytes | None:
        assert (pid, name) == (4711, "cmdline")
        return self.command

    def in_time(self, pid: int, kind: str, look: Any, times: int) -> Any:
        assert pid == 4711
        self.asked.append((kind, times))
        return self.results.get(kind)

    def facts(self, drivers: Any = (frozenset({5}),)) -> ProcessFacts | None:
        return identity.facts_of(4711, drivers)


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch) -> Proc:
    return Proc(monkeypatch)


def test_the_facts_about_a_process_are_read_from_its_files(proc):
    assert proc.facts() == FACTS
    assert proc.asked == [("program", 2), ("files", 4)], "its code only where its program is one of the system's"
    assert FACTS.interactive is not None and replace(FACTS, terminal=0, tracer=0).interactive is None


UNKNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "its program": ({"program": None}, {"executable": "/a link", "executable_owner": None, "in_place": None}),
    "its open files": ({"files": None, "maps": (frozenset({5}),)}, {"uses_driver": None}),
    "its mappings": ({"files": (frozenset({5}),), "maps": None}, {"uses_driver": None, "hides": True}),
    "neither": ({"files": (frozenset({5}),), "maps": (frozenset({5}),)}, {"uses_driver": False}),
    "mapped alone": ({"files": (frozenset({5}),), "maps": ()}, {"uses_driver": True}),
    "code of the system": (
        {"program": ("/usr/bin/tmux", 0, True)}, {"executable": "/usr/bin/tmux", "foreign_code": "nowhere"}
    ),
    "code that is not seen": (
        {"program": ("/usr/bin/tmux", 0, True), "code": None}, {"executable": "/usr/bin/tmux", "foreign_code": "file"}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("results", "fields"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_was_not_read_in_time_is_unknown_by_itself(proc, results, fields):
    proc.results.update(results)

    assert proc.facts() == replace(FACTS, **fields)


def test_without_drivers_in_question_it_uses_none_and_of_an_unknown_node_nothing_is_known(proc):
    assert proc.facts(()) == replace(FACTS, uses_driver=False)
    proc.results.update(files=(frozenset(),), maps=(frozenset(),))
    assert proc.facts((frozenset(),)) == replace(FACTS, uses_driver=None)


def test_a_process_whose_command_or_cgroup_is_hidden_lacks_those(proc):
    proc.command = None
    del proc.files["/proc/4711/cgroup"]

    assert proc.facts() == replace(FACTS, command=None, cgroup=None)


@pytest.mark.parametrize("line", ["Uid", "TracerPid", "SigCgt"])
def test_a_process_whose_status_lacks_a_line_is_unknown(proc, line):
    proc.files["/proc/4711/status"] = proc.files["/proc/4711/status"].replace(line, "Other")

    assert proc.facts() is None


def test_a_process_that_has_gone_is_unknown(proc):
    proc.stat = None

    assert proc.facts() is None


def test_the_drivers_that_are_not_open_are_looked_for_in_the_mappings(monkeypatch):
    monkeypatch.setattr(identity, "in_time", lambda pid, kind, look, times: look())
    monkeypatch.setattr(identity, "_open_nodes", lambda pid: iter((3, 5)))
    monkeypatch.setattr(identity, "_mapped_nodes", lambda pid: iter((6,)))

    def uses(*drivers: frozenset[int]) -> bool | None:
        facts = identity.facts_of(os.getpid(), drivers)
        assert facts is not None
        return facts.uses_driver

    assert uses(frozenset({5}), frozenset({6, 7})) is True
    assert uses(frozenset({5}), frozenset({7})) is False
    assert uses(frozenset({3, 6})) is True


# The mappings.

MAPS = b"""\
7f00-7f01 r-xp 00000000 fe:0a 1234 /usr/lib/libc.so.6
7f01-7f02 rw-p 00000000 00:00 0
7f02-7f03 rw-s 00000000 00:1a 77   /dev/nvidia0
no line
"""


def refusing(number: int) -> Any:
    def ioctl(*_: Any) -> bytes:
        raise OSError(number, os.strerror(number))

    return SimpleNamespace(ioctl=ioctl)


def test_an_older_kernel_shows_mappings_as_lines(monkeypatch):
    monkeypatch.setattr(identity, "fcntl", refusing(errno.ENOTTY))

    found = list(identity._mapped_files(io.BytesIO(MAPS)))
    assert found == [(os.makedev(0xFE, 0x0A), 1234), (0, 0), (os.makedev(0, 0x1A), 77)]


def test_a_newer_kernel_is_asked_for_one_mapping_after_the_other(monkeypatch):
    asked = []

    def ioctl(maps: Any, request: int, query: bytes) -> bytes:
        size, flags, place, *rest = identity._QUERY.unpack(query)
        asked.append((request, size, flags, place, set(rest)))
        if place == 300:
            raise OSError(errno.ENOENT, "No such file or directory")
        end = place + 100
        return identity._QUERY.pack(size, flags, place, place, end, 0, 0, 0, end + 1, 0xFE, 0x0A, 0, 0, 0, 0)

    monkeypatch.setattr(identity, "fcntl", SimpleNamespace(ioctl=ioctl))
    device = os.makedev(0xFE, 0x0A)
    assert list(identity._mapped_files(io.BytesIO(MAPS))) == [(device, 101), (device, 201), (device, 301)]
    assert asked == [(0xC0686611, 104, 0x30, place, {0}) for place in (0, 100, 200, 300)]


@pytest.mark.parametrize(("number", "is_end"), [(errno.ENOENT, True), (errno.ESRCH, True), (errno.EACCES, False)])
def test_only_the_end_of_the_mappings_or_of_the_thread_is_an_end(monkeypatch, number, is_end):
    monkeypatch.setattr(identity, "fcntl", refusing(number))
    if is_end:
        assert list(identity._mapped_files(io.BytesIO(MAPS))) == []
    else:
        with pytest.raises(PermissionError):
            list(identity._mapped_files(io.BytesIO(MAPS)))


ROOTS = b"""\
5500-5501 r-xp 00000000 fe:01 11                         /usr/bin/a b
Rss:                   4 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex mr
5502-5503 rw-p 00000000 00:00 0
Anonymous:             8 kB
7ffe-7fff r-xp 00000000 00:00 0                          [vdso]
"""
OWN = b"5600-5601 r-xp 00000000 fe:01 12   /home/a/x.so\n"
MEMORY = b"5600-5601 rwxp 00000000 00:00 0\nAnonymous:             8 kB\n"
DATA = b"5600-5601 rw-p 00000000 fe:01 12   /home/a/x.so\nAnonymous:             8 kB\n"
CHANGED = ROOTS.replace(b"Anonymous:             0", b"Anonymous:             4", 1)
SWAPPED = ROOTS.replace(b"Swap:                  0", b"Swap:                  4", 1)
SCALL = b"ffff-ffff --xp 00000000 00:00 0                  [vsyscall]\n"

CODE = {
    "root's alone": (ROOTS + SCALL, "nowhere"),
    "a library": (ROOTS + OWN, "file"),
    "memory": (ROOTS + MEMORY, "memory"),
    "data": (ROOTS + DATA, "nowhere"),
    "a changed page": (CHANGED, "file"),
    "a changed page that is swapped out": (SWAPPED, "file"),
    "memory and a library": (MEMORY + ROOTS + OWN, "file"),
    "memory alone": (MEMORY, "file"),
    "nothing": (b"", "file"),
}


@pytest.mark.parametrize(("smaps", "where"), CODE.values(), ids=CODE)
def test_where_foreign_code_lies_is_seen_by_what_a_process_can_run(monkeypatch, smaps, where):
    asked = []

    def is_roots(pid: int, path: str, device: bytes, inode: int) -> bool:
        asked.append((pid, path, device, inode))
        return path == "/usr/bin/a b"

    monkeypatch.setattr(identity, "_sees_what_root_made", lambda pid: True)
    monkeypatch.setattr(identity, "_is_roots", is_roots)
    monkeypatch.setattr(
        identity.os.path, "samefile", lambda *paths: paths == ("/proc/17/ns/user", "/proc/self/ns/user")
    )
    monkeypatch.setattr(identity, "open", lambda path, mode: io.BytesIO(smaps), raising=False)

    assert identity._foreign_code(17) == where
    assert set(asked) <= {(17, "/usr/bin/a b", b"fe:01", 11), (17, "/home/a/x.so", b"fe:01", 12)}


@pytest.mark.parametrize(("roots_view", "users_own"), [(False, False), (True, True)])
def test_a_process_that_made_its_own_view_can_run_anything(monkeypatch, roots_view, users_own):
    monkeypatch.setattr(identity, "_sees_what_root_made", lambda pid: roots_view)
    monkeypatch.setattr(identity.os.path, "samefile", lambda *paths: not users_own)

    assert identity._foreign_code(17) == "file"


@pytest.mark.parametrize(
    ("path", "seen", "expected"),
    [
        ("/usr/bin/x", {}, True),
        ("/usr/bin/x", {"st_uid": 7}, False),
        ("/usr/bin/x", {"st_ino": 12}, False),
        ("/usr/bin/x", {"st_dev": os.makedev(0xFE, 2)}, False),
        ("/home/x", {}, False),
    ],
)
def test_a_file_is_roots_where_it_lies_in_a_place_of_roots_and_is_that_file(monkeypatch, path, seen, expected):
    status = SimpleNamespace(**{"st_uid": 0, "st_dev": os.makedev(0xFE, 1), "st_ino": 11, **seen})
    monkeypatch.setattr(identity.os, "stat", {f"/proc/17/root{path}": status}.get)

    assert identity._is_roots(17, path, b"fe:01", 11) is expected


def test_the_mappings_of_a_process_are_those_of_its_first_and_last_threads(monkeypatch):
    opened = []
    status = SimpleNamespace(st_dev=os.makedev(0, 0x1A), st_ino=77, st_rdev=9)

    def open_maps(path: str, mode: str) -> io.BytesIO:
        opened.append((path, mode))
        if path == "/proc/17/task/19/maps":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return io.BytesIO(MAPS)

    monkeypatch.setattr(identity, "fcntl", refusing(errno.ENOTTY))
    monkeypatch.setattr(identity, "_nodes", lambda root, patterns: [status] if root == "/proc/17/root" else [])
    monkeypatch.setattr(identity, "_threads", lambda pid: [f"/proc/{pid}/task/{thread}" for thread in (17, 18, 19)])
    monkeypatch.setattr(identity, "open", open_maps, raising=False)

    assert list(identity._mapped_nodes(17)) == [9, 9]
    assert opened == [(f"/proc/17/{thread}maps", "rb") for thread in ("", "task/18/", "task/19/")]


def test_a_mount_namespace_whose_owner_is_not_shown_is_not_one_that_root_made(monkeypatch):
    assert identity._sees_what_root_made(os.getpid())
    monkeypatch.setattr(identity, "fcntl", refusing(errno.EPERM))
    assert not identity._sees_what_root_made(os.getpid())
    assert not identity._sees_what_root_made(2**22 + 1)


# The program.


def test_a_program_that_is_no_ordinary_file_is_unknown(monkeypatch):
    real = os.stat
    fifo = os.stat_result((stat.S_IFIFO, 1, 1, 1, 0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(
        identity.os, "stat", lambda path, **how: fifo if str(path).endswith("/exe") else real(path, **how)
    )

    assert identity._executable(os.getpid()) == (None, None, False)


def test_a_process_without_a_first_thread_shows_its_program_in_another(monkeypatch):
    links = {"/proc/17/task/18/exe": os.path.realpath("/proc/self/exe")}
    monkeypatch.setattr(identity, "read_link", links.get)
    monkeypatch.setattr(identity, "_threads", lambda pid: [f"/proc/{pid}/task/17", f"/proc/{pid}/task/18"])
    replaced = SimpleNamespace(st_mode=stat.S_IFREG, st_uid=5, st_nlink=0)
    monkeypatch.setattr(identity.os, "stat", {"/proc/17/task/18/exe": replaced}.get)
    path = links["/proc/17/task/18/exe"]

    assert identity._executable(17) == (path, 5, True), "a file that was replaced since lies at its path"
    monkeypatch.setattr(identity, "read_link", lambda path: None)
    assert identity._executable(17) == (None, None, False)


def a_program(path: str | None, **fields: Any) -> ProcessFacts:
    facts = {"executable": path, "uses_driver": False, "foreign_code": "nowhere", **fields}
    return replace(FACTS, **facts)


@pytest.mark.parametrize(
    ("facts", "draws", "expected"),
    [
        (a_program("/usr/bin/tmux"), False, True),
        (a_program("/usr/bin/tmux (deleted)"), False, True),
        (a_program("/usr/bin/python3"), False, False),
        (a_program(None), False, False),
        (a_program("/home/a/tmux"), False, False),
        (a_program("/usr/bin/tmux", executable_owner=1001), False, False),
        (a_program("/usr/bin/tmux", in_place=False), False, False),
        (a_program("/usr/bin/tmux", uses_driver=True), False, False),
        (a_program("/usr/bin/tmux", uses_driver=None), False, True),
        (a_program("/usr/bin/tmux", foreign_code="memory"), True, False),
        (a_program("/usr/bin/tmux", foreign_code="file"), True, False),
        (a_program("/home/a/tmux", uids=(1001, 0, 1001, 1001)), False, True),
        (a_program("/usr/lib/xorg/Xorg", uses_driver=True), False, True),
        (a_program("/usr/lib/xorg/Xorg", foreign_code="memory"), False, False),
        (a_program("/usr/lib/xorg/Xorg", foreign_code="memory"), True, True),
        (a_program("/usr/lib/xorg/Xorg", foreign_code="file"), True, False),
    ],
)
def test_a_program_belongs_to_the_system_where_only_root_can_have_put_it_and_it_runs_nothing_else(
    facts, draws, expected
):
    assert identity.belongs_to_the_system(facts, draws) is expected
    assert draws or identity.belongs_to_the_system(facts) is expected


def test_the_signature_is_that_of_user_program_script_cgroup_and_claim():
    def of(text: str) -> str:
        return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    assert identity.signature(FACTS, "c1") == of("(1001,) /usr/bin/python3 train.py 0::/user.slice/*/x c1")
    odd = replace(FACTS, command=None, executable="/usr/bin/p\udcff")
    assert identity.signature(odd) == of("(1001,) /usr/bin/p\udcff  0::/user.slice/*/x ")
    assert identity.signature(replace(FACTS, command="python3 -m")) == of(
        "(1001,) /usr/bin/python3  0::/user.slice/*/x "
    )
    assert identity.signature(None) == identity.signature(replace(FACTS, cgroup=None)) == ""
    assert identity.signature(replace(FACTS, executable=None)) == ""


GROUPS = {7: frozenset({"staff", "lab"}), 8: frozenset({"other"})}


@pytest.mark.parametrize(
    ("protected", "expected"),
    [
        (Protected(), set()),
        (Protected(frozenset({1})), {1}),
        (Protected(groups=frozenset({"lab"})), {7, 9}),  # of 9, the groups are not known
        (Protected(frozenset({1}), frozenset({"lab", "other"})), {1, 7, 8, 9}),
    ],
)
def test_the_members_of_protected_groups_are_protected_and_those_whose_groups_are_unknown(protected, expected):
    assert protected.uids_of((7, 8, 9), GROUPS) == expected


@pytest.mark.parametrize(
    ("facts", "globs", "by_path", "runs"),
    [
        (a_program("/opt/a"), ("/opt/*",), True, True),
        (a_program("/opt/a (deleted)"), ("/opt/a",), True, True),
        (a_program("/opt/a"), ("/usr/*",), False, False),
        (a_program("/opt/a"), (), False, False),
        (a_program(None), ("/opt/*",), True, True),
        (a_program(None), (), False, False),
        (a_program("/opt/a", in_place=None), ("/opt/*",), True, True),
        (a_program("/opt/a", in_place=None, executable_owner=None), ("/opt/*",), True, True),
        (a_program("/opt/a", in_place=False), ("/opt/*",), True, False),
        (a_program("/opt/a", executable_owner=7), ("/opt/*",), True, True),
        (a_program("/opt/a", executable_owner=8), ("/opt/*",), True, False),
        (a_program("/opt/gone", executable_owner=0), ("/opt/*",), True, True),
        (a_program("/opt/gone", executable_owner=7), ("/opt/*",), True, False),
    ],
)
def test_a_protected_program_is_a_file_of_roots_or_of_the_owner_of_the_file_at_its_path(
    monkeypatch, facts, globs, by_path, runs
):
    def status(path: str) -> Any:
        if path != "/opt/a":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return SimpleNamespace(st_uid=7)

    monkeypatch.setattr(identity.os, "stat", status)
    assert (identity.has_path_of(facts, globs), identity.runs_one_of(facts, globs)) == (by_path, runs)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("UID_MIN\t\t 500\n", 500),
        ("# UID_MIN 5\nGID_MIN 7\n  UID_MIN 2000 \n", 2000),
        ("UID_MIN 0\n", 1000),
        ("UID_MIN\n", 1000),
        (None, 1000),
    ],
)
def test_the_first_uid_of_people_is_that_of_the_machine(monkeypatch, text, first):
    monkeypatch.setattr(identity, "read_text", {"/etc/login.defs": text}.get)

    assert identity.uid_min.__wrapped__() == first


@pytest.mark.parametrize(("text", "uid"), [("65533\n", 65533), ("x", 65534), (None, 65534)])
def test_the_uid_of_users_who_cannot_be_identified_is_the_kernels(monkeypatch, text, uid):
    monkeypatch.setattr(identity, "read_text", {"/proc/sys/kernel/overflowuid": text}.get)

    assert identity.overflow_uid.__wrapped__() == uid


def test_no_person_has_a_uid_of_the_system(monkeypatch):
    monkeypatch.setattr(identity, "uid_min", lambda: 1000)
    monkeypatch.setattr(identity, "overflow_uid", lambda: 65534)

    assert [identity.is_of_the_system(uid) for uid in (0, 999, 1000, 65533, 65534)] == [True, True, False, False, True]
