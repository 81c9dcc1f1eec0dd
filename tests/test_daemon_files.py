"""The directory in which a daemon with a user of its own writes: what counts there, and what does not."""

import json
import os
import time
from pathlib import Path

import pytest
from builders import a_device, a_snapshot
from daemons import SOMEBODY, ask

from gpuguard import source
from gpuguard.claims.directory import LockDirectory, daemon_files, lock_directory
from gpuguard.claims.restrictions import (
    DENIED,
    KEPT,
    QUARANTINED,
    Restriction,
    change,
    read_restrictions,
    restrictions_against,
    to_json,
)
from gpuguard.daemon.socket_server import SocketServer
from gpuguard.errors import LockDirectoryError

root = pytest.mark.root
STRANGER = SOMEBODY + 1
NOW = 1_000.0


@pytest.fixture
def directory(open_place: Path) -> LockDirectory:
    return lock_directory(f"{open_place}/claims")


@pytest.fixture
def own(directory: LockDirectory) -> Path:
    """The daemon's directory, somebody's where we are root."""
    path = Path(directory.path, "daemon")
    path.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, SOMEBODY)
    return path


def as_user(uid: int, does) -> int:
    """The exit status of a child of that user: 0 when *does* came back, 1 when it raised."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            does()
            os._exit(0)
        except BaseException:  # noqa: BLE001  a child of a test must not return into it
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mark(directory: LockDirectory, kind: str, name: str, until: float | None = None) -> None:
    change(directory, kind, lambda found: found.update({name: Restriction(name, NOW, until, "because")}))


def test_with_one_it_writes_there_and_nowhere_else(directory, own):
    descriptor = source.lock_daemon(directory)
    source.write_state(directory, a_snapshot(a_device()), 10.0)
    mark(directory, KEPT, "1001")

    assert {path.name for path in own.iterdir()} == {"daemon.lock", "state.json", "kept.json", "marks.lock"}
    assert {path.name for path in Path(directory.path).iterdir()} == {"daemon", "lock", "claims"}
    os.close(descriptor)


@pytest.mark.parametrize("fault", ["absent", "link", "writable", "file"])
def test_a_directory_that_another_user_could_have_made_or_filled_is_not_the_daemons(directory, tmp_path, fault):
    path = Path(directory.path, "daemon")
    if fault == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif fault == "file":
        path.touch()
    elif fault == "writable":
        path.mkdir()
        path.chmod(0o775)

    assert daemon_files(directory).path == directory.path


def test_where_every_user_may_make_directories_none_is_the_daemons(tmp_path):
    (tmp_path / "daemon").mkdir()
    flat = LockDirectory(str(tmp_path), str(tmp_path), str(tmp_path), prefix="gpuguard.")

    assert daemon_files(flat).path == str(tmp_path)


@root
def test_its_user_can_be_the_daemon_and_a_stranger_cannot(directory, own):
    def serve():
        assert source.lock_daemon(directory) is not None
        source.write_state(directory, a_snapshot(a_device()), 10.0)
        mark(directory, KEPT, "1001")
        mark(directory, DENIED, "1001")
        mark(directory, QUARANTINED, "GPU-1")

    assert [as_user(uid, serve) for uid in (STRANGER, SOMEBODY)] == [1, 0]
    expected = {KEPT: ["1001"], DENIED: ["1001"], QUARANTINED: ["GPU-1"]}
    assert {kind: list(read_restrictions(directory, kind, NOW)) for kind in expected} == expected


@root
def test_its_user_cannot_touch_what_root_decided(directory, own):
    mark(directory, DENIED, "1001")
    before = Path(directory.path, "denied.json").read_bytes()

    assert as_user(SOMEBODY, lambda: change(directory, DENIED, dict.clear)) == 0
    assert Path(directory.path, "denied.json").read_bytes() == before
    assert as_user(SOMEBODY, lambda: os.unlink(directory.lock_path("gate"))) == 1
    assert list(read_restrictions(directory, DENIED, NOW)) == ["1001"]


@root
def test_what_lasts_longer_counts(directory, own):
    later = float(int(time.time()) + 100)
    as_user(SOMEBODY, lambda: mark(directory, DENIED, "1001", later))
    Path(directory.path, "denied.json").write_bytes(
        (own / "denied.json").read_bytes().replace(str(later).encode(), str(later - 50).encode())
    )

    assert read_restrictions(directory, DENIED, NOW)["1001"].until == later
    assert read_restrictions(directory, DENIED, later - 10).keys() == {"1001"}


@root
def test_root_can_end_what_the_daemon_decided_and_takes_the_rest_over(directory, own):
    until = time.time() + 100
    as_user(SOMEBODY, lambda: mark(directory, DENIED, "1001", until))
    as_user(SOMEBODY, lambda: mark(directory, DENIED, "1002", until))
    change(directory, DENIED, lambda found: found.pop("1001"))

    assert list(read_restrictions(directory, DENIED, NOW)) == ["1002"]
    assert not (own / "denied.json").exists()
    change(directory, DENIED, dict.clear)
    assert read_restrictions(directory, DENIED, NOW) == {}


@root
@pytest.mark.parametrize("name", ["state.json", "kept.json", "denied.json"])
def test_files_of_a_third_user_count_for_nothing_there(directory, own, name):
    descriptor = source.lock_daemon(directory)
    snapshot = a_snapshot(a_device())
    source.write_state(directory, snapshot, 10.0)
    as_user(SOMEBODY, lambda: mark(directory, KEPT, "1"))
    as_user(SOMEBODY, lambda: mark(directory, DENIED, "1"))
    os.chown(own / name, STRANGER, STRANGER)
    seen = {
        "state.json": source.read_state(directory, snapshot.clock, simulated=snapshot.simulated) is not None,
        "kept.json": bool(read_restrictions(directory, KEPT, NOW)),
        "denied.json": bool(read_restrictions(directory, DENIED, NOW)),
    }
    os.close(descriptor)

    assert seen == {file: file != name for file in seen}


@root
def test_what_root_locks_there_its_user_can_lock_later_and_no_third_user(directory, own):
    os.close(source.lock_daemon(directory))
    mark(directory, KEPT, "1001")
    assert (own / "daemon.lock").stat().st_mode & 0o777 == 0o600

    def serve():
        assert source.lock_daemon(directory) is not None
        mark(directory, KEPT, "1002")

    assert as_user(SOMEBODY, serve) == 0


@root
@pytest.mark.parametrize("plant", ["link", "fifo", "hard link"])
def test_a_planted_lock_file_does_root_no_harm(directory, own, tmp_path, plant):
    victim = tmp_path / "victim"
    victim.write_text("root's")
    path = own / "daemon.lock"
    make = {"link": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path)}
    make.get(plant, lambda: os.link(victim, path))()

    with pytest.raises(LockDirectoryError, match=r"daemon\.lock"):
        source.lock_daemon(directory)
    assert (victim.stat().st_uid, victim.read_text()) == (0, "root's")


@root
@pytest.mark.parametrize(("given", "who"), [(False, "the daemon as root; "), (True, f"as root or as {SOMEBODY}")])
def test_a_user_who_may_not_be_the_daemon_is_told_who_may(directory, request, given, who):
    if given:
        request.getfixturevalue("own")
    os.setresuid(-1, STRANGER, 0)
    try:
        with pytest.raises(LockDirectoryError, match=who):
            source.lock_daemon(directory)
    finally:
        os.setresuid(-1, 0, 0)


def test_a_daemon_that_was_started_before_there_was_such_a_directory_is_still_the_one(directory):
    descriptor = source.lock_daemon(directory)
    Path(directory.path, "daemon").mkdir(mode=0o755)

    assert source.lock_daemon(directory) is None
    os.close(descriptor)
    os.close(source.lock_daemon(directory))


def test_requests_reach_the_daemon_there(directory, own):
    socket_server = SocketServer(directory, lambda uid, request: {"heard": request["do"]})
    try:
        assert ask(directory, {"do": "keep"})["heard"] == "keep"
        assert (own / "daemon.sock").stat().st_mode & 0o777 == 0o666
    finally:
        socket_server.close()


@root
def test_a_socket_of_a_third_user_is_not_asked(directory, own):
    os.chown(own, STRANGER, STRANGER)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setresuid(STRANGER, STRANGER, STRANGER)
        socket_server = SocketServer(directory, lambda uid, request: {})
        os.write(writer, b".")
        time.sleep(30)
        os._exit(len(repr(socket_server)))
    os.close(writer)
    assert os.read(reader, 1)
    os.chown(own, SOMEBODY, SOMEBODY)  # the directory is given to another user, the socket in it is not
    try:
        with pytest.raises(Exception, match="not that of the daemon"):
            ask(directory, {"do": "keep"})
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.mark.parametrize("kind", [DENIED, QUARANTINED])
def test_what_the_daemon_decided_binds_all_claims(directory, own, kind):
    device, path = a_device(0), own / f"{kind}.json"
    name = str(os.geteuid()) if kind == DENIED else device.uuid
    restriction = to_json(Restriction(name, NOW, None, "because", "the policy p"))
    path.write_text(json.dumps({"schema": 1, "marks": [restriction]}))
    path.chmod(0o644)

    assert "by the policy p: because" in restrictions_against(directory, [device.uuid], os.geteuid(), NOW)[device.uuid]
