"""Our calls of the driver library, beside those of NVIDIA's own binding: each function gives the same."""

from __future__ import annotations

import os

from fake_nvml import FUNCTION_NOT_FOUND, GIB, FakeNvml
from nvml_child import answer_of

from gpuguard.backends.nvml_library import CALLS

# What each function is asked with behind its device; the others take nothing.
MISSING = "they have no such function"
BESIDE = """
import pynvml
from gpuguard.backends.nvml_library import CALLS, Library

ARGUMENTS = {
    "nvmlDeviceGetCpuAffinity": (16,), "nvmlDeviceGetMemoryAffinity": (16, 0), "nvmlDeviceGetSamples": (1, 0),
    "nvmlDeviceGetProcessUtilization": (0,), "nvmlDeviceGetTotalEccErrors": (1, 0), "nvmlDeviceGetTemperature": (0,),
    "nvmlDeviceGetTemperatureThreshold": (1,), "nvmlDeviceGetClockInfo": (1,), "nvmlDeviceGetMaxClockInfo": (2,),
    "nvmlDeviceGetPcieThroughput": (1,), "nvmlDeviceGetNvLinkState": (0,), "nvmlDeviceGetNvLinkRemotePciInfo_v2": (0,),
    "nvmlDeviceGetRetiredPages": (0,), "nvmlDeviceGetMigDeviceHandleByIndex": (0,),
    "nvmlDeviceGetFieldValues": ([(138, 0), (139, 0), (138, 7)],),
}
THEIR_NAMES = {
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetMemoryInfo_v2": "nvmlDeviceGetMemoryInfo",
}
LATER = ("nvmlInitWithFlags", "nvmlShutdown")
FIELDS = (
    "total", "used", "free", "reserved", "gpu", "memory", "pid", "usedGpuMemory", "busId", "timeStamp", "smUtil",
    "memUtil", "gpuInstanceSliceCount", "computeInstanceSliceCount", "memorySizeMB", "fieldId", "scopeId", "timestamp",
    "valueType", "nvmlReturn",
)

def plain(value):
    if isinstance(value, (int, str, type(None))):
        return value
    if hasattr(value, "__len__"):
        return [plain(each) for each in value]
    if hasattr(value, "sampleValue"):
        return value.timeStamp, value.sampleValue.uiVal
    if hasattr(value, "nvmlReturn"):
        return [getattr(value, name) for name in FIELDS if hasattr(value, name)], value.value.ullVal
    facts = {name: getattr(value, name) for name in FIELDS if hasattr(value, name)}
    return facts or "a handle"

def theirs(name, *arguments):
    if name == "nvmlDeviceGetMemoryInfo_v2":
        arguments += (pynvml.nvmlMemory_v2,)
    function = getattr(pynvml, THEIR_NAMES.get(name, name), None) or getattr(pynvml, name.rpartition("_")[0], None)
    if function is None:
        return "they have no such function"
    try:
        return 0, plain(function(*arguments))
    except pynvml.NVMLError as error:
        return error.value, None

library = Library()
library.call("nvmlInitWithFlags", 0)
pynvml.nvmlInit()

def both(name):
    if name.startswith("nvmlSystem") or name == "nvmlDeviceGetCount_v2":
        return library.call(name), theirs(name)
    if name == "nvmlDeviceGetHandleByIndex_v2":
        return library.call(name, 1), theirs(name, 1)
    handles = [library.call("nvmlDeviceGetHandleByIndex_v2", index)[1] for index in (0, 1)]
    others = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1)]
    if name == "nvmlDeviceGetTopologyCommonAncestor":
        return library.call(name, *handles), theirs(name, *others)
    if name.endswith(("InstanceId", "Attributes_v2")):
        handles = [library.call("nvmlDeviceGetMigDeviceHandleByIndex", handles[0], 0)[1]]
        others = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(others[0], 0)]
    arguments = ARGUMENTS.get(name, ())
    return library.call(name, handles[0], *arguments), theirs(name, others[0], *arguments)

answer = {}
for name in CALLS:
    if name in LATER:
        continue
    try:
        (code, value), other = both(name)
    except AttributeError:
        (code, value), other = (13, None), theirs(name, pynvml.nvmlDeviceGetHandleByIndex(0))
    answer[name] = (code, None if code else plain(value)), other
"""


def test_each_function_gives_what_nvidias_own_binding_gives(fake: FakeNvml) -> None:
    fake.add_mig(0, "3g.40gb", 1)
    fake.devices[0].mig_mode = 0  # so that it has utilization, too
    fake.connect(0, 0, fake.devices[1].bus_id)
    fake.devices[0].retired_pages = 3
    for number in range(100):  # more than one call makes room for
        fake.add_process(
            0, os.getpid() + number, GIB // 100, ["compute", "graphics"][number % 2], stays=1, time_stamp=9
        )
    fake.add_process(0, os.getpid(), -1, stays=1)  # of unknown memory
    answers = answer_of(fake, BESIDE)

    assert len(answers) == len(CALLS) - 2
    # The fake driver has not the first version of this one, and theirs asks for the third.
    assert answers.pop("nvmlDeviceGetMPSComputeRunningProcesses")[0] == (FUNCTION_NOT_FOUND, None)
    # Bindings of before 12.575 have no list of the second version.
    known = {name: each for name, each in answers.items() if each[1] != MISSING}
    assert {name: ours for name, (ours, _) in known.items()} == {name: theirs for name, (_, theirs) in known.items()}
    assert len(known) >= len(answers) - 3


def test_a_difference_is_seen(fake: FakeNvml) -> None:
    """A planted one: a structure whose fields stand in another order."""
    planted = "from gpuguard.backends import nvml_library as ours\n"
    planted += 'ours.CALLS["nvmlDeviceGetMemoryInfo"] = ours._structure(ours._MemoryV2)\n'
    fake.add_mig(0, "3g.40gb", 1)
    ours, theirs = answer_of(fake, planted + BESIDE)["nvmlDeviceGetMemoryInfo"]

    assert ours != theirs
