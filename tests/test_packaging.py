"""What is packed: the wheel, the package for Debian, the image, the manifests.

Installed, booted, upgraded and purged: scripts/boot-test.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from sources import ROOT

import gpuguard
from gpuguard.claims.directory import ADMIN_DIRECTORY
from gpuguard.cli import COMMANDS, build_parser
from gpuguard.cli.completion import SHELLS
from gpuguard.policy_files.loader import load_policies

DEBIAN = ROOT / "packaging" / "deb"
CONTAINER = ROOT / "packaging" / "container"
SOURCES = ["gpuguard", "packaging", "scripts", "pyproject.toml", "README.md", "LICENSE", "examples", "constraints.txt"]
needs_hatchling = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("hatchling", "shtab"))),
    reason="building packages (no hatchling or shtab: pip install -e '.[dev]')",
)
needs_dpkg = pytest.mark.skipif(
    not shutil.which("dpkg-deb"), reason="the Debian package (no dpkg-deb: apt-get install dpkg)"
)


class Build(NamedTuple):
    """What is built of the sources."""

    archive: Path
    wheel: Path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("checkout") / "sources")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Build:
    place = tmp_path_factory.mktemp("build")
    return Build(built(sources, place, "sdist"), built(sources, place, "wheel"))


def copied(sources: Path) -> Path:
    """What a wheel and the demo are made of, but no cache that lies beside it."""
    sources.mkdir(parents=True)
    for part in SOURCES:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
        caches = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / part).is_dir() else {}
        copy(ROOT / part, sources / part, **caches)
    return sources


def built(sources: Path, place: Path, target: str, umask: int = 0o022) -> Path:
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    words = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(place)]
    subprocess.run(words, cwd=sources, env=environment, umask=umask, check=True, capture_output=True)
    return next(place.glob("gpuguard-*.whl" if target == "wheel" else "gpuguard-*.tar.gz"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@needs_hatchling
def test_the_wheel_has_what_the_commands_read_and_pages_and_completions_and_nothing_of_the_tests(build):
    names = set(zipfile.ZipFile(build.wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in ROOT.glob("gpuguard/**/*.py")}

    assert wanted < names
    assert {f"gpuguard/{name}" for name in ("py.typed", "packaging/gpuguard.service", "packaging/policy.yaml")} < names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "packaging/", "docs/"))]
    shared = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}

    assert {f"share/man/man1/gpuguard-{name}.1" for name in COMMANDS} < shared
    assert {"share/man/man1/gpuguard.1", *(f"share/{paths[0]}" for paths in SHELLS.values())} < shared


@needs_hatchling
def test_the_archive_of_the_sources_gives_the_same_wheel_at_another_place_and_time_and_under_another_umask(
    build, tmp_path
):
    subprocess.run(["tar", "--touch", "--extract", "--file", str(build.archive)], cwd=tmp_path, check=True)
    (unpacked,) = tmp_path.iterdir()

    assert digest(built(unpacked, tmp_path, "wheel", umask=0o077)) == digest(build.wheel)


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


class Stranger:
    """An environment without anything in it, and what pip does there as a stranger would have it: with its own build.

    Nothing that it does is pinned, and what it has fetched for one build serves the next.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        pinned = ("PIP_CONSTRAINT", "PIP_NO_CACHE_DIR", "PYTHONPATH")
        self.environment = {name: value for name, value in os.environ.items() if name not in pinned}
        self.environment |= {"PIP_CACHE_DIR": f"{place}/cache", "GPUGUARD_SIM_DIR": f"{place}/node"}
        self.environment["PIP_NO_COMPILE"] = "1"  # a third of the time, and nothing that is tested here
        made = self.run(sys.executable, "-m", "venv", "--without-pip", str(place / "venv"))
        if made.returncode:
            pytest.skip("what pip installs (no virtual environment: apt-get install python3-venv)")
        reached = self.pip("download", "--no-deps", "--dest", str(place / "index"), "filelock")
        if reached.returncode:
            pytest.skip("what pip installs (no package index in reach: set HTTPS_PROXY or PIP_INDEX_URL)")

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = self.environment | variables
        return subprocess.run(words, cwd=self.place, env=own, capture_output=True, text=True, check=False)

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(*PIP, "--python", str(self.place / "venv"), *words)

    def installed(self) -> dict[str, Any]:
        """What is there now: the version that the command says, and which of its other files."""
        place = self.place / "venv"
        version = self.run(str(place / "bin" / "gpuguard"), "--version")
        share = {str(path.relative_to(place)) for path in place.glob("share/**/*") if path.is_file()}
        return {
            "version": version.stdout.strip() or version.stderr,
            "pages": {Path(name).name for name in share if name.startswith("share/man/man1/")},
            "completions": {f"share/{paths[0]}" for paths in SHELLS.values()} & share,
            "typed": len(list(place.glob("lib/python*/site-packages/gpuguard/py.typed"))),
        }


ALL_OF_IT = {
    "version": f"gpuguard {gpuguard.__version__}",
    "pages": {"gpuguard.1", *(f"gpuguard-{name}.1" for name in COMMANDS)},
    "completions": {f"share/{paths[0]}" for paths in SHELLS.values()},
    "typed": 1,
}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return Stranger(tmp_path_factory.mktemp("stranger"))


@needs_hatchling
def test_pip_installs_the_archive_of_the_sources_with_all_that_it_needs_as_pipx_and_uv_do(build, stranger):
    done = stranger.pip("install", str(build.archive))
    assert done.returncode == 0, done.stderr

    assert stranger.installed() == ALL_OF_IT
    assert stranger.pip("check").returncode == 0
    assert stranger.run(str(stranger.place / "venv/bin/gpuguard"), "select", "--backend", "simulated").stdout == "7\n"


def test_the_demo_of_the_readme_runs_in_a_fresh_checkout_and_leaves_nothing_but_its_venv(stranger, sources):
    before, own = {*sources.iterdir()}, stranger.place / "tmp"
    own.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    demo = str(sources / "scripts" / "demo")
    after_the_box = {"GPUGUARD_BACKEND": "simulated"}  # of the README
    # None of the GPUs of this machine: it would take them.
    done = stranger.run(demo, PATH=path, TMPDIR=str(own), CUDA_VISIBLE_DEVICES="", **after_the_box)

    assert done.returncode == 0, done.stderr
    assert "the demo runs on a SIMULATED node" in done.stdout
    assert "$ gpuguard run -n 2 --wait 1m --note demo -- python examples/train.py" in done.stdout
    assert "checkpoint saved at step 10: done" in done.stdout and " · exit 0\n" in done.stdout
    assert {*sources.iterdir()} - before <= {sources / ".venv"} and list(own.iterdir()) == []


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_a_script_of_the_package_is_one_that_the_shell_reads(script):
    done = subprocess.run(["sh", "-n", str(DEBIAN / script)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "\nset -e\n" in (DEBIAN / script).read_text()


def requirements() -> dict[str, str]:
    """name -> lower bound, as pyproject.toml has them; tomllib is not in every Python that we run on."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = (\[.*?^\])", text, re.MULTILINE | re.DOTALL)
    assert listed
    return dict(line.split(">=") for line in ast.literal_eval(listed[1]))


def test_the_package_asks_for_what_gpuguard_needs():
    control, needed = (DEBIAN / "control").read_text(), requirements()

    for package, name in {"filelock": "filelock", "psutil": "psutil", "yaml": "pyyaml"}.items():
        assert f"python3-{package} (>= {needed[name]})" in control
    assert "Provides: python3-pynvml (= @PYNVML@)" in control  # which stands for nvidia-ml-py


def test_the_recipe_for_conda_asks_for_what_gpuguard_needs():
    text = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    recipe = yaml.safe_load(text)
    run = [line for line in recipe["requirements"]["run"] if not line.startswith(("python ", "__"))]

    assert run == [f"{name} >={bound}" for name, bound in requirements().items()]
    assert recipe["context"]["version"] == gpuguard.__version__
    assert f'requires-python = ">={recipe["context"]["python_min"]}"' in (ROOT / "pyproject.toml").read_text()


def manifest(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((CONTAINER / "daemonset.yaml").read_text())
    return next(document for document in documents if document["kind"] == kind)


def containers() -> list[dict[str, Any]]:
    pod = manifest("DaemonSet")["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def test_the_policy_of_the_manifest_has_no_fault_and_does_nothing_to_anybody(tmp_path):
    (tmp_path / "policy.yaml").write_text(manifest("ConfigMap")["data"]["policy.yaml"])
    policies = load_policies(str(tmp_path / "policy.yaml")).policies

    assert policies and not [policy.name for policy in policies if policy.enforce]


@pytest.mark.parametrize("container", containers(), ids=lambda container: str(container["name"]))
def test_a_container_of_the_manifest_runs_a_command_and_may_signal_and_see_others_and_nothing_else(container):
    command, *options = container["args"]
    rights = container["securityContext"]

    assert build_parser(command).parse_args(options)
    assert "--enforce" not in options
    assert not rights.get("privileged") and not rights["allowPrivilegeEscalation"] and rights["readOnlyRootFilesystem"]
    assert rights["capabilities"]["drop"] == ["ALL"]
    assert set(rights["capabilities"].get("add", [])) <= {"KILL", "SYS_PTRACE"}


def test_the_guard_of_a_node_sees_its_claims_and_its_pids():
    pod = manifest("DaemonSet")["spec"]["template"]["spec"]
    (node,) = (volume["hostPath"]["path"] for volume in pod["volumes"] if volume["name"] == "claims")
    mounted = [mount for container in containers() for mount in container["volumeMounts"]]
    seen = {mount["mountPath"] for mount in mounted if mount["name"] == "claims"}

    assert pod["hostPID"] is True
    assert {node} == seen == {ADMIN_DIRECTORY}


@pytest.mark.skipif(
    not importlib.util.find_spec("kubernetes_validate"),
    reason="the manifests of Kubernetes (no kubernetes-validate: pip install it)",
)
def test_kubernetes_knows_every_key_of_the_manifests():
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    for document in yaml.safe_load_all((CONTAINER / "daemonset.yaml").read_text()):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_what_the_image_copies_is_there():
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (CONTAINER / "Dockerfile").read_text(), re.MULTILINE)

    assert copied
    assert [name for line in copied for name in line.split() if not (ROOT / name).exists()] == []


def test_a_machine_that_cannot_boot_a_container_is_told_what_is_missing(tmp_path):
    words = [sys.executable, str(ROOT / "scripts" / "boot-test")]
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)

    assert done.returncode == 77
    assert "SKIPPED" in done.stderr
    assert ("systemd-container" if os.geteuid() == 0 else "root") in done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of this checkout."""
    place = tmp_path_factory.mktemp("package")
    words = [sys.executable, str(ROOT / "scripts" / "build-deb"), "--out", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr:
        pytest.skip("the Debian package (no package index to have nvidia-ml-py from)")
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.deb"))


@needs_dpkg
@needs_hatchling
def test_the_package_lays_its_files_where_they_belong(package):
    done = subprocess.run(["dpkg-deb", "--contents", str(package)], capture_output=True, text=True, check=True)
    files = {line.split()[5].removeprefix(".") for line in done.stdout.splitlines() if not line.startswith("d")}
    modules = "/usr/lib/python3/dist-packages/"
    shared = ("doc/gpuguard/", "man/man1/gpuguard", "bash-completion/", "zsh/", "fish/", "lintian/overrides/gpuguard")
    own = [f"{modules}gpuguard/", f"{modules}gpuguard-{gpuguard.__version__}.dist-info/"]
    own += [f"/usr/share/{name}" for name in shared]

    assert all(line.split()[1] == "root/root" for line in done.stdout.splitlines())
    assert {file for file in files if not file.startswith(tuple(own))} == {
        f"{modules}pynvml.py",
        "/usr/bin/gpuguard",
        "/etc/gpuguard/policy.yaml",
        "/lib/systemd/system/gpuguard.service",
        "/lib/systemd/system/run-gpuguard-claims.mount",
        "/usr/lib/sysusers.d/gpuguard.conf",
        "/usr/lib/tmpfiles.d/gpuguard.conf",
    }


@needs_dpkg
@needs_hatchling
@pytest.mark.skipif(not shutil.which("lintian"), reason="the Debian package by lintian (apt-get install lintian)")
def test_lintian_finds_no_error_in_the_package(package, tmp_path):
    words = ["lintian", "--allow-root", "--fail-on", "error", str(package)]
    own = {**os.environ, "TMPDIR": str(tmp_path)}  # it leaves directories there
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=own)

    assert done.returncode == 0, done.stdout
