"""What is asked of the winners alone never changes who wins."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace

from builders import GIB, MIB, a_device, a_process, a_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine

from gpuguard.claims.lockfiles import lock_directory
from gpuguard.errors import NotEnoughGpus
from gpuguard.lock import acquire, look
from gpuguard.model import HEALTH, IDLE_PROCESSES, PROCESSES, Device, Gap, Snapshot
from gpuguard.request import Request
from gpuguard.select import choose

LISTS = (
    (),
    (a_process(memory_used=200 * MIB),),
    (a_process(memory_used=25 * MIB, kind="graphics"),),
    (a_process(memory_used=25 * MIB, kind="compute+graphics"),),
    (a_process(memory_used=None),),
    None,
)
devices = st.builds(
    lambda used, processes, problems, temperature, node, plausible: {
        "memory_used": used,
        "memory_free": None if used is None else 80 * GIB - used,
        "processes": processes,
        "processes_plausible": plausible,
        "problems": problems,
        "temperature": temperature,
        "numa_node": node,
    },
    st.sampled_from([4 * MIB, 300 * MIB, 700 * MIB, 3 * GIB, 40 * GIB, None]),
    st.sampled_from(LISTS),
    st.sampled_from([(), (), (), ("row remap pending",)]),
    st.sampled_from([None, 35.0, 70.0]),
    st.sampled_from([0, 1, None]),
    st.sampled_from([True, True, False]),
)
requests = st.builds(
    Request,
    num_gpus=st.integers(1, 3),
    strategy=st.sampled_from(["spread", "first", "pack"]),
    prefer=st.sampled_from([(), ("1", "0")]),
    tolerance=st.sampled_from([512 * MIB, MIB, 4 * GIB]),
    max_processes=st.sampled_from([None, None, 1]),
)


class Reticent(Machine):
    """A machine that tells what it is asked for and no more, as drivers do."""

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        full = super().sample(fields, devices)
        told = [self._told(device, fields) for device in full.devices]
        silent = [each.uuid for each in full.devices if each.processes is None and PROCESSES in fields]
        return replace(full, devices=tuple(told), gaps=tuple(Gap(uuid, "processes", "not told") for uuid in silent))

    def _told(self, device: Device, fields: Collection[str]) -> Device:
        if PROCESSES not in fields and IDLE_PROCESSES not in fields:
            device = replace(device, processes=None, processes_plausible=True)
        return device if HEALTH in fields else replace(device, problems=None)


@settings(max_examples=100, deadline=None)
@given(st.lists(devices, min_size=1, max_size=6), requests)
def test_the_winners_are_those_of_who_has_read_everything(facts: list[dict[str, object]], request: Request) -> None:
    everything = [a_device(index, **each) for index, each in enumerate(facts)]
    request = replace(request, prefer=request.prefer if len(everything) > 1 else ())
    gaps = [Gap(device.uuid, "processes", "not told") for device in everything if device.processes is None]
    full = replace(a_snapshot(*everything), gaps=tuple(gaps))
    expected = [device.index for device in choose(full, request, {}).devices]

    with tempfile.TemporaryDirectory() as place:
        directory = lock_directory(place)
        _, choice = look(Reticent(*everything), request, directory)
        assert [device.index for device in choice.devices] == expected
        try:
            with acquire(Reticent(*everything), request, directory) as claim:
                assert [device.index for device in claim] == expected
        except NotEnoughGpus:
            assert expected == []
