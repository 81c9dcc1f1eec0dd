"""Where the daemon gives the locks it can take them back, whatever their owner does with his descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from brokered import Brokered, a_machine
from builders import a_device
from guarded import Listing
from nodes import eventually
from test_broker_hostile import UNREAD
from users import ALICE, BOB

from gpuguard.claims.records import probe
from gpuguard.enforcement import actions, identity
from gpuguard.enforcement.target import Context
from gpuguard.model import Finding, Subject, Verdict

pytestmark = pytest.mark.root

# Locks again whatever is unlocked, and has no record.
HOARD = """
import fcntl
answer, descriptors = call(directory, {"do": "claim", "devices": sys.argv[1:], "conditions": {}})
print("asked", flush=True)
while True:
    fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
# And with a record that lends nothing.
RECORDED = HOARD.replace(
    "while True",
    """
from gpuguard.claims.records import write_record
record = write_record(directory, {"id": answer["claim"], "devices": sys.argv[1:], "descriptors": [7]})
while True""",
)


@pytest.fixture(params=["broker", "keeper"])
def broker(request: pytest.FixtureRequest, site: Path) -> Iterator[Brokered]:
    with a_machine(site, request.param) as machine:
        yield machine


@pytest.mark.parametrize("code", [HOARD, RECORDED, UNREAD], ids=["locks again", "with a record", "unread"])
def test_a_claim_that_is_released_by_a_policy_is_over_whatever_its_owner_does(broker, monkeypatch, code):
    monkeypatch.setattr(identity, "uid_min", lambda: 1)  # the users of these tests are the system's
    machine = Listing(a_device(0, uuid=broker.uuids[0]))
    with broker.program(BOB, code, broker.uuids[0]) as hostile, broker.job(ALICE, "--gpus", "1"):
        assert hostile.stdout and hostile.stdout.readline()
        assert eventually(lambda: broker.locked() == [0, 1])
        [claim] = probe(broker.directory, broker.uuids[:1])
        context = Context(
            machine, lambda event: True, lambda verdict, now: True, enforce=True, directory=broker.directory
        )
        finding = Finding("age", Subject("claim", uid=claim.uid, claim=claim.id), "held for 3h without a process", ())
        snapshot = machine.sample((), None)
        [outcome] = actions.act(
            Verdict("idle-claims", finding, "release", 0, 0.0, enforce=True),
            snapshot.__class__(**{**vars(snapshot), "claims": (claim,)}),
            context,
        )

        assert (claim.uid, outcome.word, outcome.why) == (BOB.pw_uid, actions.DONE, "")
        assert broker.locked() == [1] and hostile.poll() is None
        assert broker(ALICE, "run", "--no-wait", "--gpus", "0", "true").returncode == 0
