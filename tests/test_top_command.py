"""`gpuguard top` as a command: what it costs the driver, --once, pipes, thresholds, recordings, a real terminal."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import GIB, a_device, a_mig_instance, a_snapshot
from fake_nvml import FakeNvml
from nodes import a_user, change, eventually
from nvml_child import answer_of

from gpuguard.backends import open_backend
from gpuguard.batch.public import PublicJob
from gpuguard.claims.directory import lock_directory
from gpuguard.enforcement.identity import Protected
from gpuguard.errors import DriverUnresponsive
from gpuguard.model import ALL_FIELDS, CLOCKS, HEALTH, PCIE, POWER, WHO_FIELDS, Gap, Snapshot
from gpuguard.source import write_state
from gpuguard.top import scene_source as top_feed
from gpuguard.top.scene import Thresholds
from gpuguard.top.scene_source import EVERY_TIME, IN_TURNS, SceneFeed, merged, site_rules
from gpuguard.users import user_name

_SILENT = ("name", "memory_total", "memory_used", "temperature", "power_draw", "compute_mode")
COUNTED = """
from gpuguard.top.devices import fields_shown
from gpuguard.top.scene_source import SceneFeed
backend, answer = nvml.open(), []
feed = SceneFeed("nvml", lambda: backend, lambda: None, lambda: None)
feed.source.fresh, feed.more = True, fields_shown({width})
for number in range(21):
    fake.reset_calls()
    seen, _ = feed.source.sample()
    answer.append(sum(fake.calls().values()))
answer = answer, seen
"""


@pytest.fixture
def jobs():
    with ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(40)]
        yield [child.pid for child in children]
        for child in children:
            child.kill()


@pytest.mark.parametrize(("width", "most"), [(100, 72), (120, 98), (200, 114)])  # as docs/top.md says
def test_so_many_driver_calls_at_most_take_8_devices_with_5_processes_each(tmp_path, jobs, width, most):
    with FakeNvml(tmp_path, devices=8) as fake:
        for number, pid in enumerate(jobs):
            fake.add_process(number % 8, pid, GIB)
        calls, seen = answer_of(fake, COUNTED.format(width=width))

    assert max(calls[1:]) <= most, calls
    assert all(
        (device.pstate is not None, device.pcie_rx is not None) == (width >= 120, width >= 170)
        for device in seen.devices
    )
    assert all(len(device.processes) == 5 for device in seen.devices)
    everything = ("name", "temperature", "power_draw", "power_limit", "utilization", "problems", "memory_used")
    assert all(getattr(device, name) is not None for device in seen.devices for name in everything)


def test_power_temperature_and_health_of_each_device_take_turns_and_the_first_look_reads_all():
    before = a_snapshot(*[a_device(index) for index in range(6)])
    turns = [top_feed.due_devices(look, before) for look in range(4)]

    assert top_feed.groups(None) == WHO_FIELDS
    assert top_feed.groups(before).isdisjoint({POWER, HEALTH})
    assert sorted(uuid for turn in turns for uuid in turn) == [device.uuid for device in before.devices]
    assert top_feed.due_devices(4, before) == turns[0]


def test_of_many_devices_no_more_than_two_are_asked_what_takes_long():
    asked = []

    def sample(fields, uuids=None):
        asked.append((PCIE in fields, list(uuids or ())))
        return a_snapshot(*[a_device(index) for index in range(64)])

    feed = a_feed(SimpleNamespace(name="simulated", simulated=True, sample=sample))
    feed.source.fresh, feed.more = True, frozenset({PCIE})
    for _ in range(33):
        feed.source.sample()
    slow = [uuids for is_slow, uuids in asked[1:] if is_slow]

    assert {len(uuids) for uuids in slow} == {2}
    assert len({uuid for uuids in slow for uuid in uuids}) == 64


def test_the_instances_of_a_divided_device_are_looked_for_every_time():
    parent = a_device(0, mig_mode=True)
    before = a_snapshot(parent, a_mig_instance(parent))

    assert HEALTH in top_feed.groups(before)
    assert [top_feed.due_devices(look, before) for look in range(2)] == [[parent.uuid], []]


def after_a_turn(before: Snapshot, more: Snapshot) -> Snapshot:
    return before.updated(merged(before, more, IN_TURNS, ALL_FIELDS))


def test_a_turn_changes_what_it_has_read_and_nothing_else():
    torn = a_device(0, power_draw=300.0, processes_plausible=False)
    before = a_snapshot(torn, a_device(1, power_draw=300.0), gaps=(Gap(torn.uuid, "fan_speed", "no"),))
    blank = replace(a_device(0), **dict.fromkeys(("name", "memory_total", "memory_used", "processes", "temperature")))
    more = a_snapshot(replace(blank, power_draw=400.0), gaps=(Gap(a_device(0).uuid, "temperature", "no"),))
    now = after_a_turn(before, more)

    assert [device.power_draw for device in now.devices] == [400.0, 300.0]
    assert now.devices[0] == replace(before.devices[0], power_draw=400.0, temperature=None)
    assert [gap.field for gap in now.gaps] == ["temperature"]


@pytest.mark.parametrize("turn", [True, False])
def test_of_a_device_that_is_lost_nothing_but_its_name_is_kept(turn):
    before = a_snapshot(a_device(0))
    now = a_snapshot(replace(a_device(0), **dict.fromkeys(_SILENT), problems=("lost",)))
    seen = after_a_turn(before, now) if turn else merged(before, now, EVERY_TIME | {POWER}, WHO_FIELDS)
    (device,) = seen.devices

    assert (device.name, device.problems) == ("NVIDIA H100 80GB HBM3", ("lost",))
    assert device.memory_used is None and device.temperature is None


def test_what_was_not_read_this_time_is_as_it_was():
    gaps = (Gap(a_device(0).uuid, "fan_speed", "no"),)
    before = a_snapshot(a_device(0, temperature=50.0, power_draw=300.0, power_limit=350.0), gaps=gaps)
    kept, new = {"name": None, "temperature": None, "problems": None}, {"power_draw": 400.0, "memory_used": GIB}
    # Power is read this time, and its limit is unknown: that is not taken from before.
    now = a_snapshot(a_device(0, power_limit=None, **kept, **new), driver_version=None)
    seen = merged(before, now, EVERY_TIME | {POWER}, WHO_FIELDS)

    assert seen.devices == (a_device(0, temperature=50.0, power_limit=None, **new),)
    assert (seen.driver_version, len(seen.gaps)) == ("550.54.15", 1)


def test_what_is_not_shown_any_more_is_forgotten_instead_of_growing_old():
    before, now = a_snapshot(a_device(0, pstate=0, fan_speed=30.0)), a_snapshot(a_device(0))
    wanted = WHO_FIELDS | {CLOCKS}
    kept = merged(before, now, EVERY_TIME, wanted)
    (device,) = merged(before, now, EVERY_TIME, WHO_FIELDS).devices

    assert kept.devices[0].pstate == 0
    assert (device.pstate, device.fan_speed) == (None, 30.0)


def a_feed(backend):
    feed = SceneFeed("simulated", lambda: backend, lambda: lock_directory(None, backend="simulated"), lambda: None)
    feed.tree = True
    return feed


def test_a_scene_has_processes_with_what_they_do_beside_the_gpu_and_their_ancestors(node):
    with a_user(node, "1", 10 * GIB, 50.0) as child:
        feed = a_feed(open_backend("simulated"))
        feed.sample()
        assert eventually(lambda: any(use.cpu is not None for use in feed.sample().host.values()))
        scene = feed.sample()

        (running,) = [running for use in scene.uses for running in use.processes or ()]
        assert running.process.pid == child.pid
        assert scene.host[child.pid, running.process.start_time].memory > 2**20
        assert scene.ancestors[child.pid].parent == os.getpid()
        assert scene.ancestors[os.getpid()].parent == os.getppid()
        # Of a worker the command changes with each test; what started it keeps its own.
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
        assert list(scene.ancestors[os.getppid()].command) == command
        change(node, 1, faults=("lost",))
        assert "lost" in (feed.sample().uses[1].device.problems or ())


@pytest.mark.parametrize(("every", "asks_the_driver"), [(1.0, True), (10.0, False), (None, False)])
def test_a_daemon_that_samples_more_rarely_than_the_screen_is_drawn_is_passed_over(node, every, asks_the_driver):
    seen = open_backend("simulated").sample(WHO_FIELDS)
    write_state(lock_directory(None, backend="simulated"), replace(seen, clock=seen.clock - 5.0), 10.0)
    feed = a_feed(open_backend("simulated"))
    feed.every = every

    assert (feed.sample().age is None) == asks_the_driver
    feed.source.fresh = False  # the key f: the daemon all the same
    assert feed.sample().age is not None


def test_a_scene_has_the_jobs_that_wait_or_run_those_of_the_viewer_first(node, monkeypatch):
    jobs = [PublicJob(user, "1", "waiting", None, "true", 1) for user in ("0ther", user_name(os.geteuid()))]
    monkeypatch.setattr(top_feed, "public_jobs", lambda directory, claims: jobs)
    feed = a_feed(open_backend("simulated"))
    assert feed.sample().jobs == (jobs[1], jobs[0])

    def fails(directory, claims):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(top_feed, "public_jobs", fails)
    monkeypatch.setattr(top_feed, "QUEUE_SECONDS", 0.0)
    assert feed.sample().jobs == ()


def test_after_a_fault_of_the_driver_everything_is_read_anew():
    asked = []

    def sample(fields, devices=None):
        asked.append(fields == WHO_FIELDS)
        if len(asked) == 3:
            raise DriverUnresponsive("hangs")
        return a_snapshot()

    feed = a_feed(SimpleNamespace(name="simulated", simulated=True, sample=sample))
    feed.sample(), feed.sample()
    with pytest.raises(DriverUnresponsive):
        feed.sample()
    feed.sample()

    assert asked == [True, False, False, True]


def test_thresholds_and_protection_come_from_the_sites_policies(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "version: 1\nprotect: {executables: [/usr/bin/sleep]}\npolicies:\n"
        "  - {name: a, for: 1m, when: {temperature: {above: 85C}}, steps: [log]}\n"
        "  - {name: b, for: 1m, when: {temperature: {above: 80C}}, steps: [log]}\n"
        "  - {name: c, for: 1m, when: {power: {above: 90%}}, steps: [log]}\n"
        "  - {name: d, for: 1m, when: {memory: {above: 70GiB}}, steps: [log]}\n"
    )
    path.chmod(0o644)

    thresholds, protected = site_rules(str(path))

    assert thresholds == Thresholds(temperature=80.0, power_share=0.9, memory=70 * GIB)
    assert protected.executables == ("/usr/bin/sleep",)
    assert site_rules(str(tmp_path / "none.yaml")) == (Thresholds(), Protected())


def test_once_prints_all_and_ends(node, command):
    with a_user(node, "1", 10 * GIB, 50.0) as child:
        status, said, _ = command("top", "--once")
        _, into_a_pipe, _ = command("top", "--ascii", "--every", "10s")

    assert status == 0
    assert said.startswith("SIMULATED ")
    assert f" {child.pid} " in said and "used without a claim" in said
    assert "\x1b" not in said and "…" not in said
    assert into_a_pipe.isascii() and into_a_pipe.count("SIMULATED") == 1


@pytest.mark.usefixtures("node")
def test_only_visible_shows_these_alone_and_none_is_said(command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    lines = [line for line in command("top", "--once", "-o")[1].splitlines() if line[:4].strip().isdigit()]
    assert [line.split()[0] for line in lines] == ["2"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, _, error = command("top", "--once", "-o")
    assert status == 2 and "no GPU is visible" in error


def test_a_recording_is_shown_without_a_look_at_this_machine(node, tmp_path, command):
    file = str(tmp_path / "node.rec")
    with a_user(node, "1", 10 * GIB, 50.0) as child:
        assert command("record", file, "--for", "300ms", "--every", "100ms")[0] == 0
    status, said, _ = command("top", "--once", "--backend", f"replay:{file}")

    assert status == 0
    assert said.startswith("RECORDED") and f" {child.pid} " in said


@pytest.fixture
def terminal(node, tmp_path):
    if shutil.which("tmux") is None:
        pytest.skip("the screen in tmux (no tmux: apt-get install tmux)")
    socket, name = str(tmp_path / "tmux"), "top"

    class Terminal:
        def tmux(self, *words):
            done = subprocess.run(["tmux", "-S", socket, *words], capture_output=True, text=True, check=False)
            return done.stdout

        def start(self, columns, rows, *options):
            command = [sys.executable, "-m", "gpuguard", "top", "--every", "200ms", *options]
            size = ["-x", str(columns), "-y", str(rows)]
            self.tmux("-f", "/dev/null", "new-session", "-d", "-s", name, *size, "env", "LANG=C.UTF-8", *command)

        def screen(self):
            return self.tmux("capture-pane", "-p", "-t", name)

        def keys(self, *keys):
            self.tmux("send-keys", "-t", name, *keys)

        def runs(self):
            return name in self.tmux("list-sessions")

    terminal = Terminal()
    yield terminal
    terminal.tmux("kill-server")


@pytest.mark.terminal
def test_in_a_real_terminal_it_shows_the_machine_answers_keys_and_leaves(terminal, node):
    pytest.importorskip("textual")
    with a_user(node, "1", 10 * GIB, 50.0) as child:
        terminal.start(80, 24)
        assert eventually(lambda: f" {child.pid} " in terminal.screen()), terminal.screen()
        assert "10.0/80" in terminal.screen() and "q:quit" in terminal.screen()
        assert max(map(len, terminal.screen().splitlines())) <= 80
        terminal.keys("?")
        assert eventually(lambda: "choose a process" in terminal.screen())
        terminal.keys("Escape")
        assert eventually(lambda: "choose a process" not in terminal.screen())
        terminal.keys("q")
        assert eventually(lambda: not terminal.runs())


# As su and docker do: the terminal's end reaches this program alone, which waits for the command.
KEEPS_HANG_UPS = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
child = subprocess.Popen(sys.argv[2:], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


@pytest.mark.terminal
@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_it_ends_with_its_terminal_also_where_no_hang_up_reaches_it(terminal, tmp_path, options):
    pytest.importorskip("textual")
    pid = tmp_path / "pid"
    command = [sys.executable, "-m", "gpuguard", "top", *options]
    keeper = [sys.executable, "-c", KEEPS_HANG_UPS, str(pid), *command]
    terminal.tmux("-f", "/dev/null", "new-session", "-d", "-s", "top", "env", "LANG=C.UTF-8", *keeper)
    assert eventually(lambda: "no processes" in terminal.screen()), terminal.screen()
    top = int(pid.read_text())
    terminal.tmux("kill-session", "-t", "top")
    try:
        assert eventually(lambda: not os.path.exists(f"/proc/{top}"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(top, signal.SIGKILL)


@pytest.mark.terminal
def test_the_plain_view_draws_again_and_again_and_says_what_would_be_better(terminal, node):
    terminal.start(80, 24, "--plain")
    assert eventually(lambda: "gpuguard[tui]" in terminal.screen()), terminal.screen()
    assert "no processes" in terminal.screen()
    with a_user(node, "1", 10 * GIB, 50.0) as child:
        assert eventually(lambda: f" {child.pid} " in terminal.screen())
    terminal.keys("C-c")
    assert eventually(lambda: not terminal.runs())
