"""nvidia-smi's XML: every odd value is a gap, a hostile document is refused, and nothing old leads to an act."""

import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
from builders import GIB, MIB, a_device, a_mig_instance, a_process, a_snapshot
from chances import luck
from smi_files import a_program, smi_xml, write_smi

from gpuguard import backends
from gpuguard.backends import smi
from gpuguard.backends.client import open_worker
from gpuguard.backends.smi import PLACES
from gpuguard.cli import run_command_line
from gpuguard.errors import BackendError, DriverNotFound, DriverPermission, DriverUnresponsive
from gpuguard.model import ALL_FIELDS, WHO_FIELDS, Device, Snapshot

FULL = a_device(
    pstate=2, persistence_mode=True, display_active=False, fan_speed=40.0, ecc_mode=True, ecc_corrected_volatile=1,
    ecc_uncorrected_volatile=2, ecc_corrected_aggregate=3, ecc_uncorrected_aggregate=4, retired_pages=5,
    remapped_rows=6, remapped_rows_uncorrected=2, clock_graphics=1210, clock_video=1125, encoder_utilization=3.0,
    decoder_utilization=4.0, pcie_generation=4, pcie_width=16, pcie_tx=550 * 1024.0, pcie_rx=1024.0, clock_sm=1200,
    clock_sm_max=1980, clock_memory=1593, clock_memory_max=2619, temperature_slowdown=89.0, temperature_shutdown=92.0,
    throttle_reasons=("sw_power_cap",), memory_utilization=7.0, utilization=55.0, memory_reserved=600 * MIB,
    memory_used=10 * GIB,
)  # fmt: skip
ODD = (
    "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "Unknown Error", "ERR!", "", "None", "-", "Not Found",
    "[Insufficient Permissions]", "Requested functionality has been deprecated", "[Function Not Found]",
    "Not available in WDDM driver model", "12", "12 bananas", "1e309", "NaN", "4294967295", "-1 MiB", "\u0661\u0662 %",
    "9" * 5000, None,
)  # fmt: skip
NAMES = ("\u0661\u0662 %", "-", "12", "12 bananas", "NaN", "1e309", "4294967295", "-1 MiB")  # of products, perhaps
NUMBERS = {places[0]: field for field, places in PLACES.items()}


def read(path: Path, *devices: Device, odd: dict[str, str | None] | None = None) -> Snapshot:
    snapshot = a_snapshot(*devices) if devices else a_snapshot(FULL)
    write_smi(path / "smi.xml", snapshot, odd)
    return backends.open_backend(f"smi:{path}/smi.xml").sample(ALL_FIELDS)


def test_every_value_of_a_device_comes_back(tmp_path):
    (device,) = read(tmp_path).devices

    known = {field.name for field in fields(Device) if getattr(FULL, field.name) not in (None, ())}
    known -= {"numa_node"}  # which the kernel of its own machine told
    assert {name: getattr(device, name) for name in known} == {name: getattr(FULL, name) for name in known}
    assert (device.problems, device.processes) == ((), ())


# A product may be called anything.
@pytest.mark.parametrize(
    ("place", "word"),
    [(place, word) for word in ODD for place in sorted(NUMBERS) if place != "product_name" or word not in NAMES],
    ids=lambda word: str(word)[:20] or "empty",
)
def test_an_odd_value_is_unknown_and_leaves_a_gap(tmp_path, place, word):
    field = NUMBERS[place]
    second = {"pci/pci_gpu_link_info/pcie_gen/current_link_gen": word, "gpu_power_readings/power_draw": word,
              "gpu_power_readings/current_power_limit": word}  # fmt: skip
    snapshot = read(tmp_path, odd={**second, place: word})
    (device,) = snapshot.devices

    if (field, word) in {("minor_number", "12"), ("pcie_width", "12")}:
        assert getattr(device, field) == 12
    else:
        assert getattr(device, field) is None
        assert field in {gap.field for gap in snapshot.gaps if gap.device == device.uuid}


@pytest.mark.parametrize("word", ODD, ids=lambda word: str(word)[:20] or "empty")
@pytest.mark.parametrize("part", ["total", "used", "free"])
def test_memory_is_known_as_a_whole_or_not_at_all(tmp_path, part, word):
    snapshot = read(tmp_path, odd={f"fb_memory_usage/{part}": word})
    (device,) = snapshot.devices

    assert (device.memory_total, device.memory_used, device.memory_free) == (None, None, None)
    assert {"memory_total", "memory_used", "memory_free"} <= {gap.field for gap in snapshot.gaps}


def test_processes_have_their_kind_and_who_is_of_none_is_innocent(tmp_path):
    rows = [a_process(10 + place, kind=kind, memory_used=MIB) for place, kind in
            enumerate(("compute", "graphics", "compute+graphics", "mps"))]  # fmt: skip
    (device,) = read(tmp_path, a_device(processes=tuple(rows))).devices
    assert [process.kind for process in device.processes or ()] == [row.kind for row in rows]

    snapshot = read(tmp_path, a_device(processes=(a_process(),)), odd={"processes/process_info/type": "X"})
    (process,) = snapshot.devices[0].processes or ()
    assert process.kind == "compute+graphics"  # it uses the device, and nobody may signal it
    assert "process 4711 kind" in {gap.field for gap in snapshot.gaps}


@pytest.mark.parametrize("pid", ["0", "1", "-4", "N/A", "", "99999999999", "4 711"])
def test_a_list_with_a_pid_that_is_none_is_not_believed(tmp_path, pid):
    snapshot = read(tmp_path, a_device(processes=(a_process(),)), odd={"processes/process_info/pid": pid})
    (device,) = snapshot.devices

    assert device.processes is None or not device.processes_plausible
    assert "processes" in {gap.field for gap in snapshot.gaps}


@pytest.mark.parametrize(
    ("place", "word", "field"),
    [
        ("processes", "N/A", "processes"),
        ("processes", None, "processes"),
        ("fb_memory_usage/used", "90000 MiB", "memory_used"),  # more than there is
    ],
)
def test_what_is_not_told_or_cannot_be_is_unknown(tmp_path, place, word, field):
    assert getattr(read(tmp_path, odd={place: word}).devices[0], field) is None


def test_the_processes_of_a_saved_file_are_nobodys(tmp_path):
    snapshot = read(tmp_path, a_device(processes=(a_process(1_000_000),)))
    (process,) = snapshot.devices[0].processes or ()

    assert (process.start_time, process.uid, process.user) == (None, None, None)
    assert snapshot.recorded and time.localtime(snapshot.taken_at)[:6] == (2023, 8, 4, 11, 44, 30)
    assert "processes (identity)" in {gap.field for gap in snapshot.gaps}


def test_a_recommendation_of_the_driver_is_a_problem(tmp_path):
    odd = {"gpu_recovery_action": "Reset", "remapped_rows/remapped_row_pending": "Yes", "compute_mode": "ERR!"}

    assert read(tmp_path, odd=odd).devices[0].problems == (
        "row remap pending", "the driver recommends: Reset", "compute_mode: ERR!",
    )  # fmt: skip


def test_a_lost_device_keeps_its_name_and_its_place_and_the_name_of_a_process_makes_none_lost(tmp_path):
    (device,) = read(tmp_path, odd={"fan_speed": "GPU is lost"}).devices
    assert (device.problems, device.name, device.pci_bus_id) == (("lost",), FULL.name, FULL.pci_bus_id)

    named = a_device(processes=(a_process(command=("GPU is lost",)),))
    assert read(tmp_path, named).devices[0].problems == ()


def test_the_power_limit_of_driver_610_is_read_where_it_stands(tmp_path):
    moved = {"gpu_power_readings/current_power_limit": None}
    write_smi(tmp_path / "smi.xml", a_snapshot(FULL), moved)
    document = (tmp_path / "smi.xml").read_text(encoding="ascii")
    ceiling = "<gpu_ceiling_power_limit><current_power_limit>250.00 W</current_power_limit></gpu_ceiling_power_limit>"
    document = document.replace("</gpu_power_readings>", f"{ceiling}</gpu_power_readings>")
    (tmp_path / "smi.xml").write_text(document, encoding="ascii")

    assert backends.open_backend(f"smi:{tmp_path}/smi.xml").sample(ALL_FIELDS).devices[0].power_limit == 250.0


def test_warnings_around_the_document_are_no_part_of_it(tmp_path):
    warning = "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"
    path = write_smi(tmp_path / "smi.xml", a_snapshot(FULL))
    path.write_text(warning + path.read_text(encoding="ascii") + warning, encoding="ascii")

    assert backends.open_backend(f"smi:{path}").sample(ALL_FIELDS).devices[0].uuid == FULL.uuid


def test_a_pid_that_computes_and_draws_is_one_process(tmp_path):
    twice = tuple(a_process(kind=kind, memory_used=used) for kind, used in (("compute", GIB), ("graphics", 2 * GIB)))
    (device,) = read(tmp_path, a_device(processes=twice, memory_used=4 * GIB)).devices

    assert device.processes_plausible
    assert [(process.kind, process.memory_used) for process in device.processes or ()] == [
        ("compute+graphics", 2 * GIB)
    ]


@pytest.mark.parametrize("word", ["0000:01:00.0", "00000000:01:00.0"])
def test_a_bus_id_has_a_domain_of_eight_digits(tmp_path, word):
    assert read(tmp_path, odd={"pci/pci_bus_id": word}).devices[0].pci_bus_id == "00000000:01:00.0"


@pytest.mark.parametrize(("word", "problems"), [("True", 1), ("False", 0), ("N/A", 0)])
def test_an_unhealthy_route_of_the_fabric_is_a_problem(tmp_path, word, problems):
    path = write_smi(tmp_path / "smi.xml", a_snapshot(FULL))
    health = f"<fabric><health><route_unhealthy>{word}</route_unhealthy></health></fabric></gpu>"
    path.write_text(path.read_text(encoding="ascii").replace("</gpu>", health), encoding="ascii")

    (device,) = backends.open_backend(f"smi:{path}").sample(ALL_FIELDS).devices
    assert len(device.problems or ()) == problems


def test_instances_without_a_name_of_their_own_get_the_one_that_cuda_knows(tmp_path):
    parent = a_device(mig_mode=True, utilization=None)
    inside = a_mig_instance(parent, processes=(a_process(memory_used=GIB),), memory_used=GIB)
    snapshot = read(tmp_path, parent, inside)

    whole, instance = snapshot.devices
    assert (whole.mig_mode, whole.utilization, instance.parent_uuid) == (True, None, parent.uuid)
    assert instance.uuid == f"MIG-{parent.uuid}/1/0"
    assert [process.pid for process in instance.processes or ()] == [4711]


def test_a_word_in_the_place_of_the_uuid_of_an_instance_is_no_uuid(tmp_path):
    parent = a_device(mig_mode=True, utilization=None)
    path = write_smi(tmp_path / "smi.xml", a_snapshot(parent, a_mig_instance(parent)))
    text = path.read_text(encoding="ascii")
    path.write_text(text.replace("<mig_device>", "<mig_device><uuid>N/A</uuid>"), encoding="ascii")

    _, instance = backends.open_backend(f"smi:{path}").sample(ALL_FIELDS).devices
    assert instance.uuid == f"MIG-{parent.uuid}/1/0"


def test_sections_may_be_missing(tmp_path):
    path = tmp_path / "smi.xml"
    path.write_text("<nvidia_smi_log><gpu><uuid>GPU-1</uuid></gpu></nvidia_smi_log>", encoding="ascii")
    snapshot = backends.open_backend(f"smi:{path}").sample(ALL_FIELDS)

    (device,) = snapshot.devices
    assert {field.name for field in fields(Device) if getattr(device, field.name) not in (None, True, ())} <= {
        "index", "uuid", "vendor", "mig_mode", "asleep", "integrated", "memory_shared_with_host",
        "processes_plausible", "desktop_memory",
    }  # fmt: skip
    assert len(snapshot.gaps) > 30


BILLION = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]><nvidia_smi_log>&b;</nvidia_smi_log>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&a;</nvidia_smi_log>'
PARAMETER = '<!DOCTYPE x [<!ENTITY % a SYSTEM "http://127.0.0.1:9/x"> %a;]><nvidia_smi_log/>'


@pytest.mark.parametrize(
    "document",
    [
        BILLION, OUTSIDE, PARAMETER, "", "<", "hello", "<a/>", "<nvidia_smi_log>", "\x00" * 100,
        "<nvidia_smi_log>" + "<a>" * 100_000, "<nvidia_smi_log>" + "<a/>" * 600_000 + "</nvidia_smi_log>",
        '<?xml version="1.0" encoding="utf-7"?><nvidia_smi_log/>',
        '<?xml version="1.0" encoding="rot13"?><nvidia_smi_log/>',
        " " * (33 * 2**20),
    ],
    ids=lambda document: document[:24],
)  # fmt: skip
def test_a_document_that_is_none_or_means_harm_is_refused(tmp_path, document):
    (tmp_path / "smi.xml").write_text(document, encoding="utf-8")

    with pytest.raises(BackendError, match=r"smi\.xml: this is nothing that `nvidia-smi -q -x` has written"):
        backends.open_backend(f"smi:{tmp_path}/smi.xml")


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(BackendError, match="No such file"):
        backends.open_backend(f"smi:{tmp_path}/none.xml")
    with pytest.raises(BackendError, match="no ordinary file"):
        backends.open_backend(f"smi:{tmp_path}")


def damaged(document: bytes, chance: random.Random) -> bytes:
    """*document* with one to eight accidents, anywhere in it."""
    for _ in range(chance.randint(1, 8)):
        start = chance.randrange(len(document) + 1)
        end = min(len(document), start + chance.choice((1, 2, 8, 60, 600)))
        pieces = (b"<", b">", b"&amp;", b"&a;", b"\xff\xfe", b"]]>", b"<!--", b"<![CDATA[", b"\x00", b"")
        piece = chance.choice((*pieces, bytes([chance.randrange(256)]), document[start:end] * 2, document[:end][-300:]))
        document = document[:start] + piece + document[end:]
    return document


def altered(document: bytes, chance: random.Random) -> bytes:
    """*document* with other values, and with lines that are missing, doubled or elsewhere: XML all the same."""
    lines = document.split(b"\n")
    leaves = [place for place, line in enumerate(lines) if re.fullmatch(rb"<(\w+)>[^<]*</\1>", line)]
    for place in chance.sample(leaves, chance.randint(1, len(leaves))):
        tag, text = re.findall(rb"\w+", lines[place])[0], chance.choice(ODD[:-1]).encode()
        kept = lines[place]
        new = (b"<%s>%s</%s>" % (tag, text, tag), b"", kept + kept, lines[chance.choice(leaves)])
        lines[place] = chance.choice(new)
    return b"\n".join(lines)


@pytest.mark.parametrize("seed", range(8))
def test_no_damaged_document_leads_to_another_error(tmp_path, seed):
    chance = luck(seed)
    parent = a_device(1, mig_mode=True)
    whole = smi_xml(
        a_snapshot(a_device(0, processes=(a_process(), a_process(12))), parent, a_mig_instance(parent), host="h")
    ).encode()
    backend = smi.Smi(str(tmp_path / "smi.xml"))
    outcomes = [0, 0]
    for _ in range(100):
        (tmp_path / "smi.xml").write_bytes(chance.choice((damaged, altered))(whole, chance))
        try:
            snapshot = backend.sample(ALL_FIELDS)
        except BackendError:
            outcomes[0] += 1
            continue
        outcomes[1] += 1
        for device in snapshot.devices:
            assert device.memory_used is None or 0 <= device.memory_used <= 2**60
            assert device.temperature is None or 0 <= device.temperature <= 130
    assert min(outcomes) > 5  # damaged beyond repair, and damaged a little


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path / "bin"


def test_a_program_that_fails_is_told_in_its_own_words_and_one_that_is_missing_in_ours(program):
    a_program(program, a_snapshot())
    script = program / "nvidia-smi"
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    for text, kind in ((said, DriverNotFound), ("Insufficient Permissions", DriverPermission), ("boom", BackendError)):
        script.write_text(f'#!/bin/sh\necho "{text}"; exit 9\n', encoding="utf-8")
        with pytest.raises(BackendError) as caught:
            backends.open_backend("smi").sample(WHO_FIELDS)
        assert type(caught.value) is kind and text[:10] in str(caught.value)
    script.unlink()
    with pytest.raises(DriverNotFound, match="no program nvidia-smi"):
        backends.open_backend("smi")


def test_a_program_that_hangs_is_given_up(program, monkeypatch):
    monkeypatch.setattr(smi, "PROGRAM_SECONDS", 0.5)
    a_program(program, a_snapshot())
    (program / "hang").touch()

    with pytest.raises(DriverUnresponsive, match="did not end"):
        backends.open_backend("smi").sample(WHO_FIELDS)


def test_a_program_that_takes_its_time_is_waited_for(program):
    a_program(program, a_snapshot())
    backend = open_worker("smi")
    try:
        assert backend.sample(WHO_FIELDS).devices
        (program / "hang").touch()
        released = time.monotonic() + 2.5  # longer than a single silent call may take: client.DEVICE_SECONDS
        threading.Timer(2.5, (program / "hang").unlink).start()
        assert backend.sample(WHO_FIELDS).devices
        assert time.monotonic() >= released - 0.1
    finally:
        backend.close()


def test_a_list_with_a_process_that_is_not_here_is_not_believed(program):
    a_program(program, a_snapshot(a_device(processes=(a_process(2**22 - 7),))))
    text = (program / "nvidia-smi").read_text(encoding="utf-8").replace('return ""', "return entry[0]")
    (program / "nvidia-smi").write_text(text, encoding="utf-8")
    (device,) = backends.open_backend("smi").sample(WHO_FIELDS).devices

    assert not device.processes_plausible
    assert [process.command for process in device.processes or ()] == [None]


@pytest.mark.parametrize("command", ["run -- true", "select", "explain", "daemon --once", "adopt 1", "queue", "wait"])
def test_a_command_that_would_claim_or_guard_refuses_a_saved_file(tmp_path, command):
    path = write_smi(tmp_path / "smi.xml", a_snapshot())
    name, *rest = command.split()
    words = [sys.executable, "-m", "gpuguard", name, "--backend", f"smi:{path}", *rest]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode not in (0, 2)
    assert "another time or machine" in ended.stderr


def test_who_shows_a_saved_file(tmp_path, capsys):
    path = write_smi(tmp_path / "node7.xml", a_snapshot(FULL))

    assert run_command_line(["who", "--backend", f"smi:{path}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("RECORDED node7.xml: 1 GPU, driver 550.54.15, 2023-08-04 11:44:30")
    assert "10.0GiB/80.0GiB" in shown and "55%" in shown
