"""The generated part of benchmarks/README.md: one block per row group, between two markers; the rest is left alone."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

BEGIN, END = "<!-- benchmarks/run writes from here -->", "<!-- to here -->"
HEADING = """## Side by side

Written by `benchmarks/run`; a block is replaced when its row is measured again.  In brackets: what gpuguard takes,
divided by what this program takes; below 1 gpuguard is first.  Medians of runs in turns (A B A B), on a fake driver
library with 5 processes on each GPU that is in use.  *realistic*: latencies that people measured for single
functions of real drivers (`REALISTIC` in measuring.py), 12 us for all others, and one call at a time; with 0 and 500 us
the calls of several threads overlap, as far as NVML's reference goes.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """On what, and when, it was measured."""
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores ({model[1] if model else platform.machine()}), "
        f"{memory:.0f} GiB, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def write(page: Path, blocks: Mapping[str, str], order: Sequence[str], rivals: Collection[str]) -> None:
    """Put *blocks* (row -> text) into the page; those of other rows stay as they are.  *rivals*: names of programs."""
    text = page.read_text() if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    # A title has its row's name and what is said of it, which may have been said differently before.
    merged = {_name(title): block.strip() for title, block in [*_blocks(old).items(), *blocks.items()]}
    shown = {title: merged[_name(title)] for title in order if _name(title) in merged}
    body = "\n\n".join(f"### {title}\n\n{block}" for title, block in shown.items())
    joined = before.rstrip() + "\n\n" if begin or before.strip() else ""
    written = f"{HEADING}\n{places(shown, rivals)}\n\n{body}"
    page.write_text(f"{joined}{BEGIN}\n{written}\n\n{END}\n{after.lstrip() and chr(10) + after.lstrip()}")


def places(blocks: Mapping[str, str], rivals: Collection[str]) -> str:
    """In how many cells with a ratio gpuguard is before another program, and each one in which it is not."""
    columns: list[str] = []
    ratios: list[tuple[float, str]] = []
    for title, block in blocks.items():
        for line in block.splitlines():
            name, *cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            if line.startswith("|") and not line.startswith("| `"):
                columns = cells if set(name) != {"-"} else columns
            elif name in rivals:
                for column, cell in zip(columns, cells, strict=True):
                    if ratio := re.search(r"\((\d+\.\d\d)\)$", cell):
                        told = f"- {_name(title)}, `{name}`: {column} ({ratio[1]})"
                        ratios.append((float(ratio[1]), told))
    behind = [told for ratio, told in ratios if ratio > 1]
    told = f"Of {len(ratios)} such cells, gpuguard is not before the other program in {len(behind)}:"
    return "\n".join([told, "", *behind])


def _name(title: str) -> str:
    return title.partition(":")[0]


def _blocks(text: str) -> dict[str, str]:
    pieces = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)[1:]
    return {title: block.strip() for title, block in zip(pieces[::2], pieces[1::2], strict=True)}
