"""What `import gpuguard` offers: exactly `__all__`, and nothing is loaded before it is used."""

import inspect
import subprocess
import sys

import pytest

import gpuguard
from gpuguard import cli, errors, model

MODEL = {
    "Device", "GpuProcess", "ClaimRecord", "Gap", "Snapshot", "Subject", "Finding", "Verdict", "Event",
}  # fmt: skip
FUNCTIONS = {
    "grab_gpus", "claim", "Claim", "select_devices", "snapshot", "who", "open_backend", "Watchdog", "load_policies",
    "collector", "submit", "Job",
}  # fmt: skip
MODULES = {"ray"}
ERRORS = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}


def printed_by(code: str) -> list[str]:
    """The words that *code* prints in a bare interpreter."""
    # -S: what an installation runs at start (the finder of an editable install, coverage) is not ours.
    root = gpuguard.__path__[0].rpartition("/")[0]
    code = f"import sys; sys.path.insert(0, {root!r}); {code}"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout.split()


def modules_loaded_by(statement: str) -> set[str]:
    """What *statement* adds to a bare interpreter."""
    return set(printed_by(f"before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"))


def test_all_is_exact():
    assert set(gpuguard.__all__) == MODEL | FUNCTIONS | ERRORS | MODULES
    assert len(gpuguard.__all__) == len(set(gpuguard.__all__))


def test_there_is_no_public_name_besides_all():
    assert set(printed_by("import gpuguard; print(*(n for n in vars(gpuguard) if n[0] != '_'))")) <= {
        "TYPE_CHECKING",
        "annotations",
        "import_module",
    }
    assert {name for name in dir(gpuguard) if not name.startswith("_")} >= set(gpuguard.__all__)


@pytest.mark.parametrize("name", sorted(MODEL | FUNCTIONS | ERRORS))
def test_every_name_can_be_imported_and_explains_itself(name):
    thing = getattr(gpuguard, name)

    assert thing.__doc__
    assert thing.__name__ == name


def test_gpuguard_ray_is_a_module_that_loads_no_ray():
    assert "gpuguard.ray" in modules_loaded_by("import gpuguard; gpuguard.ray")
    assert "ray" not in modules_loaded_by("import gpuguard; gpuguard.ray.guarded")


def test_every_noun_of_the_model_is_public():
    nouns = {name for name, kind in vars(model).items() if inspect.isclass(kind) and kind.__module__ == model.__name__}

    assert nouns == MODEL | {"ProcessStat", "DeviceField"}  # which no public function returns


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'grab_gpu'"):
        getattr(gpuguard, "grab_gpu")  # noqa: B009  (mypy knows too that there is none)


def test_importing_gpuguard_loads_nothing_but_itself():
    loaded = modules_loaded_by("import gpuguard")

    assert {name for name in loaded if name.startswith("gpuguard")} == {"gpuguard"}


def test_the_options_of_a_job_load_nothing_that_unpacks_archives():
    assert "shutil" not in modules_loaded_by("from gpuguard import cli; cli.build_parser('run')")


@pytest.mark.parametrize("command", ["run", "who", "top"])
def test_a_backend_that_is_set_but_empty_is_the_default_as_for_grab_gpus(command, monkeypatch):
    """As left behind by ``export GPUGUARD_BACKEND=$UNSET``."""
    monkeypatch.setenv("GPUGUARD_BACKEND", "")

    assert cli.build_parser(command).parse_args([]).backend == "auto"
