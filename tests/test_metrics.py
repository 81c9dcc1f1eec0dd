"""What gpuguard tells monitoring systems: right numbers, nothing for what is unknown, and no stranger's mischief."""

import math
import socket
from collections.abc import Iterable
from dataclasses import fields, replace

import pytest
from builders import GIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from gpuguard.batch.public import PublicJob
from gpuguard.device_state import uses
from gpuguard.errors import GpuguardError
from gpuguard.metrics.compat import AMD_EXPORTER, COMPAT, DCGM, amd, dcgm, nvitop
from gpuguard.metrics.exposition import (
    CONTENT_TYPE,
    OPENMETRICS,
    format_number,
    negotiated,
    prometheus_text,
    to_openmetrics,
    to_prometheus,
)
from gpuguard.metrics.facts import MetricFacts, RareFields
from gpuguard.metrics.families import (
    DEVICE_VALUES,
    MAX_JOBS,
    MAX_LABEL,
    MAX_NAMELESS,
    MAX_USERS,
    MetricFamily,
    labels,
    metric_families,
    user_labels,
)
from gpuguard.metrics.influx import InfluxClient, to_influx
from gpuguard.model import Device, Gap, Snapshot

FULL = {
    "temperature_slowdown": 90.0, "temperature_shutdown": 95.0, "fan_speed": 30.0, "total_energy": 12.5,
    "clock_sm": 1980, "clock_sm_max": 1980, "clock_memory": 2619, "clock_memory_max": 2619, "pstate": 0,
    "throttle_reasons": ("gpu_idle",), "persistence_mode": True, "ecc_corrected_volatile": 1,
    "ecc_uncorrected_volatile": 2, "ecc_corrected_aggregate": 3, "ecc_uncorrected_aggregate": 4,
    "retired_pages": 5, "remapped_rows": 6, "memory_reserved": GIB, "utilization": 50.0, "memory_utilization": 25.0,
    "remapped_rows_uncorrected": 2, "clock_graphics": 1995, "clock_video": 1545, "encoder_utilization": 3.0,
    "decoder_utilization": 4.0, "pcie_tx": 2.0**20, "pcie_rx": 2.0**21, "nvlink_tx": 6 * 2.0**20, "nvlink_rx": 2.0**23,
    "memory_shared_with_host": False, "asleep": False,
    "nvlink_flow": ((0, 2.0**21, 2.0**22), (3, 2.0**22, 2.0**22)),
}  # fmt: skip


def facts_about(snapshot: Snapshot, **more) -> MetricFacts:
    return replace(
        MetricFacts(snapshot.taken_at + 2, "1.2", snapshot, current=True, uses=uses(snapshot, {}), driver_up=True),
        **more,
    )


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """What another program's parser reads from a page, by name and labels."""
    page: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = page.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in values, f"{sample.name}{key} stands there twice"
            values[key] = sample.value
    return page


def told(found: Iterable[MetricFamily]) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return read(to_prometheus(found))


def page_about(*devices: Device, **fields) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return told(metric_families(facts_about(a_snapshot(*devices, **fields))))


def the_one(page, name, **labels_):
    return page[name][tuple(sorted(labels_.items()))]


def test_a_device_is_told_in_base_units():
    device = a_device(memory_used=10 * GIB, **FULL)
    page = page_about(device)
    one = {"uuid": device.uuid}

    assert the_one(page, "gpuguard_device_memory_used_bytes", **one) == 10 * GIB
    assert the_one(page, "gpuguard_device_utilization_ratio", **one) == 0.5
    assert the_one(page, "gpuguard_device_temperature_celsius", **one) == 35
    assert the_one(page, "gpuguard_device_power_draw_watts", **one) == 70
    assert the_one(page, "gpuguard_device_energy_joules_total", **one) == 12.5
    assert the_one(page, "gpuguard_device_clock_sm_hertz", **one) == 1.98e9
    assert the_one(page, "gpuguard_device_ecc_errors_total", error="uncorrected", **one) == 2


@pytest.mark.parametrize("name", [field.name for field in fields(Device) if field.name not in ("index", "uuid")])
def test_what_is_unknown_of_a_device_is_absent_and_nothing_else_is(name):
    known = a_device(**FULL)
    whole = page_about(known)
    less = page_about(replace(known, **{name: None}))
    sources = [f"gpuguard_device_{row[0]}" for row in DEVICE_VALUES if row[3] == name]

    assert all(name in whole and name not in less for name in sources)
    assert all(0.0 not in less[name].values() or 0.0 in whole[name].values() for name in less)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_absent(value):
    page = page_about(a_device(temperature=value))

    assert "gpuguard_device_temperature_celsius" not in page


def test_users_who_claim_who_leave_idle_and_who_compute_without_a_claim_and_jobs_of_slurm():
    idle = a_device(0)
    stolen = a_device(1, processes=(a_process(9, user="bob", uid=1002),), utilization=90.0, memory_used=11 * GIB)
    page = page_about(idle, stolen, claims=(a_claim_record(idle, id="slurm12"),))

    assert the_one(page, "gpuguard_user_claimed_devices", user="alice") == 1
    assert the_one(page, "gpuguard_user_idle_devices", user="alice") == 1
    assert the_one(page, "gpuguard_device_idle_claims", user="alice", uuid=idle.uuid) == 1
    assert the_one(page, "gpuguard_device_slurm_job", user="alice", uuid=idle.uuid, job="12") == 1
    assert page["gpuguard_user_unclaimed_devices"] == {(("user", "bob"),): 1}
    assert the_one(page, "gpuguard_user_memory_used_bytes", user="bob") == 10 * GIB


def test_nothing_is_told_of_claims_that_cannot_be_read():
    page = page_about(a_device(processes=(a_process(),)), gaps=(Gap(None, "claims", "no directory"),))

    assert not {name for name in page if "claim" in name or "_user_" in name}
    assert the_one(page, "gpuguard_sample_gaps", field="claims") == 1


@pytest.mark.parametrize(
    ("waiting", "told_of"),
    [
        ((("alice", 400.0), ("bob", 900.0), ("alice", 950.0)), (3, 600, {"alice": 2, "bob": 1})),
        ((), (0, None, {})),
        (None, (None, None, {})),
    ],
    ids=["three", "nobody", "unreadable"],
)
def test_the_queue_is_told_and_one_that_cannot_be_read_is_no_number(waiting, told_of):
    page = told(metric_families(MetricFacts(1000.0, "1", waiting=waiting)))
    users = {dict(key)["user"]: value for key, value in page.get("gpuguard_user_waiting_requests", {}).items()}
    requests, oldest = (page.get(f"gpuguard_waiting_{name}", {}).get(()) for name in ("requests", "oldest_seconds"))

    assert (requests, oldest, users) == told_of


def test_tasks_of_submitted_jobs_are_counted_by_user_and_state():
    jobs = [
        PublicJob("alice", "17", "waiting", None, "true", 1, tasks=4),
        PublicJob("alice", "18", "waiting", None, "true", 1),
        PublicJob("alice", "17.0", "running", None, "true", 1, ("GPU-0",)),
        PublicJob("bob", "2", "waiting", None, "true", 1),
    ]
    page = told(metric_families(MetricFacts(1000.0, "1", jobs=jobs)))

    name = "gpuguard_user_submitted_tasks"
    assert [the_one(page, name, user="alice", state=state) for state in ("waiting", "running")] == [5, 1]
    assert the_one(page, name, user="bob", state="waiting") == 1
    assert name not in told(metric_families(MetricFacts(1000.0, "1", jobs=None)))


def test_old_numbers_are_not_told_as_new_ones():
    facts = facts_about(a_snapshot(a_device(**FULL)), current=False, driver_up=False, uses=())
    page = read(prometheus_text(facts, COMPAT))

    assert {name for name in page if "device" in name} == {"gpuguard_device_info", "gpuguard_devices"}
    assert not {name for name in page if not name.startswith("gpuguard_")}
    assert the_one(page, "gpuguard_driver_up") == 0


def test_no_label_is_a_pid():
    snapshot = a_snapshot(a_device(processes=(a_process(4711),), **FULL), claims=(a_claim_record(pid=4711),))
    facts = facts_about(snapshot)
    text = to_prometheus([*metric_families(facts), *dcgm(facts.snapshot), *nvitop(facts.snapshot)])

    assert "pid=" not in text and "4711" not in text


def test_so_many_users_make_no_more_series():
    running = tuple(a_process(100 + number, user=f"user{number}", uid=2000 + number) for number in range(3 * MAX_USERS))
    page = page_about(a_device(processes=running))

    assert len(page["gpuguard_user_used_devices"]) == MAX_USERS + 1
    assert the_one(page, "gpuguard_user_used_devices", user="(others)") == 2 * MAX_USERS


def test_uids_without_a_name_are_few_and_keep_no_user_off_the_page():
    # A user in a user namespace has 65536 of them, and each may have more devices than alice.
    crowd = [a_process(pid, user=str(100_000 + pid), uid=100_000 + pid) for pid in range(100, 100 + 3 * MAX_USERS)]
    devices = a_device(0, processes=tuple(crowd)), a_device(1, processes=(a_process(99, user="alice"), *crowd))
    page = page_about(*devices)

    assert the_one(page, "gpuguard_user_used_devices", user="alice") == 1
    assert len(page["gpuguard_user_used_devices"]) == MAX_NAMELESS + 2


def test_claims_that_call_themselves_jobs_of_slurm_make_few_series():
    device = a_device(0)
    ids = ["slurm" + "9" * 100, "slurm\u0661\u0662", *(f"slurm{number}" for number in range(1000, 1500))]
    claims = tuple(a_claim_record(device, id=claim_id) for claim_id in ids)
    page = page_about(device, claims=claims)

    assert len(page["gpuguard_device_slurm_job"]) == MAX_JOBS
    assert {len(dict(key)["job"]) for key in page["gpuguard_device_slurm_job"]} == {4}


def test_names_that_look_alike_when_they_are_harmless_are_one():
    hostile = "a\x1b[31m", "a\\x1b[31m"
    running = tuple(a_process(pid, user=name) for pid, name in enumerate(hostile, 10))
    page = page_about(a_device(processes=running))

    assert page["gpuguard_user_used_devices"] == {(("user", "a\\x1b[31m"),): 2}


def test_a_process_without_a_name_is_of_no_user():
    assert user_labels([None, "eve"])(None) == "(unknown)"
    assert user_labels(["(unknown)"])("(unknown)") == "(unknown)"


@given(st.text(max_size=200))
def test_whatever_a_name_is_it_stays_one_label_of_one_line(name):
    family = MetricFamily("gpuguard_x", "gauge", "Help.", {labels(user=name): 1.0})

    (series,) = told([family])["gpuguard_x"].items()

    assert series == ((("user", dict(labels(user=name))["user"]),), 1.0)
    assert len(series[0][0][1]) <= MAX_LABEL
    assert len(to_prometheus([family]).splitlines()) == 3


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70).map(float))
def test_a_number_is_read_as_it_was(value):
    assert float(format_number(value)) == value


def test_two_devices_with_the_same_uuid_do_not_spoil_the_page():
    twins = (a_device(0, uuid="GPU-same", **FULL), a_device(1, uuid="GPU-same", **FULL))
    facts = facts_about(Snapshot("h", "b", 1.0, 1.0, twins))

    assert the_one(told([*metric_families(facts), *nvitop(facts.snapshot)]), "gpuguard_devices") == 2


def test_dcgm_names_have_the_units_of_dcgm():
    device = a_device(memory_used=3 * GIB, **FULL)
    snapshot = a_snapshot(device)
    page = told(dcgm(snapshot))
    # The parser calls every counter ..._total, as its own library would have it.
    names = {name: name.removeprefix("DCGM_FI_DEV_").removesuffix("_total") for name in page}
    values = {names[name]: next(iter(series.values())) for name, series in page.items()}

    assert values["FB_USED"] == 3 * 1024 and values["SM_CLOCK"] == 1980 and values["GPU_UTIL"] == 50
    assert values["TOTAL_ENERGY_CONSUMPTION"] == 12500 and values["POWER_USAGE"] == 70 and values["GPU_TEMP"] == 35
    assert values["UNCORRECTABLE_REMAPPED_ROWS"] == 2 and values["CORRECTABLE_REMAPPED_ROWS"] == 4
    more = {"CORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_FAILURE"}
    assert set(values) == {row[0] for row in DCGM} | more
    assert "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n" in to_prometheus(dcgm(snapshot))
    ((key, _),) = page["DCGM_FI_DEV_FB_USED"].items()
    assert dict(key) == {
        "gpu": "0", "UUID": device.uuid, "pci_bus_id": device.pci_bus_id, "device": "nvidia0",
        "modelName": device.name, "hostname": "node1", "Hostname": "node1", "DCGM_FI_DRIVER_VERSION": "550.54.15",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "told_as"),
    [
        (a_device(remapped_rows=1, problems=("row remap failed",)), [1]),
        (a_device(remapped_rows=1, problems=()), [0]),
        (a_device(remapped_rows=None, problems=()), []),  # a board without row remapping
        (a_device(remapped_rows=1, problems=None), []),
    ],
    ids=["failed", "healthy", "no such rows", "not read"],
)
def test_a_remapping_that_failed_is_told_where_it_is_known(device, told_as):
    page = told(dcgm(a_snapshot(device)))

    assert list(page.get("DCGM_FI_DEV_ROW_REMAP_FAILURE", {}).values()) == told_as


def test_errors_of_memory_are_those_that_were_read_last():
    before, now = a_device(**FULL | {"temperature": 30.0}), a_device(temperature=40.0)
    rare = RareFields()
    rare.filled(a_snapshot(before))
    facts = facts_about(rare.filled(a_snapshot(now)))
    page = told([*metric_families(facts), *dcgm(facts.snapshot)])

    assert the_one(page, "gpuguard_device_temperature_celsius", uuid=now.uuid) == 40
    assert the_one(page, "gpuguard_device_remapped_rows", uuid=now.uuid) == 6
    assert the_one(page, "gpuguard_device_ecc_lifetime_errors_total", uuid=now.uuid, error="uncorrected") == 4
    assert list(page["DCGM_FI_DEV_ECC_SBE_VOL_TOTAL_total"].values()) == [1]


def test_a_part_of_a_divided_device_bears_its_uuid_and_its_own_number():
    whole = a_device(mig_mode=True)
    part = a_mig_instance(whole, memory_used=GIB)
    page = told(dcgm(a_snapshot(whole, part)))
    (of_part,) = [dict(key) for key in page["DCGM_FI_DEV_FB_USED"] if dict(key).get("GPU_I_ID")]

    assert of_part["UUID"] == whole.uuid and of_part["GPU_I_PROFILE"] == "3g.40gb" and of_part["GPU_I_ID"] == "1"


MI300X = FULL | {"vendor": "amd", "name": "AMD Instinct MI300X", "uuid": "GPU-e3aa140f9a5f9e31"}


def test_names_of_amds_exporter_have_its_units():
    page = told(amd(a_snapshot(a_device(memory_used=3 * GIB, **MI300X))))
    values = {name: next(iter(series.values())) for name, series in page.items()}

    assert values["gpu_used_vram"] == 3 * 1024 and values["gpu_gfx_activity"] == 50
    assert values["gpu_energy_consumed"] == 12_500_000 and values["gpu_junction_temperature"] == 35
    assert values["gpu_package_power"] == values["gpu_power_usage"] == 70 and values["gpu_nodes_total"] == 1
    more = {"gpu_junction_temperature", "gpu_package_power", "gpu_clock", "gpu_nodes_total"}
    assert set(values) == {name for name, *_ in AMD_EXPORTER} | more
    assert {dict(key)["clock_type"]: value for key, value in page["gpu_clock"].items()} == {
        "GPU_CLOCK_TYPE_SYSTEM": 1980, "GPU_CLOCK_TYPE_MEMORY": MI300X["clock_memory"],
    }  # fmt: skip
    ((key, _),) = page["gpu_used_vram"].items()
    assert dict(key) == {
        "gpu_id": "0", "gpu_uuid": MI300X["uuid"], "gpu_partition_id": "0", "card_model": MI300X["name"],
        "driver_version": "550.54.15", "hostname": "node1",
    }  # fmt: skip
    older = told(amd(a_snapshot(a_device(**MI300X | {"name": "AMD Instinct MI210"}))))
    assert "gpu_edge_temperature" in older and "gpu_junction_temperature" not in older


def test_each_exporter_tells_of_the_gpus_of_its_vendor():
    both = a_snapshot(a_device(0, **FULL), a_device(1, **MI300X))

    assert [len(told(dcgm(both))["DCGM_FI_DEV_GPU_TEMP"]), len(told(nvitop(both))["gpu_temperature_C"])] == [1, 1]
    assert {dict(key)["gpu_id"] for key in told(amd(both))["gpu_total_vram"]} == {"1"}
    assert told(amd(a_snapshot(a_device(0, **FULL)))) == {}


def test_nvitop_names_have_the_units_of_nvitop():
    page = told(nvitop(a_snapshot(a_device(memory_used=3 * GIB, **FULL))))
    values = {name: next(iter(series.values())) for name, series in page.items()}

    assert values["gpu_memory_used_MiB"] == 3072 and values["gpu_clock_sm_MHz"] == 1980
    assert values["gpu_memory_percent_Percentage"] == 3.75
    assert values["gpu_pcie_rx_throughput_MiBps"] == 2 and values["gpu_nvlink_total_tx_throughput_MiBps"] == 6
    assert values["gpu_nvlink_mean_tx_throughput_MiBps"] == 3 and values["gpu_clock_video_MHz"] == 1545
    links = {dict(key)["link"]: value for key, value in page["gpu_nvlink_tx_throughput_MiBps"].items()}
    assert links == {"0": 2, "3": 4}
    assert set(values) == NVITOP_EXPORTER


# What nvitop-exporter 1.7 tells of a device, and its nvitop_info.
NVITOP_EXPORTER = {
    "gpu_utilization_Percentage", "gpu_memory_utilization_Percentage", "gpu_encoder_utilization_Percentage",
    "gpu_decoder_utilization_Percentage", "gpu_memory_total_MiB", "gpu_memory_used_MiB", "gpu_memory_free_MiB",
    "gpu_memory_percent_Percentage", "gpu_clock_sm_MHz", "gpu_clock_memory_MHz", "gpu_clock_graphics_MHz",
    "gpu_clock_video_MHz", "gpu_power_usage_W", "gpu_power_limit_W", "gpu_temperature_C", "gpu_fan_speed_Percentage",
    "gpu_pcie_tx_throughput_MiBps", "gpu_pcie_rx_throughput_MiBps", "gpu_nvlink_total_tx_throughput_MiBps",
    "gpu_nvlink_total_rx_throughput_MiBps", "gpu_nvlink_mean_tx_throughput_MiBps",
    "gpu_nvlink_mean_rx_throughput_MiBps", "gpu_nvlink_tx_throughput_MiBps", "gpu_nvlink_rx_throughput_MiBps",
    "nvitop_info",
}  # fmt: skip


def test_nvitop_counts_the_instances_of_a_divided_device_from_0():
    parent = a_device(4)
    instances = [
        replace(a_device(4), uuid=f"MIG-{number}", parent_uuid=parent.uuid, gpu_instance_id=number) for number in (1, 2)
    ]
    text = to_prometheus(nvitop(a_snapshot(parent, *instances)))

    assert all(f'index="{index}"' in text for index in ("4", "4:0", "4:1")) and 'index="4:2"' not in text


# What Prometheus 2.42 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        (PROMETHEUS, OPENMETRICS),
        ("Application/OpenMetrics-Text", OPENMETRICS),
        ("text/plain;q=0.5, application/openmetrics-text ; q=0.5", OPENMETRICS),
        ("", CONTENT_TYPE),
        ("*/*", CONTENT_TYPE),
        ("text/html,*/*;q=0.8", CONTENT_TYPE),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", CONTENT_TYPE),
        ("application/openmetrics-text;q=0", CONTENT_TYPE),
        ("application/openmetrics-text;q=nan", CONTENT_TYPE),
        ("application/openmetrics-text;q=much", CONTENT_TYPE),
        (";,;q=,", CONTENT_TYPE),
    ],
)
def test_openmetrics_is_for_those_that_ask_for_it(accept, answered):
    assert negotiated(accept) == answered


def test_openmetrics_has_the_numbers_of_the_plain_page():
    device = a_device(memory_used=10 * GIB, processes=(a_process(user='eve "q" \\ x'),), **FULL)
    facts = facts_about(a_snapshot(device, claims=(a_claim_record(device),)), actions={("p", "warn", "done"): 2})
    families = [*metric_families(facts), *dcgm(facts.snapshot), *nvitop(facts.snapshot)]
    read = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in openmetrics_families(to_openmetrics(families))
        for sample in family.samples
    }

    assert read == {(family.name, key): value for family in families for key, value in family.values.items()}


@pytest.mark.parametrize("planted", [lambda text: text.removesuffix("# EOF\n"), lambda text: text + "x 1\n"])
def test_the_parser_of_openmetrics_refuses_what_is_none(planted):
    with pytest.raises(ValueError, match="EOF"):
        list(openmetrics_families(planted(to_openmetrics(metric_families(facts_about(a_snapshot(a_device())))))))


@pytest.mark.parametrize("name", COMPAT)
def test_before_the_first_sample_there_are_no_numbers(name):
    facts = MetricFacts(1.0, "1")

    assert prometheus_text(facts, [name]) == prometheus_text(facts)


def test_a_server_of_influx_that_is_not_there_is_named_with_the_reason_in_words():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        client = InfluxClient(f"http://127.0.0.1:{port}/write?db=x")

        with pytest.raises(GpuguardError, match=rf"^127\.0\.0\.1:{port} cannot be reached: Connection refused$"):
            client.send(["x y=1"])


def test_influx_has_one_line_per_subject():
    device = a_device(**FULL)
    lines = to_influx(metric_families(facts_about(a_snapshot(device))), "node1", 1_700_000_000.0)
    (line,) = [text for text in lines if text.startswith(f"gpuguard_device,host=node1,uuid={device.uuid} ")]

    assert "temperature_celsius=35" in line and "energy_joules_total=12.5" in line
    assert line.endswith(" 1700000000000000000")


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("NVIDIA H100", "NVIDIA\\ H100"),
        ("a,b=c", "a\\,b\\=c"),
        ("DOMAIN\\eve", "DOMAIN\\eve"),
        ("eve\\", "eve/"),
        ("eve\nfake,x=1 y=2", "eve\\n" + "fake\\,x\\=1\\ y\\=2"),
    ],
)
def test_a_tag_cannot_become_another_line_or_field(name, tag):
    (line,) = to_influx([MetricFamily("gpuguard_user_x", "gauge", "", {labels(user=name): 1.0})], "h", 1.0)
    (of_host,) = to_influx([MetricFamily("gpuguard_x", "gauge", "", {(): 1.0})], name, 1.0)

    assert line == f"gpuguard_user,host=h,user={tag} x=1 1000000000"
    assert of_host == f"gpuguard,host={tag} x=1 1000000000", "it is no label, which would be one line already"
