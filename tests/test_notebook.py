"""`%gpus` in a real kernel: devices for it and nobody else, until it ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nodes import Gpuguard, eventually, start
from sources import ROOT

# As a framework that has started CUDA in this kernel.
CUDA_RUNS = """
from gpuguard import api
api.CUDA_DEVICES = ("/dev/full",)
cuda = open("/dev/full")
"""
VISIBLE = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


@pytest.fixture
def gpuguard(tmp_path):
    """The command line on the node of the notebook."""
    start(str(tmp_path / "node"), "4xH100-80GB")
    gpuguard = Gpuguard(tmp_path, None)
    del gpuguard.environment["GPUGUARD_DIR"]  # the claims lie beside the node, for both
    return gpuguard


def test_a_kernel_has_its_devices_for_itself_until_it_gives_them_back(tmp_path, gpuguard):
    with a_notebook(tmp_path, JPY_SESSION_NAME="/home/alice/My study.ipynb") as notebook:
        nobody = notebook("%gpus")
        card = notebook("%gpus 2")
        again = notebook("%gpus 2")
        visible = notebook(VISIBLE).text
        seen = gpuguard("who").stdout
        other = gpuguard("run", "-n", "3", "--no-wait", "--", "true")
        more = notebook("%gpus 3")
        mine = notebook("%gpus")
        back = notebook("%gpus release")

        assert "this kernel has no GPUs: `%gpus 1` claims one" in nobody.text and nobody.html.count("<tr>") == 5
        assert card.ok and card.html.count("<tr>") == 3 and "H100" in card.html and "GPU-" in card.html
        assert "SIMULATED GPU 2, 3 · NVIDIA H100 80GB HBM3 · claim " in card.text and "SIMULATED" in card.html
        assert again == card  # a cell that runs again
        assert visible.strip() == "2,3"
        assert "notebook My study.ipynb" in seen and seen.count("claimed, no process yet") == 2
        assert other.returncode == 75
        assert not more.ok and "this kernel has GPU 2, 3 already.  Run `%gpus release` first" in more.text
        assert mine.html.startswith(card.html) and "claimed by" in mine.html
        assert back.ok and "GPU 2, 3: given back" in back.text
        assert notebook(VISIBLE).text.strip() == "None"
        assert gpuguard("run", "-n", "4", "--no-wait", "--", "true").returncode == 0
        assert not notebook("%gpus release").ok


def test_a_claim_dies_with_its_kernel_however_that_dies(tmp_path, gpuguard):
    with a_notebook(tmp_path) as notebook:
        pid = int(notebook("import os; print(os.getpid())").text)
        assert notebook("%gpus 4").ok
        assert gpuguard("select").returncode == 1
        os.kill(pid, signal.SIGKILL)

        assert eventually(lambda: gpuguard("select", "-n", "4").returncode == 0)


def test_where_cuda_runs_already_it_says_to_restart(tmp_path, gpuguard):
    with a_notebook(tmp_path) as notebook:
        held = notebook("%gpus 1 --min-free 20GiB")
        notebook(CUDA_RUNS)

        assert notebook("%gpus 1 --min-free 20GiB") == held
        refused = notebook("%gpus release")
        assert not refused.ok and "Restart the kernel: that gives the GPUs back" in refused.text
        assert notebook("%gpus").ok
    with a_notebook(tmp_path) as notebook:
        notebook(CUDA_RUNS)
        late = notebook("%gpus 2")

        assert not late.ok and "Restart the kernel, and run `%gpus 2` before the first cell that uses CUDA" in late.text
        assert "no GPUs" in notebook("%gpus").text


def test_what_cannot_be_had_fails_the_cell_in_a_sentence_and_says_what_to_do(tmp_path, gpuguard):
    with a_notebook(tmp_path) as notebook, a_notebook(tmp_path) as other:
        never = notebook("%gpus 9")
        assert other("%gpus 3").ok
        few, odd, unit, quote = (notebook(f"%gpus {line}") for line in ("2", "two", "1 --min-free 20", "1 --note 'x"))

        assert "only 4 exist" in never.text and "--wait" not in never.text
        assert "`%gpus 2 --wait 10m` waits for them in the queue" in few.text
        assert "'two'?  Write `%gpus 2`" in odd.text
        assert "20GiB" in unit.text
        assert not any(done.ok or "Traceback" in done.text for done in (few, never, odd, unit, quote))
        assert "--min-free SIZE" in notebook("%gpus --help").text


def test_a_claim_released_from_outside_is_known_to_be_gone_and_what_python_returns_shows_itself(tmp_path, gpuguard):
    with a_notebook(tmp_path) as notebook:
        notebook("%gpus 2")
        claim = notebook("import os; print(os.environ['GPUGUARD_CLAIM'])")
        assert gpuguard("release", claim.text.strip(), "--reason", "needed").returncode == 0

        told = notebook("%gpus")
        assert not told.ok and "needed" in told.text and "This kernel has no GPUs now" in told.text
        assert notebook("%gpus 3").ok

        notebook("import gpuguard")
        for code in ("gpuguard.grab_gpus(1)", "gpuguard.who()", "gpuguard.who().claims[0]", "gpuguard.snapshot()"):
            assert "<table>" in notebook(code).html, code


class Done(NamedTuple):
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
        text = "\n".join([*said, *(output.get("text/plain", "") for output in shown)])
        return Done(ok, text, "".join(output.get("text/html", "") for output in shown))


@contextmanager
def a_notebook(place: Path, **variables: str) -> Iterator[Notebook]:
    """A notebook on the simulated node of *place*, with our extension loaded; its kernel ends with the block."""
    why = "%gpus in a real kernel (no ipykernel or nbclient: .venv/bin/pip install ipykernel nbclient)"
    nbclient, nbformat, _ = (pytest.importorskip(name, reason=why) for name in ("nbclient", "nbformat", "ipykernel"))
    node = {"GPUGUARD_BACKEND": "simulated", "GPUGUARD_SIM_DIR": str(place / "node"), "PYTHONPATH": str(ROOT)}
    jupyter = {"IPYTHONDIR": str(place / "ipython"), "JUPYTER_RUNTIME_DIR": str(place / "run")}
    environment = os.environ | node | jupyter | variables
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=120, kernel_name="python3")
    with client.setup_kernel(env=environment, cwd=str(place)):
        notebook = Notebook(client)
        loaded = notebook("%load_ext gpuguard")
        assert loaded.ok, loaded.text
        yield notebook
