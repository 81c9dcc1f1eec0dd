"""Denied users and quarantined devices: for everybody, from files that root alone can write, without a daemon."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
from builders import Machine as Devices
from builders import a_device
from claiming import acquire, preview
from daemons import a_daemon, somebodys
from guarded import SOMEBODY, a_scene
from nodes import GIB, Gpuguard, eventually, start
from users import ALICE, BOB

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import DENIED, QUARANTINED, Restriction, change, read_restrictions
from gpuguard.enforcement import actions, identity
from gpuguard.enforcement.preflight import ActionContext
from gpuguard.errors import LockDirectoryError, NotEnoughGpus
from gpuguard.model import Event, Finding, Subject, Verdict
from gpuguard.request import Request

root = pytest.mark.root


def restrict(directory: LockDirectory, kind: str, name: str, **fields: object) -> None:
    facts = {"since": time.time(), "reason": "a good reason", **fields}
    change(directory, kind, lambda found: found.update({name: Restriction(name, **facts)}))  # type: ignore[arg-type]


def test_a_quarantined_device_is_never_claimed_and_refused_with_its_reason(directory):
    devices = Devices(a_device(0), a_device(1))
    restrict(directory, QUARANTINED, devices.devices[1].uuid)

    _, choice = preview(devices, Request(num_gpus=1), directory)

    assert [device.index for device in choice.devices] == [0]
    assert [reason.text for reason in choice.refused[0].reasons] == ["quarantined by the administrator: a good reason"]
    with acquire(devices, Request(num_gpus=1), directory, environ={}) as claim:
        assert [device.index for device in claim] == [0]
    with pytest.raises(NotEnoughGpus, match=r"device 1: quarantined by the administrator: a good reason"):
        acquire(devices, Request(num_gpus=2), directory, environ={})


def test_a_quarantined_gpu_takes_its_instances_along(directory):
    parent = a_device(0, mig_mode=True)
    child = a_device(0, uuid="MIG-1", parent_uuid=parent.uuid, gpu_instance_id=1)
    restrict(directory, QUARANTINED, parent.uuid)

    _, choice = preview(Devices(parent, child), Request(num_gpus=1), directory)

    assert choice.devices == ()


def test_a_denied_user_gets_no_new_claim_and_is_told_until_when(directory):
    restrict(directory, DENIED, str(os.geteuid()), user="carol", until=time.time() + 3600)

    with pytest.raises(NotEnoughGpus, match=r"new claims of carol are denied by the administrator until .*: a good"):
        acquire(Devices(a_device(0)), Request(), directory, environ={})


def test_a_denied_user_may_divide_the_claim_that_they_have(directory):
    with acquire(Devices(a_device(0)), Request(), directory, environ={}) as claim:
        restrict(directory, DENIED, str(os.geteuid()))

        acquire(Devices(a_device(0)), Request(), directory, environ={"GPUGUARD_CLAIM": claim.id}).release()


def test_a_waiting_user_gets_the_device_when_the_denial_is_over(directory):
    restrict(directory, DENIED, str(os.geteuid()), until=time.time() + 1.0)

    begun = time.monotonic()
    acquire(Devices(a_device(0)), Request(), directory, wait=20.0, environ={}).release()

    assert time.monotonic() - begun > 0.5


def a_verdict(action: str, subject: Subject, enforce: bool = True, **options: float) -> Verdict:
    finding = Finding("quota", subject, "has 6 devices, 4 are allowed", ())
    return Verdict("greedy", finding, action, 0, 0.0, enforce=enforce, options=tuple(options.items()))


class Acting:
    """A guard with a directory."""

    def __init__(self, directory: LockDirectory, devices: int = 4, writes: bool = True) -> None:
        self.machine, self.events = Devices(*map(a_device, range(devices))), []
        self.directory, self.writes = directory, writes
        self.context = ActionContext(
            self.machine, self.write, lambda verdict, snapshot: True, enforce=True, directory=directory
        )

    def write(self, event: Event) -> bool:
        self.events.append((event.outcome, self.marks()))
        return self.writes

    def marks(self) -> list[str]:
        return sorted(
            name for kind in (DENIED, QUARANTINED) for name in read_restrictions(self.directory, kind, time.time())
        )

    def act(self, verdict: Verdict) -> str:
        [outcome] = actions.act(verdict, self.machine.sample((), None), self.context)
        return outcome.word


BOBS = Subject("user", None, uid=SOMEBODY, user="bob")


@pytest.mark.parametrize("action", ["deny", "quarantine"])
@pytest.mark.parametrize(
    ("enforce", "writes", "word"), [(False, True, "dry run"), (True, False, "not recorded"), (True, True, "done")]
)
def test_only_what_is_enforced_and_was_written_down_before_is_done(directory, action, enforce, writes, word):
    guard = Acting(directory, writes=writes)
    subject = replace(BOBS, device=guard.machine.devices[0].uuid)

    assert guard.act(a_verdict(action, subject, enforce, **{"for": 60.0})) == word

    found = read_restrictions(directory, DENIED if action == "deny" else QUARANTINED, time.time()).values()
    about = (str(SOMEBODY), "bob") if action == "deny" else (subject.device, None)
    facts = [(one.name, one.user, one.by, (one.until or 0.0) - one.since) for one in found]
    assert facts == [(*about, "the policy greedy", 60.0)] * (word == "done")
    assert guard.events == [("dry run" if word == "dry run" else "about to", [])]


@pytest.mark.parametrize(
    ("action", "subject", "protected"),
    [
        *(("deny", Subject("device", "GPU-1", uid=uid), ()) for uid in (0, 1, 65534, None)),
        ("deny", BOBS, (SOMEBODY,)),
        ("quarantine", BOBS, ()),
    ],
)
def test_people_of_the_system_protected_users_and_no_device_are_never_restricted(directory, action, subject, protected):
    guard = Acting(directory)
    guard.context = replace(guard.context, protected=frozenset(protected))

    assert guard.act(a_verdict(action, subject)) == "refused"
    assert guard.marks() == []


def test_the_first_user_who_is_no_account_of_the_system_can_be_denied(directory, monkeypatch):
    monkeypatch.setattr(identity, "uid_min", lambda: SOMEBODY)

    assert Acting(directory).act(a_verdict("deny", BOBS)) == "done"


@pytest.mark.parametrize(("devices", "most"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_a_policy_takes_at_most_half_of_the_devices_out_of_service_or_the_only_one(directory, devices, most):
    guard = Acting(directory, devices=devices)
    words = [guard.act(a_verdict("quarantine", Subject("device", one.uuid))) for one in guard.machine.devices]

    assert words == ["done"] * most + ["refused"] * (devices - most)


def test_an_action_that_cannot_be_done_says_so(directory, monkeypatch):
    def fail(*of):
        raise LockDirectoryError("the disk is full")

    monkeypatch.setattr("gpuguard.claims.restrictions.change", fail)
    with a_scene() as scene:
        assert scene.act("deny").word == "failed"
        scene.context(directory=directory)
        assert (scene.act("deny").word, scene.events[-1].outcome) == ("failed", "failed")
        assert "the disk is full" in str(scene.events[-1].message)


POLICY = """
version: 1
mode: enforce
policies:
  - name: hogs
    when: {memory: {above: 20GiB}}
    for: 300ms
    steps: [deny, {do: quarantine, for: 2h}]
"""


@root
@pytest.mark.parametrize(("options", "done"), [(["--enforce"], True), ([], False)])
def test_a_daemon_denies_and_quarantines_by_policy(tmp_path, options, done):
    with a_daemon(tmp_path, POLICY, *options, named=True) as daemon, somebodys(daemon.node, "0", 40 * GIB) as offender:
        [event] = daemon.until("quarantine")
        if done:  # what it is about to do is in the log before it is done
            assert eventually(lambda: json.loads(daemon.gpuguard("quarantine", "--json").stdout)["quarantined"])
        outcomes = {each["outcome"] for each in (event, *daemon.events("deny"))}
        explained = daemon.gpuguard("explain", "--gpus", "0", "--mine-as-free").stdout
        denied = json.loads(daemon.gpuguard("deny", "--json").stdout)["denied"]

        assert offender.poll() is None
    assert outcomes == ({"about to"} if done else {"dry run"})
    assert ("quarantined by the policy hogs until " in explained) == done
    assert [(each["name"], each["by"]) for each in denied] == [(str(SOMEBODY), "the policy hogs")] * done


def test_a_device_is_quarantined_and_put_back_by_command(tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    start(str(tmp_path / "node"))

    done = gpuguard("quarantine", "1", "--reason", "XID 79")
    [found] = json.loads(gpuguard("quarantine", "--json").stdout)["quarantined"]
    chosen = gpuguard("select", "--gpus", "1")
    seen = json.loads(gpuguard("who", "--json").stdout)["devices"]
    ended = [gpuguard("quarantine", found["name"][:12], "--end").returncode for _ in "12"]

    assert (done.returncode, found["reason"]) == (0, "XID 79")
    assert (chosen.returncode, chosen.stdout) == (1, "") and "quarantined" in chosen.stderr
    assert [device["state"] for device in seen[:2]] == ["free", "unhealthy"]
    who = "the administrator" if os.geteuid() == 0 else "the owner of the directory"
    assert seen[1]["reason"] == f"quarantined by {who}: XID 79"
    assert ended == [0, 1]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["outcome"] for event in events if event["kind"] == "quarantine"] == ["quarantined", "ended"]


def test_a_whole_uuid_is_quarantined_without_asking_the_driver(tmp_path):
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_BACKEND="nvml", LD_LIBRARY_PATH="/nonexistent")

    assert gpuguard("quarantine", uuid).returncode == 0
    assert gpuguard("quarantine", uuid, "--end").returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("deny", "bin"),
        ("deny", "bin", "--for", "0s"),
        ("deny", "bin", "--for", "2h", "--end"),
        ("deny", "root", "--for", "2h"),
        ("deny", "nobody-has-this-name", "--for", "2h"),
        ("deny", "--for", "2h"),
        ("deny", "bin", "--for", "2h", "--reason", "x" * 201),
        ("quarantine", "--end"),
        ("quarantine", "1", "--end", "--for", "2h"),
        ("quarantine", "99"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, words):
    gpuguard = Gpuguard(tmp_path, None)
    start(str(tmp_path / "node"))

    assert gpuguard(*words).returncode == 2


@root
def test_root_denies_one_user_and_not_the_other(machine):
    denied = machine(None, "deny", BOB.pw_name, "--for", "2h", "--reason", "ask me first")
    if machine.kind == "sticky":
        assert denied.returncode == 1 and "sudo gpuguard setup" in denied.stderr
        return
    refused = machine(BOB, "run", "--no-wait", "--", "true")
    allowed = machine(ALICE, "run", "--no-wait", "--", "true")
    ended = machine(None, "deny", BOB.pw_name, "--end")
    again = machine(BOB, "run", "--no-wait", "--", "true")

    assert (denied.returncode, refused.returncode, allowed.returncode) == (0, 75, 0), denied.stderr
    assert "ask me first" in refused.stderr and " until " in refused.stderr
    assert (ended.returncode, again.returncode) == (0, 0)


@root
def test_a_quarantine_holds_for_everybody_and_only_root_can_make_or_end_it(machine):
    quarantined = machine(None, "quarantine", "3", "--reason", "XID 79")
    if machine.kind == "sticky":
        assert quarantined.returncode == 1 and "sudo gpuguard setup" in quarantined.stderr
        return
    assert quarantined.returncode == 0, quarantined.stderr
    theirs = [machine(BOB, "quarantine", *words) for words in (["3", "--end"], ["2"])]
    refused = [machine(user, "run", "--no-wait", "--gpus", "3", "--", "true") for user in (ALICE, BOB, None)]

    assert [done.returncode for done in theirs] == [1, 1] and "sudo" in theirs[0].stderr
    assert [done.returncode for done in refused] == [75, 75, 75]
    assert all("quarantined by the administrator: XID 79" in done.stderr for done in refused)
