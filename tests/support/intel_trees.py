"""Trees of files as Linux shows Intel GPUs: /sys with its links, /proc with fdinfo, and the answers of render nodes.

place = IntelTree(tmp_path, MACHINES["b60x2"])
place.client("0000:05:00.0", os.getpid(), memory=GIB, ccs=50)
backend = intel.open(str(tmp_path), place.clock)
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
KIB = 1024
CYCLES = 19_200_000  # a second of a GPU's time stamps

PCI_IDS = """\
# names of the devices that the trees have
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t56a5  not the one
8086  Intel Corporation
\t56a0  DG2 [Arc A770]
\t56a5  DG2 [Arc A380]
\t56a6  DG2 [Arc A310]
\t56c0  ATS-M [Data Center GPU Flex 170]
\t0bd5  Ponte Vecchio XT (2 Tile) [Data Center GPU Max 1550]
\t7d55  Meteor Lake-P [Intel Arc Graphics]
\t9b41  CometLake-U GT2 [UHD Graphics]
\te20b  Battlemage G21 [Arc B580]
\te211  Battlemage G21 [Arc Pro B60]
10de  NVIDIA Corporation
"""


@dataclass(frozen=True)
class IntelCard:
    """A GPU; the values of its sensors follow from its address, so that no two GPUs have the same."""

    device_id: str
    driver: str  # xe or i915
    address: str
    vram: tuple[int, ...] = ()  # bytes of each tile; () if it is part of the CPU
    used: int = 0  # bytes that are in use without a process; 0 where the driver tells no use to this user
    labels: tuple[str, ...] = ("card", "pkg")  # of the sensors of power and energy of xe
    media: bool = False  # whether it has an own GT for video
    asleep: bool = False
    counts: bool = True  # whether fdinfo counts the work of engines; not on a virtual function

    @property
    def number(self) -> int:
        """A number of its own."""
        return int(self.address[5:7], 16)


A310 = IntelCard("56a6", "i915", "0000:03:00.0", (4 * GIB,))
A380_I915 = IntelCard("56a5", "i915", "0000:0b:00.0", (6 * GIB,))
A380_XE = IntelCard("56a5", "xe", "0000:08:00.0", (6 * GIB,), 80 * 2**20, labels=("pkg",))
A770 = IntelCard("56a0", "xe", "0000:04:00.0", (16 * GIB,), 90 * 2**20)
B580 = IntelCard("e20b", "xe", "0000:03:00.0", (12 * GIB,), 120 * 2**20, media=True)
B60 = IntelCard("e211", "xe", "0000:05:00.0", (24 * GIB,), 100 * 2**20, media=True)
B60_2 = IntelCard("e211", "xe", "0000:a5:00.0", (24 * GIB,), 3 * GIB, media=True)
MAX_1550 = IntelCard("0bd5", "xe", "0000:3a:00.0", (64 * GIB, 64 * GIB), 2 * GIB)
FLEX_170 = IntelCard("56c0", "i915", "0000:4d:00.0", (16 * GIB,))
COMET_LAKE = IntelCard("9b41", "i915", "0000:00:02.0")
METEOR_LAKE = IntelCard("7d55", "xe", "0000:00:02.0", media=True)
VIRTUAL_FUNCTION = IntelCard("56c0", "xe", "0000:4d:00.1", (4 * GIB,), counts=False)
ASLEEP = IntelCard("e20b", "xe", "0000:03:00.0", (12 * GIB,), 120 * 2**20, media=True, asleep=True)

MACHINES: Mapping[str, tuple[IntelCard, ...]] = {
    "a310": (A310,),
    "a380 with i915": (A380_I915,),
    "a380 with xe": (A380_XE,),
    "a770": (A770,),
    "b580": (B580,),
    "two b60": (B60, B60_2),
    "max 1550": (MAX_1550,),
    "flex 170": (FLEX_170,),
    "comet lake": (COMET_LAKE,),
    "meteor lake": (METEOR_LAKE,),
    "meteor lake and b580": (METEOR_LAKE, B580),
    "asleep": (ASLEEP,),
    "one asleep beside one awake": (ASLEEP, B60),
    "virtual function": (VIRTUAL_FUNCTION,),
}


@dataclass
class _Client:
    card: IntelCard
    path: Path
    number: int
    engines: dict[str, float]  # percent of one engine of the class
    memory: int
    busy: dict[str, float] = field(default_factory=dict)


class IntelTree:
    """The files of one machine; its counters follow its own clock, which stands until it is advanced."""

    def __init__(self, place: Path, cards: tuple[IntelCard, ...]) -> None:
        self.place, self.cards = place, {card.address: card for card in cards}
        self.now, self.load = 1000.0, {card.address: 0.0 for card in cards}  # seconds; percent
        self.watts = {card.address: 40.0 + card.number for card in cards}
        self._idle = {card.address: 5000.0 for card in cards}  # milliseconds
        self._joules = {card.address: 70_000.0 + card.number for card in cards}
        self.broken: Path | None = None  # a file that is not written again
        self._clients: list[_Client] = []
        self.write("proc/meminfo", "MemTotal:       65536000 kB\nMemFree:  1 kB\nMemAvailable:   50000000 kB\n")
        self.write("usr/share/misc/pci.ids", PCI_IDS)
        for position, card in enumerate(cards):
            self._make(card, position)
        self.write_counters()

    def clock(self) -> float:
        """The time on this machine."""
        return self.now

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file below the place, unless it is broken."""
        file = self.place / path
        if file == self.broken:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def device(self, address: str) -> Path:
        """The folder of a PCI device."""
        return self.place / "sys/devices" / _way(self.cards[address])

    def card(self, address: str) -> Path:
        """The folder of a card of DRM."""
        return next(path for path in (self.device(address) / "drm").iterdir() if path.name.startswith("card"))

    def files(self) -> list[str]:
        """All files, as paths below the place."""
        found = (path for path in self.place.rglob("*") if path.is_file() and not path.is_symlink())
        return sorted(str(path.relative_to(self.place)) for path in found)

    def lose(self, address: str) -> None:
        """Take the GPU out of the machine."""
        for link in (self.place / "sys/class/drm").iterdir():
            if link.is_symlink() and address in os.readlink(link):
                link.unlink()

    def advance(self, seconds: float) -> None:
        """Let time go by: GPUs draw power, and processes keep their engines busy."""
        self.now += seconds
        for address in self.cards:
            self._idle[address] += 1000 * seconds * (1 - self.load[address] / 100)
            self._joules[address] += self.watts[address] * seconds
        for client in self._clients:
            for engine, percent in client.engines.items():
                client.busy[engine] = client.busy.get(engine, 0.0) + percent / 100 * seconds
        self.write_counters()

    def client(self, address: str, pid: int, *, memory: int = 0, **engines: float) -> Path:
        """Let a process have a GPU open: it holds *memory* bytes and keeps engines busy, as in ccs=50 (percent).

        Returns its file in fdinfo.
        """
        card, number = self.cards[address], len(self._clients) + 3
        node = f"/dev/dri/{self._render(card)}"
        (self.place / f"proc/{pid}/fd").mkdir(parents=True, exist_ok=True)
        (self.place / f"proc/{pid}/fdinfo").mkdir(exist_ok=True)
        (self.place / f"proc/{pid}/fd/{number}").symlink_to(node)
        (self.place / f"proc/{pid}/fd/{number + 100}").symlink_to("/dev/null")
        path = self.place / f"proc/{pid}/fdinfo/{number}"
        self._clients.append(_Client(card, path, number, engines, memory))
        self.write_counters()
        return path

    def write_counters(self) -> None:
        """Write all that counts."""
        for address, card in self.cards.items():
            device, idle = self.device(address), round(self._idle[address])
            if card.driver == "i915":
                self._set(self.card(address) / "gt/gt0/rc6_residency_ms", idle)
            for gt in device.glob("tile*/gt*") if card.counts else ():
                media = card.media and gt.name == "gt1"
                self._set(gt / "gtidle/idle_residency_ms", 1000 * self.now if media else idle)
            for energy in device.glob("hwmon/hwmon*/energy*_input"):
                microjoules = round(self._joules[address] * 1e6)
                self._set(energy, microjoules if energy.name != "energy2_input" else microjoules // 2)
            held = sum(client.memory for client in self._clients if client.card == card)
            self.write(f"dev/dri/{self._render(card)}", regions_answer(card, card.used and card.used + held))
        for client in self._clients:
            self._set(client.path, self._fdinfo(client))

    def _set(self, path: Path, content: object) -> None:
        self.write(str(path.relative_to(self.place)), f"{content}\n")

    def _make(self, card: IntelCard, position: int) -> None:
        device = self.device(card.address)
        device.mkdir(parents=True)
        name, render = f"card{len(self.cards) - position}", self._render(card)
        for node in (name, render):
            (device / "drm" / node).mkdir(parents=True)
            (device / "drm" / node / "device").symlink_to(device)
            (self.place / "sys/class/drm").mkdir(parents=True, exist_ok=True)
            (self.place / "sys/class/drm" / node).symlink_to(device / "drm" / node)
        (self.place / "sys/class/drm" / f"{name}-DP-1").mkdir()
        driver = self.place / "sys/bus/pci/drivers" / card.driver
        driver.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(driver)
        for path, content in {**_of_pci(card), **(_of_xe(card) if card.driver == "xe" else {})}.items():
            _write(device / path, content)
        if card.driver == "i915":
            for path, content in _of_i915(card).items():
                _write(device / "drm" / name / path, content)
        for path, content in (_sensors(card) if card.vram and card.counts else {}).items():
            _write(device / "hwmon" / f"hwmon{10 - position}" / path, content)
        if card.vram:
            for port, width in zip(list(device.parents)[:2], ("1", "8"), strict=True):
                _write(port / "vendor", "0x8086")
                _write(port / "current_link_speed", "16.0 GT/s PCIe" if width == "8" else "2.5 GT/s PCIe")
                _write(port / "current_link_width", width)

    def _render(self, card: IntelCard) -> str:
        return f"renderD{128 + list(self.cards).index(card.address)}"

    def _fdinfo(self, client: _Client) -> str:
        card = client.card
        lines = [
            "pos:\t0",
            "flags:\t0100002",
            f"drm-driver:\t{card.driver}",
            f"drm-client-id:\t{client.number}",
            f"drm-pdev:\t{card.address}",
        ]
        if card.driver == "xe":
            regions = [f"vram{tile}" for tile in range(len(card.vram))] or ["gtt"]
            engines = {"rcs": 1, "bcs": 1, "vcs": 2, "vecs": 2, "ccs": 4}
        else:
            regions = ["local0"] if card.vram else ["system0"]
            engines = {"render": 1, "copy": 1, "video": 2, "video-enhance": 1, "compute": 4}
        for region in regions:
            lines += [f"drm-total-{region}:\t{client.memory // len(regions) // KIB + 512} KiB"]
            lines += [f"drm-resident-{region}:\t{client.memory // len(regions) // KIB} KiB"]
        lines += ["drm-total-stolen-local0:\t99 MiB", "drm-resident-stolen-local0:\t99 MiB"]
        for engine, capacity in engines.items() if card.counts else ():
            seconds = client.busy.get(engine.replace("-", "_"), 0.0)
            if card.driver == "xe":
                lines += [f"drm-cycles-{engine}:\t{round(seconds * CYCLES)}"]
                lines += [f"drm-total-cycles-{engine}:\t{round(self.now * CYCLES)}"]
            else:
                lines += [f"drm-engine-{engine}:\t{round(seconds * 1e9)} ns"]
            lines += [f"drm-engine-capacity-{engine}:\t{capacity}"] * (capacity > 1)
        return "\n".join(lines)


def regions_answer(card: IntelCard, used: int) -> bytes:
    """What the kernel answers to the question for the memory regions of a GPU, of which *used* bytes are in use."""
    rows = [(0, 0, 4096, 62 * GIB, GIB if card.driver == "xe" else 62 * GIB)]
    for tile, total in enumerate(card.vram):
        here = used if tile == 0 else 0
        rows.append((1, tile, 65536, total, here if card.driver == "xe" else total - here))
    header = struct.pack("<I", len(rows)).ljust(8 if card.driver == "xe" else 16, b"\0")
    return header + b"".join(struct.pack("<HHIQQ64x", *row) for row in rows)


def _way(card: IntelCard) -> str:
    """The way to a device through its bridges: a root port, and for a discrete GPU the two ports of its switch."""
    if card.address.startswith("0000:00:"):
        return f"pci0000:00/{card.address}"
    bus = card.address[5:7]
    return f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:1a.0/0000:{bus}:1b.0/{card.address}"


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n", encoding="ascii")


def _of_pci(card: IntelCard) -> dict[str, object]:
    return {
        "uevent": f"DRIVER={card.driver}\nPCI_ID=8086:{card.device_id.upper()}\nPCI_SLOT_NAME={card.address}",
        "vendor": "0x8086",
        "power/runtime_status": "suspended" if card.asleep else "active",
        "current_link_speed": "2.5 GT/s PCIe" if card.vram else "Unknown",
        "current_link_width": 1 if card.vram else 0,
        "numa_node": card.number % 2,
        "local_cpulist": f"0-{card.number}",
    }


def _of_xe(card: IntelCard) -> dict[str, object]:
    files: dict[str, object] = {}
    names = [(tile, tile, "rc") for tile in range(len(card.vram) or 1)] + [(0, 1, "mc")] * card.media
    for tile, gt, kind in names:
        folder = f"tile{tile}/gt{gt}"
        files[f"{folder}/gtidle/name"] = f"gt{gt}-{kind}"
        if not card.counts:  # the host reads the clocks, and a virtual function none of them
            continue
        files[f"{folder}/freq0/act_freq"] = 1000 + card.number + gt * (10 if kind == "rc" else -100)
        files[f"{folder}/freq0/rp0_freq"] = 2400 + card.number + gt * (10 if kind == "rc" else -100)
        files[f"{folder}/freq0/rpa_freq"] = 627200
        files[f"{folder}/freq0/throttle/status"] = 1
        for reason in ("pl1", "pl2", "thermal", "prochot"):
            files[f"{folder}/freq0/throttle/reason_{reason}"] = int(reason == "pl1" and card.number % 2 == 1)
    return files


def _of_i915(card: IntelCard) -> dict[str, object]:
    files: dict[str, object] = {
        "gt_act_freq_mhz": 600 + card.number,
        "gt_cur_freq_mhz": 1,
        "gt_RP0_freq_mhz": 2400 + card.number,
        "error": "No error state collected",
        "gt/gt0/rc6_residency_ms": 0,
    }
    for reason in ("status", "pl1", "thermal"):
        files[f"gt/gt0/throttle_reason_{reason}"] = int(reason != "thermal" and card.number % 2 == 1)
    return files


def _sensors(card: IntelCard) -> dict[str, object]:
    if card.driver == "i915":
        return {
            "name": "i915",
            "energy1_input": 0,
            "power1_max": 55_000_000 + card.number,
            "power1_rated_max": 0,
            "temp1_input": 40_000 + 100 * card.number,
            "fan1_input": 0,
        }
    files: dict[str, object] = {
        "name": "xe",
        "temp2_label": "pkg",
        "temp2_input": 41_000 + 100 * card.number,
        "temp2_crit": 100_000,
        "temp2_emergency": 105_000,
        "temp3_label": "vram",
        "temp3_input": 58_000,
        "fan1_input": 945,
    }
    for number, label in ((1, "card"), (2, "pkg")):
        if label in card.labels:
            files[f"energy{number}_label"] = files[f"power{number}_label"] = label
            files[f"energy{number}_input"] = 0
            files[f"power{number}_max"] = 150_000_000 + number
            files[f"power{number}_cap"] = 250_000_000
    return files
