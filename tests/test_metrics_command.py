"""`gpuguard metrics` as one uses it: a page, a file for node_exporter, a port; and `gpuguard daemon --metrics`."""

import errno
import os
import re
import signal
import socket
import stat
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from builders import a_claim_record, a_device, a_snapshot
from daemons import a_daemon
from exporters import a_metrics_server, fetch
from fake_nvml import FakeNvml
from nodes import GIB, Gpuguard, a_user, eventually, until
from queues import a_ticket
from test_metrics import read, the_one

from gpuguard.claims.directory import lock_directory
from gpuguard.metrics import facts
from gpuguard.metrics.facts import DaemonFacts, EventCounter, RareFields
from gpuguard.metrics.http_server import PAGE_SECONDS
from gpuguard.model import CLOCKS, ECC, MEDIA, NVLINK_FLOW, PCIE, Event, Gap
from gpuguard.watchdog import SiteRules


@pytest.fixture
def textfile(tmp_path):
    """The directory that node_exporter reads."""
    (tmp_path / "textfile").mkdir()
    return tmp_path / "textfile"


def test_the_page_goes_to_standard_output_with_names_of_other_exporters_on_demand(gpuguard):
    done, more = gpuguard("metrics"), gpuguard("metrics", "--compat", "dcgm", "--compat", "nvitop")

    assert done.returncode == 0 and done.stderr == ""
    assert the_one(read(done.stdout), "gpuguard_devices") == 2
    assert "DCGM" not in done.stdout and "gpu_temperature_C" not in done.stdout
    assert "DCGM_FI_DEV_SM_CLOCK{" in more.stdout and "gpu_temperature_C{" in more.stdout


def test_claims_of_users_are_told(gpuguard):
    done = gpuguard("run", "--quiet", "-n", "1", "--", *gpuguard.words("metrics"))

    assert sum(read(done.stdout)["gpuguard_user_claimed_devices"].values()) == 1


def test_a_driver_that_cannot_be_reached_is_an_exit_code_and_a_number(gpuguard, tmp_path):
    (tmp_path / "node" / "node.json").write_text("{")
    done = gpuguard("metrics")

    assert done.returncode == 4 and "is damaged" in done.stderr
    assert the_one(read(done.stdout), "gpuguard_driver_up") == 0


def test_the_file_for_node_exporter_is_whole_and_readable_for_all(gpuguard, textfile):
    left = textfile / "gpuguard.prom.0123456789abcdef.new"
    left.write_text("of a writer that was killed")
    os.utime(left, (0, 0))
    (textfile / "other.prom").write_text("another's")
    former = os.umask(0o077)
    try:
        assert gpuguard("metrics", "--textfile", str(textfile)).returncode == 0
    finally:
        os.umask(former)

    assert sorted(os.listdir(textfile)) == ["gpuguard.prom", "other.prom"]
    assert stat.S_IMODE((textfile / "gpuguard.prom").stat().st_mode) == 0o644
    assert the_one(read((textfile / "gpuguard.prom").read_text()), "gpuguard_devices") == 2


@contextmanager
def running(process):
    """A command that goes on until the block has ended; what it says then is in the list that comes back."""
    said = []
    try:
        yield said
    finally:
        process.terminate()
        said.append(process.communicate(timeout=60)[1])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_file_goes_when_nobody_writes_it_any_more(gpuguard, textfile, signum):
    process = gpuguard.start("metrics", "--textfile", str(textfile), "--every", "1s")
    with running(process) as said:
        assert eventually((textfile / "gpuguard.prom").exists)
        process.send_signal(signum)
        assert process.wait(60) == 0

    assert (os.listdir(textfile), said) == ([], [""])


def test_a_disk_without_room_is_said_once_and_may_pass(gpuguard, textfile, tmp_path):
    process = gpuguard.start("metrics", "--textfile", str(textfile), "--every", "1s")
    with running(process) as said:
        assert eventually((textfile / "gpuguard.prom").exists)
        textfile.rename(tmp_path / "away")
        assert "cannot be written" in process.stderr.readline()
        (tmp_path / "away").rename(textfile)
        (textfile / "gpuguard.prom").unlink()
        assert eventually((textfile / "gpuguard.prom").exists)

    assert said == [""]


def test_a_driver_that_goes_away_while_we_serve_takes_its_numbers_along(gpuguard, tmp_path):
    def page():
        return read(fetch(f"http://{target}/metrics"))

    with a_metrics_server(gpuguard) as target:
        assert "gpuguard_device_temperature_celsius" in page()
        (tmp_path / "node" / "node.json").rename(tmp_path / "away")
        assert eventually(lambda: the_one(page(), "gpuguard_driver_up") == 0)
        gone = page()
        (tmp_path / "away").rename(tmp_path / "node" / "node.json")

        assert "gpuguard_device_temperature_celsius" not in gone and "gpuguard_device_info" in gone
        assert eventually(lambda: "gpuguard_device_temperature_celsius" in page())


def test_a_client_that_accepts_openmetrics_gets_it_and_others_the_plain_format(gpuguard):
    with a_metrics_server(gpuguard) as target:
        asked = urllib.request.Request(f"http://{target}/metrics", headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            kind, text = answer.headers["Content-Type"], answer.read().decode()

        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8" and text.endswith("\n# EOF\n")
        assert "EOF" not in fetch(f"http://{target}/metrics")


def test_many_scrapes_at_once_ask_the_driver_once(tmp_path):
    with FakeNvml(tmp_path, devices=8) as fake, a_metrics_server(Gpuguard(tmp_path, fake)) as target:
        fetch(f"http://{target}/metrics")
        assert eventually(lambda: not _asks_again(fake, target, 1))

        began = time.monotonic()
        asked = _asks_again(fake, target, 10)
        assert asked <= 200 * (1 + (time.monotonic() - began) // PAGE_SECONDS)  # a sample is about 150 calls


def _asks_again(fake: FakeNvml, target: str, times: int) -> int:
    fake.reset_calls()
    for _ in range(times):
        fetch(f"http://{target}/metrics")
    return sum(fake.calls().values())


def test_it_is_ready_for_others_only_on_purpose(gpuguard):
    process = gpuguard.start("metrics", "--serve", "0.0.0.0:0", "--expose", "gpu7.lab")
    with running(process):
        port = int(process.stderr.readline().rpartition(":")[2].partition("/")[0])
        assert [_status(port, host) for host in ("gpu7.lab", "evil.example")] == [200, 421]


def _status(port: int, host: str) -> int:
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        return int(connection.recv(99).split()[1])


def test_a_reader_that_goes_away_is_no_trouble(gpuguard):
    with gpuguard.start("metrics") as process:
        assert process.stdout.readline()
        process.stdout.close()
        process.wait(60)
        assert "Traceback" not in process.stderr.read()


POLICY = "{version: 1, policies: [{name: big, for: 0s, when: {memory: {above: 1GiB}}, steps: [log]}]}"


def target_of(daemon):
    return until(lambda: re.search(r"serving http://([\d.:]+)/metrics", daemon.said()), "it serves")[1]


def page_of(daemon, query=""):
    return read(fetch(f"http://{target_of(daemon)}/metrics{query}"))


def test_what_the_daemon_saw_and_did_is_told(tmp_path):
    with a_daemon(tmp_path, POLICY, "--metrics", "127.0.0.1:0") as daemon, a_user(daemon.node, "0", 10 * GIB):
        daemon.until("log")
        page = page_of(daemon)

        assert the_one(page, "gpuguard_daemon_up") == the_one(page, "gpuguard_driver_up") == 1
        assert the_one(page, "gpuguard_policy_actions_total", policy="big", action="log", outcome="done") == 1
        assert the_one(page, "gpuguard_audit_failures_total") == 0
        assert the_one(page, "gpuguard_waiting_requests") == 0
        assert sum(page["gpuguard_user_unclaimed_devices"].values()) == 1
        assert eventually(lambda: len(page_of(daemon, "?compat=dcgm").get("DCGM_FI_DEV_SM_CLOCK", ())) == 4)
        assert eventually(lambda: "gpuguard_device_ecc_errors_total" in page_of(daemon))
        assert daemon.end() == 0


def test_a_port_that_another_program_has_keeps_no_daemon_from_guarding(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        address = "{}:{}".format(*squatter.getsockname())
        with a_daemon(tmp_path, POLICY, "--metrics", address) as daemon, a_user(daemon.node, "0", 10 * GIB):
            daemon.until("log")
            started, said = daemon.until("daemon", 2)
            doctor = daemon.gpuguard("doctor")
            squatter.close()

            assert daemon.until("daemon", 3)[2]["outcome"] == "metrics served"
            assert "gpuguard_daemon_up 1" in fetch(f"http://{address}/metrics")
    assert (started["outcome"], said["outcome"]) == ("started", "metrics not served")
    assert f"{address} cannot be had: Address already in use" in said["message"]
    assert f"the daemon does not serve its metrics: {address}" in " ".join(doctor.stdout.split())


def test_a_log_that_cannot_be_written_is_counted(tmp_path):
    with a_daemon(tmp_path, POLICY, "--metrics", "127.0.0.1:0") as daemon:
        daemon.log.unlink()
        daemon.log.mkdir()
        with a_user(daemon.node, "0", 10 * GIB):
            assert eventually(lambda: the_one(page_of(daemon), "gpuguard_audit_failures_total") > 0)
        daemon.log.rmdir()


def test_without_the_option_nothing_listens_and_no_clocks_are_read(tmp_path):
    with a_daemon(tmp_path) as daemon:
        assert daemon.state()["snapshot"]["devices"][0].get("clock_sm") is None
        assert "http://" not in daemon.said()


class ADaemon:
    """A daemon that looked *age* seconds ago."""

    def __init__(self, age: float, trouble: str | None = None) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.last, self.waiting = a_snapshot(clock=now - age), (a_ticket(),)
        watchdog = {
            "site_rules": SiteRules(interval=(1.0, 2.0)),
            "pause": 2.0,
            "problem": trouble,
            "processes": lambda snapshot: {},
            "status": tuple,
        }
        self.watchdog, self.faults = SimpleNamespace(**watchdog, policies=()), 0
        self.queue_settings = SimpleNamespace(faults=0)


@pytest.mark.parametrize(("age", "trouble", "current"), [(1, None, True), (7, None, False), (1, "lost", False)])
def test_a_sample_counts_for_three_intervals(age, trouble, current):
    told = DaemonFacts(ADaemon(age, trouble), None, EventCounter()).read()

    assert (told.current, told.driver_up, bool(told.uses)) == (current, current, current)
    assert (told.waiting is not None) == current  # else the queue is read again


def test_the_faults_of_both_files_of_the_site_are_told():
    daemon = ADaemon(1)
    daemon.faults, daemon.queue_settings.faults = 2, 1
    told = DaemonFacts(daemon, None, EventCounter()).read()

    assert (told.policy_faults, told.line_faults) == (2, 1)


def test_jobs_are_told_while_the_claims_can_be_read(tmp_path, monkeypatch):
    directory, claim = lock_directory(str(tmp_path / "claims")), a_claim_record(a_device(), job="17")

    def jobs(daemon, **seen):
        daemon.last = replace(daemon.last, claims=(claim,), **seen)
        told = DaemonFacts(daemon, directory, EventCounter()).read().jobs
        return None if told is None else [job.full_id for job in told]

    assert jobs(ADaemon(1)) == ["alice/17"]
    assert jobs(ADaemon(7)) is None
    assert jobs(ADaemon(1), gaps=(Gap(None, "claims", "no directory"),)) is None

    def fails(directory, claims):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(facts, "public_jobs", fails)
    assert jobs(ADaemon(1)) is None


def test_only_what_a_policy_did_is_counted_as_such(monkeypatch):
    counter = EventCounter()
    monkeypatch.setattr(facts.audit_log, "append", lambda event: event.kind != "warn")
    for kind, outcome, policy in (
        ("warn", "done", "p"), ("warn", "done", "p"), ("note", "gap", "p"), ("release", "done", None),
        ("watchdog", "driver unresponsive", None), ("watchdog", "watching again", None),
    ):  # fmt: skip
        counter.append(Event(time=1.0, kind=kind, outcome=outcome, facts=(("policy", policy),)))

    assert counter.totals() == {"actions": {("p", "warn", "done"): 2}, "unrecorded": 2, "troubles": 1}


def test_errors_of_memory_are_read_each_minute_and_only_while_scrapes_come(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(facts.time, "monotonic", lambda: now)
    rare, without = RareFields(), a_snapshot(a_device())
    assert rare.groups() == frozenset()

    rare.scraped()
    assert rare.groups() == {CLOCKS, ECC}
    assert rare.filled(without).devices[0].remapped_rows is None
    rare.filled(a_snapshot(a_device(remapped_rows=3)))
    assert rare.groups() == {CLOCKS}
    assert rare.filled(without).devices[0].remapped_rows == 3

    now += 61
    assert rare.groups() == {CLOCKS, ECC}
    rare.filled(a_snapshot(a_device(), gaps=(Gap(a_device().uuid, "remapped_rows", "not supported"),)))
    assert rare.groups() == {CLOCKS} and rare.filled(without).devices[0].remapped_rows is None

    now += 301
    assert rare.groups() == frozenset()


def test_what_only_the_names_of_an_exporter_need_is_read_while_these_are_asked_for(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(facts.time, "monotonic", lambda: now)
    rare = RareFields()
    rare.scraped()
    rare.filled(a_snapshot(a_device(remapped_rows=3)))
    assert rare.groups() == {CLOCKS}

    rare.scraped(["nvitop"])
    assert rare.groups() == {CLOCKS, MEDIA, PCIE, NVLINK_FLOW}
    rare.filled(a_snapshot(a_device(clock_video=700, pcie_tx=1.0)))
    assert rare.groups() == {CLOCKS} and rare.filled(a_snapshot(a_device())).devices[0].pcie_tx == 1.0

    now += 11
    assert rare.groups() == {CLOCKS, MEDIA, PCIE, NVLINK_FLOW}


def test_beside_a_daemon_that_does_not_read_what_an_exporter_tells_the_driver_is_asked(tmp_path):
    with a_daemon(tmp_path) as daemon:
        page = read(daemon.gpuguard("metrics", "--compat", "nvitop").stdout)

    assert page["gpu_clock_video_MHz"] and page["gpu_pcie_tx_throughput_MiBps"]
