"""A site without packages: the module file under the real Environment Modules, the snippet for /etc/profile.d."""

import subprocess
import sys
from pathlib import Path

import pytest
from shells import Shell
from sources import ROOT
from test_manpages import built

import gpuguard

VERSION = gpuguard.__version__
MODULES = Path("/usr/share/modules/init")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scripts/install-site makes, with this program in the place of one in a virtual environment."""
    place = tmp_path_factory.mktemp("site")
    root = place / VERSION
    (root / "bin").mkdir(parents=True)
    (root / "bin/gpuguard").write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec {sys.executable} -m gpuguard "$@"\n')
    (root / "bin/gpuguard").chmod(0o755)
    built("build-man", root / "share/man/man1")
    built("build-completions", root / "share", PYTHON=sys.executable)
    for name, target in {
        "modulefile": f"modulefiles/gpuguard/{VERSION}",
        "profile.sh": f"{VERSION}/profile.sh",
    }.items():
        (place / target).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / "packaging/site" / name).read_text()
        (place / target).write_text(text.replace("@ROOT@", str(root)).replace("@VERSION@", VERSION))
    return place


def said(shell: str, lines: str, **variables: str) -> list[str]:
    """What *lines* print in a bare environment, and not a word of complaint."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables}
    done = subprocess.run([shell, "-c", lines], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def loaded(site: Path, shell: str = "bash") -> str:
    if not (MODULES / shell).exists():
        pytest.skip("Environment Modules (apt-get install environment-modules)")
    return f". {MODULES / shell}; module use {site}/modulefiles; module load gpuguard"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_module_brings_the_program_and_its_pages_and_leaves_python_alone(site, shell):
    python, program, version, page, places = said(
        shell,
        f"{loaded(site, shell)}; command -v python3; command -v gpuguard; gpuguard --version; man -w gpuguard-run; "
        'echo "$XDG_DATA_DIRS"',
    )

    assert python == said(shell, "command -v python3")[0]
    assert program == f"{site}/{VERSION}/bin/gpuguard"
    assert version.startswith("gpuguard ")
    assert page == f"{site}/{VERSION}/share/man/man1/gpuguard-run.1"
    assert places == f"{site}/{VERSION}/share:/usr/local/share:/usr/share"


def test_a_module_that_is_unloaded_leaves_nothing_of_ours(site):
    lines = "module unload gpuguard; env | grep -v ^MODULEPATH=; command -v gpuguard || echo gone"
    left = said("bash", f"{loaded(site)}; {lines}", MANPATH="/usr/share/man:", XDG_DATA_DIRS="/usr/share")

    assert left[-1] == "gone"
    assert {"MANPATH=/usr/share/man:", "XDG_DATA_DIRS=/usr/share", "PATH=/usr/bin:/bin"} <= set(left)
    assert [line for line in left if f"{VERSION}/" in line] == []


@pytest.mark.terminal
def test_tab_completes_once_the_module_is_loaded(site, tmp_path):
    more = f". /usr/share/bash-completion/bash_completion; {loaded(site)}"
    if not Path("/usr/share/bash-completion/bash_completion").exists():
        pytest.skip("bash-completion (apt-get install bash-completion)")
    with Shell("bash", tmp_path, {"PATH": "/usr/bin:/bin"}, more, installed=True) as shell:
        assert shell.words("gpuguard run --dev\t") == ["gpuguard", "run", "--devices"]


def test_the_profile_snippet_adds_the_program_once_and_starts_nothing(site):
    snippet = f". {site}/{VERSION}/profile.sh"
    path, places, program = said(
        "sh", f'set -eu; {snippet}; {snippet}; echo "$PATH"; echo "$XDG_DATA_DIRS"; command -v gpuguard'
    )

    assert path == f"/usr/bin:/bin:{site}/{VERSION}/bin"
    assert places == f"{site}/{VERSION}/share:/usr/local/share:/usr/share"
    assert program == f"{site}/{VERSION}/bin/gpuguard"


def test_the_profile_snippet_does_nothing_where_the_program_is_gone(site, tmp_path):
    text = (ROOT / "packaging/site/profile.sh").read_text().replace("@ROOT@", str(tmp_path))
    (tmp_path / "profile.sh").write_text(text)

    assert said("sh", f'. {tmp_path}/profile.sh; echo "$PATH${{XDG_DATA_DIRS-}}"') == ["/usr/bin:/bin"]


@pytest.mark.parametrize(
    ("words", "says"), [((), "usage"), (("/tmp/a b",), "take apart"), (("{site}",), "there already")]
)
def test_an_installation_that_would_do_harm_is_refused(words, says, site):
    command = [ROOT / "scripts/install-site", *(word.format(site=site) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode in (1, 2) and says in done.stderr
    assert (site / f"{VERSION}/bin/gpuguard").exists()
