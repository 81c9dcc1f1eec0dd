"""What /proc says of a process to a guard that may look into processes, but not open every file of the machine."""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enforcing_daemon import DrivenDaemon, driven
from fake_nvml import GIB, FakeNvml
from guard_scene import SOMEBODY, Scene, a_child, a_scene, python, somebody
from nodes import until

from gpuguard import procfs
from gpuguard.enforcement import identity
from gpuguard.enforcement.identity import Protected
from gpuguard.policy_files.loader import parse
from gpuguard.yaml_files.decoder import Accounts

FULL = "/dev/zero"  # stands for the file of the driver: any process can map it
WAITS = "print('there', flush=True); time.sleep(600)"
MAPS = f"import mmap, os, sys, time; at = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 4096, 2, 1); {WAITS}"
OTHERS = f"import sys, time; {WAITS}"
# The kernel writes a long name of a file for each: more than 200 MB that anybody has to read who looks for one of them.
MANY = """
import ctypes, mmap, os, sys, time
driver, at = os.open(sys.argv[1], os.O_RDONLY), ctypes.CDLL(None).mmap
at.restype, at.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_size_t] * 5
at(None, 4096, 1, 2, driver, 0)
os.chdir(sys.argv[2])
for _ in range(14):
    os.mkdir("x" * 250)
    os.chdir("x" * 250)
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8192)
count = 0
while at(None, 4096, 1 + count % 2 * 2, 2, file, 0) != ctypes.c_void_p(-1).value:
    count += 1
print(count, flush=True)
time.sleep(600)
"""
THREAD = f"""
import ctypes, threading, time
def computes():
    {MAPS.partition("; ")[2].replace("; ", chr(10) + "    ")}
import mmap, os, sys
threading.Thread(target=computes).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@contextlib.contextmanager
def a_program(code: str, *words: str, under: tuple[str, ...] = (), **more: Any) -> Iterator[int]:
    """The pid of a Python program of somebody that has said a line; *under*: words before the interpreter."""
    with a_child(*under, python(), "-c", code, *words, stdout=subprocess.PIPE, **more) as child:
        assert child.stdout and child.stdout.readline(), "it has ended"
        yield child.pid


@pytest.fixture
def unseen_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard with CAP_SYS_PTRACE alone, which sees what is mapped, and not what is open."""
    listdir = os.listdir

    def list_directory(path: str) -> list[str]:
        if path.endswith("/fd"):
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(identity.os, "listdir", list_directory)
    monkeypatch.setattr(identity, "NODES", (FULL,))


def uses_driver(pid: int) -> bool | None:
    facts = identity.facts_of(pid, (frozenset({os.stat(FULL).st_rdev}),))
    assert facts is not None
    return facts.uses_driver


@pytest.fixture(params=["by queries", "by lines"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of today, and one from before Linux 6.11."""
    if request.param == "by lines":
        monkeypatch.setattr(identity, "_PROCMAP_QUERY", 0xC0686612)


@pytest.mark.usefixtures("unseen_files", "kernel")
@pytest.mark.parametrize(("code", "uses"), [(MAPS, True), (THREAD, True), (OTHERS, None)])
def test_where_its_files_cannot_be_seen_its_mappings_say_that_it_uses_the_driver(code, uses):
    with a_program(code, FULL) as pid:
        assert uses_driver(pid) is uses, "what cannot be seen is not known, never False"


# In one line of bwrap: the node of the driver lies elsewhere, and its own path leads there.
ELSEWHERE = 'mount --rbind /dev "$0" && mount -t tmpfs none /dev && ln -s "$0/zero" /dev/zero && exec "$@"'


@pytest.mark.usefixtures("unseen_files", "kernel")
def test_a_node_of_the_driver_is_known_under_any_path() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # files of tests may lie below /dev
        own = ("unshare", "-Urm", "sh", "-c", ELSEWHERE, place)
        if subprocess.run([*own, "true"], check=False, capture_output=True).returncode:
            pytest.skip("NOT TESTED: no namespaces here")
        with a_program(MAPS, f"{place}/zero", under=own) as pid:
            assert uses_driver(pid) is True


@pytest.mark.usefixtures("unseen_files")
def test_however_much_a_process_maps_it_is_seen_that_it_uses_the_driver(open_place: Path) -> None:
    """65,530 mappings of a file with a name of 3,600 characters: /proc/PID/maps took longer than the guard reads it."""
    os.chmod(open_place, 0o777)
    with a_program(MANY, FULL, str(open_place)) as pid:
        if not asks_for_mappings(pid):
            pytest.skip("NOT TESTED: needs Linux 6.11")

        assert uses_driver(pid) is True


def asks_for_mappings(pid: int) -> bool:
    with open(f"/proc/{pid}/maps", "rb") as maps, contextlib.suppress(OSError):
        return bool(fcntl.ioctl(maps, identity._PROCMAP_QUERY, identity._QUERY.pack(104, 0x10, *[0] * 13)))
    return False


@pytest.mark.usefixtures("unseen_files")
def test_what_a_process_has_mapped_is_never_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"7f0-7f1 r-xp 00000000 fe:00 1 /home/alice/" + b"x" * 3600 + b"\n"

    class Endless(io.RawIOBase):
        left = 2**26

        def fileno(self) -> int:
            return 2**20  # not open

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            given = (line * (len(buffer) // len(line) + 1))[: min(len(buffer), self.left)]
            buffer[: len(given)] = given
            self.left -= len(given)
            return len(given)

    monkeypatch.setattr("builtins.open", lambda *how: io.BufferedReader(Endless()))
    monkeypatch.setattr(identity.fcntl, "ioctl", lambda *of: refuse(errno.ENOTTY))
    monkeypatch.setattr(identity, "_threads", lambda pid: [])
    tracemalloc.start()
    try:
        assert list(identity._mapped_nodes(1)) == []
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("hanging", ["program", "files", "maps", "code"])
def test_what_never_comes_back_is_unknown_by_itself(monkeypatch: pytest.MonkeyPatch, hanging: str) -> None:
    """A file system of one's own, or a page of it under the mappings, made a process unknown as a whole."""
    read, over = procfs.in_time, threading.Event()

    def in_time(pid: int, kind: str, look: Callable[[], object], times: int = 1) -> object:
        return read(pid, kind, (lambda: over.wait(60)) if kind == hanging else look, 1)

    for name, value in (("FILE_SECONDS", 2.0), ("_hanging", {}), ("_spent", {})):
        monkeypatch.setattr(procfs, name, value)
    monkeypatch.setattr(identity, "in_time", in_time)
    with a_program(OTHERS) as pid:
        facts = identity.facts_of(pid)
        over.set()

    assert facts is not None and facts.executable is not None
    assert (facts.executable_owner is None) is (hanging == "program")


def test_a_program_on_a_file_system_that_tells_root_nothing_is_known_by_its_path(monkeypatch):
    stat = os.stat

    def closed(path, **more):
        return refuse(errno.EACCES) if str(path).endswith("/exe") else stat(path, **more)

    path = identity.facts_of(os.getpid()).executable
    monkeypatch.setattr(identity.os, "stat", closed)

    facts = identity.facts_of(os.getpid())
    assert (facts.executable, facts.executable_owner, facts.in_place) == (path, None, False)
    assert not identity.runs_one_of(facts, (path,)), "a path is nothing that protects: anybody can mount there"


BEGIN = "import ctypes, mmap, os, sys, threading, time; "
# What a user can bring into a program of root's: "" is nothing.  The last line of each keeps it there.
BROUGHT = {
    "nothing": "",
    "data": "at = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 4096, 2, 1)",
    "a library of one's own": "at = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 4096, 2, 5)",
    "a file that lies nowhere": "os.ftruncate(file := os.memfd_create('x'), 4096); at = mmap.mmap(file, 4096, 1, 5)",
    "memory": "at = mmap.mmap(-1, 4096, 2, 7)",
    "a changed page of root's": "at = mmap.mmap(os.open(sys.argv[2], os.O_RDONLY), 4096, 2, 7); at[0] = 1",
    "a library, without a first thread": (
        "at = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 4096, 2, 5); print('there', flush=True); "
        "threading.Thread(target=time.sleep, args=(600,)).start(); ctypes.CDLL(None).pthread_exit(None)"
    ),
}


@pytest.fixture
def interpreter_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that is taken for a program of the system: it can bring in whatever a user can."""
    if not os.path.realpath(python()).startswith(identity.SYSTEM_PLACES) or os.stat(python()).st_uid:
        pytest.skip("NOT TESTED: needs a Python of the system's")
    for programs in ("SYSTEM_PROGRAMS", "DISPLAY_PROGRAMS"):
        monkeypatch.setattr(identity, programs, ("python3*",))


@pytest.mark.usefixtures("interpreter_of_the_system")
@pytest.mark.parametrize("brought", BROUGHT)
def test_a_program_of_the_system_protects_nobody_who_has_brought_code_into_it(open_place: Path, brought: str) -> None:
    own, roots = open_place / "library", os.path.realpath("/usr/bin/env")
    own.write_bytes(b"x" * 4096)
    own.chmod(0o755)
    os.chown(own, somebody() or os.getuid(), -1)
    with a_program(f"{BEGIN}{BROUGHT[brought]}\n{WAITS}", str(own), roots) as pid:
        facts = identity.facts_of(pid)

    assert facts is not None
    assert identity.belongs_to_the_system(facts) is (brought in ("nothing", "data"))
    # A compositor compiles its scripts, and what it draws.
    assert identity.belongs_to_the_system(facts, draws=True) is (brought in ("nothing", "data", "memory"))


@pytest.mark.usefixtures("interpreter_of_the_system")
def test_no_program_is_the_systems_whose_user_may_choose_what_it_is_said_to_run(open_place: Path) -> None:
    """Root of a user namespace of one's own may set /proc/PID/exe (PR_SET_MM) without mounting anything."""
    if subprocess.run(["unshare", "-Ur", "true"], check=False, capture_output=True).returncode:
        pytest.skip("NOT TESTED: no namespaces here")
    with a_program(OTHERS, under=("unshare", "-Ur")) as pid:
        facts = identity.facts_of(pid)

    assert facts is not None and facts.in_place
    assert not identity.belongs_to_the_system(facts)


TRAIN = "#include <unistd.h>\n__attribute__((constructor)) static void train(void) { for (;;) pause(); }\n"
OFFICIAL = ("dbus-daemon", "tmux", "nvidia-smi", "nvtop", "screen")


@pytest.mark.root
def test_whoever_computes_from_a_library_in_a_program_of_the_system_is_ended(open_place: Path) -> None:
    """`LD_PRELOAD=./train.so dbus-daemon`: one variable put a job out of the reach of every policy."""
    program, library = next(filter(None, map(shutil.which, OFFICIAL)), None), open_place / "train.so"
    if program is None or (compiler := shutil.which("cc")) is None:
        pytest.skip("NOT TESTED: needs a compiler and one of the programs of the system")
    (open_place / "train.c").write_text(TRAIN)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, open_place / "train.c"], check=True)
    library.chmod(0o755)
    with a_scene(program, env={"LD_PRELOAD": str(library)}) as scene:
        until(lambda: str(library) in Path(f"/proc/{scene.pid}/maps").read_text())

        assert scene.act().word == "sent"
        assert scene.dies()


# A library that goes on in libc alone, as one does that has left a kernel or its memory on a GPU.
VANISH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void vanish(void) {
  unsigned long first = 0, last = 0, begin, end;
  char line[4096];
  FILE *maps = fopen("/proc/self/maps", "r");
  while (fgets(line, sizeof line, maps))
    if (strstr(line, "vanish.so") && sscanf(line, "%lx-%lx", &begin, &end) == 2)
      first = first ? first : begin, last = end;
  fclose(maps);
  void *pause_in_libc = dlsym(RTLD_DEFAULT, "pause"), *munmap_in_libc = dlsym(RTLD_DEFAULT, "munmap");
  __asm__ volatile("and $-16, %%rsp; push %2; push %2; mov %0, %%rdi; mov %1, %%rsi; jmp *%3"
                   :: "r"(first), "r"(last - first), "r"(pause_in_libc), "r"(munmap_in_libc) : "rdi", "rsi", "memory");
}
"""


@pytest.mark.root
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="NOT TESTED: the library is one for x86-64")
def test_whoever_has_the_driver_open_in_a_program_of_the_system_is_ended_though_no_code_is_left(
    open_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It unmaps itself when its work is begun: then all that the process can run lies in files of root's."""
    program, library = next(filter(None, map(shutil.which, OFFICIAL)), None), open_place / "vanish.so"
    if program is None or (compiler := shutil.which("cc")) is None:
        pytest.skip("NOT TESTED: needs a compiler and one of the programs of the system")
    (open_place / "vanish.c").write_text(VANISH)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, open_place / "vanish.c", "-ldl"], check=True)
    library.chmod(0o755)
    monkeypatch.setattr(identity, "_uses_driver", lambda pid, drivers: (True, False))  # no driver is here to be opened
    with a_scene(program, env={"LD_PRELOAD": str(library)}) as scene:
        until(lambda: Path(f"/proc/{scene.pid}/comm").read_text().strip() == os.path.basename(program))
        until(lambda: str(library) not in Path(f"/proc/{scene.pid}/maps").read_text())
        facts = identity.facts_of(scene.pid)
        assert facts is not None and facts.foreign_code == "nowhere"

        assert scene.act().word == "sent"
        assert scene.dies()


@pytest.mark.root
def test_tmux_and_its_kin_of_a_person_are_left_alone(open_place: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("NOT TESTED: needs tmux")
    os.chmod(open_place, 0o777)
    with a_scene("tmux", "-D", env={"TMUX_TMPDIR": str(open_place), "PATH": os.defpath}) as scene:
        until(lambda: Path(f"/proc/{scene.pid}/exe").resolve().name == "tmux")

        assert scene.against() == {"program"}
        assert scene.act().why.endswith("/tmux belongs to the system")


MOUNTED = 'mount --bind "$0" /usr/bin/login && exec /usr/bin/login -c "import time; print(flush=True); time.sleep(600)"'
# From outside of that namespace: whoever runs it there sees what everybody sees.
THROUGH = r"""
unshare -Urm sh -c 'mount --bind "$0" /usr/bin/login && exec sleep 600' "$0" &
until cmp -s "$0" /proc/$!/root/usr/bin/login; do kill -0 $! || exit; sleep 0.01; done
exec /proc/$!/root/usr/bin/login -c "import time; print(flush=True); time.sleep(600)"
"""


@pytest.mark.root
@pytest.mark.parametrize("way", ["mounted", "through", "in a container"])
def test_a_program_of_roots_that_somebody_mounted_at_the_path_of_another_is_not_that_one(way):
    """In a namespace of one's own /usr/bin/login can be Python: whoever ran that was out of every policy's reach."""
    python = os.path.realpath("/usr/bin/python3")
    if not os.path.exists("/usr/bin/login") or not os.path.exists(python):
        pytest.skip("programs that change their user (no login, or no Python of the system's)")
    own = ["setpriv", "--reuid=20001", "--regid=20001", "--clear-groups"]
    words = {
        "mounted": [*own, "unshare", "-Urm", "sh", "-c", MOUNTED, python],
        "through": [*own, "sh", "-c", THROUGH, python],
        # Root made what it sees, so its paths are what root says.
        "in a container": ["unshare", "-m", "sh", "-c", MOUNTED.replace("exec", f"exec {' '.join(own)}"), python],
    }[way]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, **pipes) as child:
        try:
            if not child.stdout.readline():
                pytest.skip(f"other namespaces (none here: {child.stderr.read().decode().strip()})")
            facts = identity.facts_of(child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    assert (facts.executable, facts.executable_owner, facts.uids[0]) == ("/usr/bin/login", 0, 20001)
    of_root = way == "in a container"
    assert identity.belongs_to_the_system(facts) is of_root
    assert identity.runs_one_of(facts, ("/usr/bin/login",)) is of_root


POLICY = """
protect: {protect}
policies: [{{name: small, for: 1s, when: {{memory: {{above: 1GiB}}}}, steps: [terminate]}}]
"""
SLEEP = os.path.realpath("/usr/bin/sleep")


@pytest.mark.root
@pytest.mark.parametrize(
    ("protect", "why"),
    [
        ("{users: [somebody]}", f"uid {SOMEBODY} is protected"),
        ("{groups: [our-lab]}", f"uid {SOMEBODY} is protected"),
        (f"{{executables: [{SLEEP}]}}", f"{SLEEP} is protected"),
    ],
)
def test_whoever_is_protected_lives_and_the_log_says_why(tmp_path: Path, protect: str, why: str) -> None:
    groups = tmp_path / "group"
    groups.write_text(Path("/etc/group").read_text() + "our-lab:x:30001:somebody\n")
    under = "sh", "-c", 'mount --bind "$1" /etc/group && shift && exec "$@"', "sh", str(groups)
    with FakeNvml(tmp_path, devices=1) as fake, a_child() as child:
        fake.add_process(0, child.pid, 2 * GIB)
        with driven(tmp_path, fake, POLICY.format(protect=protect), under=under) as daemon:
            refused = daemon.until("terminate")

            assert [event["outcome"] for event in refused] == ["refused"]
            assert refused[0]["message"].endswith(why)
            assert child.poll() is None


@pytest.mark.root
def test_who_is_not_meant_by_what_protects_others_is_ended(tmp_path: Path) -> None:
    protect = "{users: [root], groups: [root], executables: [/usr/bin/python3*]}"
    with FakeNvml(tmp_path, devices=1) as fake, a_child() as child:
        fake.add_process(0, child.pid, 2 * GIB)
        with driven(tmp_path, fake, POLICY.format(protect=protect)) as daemon:
            assert child.wait(60) == -15, daemon.said()


SUBUID = 100_001  # where root has given them for containers without root
MEMORY = "policies: [{name: small, for: 1s, when: {memory: {above: 1GiB}}, steps: [terminate]}]"


@contextlib.contextmanager
def guarded_where(
    given: str, place: Path, policies: str = MEMORY
) -> Iterator[tuple[subprocess.Popen[bytes], DrivenDaemon]]:
    """A process of SUBUID on a GPU, and a daemon on a machine where root has *given* these."""
    if not os.path.exists("/etc/subuid"):
        pytest.skip("NOT TESTED: no /etc/subuid")
    subuid = place / "subuid"
    subuid.write_text(given)
    under = "sh", "-c", 'mount --bind "$1" /etc/subuid && shift && exec "$@"', "sh", str(subuid)
    with FakeNvml(place, devices=1) as fake, a_child(uid=SUBUID) as child:
        fake.add_process(0, child.pid, 2 * GIB)
        with driven(place, fake, policies, under=under) as daemon:
            yield child, daemon


@pytest.mark.root
def test_a_process_with_a_uid_that_root_gave_to_a_user_is_ended_as_that_users(tmp_path: Path) -> None:
    """Rootless containers have them, and so has any user: "the name of uid 100001 is not known" spared all of them."""
    with guarded_where("somebody:100000:65536\n", tmp_path) as (child, daemon):
        assert child.wait(60) == -signal.SIGTERM, daemon.said()
        sent = daemon.until("terminate")[0]

    assert (sent["user"], sent["facts"]["uid"]) == ("somebody", SOMEBODY)


@pytest.mark.root
@pytest.mark.parametrize(
    ("given", "policies", "why"),
    [
        ("somebody:100000:65536\n", f"protect: {{users: [somebody]}}\n{MEMORY}", f"uid {SOMEBODY} is protected"),
        ("", MEMORY, f"the name of uid {SUBUID} is not known"),
        ("somebody:100000:9\nanother:100001:9\n", MEMORY, f"the name of uid {SUBUID} is not known"),
        ("nobody-here:100000:9\n", MEMORY, f"the name of uid {SUBUID} is not known"),
        ("root:100000:9\n", MEMORY, f"the name of uid {SUBUID} is not known"),
        ("bin:100000:65536\n", MEMORY, "uid 2 is the system's"),  # as Docker gives them to dockremap
    ],
)
def test_whose_such_a_process_is_must_be_certain_and_that_user_must_not_be_protected(tmp_path, given, policies, why):
    with guarded_where(given, tmp_path, policies) as (child, daemon):
        refused = daemon.until("terminate")[0]

        assert (refused["outcome"], why in refused["message"]) == ("refused", True), refused
        assert child.poll() is None


@pytest.mark.parametrize("protected", ["user", "program"])
@pytest.mark.parametrize("action", ["checkpoint", "terminate", "kill", "pause", "resume", "renice"])
def test_no_action_reaches_what_is_protected(scene: Scene, action: str, protected: str) -> None:
    uids = frozenset({scene.process.uid} if protected == "user" else ())
    scene.context(protected=uids, protected_executables=("/*",) if protected == "program" else ())
    outcome = scene.act(action)

    assert outcome.word == "refused"
    assert "protected" in {check.text.rpartition(" ")[2] for check in outcome.failed}


def test_names_are_resolved_when_the_file_is_read() -> None:
    accounts = Accounts({"alice": 1001}.__getitem__, {"lab": 30001}.__getitem__)
    text = "version: 1\nprotect: {users: [alice, 1002], groups: [lab], executables: [/opt/*]}\n"
    file = parse(text + "policies: [{name: a, when: {unclaimed: {}}, steps: [log]}]", accounts=accounts)

    assert file.faults == ()
    assert file.protected == Protected(frozenset({1001, 1002}), frozenset({"lab"}), ("/opt/*",))
