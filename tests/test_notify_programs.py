"""Hooks and apprise: programs that are started with a message."""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import a_device, a_process, a_snapshot
from endpoints import wait_until
from targets import HOSTILE, PASSWORD, a_fake_apprise, a_message, a_script, a_secret, a_verdict

from gpuguard.errors import InvalidRequest
from gpuguard.notify.apprise import Apprise
from gpuguard.notify.hook import Hook
from gpuguard.notify.mail import Email
from gpuguard.notify.sender import attempt, problems
from gpuguard.notify.templates import message_for


def test_a_hook_gets_the_message_by_environment_and_standard_input(tmp_path, monkeypatch):
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)
    out = tmp_path / "out"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    os.chmod(tmp_path, 0o755)
    program = a_script(
        tmp_path / "hook",
        f'env >{out}/env; cat >{out}/json; printf "%s\\n" "$@" >{out}/words; id -u >{out}/uid; id -G >{out}/groups',
    )
    with _reachable(tmp_path), _in_groups_of_root():
        assert attempt(Hook((program, "--urgent", "$(id)")), a_message()) == (True, "")

    environment = dict(line.split("=", 1) for line in (out / "env").read_text().splitlines() if "=" in line)
    assert environment["GPUGUARD_POLICY"] == "idle-gpus"
    assert environment["GPUGUARD_USER"] == "alice"
    assert PASSWORD not in (out / "env").read_text()
    assert json.loads((out / "json").read_bytes())["facts"]["pid"] == 4711
    assert (out / "words").read_text() == "--urgent\n$(id)\n"
    assert (out / "uid").read_text().strip() != "0"
    assert not {"0", "4"} & set((out / "groups").read_text().split())


@contextmanager
def _in_groups_of_root():
    """As a daemon that an administrator started by hand; nothing changes for who is not root."""
    former = os.getgroups()
    if os.geteuid() == 0:
        os.setgroups([0, 4])
    try:
        yield
    finally:
        if os.geteuid() == 0:
            os.setgroups(former)


@contextmanager
def _reachable(path):
    """Another user gets to *path*: pytest's own folders are closed to others."""
    changed = []
    for parent in path.parents:
        mode = os.stat(parent).st_mode
        if os.stat(parent).st_uid == os.geteuid() and not mode & stat.S_IXOTH:
            os.chmod(parent, mode | stat.S_IXOTH)
            changed.append((parent, mode))
    try:
        yield
    finally:
        for parent, mode in changed:
            os.chmod(parent, mode)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_user_is_run_or_becomes_a_word_of_a_hook(hostile, tmp_path):
    process = a_process(command=(hostile, f"; touch {tmp_path}/hit #", f"$(touch {tmp_path}/hit)"), user=hostile)
    message = message_for(a_verdict(process, why=hostile), a_snapshot(a_device(3)))
    quiet = "/bin/true"

    assert attempt(Hook((quiet,)), message) == (True, "")
    assert attempt(Email("root", sendmail=a_script(tmp_path / "s", "cat >/dev/null")), message) == (True, "")
    assert not (tmp_path / "hit").exists()


def test_a_hook_that_fails_hangs_or_is_missing_is_told():
    assert attempt(Hook(("/bin/false",)), a_message()) == (False, "/bin/false ends with status 1")
    assert attempt(Hook(("/bin/sleep", "60"), timeout=0.1), a_message()) == (False, "/bin/sleep was not done in time")
    assert "cannot be run: No such file" in attempt(Hook(("/nonexistent",)), a_message())[1]


def test_a_hook_that_hangs_is_ended_with_all_that_it_has_started(tmp_path):
    told = tmp_path / "told"
    told.touch()
    told.chmod(0o666)
    with _reachable(told):
        hook = Hook(("/bin/sh", "-c", f"sleep 60 & echo $! >{told}; wait"), timeout=0.5)
        assert attempt(hook, a_message()) == (False, "/bin/sh was not done in time")

    wait_until(lambda: has_ended(int(told.read_text())))


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""  # of who is not waited for
    except FileNotFoundError:
        return True


@pytest.mark.root
def test_a_hook_of_a_user_that_is_not_there_is_not_run_as_root(tmp_path):
    went_out, why = attempt(Hook(("/bin/true",), user="no-such-user"), a_message())

    assert (went_out, why) == (False, "there is no user 'no-such-user' to run a hook as")


@pytest.mark.parametrize("command", [(), ("tell",), ("./tell",), ("/bin/echo", "a\0b")])
def test_a_hook_needs_a_whole_path(command):
    with pytest.raises(InvalidRequest):
        Hook(command)


def test_other_services_are_reached_through_apprise(tmp_path, monkeypatch, capfd):
    a_fake_apprise(tmp_path, monkeypatch)
    target = Apprise(a_secret(tmp_path, f"chat://{PASSWORD}"))

    assert attempt(target, a_message("zh")) == (True, "")
    url, said = json.loads((tmp_path / "said").read_text())
    assert (url, said["body"], said["title"]) == (f"chat://{PASSWORD}", a_message("zh").body, a_message("zh").subject)
    assert PASSWORD not in "".join(capfd.readouterr())
    assert PASSWORD not in (tmp_path / "command").read_text(), "everybody can read a command line"
    assert "apprise" not in sys.modules, "it stays outside"


@pytest.mark.parametrize(("answer", "url", "why"), [
    ("False", "chat://x", "the service did not take the message"),
    ("True", "nonsense://x", "apprise knows no service with such an address"),
    ("1 / 0", "chat://x", "apprise ends with status 1"),
    ("len(bytes(2**30)) > 0", "chat://x", "apprise ends with status 1"),  # an answer that unpacks to so much
    ("__import__('time').sleep(60)", "chat://x", "no answer in time"),
])  # fmt: skip
def test_what_goes_wrong_in_apprise_is_told_in_words(tmp_path, monkeypatch, answer, url, why):
    a_fake_apprise(tmp_path, monkeypatch, answer)
    target = Apprise(a_secret(tmp_path, url), timeout=0.5 if "sleep" in answer else 10.0)

    assert attempt(target, a_message()) == (False, why)


def test_without_apprise_one_is_told_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    target = Apprise(a_secret(tmp_path, "chat://x"))

    assert attempt(target, a_message()) == (False, "apprise is missing: pip install 'gpuguard[notify]'")
    assert list(problems({"team": target})) == ["team: apprise is missing: pip install 'gpuguard[notify]'"]


@pytest.mark.parametrize(
    ("euid", "user", "problem"),
    [
        (0, "nobody", None),
        (0, "nobody-of-that-name", "there is no user"),
        (1000, "nobody", None),
        (1000, "daemon", "only root can run a program as 'daemon'"),
    ],
)
def test_a_hook_whose_user_cannot_be_had_is_said_before_it_is_needed(monkeypatch, euid, user, problem):
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    found = list(problems({"x": Hook(("/bin/true",), user=user)}))

    assert [problem in each for each in found] == ([True] if problem else [])
