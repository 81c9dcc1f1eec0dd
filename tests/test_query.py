"""`gpuguard query` answers as nvidia-smi does: names, units and forms, and reads no more than it is asked for."""

import csv
import json
import re
import subprocess

import pytest
from builders import GIB, MIB, a_device, a_mig_instance, a_process, a_snapshot
from fake_nvml import NOT_SUPPORTED, FakeNvml
from nodes import Gpuguard

from gpuguard import model
from gpuguard.errors import InvalidRequest
from gpuguard.views.query import (
    APP_ALIASES,
    APP_FIELDS,
    GPU_ALIASES,
    GPU_FIELDS,
    csv_lines,
    help_lines,
    query_of,
    to_json,
)

DEVICE = a_device(
    3, memory_used=32362 * MIB, memory_free=110796 * MIB, memory_total=143771 * MIB, memory_reserved=614 * MIB,
    utilization=99.6, memory_utilization=7.0, temperature=52.0, power_draw=627.4, power_limit=700.0, pstate=0,
    pci_bus_id="00000000:83:00.0", persistence_mode=True, display_active=False, fan_speed=38.0, clock_sm=1980,
    ecc_mode=True, ecc_corrected_volatile=0, throttle_reasons=("sw_power_cap",), pcie_generation=5, pcie_width=16,
    mig_mode=False,
)  # fmt: skip
# As nvidia-smi writes them: (field, header, value, value without its unit).
SPELLINGS = [
    ("memory.used", "memory.used [MiB]", "32362 MiB", "32362"),
    ("memory.total", "memory.total [MiB]", "143771 MiB", "143771"),
    ("utilization.gpu", "utilization.gpu [%]", "100 %", "100"),
    ("utilization.memory", "utilization.memory [%]", "7 %", "7"),
    ("fan.speed", "fan.speed [%]", "38 %", "38"),
    ("temperature.gpu", "temperature.gpu", "52", "52"),
    ("power.draw", "power.draw [W]", "627.40 W", "627.40"),
    ("enforced.power.limit", "enforced.power.limit [W]", "700.00 W", "700.00"),
    ("pstate", "pstate", "P0", "P0"),
    ("index", "index", "3", "3"),
    ("name", "name", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
    ("gpu_name", "name", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
    ("pci.bus_id", "pci.bus_id", "00000000:83:00.0", "00000000:83:00.0"),
    ("pci.domain", "pci.domain", "0x0000", "0x0000"),
    ("pci.bus", "pci.bus", "0x83", "0x83"),
    ("pci.device", "pci.device", "0x00", "0x00"),
    ("clocks.sm", "clocks.current.sm [MHz]", "1980 MHz", "1980"),
    ("clocks.max.memory", "clocks.max.memory [MHz]", "[N/A]", "[N/A]"),
    ("clocks_event_reasons.sw_power_cap", "clocks_event_reasons.sw_power_cap", "Active", "Active"),
    ("clocks_throttle_reasons.hw_slowdown", "clocks_event_reasons.hw_slowdown", "Not Active", "Not Active"),
    ("persistence_mode", "persistence_mode", "Enabled", "Enabled"),
    ("display_active", "display_active", "Disabled", "Disabled"),
    ("compute_mode", "compute_mode", "Default", "Default"),
    ("ecc.mode.current", "ecc.mode.current", "Enabled", "Enabled"),
    ("ecc.errors.corrected.volatile.total", "ecc.errors.corrected.volatile.total", "0", "0"),
    ("ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.volatile.total", "[N/A]", "[N/A]"),
    ("mig.mode.current", "mig.mode.current", "Disabled", "Disabled"),
    ("pcie.link.gen.current", "pcie.link.gen.current", "5", "5"),
    ("count", "count", "1", "1"),
    ("driver_version", "driver_version", "550.54.15", "550.54.15"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "header", "value", "bare"), SPELLINGS, ids=[row[0] for row in SPELLINGS])
def test_a_field_is_written_as_nvidia_smi_writes_it(field, header, value, bare):
    snapshot, query = a_snapshot(DEVICE), query_of(field, apps=False)

    assert list(csv_lines(snapshot, query)) == [header, value]
    assert list(csv_lines(snapshot, query, header=False, units=False)) == [bare]


def test_the_time_is_written_as_nvidia_smi_writes_it():
    (line,) = csv_lines(a_snapshot(taken_at=1_700_000_000.25), query_of("timestamp", apps=False), header=False)

    assert re.fullmatch(r"2023/11/1\d \d\d:\d\d:20\.250", line)


@pytest.mark.parametrize("name", sorted(GPU_FIELDS))
def test_what_is_not_known_is_not_zero(name):
    bare = model.Device(0, "GPU-0", asleep=None, integrated=None, memory_shared_with_host=None)
    (row,) = to_json(a_snapshot(bare, driver_version=None), query_of(name, apps=False))["rows"]
    (line,) = csv_lines(a_snapshot(bare, driver_version=None), query_of(name, apps=False), header=False)

    if name not in ("index", "uuid", "count", "timestamp", "hostname"):
        assert (*row.values(), line) == (None, "[N/A]")


def test_processes_are_the_computing_ones_of_a_device_and_of_its_instances():
    parent = a_device(1, mig_mode=True)
    snapshot = a_snapshot(
        a_device(processes=(a_process(1, memory_used=5 * MIB), a_process(2, kind="graphics"),
                            a_process(3, kind="compute+graphics", memory_used=None))),
        parent,
        a_mig_instance(parent, processes=(a_process(4, memory_used=GIB, command=("a\x1b[2Jb", "c")),)),
    )  # fmt: skip
    query = query_of("gpu_uuid,pid,name,used_memory", apps=True)

    assert list(csv_lines(snapshot, query)) == [
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]",
        f"{snapshot.devices[0].uuid}, 1, python, 5 MiB",
        f"{snapshot.devices[0].uuid}, 3, python, [N/A]",
        f"{parent.uuid}, 4, a\\x1b[2Jb, 1024 MiB",
    ]


def test_divided_devices_are_listed_once():
    parent = a_device(0, mig_mode=True)

    assert list(csv_lines(a_snapshot(parent, a_mig_instance(parent)), query_of("index", apps=False))) == ["index", "0"]


def test_json_has_numbers_with_their_unit_in_the_name():
    answer = to_json(a_snapshot(DEVICE), query_of("memory.used,power.draw,clocks.max.sm", apps=False))

    assert answer == {
        "schema": 1,
        "rows": [{"memory.used [MiB]": 32362, "power.draw [W]": 627.4, "clocks.max.sm [MHz]": None}],
    }


@pytest.mark.parametrize(
    ("names", "groups"),
    [("index,uuid", set()), ("memory.used,memory.free", {model.MEMORY}), ("temperature.gpu", {model.THERMAL}),
     ("name,power.draw", {model.MODEL, model.POWER}), ("pid,used_memory", {model.PROCESSES, model.HEALTH}),
     ("pid,process_name", {model.PROCESSES, model.HEALTH, model.PROCESS_DETAILS})],
)  # fmt: skip
def test_only_what_is_asked_for_is_read(names, groups):
    assert query_of(names, apps="pid" in names).groups == groups


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("memory.usd", "memory.used"), ("Memory.Used", "memory.used"), ("temperature", "temperature.gpu"),
     ("power_draw", "power.draw"), ("clocks.smm", "clocks.sm")],
)  # fmt: skip
def test_a_field_that_does_not_exist_is_told_with_what_may_be_meant(wrong, meant):
    with pytest.raises(InvalidRequest, match=re.escape(meant)):
        query_of(f"index,{wrong}", apps=False)


def test_a_board_without_mig_has_no_mig_mode_and_is_whole(tmp_path):
    with FakeNvml(tmp_path, devices=2) as fake:
        fake.fail("nvmlDeviceGetMigMode", NOT_SUPPORTED, device=1)
        gpuguard = Gpuguard(tmp_path, fake)
        modes = gpuguard("query", "--query-gpu=mig.mode.current", "--format=csv,noheader").stdout.splitlines()
        chosen = gpuguard("select", "-n", "2").stdout

        assert modes == ["Disabled", "[N/A]"] and chosen == "0,1\n"
        assert "mig_mode" not in gpuguard("who").stdout


def test_help_lists_every_field_and_spelling():
    shown = "\n".join(help_lines())

    assert [name for name in (*GPU_FIELDS, *APP_FIELDS, *GPU_ALIASES, *APP_ALIASES) if name not in shown] == []
    assert max(map(len, shown.splitlines())) <= 120


@pytest.fixture
def gpuguard(tmp_path):
    command = Gpuguard(tmp_path, None)
    command("sim", "start", "3xH100-80GB")
    return command


def test_a_line_of_a_script_moves_over_as_it_is(gpuguard):
    done = gpuguard(
        "query", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader,nounits", "-i", "2,0"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(", ")[0] for line in done.stdout.splitlines()] == ["0", "2"]
    assert all(re.fullmatch(r"\d, \d+, \d+", line) for line in done.stdout.splitlines())


def test_processes_and_json_and_help(gpuguard):
    apps = gpuguard("query", "--query-compute-apps=pid,used_memory", "--format=csv")
    assert apps.stdout == "pid, used_gpu_memory [MiB]\n"
    answer = json.loads(gpuguard("query", "--fields", "index,name", "--format", "json").stdout)
    assert [row["index"] for row in answer["rows"]] == [0, 1, 2]
    assert "memory.used" in gpuguard("query", "--help-query").stdout


@pytest.mark.parametrize(
    "words",
    [(), ("--fields", ","), ("--fields", "flux"), ("--fields", "index", "--format", "xml"),
     ("--fields", "index", "--format", "json,csv"), ("--fields", "index", "-i", "7"),
     ("--fields", "index", "-l", "never"), ("--fields", "index", "-l", "0"), ("--fields", "index", "--apps", "pid"),
     ("--fields", "index", "--format", "noheader")],
)  # fmt: skip
def test_a_fault_is_status_two_and_a_sentence(gpuguard, words):
    done = gpuguard("query", *words)

    assert done.returncode == 2 and done.stderr.startswith("gpuguard: ") and not done.stdout


@pytest.mark.parametrize("loop", [("-lms", "50"), ("-l", "50ms"), ("--loop-ms", "50"), ("-lms=50",)])
def test_it_answers_again_and_again_with_one_header(gpuguard, loop):
    words = gpuguard.words("query", "--fields", "timestamp,index", *loop)
    with subprocess.Popen(words, env=gpuguard.environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        lines = [child.stdout.readline() for _ in range(10)]
        child.terminate()

    assert [line.startswith("timestamp") for line in lines] == [True] + [False] * 9
    assert [line[-2] for line in lines[1:]] == list("012012012")


def test_no_spreadsheet_runs_the_name_of_a_program():
    names = ("=HYPERLINK(1)", "a, =cmd|' /C calc'!A0", "@SUM(1)", "python")
    device = a_device(processes=[a_process(pid, command=(name,)) for pid, name in enumerate(names, 1)])

    cells = list(csv_lines(a_snapshot(device), query_of("process_name", apps=True), header=False))
    assert cells == ["'=HYPERLINK(1)", "\"a, '=cmd|' /C calc'!A0\"", "'@SUM(1)", "python"]


def test_no_name_of_a_program_forges_a_column():
    names = ("x, 99999 MiB", "a;=1+1", 'the "best", "of" all', "python train.py")
    device = a_device(processes=[a_process(pid, command=(name,)) for pid, name in enumerate(names, 1)])
    lines = list(csv_lines(a_snapshot(device), query_of("pid,process_name,used_memory", apps=True)))

    assert [[cell.strip() for cell in row] for row in csv.reader(lines)] == [
        ["pid", "process_name", "used_gpu_memory [MiB]"],
        *([str(pid), name.replace(";=", ";'="), "10240 MiB"] for pid, name in enumerate(names, 1)),
    ]
    assert [len(row) for row in csv.reader(lines[2:3], delimiter=";")] == [2]
    assert not any(cell.startswith("=") for row in csv.reader(lines, delimiter=";") for cell in row)
