"""Two vendors on one machine: the devices of several backends in one snapshot, for every command."""

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from nodes import Gpuguard, a_user, change, start

from gpuguard.backends import open_backend, parts_of, simulated_node
from gpuguard.backends.client import open_worker
from gpuguard.backends.merged import MergedBackend
from gpuguard.device_state import uses
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.model import ALL_FIELDS, HEALTH, SELECT_FIELDS, WHO_FIELDS, Snapshot
from gpuguard.request import Request
from gpuguard.select import choose, not_enough
from gpuguard.top.details import details
from gpuguard.top.page import page
from gpuguard.top.scene import History, Scene, ScreenView
from gpuguard.vendors import AMD, INTEL, NVIDIA, VENDORS
from gpuguard.views import explain, who

GIB = 2**30


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Two nodes: AMD's, and NVIDIA's."""
    amd, nvidia = str(tmp_path / "amd"), str(tmp_path / "nvidia")
    start(amd, "2xMI300X")
    start(nvidia, "2xH100-80GB")
    return amd, nvidia


@pytest.fixture
def name(places: tuple[str, str]) -> str:
    return ",".join(f"simulated:{place}" for place in places)


@pytest.fixture
def backend(name: str) -> Iterator[MergedBackend]:
    with open_worker(name) as opened:
        assert isinstance(opened, MergedBackend)
        yield opened


def shown(snapshot: Snapshot) -> list[tuple[int, str, int]]:
    return [(device.index, device.vendor, device.number) for device in snapshot.devices]


BOTH = [(0, "nvidia", 0), (1, "nvidia", 1), (2, "amd", 0), (3, "amd", 1)]


def test_the_devices_of_nvidia_keep_their_indices_and_the_others_follow(backend):
    assert shown(backend.sample(WHO_FIELDS)) == BOTH


def test_some_devices_have_the_indices_that_they_have_among_all(backend, name):
    uuids = [device.uuid for device in backend.sample(()).devices]
    with open_worker(name) as fresh:
        assert shown(fresh.sample(SELECT_FIELDS, [uuids[3], uuids[1]])) == [BOTH[1], BOTH[3]]
        assert shown(fresh.sample(SELECT_FIELDS, [uuids[2]])) == [BOTH[2]]
        assert shown(fresh.sample(SELECT_FIELDS, [])) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_backend_that_fails_costs_its_own_devices_alone(backend, places, failing):
    whole = backend.sample(WHO_FIELDS)
    (Path(places[failing]) / "node.json").write_text("damaged")
    snapshot = backend.sample(WHO_FIELDS)
    vendor = ("amd", "nvidia")[failing]
    lost = [device for device in snapshot.devices if device.vendor == vendor]

    assert [device.uuid for device in snapshot.devices] == [device.uuid for device in whole.devices]
    assert shown(snapshot) == BOTH
    assert [device.problems for device in lost] == [("unresponsive",)] * 2
    assert {gap.device for gap in snapshot.gaps if gap.field == "device"} == {device.uuid for device in lost}
    assert all("damaged" in gap.reason or "node.json" in gap.reason for gap in snapshot.gaps if gap.field == "device")
    assert all(device.memory_total for device in snapshot.devices if device.vendor != vendor)


def test_a_backend_that_never_answered_leaves_a_gap_and_no_backend_is_an_error(name, places):
    (Path(places[0]) / "node.json").write_text("damaged")
    with open_worker(name) as backend:
        snapshot = backend.sample(WHO_FIELDS)
        assert shown(snapshot) == BOTH[:2]
        assert [gap.field for gap in snapshot.gaps if gap.device is None] == ["simulated devices"]

        (Path(places[1]) / "node.json").write_text("damaged")
        with pytest.raises(BackendError):
            backend.sample(WHO_FIELDS)


def test_a_device_that_hangs_keeps_its_vendor_and_costs_no_other(backend, places):
    change(places[0], 1, faults=("hang",))
    snapshot = backend.sample(WHO_FIELDS)

    assert shown(snapshot) == BOTH
    assert [device.problems for device in snapshot.devices] == [(), (), (), ("unresponsive",)]


def test_a_device_that_two_backends_show_is_one(places):
    with open_worker(f"simulated:{places[1]},simulated:{places[1]}") as backend:
        snapshot = backend.sample({HEALTH})

    assert shown(snapshot) == BOTH[:2]
    shown_twice = [gap.reason for gap in snapshot.gaps if gap.field == "device"]
    assert shown_twice == ["two backends show it: name one of them"] * 2


@pytest.mark.parametrize("mixed", ["nvml,simulated", "simulated:a,replay:b", "smi:a.xml,nvml"])
def test_what_is_not_one_machine_at_one_time_is_refused(mixed):
    with pytest.raises(InvalidRequest, match="cannot be read together"):
        open_worker(mixed)


def test_several_backends_are_no_backend_of_this_process_and_a_comma_may_be_part_of_a_path():
    with pytest.raises(InvalidRequest, match="several backends"):
        open_backend("nvml,smi")
    assert parts_of("simulated:/a,b,nvml") == ["simulated:/a,b", "nvml"]
    assert parts_of("smi:x,nvml.xml") == ["smi:x,nvml.xml"]


def variables_in(text: str) -> dict[str, str]:
    known = {name for vendor in VENDORS.values() for name in (vendor.visible, *vendor.numbering, *vendor.filters)}
    seen = dict(line.partition("=")[::2] for line in text.splitlines())
    return {key: value for key, value in seen.items() if key in known}


def of_amd(*uuids: str) -> dict[str, str]:
    again = ",".join(map(str, range(len(uuids))))
    return {AMD.visible: ",".join(uuids), **dict.fromkeys(AMD.filters, again)}


@pytest.mark.parametrize(
    ("words", "amd", "nvidia"),
    [
        (["-n", "2", "--model", "AMD*"], [0, 1], None),
        (["-n", "1", "--vendor", "amd", "--exclude", "3"], [0], None),
        (["--devices", "3"], [1], None),
        (["-n", "2", "--vendor", "nvidia"], [], "0,1"),
    ],
)
def test_a_job_gets_the_variables_of_its_vendor_with_the_names_of_that_vendor(
    gpuguard, name, places, words, amd, nvidia
):
    done = gpuguard("run", "--backend", name, *words, "--", "env")
    uuids = [device.uuid for device in simulated_node.load(places[0]).devices]

    assert done.returncode == 0, done.stderr
    assert "(AMD)" in done.stderr if amd else "(NVIDIA)" in done.stderr
    assert variables_in(done.stdout) == (
        of_amd(*(uuids[number] for number in amd)) if amd else {NVIDIA.visible: nvidia, **NVIDIA.numbering}
    )


MIXED = "1xH100-80GB+2xMI300X+2xMax1550+1xArc-B580"
OUTER = dict.fromkeys(("GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES"), "1,0")


@pytest.mark.parametrize(
    ("vendor", "count", "indices", "variables"),
    [
        ("amd", 2, [1, 2], dict.fromkeys(AMD.filters, "0,1")),
        ("intel", 2, [3, 4], {INTEL.visible: "0,1", **INTEL.numbering}),
    ],
)
def test_gpuguard_inside_a_job_stays_inside_it_for_other_vendors_too(tmp_path, vendor, count, indices, variables):
    start(str(tmp_path / "node"), MIXED)
    gpuguard = Gpuguard(tmp_path, None, **OUTER)
    inner = f"env; {sys.executable} -m gpuguard explain -n {count} --json"
    outer = gpuguard(
        "run",
        "--backend",
        f"simulated:{tmp_path / 'node'}",
        "-n",
        str(count),
        "--vendor",
        vendor,
        "--",
        "sh",
        "-c",
        inner,
    )
    env, _, explained = outer.stdout.partition("{")

    assert outer.returncode == 0, outer.stderr
    assert variables.items() <= variables_in(env).items()
    eligible = [device["index"] for device in json.loads("{" + explained)["devices"] if device["eligible"]]
    assert eligible == indices


def test_a_request_for_a_vendor_says_what_the_others_are_and_select_prints_indices(gpuguard, name):
    never = gpuguard("run", "--backend", name, "--vendor", "intel", "--", "true")
    wrong = gpuguard("run", "--backend", name, "--vendor", "ati", "--", "true")

    assert never.returncode == 125 and "its vendor is NVIDIA (2 GPUs)" in never.stderr
    assert wrong.returncode == 125 and "ati" in wrong.stderr
    assert gpuguard("select", "--backend", name, "--vendor", "amd", "-n", "2").stdout == "0,1\n"


def test_a_vendor_that_cannot_be_read_is_an_error_for_what_could_take_its_devices_and_a_line_for_people(
    gpuguard, name, places
):
    (Path(places[1]) / "node.json").write_text("damaged")
    refused = gpuguard("select", "--backend", name)

    assert refused.returncode == 4 and "simulated devices cannot be read" in refused.stderr
    assert gpuguard("select", "--backend", name, "--model", "MI300X").returncode == 0
    assert "simulated devices: " in gpuguard("who", "--backend", name).stdout


def test_a_request_takes_the_devices_of_one_vendor(gpuguard, name, places):
    with a_user(places[1], "0", GIB * 10, 50.0):
        found = gpuguard("select", "--backend", name, "-n", "2", "--json")
        assert [device["index"] for device in json.loads(found.stdout)["devices"]] == [2, 3]

    refused = gpuguard("run", "--backend", name, "-n", "3", "--", "true")
    assert refused.returncode == 125
    assert "2 GPUs (NVIDIA), 2 GPUs (AMD): one job cannot use GPUs of several vendors" in refused.stderr


def test_a_list_of_one_vendor_leaves_the_others(tmp_path, name):
    limited = Gpuguard(tmp_path, None, CUDA_VISIBLE_DEVICES="1")
    none = Gpuguard(tmp_path, None, CUDA_VISIBLE_DEVICES="", ROCR_VISIBLE_DEVICES="1")
    eligible = json.loads(none("explain", "--backend", name, "--json").stdout)["devices"]

    assert limited("select", "--backend", name, "-n", "2").stdout.strip() == "0,1"
    assert [device["index"] for device in eligible if device["eligible"]] == [3]


def test_who_explain_and_metrics_show_both(gpuguard, name):
    who = json.loads(gpuguard("who", "--backend", name, "--json").stdout)
    metrics = gpuguard("metrics", "--backend", name).stdout

    assert [(device["index"], device["vendor"]) for device in who["devices"]] == [row[:2] for row in BOTH]
    assert [f'index="{index}"' in metrics for index in range(4)] == [True] * 4
    assert "GPU 2  ELIGIBLE  choice 2, 192.0GiB free" in gpuguard("explain", "--backend", name).stdout


ALL_KINDS = "1xRTX4090+1xMI300X:partition=dpx+1xArc-B60+1xStrixHalo"


def screens(place: str, spec: str, groups: Collection[str] = ALL_FIELDS) -> dict[str, str]:
    """What people see of a simulated node: the screen of each command in which a row is a device."""
    snapshot = start(place, spec).sample(groups)
    found, request = uses(snapshot), Request(2)
    scene, history = Scene(snapshot, found), History()
    history.add(scene)
    pages = [
        page(scene, history, ScreenView(mode=mode), width, 90) for mode in ("full", "compact") for width in (80, 200)
    ]
    choice = choose(snapshot, request, {})
    return {
        "who": "\n".join(who.to_text(snapshot, found)),
        "explain": "\n".join(explain.to_text(snapshot, request, choice)),
        "refused": str(not_enough(snapshot, Request(99), choose(snapshot, Request(99), {}))),
        "top": "\n".join([line.text for lines in pages for line in lines] + [details(scene, found, None)]),
        "notebook": snapshot._repr_html_(),
    }


def test_no_screen_of_a_node_with_gpus_of_amd_has_the_words_of_another_vendor(tmp_path):
    shown = screens(str(tmp_path / "amd"), "2xMI300X:partition=cpx+2xMI210")

    assert [
        (name, word) for name, text in shown.items() for word in ("MIG", "CUDA", "NVIDIA", "Intel") if word in text
    ] == []
    assert [name for name, text in shown.items() if "0.7" not in text and name != "refused"] == []
    assert "partition 0.7 (cpx)  ELIGIBLE" in shown["explain"]
    assert "MIG" in screens(str(tmp_path / "nvidia"), "1xH100-80GB:mig=3g.40gb")["top"]
    assert "2 whole GPUs and 16 partitions: one job cannot use both kinds" in shown["refused"]


def test_every_screen_shows_the_devices_of_each_vendor_with_their_marks(tmp_path):
    shown = screens(str(tmp_path / "mixed"), ALL_KINDS)

    assert "64.0GiB (host)" in shown["notebook"]
    for name in ("who", "top"):
        for model in ("GeForce RTX 4090", "Instinct MI300X dpx", "Arc Pro B60", "Radeon 8060S"):
            assert model in shown[name], (name, model)
    assert "64.0GiB (host)" in shown["who"]
    assert "memory shared with the host" in shown["top"] and "memory shared with the host" in shown["explain"]


def test_a_gpu_that_sleeps_is_free_on_every_screen_and_for_a_job(tmp_path, gpuguard):
    place = str(tmp_path / "node")
    start(place, "1xMI210+1xArc-B60")
    gpuguard("sim", "set", "--device", "all", "--asleep")
    ran = gpuguard("run", "-n", "1", "--min-free", "20GiB", "--", "true")

    assert ran.returncode == 0, ran.stderr
    assert gpuguard("who").stdout.count("free, asleep") == 2
    assert gpuguard("explain").stdout.count("asleep: it wakes when a job uses it") == 2
    assert gpuguard("top", "--once").stdout.count("free, asleep") == 2


def test_a_policy_judges_the_devices_of_both(gpuguard, name, places, tmp_path):
    (tmp_path / "policy.yaml").write_text(
        "version: 1\npolicies:\n  - {name: hot, when: {temperature: {above: 60C}}, for: 10s, steps: [warn]}\n"
    )
    for place in places:
        change(place, 1, temperature=simulated_node.WorkPattern(80, 80, 0.0, 0.0))
    done = gpuguard("daemon", "--once", "--policy", str(tmp_path / "policy.yaml"), "--backend", name)

    found = [line.partition(" has ")[0][-5:] for line in done.stderr.splitlines() if " has 80C" in line]

    assert set(found) == {"GPU 1", "GPU 3"}, done.stderr
