"""Files that others read are written whole, by one function, and read only where they can be trusted."""

import ast
import os
import stat
from pathlib import Path

import pytest
from sources import module_name, modules, tree

from gpuguard.files import UntrustedFile, read_file, write_file

# What renames a file without writing it whole: records and tickets, which are locked before they get their name, logs
# and recordings that begin anew beside the old one, the usage store's copies, and what setup moves.
RENAMING = {
    "gpuguard.files", "gpuguard.claims.records", "gpuguard.queue.tickets", "gpuguard.history.audit_log",
    "gpuguard.history.store", "gpuguard.backends.replay", "gpuguard.batch.job_records",
}  # fmt: skip

POLICY = "version: 1\npolicies: [{name: hogs, when: {memory: {above: 20GiB}}, steps: [log]}]\n"


def test_readers_see_the_old_content_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    seen: list[bytes] = []
    write_file(str(path), b"new", prepare=lambda descriptor: seen.append(path.read_bytes()))

    assert (seen, path.read_bytes()) == ([b"old"], b"new")
    assert os.listdir(tmp_path) == ["state.json"]


def test_everybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o077)
    try:
        write_file(str(tmp_path / "public"), b"x")
        write_file(str(tmp_path / "private"), b"x", mode=None)
    finally:
        os.umask(former)

    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("public", "private")]
    assert modes == [0o644, 0o600]


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    write_file(str(tmp_path / "link"), b"x")

    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert not (tmp_path / "link").is_symlink()


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "no space left")

    with pytest.raises(OSError, match="no space left"):
        write_file(str(tmp_path / "file"), b"x", prepare=fail)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_goes_once_it_is_old(tmp_path: Path) -> None:
    old, new = tmp_path / "file.0.new", tmp_path / "file.1.new"
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (0, 0))
    write_file(str(tmp_path / "file"), b"x")

    assert sorted(os.listdir(tmp_path)) == ["file", "file.1.new"]


@pytest.mark.parametrize("fault", ["others may write it", "another name", "a pipe", "too long", "another's"])
def test_a_file_that_cannot_be_trusted_is_not_read(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (9 if fault == "too long" else 4))
    if fault == "others may write it":
        path.chmod(0o666)
    if fault == "another name":
        os.link(path, tmp_path / "other")
    if fault == "a pipe":
        path.unlink()
        os.mkfifo(path)
    owners = (os.geteuid() + 1,) if fault == "another's" else (os.geteuid(),)

    with pytest.raises(UntrustedFile):
        read_file(str(path), 8, owners)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of another user, and beside it a file that only root may read and write."""
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 20003, 20003)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "victim").write_text("root:*:20228\n")
    (tmp_path / "root" / "victim").chmod(0o600)
    return tmp_path / "home"


def planted(home: Path, how: str) -> Path:
    """What looks like a file of the user's, and is root's."""
    victim = home.parent / "root" / "victim"
    if how == "hard link":
        os.link(victim, home / "file")
    elif how == "link":
        (home / "file").symlink_to(victim)
    else:
        (home / "d").symlink_to(victim.parent)
        return home / "d" / "victim"
    return home / "file"


@pytest.mark.root
@pytest.mark.parametrize("how", ["link", "hard link", "link on the way"])
@pytest.mark.parametrize(
    "words",
    [
        "run --log-file {} -- true",
        "record --append {} --for 1s",
        "policy check {}",
        "policy explain {}",
        "policy test {0} {0}",
        "policy backtest {1} --on {0}",
        "who --backend smi:{}",
        "who --backend replay:{}",
        "web --token-file {}",
    ],
)
def test_what_another_user_has_linked_leads_no_command_of_root_to_a_file_of_roots(gpuguard, home, how, words):
    path = planted(home, how)
    (home.parent / "policy.yaml").write_text(POLICY)
    done = gpuguard(*words.format(path, home.parent / "policy.yaml").split())

    assert done.returncode != 0
    assert "in a directory where others may write" in done.stdout + done.stderr
    assert "20228" not in done.stdout + done.stderr
    assert (home.parent / "root" / "victim").read_text() == "root:*:20228\n"


@pytest.mark.root
def test_roots_own_links_and_what_another_user_really_has_are_opened(gpuguard, home, tmp_path):
    (home / "policy.yaml").write_text(POLICY)
    os.chown(home / "policy.yaml", 20003, 20003)
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "victim")

    assert gpuguard("policy", "check", str(home / "policy.yaml")).returncode == 0
    assert gpuguard("run", "--log-file", str(tmp_path / "root" / "link"), "--", "true").returncode == 0
    assert gpuguard("run", "--log-file", str(home / "new"), "--", "true").returncode == 0
    assert gpuguard("run", "--quiet", "--log-file", "/dev/stdout", "--", "true").stdout
    assert len((tmp_path / "root" / "victim").read_text().splitlines()) > 1


@pytest.mark.parametrize("words", ["who --backend smi:{}", "who --backend replay:{}", "policy check {}"])
def test_a_pipe_that_nobody_writes_into_keeps_no_command_waiting(gpuguard, tmp_path, words):
    os.mkfifo(tmp_path / "pipe")

    assert gpuguard(*words.format(tmp_path / "pipe").split()).returncode not in (0, None)


def renames(module: ast.AST) -> list[int]:
    """The lines on which *module* gives a file another name."""
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    named = (call for call in calls if getattr(call.func, "attr", "") in ("rename", "replace"))
    plain = (call for call in named if ast.unparse(call.func) in ("os.rename", "os.replace"))
    return [call.lineno for call in plain if not any(word.arg == "src_dir_fd" for word in call.keywords)]


def test_no_second_function_writes_a_file_whole() -> None:
    assert {module_name(path) for path in modules() if renames(tree(path))} == RENAMING
