"""Node specs: ``"8xH100-80GB"``, ``"2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb"`` -> the devices of a simulated node.

A model that is not in MODELS needs a memory: ``"4xFoo-24GB"``.  As on the box it comes in, GB means GiB here.
Knows nothing of what the devices do: see node.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from gpuguard.errors import InvalidRequest

MiB = 2**20
DEVICES_AT_MOST = 64
LANES_BYTES = {3: 985e6, 4: 1969e6, 5: 3938e6}  # per second of one lane, by PCIe generation


@dataclass(frozen=True)
class Model:
    """What all devices of one model have in common."""

    name: str
    memory_total: int  # bytes
    power_limit: float  # watts
    idle_power: float
    clock_sm_max: int  # MHz
    clock_memory_max: int
    pcie_generation: int
    temperature_slowdown: float = 90.0
    temperature_shutdown: float = 95.0
    nvlinks: int = 0  # links per device; 0: pairs are connected by PCIe alone
    mig: bool = False
    ecc: bool = True
    fan: bool = False


@dataclass(frozen=True)
class Part:
    """One device of a spec: its model, and how it is divided (profiles; empty: it is not)."""

    model: Model
    profiles: tuple[str, ...] = ()


def _model(name: str, mebibytes: int, watts: int, idle: int, sm: int, memory: int, pcie: int, **more: float) -> Model:
    return Model(f"NVIDIA {name}", mebibytes * MiB, watts, idle, sm, memory, pcie, **more)  # type: ignore[arg-type]


# (model, GiB on the box) -> what `nvidia-smi -q` shows on such a device.  Without a memory, the first one is meant.
MODELS = {
    ("T4", 16): _model("Tesla T4", 15360, 70, 10, 1590, 5001, 3),
    ("V100", 16): _model("Tesla V100-SXM2-16GB", 16384, 300, 42, 1530, 877, 3, nvlinks=6),
    ("V100", 32): _model("Tesla V100-SXM2-32GB", 32768, 300, 42, 1530, 877, 3, nvlinks=6),
    ("A10", 24): _model("A10", 23028, 150, 17, 1695, 6251, 4),
    ("A100", 40): _model("A100-SXM4-40GB", 40960, 400, 52, 1410, 1215, 4, nvlinks=12, mig=True),
    ("A100", 80): _model("A100-SXM4-80GB", 81920, 400, 60, 1410, 1593, 4, nvlinks=12, mig=True),
    ("A6000", 48): _model("RTX A6000", 49140, 300, 22, 2100, 8001, 4, fan=True),
    ("L4", 24): _model("L4", 23034, 72, 13, 2040, 6251, 4),
    ("L40S", 48): _model("L40S", 46068, 350, 33, 2520, 9001, 4),
    ("H100", 80): _model("H100 80GB HBM3", 81559, 700, 70, 1980, 2619, 5, nvlinks=18, mig=True),
    ("H200", 141): _model("H200", 143771, 700, 76, 1980, 3201, 5, nvlinks=18, mig=True),
    ("B200", 180): _model("B200", 183359, 1000, 140, 1965, 3996, 5, nvlinks=18, mig=True),
    ("RTX3090", 24): _model("GeForce RTX 3090", 24576, 350, 25, 2100, 9751, 4, ecc=False, fan=True),
    ("RTX4090", 24): _model("GeForce RTX 4090", 24564, 450, 18, 3105, 10501, 4, ecc=False, fan=True),
    ("RTX5090", 32): _model("GeForce RTX 5090", 32607, 575, 20, 3090, 14001, 5, ecc=False, fan=True),
}

_PART = re.compile(r"(?:(\d{1,4})x)?([A-Za-z][A-Za-z0-9_]{0,39})(?:-(\d{1,5})GB)?(?::mig=([0-9a-z.,]+))?")
_PROFILE = re.compile(r"([1-7])g\.(\d{1,3})gb")


def parse_spec(spec: str) -> tuple[Part, ...]:
    """The devices of *spec*, in index order.

    Raises:
        InvalidRequest: it cannot be understood, or no such device can exist; says what can.
    """
    parts = [part for group in spec.strip().split("+") for part in _group(group.strip(), spec)]
    if len(parts) > DEVICES_AT_MOST:
        raise InvalidRequest(f"{spec!r} has {len(parts)} devices: at most {DEVICES_AT_MOST} fit in a node.")
    return tuple(parts)


def instance_memory(profile: str) -> int:
    """Bytes of a MIG instance with that profile; real ones have a little less than their name says."""
    return int(profile.partition(".")[2].removesuffix("gb")) * 1008 * MiB


def _group(group: str, spec: str) -> list[Part]:
    match = _PART.fullmatch(group)
    if not match:
        raise InvalidRequest(
            f"{spec!r} is no node: {group!r} is not COUNTxMODEL-MEMORY.  "
            "Write it like '8xH100-80GB', '4xRTX4090' or '2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb'."
        )
    count, name, gibibytes, profiles = match.groups()
    if count is not None and not 0 < int(count) <= DEVICES_AT_MOST:
        raise InvalidRequest(f"{group!r} has {int(count)} devices: a node has 1 to {DEVICES_AT_MOST}.")
    model = _find_model(name, None if gibibytes is None else int(gibibytes))
    divided = tuple(profiles.split(",")) if profiles else ()
    _check_profiles(model, divided, group)
    return [Part(model, divided)] * int(count or 1)


def _find_model(name: str, gibibytes: int | None) -> Model:
    known = {key: model for key, model in MODELS.items() if key[0].lower() == name.lower()}
    for (_, memory), model in known.items():
        if gibibytes in (memory, None):
            return model
    if known:
        sizes = " or ".join(f"{key[0]}-{key[1]}GB" for key in known)
        raise InvalidRequest(f"there is no {name} with {gibibytes} GB: write {sizes}, or give it a name of your own.")
    if not gibibytes:
        names = sorted({key[0] for key in MODELS})
        near = difflib.get_close_matches(name.upper(), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}."
        raise InvalidRequest(f"the model {name!r} is not known: {hint}  Any name will do with a memory: '{name}-24GB'.")
    return Model(f"NVIDIA {name}", gibibytes * 1024 * MiB, 300, 25, 2000, 8000, 4, fan=True)


def _check_profiles(model: Model, profiles: tuple[str, ...], group: str) -> None:
    if profiles and not model.mig:
        raise InvalidRequest(f"{group!r}: {model.name} cannot be divided; A100, H100, H200 and B200 can.")
    slices = 0
    for profile in profiles:
        match = _PROFILE.fullmatch(profile)
        if not match or not int(match[2]):
            raise InvalidRequest(f"{group!r}: {profile!r} is no MIG profile; write them like 'mig=3g.20gb,3g.20gb'.")
        slices += int(match[1])
    memory = sum(instance_memory(profile) for profile in profiles)
    if slices > 7 or memory > model.memory_total:
        raise InvalidRequest(
            f"{group!r}: a device has 7 slices and {model.memory_total / 2**30:.0f} GiB; "
            f"these profiles need {slices} slices and {memory / 2**30:.0f} GiB."
        )
