"""A real notebook in a real kernel, by nbclient.

with a_notebook(tmp_path) as notebook:
    done = notebook("%gpus 2"); done.ok, done.text, done.html
    notebook.kernel()                  pid
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sources import ROOT


@dataclass(frozen=True)
class Done:
    """What a cell has shown."""

    ok: bool
    text: str
    html: str


class Notebook:
    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(self, code: str) -> Done:
        """Run *code* as a cell."""
        import nbformat
        from nbclient.exceptions import CellExecutionError

        cell = nbformat.v4.new_code_cell(code)
        self._client.nb.cells.append(cell)
        try:
            self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
            ok = True
        except CellExecutionError:
            ok = False
        shown = [output.get("data", {}) for output in cell.outputs]
        said = [output.get("text", "") + output.get("evalue", "") for output in cell.outputs]
        text = "\n".join([*said, *(one.get("text/plain", "") for one in shown)])
        return Done(ok, text, "".join(one.get("text/html", "") for one in shown))

    def kernel(self) -> int:
        """Its pid."""
        return int(self("import os; print(os.getpid())").text)


@contextmanager
def a_notebook(place: Path, **variables: str) -> Iterator[Notebook]:
    """A notebook on the simulated node of *place*, with our extension loaded; its kernel ends with the block."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    own = {
        "GPUGUARD_BACKEND": "simulated",
        "GPUGUARD_SIM_DIR": str(place / "node"),
        "IPYTHONDIR": str(place / "ipython"),
    }
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT), "JUPYTER_RUNTIME_DIR": str(place / "run"), **variables}
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=120, kernel_name="python3")
    with client.setup_kernel(env=environment, cwd=str(place)):
        notebook = Notebook(client)
        loaded = notebook("%load_ext gpuguard")
        assert loaded.ok, loaded.text
        yield notebook
