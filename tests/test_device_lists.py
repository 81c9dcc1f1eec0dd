"""The variables of a job mean its devices and no others to the programs of its vendor, and to gpuguard inside the job.

The witnesses below read the variables as the runtimes do, from their own rules: ROCR-Runtime and clr of ROCm, Level
Zero of Intel, CUDA.  They know nothing of gpuguard but the devices of the machine.
"""

import random
from collections.abc import Mapping, Sequence

import pytest
from builders import a_device, a_mig_instance, a_uuid

from gpuguard.clusters.device_variables import (
    devices_called,
    environment_of,
    groups_needed,
    names_of,
    outer_devices,
    renumbered,
    visible_uuids,
)
from gpuguard.model import HEALTH, MODEL, Device

# The machines.  A number is what the vendor's variables call the device: see Device.number.


def amd(index: int, number: int | None = None, *, first: int = 0, known: bool = True) -> Device:
    """An Instinct, or a card whose chip has no number of its own."""
    uuid = f"GPU-{0xE3AA140F9A5F9E00 + index:016x}" if known else f"PCI-0000-{index + 3:02x}-00-0"
    ordinal = index if number is None else number
    return a_device(first + index, uuid=uuid, vendor="amd", name="AMD Instinct MI300X", ordinal=ordinal)


def partitions(parent: Device, first: int, count: int) -> list[Device]:
    """What the driver makes of a divided GPU: the runtime numbers each part, and they share the uuid of the GPU."""
    stem = parent.uuid.partition("-")[2]
    return [
        a_mig_instance(
            parent, part, uuid=f"XCP-{stem}-{part}", vendor="amd", mig_profile="cpx", gpu_instance_id=part,
            ordinal=first + part, name=parent.name,
        )
        for part in range(count)
    ]  # fmt: skip


def intel(index: int, number: int | None = None, name: str = "Intel Arc B580", *, first: int = 0, **fields) -> Device:
    uuid = f"PCI-0000-{index + 3:02x}-00-0"
    return a_device(
        first + index, uuid=uuid, vendor="intel", name=name, ordinal=index if number is None else number, **fields
    )


def moore_threads(index: int) -> Device:
    return a_device(index, uuid=a_uuid(index + 64), vendor="mthreads", name="Moore Threads MTT S4000")


NVIDIA4 = tuple(a_device(index) for index in range(4))
AMD4 = tuple(amd(index) for index in range(4))
DIVIDED = amd(1)
MACHINES: dict[str, tuple[Device, ...]] = {
    "nvidia": NVIDIA4,
    "amd": AMD4,
    "amd with cards that have no number": (amd(0), amd(1, known=False), amd(2), amd(3, known=False)),
    "amd behind its integrated one": tuple(amd(index, index + 1) for index in range(3)),
    "amd divided": (amd(0), DIVIDED, *partitions(DIVIDED, 1, 8), amd(2, 9)),
    "intel": tuple(intel(index) for index in range(4)),
    "intel of two tiles": tuple(intel(index, name="Intel Data Center GPU Max 1550") for index in range(3)),
    "intel of both kinds": (intel(0, name="Intel Data Center GPU Max 1550"), intel(1), intel(2)),
    "intel behind its integrated one": tuple(intel(index, index + 1) for index in range(3)),
    "moore threads": tuple(moore_threads(index) for index in range(3)),
    "nvidia and amd": (*NVIDIA4[:2], *(amd(index, first=2) for index in range(3))),
    "nvidia, amd and intel": (*NVIDIA4[:2], amd(0, first=2), amd(1, first=2), intel(0, first=4), intel(1, first=4)),
}


# The witnesses: (environment, devices of one vendor) -> the devices that a program of that vendor sees, in its order.


def cuda_sees(
    environ: Mapping[str, str], devices: Sequence[Device], variable: str = "CUDA_VISIBLE_DEVICES"
) -> list[Device]:
    if variable not in environ:
        return list(devices)
    found: list[Device] = []
    for entry in environ[variable].split(","):
        hits = [d for d in devices if entry == str(d.number) or (entry.startswith("GPU-") and d.uuid.startswith(entry))]
        if len(hits) != 1:
            break
        found += hits
    return found if len(found) == len(set(found)) else []


def rocr_sees(environ: Mapping[str, str], agents: Sequence[Device]) -> list[Device]:
    if "ROCR_VISIBLE_DEVICES" not in environ:
        return list(agents)
    uuids = [(agent.parent_uuid or agent.uuid).upper() for agent in agents]
    picked: list[int] = []
    for word in environ["ROCR_VISIBLE_DEVICES"].split(","):
        token = word.strip().upper()
        if token.startswith("GPU-"):
            hits = [i for i, uuid in enumerate(uuids) if 4 < len(token) <= 20 and uuid.startswith(token)]
        else:
            hits = [int(token)] if token.isdigit() and int(token) < len(agents) else []
        if len(hits) != 1 or hits[0] in picked:
            break
        picked += hits
    return [agents[i] for i in picked]


def hip_sees(environ: Mapping[str, str], agents: Sequence[Device]) -> list[Device]:
    left = rocr_sees(environ, agents)
    ordinals = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES") or ""
    if not ordinals:
        return left
    picked: list[int] = []
    for word in ordinals.split(","):
        named = [str(i) for i, agent in enumerate(left) if "GPU-" in word and word in (agent.parent_uuid or agent.uuid)]
        word = named[0] if named else word
        if not word.isdigit() or word != str(int(word)) or int(word) >= len(left):
            break
        picked += [int(word)] if int(word) not in picked else []
    return [left[i] for i in picked]


def level_zero_tiles(environ: Mapping[str, str], cards: Sequence[Device | None]) -> list[tuple[int, int]]:
    """The tiles that a program sees, by their cards.  *cards* are in the order in which it counts them."""
    flat = [(place, tile) for place, card in enumerate(cards) for tile in range(2 if is_of_two_tiles(card) else 1)]
    mask = environ.get("ZE_AFFINITY_MASK", "")
    if not mask:
        return flat
    seen: set[tuple[int, int]] = set()
    for word in mask.split(","):
        card, _, tile = word.partition(".")
        if not f"{card}{tile}".isdigit():
            continue
        if environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT") != "COMPOSITE":
            seen |= {flat[int(card)]} if not tile and int(card) < len(flat) else set()
        elif tile:
            seen |= {(int(card), int(tile))} & set(flat)
        else:
            seen |= {place for place in flat if place[0] == int(card)}
    return sorted(seen)


def is_of_two_tiles(card: Device | None) -> bool:
    return card is not None and "1550" in (card.name or "")


def sycl_sees(environ: Mapping[str, str], cards: Sequence[Device | None]) -> list[Device]:
    """The whole cards that a program of SYCL sees by Level Zero."""
    left = level_zero_tiles(environ, cards)
    roots = left if environ.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE" else sorted({(card, -1) for card, _ in left})
    taken = set(range(len(roots)))
    for place, term in enumerate(environ.get("ONEAPI_DEVICE_SELECTOR", "*:*").split(";")):
        runtime, _, words = term.removeprefix("!").partition(":")
        assert runtime in ("*", "level_zero")
        meant = {n for n in range(len(roots)) for word in words.split(",") if word in ("*", "gpu", str(n))}
        taken = taken - meant if term.startswith("!") else meant if place == 0 else taken | meant
    seen = {tile for tile in left if {roots.index(root) for root in (tile, (tile[0], -1)) if root in roots} & taken}
    sizes = {place: 2 if is_of_two_tiles(card) else 1 for place, card in enumerate(cards)}
    whole = [place for place, size in sizes.items() if {(place, tile) for tile in range(size)} <= seen]
    return [device for place in whole if (device := cards[place])]


def agents_of(devices: Sequence[Device]) -> list[Device]:
    """AMD's devices as the runtime numbers them: the hidden integrated one is an agent, a divided GPU is its parts."""
    own = [device for device in devices if device.vendor == "amd"]
    whole = [device for device in own if device.uuid not in {part.parent_uuid for part in own}]
    by_number = {device.number: device for device in whole}
    hidden = a_device(99, uuid="GPU-XX", vendor="amd")
    return [by_number.get(number, hidden) for number in range(max(by_number, default=-1) + 1)]


def cards_of(environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device | None]:
    """Intel's devices in the order of Level Zero, in which integrated ones are last unless it is told to go by PCI."""
    by_number = {device.number: device for device in devices if device.vendor == "intel"}
    if environ.get("ZE_ENABLE_PCI_ID_DEVICE_ORDER") == "1":
        return [by_number.get(number) for number in range(max(by_number, default=-1) + 1)]
    return list(by_number.values())


def seen_by_a_program(vendor: str, environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device]:
    own = [device for device in devices if device.vendor == vendor]
    if vendor == "amd":
        return hip_sees(environ, agents_of(devices))
    if vendor == "intel":
        return sycl_sees(environ, cards_of(environ, devices))
    return cuda_sees(environ, own, "MUSA_VISIBLE_DEVICES" if vendor == "mthreads" else "CUDA_VISIBLE_DEVICES")


VENDORS = ("nvidia", "amd", "intel", "mthreads")
SEEDS = range(12)
# What a user may have set before, in all vendors' variables.
WORDS = ("0", "1", "2", "3", "1,0", "2,1", "0,2,1", "3,0", "-1", "", "7", "0,9,1", "1,1", "0,x,1", "0.1,1", "1,2,3")


SELECTORS = (
    "level_zero:0", "level_zero:1,0", "level_zero:7", "level_zero:gpu", "level_zero:0;level_zero:2", "*:gpu", "*:*",
    "*:1", "!level_zero:1", "level_zero:*;!level_zero:0,2",
)  # fmt: skip


def random_environment(dice: random.Random, devices: Sequence[Device]) -> dict[str, str]:
    parents = {device.parent_uuid for device in devices}
    uuids = [device.uuid for device in devices if device.uuid.startswith("GPU-") and device.uuid not in parents]
    words = [*WORDS, *(",".join(dice.sample(uuids, min(2, len(uuids)))) for _ in range(4))]
    names = (
        "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
        "MUSA_VISIBLE_DEVICES",
    )  # fmt: skip
    environ = {name: dice.choice(words) for name in names if dice.random() < 0.4}
    hierarchy = dice.choice(("FLAT", "COMPOSITE", "COMBINED"))
    more = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy, "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
    more["ONEAPI_DEVICE_SELECTOR"] = dice.choice(SELECTORS)
    return environ | {name: value for name, value in more.items() if dice.random() < 0.5}


def claimable(devices: Sequence[Device], vendor: str) -> list[Device]:
    parents = {device.parent_uuid for device in devices}
    return [device for device in devices if device.vendor == vendor and device.uuid not in parents]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_sees_the_devices_of_its_job_and_gpuguard_inside_reads_the_same(name: str, seed: int):
    devices, dice = MACHINES[name], random.Random(f"{name} {seed}")
    for vendor in sorted({device.vendor for device in devices}):
        own = claimable(devices, vendor)
        job = sorted(dice.sample(own, dice.randint(1, len(own))), key=devices.index)
        uuids = ",".join(device.uuid for device in job)
        outer = random_environment(dice, devices)
        environ = {**outer, **environment_of(job, outer), "GPUGUARD_GPUS": uuids}

        assert sorted(seen_by_a_program(vendor, environ, devices), key=devices.index) == job, environ
        assert sorted(visible_uuids(environ, devices) or ()) == sorted(device.uuid for device in job), environ
        assert sorted(outer_devices(environ, devices).uuids or ()) == sorted(device.uuid for device in job)


@pytest.mark.parametrize("name", [name for name in MACHINES if " and " not in name])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_an_outer_list_leaves_is_what_a_program_would_see_and_never_more(name: str, seed: int):
    devices, dice = MACHINES[name], random.Random(f"{seed} {name}")
    vendor = devices[0].vendor
    for _ in range(20):
        environ = random_environment(dice, devices)
        would_see = [device.uuid for device in seen_by_a_program(vendor, environ, devices)]
        found = visible_uuids(environ, devices)
        allowed = [device.uuid for device in claimable(devices, vendor)] if found is None else list(found)

        assert set(allowed) <= set(would_see), environ
        emptied = vendor == "amd" and "" in (environ.get("HIP_VISIBLE_DEVICES"), environ.get("CUDA_VISIBLE_DEVICES"))
        if not emptied:  # HIP takes an empty list for none, and its author meant no device
            assert sorted(allowed) == sorted(uuid for uuid in would_see if uuid != "GPU-XX"), environ


def left(environ: Mapping[str, str], name: str) -> list[str] | None:
    """The labels of the devices that the outer lists leave."""
    labels = {device.uuid: device.label for device in MACHINES[name]}
    uuids = visible_uuids(environ, MACHINES[name])
    return None if uuids is None else [labels[uuid] for uuid in uuids]


ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environ", "name", "allowed"),
    [
        # ROCR's rules.
        ({ROCR: "3, 1"}, "amd", ["3", "1"]),
        ({ROCR: ""}, "amd", []),
        ({ROCR: "1,x,2"}, "amd", ["1"]),
        ({ROCR: "1,1,2"}, "amd", ["1"]),
        ({ROCR: AMD4[2].uuid.upper()}, "amd", ["2"]),
        ({ROCR: AMD4[2].uuid + "0"}, "amd", []),  # longer than any uuid
        ({ROCR: "GPU-"}, "amd", []),
        ({ROCR: "GPU-e3aa"}, "amd", []),  # all four begin so
        ({ROCR: DIVIDED.uuid}, "amd divided", []),  # all eight parts have it
        ({ROCR: "0,3,9"}, "amd divided", ["0", "1.2", "2"]),
        # HIP chooses among those that ROCR leaves.
        ({ROCR: "2,3", HIP: "1"}, "amd", ["3"]),
        ({ROCR: "1", HIP: "1"}, "amd", []),
        ({HIP: "1, 2"}, "amd", ["1"]),
        ({HIP: "2,2,0"}, "amd", ["2", "0"]),
        ({HIP: AMD4[3].uuid}, "amd", ["3"]),
        ({HIP: ""}, "amd", []),
        ({CUDA: "3"}, "amd", ["3"]),
        ({HIP: "0", CUDA: "3"}, "amd", ["0"]),
        # A GPU that is not shown is counted nevertheless.
        ({HIP: "1"}, "amd behind its integrated one", ["0"]),
        ({ROCR: "0,2", HIP: "1"}, "amd behind its integrated one", ["1"]),
        # Beside NVIDIA's, CUDA's list is NVIDIA's.
        ({CUDA: "1"}, "nvidia and amd", ["1", "2", "3", "4"]),
        ({CUDA: ""}, "nvidia and amd", ["2", "3", "4"]),
        ({CUDA: "0", HIP: "2"}, "nvidia and amd", ["0", "4"]),
        # Slurm writes the same list into the variables of all vendors, and means it once.
        ({CUDA: "2,3", ROCR: "2,3", "SLURM_JOB_ID": "7"}, "amd", ["2", "3"]),
        ({CUDA: "0", ROCR: "2,3", "SLURM_JOB_ID": "7"}, "amd", ["2"]),
        # Level Zero's.
        ({"ZE_AFFINITY_MASK": "2,9,x,0"}, "intel", ["0", "2"]),
        ({"ZE_AFFINITY_MASK": ""}, "intel", None),
        ({"ZE_AFFINITY_MASK": "0,1,4"}, "intel of two tiles", ["0"]),
        ({"ZE_AFFINITY_MASK": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, "intel of two tiles", ["1"]),
        ({"ZE_AFFINITY_MASK": "1.0,2.0,2.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, "intel of two tiles", ["2"]),
        ({"ZE_AFFINITY_MASK": "0"}, "intel behind its integrated one", ["0"]),
        ({"ZE_AFFINITY_MASK": "1", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, "intel behind its integrated one", ["0"]),
        # SYCL's selector, which counts what the mask leaves.
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:1,7"}, "intel", ["1"]),
        ({"ONEAPI_DEVICE_SELECTOR": "LEVEL_ZERO:1", "ZE_AFFINITY_MASK": "0,2"}, "intel", ["2"]),
        ({"ONEAPI_DEVICE_SELECTOR": "!level_zero:0"}, "intel", ["1", "2", "3"]),
        ({"ONEAPI_DEVICE_SELECTOR": "*:gpu;!*:2"}, "intel", ["0", "1", "3"]),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}, "intel", ["0", "1", "2", "3"]),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:*;!opencl:*"}, "intel", ["0", "1", "2", "3"]),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:0"}, "intel", []),  # by which order is not known
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}, "intel", []),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:0.0"}, "intel", []),  # only a part of a card
        ({"ONEAPI_DEVICE_SELECTOR": ""}, "intel", None),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:0,1,4"}, "intel of two tiles", ["0"]),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, "intel behind its integrated one", ["0"]),
        ({"MUSA_VISIBLE_DEVICES": "2,0,9,1"}, "moore threads", ["2", "0"]),
        ({"MUSA_VISIBLE_DEVICES": "2,0,0,1"}, "moore threads", []),
    ],
)
def test_a_list_is_read_as_its_runtime_reads_it(environ, name, allowed):
    assert left(environ, name) == allowed


def test_a_device_of_a_vendor_that_only_a_later_gpuguard_knows_has_the_list_of_nvidia():
    assert environment_of([a_device(2, vendor="later")])["CUDA_VISIBLE_DEVICES"] == "2"


def test_the_reason_names_all_lists_that_count():
    outer = outer_devices({ROCR: "2,3", HIP: "1"}, AMD4)

    assert outer.reason == "ROCR_VISIBLE_DEVICES=2,3 HIP_VISIBLE_DEVICES=1 allows only GPU 3"


def test_amd_goes_by_uuid_where_its_runtime_knows_it_and_by_index_elsewhere():
    known, unknown = (MACHINES[name] for name in ("amd", "amd with cards that have no number"))

    assert environment_of(known[2:]) == {
        ROCR: f"{known[2].uuid},{known[3].uuid}", HIP: "0,1", CUDA: "0,1", "GPU_DEVICE_ORDINAL": "0,1",
    }  # fmt: skip
    assert environment_of(unknown[2:])[ROCR] == "2,3"
    assert names_of(known[2:]) == ["2", "3"]


@pytest.mark.parametrize(
    ("names", "environ", "machine", "called"),
    [
        (["2"], {HIP: "2"}, "amd", ["2"]),
        (["1"], {HIP: "1"}, "amd behind its integrated one", ["0"]),
        (["1"], {}, "amd behind its integrated one", ["0"]),  # Ray was told to set no variable
        (["1"], {HIP: "1"}, "nvidia and amd", ["3"]),
        (["1"], {CUDA: "1"}, "nvidia and amd", ["1"]),
        (["0", "2"], {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,2"}, "intel", ["0", "2"]),
        (["1"], {"ONEAPI_DEVICE_SELECTOR": "level_zero:1"}, "nvidia, amd and intel", ["5"]),
        (["7"], {}, "nvidia", []),
        (["1"], {"GPU_DEVICE_ORDINAL": "1"}, "amd", []),  # which alone says nothing
    ],
)
def test_an_engine_calls_devices_by_the_numbers_of_their_vendor(names, environ, machine, called):
    labels = {device.uuid: device.label for device in MACHINES[machine]}

    assert [labels[uuid] for uuid in devices_called(names, environ, MACHINES[machine])] == called
    assert devices_called(names, environ, ()) == ()


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("level_zero:1,2", "level_zero:0,1"), ("*:2,1", "level_zero:0,1"), ("opencl:gpu", None), (None, None)],
)
def test_a_selector_with_numbers_gets_those_that_the_devices_have_in_the_job(outer, inner):
    environ = {} if outer is None else {"ONEAPI_DEVICE_SELECTOR": outer}

    assert environment_of(MACHINES["intel"][1:3], environ).get("ONEAPI_DEVICE_SELECTOR") == inner


def test_a_job_without_devices_sees_none_of_any_vendor():
    environ = environment_of([])

    assert [seen_by_a_program(vendor, environ, MACHINES["nvidia and amd"]) for vendor in ("nvidia", "amd")] == [[], []]


def test_a_job_that_can_open_its_own_devices_alone_counts_them_from_0():
    assert renumbered(NVIDIA4[2:]) == {CUDA: "0,1"}
    assert renumbered(NVIDIA4[2:], by_uuid=True) == {}
    assert renumbered(AMD4[2:]) == {}
    assert renumbered(claimable(MACHINES["amd divided"], "amd")[3:5]) == {ROCR: "0,1"}
    assert renumbered(MACHINES["intel"][1:2]) == {"ZE_AFFINITY_MASK": "0"}


@pytest.mark.parametrize(
    ("environ", "name", "groups"),
    [
        ({CUDA: "0"}, "nvidia", set()),
        ({CUDA: "0"}, "amd", {HEALTH}),
        ({HIP: "0", "ZE_AFFINITY_MASK": "0"}, "nvidia, amd and intel", {HEALTH, MODEL}),
        ({}, "nvidia, amd and intel", set()),
        ({"MUSA_VISIBLE_DEVICES": "0"}, "moore threads", set()),
    ],
)
def test_what_a_list_counts_is_read_before_it_is_understood(environ, name, groups):
    assert groups_needed(environ, MACHINES[name]) == groups


@pytest.mark.parametrize(("value", "allowed"), [("none", ["0", "1"]), ("", ["0", "1"]), ("all", None), ("0", None)])
def test_a_container_without_gpus_of_amd_leaves_those_of_others(value, allowed):
    uuids = outer_devices({"AMD_VISIBLE_DEVICES": value}, MACHINES["nvidia and amd"]).uuids
    labels = {device.uuid: device.label for device in MACHINES["nvidia and amd"]}

    assert (None if uuids is None else [labels[uuid] for uuid in uuids]) == allowed


def test_a_slurm_job_of_amd_has_what_slurm_gave_it():
    assert outer_devices({ROCR: "1", "SLURM_JOB_ID": "7"}, AMD4).uuids == (AMD4[1].uuid,)
    assert outer_devices({"SLURM_JOB_ID": "7"}, AMD4).uuids == ()

    constrained = {"SLURM_STEP_GPUS": "2,3", **dict.fromkeys((ROCR, CUDA, "GPU_DEVICE_ORDINAL"), "0,1")}
    found = outer_devices({"SLURM_JOB_ID": "7", **constrained}, AMD4).uuids
    assert found == tuple(device.uuid for device in AMD4[2:])


def test_a_job_on_mig_instances_leaves_no_device_of_another_vendor():
    gpu = a_device(0, mig_mode=True)
    instance = a_mig_instance(gpu)
    environ = {**environment_of([instance]), "GPUGUARD_GPUS": instance.uuid}

    assert visible_uuids(environ, (gpu, *MACHINES["nvidia and amd"][2:])) == (instance.uuid,)


def test_a_witness_notices_a_list_that_filters_twice():
    environ = {**environment_of(AMD4[2:]), HIP: "2,3"}

    assert hip_sees(environ, agents_of(AMD4)) == []
