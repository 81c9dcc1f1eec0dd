"""How many driver calls a start, `who` and a look of the guard make, and that what is left out changes no answer."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GIB, MIB, Reticent, a_device, a_process, a_snapshot
from fake_nvml import FakeNvml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nodes import Gpuguard
from nvml_child import answer_of
from own_claims import acquire, preview

from gpuguard.backends.nvml_fields import MPS_SERVER
from gpuguard.claims.directory import lock_directory
from gpuguard.errors import NotEnoughGpus
from gpuguard.model import Gap
from gpuguard.request import Request
from gpuguard.select import choose

DEVICES = 8
IDLE = ["GetMemoryInfo_v2"] * DEVICES  # the first look
ONCE = ["InitWithFlags", "GetCount_v2"] + ["GetHandleByIndex_v2", "GetUUID"] * DEVICES
WINNER = [  # the second look, behind the lock
    "GetMemoryInfo_v2", "GetComputeRunningProcesses_v3", "GetComputeMode", "GetMigMode", "GetRemappedRows",
    "GetGpuFabricInfoV",
]  # fmt: skip
AFTERWARDS = ["GetMemoryInfo_v2"]  # whether it is free again


@pytest.fixture
def half_busy(fake: FakeNvml) -> Iterator[FakeNvml]:
    """Eight devices, four of them in use by five processes each."""
    for index in range(DEVICES // 2):
        for _ in range(5):
            fake.add_process(index, os.getpid(), GIB, stays=1)
    fake.reset_calls()
    yield fake


def asked(fake: FakeNvml) -> list[str]:
    """The calls by their names, without nvml and Device."""
    names = {name: name.removeprefix("nvml").removeprefix("Device") for name in fake.calls()}
    return sorted(names[name] for name, count in fake.calls().items() for _ in range(count))


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        (["-m", "gpuguard", "select"], ONCE + IDLE + WINNER),
        (["-c", "import gpuguard; gpuguard.select_devices(1)"], ONCE + IDLE + WINNER),
        (["-m", "gpuguard", "run", "--exec", "--", "true"], ONCE + IDLE + WINNER),
        (["-m", "gpuguard", "run", "--", "true"], ONCE + IDLE + WINNER + AFTERWARDS),
    ],
)
def test_a_start_asks_the_driver_no_more_than_this(half_busy, tmp_path, words, calls):
    environment = Gpuguard(tmp_path, half_busy).environment
    subprocess.run([sys.executable, *words], env=environment, check=True, timeout=60)

    assert asked(half_busy) == sorted(calls)


OF_A_MOMENT_AGO = ("Temperature", "PowerUsage")
BOTH = """
from dataclasses import replace
from gpuguard.device_state import uses
from gpuguard.views.who import to_text
backend = nvml.open()
looks = [backend.sample(fields) for fields in (TEXT_FIELDS, WHO_FIELDS)]
answer = [to_text(replace(look, taken_at=0.0, clock=10**6), uses(look)) for look in looks]
"""


@pytest.fixture
def started() -> Iterator[Callable[..., int]]:
    """Starts a program that does nothing; returns its pid."""
    with ExitStack() as stack:

        def start(program: str = "sleep") -> int:
            job = stack.enter_context(subprocess.Popen([program, "600"]))
            stack.callback(job.kill)
            return job.pid

        yield start


@pytest.fixture
def busy(fake: FakeNvml, started: Callable[..., int]) -> FakeNvml:
    """8 devices with 5 processes each."""
    for number in range(40):
        fake.add_process(number // 5, started(), GIB, stays=1)
    return fake


def test_the_text_costs_at_most_120_driver_calls_on_eight_busy_devices(busy: FakeNvml, tmp_path: Path) -> None:
    busy.reset_calls()
    words = [sys.executable, "-m", "gpuguard", "who", "--dir", str(tmp_path)]
    subprocess.run(words, env=busy.environment(), stdout=subprocess.DEVNULL, timeout=120, check=True)
    calls = busy.calls()

    assert sum(calls.values()) <= 120, calls


@pytest.mark.parametrize(
    "seconds, fields, devices, asked",
    [
        (1.0, "TEXT_FIELDS", "None", 0),
        (2.0, "TEXT_FIELDS", "None", 8),  # as often as `who --watch` looks unless told otherwise
        (1.0, "WHO_FIELDS", "None", 8),  # as a guard that judges by them, and programs
        (1.0, "TEXT_FIELDS", "[fake.devices[3].uuid]", 1),
    ],
)
def test_who_looks_often_sees_a_temperature_and_a_power_draw_of_a_moment_ago(fake, seconds, fields, devices, asked):
    script = f"""
import time
held = nvml.open()
held.sample(TEXT_FIELDS)
real = time.clock_gettime
time.clock_gettime = lambda clock: real(clock) + {seconds}
for device in fake.devices:
    device.temperature, device.power_mw = 77, 377_000
fake.reset_calls()
look = held.sample({fields}, {devices})
answer = fake.calls(), {{(one.temperature, one.power_draw) for one in look.devices}}
"""
    before = (fake.devices[0].temperature, fake.devices[0].power_mw / 1000)
    calls, told = answer_of(fake, script)

    assert {calls.get(f"nvmlDeviceGet{name}", 0) for name in OF_A_MOMENT_AGO} == {asked}
    assert told == {(77.0, 377.0) if asked else before}


@pytest.mark.parametrize("kind", ["compute", "graphics", "compute+graphics", "mps"])
def test_the_text_is_the_same_as_if_everything_had_been_asked_for(busy, started, kind, tmp_path):
    busy.add_process(3, started(), GIB, "compute+mps" if kind == "mps" else kind)
    busy.add_process(3, started(shutil.copy(shutil.which("sleep") or "", tmp_path / MPS_SERVER.decode())), 30 * MIB)
    busy.devices[5].samples[0], busy.devices[5].sample_count = 255, 1  # none that can be: the rates tell
    text, everything = answer_of(busy, BOTH)

    assert text == everything
    assert sum(f" {kind} " in line for line in text) == (kind != "compute")


@pytest.mark.parametrize("fault", ["lost", "no list of graphics processes", "no samples"])
def test_what_cannot_be_read_is_said_in_the_same_words(busy: FakeNvml, fault: str) -> None:
    if fault == "lost":
        busy.lose(2)
    else:
        busy.fail("nvmlDeviceGetSamples" if fault == "no samples" else "nvmlDeviceGetGraphicsRunningProcesses", 999, 2)
    text, everything = answer_of(busy, BOTH)

    assert text == everything


SETTINGS = """
FIELDS = WHO_FIELDS | {CLOCKS}
backend = nvml.open()
def asked(devices=None):
    fake.reset_calls()
    found = backend.sample(FIELDS, devices).devices[0]
    short = {name.removeprefix("nvmlDeviceGet"): count for name, count in fake.calls().items()}
    names = "ComputeMode EnforcedPowerLimit PersistenceMode RemappedRows MigMode FanSpeed".split()
    return [short.get(name, 0) for name in names], found
"""


def test_what_changes_seldom_is_not_asked_at_every_look(fake: FakeNvml) -> None:
    first, again = answer_of(fake, f"{SETTINGS}\nanswer = asked(), asked()")

    assert (first[0], again[0]) == ([8] * 6, [0] * 6)
    assert first[1] == again[1]


def test_what_is_kept_of_a_device_is_asked_anew_once_somebody_new_computes_on_it(fake: FakeNvml) -> None:
    begin = "fake.add_process(3, os.getpid(), GIB)"
    counts = answer_of(fake, f"import os\n{SETTINGS}\nasked()\n{begin}\nanswer = asked()[0], asked()[0]")

    assert counts == ([1] * 6, [0] * 6)


@pytest.mark.parametrize("look", ["[first[1].uuid]", "after ten seconds"])
def test_a_setting_is_asked_anew_by_who_names_a_device_and_after_a_while(fake: FakeNvml, look: str) -> None:
    change = "row = fake.devices[0]; row.compute_mode, row.power_limit_mw, row.remap_pending = 2, 300_000, 1"
    if look == "after ten seconds":
        look, change = "", f"{change}; nvml.SETTINGS_SECONDS = -1.0"
    then, now, later = answer_of(
        fake, f"{SETTINGS}\nfirst = asked()\n{change}\nanswer = first[1], asked({look})[1], asked()[1]"
    )

    assert (then.compute_mode, then.power_limit, then.problems) == ("default", 700, ())
    assert (now.compute_mode, now.power_limit, now.problems) == ("prohibited", 300, ("row remap pending",))
    assert later == now


def test_a_setting_that_could_not_be_read_is_asked_at_the_next_look(fake: FakeNvml) -> None:
    fault = "fake.fail('nvmlDeviceGetComputeMode', UNKNOWN, device=0)"
    before, after = answer_of(fake, f"{SETTINGS}\n{fault}\nanswer = asked()[1], [fake.heal(), asked()[1]][1]")

    assert before.compute_mode is None and before.problems
    assert (after.compute_mode, after.problems) == ("default", ())


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


AN_IDLE_ONE: dict[str, object] = {
    "memory_used": 4 * MIB, "memory_free": 80 * GIB - 4 * MIB, "processes": (), "processes_plausible": True,
    "problems": (), "temperature": None, "numa_node": 0,
}  # fmt: skip
UNHEALTHY_NEIGHBOUR = AN_IDLE_ONE | {"problems": ("row remap pending",)}


@settings(max_examples=100)
@given(st.lists(devices, min_size=1, max_size=6), requests)
@example([UNHEALTHY_NEIGHBOUR, AN_IDLE_ONE | {"numa_node": 1}, AN_IDLE_ONE], Request(strategy="pack"))
def test_the_winners_are_those_of_who_has_read_everything(facts: list[dict[str, object]], request: Request) -> None:
    everything = [a_device(index, **each) for index, each in enumerate(facts)]
    request = replace(request, prefer=request.prefer if len(everything) > 1 else ())
    gaps = [Gap(device.uuid, "processes", "not told") for device in everything if device.processes is None]
    full = replace(a_snapshot(*everything), gaps=tuple(gaps))
    expected = [device.index for device in choose(full, request, {}).devices]

    with tempfile.TemporaryDirectory() as place:
        directory = lock_directory(place)
        _, choice = preview(Reticent(*everything), request, directory)
        assert [device.index for device in choice.devices] == expected
        try:
            with acquire(Reticent(*everything), request, directory) as claim:
                assert [device.index for device in claim] == expected
        except NotEnoughGpus:
            assert expected == []
