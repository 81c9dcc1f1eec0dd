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

from gpuguard.eligibility import UNSHARED, Sharing
from gpuguard.errors import ImpossibleRequest, NotEnoughGpus
from gpuguard.model import Gap
from gpuguard.queue.state import QueueFacts, fit
from gpuguard.request import ANY_MEMORY, Request, spelled
from gpuguard.select import choose, instances_note, not_enough, possible, unread_devices, waiting_error
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


def test_pack_takes_the_fullest_device_that_fits_and_spread_the_emptiest():
    big, small = a_device(0), a_device(1, memory_total=24 * GIB)

    assert chosen(a_snapshot(big, small), Request(strategy="spread")) == [0]
    assert chosen(a_snapshot(big, small), Request(strategy="pack")) == [1]
    assert chosen(a_snapshot(big, small), Request(strategy="pack", min_free=40 * GIB)) == [0]


def test_pack_breaks_into_the_numa_node_that_is_broken_already():
    devices = [a_device(i, numa_node=i // 2, processes=(BOB,) if i == 0 else ()) for i in range(4)]

    assert chosen(a_snapshot(*devices), Request(strategy="pack")) == [1]


def test_first_takes_the_lowest_indices():
    devices = [a_device(i, processes=(BOB,) if i == 1 else ()) for i in range(4)]

    assert chosen(a_snapshot(*devices), Request(2, strategy="first")) == [0, 2]


def test_winners_come_in_index_order_and_at_most_max_gpus():
    idle = a_snapshot(*[a_device(i) for i in range(5)])

    assert chosen(idle, Request(2, prefer=("3", "1"))) == [1, 3]
    assert chosen(idle, Request(2, max_gpus=4)) == [1, 2, 3, 4]
    assert chosen(idle, Request(2, max_gpus=9)) == [0, 1, 2, 3, 4]


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


def test_instances_are_advised_only_where_there_are_enough_of_them():
    gpu = a_device(0, mig_mode=True)
    never = said(Request(3), gpu, a_mig_instance(gpu, 0), a_mig_instance(gpu, 1), a_device(1))

    assert "Ask for 1.\n" in never


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


def test_what_can_never_be_met_says_what_to_ask_for_instead():
    a100 = [a_device(i, name="NVIDIA A100-SXM4-80GB") for i in range(4)]
    machine = a_snapshot(*a100, *[a_device(i) for i in range(4, 8)])
    fault = error(machine, Request(5, models=("A100*",)))

    assert isinstance(fault, ImpossibleRequest)
    assert str(fault) == (
        "wanted 5 GPUs, but only 4 exist that can satisfy --model 'A100*'.\n"
        "  its model is NVIDIA H100 80GB HBM3 (4 GPUs)\n"
        "Ask for 4, or drop --model.\n"
        "`gpuguard explain -n 5 --model 'A100*'` shows each GPU."
    )
    assert (fault.wanted, fault.available, len(fault.refused)) == (5, 4, 4)


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


def test_a_size_is_said_as_it_was_typed():
    assert "that can satisfy --min-free 300GB.\n" in said(Request(min_free=300 * 10**9), a_device())
    assert "explain -n 1 --min-free 300GB`" in said(Request(min_free=300 * 10**9), a_device())


def test_a_size_that_is_not_all_that_is_missing_is_not_advised():
    request = Request(models=("L4",), min_free=999 * GIB)

    assert "\nDrop --min-free or --model.\n" in said(request, a_device())


def test_who_asks_for_a_model_that_is_not_here_is_told_which_there_are_enough_of():
    a100, l4 = ([a_device(i + at, name=name) for i in range(2)] for at, name in ((0, "NVIDIA A100"), (2, "NVIDIA L4")))
    told = said(Request(2, models=("H200",)), *a100, *l4, a_device(4, name="Tesla T4"))

    assert "\nDrop --model, or ask for --model 'NVIDIA A100' or 'NVIDIA L4'.\n" in told


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


def test_a_share_that_fits_nowhere_is_not_told_to_drop_its_size_which_it_needs():
    request = Request(share=True, memory=999 * GIB, models=("L4",))

    assert "\nDrop --model, or ask for less --memory.\n" in said(request, a_device())


def test_what_may_pass_says_who_is_in_the_way():
    machine = a_snapshot(a_device(0, processes=(BOB,), memory_used=41 * GIB), a_device(1))
    fault = error(machine, Request(2))

    assert type(fault) is NotEnoughGpus
    assert str(fault).splitlines()[:2] == [
        "wanted 2 GPUs, but only 1 is free now.",
        "  GPU 0: 41.0GiB used by bob (pid 812, python train.py, 3h12m)",
    ]


def test_a_request_that_waits_says_why_and_the_reasons_that_are_known():
    machine = a_snapshot(a_device(0, processes=(BOB,), memory_used=41 * GIB))
    missing = error(machine, Request(1))

    assert str(waiting_error(2)) == "wanted 2 GPUs."
    assert waiting_error(2, "number 2 of 3").brief == "number 2 of 3"
    assert str(waiting_error(1, "number 2 of 3", missing)).splitlines()[:2] == [
        "wanted 1 GPU: number 2 of 3.",
        "  GPU 0: 41.0GiB used by bob (pid 812, python train.py, 3h12m)",
    ]
    assert waiting_error(1, "", missing).refused == missing.refused


def test_of_several_instances_one_process_uses_one():
    gpu = a_device(0, mig_mode=True)
    instances = [a_mig_instance(gpu, number) for number in range(2)]

    assert "one process can use only one" in (instances_note(instances, Request(2, mig="3g.40gb")) or "")
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


def test_a_request_for_another_profile_is_told_which_there_are():
    whole, divided, request = a_device(0), a_device(1, mig_mode=True), Request(mig="7g.80gb")
    instances = [a_mig_instance(divided, n, mig_profile=profile) for n, profile in enumerate(("3g.40gb", None))]

    assert "the profiles here: 3g.40gb (1), unknown (1)" in said(request, whole, divided, *instances)
    assert "no GPU here is divided into instances" in said(request, whole)


def test_a_device_of_which_nobody_knows_the_processes_comes_after_one_without_any():
    devices = (a_device(0), a_device(1, processes=None))
    unreadable = a_snapshot(*devices, gaps=(Gap(devices[1].uuid, "processes", "not supported"),))

    assert [device.index for device in choose(unreadable, Request(), {}).eligible] == [0, 1]
    assert in_order(*devices, request=Request()) == [1, 0]  # only not read yet


def shared(index, count, used=0.0, **fields):
    """A device with so many shares of 10 GiB."""
    device = a_device(index, memory_used=int(used * GIB), **fields)
    slots = [(f"{device.uuid}.slot{number}",) for number in range(count)]
    claims = [a_claim_record(device, id=f"c{slot}", memory=10 * GIB, slots=slot) for slot in slots]
    return device, Sharing(tuple(claims)) if claims else UNSHARED


@pytest.mark.parametrize(
    ("counts", "strategy", "order"),
    [
        ((1, 2), "spread", [0, 1]),  # the one with most left
        ((1, 0), "spread", [0, 1]),  # the one that is shared already
        ((2, 1), "pack", [0, 1]),  # the one with least left
        ((1, 0), "pack", [0, 1]),
        ((1, 1), "pack", [1, 0]),
    ],
)
def test_a_share_goes_where_others_share_already_and_packed_where_the_least_is_left(counts, strategy, order):
    devices, sharing = zip(*(shared(index, count) for index, count in enumerate(counts)), strict=True)
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
    busy = [a_device(i, processes=(a_process(),), memory_used=10 * GIB) for i in range(count)]

    lines = said(Request(), *busy).splitlines()
    assert [line for line in lines if line.startswith("  and ")] == ["  and 1 more"] * more
    assert said(Request(), *busy).count("GPU") >= 16


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
