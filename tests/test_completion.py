"""`gpuguard completion`: what the scripts offer in real shells, and what they ask for behind a TAB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from nodes import Gpuguard, eventually, start
from shells import Shell, needed

from gpuguard.cli.completion import DIRECTORY, FILE, JOB, SHELLS, VALUES, completions, kind_of, values_of, whole_parser
from gpuguard.users import read_groups

# What is typed, and the words of the command line then; ^ is TAB.
TYPED = {
    "gpuguard run --dev^": "gpuguard run --devices",
    "gpuguard ru^--dev^": "gpuguard run --devices",
    "gpuguard run --devices 3^": "gpuguard run --devices 3",
    "gpuguard run --devices 0,1,2,^": "gpuguard run --devices 0,1,2,3",
    "./bin/gpuguard run --devices 3^": "./bin/gpuguard run --devices 3",
    "gpuguard run --devices=0,1,2,^": "gpuguard run --devices=0,1,2,3",
    "gpuguard run --strategy=sp^": "gpuguard run --strategy=spread",
    "gpuguard run --model H^": "gpuguard run --model H100",
    "gpuguard run -n 2 ./trai^": "gpuguard run -n 2 ./train.sh",
    "gpuguard run -n 2 --wait -- cat lo^": "gpuguard run -n 2 --wait -- cat lonely.txt",
    "gpuguard release ^": "gpuguard release {claim}",
    "gpuguard who --user root^": "gpuguard who --user root",
    "gpuguard pol^chec^lonely^": "gpuguard policy check lonely.txt",
    "gpuguard daemon --policy=lonely^": "gpuguard daemon --policy=lonely.txt",
    "gpuguard query --fields index,memory.u^": "gpuguard query --fields index,memory.used",
    "gpuguard completion z^": "gpuguard completion zsh",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated node of 4 devices with a claim, and the program as `gpuguard`."""
    place = tmp_path_factory.mktemp("shells")
    start(str(place / "node"), "4xH100-80GB")
    (place / "lonely.txt").touch()
    for name, line in {
        "train.sh": "true",
        "bin/gpuguard": f'PYTHONPATH={os.pathsep.join(sys.path)} exec {sys.executable} -m gpuguard "$@"',
    }.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / name).chmod(0o755)
    return place


def environment(place: Path) -> dict[str, str]:
    own = {"GPUGUARD_BACKEND": "simulated", "GPUGUARD_SIM_DIR": str(place / "node"), "HOME": str(place)}
    return {"PATH": f"{place}/bin:/usr/bin:/bin", **own}


def a_claim(place: Path) -> subprocess.Popen[str]:
    words = [f"{place}/bin/gpuguard", "run", "--exec", "--", "sh", "-c", 'echo "$GPUGUARD_CLAIM"; exec sleep 600']
    return subprocess.Popen(words, env=environment(place), stdout=subprocess.PIPE, text=True)


def typed(shell: Shell, keys: str, expected: str) -> str:
    """The command line after *keys*; again where nothing was offered: on a machine that stalls, a look is given up."""
    for _ in range(3):
        words = " ".join(shell.words(keys.replace("^", "\t")))
        if words == expected:
            break
    return words


@pytest.mark.terminal
@pytest.mark.parametrize(
    ("name", "more"),
    [("bash", ":"), ("bash", ". /usr/share/bash-completion/bash_completion"), ("zsh", ":"), ("fish", ":")],
    ids=["bash alone", "bash with bash-completion", "zsh", "fish"],
)
def test_a_real_shell_completes_what_is_typed(name, more, place):
    if more != ":" and not Path(more.split()[1]).exists():
        pytest.skip("bash-completion (apt-get install bash-completion)")
    needed(name)
    with a_claim(place) as holder:
        try:
            claim = holder.stdout.readline().strip()
            with Shell(name, place, environment(place), more) as shell:
                seen = {keys: typed(shell, keys, words.format(claim=claim)) for keys, words in TYPED.items()}
                shell.shows("gpuguard run --devices \t\t", "0  ", "H100", "claimed by")
        finally:
            holder.kill()

    assert seen == {keys: words.format(claim=claim) for keys, words in TYPED.items()}


def test_what_a_script_asks_for_can_be_answered():
    kinds = {kind_of(action) for _, action in values_of(whole_parser())}

    assert kinds - {None, FILE, DIRECTORY, JOB} <= set(VALUES)


@pytest.mark.parametrize("shell", SHELLS)
def test_without_the_extra_the_script_of_the_package_is_printed(shell, tmp_path):
    missing = "shtab, which writes completion scripts, is missing: pip install 'gpuguard[completion]'."
    assert run_without_shtab(shell, tmp_path) == (1, "", f"gpuguard: {missing}\n")

    for name in SHELLS[shell]:
        (tmp_path / "share" / name).parent.mkdir(parents=True)
        (tmp_path / "share" / name).write_text(f"# for {shell}\n")

    assert run_without_shtab(shell, tmp_path) == (0, f"# for {shell}\n", "")


def run_without_shtab(shell: str, prefix: Path) -> tuple[int, str, str]:
    """`gpuguard completion` of an environment below *prefix* that has no shtab."""
    (prefix / "shtab.py").write_text("raise ImportError")
    code = f"import sys; sys.prefix = {str(prefix)!r}; from gpuguard.cli import main; main(['completion', {shell!r}])"
    own = {"PYTHONPATH": os.pathsep.join([str(prefix), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def values(gpuguard: Gpuguard, kind: str, word: str = "") -> list[str]:
    done = gpuguard("completion", "--values", kind, "--", word)

    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def test_devices_go_by_index_in_a_list_and_by_uuid_once_one_is_begun(tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    start(str(tmp_path / "node"), "3xH100-80GB")

    assert eventually(lambda: values(gpuguard, "devices") == ["0", "1", "2"])  # a look that takes long is given up
    assert eventually(lambda: values(gpuguard, "devices", "2,") == ["2,0", "2,1"])
    assert eventually(lambda: len(values(gpuguard, "devices", "GPU-")) == 3)
    assert eventually(lambda: len(values(gpuguard, "uuids")) == 3)
    assert values(gpuguard, "devices", "7") == values(gpuguard, "nonsense") == []


def test_without_a_driver_nothing_is_offered_and_nothing_said(tmp_path):
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_BACKEND="nvml", LD_LIBRARY_PATH=str(tmp_path))

    assert values(gpuguard, "devices") == values(gpuguard, "claims") == []
    assert "root" in values(gpuguard, "users")
    assert set(values(gpuguard, "groups")) == set(read_groups(os.geteuid()).values())


def test_a_driver_that_hangs_does_not_hold_up_the_shell(tmp_path, fake: FakeNvml):
    fake.hang("nvmlDeviceGetCount")

    assert values(Gpuguard(tmp_path, fake), "devices") == []  # a call that never ends fails the test


def test_hosts_are_those_that_ssh_knows_by_name(tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host gpu1 gpu2 *.lab !x\n  HostName 10.0.0.1\nhost=gpu3\nHost other\n")
    (tmp_path / ".ssh/known_hosts").write_text("gpu4,10.0.0.4 ssh-ed25519 AAAA\n|1|hashed= ssh-rsa BBBB\n# gpu9\n")
    gpuguard = Gpuguard(tmp_path, None, HOME=str(tmp_path))

    assert values(gpuguard, "hosts", "gpu1,gpu") == ["gpu1,gpu2", "gpu1,gpu3", "gpu1,gpu4"]
    assert values(Gpuguard(tmp_path, None, HOME="/nonexistent"), "hosts") == []


def test_names_of_strangers_that_a_shell_would_take_apart_are_not_offered(tmp_path, monkeypatch):
    nasty = ["$(reboot)", "a b", "x;y", "new\nline", "esc\x1b[2J", "`id`", "alice"]
    monkeypatch.setitem(VALUES, "users", (lambda _: [(name, "\x1b[31m\t\nred") for name in nasty], False))

    assert list(completions("users", "")) == ["alice\t\\x1b[31m\\t\\nred"]
