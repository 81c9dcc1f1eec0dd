"""The page of `gpuguard top`: what stands where, in which colour, and what is not there because nobody knows it."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import picture
import pytest
from builders import GIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from top_scenes import a_scene, colours, page_of, texts

from gpuguard.batch.public import PublicJob
from gpuguard.model import Device, Gap
from gpuguard.policies.view import HostUse
from gpuguard.queue.priority import Ticket
from gpuguard.request import Request
from gpuguard.sanitize import display_width
from gpuguard.top.details import details
from gpuguard.top.page import title
from gpuguard.top.process_table import chosen_row, moved, rows_of
from gpuguard.top.scene import KEPT, MODES, SORTS, Ancestor, History, HostMeters, ScreenView, Thresholds

HOT = {"temperature_slowdown": 90.0}


def eight(**fields):
    return [a_device(index, **fields) for index in range(8)]


def a_ticket(user, since, num_gpus, note):
    return Ticket("t", 1001, user, since, (Request(num_gpus),), note=note)


def row_with(lines, text):
    (row,) = [line.text for line in lines if text in line.text]
    return row


def test_a_device_is_one_line_with_bars_numbers_state_and_claim():
    device = a_device(3, memory_used=40 * GIB, utilization=75.0, processes=(a_process(),))
    heading, line, *_ = texts(page_of(a_scene(device, claims=[a_claim_record(device, note="run 7")]), mode="compact"))

    assert heading == " GPU MEMORY             UTILIZATION  TEMP POWER STATE"
    assert line == '   3 ████░░░░ 40.0/80G  ████▌░ 75%    35C 70W   in use: alice 1h "run 7"'


FULL = {
    "pstate": 2, "clock_sm": 1755, "clock_sm_max": 1980, "clock_memory": 2619, "encoder_utilization": 41.0,
    "decoder_utilization": 26.0, "pcie_generation": 5, "pcie_width": 16, "pcie_rx": 3 * GIB, "pcie_tx": 40 * 1024.0,
    "pci_bus_id": "00000000:1B:00.0", "persistence_mode": True, "display_active": False, "mig_mode": False,
    "ecc_mode": True, "ecc_uncorrected_volatile": 2, "ecc_uncorrected_aggregate": 5,
    "throttle_reasons": ("sw_power_cap",), "compute_mode": "exclusive_process", "utilization": 50.0,
    "power_draw": 350.0,
}  # fmt: skip


NUMBERS = ["PERF", "CLOCK", "ENC", "DEC", "PCIE", "RX/s", "TX/s"]


@pytest.mark.parametrize(("width", "columns"), [(119, []), (120, NUMBERS[:1]), (200, NUMBERS)])
def test_a_wide_screen_has_clocks_video_and_pcie(width, columns):
    heading, line, *_ = texts(page_of(a_scene(a_device(**FULL), a_device(1)), width=width, mode="compact"))
    numbers = ["P2", "1755MHz", "41%", "26%", "5x16", "3.0GiB", "40KiB"][: len(columns)]

    assert [word for word in heading.split() if word in NUMBERS] == columns
    assert " ".join(numbers) in " ".join(line.split())


def test_columns_that_nobody_reads_are_not_there_and_a_number_that_is_not_known_is_said():
    heading, line, *_ = texts(page_of(a_scene(a_device(pstate=0), a_device(1)), width=200, mode="compact"))
    _, _, other, *_ = texts(page_of(a_scene(a_device(pstate=0), a_device(1)), width=200, mode="compact"))

    assert "PERF" in heading and "CLOCK" not in heading
    assert " P0 " in line and " n/a " in other


def test_three_lines_for_a_device_have_the_same_numbers():
    line, *_ = texts(page_of(a_scene(a_device(fan_speed=30.0, **FULL)), width=200, height=60))

    assert "fan 30%  P2  CLOCK 1755MHz  ENC 41%  DEC 26%  PCIE 5x16  RX/s 3.0GiB  TX/s 40KiB  00000000:1B:00.0" in line


def test_a_mode_and_errors_that_matter_to_a_user_stand_behind_the_state():
    lines = page_of(a_scene(a_device(**FULL)), width=120, mode="compact")

    assert colours(lines, "exclusive") == colours(lines, "ECC errors: 2") == {"yellow"}


def test_details_are_all_that_is_known_of_a_device():
    scene = a_scene(a_device(**FULL))
    told = details(scene, scene.uses, None)

    for words in (
        *("by power 25%", "PERF P2  SM 1755/1980MHz  memory 2619MHz  video n/a  slowed down sw_power_cap"),
        *(
            "bus id 00000000:1B:00.0  PCIe 5  lanes 16  RX/s 3.0GiB  TX/s 40KiB",
            "ECC on  uncorrected 2  in all 5  corrected n/a",
        ),
        "compute mode exclusive_process  MIG off  persistence on  display off",
    ):
        assert words in told
    assert "daemon" not in told


def test_details_of_a_device_that_tells_nothing_have_no_number():
    fields = {field.name: None for field in dataclasses.fields(Device) if field.default is None}
    scene = a_scene(a_device(**{**fields, "power_limit": None, "processes": ()}))
    told = "\n".join(details(scene, scene.uses, None).splitlines()[1:])

    assert told.count("n/a") > 20 and not re.search(r"\d", told)


def test_details_of_a_chosen_process_are_its_own_and_those_of_its_gpus():
    job = a_process(
        10, memory_used=20 * GIB, utilization=90.0, memory_utilization=55.0, encoder_utilization=0.0, kind="mps"
    )
    machine = HostMeters(34.0, 120 * GIB, 512 * GIB, 0, 0, (12.4, 11.0, 9.8), 64)
    host = {(10, job.start_time): HostUse(cpu=151.4, memory=128 * GIB)}
    scene = a_scene(a_device(0, processes=(job,)), a_device(1), machine=machine, host=host)
    told = details(scene, scene.uses, chosen_row(scene, ScreenView(selected=(10, job.start_time))))

    assert "kind mps" in told and "MEM 25.0%  SM 90%  MBW 55%  ENC 0%  DEC n/a" in told
    assert "CPU 151%  memory of the host 128.0GiB  MEM 25.0%" in told
    assert "GPU 0 " in told and "GPU 1 " not in told


def test_details_of_a_process_on_several_gpus_have_its_part_of_each():
    parts = [a_process(10, memory_used=size * GIB, utilization=size * 10.0) for size in (2, 3)]
    scene = a_scene(*[a_device(index, processes=(part,)) for index, part in enumerate(parts)])
    told = details(scene, scene.uses, chosen_row(scene, ScreenView(selected=(10, parts[0].start_time))))

    assert "memory 5.0GiB" in told and "GPU 0 2.0GiB  SM 20%  MBW n/a" in told and "GPU 1 3.0GiB  SM 30%" in told


def test_details_say_what_a_daemon_does_not_read():
    scene = a_scene(a_device(0), age=1.0)

    assert details(scene, scene.uses, None).startswith("The daemon does not read all of it")


@pytest.mark.parametrize("width", [80, 99, 100, 119, 120, 149, 150, 200])
def test_no_width_cuts_off_the_state_of_a_device(width):
    device = a_device(3, name="NVIDIA H100 80GB HBM3", memory_used=40 * GIB, processes=(a_process(),))
    _, line, *_ = texts(page_of(a_scene(device), width=width, mode="compact", looks=5))

    assert line.endswith(" used without a claim")


def test_what_is_not_known_is_said_and_has_no_bar():
    nothing = a_device(
        name=None, memory_used=None, memory_free=None, utilization=None, temperature=None, power_draw=None
    )
    _, line, *_ = texts(page_of(a_scene(nothing), mode="compact"))

    assert line.count("n/a") == 4
    assert "0.0" not in line and "0%" not in line and "█" not in line


def test_where_there_is_room_the_mean_of_the_gpus_is_plotted_with_a_time_axis():
    scene = a_scene(a_device(0, utilization=80.0), a_device(1, utilization=40.0, processes=(a_process(10),)))
    shown = texts(page_of(scene, width=120, height=36, looks=9))

    assert any(line.startswith("utilization, mean of 2 GPUs: 60%") for line in shown)
    assert sum("└" in line for line in shown) == 1


def test_a_process_that_is_chosen_is_plotted_instead():
    scene = a_scene(a_device(0, processes=(a_process(10, start_time=9_000.0, utilization=None),)))
    shown = texts(page_of(scene, width=120, height=36, looks=9, selected=(10, 9_000.0)))

    (line,) = [line for line in shown if line.startswith("its ")]
    assert line == "its memory: 10.0GiB, at most 10.0GiB"


@pytest.mark.parametrize("height", range(10, 40))
def test_plots_never_push_a_process_off_the_screen(height):
    shown = page_of(a_scene(a_device(0, processes=(a_process(10, start_time=9_000.0),))), 120, height, looks=9)

    assert len(shown) <= height


def test_the_machine_beside_its_gpus_has_meters():
    machine = HostMeters(34.0, 120 * GIB, 512 * GIB, 0, 0, (12.4, 11.0, 9.8), 64)
    (line, *_) = texts(page_of(a_scene(a_device(), machine=machine), width=120))

    assert (
        "34%" in line
        and "120.0GiB of 512.0GiB" in line
        and "LOAD 12.4 11.0 9.8 of 64 cores" in line
        and "SWAP" not in line
    )


def test_where_even_one_line_each_is_too_much_the_free_ones_share_one():
    devices = [a_device(index) for index in range(64)]
    busy = a_device(7, processes=(a_process(),), memory_used=11 * GIB)
    shown = texts(page_of(a_scene(*devices[:7], busy, *devices[8:])))

    assert [line.split()[0] for line in shown[1:3]] == ["7", "63"]
    assert shown[2].strip() == "63 free: 0-6,8-63"
    assert any("train.py" in line for line in shown)


def test_instances_stand_below_their_device():
    parent = a_device(0, mig_mode=True, utilization=None)
    part = a_mig_instance(parent, 1, processes=(a_process(),), memory_used=11 * GIB)
    shown = texts(page_of(a_scene(parent, part), height=60))

    assert [line.split()[0] for line in shown if line[:5].strip()][:2] == ["0", "MEM"] or "0.2" in " ".join(shown)
    assert any(line.startswith(" 0.2 ") and "11.0/40G" in line for line in shown)


def test_the_profile_of_an_instance_is_shown_where_its_whole_name_has_no_room():
    parent = a_device(0, mig_mode=True)
    part = a_mig_instance(parent, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", mig_profile="3g.20gb")
    shown = texts(page_of(a_scene(parent, part), width=120))

    assert any(line.startswith(" 0.1 MIG 3g.20gb  ") for line in shown)


@pytest.mark.parametrize(
    ("fields", "thresholds", "text", "colour"),
    [
        ({"problems": ("lost",)}, Thresholds(), "unhealthy", "bold red"),
        ({"temperature": 79.0, **HOT}, Thresholds(), "79C", "green"),
        ({"temperature": 80.0, **HOT}, Thresholds(), "80C", "yellow"),
        ({"temperature": 90.0, **HOT}, Thresholds(), "90C", "bold red"),
        ({"temperature": 99.0}, Thresholds(), "99C", "green"),  # nobody knows what is too hot for it
        ({"temperature": 75.0, **HOT}, Thresholds(temperature=75.0), "75C", "bold red"),
        ({"power_draw": 690.0}, Thresholds(), "690/700W", "green"),
        ({"power_draw": 702.0}, Thresholds(), "702/700W", "yellow"),
        ({"power_draw": 740.0}, Thresholds(), "740/700W", "bold red"),
        ({"power_draw": 600.0}, Thresholds(power=600.0), "600/700W", "bold red"),
        ({"power_draw": 630.0}, Thresholds(power_share=0.9), "630/700W", "bold red"),
        ({"power_draw": 630.0, "power_limit": None}, Thresholds(), "630W", "green"),
        ({"memory_used": 79 * GIB}, Thresholds(), "79.0/80GiB", "cyan"),
        ({"memory_used": 73 * GIB}, Thresholds(memory_share=1.0), "73.0/80GiB", "yellow"),
        ({"memory_used": 70 * GIB}, Thresholds(memory=70 * GIB), "70.0/80GiB", "bold red"),
    ],
)
def test_the_colour_is_that_of_the_device_s_own_limits_or_of_the_site_s_policies(fields, thresholds, text, colour):
    lines = page_of(a_scene(a_device(**fields), thresholds=thresholds), width=100, mode="compact")

    assert colours(lines, text) == {colour}


def test_a_machine_without_devices_says_so():
    shown = texts(page_of(a_scene(snapshot=replace(a_snapshot(), devices=()))))

    assert shown[0] == "no GPUs" and shown[-1] == "no processes"


TWO = (
    a_process(10, user="alice", utilization=30.0, start_time=9_000.0, memory_used=GIB, command=("python", "a.py")),
    a_process(20, user="bob", uid=1002, utilization=None, start_time=9_900.0, memory_used=3 * GIB),
)


def test_a_process_is_one_row_with_what_it_takes_on_the_device_and_beside_it():
    host = {(10, 9_000.0): HostUse(cpu=151.4, memory=3 * GIB)}
    lines = page_of(a_scene(a_device(processes=TWO[:1]), host=host), width=120)

    assert row_with(lines, "a.py").split() == [
        *["0", "10", "alice", "1.0GiB", "30", "n/a", "151", "3.0GiB", "16m40s"], "no", "claim", "C", "python", "a.py",
    ]  # fmt: skip


def test_a_wide_screen_has_all_rates_and_shares_of_a_process():
    job = replace(
        TWO[0], memory_used=20 * GIB, memory_utilization=8.0, encoder_utilization=41.0, kind="compute+graphics"
    )
    machine = HostMeters(34.0, 120 * GIB, 512 * GIB, 0, 0, (12.4, 11.0, 9.8), 64)
    host = {(10, 9_000.0): HostUse(cpu=151.4, memory=4 * GIB)}
    lines = page_of(a_scene(a_device(processes=(job,)), host=host, machine=machine), width=160)

    assert row_with(lines, "a.py").split() == [
        *["0", "10", "alice", "20.0GiB", "25.0", "30", "8", "41", "n/a", "151", "4.0GiB", "0.8", "16m40s"],
        *["no", "claim", "C+G", "python", "a.py"],
    ]


def test_no_language_cuts_what_says_that_there_is_no_claim(monkeypatch):
    monkeypatch.setattr("gpuguard.top.process_table._", lambda text: "无占用声明" if text == "no claim" else text)
    heading, line = page_of(a_scene(a_device(processes=TWO[:1])), width=100)[-2:]

    assert "无占用声明" in line.text
    assert display_width(heading.text.split("COMMAND")[0]) == display_width(line.text.split("python")[0])


@pytest.mark.parametrize("height", range(22, 40))
def test_the_middle_of_an_axis_is_a_round_number(height):
    shown = texts(page_of(a_scene(a_device(processes=TWO, utilization=50.0)), width=100, height=height, looks=4))
    marks = [line.split()[0] for line in shown if re.match(r" *[0-9.]+ (% )?\u2502", line)]

    assert marks[0] == "100" and marks[1:] in (["50", "0"], ["0"])


def test_a_very_wide_screen_plots_the_machine_too():
    machine = HostMeters(34.0, 128 * GIB, 512 * GIB, 0, 0, (12.4, 11.0, 9.8), 64)
    shown = texts(page_of(a_scene(a_device(0, utilization=80.0), machine=machine), width=200, height=36, looks=9))

    assert any("CPU: 34%, at most 34%" in line and "memory of the host: 25%" in line for line in shown)


def test_what_is_not_known_of_a_process_is_said():
    blank = a_process(10, memory_used=None, utilization=None, start_time=None, user=None, uid=None, command=None)

    assert texts(page_of(a_scene(a_device(processes=(blank,))), width=120))[-1].split() == [
        *["0", "10", "unknown", "n/a", "n/a", "n/a", "n/a", "n/a", "n/a", "no", "claim", "C", "n/a"]
    ]


@pytest.mark.parametrize(("memory", "total"), [(GIB, "4.0GiB"), (None, "n/a")])
def test_a_process_on_several_devices_is_one_row_with_a_sum_or_none(memory, total):
    others = [a_device(index, processes=TWO[:1]) for index in range(3)]
    lines = page_of(a_scene(*others, a_device(3, processes=(replace(TWO[0], memory_used=memory),))))

    assert row_with(lines, "a.py").split()[:4] == ["0-3", "10", "alice", total]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_every_order_can_be_turned_round_and_the_unknown_comes_last(sort, reverse):
    nobody = a_process(30, user=None, utilization=None, memory_used=None, start_time=None)
    scene = a_scene(a_device(processes=(*TWO, nobody)))
    pids = [row.pid for row in rows_of(scene, ScreenView(sort=sort, reverse=reverse))]

    assert sorted(pids) == [10, 20, 30]
    if sort in ("memory", "time"):
        assert pids[-1] == 30
    if sort == "memory":
        assert pids == ([10, 20, 30] if reverse else [20, 10, 30])


@pytest.mark.parametrize(
    ("view", "pids"),
    [
        ({"text": "a.py"}, [10]),
        ({"text": "user:bob"}, [20]),
        ({"text": "user:bo"}, []),
        ({"text": "bo"}, [20]),
        ({"text": "BOB train"}, [20]),
        ({"text": "gpu:1"}, []),
        ({"text": "gpu:0,1 alice"}, [10]),
        ({"users": frozenset({"alice"})}, [10]),
        ({"compute_only": True}, [10, 20]),
    ],
)
def test_filters_let_through_what_they_name(view, pids):
    desktop = a_process(30, kind="graphics", user="carol", memory_used=1)
    scene = a_scene(a_device(processes=(*TWO, desktop)))

    assert [row.pid for row in rows_of(scene, ScreenView(**view)) if row.pid != 30 or "text" not in view] == pids


def test_with_a_filter_for_users_other_people_s_devices_are_not_shown():
    scene = a_scene(a_device(0, processes=TWO[:1]), a_device(1, processes=TWO[1:]))
    shown = texts(page_of(scene, users=frozenset({"bob"}), mode="compact"))

    assert shown[1].startswith("   1 ") and not any("alice" in line for line in shown)


def test_the_tree_has_every_ancestor_once_and_processes_below_them():
    above = {
        10: Ancestor(5, "alice", ("python", "a.py")),
        20: Ancestor(5, "bob", ("python",)),
        5: Ancestor(4, "alice", ("/usr/bin/bash", "job.sh")),
        4: Ancestor(1, "root", ("sshd",)),
        1: Ancestor(0, "root", ("init",)),
    }
    lines = page_of(a_scene(a_device(processes=TWO), ancestors=above), width=120, tree=True)
    shown = [line[line.index(mark) :] for line in texts(lines) for mark in ("4 root", "└─", "├─") if mark in line]

    assert [row for row in shown if "sshd" in row or "bash" in row] == ["4 root sshd", "└─ 5 alice bash job.sh"]
    assert any("├─ python a.py" in row for row in shown) and any("└─ python train.py" in row for row in shown)


def test_a_tree_of_pids_that_go_round_in_circles_ends():
    above = {10: Ancestor(20, "a", None), 20: Ancestor(10, "b", None)}
    lines = page_of(a_scene(a_device(processes=TWO), ancestors=above), tree=True)

    assert {line.process for line in lines if line.process} <= {(10, 9_000.0), (20, 9_900.0)}


def test_the_cursor_stays_within_the_processes():
    rows = [(10, 1.0), (20, 2.0)]

    assert moved(rows, ScreenView(), 1).selected == (10, 1.0)
    assert moved(rows, ScreenView(selected=(10, 1.0)), 5).selected == (20, 2.0)
    assert moved(rows, ScreenView(selected=(10, 1.0)), -5).selected == (10, 1.0)
    assert moved(rows, ScreenView(selected=(99, 9.0)), -1).selected == (20, 2.0)
    assert moved([], ScreenView(selected=(10, 1.0)), 1).selected is None


def test_who_has_what_and_who_waits_are_said():
    tickets = [a_ticket(f"user{n}", 1_700_000_000.0 - 60 * n, n, "big") for n in range(1, 6)]
    waiting = [(ticket, "starts in about 2h") for ticket in tickets]
    shown = texts(page_of(a_scene(a_device(processes=TWO), waiting=tuple(waiting)), width=100))

    assert any(line.startswith("USERS alice 1 GPU 1.0GiB  bob 1 GPU 3.0GiB") for line in shown)
    assert 'WAITS 1. user1 1 GPU for 1m "big": starts in about 2h' in shown
    assert "      and 2 more in the queue: gpuguard queue" in shown


def test_a_long_note_leaves_room_for_the_start_of_a_request_that_waits():
    ticket = a_ticket("alice", 1_700_000_000.0 - 60, 1, "大模型训练" * 20)
    shown = texts(page_of(a_scene(a_device(), waiting=((ticket, "starts in about 2h"),)), width=80))

    assert 'WAITS 1. alice 1 GPU for 1m "大模型训练大模型训…": starts in about 2h' in shown


def a_public_job(user, job, **fields):
    facts = {"state": "waiting", "since": 1_700_000_000.0 - 60, "what": "python train.py", "num_gpus": 2, **fields}
    return PublicJob(user, job, **facts)


def test_jobs_that_outlive_the_terminal_have_a_line_each_with_the_gpus_that_they_have_or_want():
    device, other = a_device(3), "GPU-of-another-machine"
    jobs = (
        a_public_job("alice", "17.0", state="running", devices=(device.uuid, other)),
        a_public_job("alice", "17", tasks=4, num_gpus=1),
        a_public_job("bob", "2", since=None, unattended=True),
        a_public_job("carol", "1"),
    )
    shown = page_of(a_scene(device, jobs=jobs), width=100)
    lines = texts(shown)

    assert lines[lines.index("JOB   alice/17.0 running 1m, GPU 3: python train.py") + 1 :][:3] == [
        "      alice/17 4 waiting 1m, 1 GPU: python train.py",
        "      bob/2 waiting n/a, 2 GPUs: python train.py",
        "      and 1 more: gpuguard jobs --all, or the key J",
    ]
    assert "yellow" in colours(shown, "waiting"), "no process of bob waits for it"
    only_bob = texts(page_of(a_scene(device, jobs=jobs), width=100, users=frozenset({"bob"})))
    assert [line for line in only_bob if line.startswith("JOB")] == ["JOB   bob/2 waiting n/a, 2 GPUs: python train.py"]
    assert not any("JOB" in line or "more" in line for line in texts(page_of(a_scene(device))))


def test_gaps_are_named():
    snapshot = a_snapshot(a_device(0), gaps=(Gap(None, "claims", "no directory"),))

    assert texts(page_of(a_scene(snapshot=snapshot)))[-1] == "not known: claims: no directory"


def test_the_title_says_which_machine_it_is_and_how_old_the_daemons_look_is():
    scene = a_scene(a_device(), age=4.0)

    assert title(scene, ScreenView(), 120, 3.0).text.startswith("node1  1 GPU H100 80GB HBM3, driver 550.54.15, ")
    assert "seen by the daemon 7s ago" in title(scene, ScreenView(), 120, 3.0).text
    recorded = replace(scene, snapshot=replace(scene.snapshot, recorded=True))
    assert title(recorded, ScreenView(), 120).text.startswith("RECORDED node1")


def test_a_wide_title_says_who_looks_and_warns_of_root():
    scene = a_scene(a_device(), viewer="root")

    assert title(scene, ScreenView(), 120).text.startswith("root@node1  1 GPU")
    assert ("root@", "yellow") in title(scene, ScreenView(), 120).parts
    assert title(scene, ScreenView(), 119).text.startswith("node1  1 GPU")


EVIL = st.text(st.characters(), max_size=40)


@settings(max_examples=60)
@given(
    name=EVIL, user=EVIL, note=EVIL, words=st.lists(EVIL, max_size=3),
    width=st.integers(20, 250), height=st.integers(5, 80), mode=st.sampled_from(MODES),
    tree=st.booleans(), ascii_only=st.booleans(),
)  # fmt: skip
def test_whatever_strangers_write_each_line_has_its_width_and_moves_no_cursor(
    name, user, note, words, width, height, mode, tree, ascii_only
):
    process = a_process(10, user=user, command=tuple(words), container=name, start_time=9_000.0)
    device = a_device(0, name=name, processes=(process,), problems=(note,) if note else ())
    ancestors = {10: Ancestor(5, user, tuple(words)), 5: Ancestor(1, note, None)}
    waiting = ((a_ticket(user, 0.0, 1, name), note),)
    more = {"waiting": waiting, "jobs": (a_public_job(user, name, what=note),), "ancestors": ancestors}
    scene = a_scene(device, claims=[a_claim_record(device, user=user, note=note)], **more)
    lines = [
        title(scene, ScreenView(text=note), width),
        *page_of(scene, width, height, mode=mode, tree=tree, ascii_only=ascii_only),
    ]

    for line in lines[1:]:
        whole = "".join(text for text, _ in line.parts)
        assert display_width(whole) == width or whole.startswith("no processes")
    assert all(text.isprintable() for line in lines for text, _ in line.parts)


def test_ascii_mode_has_no_other_characters():
    device = a_device(processes=TWO, memory_used=11 * GIB, utilization=50.0)
    for mode in MODES:
        shown = page_of(a_scene(device), width=150, height=60, mode=mode, ascii_only=True, looks=4)
        assert all(line.replace("…", "").isascii() for line in texts(shown))


def test_the_history_is_bounded_and_forgets_devices_that_are_gone():
    history = History()
    for _ in range(KEPT + 50):
        history.add(a_scene(a_device(0, processes=TWO)))
    history.add(a_scene(a_device(1)))

    assert [len(ring) for ring in history.devices[a_device(1).uuid].values()] == [1, 1, 1, 1]
    assert list(history.devices) == [a_device(1).uuid]
    assert len(history.processes[10, 9_000.0]) == KEPT


@pytest.mark.terminal
def test_the_picture_is_what_top_shows(tmp_path: Path) -> None:
    now = picture.comparable("top", picture.taken("top", tmp_path))

    assert now == picture.comparable("top", picture.written("top")), "run: python tests/support/picture.py --write"


def test_what_is_compared_still_has_the_states_and_the_columns() -> None:
    kept = picture.comparable("top", picture.written("top"))

    assert {"free", "used without a claim", "claimed, no process yet", "no claim"} <= set(
        re.findall(r"free|used without a claim|claimed, no process yet|no claim", kept)
    )
    assert kept.count("BAR") >= 8
