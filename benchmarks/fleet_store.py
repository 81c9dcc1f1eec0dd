"""What N nodes cost a real Prometheus: series, bytes per scrape, memory, CPU, disk.  See fleet."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fleet_pages import VARIANTS, Pages, page, series
from job_start import amount, show
from metrics import cpu_ms, free_port

LEAST_MEMORY = 3 * 2**20  # KiB that stay free: the measurement ends before it hurts anybody
ROUNDS = 4  # scrapes of each node
RULES = Path(__file__).resolve().parent.parent / "packaging" / "prometheus" / "gpuguard-fleet.rules.yml"
PASSED_ON = r'count({__name__=~"[a-z_]+:gpuguard_.*"})'


def measure(nodes: int, interval: int) -> None:
    """Print what a Prometheus takes that scrapes *nodes* nodes every *interval* seconds."""
    pages = Pages()
    with tempfile.TemporaryDirectory() as text:
        place, port = Path(text), free_port()
        (place / "prometheus.yml").write_text(json.dumps(_config(pages.address, nodes, interval)))
        words = [
            shutil.which("prometheus") or sys.exit("prometheus is missing: apt-get install prometheus"),
            f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(words) as process:
            try:
                _watch(process.pid, place, f"http://127.0.0.1:{port}", pages, nodes, interval)
            finally:
                process.terminate()


def _config(address: str, nodes: int, interval: int) -> object:
    targets = [
        {"targets": [address], "labels": {"__metrics_path__": f"/{node}", "instance": f"gpu{node:05d}:9835"}}
        for node in range(nodes)
    ]
    every = f"{interval}s"
    scrape = {"job_name": "gpuguard", "scrape_interval": every, "scrape_timeout": every, "static_configs": targets}
    return {"scrape_configs": [scrape], "rule_files": [str(RULES)]}


def _watch(pid: int, place: Path, url: str, pages: Pages, nodes: int, interval: int) -> None:
    _until(lambda: pages.answered >= 2 * nodes, pid, 20 * interval)  # all series are there
    begun, cpu, answered = time.monotonic(), cpu_ms([pid]), pages.answered
    _until(lambda: pages.answered >= (2 + ROUNDS) * nodes, pid, 20 * interval)
    passed, cpu, answered = time.monotonic() - begun, cpu_ms([pid]) - cpu, pages.answered - answered
    told = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    head = _number(told, "prometheus_tsdb_head_series")
    if head < nodes * series(pages.texts[0].decode()):
        sys.exit(f"{head:.0f} series are too few: some pages were not understood.")
    memory = amount(f"/proc/{pid}/status", "VmRSS"), amount(f"/proc/{pid}/status", "VmHWM")
    wal = sum(file.stat().st_size for file in (place / "tsdb" / "wal").glob("*") if file.is_file())
    samples = _number(told, "prometheus_tsdb_head_samples_appended_total")
    asked = f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": PASSED_ON})
    sums = json.load(urllib.request.urlopen(asked, timeout=60))["data"]["result"]
    passed_on = int(sums[0]["value"][1]) if sums else 0
    show(
        f"{nodes} nodes every {interval} s",
        f"{head / nodes:.0f} series and {pages.bytes / pages.answered / 1024:.1f} KiB per node and scrape; "
        f"{head / 1e6:.3f} million series, {passed_on} sums; "
        f"{pages.bytes / pages.answered * nodes / interval / 2**20:.2f} MiB/s; "
        f"{cpu / answered:.2f} ms CPU per scrape, {cpu / passed / 10:.1f} % of a core; "
        f"{memory[0]:.0f} MiB resident (at most {memory[1]:.0f}), {(memory[0] - 40) * 1024 / head:.1f} KiB "
        f"per series; log {wal / samples:.1f} bytes per sample; "
        f"{min(1.0, answered / passed * interval / nodes) * 100:.0f} % of the scrapes in time",
    )


def _until(is_true: Callable[[], bool], pid: int, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not is_true():
        free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
        if free < LEAST_MEMORY:
            sys.exit(
                f"only {free >> 10} MiB are left: prometheus has {amount(f'/proc/{pid}/status', 'VmRSS'):.0f} MiB."
            )
        if time.monotonic() > ends or not os.path.exists(f"/proc/{pid}"):
            sys.exit("Prometheus does not keep up on this machine, or has ended.")
        time.sleep(0.2)


def _number(text: str, name: str) -> float:
    found = [line.rpartition(" ")[2] for line in text.splitlines() if re.match(rf"{name}[{{ ]", line)]
    return sum(map(float, found))


def on_disk(hours: int = 6, interval: int = 15) -> None:
    """Print bytes per sample in a block, and what a node takes in a year: real pages, in the form of the store."""
    pages = [re.sub(r"^#.*\n", "", page(variant), flags=re.M).splitlines() for variant in range(VARIANTS)]
    begun = int(time.time()) // 7200 * 7200 - hours * 3600 - 7200
    with tempfile.TemporaryDirectory() as text:
        file = Path(text) / "page.om"
        with file.open("w") as out:
            for turn in range(hours * 3600 // interval):
                now = begun + turn * interval
                out.writelines(f"{line} {now}\n" for line in pages[turn * 7 % VARIANTS])
            out.write("# EOF\n")
        words = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(file), f"{text}/blocks"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        chunks = sum(one.stat().st_size for one in Path(f"{text}/blocks").glob("*/chunks/*"))
        whole = sum(one.stat().st_size for one in Path(f"{text}/blocks").rglob("*") if one.is_file())
    samples = hours * 3600 // interval * len(pages[0])
    year = whole / samples * len(pages[0]) * 365 * 86400
    show(
        "a node on disk",
        f"{whole / samples:.2f} bytes per sample ({chunks / samples:.2f} without index); "
        f"{year / 60 / 2**30:.2f} GiB a year at 60 s, {year / 15 / 2**30:.2f} at 15 s",
    )


def per_page() -> None:
    """Print the size of a page, alone and with the names of other exporters."""
    for compat in ((), ("dcgm",), ("dcgm", "nvitop")):
        text = page(0, compat)
        show(" + ".join(("a page", *compat)), f"{series(text)} series, {len(text) / 1024:.1f} KiB")
