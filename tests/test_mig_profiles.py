"""MIG instances by profile, and how instances and their whole GPU exclude each other, at one moment too."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, Machine, a_device, a_mig_instance
from chances import often
from nodes import Gpuguard, start, until
from own_claims import acquire
from sharing import winners

from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.errors import InvalidRequest, NotEnoughGpus
from gpuguard.request import Request

Fresh = Callable[..., Any]  # the fixture


def divided() -> Machine:
    """A whole GPU, and one with a small and two big instances."""
    parent = a_device(1, mig_mode=True)
    return Machine(
        a_device(0),
        parent,
        a_mig_instance(parent, 0, mig_profile="1g.10gb", memory_total=10 * GIB),
        a_mig_instance(parent, 1),
        a_mig_instance(parent, 2),
    )


def test_what_can_never_be_met_is_refused_at_once_although_others_wait_in_line(tmp_path: Path) -> None:
    gpuguard = Gpuguard(tmp_path, None)
    start(str(tmp_path / "node"), "1xH100-80GB")
    holder = gpuguard.start("run", "--", "sh", "-c", "echo; exec sleep 100")
    assert holder.stdout and holder.stdout.readline()
    waiter = gpuguard.start("run", "--", "true")
    try:
        until(lambda: list((tmp_path / "claims").rglob("*ticket.*")), "somebody in line")
        refused = gpuguard("run", "--mig", "3g.40gb", "--", "true")
    finally:
        for each in (waiter, holder):
            each.terminate()
            each.communicate()

    assert refused.returncode == 125
    assert "no GPU here is divided into instances" in refused.stderr


@pytest.mark.parametrize("text", ["3g", "40gb", "3g.40", "3g.40gb\n", "", "../3g.40gb"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"write it like 3g\.40gb"):
        Request(mig=text)


@pytest.mark.parametrize("text", ["3g.40gb", "1g.10gb+me", "1c.3g.40gb", "1g.5gb+me.all"])
def test_the_profiles_of_the_driver_are_understood(text: str) -> None:
    assert Request(mig=text).mig == text


def test_an_instance_can_be_shared_by_its_profile(directory: LockDirectory) -> None:
    machine = divided()
    request = Request(mig="1g.10gb", share=True, memory=4 * GIB, max_util=100.0)
    with acquire(machine, request, directory) as one, acquire(machine, request, directory) as other:
        assert one[0].uuid == other[0].uuid
        with pytest.raises(NotEnoughGpus, match="left beside"):
            acquire(machine, request, directory)


def test_the_command_line_chooses_by_profile_and_says_which_exist(tmp_path: Path) -> None:
    gpuguard = Gpuguard(tmp_path, None)
    start(str(tmp_path / "node"), "1xH100-80GB:mig=3g.40gb,3g.40gb")
    shown = gpuguard("run", "--no-wait", "--mig", "3g.40gb", "--", "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')
    selected = gpuguard("select", "--mig", "3g.40gb", "-n", "2")
    noted = [gpuguard("run", *words, "--", "true").stderr for words in (("-n", "2", "--mig", "3g.40gb"), ())]
    explained = gpuguard("explain", "-n", "2", "--mig", "3g.40gb").stdout
    refused = gpuguard("run", "--mig", "1g.10gb", "--", "true")

    assert (shown.returncode, shown.stdout[:4]) == (0, "MIG-")
    assert selected.stdout.count("MIG-") == 2
    assert refused.returncode == 125
    assert "the profiles here: 3g.40gb (2)" in refused.stderr
    assert "these are 2 MIG instances, of which one process can use only one" in noted[0]
    assert "MIG instances" not in noted[1]
    assert "Note: these are 2 MIG instances" in explained


@pytest.mark.parametrize(("command", "code"), [("run", 125), ("select", 1), ("explain", 1), ("wait", 1)])
def test_a_command_for_two_gpus_refuses_instances_and_says_what_to_do(tmp_path: Path, command: str, code: int) -> None:
    gpuguard = Gpuguard(tmp_path, None)
    start(str(tmp_path / "node"), "1xH100-80GB:mig=3g.40gb,3g.40gb")
    words = ("--", "true") if command == "run" else ()
    refused = gpuguard(command, "-n", "2", *words)
    taken = gpuguard(command, "-n", "2", "--allow-mig-set", *words)

    assert refused.returncode == code
    assert "wanted 2 GPUs, but one process can use only 1 here." in refused.stdout + refused.stderr
    assert "Ask for 1, or add --allow-mig-set if a launcher starts" in refused.stdout + refused.stderr
    assert taken.returncode == 0
    assert "one process can use only one" not in taken.stdout + taken.stderr  # the user has said so


def test_a_gpu_that_is_divided_behind_the_first_look_is_not_shared_as_a_whole(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))

    def divide() -> None:
        if machine.asked[1:]:
            machine.change(0, mig_mode=True)

    machine.before_sample = divide
    with pytest.raises(NotEnoughGpus, match="MIG mode is on"):
        acquire(machine, Request(share=True, memory=GIB), directory)


@pytest.mark.parametrize("gate", [True, False], ids=["with the gate", "without the gate"])
@pytest.mark.parametrize("shared", [False, True], ids=["instances alone", "instances shared"])
def test_of_starters_at_one_moment_either_the_whole_gpu_or_instances_are_claimed(fresh, tmp_path, shared, gate):
    part = Request(share=True, memory=GIB, max_util=100.0) if shared else Request()
    won = list(rounds(fresh, tmp_path, part, gate=gate))

    assert not any(whole and parts for whole, parts in won)
    assert all(whole + bool(parts) == 1 for whole, parts in won) or not gate
    assert any(whole or parts for whole, parts in won)


def test_the_race_shows_locks_that_exclude_nobody(fresh: Fresh, tmp_path: Path) -> None:
    won = rounds(fresh, tmp_path, Request(), gate=False, variant="no-exclusion")

    assert any(whole and parts for whole, parts in won)


def rounds(fresh: Fresh, place: Path, part: Request, *, gate: bool, variant: str = "none") -> Iterator[tuple[int, int]]:
    """Races for one GPU: how many got it whole, and how many an instance."""
    parent, directory = a_device(0, mig_mode=True), lock_directory(str(place))
    whole, parts = Machine(a_device(0)), Machine(parent, a_mig_instance(parent, 0), a_mig_instance(parent, 1))
    contenders = [(whole, Request()), (parts, part)] * 4
    for _ in range(often(24)):
        won = fresh(winners, directory, contenders, gate=gate, variant=variant)
        yield sum(won[::2]), sum(won[1::2])
