"""Real programs that read what we tell, on loopback: Prometheus, promtool, node_exporter, InfluxDB.

Where one is missing its tests are skipped, and say how to install it.

with a_prometheus(tmp_path, target) as prometheus: prometheus.query("up")
with an_influxdb(tmp_path) as influx: influx.url, influx.query("SHOW MEASUREMENTS")
"""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nodes import Gpuguard, eventually
from proc import free_port

_PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "prometheus-node-exporter": "prometheus-node-exporter",
    "influxd": "influxdb",
}


def program(name: str) -> str:
    """Where *name* is; without it the test is skipped."""
    found = shutil.which(name)
    if not found:
        pytest.skip(f"what {name} reads of ours (no {name}: apt-get install {_PACKAGES[name]})")
    return found


def fetch(url: str, *, data: bytes | None = None) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=20) as answer:
        return str(answer.read().decode())


def fetched(url: str) -> str | None:
    """The page, or None where no server listens yet."""
    try:
        return fetch(url)
    except (urllib.error.URLError, ConnectionError):
        return None


@contextmanager
def _running(words: list[str], place: Path, url: str) -> Iterator[None]:
    log = place / f"{Path(words[0]).name}.log"
    with log.open("w") as said, subprocess.Popen(words, stdout=said, stderr=said, cwd=place) as process:
        try:
            assert eventually(lambda: process.poll() is not None or fetched(url) is not None, 60), log.read_text()
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def a_metrics_server(gpuguard: Gpuguard, *options: str) -> Iterator[str]:
    """`gpuguard metrics --serve` at a port of its own: its address."""
    with gpuguard.start("metrics", "--serve", "127.0.0.1:0", *options) as process:
        try:
            assert process.stderr
            line = process.stderr.readline()
            address = re.search(r"http://([\d.:]+)/metrics", line)
            assert address, line + process.stderr.read()
            yield address[1]
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Its answer: [{"metric": {...}, "value": [time, "1"]}]."""
        answer = json.loads(fetch(f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def until(self, expression: str, seconds: float = 40.0) -> list[dict[str, Any]]:
        """Its answer, as soon as there is one."""
        assert eventually(lambda: bool(self.query(expression)), seconds), expression
        return self.query(expression)


@contextmanager
def a_prometheus(
    place: Path, target: str, compat: str = "", jobs: Sequence[str] = ("gpuguard",)
) -> Iterator[Prometheus]:
    """One of which each of *jobs* scrapes http://TARGET/metrics every second."""
    port, config = free_port(), place / "prometheus.yml"
    scrape: dict[str, Any] = {"static_configs": [{"targets": [target]}]}
    if compat:
        scrape["params"] = {"compat": [compat]}
    scrapes = [{"job_name": job, **scrape} for job in jobs]
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes}))  # JSON is YAML
    words = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={place / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with _running(words, place, f"http://127.0.0.1:{port}/-/ready"):
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def a_node_exporter(place: Path, directory: Path) -> Iterator[str]:
    """A node_exporter that tells nothing but the files of *directory*: the address of its page."""
    address = f"127.0.0.1:{free_port()}"
    words = [
        program("prometheus-node-exporter"), "--collector.disable-defaults", "--collector.textfile",
        f"--collector.textfile.directory={directory}", f"--web.listen-address={address}",
    ]  # fmt: skip
    with _running(words, place, f"http://{address}/metrics"):
        yield f"http://{address}/metrics"


@dataclass(frozen=True)
class Influx:
    url: str  # for writing

    def query(self, text: str) -> list[dict[str, Any]]:
        """Rows as dicts, with the tags."""
        base = self.url.partition("/write")[0]
        answer = json.loads(fetch(f"{base}/query?" + urllib.parse.urlencode({"db": "gpuguard", "q": text})))
        return [
            {**dict(zip(series["columns"], row, strict=True)), **series.get("tags", {})}
            for result in answer["results"]
            for series in result.get("series", [])
            for row in series["values"]
        ]


@contextmanager
def an_influxdb(place: Path) -> Iterator[Influx]:
    """InfluxDB 1.x with an empty database "gpuguard"."""
    port, rpc = free_port(), free_port()
    config = place / "influxdb.conf"
    config.write_text(
        f'bind-address = "127.0.0.1:{rpc}"\nreporting-disabled = true\n'
        f'[meta]\ndir = "{place}/meta"\n[data]\ndir = "{place}/data"\nwal-dir = "{place}/wal"\n'
        f'[http]\nbind-address = "127.0.0.1:{port}"\nlog-enabled = false\n[monitor]\nstore-enabled = false\n'
    )
    with _running([program("influxd"), "-config", str(config)], place, f"http://127.0.0.1:{port}/ping"):
        fetch(f"http://127.0.0.1:{port}/query", data=b"q=CREATE+DATABASE+gpuguard")
        yield Influx(f"http://127.0.0.1:{port}/write?db=gpuguard")
