"""Choosing devices: which are eligible, which are best, and what the errors say."""

import itertools
import os
import re
from dataclasses import replace

import pytest
from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_partition, a_process, a_snapshot, a_uuid
from fake_nvml import NOT_SUPPORTED, FakeNvml
from hypothesis import given
from hypothesis import strategies as st
from nvml_child import gaps_of, sampled

from gpuguard.eligibility import UNSHARED, Reason, Refusal, Sharing
from gpuguard.errors import ImpossibleRequest, NotEnoughGpus
from gpuguard.model import Gap
from gpuguard.queue.state import QueueFacts, fit
from gpuguard.request import ANY_MEMORY, Request, spelled
from gpuguard.select import (
    Choice,
    choose,
    claimed_by,
    instances_note,
    not_enough,
    possible,
    unread_devices,
    unread_vendor,
    waiting_error,
)
from gpuguard.units import parse_bytes

BOB = a_process(pid=812, user="bob", uid=1002, memory_used=41 * GIB, start_time=10_000.0 - 3 * 3600 - 12 * 60)


def chosen(snapshot, request=None, taken=None):
    """The indices of the winners."""
    return [device.index for device in choose(snapshot, request or Request(), taken or {}).devices]


def in_order(*devices, request=None, sharing=None):
    """Indices, the best first.  Of equals that is the highest."""
    return [device.index for device in choose(a_snapshot(*devices), request or Request(), {}, sharing).eligible]


def error(snapshot, request):
    return not_enough(snapshot, request, choose(snapshot, request, {}))


def said(request, *devices):
    return str(error(a_snapshot(*devices), request))


ANY = Request(max_processes=3, max_util=100.0)
TOLERANCE = Request().tolerance
SMALL = {"memory_free": GIB, "memory_total": None}
CLEAN = {"retired_pages": 0, "remapped_rows": 0, "ecc_uncorrected_aggregate": 0, "ecc_uncorrected_volatile": 0}


def mib_free(*free):
    return [{"processes": (BOB,), "memory_used": 70 * GIB, "memory_free": size * MIB} for size in free]


@pytest.mark.parametrize(
    ("request_", "devices", "order"),
    [
        pytest.param(ANY, mib_free(20_000, 70_000, 50_000), [1, 2, 0], id="most free memory"),
        pytest.param(ANY, mib_free(1024, 1023), [0, 1], id="free memory in steps of 512 MiB"),
        pytest.param(ANY, mib_free(512, 511), [0, 1], id="free memory in steps of 512 MiB again"),
        pytest.param(ANY, mib_free(1023, 512), [1, 0], id="as much free memory"),
        pytest.param(
            Request(prefer=("0",)), [{"memory_used": None, "memory_free": None}, {}, {}], [2, 1, 0], id="unknown memory"
        ),
        pytest.param(None, [{}, {"utilization": None}], [0, 1], id="unknown utilization"),
        *(
            pytest.param(None, [{"utilization": low}, {"utilization": high}], order, id=f"utilization {low} {high}")
            for low, high, order in ((4.0, 5.0, [0, 1]), (0.0, 4.0, [1, 0]), (9.0, 10.0, [0, 1]))
        ),
        *(
            pytest.param(None, [{"temperature": cool}, {"temperature": hot}], order, id=f"temperature {cool} {hot}")
            for cool, hot, order in ((44.0, 45.0, [0, 1]), (40.0, 44.0, [1, 0]), (49.0, 50.0, [0, 1]))
        ),
        pytest.param(
            ANY,
            [{"memory_total": 24 * GIB}, {"processes": (BOB,), "memory_used": GIB}],
            [0, 1],
            id="idle first",
        ),
        pytest.param(
            ANY,
            [{"memory_used": TOLERANCE, **SMALL}, {"memory_used": TOLERANCE + 1, **SMALL}],
            [0, 1],
            id="what an idle GPU may hold",
        ),
        pytest.param(
            ANY, [{"memory_used": 0}, {"memory_used": TOLERANCE, "memory_free": 10 * GIB}], [1, 0], id="empty and idle"
        ),
        pytest.param(
            None, [{}, {}, {"temperature": 70.0}, {"remapped_rows": 1}], [1, 0, 2, 3], id="cooler, then the index"
        ),
        pytest.param(None, [CLEAN, {**CLEAN, "retired_pages": None}], [0, 1], id="unknown health marks"),
        pytest.param(None, [CLEAN, {**CLEAN, "retired_pages": 1}], [0, 1], id="health marks"),
        pytest.param(Request(prefer=("1", a_uuid(3), "0")), [{}] * 4, [1, 3, 0, 2], id="preference"),
    ],
)
def test_the_best_device_comes_first(request_, devices, order):
    assert in_order(*(a_device(i, **fields) for i, fields in enumerate(devices)), request=request_) == order


BIG_AND_SMALL = [{}, {"memory_total": 24 * GIB}]
WINNERS = {
    "spread takes the emptiest": (BIG_AND_SMALL, Request(strategy="spread"), [0]),
    "pack takes the fullest": (BIG_AND_SMALL, Request(strategy="pack"), [1]),
    "pack takes the fullest that fits": (BIG_AND_SMALL, Request(strategy="pack", min_free=40 * GIB), [0]),
    "pack breaks into the NUMA node that is broken already": (
        [{"numa_node": 0, "processes": (BOB,)}, {"numa_node": 0}, {"numa_node": 1}, {"numa_node": 1}],
        Request(strategy="pack"),
        [1],
    ),
    "devices of unknown NUMA nodes are not taken to be on one": (
        [{"numa_node": node} for node in (1, 1, None, None)], Request(2), [0, 1]
    ),
    "first takes the lowest indices": ([{}, {"processes": (BOB,)}, {}, {}], Request(2, strategy="first"), [0, 2]),
    "in the order of their indices": ([{}] * 5, Request(2, prefer=("3", "1")), [1, 3]),
    "at most as many as are wanted": ([{}] * 5, Request(2, max_gpus=4), [1, 2, 3, 4]),
    "as many as there are": ([{}] * 5, Request(2, max_gpus=9), [0, 1, 2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize(("devices", "request_", "winners"), WINNERS.values(), ids=WINNERS)
def test_the_winners_are_those_of_the_strategy(devices, request_, winners):
    assert chosen(a_snapshot(*(a_device(i, **fields) for i, fields in enumerate(devices))), request_) == winners


def test_several_devices_are_whole_gpus_or_instances_but_never_both():
    gpu = a_device(0, mig_mode=True)
    instances = [a_mig_instance(gpu, number) for number in range(3)]
    machine = a_snapshot(gpu, *instances, a_device(1), a_device(2))

    assert chosen(machine, Request(2, allow_mig_set=True)) == [1, 2]
    assert choose(machine, Request(3, allow_mig_set=True), {}).devices == tuple(instances)
    assert chosen(machine, Request(4, allow_mig_set=True)) == []
    never = error(machine, Request(4, allow_mig_set=True))
    assert isinstance(never, ImpossibleRequest)
    assert "wanted 4 GPUs, but only 3 exist that one job can use together.\n" in str(never)
    assert "2 whole GPUs and 3 MIG instances: one job cannot use both kinds" in str(never)


def test_a_job_of_several_gpus_gets_partitions_of_amd_which_one_process_can_use_together():
    gpu = a_device(0, mig_mode=True, vendor="amd")
    partitions = [a_partition(gpu, number) for number in range(3)]
    machine = a_snapshot(gpu, *partitions, a_device(1, vendor="amd"))

    assert choose(machine, Request(3), {}).devices == tuple(partitions)
    assert choose(machine, Request(3, mig="cpx"), {}).devices == tuple(partitions)
    assert chosen(machine, Request(2, mig="dpx")) == []
    assert instances_note(partitions, Request(3)) is None
    assert "1 whole GPU and 3 partitions: one job cannot use both kinds" in said(Request(4), *machine.devices)


@pytest.mark.parametrize("asked", [{}, {"devices": ("0",)}, {"min_free": GIB}, {"max_gpus": 3}])
def test_a_job_of_two_gpus_gets_no_instances_which_one_process_cannot_use_together(asked):
    gpu = a_device(0, mig_mode=True)
    instances = [a_mig_instance(gpu, number, gpu_instance_id=number) for number in range(3)]
    machine = a_snapshot(gpu, *instances, a_device(1))
    never = error(machine, Request(2, **asked))

    assert chosen(machine, Request(2, **asked)) == []
    assert isinstance(never, ImpossibleRequest) and never.available == 1
    assert "Ask for 1, or " in str(never)
    assert "add --allow-mig-set if a launcher starts one process for each instance." in str(never)


@pytest.mark.parametrize(
    "asked",
    [{"mig": "3g.40gb"}, {"allow_mig_set": True}, {"devices": ("0.0", "0.1")}, {"devices": (a_uuid(16, "MIG"), "0.1")}],
)
def test_a_job_gets_several_instances_where_it_asks_for_them(asked):
    gpu = a_device(0, mig_mode=True)
    instances = [a_mig_instance(gpu, number, gpu_instance_id=number) for number in range(2)]

    assert choose(a_snapshot(gpu, *instances), Request(2, **asked), {}).devices == tuple(instances)


@pytest.mark.parametrize("strategy", ["spread", "pack", "first"])
def test_as_many_as_there_are_for_one_process_are_the_whole_gpus_or_one_instance(strategy):
    gpu = a_device(0, mig_mode=True)
    divided = gpu, a_mig_instance(gpu, 0), a_mig_instance(gpu, 1)
    some = Request(max_gpus=9, strategy=strategy)

    assert chosen(a_snapshot(*divided, a_device(1), a_device(2)), some) == [1, 2]
    assert len(choose(a_snapshot(*divided), some, {}).devices) == 1


@pytest.mark.parametrize("together", [False, True], ids=["one process", "a process for each"])
@pytest.mark.parametrize("wanted", [1, 2, 3])
@pytest.mark.parametrize("divided", [(), (0,), (1,), (0, 1)])
def test_the_plan_of_the_queue_is_about_the_devices_that_would_be_chosen(divided, wanted, together):
    """Decided twice, a request could wait for whole GPUs while it would be given instances."""
    gpus = [a_device(index, mig_mode=index in divided) for index in range(4)]
    usable = [gpu for gpu in gpus if not gpu.mig_mode]
    usable += [a_mig_instance(gpus[index], number) for index in divided for number in range(2)]
    for busy in itertools.product((False, True), repeat=len(usable)):
        devices = [replace(one, processes=(BOB,)) if hit else one for one, hit in zip(usable, busy, strict=True)]
        snapshot = a_snapshot(*(gpus[index] for index in divided), *devices)
        request = Request(wanted, allow_mig_set=together)
        planned, choice = fit(snapshot, request, QueueFacts(), {}), choose(snapshot, request, {})

        assert planned.open.issuperset(device.uuid for device in choice.devices)
        assert bool(choice.devices) == (len(planned.open) >= wanted)


@pytest.mark.parametrize(
    ("request_", "devices", "kind", "text"),
    [
        (Request(9), [a_device(i) for i in range(8)], ImpossibleRequest, "wanted 9 GPUs, but only 8 exist.\nAsk for 8"),
        (Request(2), [a_device(0), a_device(1, problems=("lost",))], ImpossibleRequest, "GPU 1: lost"),
        (Request(), [a_device(problems=("unresponsive",))], NotEnoughGpus, "unresponsive"),
        (Request(2), [a_device(problems=None)], NotEnoughGpus, "only 1 is free now"),
    ],
    ids=["too many", "a broken one is missing", "one that hangs may come back", "health that was not read"],
)
def test_only_what_waiting_cannot_change_is_impossible(request_, devices, kind, text):
    fault = error(a_snapshot(*devices), request_)

    assert (type(fault), text in str(fault)) == (kind, True)


DIVIDED = a_device(0, mig_mode=True)
PARTS = [a_mig_instance(DIVIDED, number) for number in range(3)]
TAKEN = a_device(0, processes=(BOB,), memory_used=41 * GIB)
TAKEN_BY_BOB = "41.0GiB used by bob (pid 812, python train.py, 3h12m)"
LOST = a_device(0, problems=("lost",))
A100 = [a_device(index, name="NVIDIA A100-SXM4-80GB") for index in range(4)]
AMD = [a_device(index, vendor="amd") for index in (2, 3)]
LIMITED = {"within": (a_uuid(0), a_uuid(1)), "within_reason": "CUDA_VISIBLE_DEVICES=0,1 allows only GPU 0,1"}

NOT_NOW = {
    "some are free": (Request(2), [TAKEN, a_device(1)], 1, "only 1 is free now", [f"GPU 0: {TAKEN_BY_BOB}"]),
    "none is free": (Request(1), [TAKEN], 0, "none is free now", [f"GPU 0: {TAKEN_BY_BOB}"]),
    "an outer limit": (
        Request(2, **LIMITED),
        [TAKEN, a_device(1), a_device(2)],
        1,
        "only 1 is free now",
        [LIMITED["within_reason"], f"GPU 0: {TAKEN_BY_BOB}"],
    ),
    "both kinds": (
        Request(3, allow_mig_set=True),
        [DIVIDED, PARTS[0], a_device(1), a_device(2), replace(TAKEN, index=3, uuid=a_uuid(3))],
        2,
        "only 2 are free now",
        [f"GPU 3: {TAKEN_BY_BOB}", "2 whole GPUs and 1 MIG instance: one job cannot use both kinds"],
    ),
    "of two vendors": (
        Request(2),
        [TAKEN, a_device(1), AMD[0]],
        1,
        "only 1 is free now",
        [f"GPU 0: {TAKEN_BY_BOB}", "1 GPU (AMD), 1 GPU (NVIDIA): one job cannot use GPUs of several vendors"],
    ),
}


@pytest.mark.parametrize(("request_", "devices", "available", "there", "reasons"), NOT_NOW.values(), ids=NOT_NOW)
def test_what_waiting_may_help_says_how_many_are_free_and_what_is_in_the_way(
    request_, devices, available, there, reasons
):
    fault = error(a_snapshot(*devices), request_)
    gpus = f"{request_.num_gpus} GPU{'s' * (request_.num_gpus > 1)}"

    assert str(fault).splitlines() == [
        f"wanted {gpus}, but {there}.", *(f"  {line}" for line in reasons),
        f"`gpuguard explain {spelled(request_)}` shows each GPU.",
    ]  # fmt: skip
    assert (type(fault), fault.wanted, fault.available) == (NotEnoughGpus, request_.num_gpus, available)


ONLY_ONE = "a MIG instance: one process can use only one (--allow-mig-set) (3 GPUs)"
NEVER = {
    "too few of a model": (
        Request(5, models=("A100*",)),
        [*A100, *(a_device(index) for index in range(4, 8))],
        4,
        "only 4 exist that can satisfy --model 'A100*'",
        ["its model is NVIDIA H100 80GB HBM3 (4 GPUs)"],
        "Ask for 4, or drop --model.",
    ),
    "no GPU at all": (Request(1), [], 0, "none exists", [], None),
    "broken": (Request(2), [LOST, a_device(1)], 1, "only 1 exists that can be used", ["GPU 0: lost"], "Ask for 1."),
    "the only one is broken": (Request(1), [LOST], 0, "none exists that can be used", ["GPU 0: lost"], None),
    "an outer limit": (
        Request(3, **LIMITED),
        [a_device(0), a_device(1), a_device(2)],
        2,
        "only 2 exist that can be used",
        [LIMITED["within_reason"]],
        "Ask for 2.",
    ),
    "excluded": (
        Request(1, exclude=("0",)),
        [a_device(0)],
        0,
        "none exists that can satisfy --exclude 0",
        [],
        "Drop --exclude.",
    ),
    "too small": (
        Request(1, min_total=100 * GIB),
        [a_device(index, memory_total=(10 + index) * GIB) for index in range(7)],
        0,
        "none exists that can satisfy --min-total 100.0GiB",
        [*(f"has 1{index}.0GiB of memory in all (1 GPU)" for index in range(5)), "and 2 more"],
        "Ask for at most 16.0GiB (--min-total).",
    ),
    "of unknown size": (
        Request(1, min_total=GIB),
        [a_device(memory_total=None)],
        0,
        "none exists that can satisfy --min-total 1.0GiB",
        ["its memory is unknown (1 GPU)"],
        "Drop --min-total.",
    ),
    "not that small and not that model": (
        Request(2, models=("L4",), min_free=999 * GIB),
        [a_device()],
        0,
        "none exists that can satisfy --min-free 999.0GiB --model 'L4'",
        ["its model is NVIDIA H100 80GB HBM3 (1 GPU)", "has 80.0GiB of memory even when it is empty (1 GPU)"],
        "Drop --min-free or --model.",
    ),
    "too large a share of another model": (
        Request(1, share=True, memory=999 * GIB, models=("L4",)),
        [a_device()],
        0,
        "none exists that can satisfy --model 'L4' --memory 999.0GiB",
        ["its model is NVIDIA H100 80GB HBM3 (1 GPU)", "has 80.0GiB of memory even when it is empty (1 GPU)"],
        "Drop --model, or ask for less --memory.",
    ),
    "other models": (
        Request(2, models=("H200",)),
        [*A100[:2], a_device(2, name="NVIDIA L4"), a_device(3, name="NVIDIA L4"), a_device(4, name="Tesla T4")],
        0,
        "none exists that can satisfy --model 'H200'",
        [
            "its model is NVIDIA A100-SXM4-80GB (2 GPUs)",
            "its model is NVIDIA L4 (2 GPUs)",
            "its model is Tesla T4 (1 GPU)",
        ],
        "Drop --model, or ask for --model 'NVIDIA A100-SXM4-80GB' or 'NVIDIA L4'.",
    ),
    "instances of which a process can use one": (
        Request(2),
        [DIVIDED, *PARTS],
        1,
        "one process can use only 1 here",
        ["GPU 0: divided into 3 MIG instances: jobs run on those", ONLY_ONE],
        "Ask for 1, or add --allow-mig-set if a launcher starts one process for each instance.",
    ),
    "too few such instances": (
        Request(4),
        [DIVIDED, *PARTS, a_device(1)],
        1,
        "one process can use only 1 here",
        ["GPU 0: divided into 3 MIG instances: jobs run on those", ONLY_ONE],
        "Ask for 1.",
    ),
    "too few instances": (
        Request(4, allow_mig_set=True),
        [DIVIDED, *PARTS],
        3,
        "only 3 exist that can be used",
        ["GPU 0: divided into 3 MIG instances: jobs run on those"],
        "Ask for 3.",
    ),
    "both kinds": (
        Request(4, allow_mig_set=True),
        [DIVIDED, *PARTS, a_device(1), a_device(2)],
        2,
        "only 3 exist that one job can use together",
        [
            "GPU 0: divided into 3 MIG instances: jobs run on those",
            "2 whole GPUs and 3 MIG instances: one job cannot use both kinds",
        ],
        "Ask for 3.",
    ),
    "two vendors": (
        Request(3),
        [a_device(0), a_device(1), *AMD],
        2,
        "only 2 exist that one job can use together",
        ["2 GPUs (NVIDIA), 2 GPUs (AMD): one job cannot use GPUs of several vendors"],
        "Ask for 2.",
    ),
    "other profiles": (
        Request(1, mig="7g.80gb"),
        [DIVIDED, PARTS[0], replace(PARTS[1], mig_profile=None)],
        0,
        "none exists that can satisfy --mig 7g.80gb",
        [
            "GPU 0: divided into 2 MIG instances: jobs run on those",
            "the profiles here: 3g.40gb (1), unknown (1)",
        ],
        "Drop --mig.",
    ),
    "no profile": (
        Request(1, mig="7g.80gb"),
        [a_device()],
        0,
        "none exists that can satisfy --mig 7g.80gb",
        ["no GPU here is divided into instances (an administrator does it: nvidia-smi mig, amd-smi set -C)"],
        "Drop --mig.",
    ),
}


@pytest.mark.parametrize(("request_", "devices", "available", "there", "reasons", "advice"), NEVER.values(), ids=NEVER)
def test_what_can_never_be_met_says_why_and_what_to_ask_for_instead(
    request_, devices, available, there, reasons, advice
):
    fault = error(replace(a_snapshot(), devices=tuple(devices)), request_)
    gpus = f"{request_.num_gpus} GPU{'s' * (request_.num_gpus > 1)}"

    assert str(fault).splitlines() == [
        f"wanted {gpus}, but {there}.", *(f"  {line}" for line in reasons), *([advice] if advice else []),
        f"`gpuguard explain {spelled(request_)}` shows each GPU.",
    ]  # fmt: skip
    assert (type(fault), fault.wanted, fault.available) == (ImpossibleRequest, request_.num_gpus, available)
    assert all(reason.permanent for refusal in fault.refused for reason in refusal.reasons)


SIZES = [23.76, 15.05, 79.64]  # GiB of three GPUs


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
@pytest.mark.parametrize(
    ("option", "ask"),
    [
        ("--min-free", lambda size: {"min_free": size}),
        ("--min-total", lambda size: {"min_total": size}),
        ("--memory", lambda size: {"share": True, "memory": size}),
    ],
)
def test_who_asks_for_too_much_memory_is_told_how_much_can_be_had_and_can_have_it(num_gpus, option, ask):
    devices = [a_device(i, memory_total=int(size * GIB), memory_reserved=0) for i, size in enumerate(SIZES)]
    advice = said(Request(num_gpus, **ask(500 * GIB)), *devices).splitlines()[-2]
    most = re.fullmatch(rf"Ask for at most (\S+) \({option}\)\.", advice)

    assert most and most[1] == ("79.6GiB", "23.7GiB", "15.0GiB")[num_gpus - 1]
    assert (
        len(possible(choose(a_snapshot(*devices), Request(num_gpus, **ask(parse_bytes(most[1]))), {})).devices)
        >= num_gpus
    )


def test_what_could_ever_do_is_all_but_what_only_an_administrator_or_another_request_changes():
    busy, small = a_device(1, processes=(BOB,), utilization=99.0), a_device(2, memory_total=GIB, processes=(BOB,))
    could = possible(choose(a_snapshot(LOST, busy, small, a_device(3)), Request(min_total=2 * GIB), {}))

    assert could == Choice(
        (busy, a_device(3)),
        (busy, a_device(3)),
        (
            Refusal(LOST, (Reason("lost", True),)),
            Refusal(small, (Reason("has 1.0GiB of memory in all", True, "--min-total"),)),
        ),
    )


def test_a_size_is_said_as_it_was_typed():
    assert "that can satisfy --min-free 300GB.\n" in said(Request(min_free=300 * 10**9), a_device())
    assert "explain -n 1 --min-free 300GB`" in said(Request(min_free=300 * 10**9), a_device())


@pytest.mark.parametrize(
    ("field", "request_", "text"),
    [
        ("memory_free", Request(min_free=GIB), "its free memory is unknown (not supported)"),
        ("memory_used", Request(share=True, memory=GIB), "its memory in use is unknown (not supported)"),
        ("utilization", Request(max_util=10.0), "its utilization is unknown (not supported)"),
        ("temperature", Request(max_temperature=70.0), "its temperature is unknown (not supported)"),
    ],
)
def test_what_the_driver_never_tells_is_not_waited_for_and_what_failed_once_is(field, request_, text):
    device = replace(a_device(), **{field: None})
    gaps = [(Gap(device.uuid, field, why),) for why in ("not supported", "the driver timed out")]
    never, later = (error(replace(a_snapshot(device), gaps=gap), request_) for gap in gaps)

    assert isinstance(never, ImpossibleRequest) and text in str(never)
    assert type(later) is NotEnoughGpus


def test_a_list_of_processes_that_the_driver_refuses_is_not_asked_for_again():
    device = a_device(processes=None)
    refused = Gap(device.uuid, "processes", "no permission")

    assert unread_devices(a_snapshot(device), {}) == {device.uuid}
    assert unread_devices(a_snapshot(device, gaps=(refused,)), {}) == set()


def test_a_request_that_waits_says_why_and_the_reasons_that_are_known():
    machine = a_snapshot(a_device(0, processes=(BOB,), memory_used=41 * GIB))
    missing = error(machine, Request(1))

    assert (str(waiting_error(2)), waiting_error(2).wanted, waiting_error(2).brief) == ("wanted 2 GPUs.", 2, "")
    assert waiting_error(2, "number 2 of 3").brief == "number 2 of 3"
    assert str(waiting_error(1, "number 2 of 3", missing)).splitlines() == [
        "wanted 1 GPU: number 2 of 3.", f"  GPU 0: {TAKEN_BY_BOB}", "`gpuguard explain -n 1` shows each GPU."
    ]  # fmt: skip
    assert waiting_error(1, "", missing).refused == missing.refused


def test_of_several_instances_one_process_uses_one():
    gpu = a_device(0, mig_mode=True)
    instances = [a_mig_instance(gpu, number) for number in range(2)]

    assert instances_note(instances, Request(2, mig="3g.40gb")) == (
        "these are 2 MIG instances, of which one process can use only one: start one process for each, or ask for one "
        "larger instance with --mig."
    )
    assert instances_note(instances, Request(2, allow_mig_set=True)) is None
    assert instances_note(instances[:1], Request()) is instances_note([a_device(1), a_device(2)], Request(2)) is None


def test_an_outer_limit_is_said_once():
    machine = a_snapshot(*[a_device(i) for i in range(8)])
    fault = error(machine, Request(within=(), within_reason="Slurm job 7 was given no GPU"))

    assert str(fault).count("Slurm job 7 was given no GPU") == 1 and isinstance(fault, ImpossibleRequest)


def test_what_a_claim_around_it_adds_to_a_request_is_not_spelled():
    assert spelled(Request(2, tolerance=ANY_MEMORY, mine_as_free=frozenset({1000}))) == "-n 2"
    assert spelled(Request(tolerance=GIB, mine_as_free=frozenset({1000}))) == "-n 1 --tolerance 1.0GiB --mine-as-free"


def some(values):
    return st.one_of(st.none(), values)


DEVICES = st.lists(
    st.builds(
        dict,
        memory_used=some(st.sampled_from([0, 3 * MIB, 600 * MIB, 10 * GIB, 79 * GIB])),
        utilization=some(st.sampled_from([0.0, 3.0, 50.0, 100.0])),
        processes=some(st.sampled_from([(), (a_process(),), (BOB, a_process())])),
        problems=some(st.sampled_from([(), ("lost",)])),
        temperature=some(st.sampled_from([30.0, 80.0])),
        numa_node=some(st.integers(0, 1)),
        processes_plausible=st.booleans(),
    ),
    min_size=1,
    max_size=7,
).map(lambda rows: [a_device(index, **row) for index, row in enumerate(rows)])
REQUESTS = st.builds(
    Request,
    num_gpus=st.integers(1, 4),
    max_gpus=some(st.integers(4, 6)),
    min_free=some(st.sampled_from([GIB, 60 * GIB])),
    max_util=some(st.sampled_from([10.0, 60.0])),
    max_processes=some(st.integers(0, 2)),
    strategy=st.sampled_from(["spread", "pack", "first"]),
)


@given(DEVICES, REQUESTS)
def test_winners_are_eligible_distinct_and_as_many_as_wanted(devices, request):
    choice = choose(a_snapshot(*devices), request, {})
    winners, refused = {d.uuid for d in choice.devices}, {refusal.device.uuid for refusal in choice.refused}

    assert len(winners) == len(choice.devices) and winners <= {d.uuid for d in choice.eligible}
    assert not winners & refused and len(choice.eligible) + len(refused) == len(devices)
    wanted = min(request.most, len(choice.eligible))
    assert len(winners) == (wanted if len(choice.eligible) >= request.num_gpus else 0)
    assert all(refusal.reasons and all(reason.text for reason in refusal.reasons) for refusal in choice.refused)


@given(DEVICES, REQUESTS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(devices, request, random):
    shuffled = random.sample(devices, len(devices))

    assert choose(a_snapshot(*shuffled), request, {}) == choose(a_snapshot(*devices), request, {})


@given(DEVICES, REQUESTS, st.sampled_from(["memory_free", "utilization"]))
def test_unknown_never_wins_against_known(devices, request, field):
    devices = [replace(device, memory_free=None) if device.memory_used is None else device for device in devices]
    choice = choose(a_snapshot(*devices), replace(request, num_gpus=1, max_gpus=None), {})
    known = [device for device in choice.eligible if device.memory_free is not None]
    if field == "utilization" and request.strategy == "spread":
        known = [device for device in known if device.utilization is not None]

    assert not known or (request.strategy == "pack" and field == "utilization") or choice.devices[0] in known


@given(DEVICES, REQUESTS)
def test_a_condition_on_something_unknown_is_never_satisfied(devices, request):
    for device in choose(a_snapshot(*devices), request, {}).eligible:
        assert request.max_util is None or device.utilization is not None
        assert request.min_free is None or device.memory_free is not None


@given(DEVICES, st.integers(1, 3))
def test_a_worse_device_never_changes_the_winners(devices, number):
    request = Request(number, max_processes=3)
    before = choose(a_snapshot(*devices), request, {})
    worse = a_device(9, memory_used=79 * GIB + 900 * MIB, utilization=100.0, processes=(BOB, a_process(), a_process(3)))

    if before.devices and all(d.memory_free is not None and d.utilization is not None for d in before.devices):
        assert choose(a_snapshot(*devices, worse), request, {}).devices == before.devices


OF_AMD = Gap(None, "amd devices", "the driver hangs")


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, True),
        ({"vendor": "amd"}, True),
        ({"vendor": "nvidia"}, False),
        ({"devices": ("0",)}, False),
        ({"devices": ("7",)}, True),  # it may be one of those
        ({"models": ("H100",)}, False),
        ({"models": ("MI300X",)}, True),  # there is none among the others
        ({"models": ("*",)}, True),
    ],
)
def test_a_vendor_whose_devices_could_not_be_read_is_missed_by_a_request_that_could_take_one(fields, meant):
    others = a_device(0), a_device(1, name=None)

    assert unread_vendor(a_snapshot(*others, gaps=(OF_AMD,)), Request(**fields)) == (OF_AMD if meant else None)


@pytest.mark.parametrize("gap", [Gap(a_uuid(0), "amd devices", "?"), Gap(None, "processes", "?")])
def test_no_other_gap_stands_for_the_devices_of_a_vendor(gap):
    assert unread_vendor(a_snapshot(gaps=(gap,)), Request()) is None
    assert unread_vendor(a_snapshot(gaps=(gap, OF_AMD)), Request()) == OF_AMD


def test_of_a_vendor_that_is_not_known_no_model_is_known_either():
    gap = Gap(None, "acme devices", "?")

    assert unread_vendor(a_snapshot(gaps=(gap,)), Request(vendor="nvidia")) == gap
    assert unread_vendor(a_snapshot(gaps=(gap,)), Request(models=("*",))) is None


def test_who_has_claimed_a_device_is_said_and_who_shares_it():
    device, other = a_device(0), a_device(1)
    alone = a_claim_record(other, note="a note", since=None)
    shares = [
        a_claim_record(device, id=f"c{slot}", user=user, memory=memory, slots=(f"{device.uuid}.slot{slot}",))
        for slot, (user, memory) in enumerate((("alice", 10 * GIB), ("bob", None)))
    ]
    ended = a_claim_record(a_device(2), alive=False)

    assert claimed_by([ended, *shares, alone], 0.0) == {
        device.uuid: "shared by alice (10.0GiB), bob", other.uuid: 'claimed by alice: "a note"'
    }  # fmt: skip


def test_a_device_of_which_nobody_knows_the_processes_comes_after_one_without_any():
    devices = (a_device(0), a_device(1, processes=None))
    unreadable = a_snapshot(*devices, gaps=(Gap(devices[1].uuid, "processes", "not supported"),))

    assert [device.index for device in choose(unreadable, Request(), {}).eligible] == [0, 1]
    assert in_order(*devices, request=Request()) == [1, 0]  # only not read yet


def shared(index, gib):
    """A device with a share of each size."""
    device = a_device(index, memory_used=0)
    slots = [(f"{device.uuid}.slot{number}",) for number in range(len(gib))]
    claims = [
        a_claim_record(device, id=f"c{slot}", memory=int(size * GIB), slots=slot)
        for size, slot in zip(gib, slots, strict=True)
    ]
    return device, Sharing(tuple(claims)) if claims else UNSHARED


@pytest.mark.parametrize(
    ("shares", "strategy", "order"),
    [
        (([10], [10, 10]), "spread", [0, 1]),  # the one with most left
        (([10], []), "spread", [0, 1]),  # the one that is shared already
        (([10, 10], [10]), "pack", [0, 1]),  # the one with least left
        (([10], []), "pack", [0, 1]),
        (([10], [10]), "pack", [1, 0]),
        (([10.4], [10.1]), "pack", [1, 0]),  # as much left, in steps of 512 MiB
        (([10.1], [10.4]), "spread", [1, 0]),
    ],
)
def test_a_share_goes_where_others_share_already_and_packed_where_the_least_is_left(shares, strategy, order):
    devices, sharing = zip(*(shared(index, gib) for index, gib in enumerate(shares)), strict=True)
    request = Request(share=True, memory=5 * GIB, strategy=strategy)

    by_uuid = {device.uuid: shares for device, shares in zip(devices, sharing, strict=True)}
    assert in_order(*devices, request=request, sharing=by_uuid) == order


def test_an_instance_is_preferred_with_its_gpu():
    parents = [a_device(index, mig_mode=True) for index in (0, 1)]
    instances = [a_mig_instance(parent, 0) for parent in parents]

    assert in_order(*parents, *instances, request=Request(prefer=("0",))) == [0, 1]
    assert in_order(*parents, *instances, request=Request(prefer=("1",))) == [1, 0]


def test_instances_stand_behind_their_gpu_in_the_order_of_their_numbers():
    parent = a_device(0, mig_mode=True)
    numbers = [(2, 0), (1, 1), (1, 0)]
    instances = [
        a_mig_instance(parent, place, gpu_instance_id=gpu, compute_instance_id=compute)
        for place, (gpu, compute) in enumerate(numbers)
    ]
    refused = choose(a_snapshot(*instances, parent, a_device(1)), Request(min_free=900 * GIB), {}).refused

    assert [each.device.gpu_instance_id for each in refused] == [None, 1, 1, 2, None]
    assert [each.device.compute_instance_id for each in refused] == [None, 0, 1, 0, None]


@pytest.mark.parametrize(("count", "more"), [(16, False), (17, True)])
def test_at_most_16_devices_are_explained(count, more):
    busy = [a_device(i, processes=(a_process(),), memory_used=(10 + i) * GIB) for i in range(count)]

    lines = said(Request(), *busy).splitlines()
    assert [line for line in lines if line.startswith("  and ")] == ["  and 1 more"] * more
    assert said(Request(), *busy).count("GPU") >= 16


def test_devices_that_are_refused_for_the_same_reasons_share_a_line():
    """A job on all eight GPUs made eight lines that differed in their numbers alone."""
    bobs = [a_device(i, processes=(BOB,), memory_used=41 * GIB) for i in (0, 2)]
    other = a_device(1, processes=(a_process(),), memory_used=10 * GIB)

    lines = said(Request(3), bobs[0], other, bobs[1]).splitlines()
    assert (lines[1], lines[2][:9]) == (f"  GPU 0, GPU 2: {TAKEN_BY_BOB}", "  GPU 1: ")


def test_what_leaves_only_busy_devices_is_named_while_others_are_free():
    """A request waited for six hours beside three free GPUs, and CUDA_VISIBLE_DEVICES of the shell was never named."""
    busy, free = a_device(0, processes=(a_process(),), memory_used=10 * GIB), a_device(1)
    fault = error(
        a_snapshot(busy, free), Request(within=(busy.uuid,), within_reason="CUDA_VISIBLE_DEVICES=0 allows only GPU 0")
    )

    assert str(fault).splitlines()[:2] == [
        "wanted 1 GPU, but none is free now.", "  CUDA_VISIBLE_DEVICES=0 allows only GPU 0"
    ]  # fmt: skip


def test_what_an_outer_limit_leaves_is_said_as_what_can_be_used():
    devices = (a_device(0), a_device(1))
    request = Request(num_gpus=2, within=(devices[0].uuid,), within_reason="outside CUDA_VISIBLE_DEVICES")

    assert said(request, *devices).startswith("wanted 2 GPUs, but only 1 exists that can be used.")


def test_processes_of_all_kinds_must_fit_on_the_device_together(fake: FakeNvml, sleeper: int) -> None:
    for pid, kind in ((os.getpid(), "compute"), (sleeper, "graphics")):
        fake.add_process(0, pid, 50 * GIB, kind, counted=0)
    fake.devices[0].memory_used = 60 * GIB
    snapshot = sampled(fake, "WHO_FIELDS")

    assert not snapshot.devices[0].processes_plausible
    assert "of all kinds" in gaps_of(snapshot, snapshot.devices[0])["processes"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_total", 0), ("memory_total", 2**60), ("memory_used", 2**60), ("memory_reserved", 2**60)],
)
def test_impossible_memory_is_unknown_and_no_list_is_checked_against_it(fake: FakeNvml, field: str, value: int) -> None:
    fake.add_process(0, os.getpid(), GIB)
    setattr(fake.devices[0], field, value)
    snapshot = sampled(fake, "WHO_FIELDS")
    device = snapshot.devices[0]

    assert (device.memory_total, device.memory_used, device.memory_free, device.memory_reserved) == (None,) * 4
    assert not device.processes_plausible
    assert "cannot be checked" in gaps_of(snapshot, device)["processes"]
    assert {gap.device for gap in snapshot.gaps} == {device.uuid}


def test_a_driver_that_never_tells_memory_can_still_have_a_list_that_is_believed(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    fake.add_process(0, os.getpid(), GIB)

    assert sampled(fake, "WHO_FIELDS").devices[0].processes_plausible
