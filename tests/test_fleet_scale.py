"""What docs/scale.md shows is taken by a real Prometheus, and the pages that its figures come from are ours."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from pages import Block, blocks
from sources import ROOT
from test_prometheus import PACKAGING, names_told, promtool

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SUMS = PACKAGING / "prometheus" / "gpuguard-fleet.rules.yml"
CONFIGURATIONS = [block for block in blocks(PAGE, "scale.md") if block.language == "yaml"]


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=str)
def test_prometheus_takes_each_configuration(block: Block, tmp_path):
    shutil.copy(SUMS, tmp_path)
    (tmp_path / "prometheus.yml").write_text(block.text)
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))

    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_sums_and_they_are_of_numbers_that_are_told():
    done = promtool("check", "rules", str(SUMS))
    asked = set(re.findall(r"expr: .*\((gpuguard_[a-z_]+)\)", SUMS.read_text()))

    assert done.returncode == 0 and "11 rules found" in done.stdout
    assert asked and asked - names_told() == set()


def test_what_is_dropped_and_what_is_kept_are_as_many_series_as_the_page_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from fleet_pages import page, series

    text = page(0)
    names = [re.match("[a-z_]+", line)[0] for line in text.splitlines() if not line.startswith("#")]  # type: ignore[index]
    (dropped,) = re.findall(r"regex: (gpuguard_device_\(.*)", PAGE)
    sys.modules.pop("fleet_pages")

    assert f"| {series(text)} (" in PAGE
    assert f"Of the {len(names)}, {sum(bool(re.fullmatch(dropped, name)) for name in names)} are" in PAGE
