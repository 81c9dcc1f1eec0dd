"""`gpuguard policy show`: the policies in force here, for everybody; and those that can reach the one who asks."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from daemons import a_daemon
from nodes import eventually
from policies import document

from gpuguard.claims.daemon_client import ExemptionReply
from gpuguard.cli import keep, policy
from gpuguard.errors import GpuguardError
from gpuguard.policy_files import last_good
from gpuguard.policy_files.loader import parse
from gpuguard.views.policy import reaching

SECRET = "s3cr3t-token"
TEXT = f"""\
version: 1
mode: enforce
limits: {{per_hour: 20}}
policies:
  - {{name: hogs, when: {{memory: {{above: 20GiB}}}}, for: 1h, steps: [warn, {{after: 1h, do: terminate}}]}}
  - {{name: for-one, when: {{idle: {{below: 5%}}}}, for: 2h, only: {{users: [4242]}}, steps: [{{do: notify, to: ops}}]}}
  - name: night
    when: {{expression: {{expr: "memory_used > 1GiB and user != 'x'"}}}}
    hours: 22:00-06:00
    message: "Nights are \\"quiet\\" here: 夜间。"
    steps: [warn]
notify:
  ops: {{webhook: {{url: https://example.org/{SECRET}}}}}
messages: {{en: {{subject: "{SECRET}"}}}}
"""


def test_everybody_reads_what_is_in_force_and_no_address(tmp_path):
    with a_daemon(tmp_path, TEXT, "--enforce") as daemon:
        daemon.until("policy")
        said = daemon.gpuguard("policy", "show")
        known = json.loads(daemon.gpuguard("policy", "show", "--json").stdout)
        published = next((tmp_path / "claims").rglob("*policies.json"))

        assert said.returncode == 0, said.stderr
        assert all(word in said.stdout for word in ("hogs", "for-one", "night", "Enforced.", "after 1h", "夜间"))
        assert "if the daemon is started with --enforce" not in said.stdout
        assert known["policies"] == ["hogs", "for-one", "night"] and known["enforcing"] and known["only_warn"] == []
        assert SECRET not in said.stdout + published.read_text() and os.stat(published).st_mode & 0o777 == 0o644


def test_the_reader_sees_what_can_reach_them_and_what_there_is_against_them(tmp_path):
    with a_daemon(tmp_path, TEXT) as daemon:
        daemon.until("policy")
        said = daemon.gpuguard("policy", "show", "--me").stdout
        known = json.loads(daemon.gpuguard("policy", "show", "--me", "--json").stdout)

        assert known["policies"] == ["hogs", "night"] and known["standing"] == []
        assert "for-one" not in said and "no policy has anything against you now." in said
        assert "Dry run: the daemon does not enforce" in said


def test_while_the_file_has_faults_it_says_which_only_warn(tmp_path):
    with a_daemon(tmp_path, TEXT, "--enforce") as daemon:
        daemon.until("policy")
        daemon.policy.write_text(TEXT.replace("for: 1h", "for: 1"))

        def shown() -> str:
            return daemon.gpuguard("policy", "show").stdout

        assert eventually(lambda: "until they are mended these only warn: hogs." in shown()), shown()
        assert json.loads(daemon.gpuguard("policy", "show", "--json").stdout)["only_warn"] == ["hogs"]


def test_without_a_daemon_and_without_a_file_it_says_so(tmp_path):
    with a_daemon(tmp_path) as daemon:
        assert eventually(lambda: bool(daemon.events("daemon")))
        without = daemon.gpuguard("policy", "show")
        daemon.end()
        gone = daemon.gpuguard("policy", "show")

    assert without.returncode != 0 and "no policies in force" in without.stderr
    assert gone.returncode != 0 and "daemon" in gone.stderr


def test_a_daemon_without_a_file_does_not_show_that_of_the_daemon_before(tmp_path):
    with a_daemon(tmp_path, TEXT) as daemon:
        daemon.until("policy")
        daemon.end()
        daemon.policy.unlink()
        daemon.start()
        assert eventually(lambda: daemon.events("daemon")[-1]["outcome"] == "started")

        assert eventually(lambda: "no policies in force" in daemon.gpuguard("policy", "show").stderr)


SCOPES = [
    ("", True),
    ("only: {users: [1]}", False),
    ("only: {users: [4711]}", True),
    ("only: {groups: [daemon]}", True),
    ("only: {groups: [root]}", False),
    ("only: {kinds: [batch]}", True),
    ("except: {users: [4711]}", False),
    ("except: {groups: [daemon]}", False),
    ("except: {users: [4711], kinds: [batch]}", True),
    ("except: {users: [4711], until: 2096-12-24}", True),
    ("except: {kinds: [interactive]}", True),
]


@pytest.mark.parametrize(("scope", "reached"), SCOPES)
def test_who_can_be_reached(scope, reached):
    file = parse(document(more=scope))

    assert not file.faults
    assert reaching(file, 4711, {"daemon"}) == ["p"] * reached


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"file": 3}', b"\xff"])
def test_what_is_of_another_version_is_refused(tmp_path, content):
    path = tmp_path / "policies.json"
    path.write_bytes(content)

    with pytest.raises(ValueError):
        last_good.in_force(str(path), (os.geteuid(),))


def test_what_is_published_reads_as_what_was_written():
    file = parse(TEXT)
    again = json.loads(last_good.public(file, file, enforcing=True))

    assert parse(json.dumps(again["file"], ensure_ascii=False)).policies == file.policies


PROTECTING = """
version: 1
policies:
  - {name: idle, when: {idle: {below: 5%}}, for: 2h, steps: [warn]}
  - {name: trespass, when: {trespass: {}}, for: 1m, steps: [warn]}
  - {name: mercy, when: {trespass: {}}, keep: true, for: 1m, steps: [warn]}
  - {name: for-others, when: {trespass: {}}, only: {users: [4242]}, for: 1m, steps: [warn]}
"""


@pytest.mark.parametrize(
    ("uid", "text", "said"),
    [
        (1001, PROTECTING, ["Not by policies that protect others: trespass."]),
        (1001, TEXT, []),
        (1001, None, []),
        (0, PROTECTING, []),
    ],
)
def test_who_asks_to_be_left_alone_reads_which_policies_go_on(monkeypatch, command, uid, text, said):
    """It said "what you have is left alone for 1h", and a minute later a policy that protects others ended it."""

    def in_force(_: object) -> last_good.PoliciesInForce:
        if text is None:
            raise GpuguardError("of another version")
        return last_good.PoliciesInForce(parse(text), True, frozenset())

    monkeypatch.setattr(keep, "query_daemon", lambda *_: ExemptionReply(time.time() + 3600, "al", None))
    monkeypatch.setattr(keep, "directory_of", lambda _: SimpleNamespace(owner=0))
    monkeypatch.setattr(policy, "policies_in_force", in_force)
    monkeypatch.setattr(policy.os, "geteuid", lambda: uid)

    status, output, _ = command("keep", "--for", "1h")
    assert (status, output.splitlines()[1:]) == (0, said)
