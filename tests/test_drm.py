"""GPUs as the kernel shows them without a driver library: backends/drm.py on trees that the tests write."""

import errno
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from builders import MIB

from gpuguard import procfs
from gpuguard.backends import drm
from gpuguard.backends.drm import CardReading, ClientScanner, NotTold, ProcessLists, Sensors, cards, parse_client
from gpuguard.model import MEMORY, PROCESSES, GpuProcess
from gpuguard.vendors import AMD, INTEL


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def a_card(root: Path, card: str, address: str, driver: str = "amdgpu", render: str = "") -> Path:
    """A card as sysfs shows it; returns the folder of its PCI device."""
    device = root / "sys/devices/pci0000:00" / address
    (device / "drm" / card).mkdir(parents=True)
    if render:
        (device / "drm" / render).mkdir()
    drivers = root / "sys/bus/pci/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(drivers)
    (device / "drm" / card / "device").symlink_to(device)
    classes = root / "sys/class/drm"
    classes.mkdir(parents=True, exist_ok=True)
    (classes / card).symlink_to(device / "drm" / card)
    written(device / "uevent", f"DRIVER={driver}\nPCI_ID=1002:74A1\nPCI_SLOT_NAME={address}\n")
    return device


def fdinfo(pdev: str = "0000:03:00.0", client: int = 7, *lines: str, driver: str = "amdgpu") -> str:
    return "\n".join((f"drm-driver:\t{driver}", f"drm-pdev:\t{pdev}", f"drm-client-id:\t{client}", *lines))


def opens(root: Path, pid: int, text: str, number: int = 5, target: str = "/dev/dri/renderD128") -> None:
    """A process of the tree has a file open, which fdinfo describes with *text*."""
    written(root / f"proc/{pid}/fdinfo/{number}", text)
    folder = root / f"proc/{pid}/fd"
    folder.mkdir(exist_ok=True)
    (folder / str(number)).symlink_to(target)


# Files


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOENT, "does not tell it"),
        (errno.EPERM, "sleeps or is reset"),
        (errno.EACCES, "no permission"),
        (errno.EBUSY, "being reset"),
        (errno.EINVAL, "does not support it"),
        (errno.EOPNOTSUPP, "does not support it"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_each_refusal_of_the_kernel_has_its_reason(code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(drm.os, "open", refuse)

    with pytest.raises(NotTold) as told:
        drm.read("/sys/anything")
    assert words in told.value.reason


def test_a_pipe_in_the_place_of_a_file_keeps_its_reader_waiting_no_longer_than_an_empty_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(NotTold, match="empty"):
        drm.read(f"{tmp_path}/pipe")
    assert drm.read_or(f"{tmp_path}/pipe") == ""


@pytest.mark.parametrize("text", ["", "0x10", "1 2", "٣", "9" * 21, "nan"])
def test_what_is_no_decimal_number_is_unknown(text: str) -> None:
    with pytest.raises(NotTold):
        drm.number(text)


def test_a_negative_number_is_a_number() -> None:
    assert drm.number("-273150") == -273150


# Cards


def test_cards_are_counted_by_pci_address_and_connectors_are_no_cards(tmp_path: Path) -> None:
    a_card(tmp_path, "card1", "0000:83:00.0", render="renderD128")
    a_card(tmp_path, "card10", "0000:03:00.0", render="renderD129")
    a_card(tmp_path, "card2", "0000:02:00.0", driver="ast")
    (tmp_path / "sys/class/drm/card1-DP-1").mkdir()
    platform = tmp_path / "sys/devices/platform/amdgpu_xcp_1"
    platform.mkdir(parents=True)
    (tmp_path / "sys/class/drm/card3").mkdir()
    (tmp_path / "sys/class/drm/card3/device").symlink_to(platform)

    found = cards(str(tmp_path), AMD)

    assert [(card.address, card.render_minor) for card in found] == [("0000:03:00.0", 129), ("0000:83:00.0", 128)]
    assert found[0].uuid == "PCI-0000-03-00-0"
    assert cards(str(tmp_path), INTEL) == []


def test_a_tree_without_links_is_read_by_its_uevent(tmp_path: Path) -> None:
    text = "DRIVER=xe\nPCI_ID=8086:E211\nPCI_SLOT_NAME=0000:0B:00.0\n"
    written(tmp_path / "sys/class/drm/card0/device/uevent", text)

    (card,) = cards(str(tmp_path), INTEL)

    assert (card.address, card.ids, card.render_minor, card.asleep) == ("0000:0b:00.0", "8086:e211", None, False)


@pytest.mark.parametrize(
    ("board", "ids", "name"),
    [
        ("AMD Instinct MI300X OAM", None, "AMD Instinct MI300X OAM"),
        ("Instinct MI210", None, "AMD Instinct MI210"),
        ("", "1002  AMD\n\t74a1  Aqua Vanjaram [Instinct MI300X]\n\t\t1002 0c34  Board", "AMD Instinct MI300X"),
        ("", "1002  Advanced Micro Devices\n\t74a1  Raven\n", "AMD Raven"),
        ("", "1002  Advanced Micro Devices\n\t74a2  Other\n1003  Next\n\t74a1  Foreign\n", "AMD GPU 1002:74a1"),
        ("", None, "AMD GPU 1002:74a1"),
    ],
)  # fmt: skip
def test_a_product_is_named_by_its_board_or_else_by_pci_ids(
    tmp_path: Path, board: str, ids: str | None, name: str
) -> None:
    device = a_card(tmp_path, "card0", "0000:03:00.0")
    written(device / "product_name", f"{board}\n")
    if ids is not None:
        written(tmp_path / "usr/share/misc/pci.ids", f"# list\n1001  First\n\t74a1  Wrong\n{ids}")

    assert drm.product_name(str(tmp_path), cards(str(tmp_path), AMD)[0], AMD) == name


@pytest.mark.parametrize(
    ("status", "asleep"), [("suspended", True), ("suspending", True), ("active", False), ("", False)]
)
def test_the_kernel_says_whether_a_gpu_sleeps(tmp_path: Path, status: str, asleep: bool) -> None:
    device = a_card(tmp_path, "card0", "0000:03:00.0")
    written(device / "power/runtime_status", f"{status}\n")

    assert cards(str(tmp_path), AMD)[0].asleep is asleep


# Sensors


@pytest.fixture
def sensors(tmp_path: Path) -> Iterator[tuple[Sensors, Path]]:
    device = a_card(tmp_path, "card0", "0000:03:00.0")
    written(device / "hwmon/hwmon3/name", "nvme\n")
    written(device / "hwmon/hwmon12/name", "amdgpu\n")
    written(device / "hwmon/hwmon12/temp2_label", "junction\n")
    for file in ("temp2_input", "temp2_crit", "power1_average", "pwm1"):
        written(device / "hwmon/hwmon12" / file, "1\n")
    yield Sensors(cards(str(tmp_path), AMD)[0]), device / "hwmon"


def test_a_sensor_is_found_by_its_label(sensors: tuple[Sensors, Path]) -> None:
    found, _ = sensors

    assert found.path("temp", "edge", "junction").endswith("hwmon/hwmon12/temp2_input")
    assert found.path("temp", "junction", suffix="crit").endswith("hwmon/hwmon12/temp2_crit")
    assert found.path("power", suffix="average").endswith("hwmon/hwmon12/power1_average")
    assert found.path("pwm", suffix="").endswith("hwmon/hwmon12/pwm1")


@pytest.mark.parametrize(("kind", "labels", "suffix"), [("temp", ["edge"], "input"), ("power", [], "input")])
def test_a_sensor_that_the_gpu_does_not_have_is_no_file(
    sensors: tuple[Sensors, Path], kind: str, labels: list[str], suffix: str
) -> None:
    with pytest.raises(NotTold):
        sensors[0].path(kind, *labels, suffix=suffix)


def test_a_reset_gives_the_sensors_another_folder_with_other_numbers(sensors: tuple[Sensors, Path]) -> None:
    found, folder = sensors
    found.value("temp", "junction")
    (folder / "hwmon12").rename(folder / "hwmon4")
    for suffix in ("label", "input"):
        (folder / f"hwmon4/temp2_{suffix}").rename(folder / f"hwmon4/temp1_{suffix}")
    found.check()

    assert found.path("temp", "junction").endswith("hwmon/hwmon4/temp1_input")


def test_a_gpu_without_sensors_has_none(tmp_path: Path) -> None:
    a_card(tmp_path, "card0", "0000:03:00.0")

    with pytest.raises(NotTold):
        Sensors(cards(str(tmp_path), AMD)[0]).path("temp", "edge")


# One device


def refuses() -> int:
    raise NotTold("because")


def test_a_field_has_its_value_or_a_gap_that_says_why() -> None:
    reading = CardReading("PCI-0000-03-00-0", {MEMORY}, asleep=True)
    reading.set("memory_total", lambda: 5)
    reading.set("memory_used", refuses)
    reading.set("temperature", lambda: 255)
    reading.set("name", lambda: None)
    reading.set("power_draw", refuses, wakes=True)
    reading.close()

    assert reading.values == {"memory_total": 5}
    assert {gap.field: str(gap.reason) for gap in reading.gaps if gap.field != "power_draw"} == {
        "memory_used": "because",
        "temperature": "implausible value 255",
        "name": "this kernel or GPU does not tell it",
        "memory_free": "this kernel or GPU does not tell it",
        "memory_reserved": "this kernel or GPU does not tell it",
        "memory_shared_with_host": "this kernel or GPU does not tell it",
    }
    assert drm.ASLEEP in [gap.reason for gap in reading.gaps]


@pytest.mark.parametrize(
    ("node", "speed", "width", "values"),
    [
        ("1", "16.0 GT/s PCIe", "16", {"numa_node": 1, "pcie_generation": 4, "pcie_width": 16}),
        ("-1", "2.5 GT/s PCIe", "1", {"pcie_generation": 1, "pcie_width": 1}),
        ("-1", "Unknown", "0", {}),
        ("x", "", "", {}),
    ],
)
def test_place_and_link_of_a_card(tmp_path: Path, node: str, speed: str, width: str, values: dict[str, object]) -> None:
    device = a_card(tmp_path, "card0", "0000:03:00.0", render="renderD130")
    for name, text in {"numa_node": node, "current_link_speed": speed, "current_link_width": width}.items():
        written(device / name, f"{text}\n")
    (card,) = cards(str(tmp_path), AMD)
    reading = CardReading(card.uuid, ())
    drm.read_place(reading, card)
    drm.read_link(reading, card.device)

    assert reading.values == {"pci_bus_id": "0000:03:00.0", "minor_number": 130, **values}
    assert len(reading.gaps) == 6 - len(reading.values)


# Processes


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("drm-memory-vram:\t544428 KiB", 544428 * 1024),
        ("drm-memory-vram: \t16 MiB", 16 * MIB),
        ("drm-memory-vram:\t2 GiB", 2048 * MIB),
        ("drm-memory-vram:\t4096", 4096),
        ("drm-memory-vram:\t0", 0),
        ("drm-memory-vram:\t12 furlongs", 12),
        ("drm-memory-vram:\tmany", None),
        (f"drm-memory-vram:\t{'9' * 20}", None),
    ],
)
def test_memory_of_a_client_has_the_unit_of_its_line(line: str, value: int | None) -> None:
    client = parse_client(4711, fdinfo("0000:03:00.0", 7, line))

    assert client is not None
    assert (client.pid, client.driver, client.address, client.number) == (4711, "amdgpu", "0000:03:00.0", 7)
    assert client.values.get("drm-memory-vram") == value


@pytest.mark.parametrize("text", ["", "pos:\t0\nflags:\t02", "drm-driver:\tamdgpu", fdinfo(client=-1)])
def test_other_files_are_no_clients(text: str) -> None:
    assert parse_client(1, text) is None


def test_a_client_counts_once_however_many_processes_have_it(tmp_path: Path) -> None:
    opens(tmp_path, 100, fdinfo(client=7))
    opens(tmp_path, 100, fdinfo(client=7), number=6)  # dup()
    opens(tmp_path, 101, fdinfo(client=7))  # a child
    opens(tmp_path, 102, fdinfo(client=8))
    opens(tmp_path, 103, fdinfo("0000:83:00.0", 7))  # unique within a device only
    opens(tmp_path, 104, "pos: 0", target="/dev/null")
    opens(tmp_path, 105, fdinfo(client=9), target="/home/alice/renderD128")

    found = ClientScanner(str(tmp_path)).read(everywhere=True)

    assert [(client.pid, client.number) for client in found.found] == [(100, 7), (102, 8), (103, 7)]
    assert not found.hidden


def test_between_full_scans_only_known_clients_are_read(tmp_path: Path) -> None:
    scanner = ClientScanner(str(tmp_path))
    opens(tmp_path, 100, fdinfo(client=7))
    scanner.read(everywhere=True)
    opens(tmp_path, 101, fdinfo(client=8))

    def pids(*, everywhere: bool) -> list[int]:
        return [client.pid for client in scanner.read(everywhere=everywhere).found]

    assert pids(everywhere=False) == [100]
    assert pids(everywhere=True) == [100, 101]


def test_a_new_file_of_a_known_client_shows_with_the_next_full_scan(tmp_path: Path) -> None:
    scanner = ClientScanner(str(tmp_path))
    opens(tmp_path, 100, fdinfo(client=7), number=5)
    scanner.read(everywhere=True)
    opens(tmp_path, 100, fdinfo(client=8), number=6)

    def numbers(*, everywhere: bool) -> list[int]:
        return sorted(client.number for client in scanner.read(everywhere=everywhere).found)

    assert numbers(everywhere=False) == [7]
    assert numbers(everywhere=True) == [7, 8]
    assert numbers(everywhere=False) == [7, 8]
    (tmp_path / "proc/100/fd/5").unlink()
    (tmp_path / "proc/100/fdinfo/5").unlink()
    assert numbers(everywhere=False) == [8]


def test_no_user_delays_a_look_by_many_files_and_what_these_hide_shows_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bob opens hundreds of files, and forks; Alice has a process of a higher number."""
    real, owners = os.stat, {"100": 1001, "101": 1001, "102": 1002}

    def stat(path: str, **how: int | None) -> os.stat_result:
        status = real(path, **how)
        owner = owners.get(str(path).rpartition("/")[2])
        return os.stat_result((*status[:4], owner, *status[5:10])) if owner else status

    def looks(times: int) -> list[list[int]]:
        return [[client.number for client in scanner.read(everywhere=True).found] for _ in range(times)]

    monkeypatch.setattr(drm.os, "stat", stat)
    monkeypatch.setattr(drm, "monotonic", partial(next, count(0.0, drm.MOST_SECONDS / 10)))  # at each glance
    monkeypatch.setattr(drm, "_PAUSE", 1)
    opens(tmp_path, 100, fdinfo(client=1))
    opens(tmp_path, 102, fdinfo(client=2))
    scanner = ClientScanner(str(tmp_path))
    assert looks(2) == [[1, 2]] * 2

    for number in range(200, 240):
        opens(tmp_path, 100, "pos: 0", number=number, target="/dev/null")
    opens(tmp_path, 101, fdinfo(client=3))
    found = looks(8)
    assert all({1, 2} <= set(numbers) for numbers in found)
    assert (3 in found[0], 3 in found[-1]) == (False, True)

    for number in range(200, 240):
        (tmp_path / f"proc/100/fd/{number}").unlink()
    assert looks(6)[-1] == [1, 3, 2]


def test_copies_of_a_file_are_looked_at_once_in_a_while(tmp_path: Path) -> None:
    for number in range(40):
        opens(tmp_path, 100, fdinfo(client=7), number=number)
    scanner, read = ClientScanner(str(tmp_path)), list[str]()
    scanner.read(everywhere=True)
    with pytest.MonkeyPatch.context() as patch:
        real = drm.read_or
        patch.setattr(drm, "read_or", lambda path: read.append(path) or real(path))
        found = scanner.read(everywhere=False).found

    assert ([client.number for client in found], len(read)) == ([7], 8)


def test_a_process_that_hides_its_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens(tmp_path, 100, fdinfo(client=7))
    opens(tmp_path, 101, fdinfo(client=8))
    real = os.open

    def open_or_refuse(path: str, *rest: int) -> int:
        if path.endswith("/101/fd"):
            raise PermissionError(errno.EACCES, "no")
        return real(path, *rest)

    monkeypatch.setattr(drm.os, "open", open_or_refuse)
    found = ClientScanner(str(tmp_path)).read(everywhere=True)

    assert ([client.pid for client in found.found], found.hidden) == ([100], True)


def test_root_without_the_right_to_see_what_a_process_has_open_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(tmp_path, 100, fdinfo(client=7))

    def readlink(path: str, *, dir_fd: int | None = None) -> str:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(drm.os, "readlink", readlink)
    found = ClientScanner(str(tmp_path)).read(everywhere=True)

    assert (found.found, found.hidden) == ((), True)


def test_a_copied_tree_without_descriptors_is_read_by_its_fdinfo(tmp_path: Path) -> None:
    written(tmp_path / "proc/1002/fdinfo/6", fdinfo(client=4))

    assert [client.pid for client in ClientScanner(str(tmp_path)).read(everywhere=True).found] == [1002]


def test_a_node_under_another_name_is_known_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens(tmp_path, 100, fdinfo(client=7), target="/dev/gpu0")
    opens(tmp_path, 101, fdinfo(client=8), target="/dev/zero")
    opens(tmp_path, 102, fdinfo(client=9), target="/dev/gone")
    opens(tmp_path, 103, fdinfo(client=10), target="/dev/shm/file of a user")
    real = os.stat
    status = real("/dev/null")

    def stat(path: str, *, dir_fd: int | None = None, **rest: bool) -> os.stat_result:
        target = "" if dir_fd is None else os.readlink(path, dir_fd=dir_fd)
        if target == "/dev/gpu0":
            return os.stat_result((*status[:10],), {"st_rdev": os.makedev(226, 128)})
        return real(path, dir_fd=dir_fd, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(drm.os, "stat", stat)
        found = ClientScanner(str(tmp_path)).read(everywhere=True).found

    assert [client.pid for client in found] == [100]


def test_no_mount_of_a_users_hides_a_node_or_is_asked_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mount namespace of their own, where /tmp/x can be the node, and /dev/x a file of FUSE."""
    for pid, namespace in ((1, 1), (100, 1), *((pid, 2) for pid in range(101, 107))):
        written(tmp_path / f"proc/{pid}/comm", "")
        (tmp_path / f"proc/{pid}/ns").mkdir()
        (tmp_path / f"proc/{pid}/ns/mnt").symlink_to(f"mnt:[{namespace}]")
    opens(tmp_path, 100, fdinfo(client=6), target="/tmp/x")
    for pid, target in ((101, "/tmp/x"), (102, "/dev/shm/x"), (103, "/dmabuf:x"), (104, "socket:[7]")):
        opens(tmp_path, pid, fdinfo(client=pid), target=target)
    opens(tmp_path, 105, "pos:\t0", target="/dev/x")
    monkeypatch.setattr(drm, "_MOST_FILES", 1)
    for number in (5, 6):  # the second is too many
        opens(tmp_path, 106, fdinfo(client=number), number=number, target="/tmp/x")
    asked, real = list[str](), os.stat

    def stat(path: str, **how: int | None) -> os.stat_result:
        asked.extend([path] if "dir_fd" in how else [])
        return real(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(drm.os, "stat", stat)
        found = ClientScanner(str(tmp_path)).read(everywhere=True)

    assert ([client.pid for client in found.found], found.undescribed, asked) == ([101, 102, 106], (), [])


def a_reading(**values: object) -> CardReading:
    return CardReading("GPU-1", {PROCESSES}, values=dict(values))


def test_a_process_is_listed_with_its_identity() -> None:
    reading = a_reading(memory_total=100 * MIB, memory_used=50 * MIB)
    ProcessLists().read(reading, [GpuProcess(os.getpid(), 40 * MIB)])

    assert reading.values["processes_plausible"] is True
    (process,) = reading.values["processes"]  # type: ignore[misc]
    assert (process.start_time, process.uid) == (procfs.start_time(os.getpid()), os.getuid())  # type: ignore[has-type]


def test_an_entry_of_a_dead_process_stays_ended_when_its_pid_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    lists, row = ProcessLists(), GpuProcess(dead.pid, 4096)
    first, again = a_reading(), a_reading()
    lists.read(first, [row])
    monkeypatch.setattr(procfs, "stat_of", lambda pid: procfs.read_stat(os.getpid()))
    lists.read(again, [row])
    fresh = a_reading()
    ProcessLists().read(fresh, [row])  # who did not see it dead takes it for the new process

    ended = [reading.values["processes"][0].ended for reading in (first, again, fresh)]  # type: ignore[index]
    if procfs.in_first_pid_namespace():
        assert ended == [True, True, False]
    else:
        assert first.values["processes_plausible"] is False


def test_a_list_that_cannot_be_true_is_not_believed() -> None:
    reading = a_reading(memory_total=10 * MIB)
    ProcessLists().read(reading, [GpuProcess(os.getpid(), 50 * MIB)])

    assert reading.values["processes_plausible"] is False
    assert reading.values["processes"] == (GpuProcess(os.getpid(), 50 * MIB),)
    assert "implausible list" in reading.gaps[0].reason


def test_rows_of_one_process_are_one() -> None:
    rows = [
        GpuProcess(2, 5), GpuProcess(1, 5, "graphics"), GpuProcess(1, 6), GpuProcess(1, None, "graphics"),
        GpuProcess(3), GpuProcess(3),
    ]  # fmt: skip

    assert drm.merged_rows(rows) == [GpuProcess(2, 5), GpuProcess(1, 11, "compute+graphics"), GpuProcess(3, None)]
    assert drm.merged_rows(rows, max)[1] == GpuProcess(1, 6, "compute+graphics")
