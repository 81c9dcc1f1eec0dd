"""The real Prometheus reads what we tell: its linter has nothing to say, and its answers are our numbers."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from endpoints import WebServer, a_web_server
from exporters import Prometheus, a_metrics_server, a_node_exporter, a_prometheus, an_influxdb, fetch, program
from nodes import GIB, Gpuguard, a_user, change, eventually, start
from proc import free_port
from sources import ROOT
from test_metrics import FULL, facts_about

from gpuguard.backends.simulated_node import WorkPattern
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.metrics.exposition import to_prometheus
from gpuguard.metrics.families import MetricFamily, metric_families
from gpuguard.metrics.influx import MAX_BATCHES, InfluxClient, to_influx

PACKAGING = ROOT / "packaging"
RULES = PACKAGING / "prometheus" / "gpuguard.rules.yml"
RULE_TESTS = PACKAGING / "prometheus" / "gpuguard.rules.test.yml"
DASHBOARD = PACKAGING / "grafana" / "gpuguard.json"
# What NVIDIA's public dashboard (12239) asks, but for two panels that need profiling counters; %s: its selector.
NVIDIAS = (
    "max(DCGM_FI_DEV_GPU_TEMP%s) by (Hostname, gpu, uuid)",
    "avg(DCGM_FI_DEV_GPU_TEMP%s)",
    "max(DCGM_FI_DEV_POWER_USAGE%s) by (Hostname, gpu, uuid)",
    "sum(max(DCGM_FI_DEV_POWER_USAGE%s) by (gpu))",
    "max(DCGM_FI_DEV_SM_CLOCK%s * 1000000) by (Hostname, UUID, gpu)",
    "max(DCGM_FI_DEV_FB_USED%s) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    # as in its older versions
    "DCGM_FI_DEV_GPU_UTIL%s",
    "DCGM_FI_DEV_FB_FREE%s",
    "DCGM_FI_DEV_MEM_CLOCK%s",
    "rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION%s[10s])",
)
SELECTOR = '{Hostname=~".+", gpu=~".+"}'


def promtool(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *words], input=text, capture_output=True, text=True, check=False)


def everything() -> list[MetricFamily]:
    claimed, used = a_device(0, **FULL), a_device(1, processes=(a_process(user="eve"),), problems=("lost",), **FULL)
    snapshot = a_snapshot(claimed, used, claims=(a_claim_record(claimed),))
    more = {
        "waiting": (("bob", snapshot.taken_at - 60),), "quarantined": frozenset({used.uuid}), "daemon_up": True,
        "actions": {("p", "warn", "done"): 1}, "unrecorded": 0, "troubles": 0, "interval": 2.0,
        "policies": {"enforce": 1}, "policy_faults": 0, "line_faults": 0, "breaches": {("hogs", "warned"): 2},
    }  # fmt: skip
    return metric_families(facts_about(snapshot, **more))


def names_told() -> set[str]:
    return {family.name for family in everything()}


@pytest.mark.parametrize(
    ("text", "is_sound"),
    [
        (None, True),
        ("# TYPE gpuguard_x counter\ngpuguard_x 1\n", False),
        ("# HELP gpuguard_y_total Y.\n# TYPE gpuguard_y_total gauge\ngpuguard_y_total 1\n", False),
    ],
    ids=["ours", "a counter without _total", "a gauge with it"],
)
def test_the_linter_of_prometheus_has_nothing_to_say_of_ours_and_would_of_others(text, is_sound):
    done = promtool("check", "metrics", text=text or to_prometheus(everything()))

    assert (done.returncode == 0 and not done.stdout + done.stderr) == is_sound


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Iterator[tuple[Prometheus, str]]:
    """A Prometheus that scrapes a used and a hot device, under the names of DCGM, too; and the page."""
    place = tmp_path_factory.mktemp("scraped")
    node = str(place / "node")
    start(node, "2xH100-80GB")
    change(node, 1, temperature=WorkPattern(81.0, 81.0))
    with (
        a_user(node, "0", 10 * GIB),
        a_metrics_server(Gpuguard(place, None)) as target,
        a_prometheus(place, target, "dcgm") as prometheus,
    ):
        prometheus.until("DCGM_FI_DEV_FB_FREE offset 3s")
        yield prometheus, fetch(f"http://{target}/metrics?compat=dcgm")


def test_prometheus_answers_with_our_numbers(scraped):
    prometheus, page = scraped
    samples = [line for line in page.splitlines() if not line.startswith("#")]

    for name in ("gpuguard_device_temperature_celsius", "gpuguard_device_memory_used_bytes", "gpuguard_devices"):
        told = sorted(float(line.rsplit(" ", 1)[1]) for line in samples if re.match(rf"{name}[{{ ]", line))
        read = sorted(float(row["value"][1]) for row in prometheus.query(name))
        assert told == read and told, name
    (hot,) = prometheus.query(
        "(gpuguard_device_temperature_celsius > 80) * on(uuid) group_left(index, name) gpuguard_device_info"
    )
    assert hot["metric"]["index"] == "1"
    assert prometheus.query("scrape_samples_scraped")[0]["value"][1] == str(len(samples))


def test_the_questions_of_nvidias_dashboard_are_answered(scraped):
    prometheus, _ = scraped

    assert [asked for asked in NVIDIAS if not prometheus.query(asked % SELECTOR)] == []
    assert prometheus.query("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE") == []  # the checker can fail


def test_node_exporter_reads_the_file(gpuguard, tmp_path):
    directory = tmp_path / "textfile"
    directory.mkdir()
    with a_node_exporter(tmp_path, directory) as url:
        before = fetch(url)
        assert gpuguard("metrics", "--textfile", str(directory)).returncode == 0
        page = fetch(url)

    assert "gpuguard_devices" not in before
    assert "gpuguard_devices 2\n" in page and "node_textfile_scrape_error 0\n" in page


def test_the_alarms_do_what_their_tests_say():
    done = promtool("test", "rules", str(RULE_TESTS))

    assert done.returncode == 0, done.stdout + done.stderr
    assert promtool("check", "rules", str(RULES)).returncode == 0


def test_the_tests_of_the_alarms_can_fail(tmp_path):
    planted = RULES.read_text().replace("> 85", "> 185")
    assert planted != RULES.read_text()
    (tmp_path / RULES.name).write_text(planted)
    (tmp_path / RULE_TESTS.name).write_text(RULE_TESTS.read_text())

    assert promtool("test", "rules", str(tmp_path / RULE_TESTS.name)).returncode != 0


def test_every_alarm_is_tested():
    alarms = re.findall(r"alert: (\w+)", RULES.read_text())
    tested = set(re.findall(r"alertname: (\w+)", RULE_TESTS.read_text()))

    assert alarms and set(alarms) == tested


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_what_is_asked_is_told(path: Path):
    asked = set(re.findall(r"\bgpuguard_[a-z_]+", path.read_text())) - {"gpuguard_rules"}

    assert asked - names_told() == set()


def panels() -> dict[str, list[str]]:
    """What each panel of the dashboard asks, for all machines."""
    return {
        panel["title"]: [
            target["expr"].replace("$instance", ".+").replace("$__rate_interval", "10s")
            for target in panel.get("targets", ())
        ]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
    }


def test_the_dashboard_asks_what_prometheus_understands_and_answers(scraped):
    asked = [expression for expressions in panels().values() for expression in expressions]

    assert len(asked) >= 12
    for expression in asked:
        scraped[0].query(expression)  # a fault raises


def test_a_machine_that_two_jobs_ask_is_one_machine_on_the_dashboard(tmp_path):
    start(str(tmp_path / "node"), "2xH100-80GB")
    with (
        a_metrics_server(Gpuguard(tmp_path, None)) as target,
        a_prometheus(tmp_path, target, jobs=("one", "other")) as prometheus,
    ):
        prometheus.until('gpuguard_devices{job="one"} + on(instance) gpuguard_devices{job="other"}')
        (temperature,), (gpus,) = panels()["Temperature"], panels()["GPUs"]

        assert [float(row["value"][1]) for row in prometheus.query(gpus)] == [2]
        assert sorted(row["metric"]["index"] for row in prometheus.query(temperature)) == ["0", "1"]
        for expressions in panels().values():
            for expression in expressions:
                prometheus.query(expression)  # a fault raises


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_numbers_are_joined_without_the_job_that_asked_for_them(path: Path):
    text = path.read_text()
    expressions = [
        line for line in re.split(r"expr|for:|annotations", text) if "group_left" in line and "gpuguard_" in line
    ]

    assert len(expressions) >= 4
    assert [line for line in expressions if re.search(r"(?<!without \(job\) \()\bgpuguard_", line)] == []


HOSTILE = 'eve, x=1\\ "q" 张\n\\'


@contextmanager
def a_database(status: int = 204, **behaviour: str) -> Iterator[tuple[WebServer, str]]:
    """A web server, and the address to write to."""
    with a_web_server(status=status, headers=behaviour) as web:
        yield web, web.url.replace("/hook", "/write?db=gpuguard")


def test_influxdb_answers_with_our_numbers(tmp_path):
    device = a_device(memory_used=10 * GIB, **FULL)
    snapshot = a_snapshot(device, claims=(a_claim_record(device, user=HOSTILE),))
    with an_influxdb(tmp_path) as influx:
        InfluxClient(influx.url).send(
            to_influx(metric_families(facts_about(snapshot)), "node 1,x=\\", snapshot.taken_at)
        )

        row, *_ = influx.query("SELECT memory_used_bytes, temperature_celsius FROM gpuguard_device WHERE uuid != ''")
        assert (row["memory_used_bytes"], row["temperature_celsius"]) == (10 * GIB, 35)
        users = influx.query("SELECT claimed_devices FROM gpuguard_user GROUP BY *")
        assert [(row["claimed_devices"], row["user"], row["host"]) for row in users] == [
            (1, 'eve, x=1\\ "q" 张\\n/', "node 1,x=/")
        ]
        names = {row["name"] for row in influx.query("SHOW MEASUREMENTS")}
        assert names == {"gpuguard", "gpuguard_device", "gpuguard_user"}


def test_the_command_sends_again_and_again(gpuguard, tmp_path):
    with an_influxdb(tmp_path) as influx:
        process = gpuguard.start("metrics", "--influx", influx.url, "--every", "1s")
        try:
            question = "SELECT COUNT(temperature_celsius) FROM gpuguard_device"
            assert eventually(lambda: any(row["count"] >= 4 for row in influx.query(question)))
        finally:
            process.terminate()
            _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_influxdb_refuses_what_is_no_line(tmp_path):
    with an_influxdb(tmp_path) as influx, pytest.raises(GpuguardError, match="refuses what was sent: 400"):
        InfluxClient(influx.url).send(["gpuguard_device,host= x=1"])


@pytest.mark.parametrize(
    ("status", "message", "later"),
    [(503, "answers 503", [b"a x=1\n", b"b x=1\n", b"c x=1\n"]), (400, "refuses", [b"c x=1\n"])],
    ids=["busy", "refused"],
)
def test_what_cannot_be_sent_waits_in_its_order_and_what_is_refused_stops_nothing_behind_it(status, message, later):
    with a_database(status) as (web, url):
        client = InfluxClient(url)
        for batch in ("a x=1", "b x=1"):
            with pytest.raises(GpuguardError, match=message):
                client.send([batch])
        web.status, web.requests = 204, []
        client.send(["c x=1"])

    assert [body for _, body in web.requests] == later
    assert client.waiting == 0


def test_what_waits_is_bounded():
    client = InfluxClient(f"http://127.0.0.1:{free_port()}/write?db=x")
    for number in range(MAX_BATCHES + 5):
        with pytest.raises(GpuguardError, match="cannot be reached"):
            client.send([f"a x={number}"])

    assert client.waiting == MAX_BATCHES


def test_the_token_goes_along_and_not_to_where_an_answer_redirects():
    with (
        a_database() as (other, elsewhere),
        a_database(302, Location=elsewhere) as (web, url),
        pytest.raises(GpuguardError, match="302"),
    ):
        InfluxClient(url, "s3cret").send(["a x=1"])

    assert web.requests[0][0]["Authorization"] == "Token s3cret"
    assert other.requests == []


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("ftp://127.0.0.1/write", None),
        ("http:///write", None),
        ("http://127.0.0.1:99999/write", None),
        ("http://127.0.0.1/write db", None),
        ("http://db.example.org/write", "t"),
        ("http://127.0.0.1/write", "two\nlines"),
    ],
)
def test_an_address_that_will_not_do_is_refused(url, token):
    with pytest.raises(InvalidRequest, match="--influx"):
        InfluxClient(url, token)


def test_the_token_comes_from_a_file_that_is_ours_alone(gpuguard, tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    os.chmod(token, 0o644)
    gpuguard.environment["GPUGUARD_INFLUX_TOKEN"] = "of the environment"
    with a_database() as (web, url):
        words = ["metrics", "--influx", url]
        open_to_others = gpuguard(*words, "--token-file", str(token))
        os.chmod(token, 0o400)
        assert gpuguard(*words, "--token-file", str(token)).returncode == 0
        assert gpuguard(*words).returncode == 0

    assert open_to_others.returncode == 2 and "open to others" in open_to_others.stderr
    assert [headers["Authorization"] for headers, _ in web.requests] == ["Token s3cret", "Token of the environment"]


def test_a_server_that_is_away_is_an_exit_code(gpuguard):
    done = gpuguard("metrics", "--influx", f"http://127.0.0.1:{free_port()}/write?db=x")

    assert done.returncode == 1 and "cannot be reached" in done.stderr
