"""Policies that another process has read are those that are read here; what goes wrong there is a fault of the file."""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from policies import document
from sources import ROOT
from test_policyfile import EVERY_KEY

from gpuguard import __version__, policychild
from gpuguard.policychild import load_apart, plain, rebuilt
from gpuguard.policyfile import load_policies, parse

EXPRESSION = document(when="{expression: {expr: \"memory_used > 30GiB and user not in ('bob',)\"}}")
JOINED = document(when="{any: [{memory: {above: 1GiB}}, {expression: {expr: temperature > 80C}}]}")
TARGETS = """\
version: 1
policies: [{name: a, for: 1m, when: {memory: {above: 1GiB}}, steps: [{do: notify, to: chat}]}]
notify:
  chat: {webhook: "https://chat.example.org/hook", token: {env: TOKEN}}
messages: {zh: {subject: "$host：$policy"}}
protect: {executables: [/usr/bin/ssh*]}
"""
EXAMPLES = sorted(ROOT.glob("examples/**/*.y*ml"))


def said(value: object) -> bytes:
    """As the child says it."""
    return marshal.dumps((__version__, value))


@pytest.mark.parametrize("text", [EXPRESSION, JOINED, TARGETS, EVERY_KEY.replace("no]", "0]")], ids=range(4))
def test_what_a_file_says_comes_out_of_the_child_as_it_went_in(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    here, there = parse(text, str(path)), load_apart(str(path))

    assert there == here
    assert [type(rule) for policy in there.policies for rule in policy.rules] == [
        type(rule) for policy in here.policies for rule in policy.rules
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_the_same_in_plain_values(path: Path) -> None:
    file = load_policies(str(path), trusted_owner=False)

    assert rebuilt(marshal.loads(marshal.dumps(plain(file)))) == file


@pytest.mark.parametrize(
    "told",
    [b"Loading ...", marshal.dumps(1), said(1), said(("dict", 5)), said(("tuple", [([], 1)])),
     said(("gpuguard.nothing:X", [])), said(("gpuguard.policychild:PolicyFile", 7)),
     said(plain(parse(EXPRESSION)))[:-20], b"x" + said(plain(parse(EXPRESSION)))],
    ids=lambda told: repr(told)[:30],
)  # fmt: skip
def test_what_the_child_garbles_is_a_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bytes):
    (tmp_path / "p.yaml").write_text(EXPRESSION)
    monkeypatch.setattr(policychild, "_told", lambda content, path: told)

    file = load_apart(str(tmp_path / "p.yaml"))

    assert not file.policies and "cannot be understood" in file.faults[0].text


def test_a_condition_can_still_be_judged() -> None:
    [policy] = parse(EXPRESSION).policies
    [rule] = rebuilt(plain(policy)).rules

    assert rule.expr.of_process and callable(rule.expr.evaluate)


def test_faults_come_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(document(when="{memory: {abvoe: 1GiB}}"))
    faults = load_apart(str(path)).faults

    assert faults == load_policies(str(path), trusted_owner=False).faults
    assert all(fault.line and fault.column and fault.excerpt for fault in faults)


def test_a_file_that_is_not_there_or_not_a_file_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policychild, "_told", lambda *_: pytest.fail("a child was started"))

    for path in (tmp_path / "none", tmp_path):
        assert load_apart(str(path)).faults == load_policies(str(path)).faults != ()


@pytest.mark.parametrize(
    ("child", "said"),
    [
        ("import os; os.abort()", "ended by itself"),
        ("raise SystemExit(3)", "ended by itself"),
        ("pass", "ended by itself"),
        (None, "no process could be started that reads the file: Too many open files"),
    ],
)
def test_a_child_that_fails_is_a_fault_of_the_file(
    child: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(document())
    before, started = sorted(os.listdir("/proc/self/fd")), []
    if child is None:
        monkeypatch.setattr(os, "posix_spawn", lambda *_, **__: (_ for _ in ()).throw(OSError(24, os.strerror(24))))
    else:
        monkeypatch.setattr(policychild, "_CHILD", child)
        spawn = os.posix_spawn
        monkeypatch.setattr(os, "posix_spawn", lambda *words, **how: started.append(spawn(*words, **how)) or started[0])
    [fault] = load_apart(str(path)).faults

    assert said in fault.text
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)  # nor is it a zombie
    assert len(started) == (child is not None)


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["", "ignored"])
def sigchld(request: pytest.FixtureRequest) -> Iterator[None]:
    """As whoever starts a guard may leave it."""
    before = signal.signal(signal.SIGCHLD, request.param)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_guard_that_was_started_with_sigchld_ignored_reads_its_file_all_the_same(
    tmp_path: Path, sigchld: None
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(document())

    assert load_apart(str(path)).policies


def test_a_child_that_takes_too_long_is_killed_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sigchld: None
) -> None:
    path, pid = tmp_path / "policy.yaml", tmp_path / "pid"
    path.write_text(document())
    slow = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(policychild, "_CHILD", slow)
    monkeypatch.setattr(policychild, "READ_SECONDS", 1.0)
    before = sorted(os.listdir("/proc/self/fd"))
    with subprocess.Popen(["sleep", "60"]) as other:
        [fault] = load_apart(str(path)).faults
        spared = other.poll() is None
        other.kill()

    assert "took more than 1 s" in fault.text
    assert "gpuguard policy check" in fault.hint
    assert spared
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not os.path.exists(f"/proc/{pid.read_text()}")  # nor is it a zombie


def test_nothing_but_nouns_of_ours_is_made() -> None:
    with pytest.raises(ValueError, match="no noun of ours"):
        rebuilt(("subprocess:Popen", []))
