"""What a claim has to do with the line and with reservations: it asks where there are some, and says it was served."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import a_device
from machines import Machine

from gpuguard import lock
from gpuguard.claims.lockfiles import LockDirectory, lock_directory
from gpuguard.line import served, turn
from gpuguard.lock import acquire, look
from gpuguard.request import Request


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return lock_directory(str(tmp_path))


def test_whoever_gets_what_he_waited_for_has_been_served(directory):
    machine = Machine(a_device(0))
    holder = acquire(machine, Request(), directory, environ={})
    assert served.last(directory, os.geteuid()) is None

    acquire(machine, Request(), directory, wait=60, on_wait=lambda error: holder.release(), environ={}).release()

    assert served.last(directory, os.geteuid()) is not None


def test_whoever_did_not_have_to_wait_takes_nobodys_turn(directory):
    acquire(Machine(), Request(), directory, environ={}).release()

    assert served.last(directory, os.geteuid()) is None


def test_what_the_line_keeps_for_others_is_left_alone(directory):
    machine = Machine(a_device(0), a_device(1))
    kept = {machine.devices[1].uuid: "kept for alice's reservation"}
    mine = SimpleNamespace(kept=kept, ways=[Request()], place=None)
    line = SimpleNamespace(turn=lambda snapshot, ways: mine, served=lambda claim: None)

    claim, _ = lock._attempt(machine, machine.sample(()), [Request()], directory, None, line, (None, (), None))

    assert claim and [device.index for device in claim] == [0]
    claim.release()


@pytest.fixture
def asked(directory, monkeypatch) -> list[str]:
    """The devices that each question for reservations was about; the first one is reserved."""
    asked: list[str] = []

    def reserved_from(backend, place, snapshot, request):
        asked.append(" ".join(str(device.index) for device in snapshot.devices))
        return {snapshot.devices[0].uuid: "kept for alice's reservation"}

    monkeypatch.setattr(turn, "reserved_from", reserved_from)
    return asked


def test_a_look_leaves_out_what_is_reserved_for_others(directory, asked):
    (Path(directory.records) / f"{directory.prefix}reserve.20001.x.json").touch()

    _, choice = look(Machine(a_device(0), a_device(1)), Request(num_gpus=1), directory, environ={})

    assert ([device.index for device in choice.devices], asked) == ([1], ["0 1"])
    assert [reason.text for reason in choice.refused[0].reasons] == ["kept for alice's reservation"]


def test_without_reservations_and_inside_a_claim_nobody_asks_for_them(directory, asked):
    machine = Machine(a_device(0), a_device(1))
    look(machine, Request(), directory, environ={})
    with acquire(machine, Request(num_gpus=2), directory, environ={}) as outer:
        (Path(directory.records) / f"{directory.prefix}reserve.20001.x.json").touch()
        _, choice = look(machine, Request(num_gpus=2), directory, environ={"GPUGUARD_CLAIM": outer.id})

    assert (len(choice.devices), asked) == (2, [])
