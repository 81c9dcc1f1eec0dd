"""What makes a device eligible, what the refused hear, and how requests and selectors are read."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product

import pytest
from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_partition, a_process, a_snapshot, a_uuid

from gpuguard import model
from gpuguard.claims.unlock import computing_text
from gpuguard.device_state import device_title
from gpuguard.eligibility import Reason, Refusal, is_model, shown, used_by
from gpuguard.errors import InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.model import Gap
from gpuguard.queue.tickets import as_json, as_request
from gpuguard.request import SLOTS, Request, fields_needed, fields_to_verify, resolve
from gpuguard.select import choose, claimed_by

INSTANCE = a_mig_instance(a_device(mig_mode=True))
BOB = a_process(pid=812, user="bob", uid=1002, memory_used=41 * GIB, start_time=10_000.0 - 3 * 3600 - 12 * 60)


def chosen(snapshot, request=None, taken=None):
    """The indices of the winners."""
    return [device.index for device in choose(snapshot, request or Request(), taken or {}).devices]


def reasons(device, request=None, taken=None, **snapshot_fields):
    """The texts against the one device of a machine."""
    choice = choose(a_snapshot(device, **snapshot_fields), request or Request(), taken or {})
    return [reason.text for refusal in choice.refused for reason in refusal.reasons]


BOB_USES = "used by bob (pid 812, python train.py, 3h12m)"
A_DESKTOP = {"processes": (a_process(kind="graphics", memory_used=3 * GIB),), "memory_used": 3 * GIB}
NEVER = (Gap(a_uuid(0), "memory_total", "Not Supported"), Gap(a_uuid(0), "memory_used", "Not Supported"))
NO_LIST = (Gap(a_uuid(0), "processes", "Not Supported"),)
UNLISTED = a_device(memory_used=600 * MIB, processes=None)


@pytest.mark.parametrize(
    ("device", "request_fields", "said"),
    [
        # what passes by itself
        (a_device(processes=(BOB,), memory_used=41 * GIB), {}, Reason(f"41.0GiB {BOB_USES}")),
        (a_device(memory_used=None, processes=(BOB,)), {}, Reason(BOB_USES)),
        (
            a_device(processes=(BOB, a_process()), memory_used=50 * GIB),
            {"max_processes": 1},
            Reason(f"50.0GiB {BOB_USES}, alice (pid 4711, python train.py, 2h30m) (2 processes)"),
        ),
        (
            a_device(processes=(BOB, a_process(), a_process(9)), memory_used=60 * GIB),
            {},
            Reason(
                "60.0GiB used by bob (pid 812, python train.py, 3h12m), alice (pid 9, python train.py, 2h30m) "
                "and 1 more"
            ),
        ),
        (
            a_device(**A_DESKTOP),
            {},
            Reason(
                "3.0GiB used by alice (pid 4711, python train.py, 2h30m), more than the 2.0GiB that a desktop may "
                "hold: --tolerance 4GiB starts beside it"
            ),
        ),
        (
            a_device(processes_plausible=False, processes=(BOB,)),
            {},
            Reason("its process list is not plausible, so who uses it is unknown"),
        ),
        (
            a_device(memory_used=None, processes=None),
            {},
            Reason("neither its processes nor its memory in use are known, so nothing says that it is free"),
        ),
        (a_device(problems=("unresponsive",)), {}, Reason("unresponsive")),
        (
            a_device(compute_mode="exclusive_process", processes=(BOB,)),
            {"max_processes": 3},
            Reason("in exclusive-process mode and taken by bob (pid 812, python train.py, 3h12m)"),
        ),
        (
            a_device(memory_used=20 * GIB),
            {"min_free_fraction": 0.8, "tolerance": 20 * GIB},
            Reason("only 75.0% of its memory is free, less than 80.0%"),
        ),
        (a_device(memory_used=None), {"min_free_fraction": 0.0}, Reason("its free memory is unknown")),
        (a_device(memory_total=None), {"min_free_fraction": 0.5}, Reason("its memory is unknown")),
        # what passes by itself, or with another option
        (
            a_device(memory_used=600 * MIB),
            {},
            Reason(
                "600MiB in use, by no process that is visible; an idle GPU may hold 512MiB (--tolerance)",
                option="--tolerance",
            ),
        ),
        (UNLISTED, {}, Reason("600MiB in use; an idle GPU may hold 512MiB (--tolerance)", option="--tolerance")),
        (
            a_device(memory_used=3 * GIB),
            {"tolerance": 2 * GIB},
            Reason(
                "3.0GiB in use, by no process that is visible; an idle GPU may hold 2.0GiB (--tolerance)",
                option="--tolerance",
            ),
        ),
        (a_device(memory_used=300 * MIB), {"min_free": 80 * GIB}, Reason("only 79.7GiB free", option="--min-free")),
        (a_device(memory_used=None), {"min_free": 1}, Reason("its free memory is unknown", option="--min-free")),
        (
            a_device(utilization=11.0),
            {"max_util": 10},
            Reason("utilization is 11%, more than 10% (--max-util)", option="--max-util"),
        ),
        (a_device(utilization=None), {"max_util": 100}, Reason("its utilization is unknown", option="--max-util")),
        (
            a_device(memory_utilization=51.0),
            {"max_memory_util": 50},
            Reason("memory utilization is 51%, more than 50% (--max-memory-util)", option="--max-memory-util"),
        ),
        (
            a_device(temperature=91.0),
            {"max_temperature": 90.5},
            Reason("temperature is 91C, more than 90.5C (--max-temperature)", option="--max-temperature"),
        ),
        (
            a_device(temperature=None),
            {"max_temperature": 90},
            Reason("its temperature is unknown", option="--max-temperature"),
        ),
        (
            a_device(processes=None),
            {"max_processes": 1},
            Reason("its list of processes is unknown", option="--max-processes"),
        ),
        (
            a_device(processes=None),
            {"mine_as_free": frozenset({1})},
            Reason("its list of processes is unknown", option="--mine-as-free"),
        ),
        # what only an administrator changes
        (a_device(problems=("lost",)), {}, Reason("lost", True)),
        (
            a_device(compute_mode="prohibited"),
            {},
            Reason(
                "its compute mode is prohibited (an administrator permits work: nvidia-smi -c DEFAULT)", permanent=True
            ),
        ),
        (
            a_device(mig_mode=True),
            {},
            Reason("MIG mode is on, but it has no MIG instance (an administrator makes them: nvidia-smi mig)", True),
        ),
        # what only another request changes
        (
            INSTANCE,
            {"num_gpus": 2},
            Reason("a MIG instance: one process can use only one (--allow-mig-set)", True, "--allow-mig-set"),
        ),
        (a_device(), {"mig": "3g.40gb"}, Reason("not divided into instances", True, "--mig")),
        (INSTANCE, {"mig": "1g.10gb"}, Reason("its profile is 3g.40gb", True, "--mig")),
        (replace(INSTANCE, mig_profile=None), {"mig": "3g.40gb"}, Reason("its profile is unknown", True, "--mig")),
        (a_device(), {"models": ("A100*",)}, Reason("its model is NVIDIA H100 80GB HBM3", True, "--model")),
        (a_device(name=None), {"models": ("*",)}, Reason("its model is unknown", True, "--model")),
        (a_device(), {"vendor": "amd"}, Reason("its vendor is NVIDIA", True, "--vendor")),
        (a_device(memory_total=None), {"min_total": 1}, Reason("its memory is unknown", True, "--min-total")),
        (a_device(), {"min_total": 81 * GIB}, Reason("has 80.0GiB of memory in all", True, "--min-total")),
        (
            a_device(),
            {"min_free": 81 * GIB},
            Reason("has 80.0GiB of memory even when it is empty", True, "--min-free"),
        ),
        (a_device(), {"exclude": ("0",)}, Reason("in --exclude 0", True, "--exclude")),
        (a_device(), {"within": ()}, Reason("outside the GPUs that are allowed here", True, "outer limit")),
        (
            a_device(),
            {"within": (), "within_reason": "Slurm job 7 was given no GPU"},
            Reason("Slurm job 7 was given no GPU", True, "outer limit"),
        ),
    ],
)
def test_a_refused_device_says_why_whether_waiting_helps_and_which_option_asks_for_it(device, request_fields, said):
    choice = choose(a_snapshot(device), Request(**request_fields), {})

    assert choice.refused == (Refusal(device, (said,)),)


@pytest.mark.parametrize(
    ("device", "request_fields", "gaps", "said"),
    [
        (
            a_device(memory_used=None, processes=None),
            {"tolerance": GIB},
            (*NEVER, *NO_LIST),
            Reason("neither its processes nor its memory in use are known, so nothing says that it is free", True),
        ),
        (
            a_device(memory_total=None),
            {"min_total": 1},
            NEVER,
            Reason("its memory is unknown (Not Supported)", True, "--min-total"),
        ),
        (
            a_device(memory_total=None, memory_free=None),
            {"min_free_fraction": 0.5},
            NEVER,
            Reason("its memory is unknown (Not Supported)", True),
        ),
        (
            UNLISTED,
            {},
            NO_LIST,
            Reason(
                "600MiB in use, the driver gives no list of processes; an idle GPU may hold 512MiB (--tolerance)",
                option="--tolerance",
            ),
        ),
        (
            a_device(utilization=None),
            {"max_util": 5.0},
            (Gap(a_uuid(0), "utilization", "Timeout"),),
            Reason("its utilization is unknown (Timeout)", option="--max-util"),
        ),
        (
            a_device(problems=("reset required",)),
            {},
            (Gap(a_uuid(0), "problems", "Unknown Error"), Gap(a_uuid(1), "problems", "of another device")),
            Reason("reset required (Unknown Error)", True),
        ),
    ],
)
def test_why_the_driver_does_not_tell_is_passed_on_and_what_it_never_tells_is_not_waited_for(
    device, request_fields, gaps, said
):
    choice = choose(a_snapshot(device, gaps=gaps), Request(**request_fields), {})

    assert choice.refused == (Refusal(device, (said,)),)


@pytest.mark.parametrize(
    ("option", "field"), [("--devices", "devices"), ("--exclude", "exclude"), ("--prefer", "prefer")]
)
def test_a_selector_that_names_no_device_is_refused_by_the_option_that_has_it(option, field):
    with pytest.raises(InvalidRequest, match=f"{option} 7 names no GPU"):
        choose(a_snapshot(), Request(**{field: ("7",)}), {})


def test_a_refused_device_carries_all_its_reasons():
    device = a_device(problems=("reset required",), processes=(BOB,), utilization=99.0)

    assert len(reasons(device, Request(max_util=10.0, models=("A100",)), {a_uuid(0): "claimed by alice"})) == 5


@pytest.mark.parametrize(
    ("device", "request_fields"),
    [
        (a_device(memory_used=500 * MIB), {}),
        (a_device(memory_used=0, memory_reserved=8 * GIB), {"min_free_fraction": 1.0}),  # all that an empty one has
        (a_device(processes=None), {}),
        (a_device(memory_used=None), {}),
        (a_device(problems=None), {}),
        (a_device(processes_plausible=False), {}),
        (a_device(processes=(a_process(kind="graphics", memory_used=200 * MIB),), memory_used=200 * MIB), {}),
        (a_device(processes=(a_process(kind="graphics", memory_used=GIB),), memory_used=GIB), {}),  # a big desktop
        (
            a_device(
                processes=(a_process(kind="graphics", memory_used=300 * MIB),),
                processes_plausible=False,
                memory_used=300 * MIB,
            ),
            {},
        ),
        (
            a_device(processes=(a_process(kind="graphics", memory_used=3 * GIB),), memory_used=3 * GIB),
            {"tolerance": 4 * GIB},
        ),
        (a_device(processes=(a_process(kind="compute+graphics", memory_used=25 * MIB),), memory_used=25 * MIB), {}),
        (a_device(processes=(BOB,), memory_used=41 * GIB), {"max_processes": 1}),
        (a_device(processes=(BOB,), memory_used=41 * GIB), {"mine_as_free": frozenset({1002})}),
        (
            a_device(processes=(a_process(memory_used=None),), memory_used=12 * GIB),  # which may hold all of it
            {"mine_as_free": frozenset({1001})},
        ),
        (a_device(memory_used=GIB), {"tolerance": GIB}),
        (a_device(utilization=10.0), {"max_util": 10.0}),
        (INSTANCE, {"mig": "3G.40GB"}),
    ],
)
def test_a_device_that_satisfies_everything_is_eligible(device, request_fields):
    assert reasons(device, Request(**request_fields)) == []


@pytest.mark.parametrize("kind", ["compute", "mps", "compute+graphics"])
def test_a_process_of_others_makes_a_device_busy(kind):
    assert reasons(a_device(processes=(a_process(kind=kind),), memory_used=None))


@pytest.mark.parametrize(
    ("unknown", "text"),
    [
        ({}, "bob (pid 812, python train.py, 3h12m)"),
        ({"command": None}, "bob (pid 812, 3h12m)"),
        ({"start_time": None}, "bob (pid 812, python train.py)"),
        ({"user": None}, "uid 1002 (pid 812, python train.py, 3h12m)"),
        ({"user": None, "uid": None}, "pid 812, python train.py, 3h12m"),
        ({"user": None, "uid": None, "command": None, "start_time": None}, "pid 812"),
    ],
)
def test_what_is_not_known_of_a_process_is_left_out_of_the_reason(unknown, text):
    assert used_by([replace(BOB, **unknown)], clock=10_000.0) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "pid 812 (python train.py) computes for 3h12m with 41.0GiB"),
        ({"memory_used": None}, "pid 812 (python train.py) computes for 3h12m"),
        ({"command": None}, "pid 812 computes for 3h12m with 41.0GiB"),
        ({"command": ("x" * 60,)}, f"pid 812 ({'x' * 60}) computes for 3h12m with 41.0GiB"),
        ({"command": ("x" * 61,)}, f"pid 812 ({'x' * 60}...) computes for 3h12m with 41.0GiB"),
        ({"pid": 2**22 + 1, "start_time": None}, "pid 4194305 (python train.py) computes with 41.0GiB"),
    ],
)
def test_a_process_that_computes_under_a_claim_is_named_with_what_it_runs_for_how_long_and_its_memory(fields, text):
    assert computing_text(replace(BOB, **fields), clock=10_000.0) == text


def test_a_process_of_nobody_known_is_not_mine():
    assert reasons(a_device(processes=(a_process(uid=None),)), Request(mine_as_free=frozenset({1001})))


def test_memory_beyond_my_own_processes_still_counts():
    device = a_device(processes=(a_process(memory_used=10 * GIB),), memory_used=12 * GIB)

    assert "2.0GiB in use" in reasons(device, Request(mine_as_free=frozenset({1001})))[0]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "claimed by bob, 2h ago: python train.py"),
        ({"since": None}, "claimed by bob: python train.py"),
        ({"note": "run `sudo sh` first"}, 'claimed by bob, 2h ago: "run `sudo sh` first"'),
    ],
)
def test_a_claimed_device_is_refused_before_its_memory_shows_up(fields, text):
    taken = claimed_by([a_claim_record(user="bob", **fields)], now=1_700_000_000.0 + 3600)

    assert reasons(a_device(), taken=taken) == [text]


def test_an_instance_is_called_by_its_gpu_its_number_and_its_profile():
    assert device_title(a_device(3)) == "GPU 3"
    assert device_title(INSTANCE) == "MIG instance 0.1 (3g.40gb)"
    assert device_title(replace(INSTANCE, mig_profile=None, gpu_instance_id=None)) == "MIG instance 0.?"


def test_what_amd_divides_a_gpu_into_is_called_a_partition():
    gpu = a_device(mig_mode=True, vendor="amd")

    assert device_title(a_partition(gpu, 3)) == "partition 0.3 (cpx)"
    (refused,) = choose(a_snapshot(gpu, a_partition(gpu, 0), a_partition(gpu, 1)), Request(), {}).refused
    assert [reason.text for reason in refused.reasons] == ["divided into 2 partitions: jobs run on those"]


ASLEEP = a_device(
    asleep=True, memory_used=0, memory_free=80 * GIB, memory_reserved=None, temperature=None, processes=None
)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"min_free": 80 * GIB},
        {"min_free_fraction": 0.9},
        {"max_temperature": 60.0},
        {"share": True, "memory": 80 * GIB},
        {"max_processes": 0},
    ],
)
def test_a_gpu_that_sleeps_is_free_although_its_driver_does_not_tell_its_processes_and_its_heat(asked):
    gaps = (Gap(ASLEEP.uuid, "processes", "the GPU sleeps"),)

    assert choose(a_snapshot(replace(ASLEEP, processes=()), gaps=gaps), Request(**asked), {}).devices
    if "share" not in asked:
        assert choose(a_snapshot(ASLEEP, gaps=gaps), Request(**asked), {}).devices
    awake = replace(ASLEEP, asleep=False, memory_used=None, memory_free=None)
    assert reasons(awake, Request(**asked), gaps=gaps)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (replace(ASLEEP, processes=(BOB,)), "used by bob"),
        (replace(ASLEEP, memory_used=9 * GIB), "9.0GiB in use"),
        (replace(ASLEEP, memory_total=None, memory_free=None), "its free memory is unknown"),
        (replace(ASLEEP, memory_total=8 * GIB), "has 8.0GiB of memory even when it is empty"),
    ],
)
def test_a_gpu_that_sleeps_is_refused_for_what_is_known_of_it(device, text):
    assert any(text in reason for reason in reasons(device, Request(min_free=9 * GIB)))


def test_a_gpu_that_sleeps_comes_after_one_that_is_known_to_be_empty():
    machine = a_snapshot(a_device(0), replace(ASLEEP, index=1, uuid=a_uuid(1), utilization=0.0, processes=()))

    assert [device.index for device in choose(machine, Request(), {}).eligible] == [0, 1]


OF_HOST = a_device(
    memory_shared_with_host=True, memory_total=120 * GIB, memory_free=30 * GIB, memory_used=0, memory_reserved=None
)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, None),
        ({"min_free": 20 * GIB}, None),
        ({"min_free": 40 * GIB}, "only 30.0GiB free"),
        ({"share": True, "memory": 20 * GIB}, None),
        ({"share": True, "memory": 40 * GIB}, "only 30.0GiB left"),
    ],
)
def test_of_the_hosts_memory_a_job_can_have_what_is_free(asked, text):
    said = reasons(OF_HOST, Request(**asked))

    assert said == [] if text is None else text in said[0]


def test_a_gpu_with_the_hosts_memory_is_busy_by_its_processes_and_not_by_the_use_of_the_host():
    assert reasons(replace(OF_HOST, processes=(BOB,), memory_used=41 * GIB))[0].startswith("41.0GiB used by bob")
    assert reasons(replace(OF_HOST, memory_used=None)) == []


@pytest.mark.parametrize("strategy", ["spread", "pack", "first"])
def test_a_gpu_with_memory_of_its_own_comes_first_unless_the_user_prefers_another(strategy):
    machine = a_snapshot(OF_HOST, a_device(1, memory_total=8 * GIB))
    order = [device.index for device in choose(machine, Request(strategy=strategy), {}).eligible]

    assert order == [1, 0]
    assert chosen(machine, Request(strategy=strategy, prefer=("0",))) == [0]


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [
        ("x" * 60, 60, "x" * 60),
        ("x" * 61, 60, "x" * 59 + "…"),
        ("x" * 9 + "\n", 10, "x" * 9 + "…"),  # it takes two letters to show it
        ("x" * 8 + "\n", 10, "x" * 8 + "\\n"),
    ],
)
def test_the_text_of_another_user_is_cut_to_its_width(text, width, cut):
    assert shown(text, width) == cut


def test_a_claim_that_has_ended_takes_nothing():
    assert claimed_by([a_claim_record(alive=False)], now=0) == {}


def test_hostile_text_in_a_command_cannot_steer_the_terminal():
    process = a_process(command=("\x1b[2J\u202egpj",), user="b\nob")
    claim = a_claim_record(note="\x1b]0;x\x07" * 99)

    texts = reasons(a_device(processes=(process,)), taken=claimed_by([claim], 1_700_000_000.0))
    assert all(text.isprintable() and len(text) < 200 for text in texts) and len(texts) == 2


def test_a_divided_gpu_gives_way_to_its_instances():
    gpu = a_device(0, mig_mode=True)
    machine = a_snapshot(gpu, a_mig_instance(gpu, 0), a_mig_instance(gpu, 1))
    choice = choose(machine, Request(), {})

    assert choice.devices[0].parent_uuid == gpu.uuid
    assert [refusal.device for refusal in choice.refused] == [gpu]
    assert chosen(machine, Request(exclude=("0",))) == []
    assert choose(machine, Request(devices=("0.2",)), {}).devices == (machine.devices[2],)
    assert choose(machine, Request(), {gpu.uuid: "claimed whole"}).devices == ()


def test_selectors_are_indices_uuids_and_beginnings_of_uuids():
    machine = a_snapshot(*[a_device(i) for i in range(3)])

    assert resolve(("2", a_uuid(0), "gpu-00000001"), machine.devices) == (a_uuid(2), a_uuid(0), a_uuid(1))


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        (("0", a_uuid(0)), "as 0 and as GPU-0"),
        (("0", "0"), "twice"),
        (("9",), "--devices 9 names no GPU of this machine"),
        (("GPU-0",), "could be GPU-00000000"),
        (("GPU-",), "names no GPU"),
        (("-1",), "names no GPU"),
        (("9" * 5000,), "names no GPU"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_selector_that_is_not_clear_is_refused(selectors, message):
    with pytest.raises(InvalidRequest, match=message):
        resolve(selectors, a_snapshot(a_device(0), a_device(1)).devices)


def test_a_refused_selector_is_answered_with_the_names_that_there_are_also_of_mig_instances():
    parent = a_device(10)

    with pytest.raises(InvalidRequest) as caught:
        resolve(("10.7",), (a_device(0), parent, a_mig_instance(parent)))

    assert str(caught.value).splitlines()[1:] == [
        f"  0     {a_uuid(0)}", f"  10    {a_uuid(10)}", f"  10.1  {a_mig_instance(parent).uuid}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "glob", "fits"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100*", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 80GB HBM3", "*80GB*", True),
        ("NVIDIA RTX A1000", "A100", False),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", True),
        ("NVIDIA GeForce RTX 4090", "A*", False),
    ],
)
def test_a_model_is_meant_by_its_name_from_some_word_on(name, glob, fits):
    assert is_model(name, glob) is fits


GLOBS = ("", "*", "**", "?", "a*", "*a", "*b*", "a?b", "[ab]*", "*[!a]", "[a-c]?*", "*[]b]", "a[b", "*a*b*", "*[")


@pytest.mark.parametrize("glob", GLOBS)
def test_a_glob_is_what_it_is_everywhere_else(glob):
    texts = ["".join(letters) for length in range(1, 5) for letters in product("abd][", repeat=length)]

    assert [text for text in texts if is_model(text, glob)] == [text for text in texts if fnmatchcase(text, glob)]


def test_no_glob_of_a_ticket_is_compiled_and_there_are_not_many(monkeypatch):
    """Compiled, those of 50 tickets took 2.6 s of everybody who stands in line."""
    tickets = [{"models": [f"{number}{place}{'*a?' * 150}" for place in range(16)]} for number in range(50)]
    with monkeypatch.context() as patch:
        patch.setattr(re, "compile", None)
        for ticket in tickets:
            assert not any(is_model("NVIDIA H100 80GB HBM3", glob) for glob in as_request(ticket).models)

    with pytest.raises(ValueError, match="too many models"):
        as_request({"models": ["A100"] * 17})
    with pytest.raises(InvalidRequest, match="at most 16 names"):
        as_json(Request(models=("A100",) * 17))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpus": 0},
        {"num_gpus": -1},
        {"num_gpus": 3, "max_gpus": 2},
        {"max_processes": -1},
        {"devices": ()},
        {"strategy": "best"},
        {"min_free_fraction": 1.01},
        {"min_free_fraction": float("nan")},
        {"mig": "half"},
        {"share": True},
        {"memory": GIB},
        {"share": True, "memory": 0},
        {"share": True, "memory": GIB, "slots": 0},
        {"share": True, "memory": GIB, "slots": 9},
        {"slots": 2},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InvalidRequest):
        Request(**fields)


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({}, set()),
        ({"min_free": GIB}, set()),
        ({"max_util": 10.0}, {model.UTILIZATION}),
        ({"models": ("A",)}, {model.MODEL}),
        ({"max_temperature": 80.0}, {model.THERMAL}),
        ({"num_gpus": 2}, {model.TOPOLOGY, model.NVLINK, model.MODEL}),
        ({"within": ("MIG-1",)}, {model.HEALTH}),
    ],
)
def test_only_what_the_request_needs_is_read(fields, groups):
    assert fields_needed(Request(**fields)) == model.SELECT_FIELDS | groups


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"max_processes": 2}, {model.UTILIZATION}),
        ({"mine_as_free": frozenset({1})}, {model.UTILIZATION, model.PROCESS_DETAILS}),
        ({"strategy": "pack"}, {model.MODEL, model.HEALTH}),
    ],
)
def test_the_processes_of_all_devices_are_read_where_they_decide(fields, groups):
    assert fields_needed(Request(**fields)) == {model.MEMORY, model.PROCESSES} | groups


def test_the_winners_are_read_again_with_their_health_and_processes_but_not_their_connections():
    assert fields_to_verify(Request(num_gpus=2)) == {model.MEMORY, model.PROCESSES, model.HEALTH, model.MODEL}


def test_a_bound_on_those_who_share_is_told_where_it_is_one():
    assert Request(share=True, memory=GIB, slots=2).most_sharers == 2
    assert Request(share=True, memory=GIB, slots=SLOTS).most_sharers is None
    assert Request().most_sharers is None


HIDDEN = sentence("drm.hidden", "the processes of other users cannot be seen")


@pytest.mark.parametrize(("named", "refused"), [(None, True), (("0",), False)], ids=["by number", "by name"])
def test_a_device_whose_use_this_user_may_not_see_is_given_by_name_alone(
    named: tuple[str, ...] | None, refused: bool
) -> None:
    unseen = a_device(memory_used=None, processes=None)
    gaps = tuple(Gap(unseen.uuid, field, HIDDEN) for field in ("processes", "memory_used", "memory_free"))
    choice = choose(a_snapshot(unseen, gaps=gaps), Request(devices=named), {})

    assert [reason.text for refusal in choice.refused for reason in refusal.reasons] == [
        "unclaimed use cannot be seen: the processes of other users cannot be seen; --devices 0 takes it nevertheless"
    ] * refused
    assert all(reason.permanent for refusal in choice.refused for reason in refusal.reasons)


def test_a_device_whose_claim_and_use_are_seen_by_its_memory_needs_no_name() -> None:
    idle = a_device(processes=None)
    gaps = (Gap(idle.uuid, "processes", HIDDEN),)

    assert chosen(a_snapshot(idle, gaps=gaps)) == [0]
    assert chosen(a_snapshot(replace(idle, memory_used=3 * GIB), gaps=gaps), Request(devices=("0",))) == []
