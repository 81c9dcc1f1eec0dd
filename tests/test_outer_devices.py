"""What CUDA_VISIBLE_DEVICES, Slurm or a container left is where devices are chosen, and nowhere else."""

import ast
import re

import pytest
from builders import a_device, a_mig_instance, a_snapshot, a_uuid
from sources import module_name, modules, tree

from gpuguard.clusters.device_variables import outer_devices
from gpuguard.request import Request
from gpuguard.select import choose

DEVICES = tuple(a_device(i) for i in range(4))


def indices(environ, devices=DEVICES):
    """The allowed indices, None without a limit."""
    uuids = outer_devices(environ, devices).uuids
    by_uuid = {device.uuid: device.index for device in devices}
    return None if uuids is None else [by_uuid[uuid] for uuid in uuids]


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        *(("3", [3]), ("2,0", [2, 0]), (" 1 , 2 ", [1, 2])),
        *((a_uuid(1), [1]), ("GPU-00000002", [2]), ("gpu-00000002", [2])),
        ("GPU-0000000", []),  # the beginning of all four
        *((text, []) for text in ("", "-1", "NoDevFiles", "2,2", "all", "9" * 5000)),
        *(("0,-1,2", [0]), ("1,9,2", [1]), ("1,,2", [1])),
    ],
    ids=lambda value: str(value)[:40],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value, allowed):
    assert indices({"CUDA_VISIBLE_DEVICES": value}) == allowed


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES=3 allows only GPU 3"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= allows no GPU"),
        ({"SLURM_JOB_ID": "7"}, "Slurm job 7 was given no GPU (ask Slurm for one: --gres=gpu:1)"),
    ],
)
def test_the_reason_names_what_restricts_and_what_it_allows(environ, reason):
    assert outer_devices(environ, DEVICES).reason == reason


@pytest.mark.parametrize(
    ("environ", "doubtful"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ({"CUDA_VISIBLE_DEVICES": a_uuid(1)}, False),
    ],
)
def test_an_index_is_doubtful_where_the_models_differ_and_the_order_is_not_set(environ, doubtful):
    mixed = (a_device(0), a_device(1, name="NVIDIA T400"))

    assert ("CUDA_DEVICE_ORDER=PCI_BUS_ID" in outer_devices(environ, mixed).warning) is doubtful
    assert outer_devices(environ, DEVICES).warning == ""


def test_a_mig_instance_is_allowed_by_its_uuid_even_before_it_was_seen():
    gpu = a_device(0, mig_mode=True)
    instances = (a_mig_instance(gpu, 0), a_mig_instance(gpu, 1))
    outer = outer_devices({"CUDA_VISIBLE_DEVICES": instances[1].uuid}, (gpu,))

    machine = a_snapshot(gpu, *instances)
    assert choose(machine, Request(within=outer.uuids), {}).eligible == (instances[1],)


def test_a_gpu_that_is_allowed_allows_its_instances():
    gpus = (a_device(0, mig_mode=True), a_device(1))
    instance = a_mig_instance(gpus[0])

    assert choose(a_snapshot(*gpus, instance), Request(within=(gpus[0].uuid,)), {}).eligible == (instance,)


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, []),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"SLURM_JOB_GPUS": "1,3"}, [1, 3]),
        ({"SLURM_STEP_GPUS": "2", "SLURM_JOB_GPUS": "1-3"}, [2]),
        ({"SLURM_JOB_GPUS": "1-2"}, [1, 2]),
        ({"SLURM_JOB_GPUS": "4,5,6,7"}, None),  # Slurm hides the others: the four that are visible are the job's
        ({"GPU_DEVICE_ORDINAL": "0"}, None),
        ({"SLURM_JOB_GPUS": "9" * 5000}, []),
        ({"SLURM_JOB_GPUS": "1-99999999999"}, []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_slurm_job_has_what_slurm_gave_it(environ, allowed):
    assert indices({"SLURM_JOB_ID": "7", **environ}) == allowed


CONSTRAINED = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_GPUS": "2,3", "GPU_DEVICE_ORDINAL": "0,1", "CUDA_VISIBLE_DEVICES": "0,1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "count", "allowed"),
    [
        ({}, 4, [2, 3]),  # where all devices are shown
        ({}, 2, [0, 1]),  # where the job sees its own only
        ({"CUDA_VISIBLE_DEVICES": "1"}, 4, [3]),
        ({"CUDA_VISIBLE_DEVICES": "0,,1"}, 4, [2]),
        # Numbers of the whole machine, by Slurm and by gpuguard.
        ({"GPU_DEVICE_ORDINAL": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, 4, [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "3", "GPUGUARD_CLAIM": "slurm12.ab12"}, 4, [3]),
    ],
)
def test_number_0_of_a_constrained_job_is_its_first_device(environ, count, allowed):
    assert indices({**CONSTRAINED, **environ}, DEVICES[:count]) == allowed


@pytest.mark.parametrize(
    ("value", "allowed"), [("void", []), ("none", []), ("", []), ("all", None), ("5", None), (a_uuid(9), None)]
)
def test_a_container_says_only_whether_there_is_any_gpu(value, allowed):
    assert indices({"NVIDIA_VISIBLE_DEVICES": value}) == allowed


def test_all_sources_must_agree():
    environ = {"CUDA_VISIBLE_DEVICES": "1,2", "NVIDIA_VISIBLE_DEVICES": "void"}

    assert indices(environ) == [] and "; " in outer_devices(environ, DEVICES).reason


VENDORS_OWN = re.compile(
    r"(CUDA|NVIDIA|ROCR|AMD)_[A-Z]+_(DEVICES|ORDER)|/dev/(nvidia|kfd|dri).*|/(proc/driver|sys/module)/nvidia.*|nvml|MIG-"
)
# NVIDIA's own backends, and what names the default one.
OF_A_VENDOR = {
    "gpuguard.vendors", "gpuguard.backends", "gpuguard.backends.nvml", "gpuguard.backends.smi",
    "gpuguard.backends.plausibility",
}  # fmt: skip


def what_is_a_vendors_own(module: ast.AST) -> list[int]:
    """The lines on which *module* says what vendors.py says of a vendor."""
    constants = (node for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.lineno for node in constants if VENDORS_OWN.fullmatch(node.value)]


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_what_is_a_vendors_own_stands_in_one_module(path):
    assert bool(what_is_a_vendors_own(tree(path))) is (module_name(path) in OF_A_VENDOR)


@pytest.mark.parametrize(
    "source", ['os.environ["CUDA_VISIBLE_DEVICES"]', 'f"/dev/nvidia{minor}"', 'x or "nvml"', 'uuid.startswith("MIG-")']
)
def test_a_module_that_says_it_itself_is_found(source):
    assert what_is_a_vendors_own(ast.parse(source)) == [1]
