"""The project's documents as blocks and links, and how their examples are run.

The convention, which CONTRIBUTING.md tells too:

- ```` ```sh ````, ```` ```bash ```` and ```` ```python ```` blocks are run and must end with status 0;
- in a ```` ```console ```` block each ``$ `` line is run, and the lines below it are its output, where ``...`` stands
  for anything;
- ```` ```text ````, ```` ```json ```` and ```` ```yaml ```` are not run (test_policy_command loads the policies);
- ``<!-- not run: WHY -->`` on the line above a block exempts it.

The blocks of a page run one after the other in one empty directory, beside examples/ and benchmarks/, on a simulated
node of 8 idle devices, unless the page itself starts one.  Does not check what a page says: see test_docs.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sources import ROOT

RUNNABLE = {"sh", "bash", "python", "console"}
SILENT = {"text", "json", "yaml"}
SECONDS_AT_MOST = 300

_FENCE = re.compile(r"^(?:<!-- (?P<comment>.*?) -->\n)?^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block; *line* is where its text begins."""

    page: str
    line: int
    language: str
    text: str
    comment: str = ""

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and not self.comment.startswith("not run: ")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def documents() -> list[Path]:
    folders = [ROOT, *(ROOT / name for name in ("docs", "examples", "benchmarks", ".ci"))]
    return [path for folder in folders for path in sorted(folder.glob("*.md"))]


def blocks(text: str, page: str) -> list[Block]:
    found = []
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("text")) + 1
        found.append(Block(page, line, fence["language"], fence["text"], fence["comment"] or ""))
    return found


def links(text: str) -> list[str]:
    """The targets of all links outside of blocks."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The #names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def faults(block: Block, where: Path) -> list[str]:
    """What goes wrong when *block* runs in the directory *where*; empty when it does what it shows."""
    if block.language == "console":
        return list(_console_faults(block, where))
    python, shell = [sys.executable, "-c", block.text], ["bash", "-euo", "pipefail", "-c", block.text]
    status, output = run(python if block.language == "python" else shell, where)
    return [] if status == 0 else [f"{block} ended with status {status}:\n{output}"]


def _console_faults(block: Block, where: Path) -> Iterator[str]:
    commands = [part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]]
    # One shell for the whole block, so that a job in its background is there for the next line.
    script = [f"{{ {command}\n}} >{n}.output 2>&1\necho $? >{n}.status" for n, (command, _, _) in enumerate(commands)]
    status, output = run(["bash", "-c", "\n".join(script)], where)
    if status != 0:
        yield f"{block} ended with status {status}:\n{output}"
        return
    for n, (command, _, expected) in enumerate(commands):
        output, status = (where / f"{n}.output").read_text(encoding="utf-8"), int((where / f"{n}.status").read_text())
        if expected.strip() and not matches(expected, output):
            yield f"{block}: $ {command}\nshould print\n{expected}\nand prints\n{output}"
        elif status != 0 and not expected.strip():
            yield f"{block}: $ {command}\nended with status {status}:\n{output}"


def matches(expected: str, output: str) -> bool:
    """Whether *output* is *expected*; ``...`` stands for anything, and blanks at the ends of lines do not count."""
    pattern = ".*?".join(re.escape(piece) for piece in _trimmed(expected).split("..."))
    return re.fullmatch(pattern, _trimmed(output), re.S) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@contextmanager
def a_place(where: Path, *, node: bool = True) -> Iterator[Path]:
    """*where* with examples/ and benchmarks/, and a node of 8 devices unless the page starts its own."""
    for name in ("examples", "benchmarks"):
        (where / name).symlink_to(ROOT / name)
    if node:
        status, output = run(["gpuguard", "sim", "start", "8xH100-80GB"], where)
        assert status == 0, output
    try:
        yield where
    finally:
        run(["gpuguard", "sim", "stop"], where)


def environment(where: Path) -> dict[str, str]:
    """The variables of a shell in *where* that sees only the simulated node there."""
    node = where / "node"
    node.mkdir(exist_ok=True)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {
        **os.environ,
        "PATH": tools,
        "GPUGUARD_BACKEND": "simulated",
        "GPUGUARD_SIM_DIR": str(node),
        "COLUMNS": "120",
    }


def run(command: list[str], where: Path) -> tuple[int, str]:
    """Status and output of *command*; what it has left running in the background ends with it."""
    with open(where / "output", "w+", encoding="utf-8") as output:
        child = subprocess.Popen(
            command,
            cwd=where,
            env=environment(where),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = child.wait(SECONDS_AT_MOST)
        except subprocess.TimeoutExpired:
            status = -1
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        output.seek(0)
        return status, output.read()
