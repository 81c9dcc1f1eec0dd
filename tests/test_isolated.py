"""The process border: a driver that hangs or crashes costs one device, never the reader."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import eventually

from gpuguard.backends import isolated, sampler
from gpuguard.backends.isolated import Isolated, open_isolated
from gpuguard.errors import BackendError, DriverUnresponsive, InvalidRequest
from gpuguard.model import ALL_FIELDS, MEMORY, SELECT_FIELDS, WHO_FIELDS

SIM = [sys.executable, "-m", "gpuguard", "sim"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A simulated node of 4 devices; its backend's name."""
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    sim("start", "4xH100-80GB")
    return f"simulated:{tmp_path / 'node'}"


@pytest.fixture(params=["fork", "spawn"])
def backend(node: str, request: pytest.FixtureRequest) -> Iterator[Isolated]:
    source = open_isolated(node, fork=request.param == "fork")
    yield source
    source.close()


def sim(*words: str) -> None:
    subprocess.run([*SIM, *words], check=True, capture_output=True)


def runs(pid: int) -> bool:
    """Whether it is there and more than a zombie that waits for init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def problems(source: Isolated) -> dict[int, tuple[str, ...] | None]:
    return {device.index: device.problems for device in source.sample(WHO_FIELDS).devices}


def test_a_snapshot_crosses_the_border_unchanged(backend: Isolated, node: str) -> None:
    from gpuguard.backends import open_backend

    here, there = open_backend(node).sample(ALL_FIELDS), backend.sample(ALL_FIELDS)

    assert [device.uuid for device in there.devices] == [device.uuid for device in here.devices]
    assert [vars(device).keys() for device in there.devices] == [vars(device).keys() for device in here.devices]
    assert (there.host, there.simulated, there.driver_version) == (here.host, here.simulated, here.driver_version)


def test_packing_loses_nothing(node: str) -> None:
    from gpuguard.backends import open_backend

    snapshot = open_backend(node).sample(ALL_FIELDS)

    assert sampler.unpack(sampler.pack(snapshot)) == snapshot


def test_only_what_was_asked_for_is_read(backend: Isolated) -> None:
    device = backend.sample({MEMORY}).devices[0]

    assert device.memory_total is not None
    assert (device.temperature, device.processes) == (None, None)


def test_a_hanging_call_costs_one_device_and_the_others_are_read(backend: Isolated) -> None:
    sim("fault", "--device", "2", "hang")
    begun = time.monotonic()
    snapshot = backend.sample(WHO_FIELDS)

    assert time.monotonic() - begun < 5
    assert [device.index for device in snapshot.devices if device.problems == ("unresponsive",)] == [2]
    assert [gap.reason for gap in snapshot.gaps if gap.field == "device"] == ["a driver call did not come back"]
    assert all(device.memory_used is not None for device in snapshot.devices if device.index != 2)


def test_several_hanging_devices_are_all_named(backend: Isolated) -> None:
    for index in ("0", "1", "3"):
        sim("fault", "--device", index, "hang")

    found = problems(backend)

    assert [index for index, problem in found.items() if problem] == [0, 1, 3]


def test_a_device_that_hung_before_is_not_touched_again_soon_and_keeps_its_uuid(backend: Isolated) -> None:
    uuids = [device.uuid for device in backend.sample(SELECT_FIELDS).devices]
    sim("fault", "--device", "1", "hang")
    backend.sample(SELECT_FIELDS)
    begun = time.monotonic()
    again = backend.sample(SELECT_FIELDS)

    assert time.monotonic() - begun < isolated.NEXT_DEVICE_SECONDS
    assert [device.uuid for device in again.devices] == uuids


def test_a_device_that_hangs_while_it_alone_is_asked_for_comes_back_as_unresponsive(backend: Isolated) -> None:
    uuid = backend.sample(SELECT_FIELDS).devices[1].uuid
    sim("fault", "--device", "1", "hang")

    (device,) = backend.sample(SELECT_FIELDS, [uuid]).devices

    assert (device.uuid, device.problems) == (uuid, ("unresponsive",))


def test_a_device_that_recovered_is_read_again(backend: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "RETRY_SECONDS", 0.0)
    sim("fault", "--device", "1", "hang")
    hung = problems(backend)
    sim("fault", "--device", "1", "none")

    assert (hung[1], problems(backend)[1]) == (("unresponsive",), ())


def test_a_backend_that_cannot_be_opened_says_so_at_the_first_question() -> None:
    source = open_isolated("nothing")
    with pytest.raises(InvalidRequest, match="no backend 'nothing'"):
        source.sample(SELECT_FIELDS)
    source.close()


def test_a_fault_inside_the_sampler_becomes_a_message(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpuguard.backends.simulated as simulated

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(simulated.Simulated, "sample", broken)
    source = open_isolated(node, fork=True)
    with pytest.raises(BackendError, match="planted"):
        source.sample(SELECT_FIELDS)
    source.close()


def test_a_library_that_crashes_costs_the_device_it_crashed_on(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpuguard.backends.simulated as simulated

    proper = simulated.Simulated._read

    def crash(self: simulated.Simulated, *values: object, **named: object) -> object:
        device = next(value for value in values if hasattr(value, "index"))
        if device.index == 3 and 3 not in self.skip:
            self.progress(3)
            os.abort()
        return proper(self, *values, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(simulated.Simulated, "_read", crash)
    source = open_isolated(node, fork=True)
    found = problems(source)
    source.close()

    assert [index for index, problem in found.items() if problem] == [3]


def test_a_sampler_that_never_becomes_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(isolated, "INIT_SECONDS", 0.2)
    told: list[str] = []
    reply, _hold = os.pipe()
    requests, write = os.pipe()
    source = Isolated("nvml", lambda name: (os.getppid(), write, reply), None, told.append)
    with pytest.raises(DriverUnresponsive, match="did not initialise"):
        source.sample(SELECT_FIELDS)
    os.close(requests)
    os.close(_hold)

    assert len(told) == 1


@pytest.mark.parametrize("hang", [False, True])
def test_the_sampler_ends_with_its_reader_however_that_ends_even_while_a_call_hangs(node: str, hang: bool) -> None:
    if hang:
        sim("fault", "--device", "0", "hang")
    code = (
        "import sys; from gpuguard.backends.isolated import open_isolated\n"
        "source = open_isolated(sys.argv[1], fork=True)\n"
        "print(source._channel[0], flush=True)\n"
        "from gpuguard.backends import sampler\n"
        "sampler.send(source._channel[1], (('memory',), None, ()))\n"
        "input()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, node], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout
    child = int(reader.stdout.readline())
    reader.kill()
    reader.communicate()

    assert eventually(lambda: not runs(child))


def test_the_sampler_holds_nothing_of_its_parent(node: str) -> None:
    held, other = os.pipe()
    os.set_inheritable(held, True)
    source = open_isolated(node, fork=True)
    source.sample(SELECT_FIELDS)
    assert source._channel
    pid = source._channel[0]
    targets = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    pipe = os.readlink(f"/proc/self/fd/{held}")
    group = os.getpgid(pid)
    source.close()
    os.close(held)
    os.close(other)

    assert pipe not in targets
    assert group == pid


def test_closing_twice_is_harmless(node: str) -> None:
    source = open_isolated(node)
    source.close()
    source.close()


def test_who_looks_again_and_again_leaves_no_zombies(node: str) -> None:
    samplers = []
    for _ in range(3):
        source = open_isolated(node)
        source.sample(SELECT_FIELDS)
        assert source._channel
        samplers.append(source._channel[0])
        source.close()
        # It ends as soon as it is abandoned, and is reaped by whoever is the next to be closed.
        assert eventually(lambda: not runs(samplers[-1]))

    left = [pid for pid in samplers if Path(f"/proc/{pid}").exists()]
    assert left == samplers[-1:] or left == []
