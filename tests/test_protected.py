"""Whom the policy file protects: no policy touches him, whatever it says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driven import driven
from fake_nvml import GIB, FakeNvml
from guarded import SOMEBODY, Scene, a_child, a_scene, somebody

from gpuguard.enforcement import identity
from gpuguard.enforcement.identity import Protected
from gpuguard.policies.files.decoder import Accounts
from gpuguard.policies.files.loader import parse

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
            assert child.wait(20) == -15, daemon.said()


def test_members_are_protected_and_so_is_whoever_may_be_one() -> None:
    protected = Protected(uids=frozenset({1001}), groups=frozenset({"lab", "staff"}))
    groups = {1002: frozenset({"lab"}), 1003: frozenset({"students"})}

    assert protected.uids_of({1002, 1003, 1004}, groups) == {1001, 1002, 1004}
    assert Protected(uids=frozenset({1001})).uids_of({1004}, {}) == {1001}


@pytest.mark.parametrize(
    ("facts", "spared"),
    [
        ({"executable": SLEEP, "executable_owner": 0}, True),
        ({"executable": f"{SLEEP} (deleted)", "executable_owner": 0}, True),
        ({"executable": "/no/such/sleep", "executable_owner": 0}, True),
        ({"executable": "/no/such/sleep", "executable_owner": SOMEBODY}, False),  # a path in a place of his own
        ({"executable": SLEEP, "executable_owner": SOMEBODY}, False),  # a file of his own, mounted there for him alone
        ({"executable": "/usr/bin/env", "executable_owner": 0}, False),
    ],
)
def test_a_program_is_known_by_its_path_and_its_owner(facts: dict[str, Any], spared: bool) -> None:
    seen = identity.facts_of(os.getpid())
    assert seen is not None

    assert identity.runs_one_of(replace(seen, **facts), (SLEEP, "/no/such/*")) is spared


def test_a_program_of_somebody_who_put_it_there_himself_is_known_too(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.touch()
    os.chown(program, somebody() or os.getuid(), -1)
    seen = identity.facts_of(os.getpid())
    assert seen is not None

    facts = replace(seen, executable=str(program), executable_owner=somebody() or os.getuid())
    assert identity.runs_one_of(facts, (str(program),))


def protected_user(scene: Scene) -> None:
    assert scene.process.uid is not None
    scene.context(protected=frozenset({scene.process.uid}))


def protected_program(scene: Scene) -> None:
    scene.context(protected_executables=("/*",))


@pytest.mark.parametrize("protect", [protected_user, protected_program])
@pytest.mark.parametrize("action", ["checkpoint", "terminate", "kill", "pause", "resume", "renice"])
def test_no_action_reaches_whoever_is_protected(action: str, protect: Any) -> None:
    with a_scene() as scene:
        protect(scene)
        said = scene.act(action)

        assert said.word == "refused"
        assert "protected" in {each.text.rpartition(" ")[2] for each in said.against}


def test_names_are_resolved_when_the_file_is_read() -> None:
    accounts = Accounts({"alice": 1001}.__getitem__, {"lab": 30001}.__getitem__)
    text = "version: 1\nprotect: {users: [alice, 1002], groups: [lab], executables: [/opt/*]}\n"
    file = parse(text + "policies: [{name: a, when: {unclaimed: {}}, steps: [log]}]", accounts=accounts)

    assert file.faults == ()
    assert file.protected == Protected(frozenset({1001, 1002}), frozenset({"lab"}), ("/opt/*",))


@pytest.mark.parametrize(
    ("protect", "fault"),
    [
        ("{users: [alise]}", "there is no user 'alise'"),
        ("{groups: [lad]}", "there is no group 'lad'"),
        ("{executables: [python3]}", "write it in full"),
        ("{}", "nobody is named"),
        ("{paths: [/opt]}", "paths"),
    ],
)
def test_a_protection_that_protects_nobody_is_a_fault(protect: str, fault: str) -> None:
    accounts = Accounts({"alice": 1001}.__getitem__, {"lab": 30001}.__getitem__)
    text = f"version: 1\nprotect: {protect}\npolicies: [{{name: a, when: {{unclaimed: {{}}}}, steps: [log]}}]"
    file = parse(text, accounts=accounts)

    assert [each.text for each in file.faults if fault in each.text], file.faults
    assert file.policies == ()
