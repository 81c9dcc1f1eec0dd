"""`gpuguard metrics` as one uses it: a page, a file for node_exporter, a port."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
from commands import Gpuguard
from exporters import fetch
from fake_nvml import FakeNvml
from nodes import change, eventually, start
from prometheus_client.parser import text_string_to_metric_families
from test_metrics import the_one
from test_prometheus import a_server


@pytest.fixture
def gpuguard(tmp_path):
    start(str(tmp_path / "node"), "2xH100-80GB")
    return Gpuguard(tmp_path, None)


def read(text):
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    page = {}
    for sample in samples:
        page.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return page


def test_the_page_goes_to_standard_output(gpuguard):
    done = gpuguard("metrics")

    assert done.returncode == 0 and done.stderr == ""
    assert the_one(read(done.stdout), "gpuguard_devices") == 2


def test_names_of_other_exporters_are_told_on_demand(gpuguard):
    plain, more = gpuguard("metrics"), gpuguard("metrics", "--compat", "dcgm", "--compat", "nvitop")

    assert "DCGM" not in plain.stdout and "gpu_temperature_C" not in plain.stdout
    assert "DCGM_FI_DEV_SM_CLOCK{" in more.stdout and "gpu_temperature_C{" in more.stdout


def test_who_claims_is_told(gpuguard):
    done = gpuguard("run", "--quiet", "-n", "1", "--", *gpuguard.words("metrics"))

    assert sum(read(done.stdout)["gpuguard_user_claimed_devices"].values()) == 1


def test_a_driver_that_cannot_be_reached_is_an_exit_code_and_a_number(gpuguard, tmp_path):
    (tmp_path / "node" / "node.json").write_text("{")
    done = gpuguard("metrics")

    assert done.returncode == 4 and "is damaged" in done.stderr
    assert the_one(read(done.stdout), "gpuguard_driver_up") == 0


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--every", "100ms"], "at least 1s"),
        (["--serve", "--every", "5s"], "does not go with --serve"),
        (["--serve", "0.0.0.0:0"], "no password"),
        (["--serve", "nowhere"], "127.0.0.1:9835"),
        (["--expose"], "is about --serve"),
        (["--compat", "nagios"], "invalid choice"),
        (["--textfile", "/nonexistent"], "no directory"),
        (["--influx", "127.0.0.1:8086"], "no address"),
        (["--influx", "http://127.0.0.1:8086/"], "which database"),
        (["--influx", "http://me:secret@127.0.0.1/write"], "--token-file"),
        (["--influx", "-", "--compat", "dcgm"], "names for Prometheus"),
        (["--token-file", "/x"], "is about --influx"),
        (["--serve", "--textfile", "/tmp"], "not allowed with"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(gpuguard, words, advice):
    done = gpuguard("metrics", *words)

    assert done.returncode == 2 and advice in done.stderr


def test_the_file_for_node_exporter_is_whole_and_for_everybody(gpuguard, tmp_path):
    place = tmp_path / "textfile"
    place.mkdir()
    left = place / "gpuguard.prom.0123456789abcdef.new"
    left.write_text("of a writer that was killed")
    os.utime(left, (0, 0))
    (place / "other.prom").write_text("another's")
    former = os.umask(0o077)
    try:
        assert gpuguard("metrics", "--textfile", str(place)).returncode == 0
    finally:
        os.umask(former)

    assert sorted(os.listdir(place)) == ["gpuguard.prom", "other.prom"]
    assert stat.S_IMODE((place / "gpuguard.prom").stat().st_mode) == 0o644
    assert the_one(read((place / "gpuguard.prom").read_text()), "gpuguard_devices") == 2


def test_a_planted_link_is_replaced_and_not_written_through(gpuguard, tmp_path):
    place, victim = tmp_path / "textfile", tmp_path / "victim"
    place.mkdir()
    victim.write_text("mine")
    (place / "gpuguard.prom").symlink_to(victim)

    assert gpuguard("metrics", "--textfile", str(place)).returncode == 0
    assert victim.read_text() == "mine" and not (place / "gpuguard.prom").is_symlink()


def test_what_somebody_left_in_the_directory_keeps_no_page_from_it(gpuguard, tmp_path):
    place = tmp_path / "textfile"
    (place / "gpuguard.prom.0123456789abcdef.new").mkdir(parents=True)

    assert gpuguard("metrics", "--textfile", str(place)).returncode == 0
    assert (place / "gpuguard.prom").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_file_goes_when_nobody_writes_it_any_more(gpuguard, tmp_path, signum):
    place = tmp_path / "textfile"
    place.mkdir()
    process = gpuguard.start("metrics", "--textfile", str(place), "--every", "1s")
    try:
        assert eventually((place / "gpuguard.prom").exists)
        process.send_signal(signum)
        assert process.wait(20) == 0
    finally:
        process.kill()
        _, said = process.communicate()

    assert (os.listdir(place), said) == ([], "")


def test_a_disk_without_room_is_said_once_and_may_pass(gpuguard, tmp_path):
    place = tmp_path / "textfile"
    place.mkdir()
    process = gpuguard.start("metrics", "--textfile", str(place), "--every", "1s")
    try:
        assert eventually((place / "gpuguard.prom").exists)
        place.rename(tmp_path / "away")
        assert process.stderr and "cannot be written" in process.stderr.readline()
        (tmp_path / "away").rename(place)
        (place / "gpuguard.prom").unlink()
        assert eventually((place / "gpuguard.prom").exists)
    finally:
        process.terminate()
        _, said = process.communicate(timeout=20)

    assert said == ""


ONCE = """
import errno, os, sys
from {module} import {owner} as owner
from gpuguard.cli import main
real = owner.{name}
def fails(*words):
    owner.{name} = real
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
owner.{name} = fails
main(sys.argv[1:])
"""


def test_a_machine_without_files_at_the_start_is_said_and_may_pass(gpuguard, tmp_path):
    code = ONCE.format(module="gpuguard.backends", owner="worker", name="start")
    words = [sys.executable, "-c", code, "metrics", "--textfile", str(tmp_path), "--every", "1s"]
    process = subprocess.Popen(words, env=gpuguard.environment, stderr=subprocess.PIPE, text=True)
    try:
        there = eventually(lambda: "gpuguard_driver_up 1" in page(tmp_path))
    finally:
        process.terminate()
        _, said = process.communicate(timeout=20)

    assert (there, said.count("\n"), "see `ulimit -n`" in said) == (True, 1, True)


def page(place):
    file = place / "gpuguard.prom"
    return file.read_text() if file.exists() else ""


def test_each_scrape_looks_again(gpuguard, tmp_path):
    with a_server(gpuguard) as target:
        before = read(fetch(f"http://{target}/metrics"))
        change(str(tmp_path / "node"), 1, faults=("lost",))
        lost = (("problem", "lost"), ("uuid", max(before["gpuguard_device_info"], key=str)[-1][1]))

        assert "gpuguard_device_problem" not in before
        assert eventually(lambda: "gpuguard_device_problem" in read(fetch(f"http://{target}/metrics")))
        assert {key[0] for key in read(fetch(f"http://{target}/metrics"))["gpuguard_device_problem"]} == {lost[0]}


def test_a_driver_that_goes_away_while_we_serve_takes_its_numbers_along(gpuguard, tmp_path):
    def page():
        return read(fetch(f"http://{target}/metrics"))

    with a_server(gpuguard) as target:
        assert "gpuguard_device_temperature_celsius" in page()
        (tmp_path / "node" / "node.json").rename(tmp_path / "away")
        assert eventually(lambda: the_one(page(), "gpuguard_driver_up") == 0)
        gone = page()
        (tmp_path / "away").rename(tmp_path / "node" / "node.json")

        assert "gpuguard_device_temperature_celsius" not in gone and "gpuguard_device_info" in gone
        assert eventually(lambda: "gpuguard_device_temperature_celsius" in page())


def test_many_scrapes_at_once_ask_the_driver_once(tmp_path):
    with FakeNvml(tmp_path, devices=8) as fake, a_server(Gpuguard(tmp_path, fake)) as target:
        fetch(f"http://{target}/metrics")
        assert eventually(lambda: not _asks_again(fake, target, 1))

        assert _asks_again(fake, target, 10) <= 200  # at most one more sample, of about 150 calls


def _asks_again(fake: FakeNvml, target: str, times: int) -> int:
    fake.reset_calls()
    for _ in range(times):
        fetch(f"http://{target}/metrics")
    return sum(fake.calls().values())


def test_it_is_ready_for_others_only_on_purpose(gpuguard):
    port = _port_of_everybody(gpuguard, "--expose", "gpu7.lab")

    assert port == (200, 421)


def _port_of_everybody(gpuguard, *options):
    process = gpuguard.start("metrics", "--serve", "0.0.0.0:0", *options)
    try:
        assert process.stderr
        port = int(process.stderr.readline().rpartition(":")[2].partition("/")[0])
        return tuple(_status(port, host) for host in ("gpu7.lab", "evil.example"))
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _status(port: int, host: str) -> int:
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        return int(connection.recv(99).split()[1])


def test_a_reader_that_goes_away_is_no_trouble(gpuguard):
    with gpuguard.start("metrics", stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        process.stdout.close()
        process.wait(20)
        assert process.stderr and "Traceback" not in process.stderr.read()
