"""Whatever is typed wrongly: one message that names the fault and says what to do, and nothing is left behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Gpuguard, eventually, start
from proc import born_with

from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices
from gpuguard.cli import COMMANDS, run_command_line

# What a number behind --gpus could be.
WHICH = "{0} can mean a count or a GPU: write {1}, or `--devices {0}` for GPU number {0}"

# Since Python 3.14 this is a number for argparse.
MINUS = (
    "'-20GiB' is not a memory size"
    if sys.version_info >= (3, 14)
    else "a value is missing (it cannot begin with a dash)"
)
NODE = "GPUGUARD_SIM_DIR={}/node"  # in the environment of what is started at a place
LINES = 4  # of a message, without a list of devices

# run, then what the message must contain.  PLACE is a directory of the test's own.
RUN_WORDS = [  # found before anything is read
    ("", "a command to run is missing, as in `-n 2 -- python train.py`"),
    ("-n 2", "a command to run is missing"),
    ("--memory-limit 0% true", "--memory-limit: a limit of 0 ends every job"),
    ("--time-limit 1s --idle-limit 0s true", "--idle-limit: a limit of 0 ends every job"),
    (
        "--wait true",
        "--wait: 'true' is not a duration: write it like '1h30m' (units: ms, s, m, h, d, w).\nWithout a duration",
    ),
    (
        "--wait python -V",
        "unrecognized arguments: -V.\n'python' was taken for the value of --wait: write `--wait -- python`",
    ),
    ("--json true", "unrecognized arguments: --json.\nSee"),
    ("--bogus -- true", "unrecognized arguments: --bogus"),
    ("--min-fre 20GiB true", "--min-fre (did you mean --min-free?)"),
    ("-q true", "-q (did you mean --quiet?)"),
    ("--name x true", "--name (did you mean --note?)"),
    ("-t 4h true", "-t (did you mean --time-limit?)"),
    ("--time=4h true", "--time=4h (did you mean --time-limit?)"),
    ("--detach true", "--detach (did you mean `gpuguard submit`?)"),
    ("--gres=gpu:2 true", "--gres=gpu:2 (did you mean -n?)"),
    ("-g 2 true", "-g (did you mean -n?)"),
    ("--mem 20GiB true", "--mem (did you mean --min-free?)"),
    ("--time-limit 4:00:00 true", "--time-limit: '4:00:00' is not a duration: write it like '4h' (units: "),
    ("--time-limit 01:30:05 true", "write it like '1h30m5s'"),
    ("--time-limit 0:00:00 true", "write it like '1h30m'"),
    ("-n 0 true", "0 GPUs cannot be asked for: ask for at least 1"),
    ("-n x true", "-n: 'x' is not a whole number: write it like -n 2"),
    (f"-n {'9' * 5000} true", "9' is not a whole number"),
    ("-n", "-n/--num-gpus: a value is missing"),
    ("-n 3 --devices 0,1 true", "-n 3 wants more than the 2 that --devices 0,1 names"),
    ("--gpus 2 true", f"--gpus: {WHICH.format(2, '`-n 2` for 2 GPUs')}.\nSee `gpuguard run --help`"),
    ("--gpus=0 true", WHICH.format(0, "`-n N` for N GPUs")),
    ("--or '--gpus 1' true", WHICH.format(1, "`-n 1` for 1 GPU")),
    ("--gpus 0,1 --devices 2 true", "--devices: not allowed with argument --gpus"),
    ("--devices 0,0 true", "--devices names GPU 0 twice: name each GPU once"),
    ("--devices '' true", "--devices '' names no GPU in one place: write it like 0,3"),
    ("--exclude , true", "--exclude ',' names no GPU in one place"),
    ("--exclude 0 --devices 0 true", "0 stands in --devices and in --exclude: decide for one"),
    ("--min-free 20 true", "--min-free: '20' has no unit: write a memory size like '20GiB'"),
    ("--min-free -20GiB true", f"--min-free: {MINUS}"),
    ("--min-free=-20GiB true", "--min-free: '-20GiB' is not a memory size"),
    ("--max-util 10 true", "--max-util: '10' has no unit: write a percentage like '10%'."),
    ("--max-processes -1 true", "a GPU cannot have -1 processes: permit 0 or more"),
    ("--time-limit 5 true", "--time-limit: '5' has no unit: write a duration like '1h30m'"),
    ("--time-limit 0s true", "--time-limit 0s leaves the job no time: leave the option out"),
    ("--grace 5 true", "--grace: '5' has no unit"),
    ("--wait=-5s true", "--wait: '-5s' is not a duration"),
    ("--wait 5s --no-wait true", "--no-wait: not allowed with argument --wait"),
    ("--no-wait=3 true", "--no-wait: it takes no value, but got '3'"),
    ("--exec --time-limit 4h true", "drop --exec, or use `timeout 4h CMD`"),
    ("--visible name true", "--visible: invalid choice: 'name'"),
    ("--note=--", "--note: a value is missing"),
    ("--dir '' true", "--dir: the name of the directory is empty"),
]
RUN_DEVICES = [
    ("-n 9 true", "wanted 9 GPUs, but only 8 exist.\nAsk for 8."),
    ("--devices 9 true", "--devices 9 names no GPU of this machine.  It has\n  0  GPU-"),
    ("--devices GPU-ffffffffffff true", "--devices GPU-ffffffffffff names no GPU of this machine"),
    ("--devices '0,\x1b[2J' true", "--devices \\x1b[2J names no GPU"),
    ("--prefer 12 true", "--prefer 12 names no GPU"),
    (
        "--model A100 true",
        "none exists that can satisfy --model 'A100'.\n  its model is NVIDIA H100 80GB HBM3 (8 GPUs)\n"
        "Drop --model, or ask for --model 'NVIDIA H100 80GB HBM3'.",
    ),
    (
        "--min-total 90GB true",
        "--min-total 90GB.\n  has 79.6GiB of memory in all (8 GPUs)\nAsk for at most 79.6GiB (--min-total).",
    ),
    ("--exclude 0,1,2,3,4,5,6,7 true", "Drop --exclude."),
    ("--dir PLACE/file true", "/file is not a directory (a symbolic link is not followed).  Run `sudo gpuguard setup`"),
    ("--dir PLACE/file/x true", "cannot be made ready for claims: Not a directory.  Name another directory"),
    ("--dir PLACE/open true", "/open is writable for others (mode 0777)"),
    (
        "--backend nonesuch true",
        "there is no backend 'nonesuch': choose one of auto, nvml, smi, amd, intel, mthreads, replay, simulated",
    ),
    ("--backend nvml:x true", "nvml takes no 'x': write `--backend nvml`"),
    ("--backend simulated:PLACE/file true", "/file is not a directory"),
]
RUN_OTHERS = [
    (127, "'python3 -V; ls'", "python3 -V; ls: command not found.  Leave out the quotes around the command; where it"),
    (126, "PLACE/file", "Permission denied.  `chmod +x`"),
]
OTHERS = [
    (2, "", "a command is missing"),
    (2, "rnu -- true", "there is no command 'rnu': did you mean `gpuguard run`?"),
    (2, "status", "there is no command 'status': did you mean `gpuguard who`?"),
    (2, "scancel 12", "did you mean `gpuguard cancel`?"),
    (2, "kill 12", "did you mean `gpuguard cancel`?"),
    (2, "unlock 12", "did you mean `gpuguard release`?"),
    (2, "free", "did you mean `gpuguard select`?"),
    (2, "claim 2", "did you mean `gpuguard run`?"),
    (2, "nvitop -1", "did you mean `gpuguard top`?"),
    (2, "frobnicate", "there is no command 'frobnicate': choose one of run, select"),
    (2, "--bogus", "there is no command '--bogus': options stand behind the command, as in `gpuguard run -n 2 -- CMD`"),
    (2, "select extra", "unrecognized arguments: extra"),
    *(
        (125 if command.startswith("submit") else 2, f"{command} --gpus 2", WHICH.format(2, "`-n 2` for 2 GPUs"))
        for command in ("select", "explain", "wait", "reserve --for 1h", "submit --via slurm")
    ),
    (2, "select -n 1 -c 1", "-n says exactly how many"),
    (2, "select -c 5 -C 3", "at most 3 GPUs are fewer than the 5"),
    (1, "select -n 9", "only 8 exist"),
    (2, "explain --min-free 20", "--min-free: '20' has no unit"),
    (1, "explain --dir PLACE/file", "is not a directory"),
    (2, "who --jso", "--jso (did you mean --json?)"),
    (2, "reserve -n 1", "say for how long: --for 3h, or --until 12:00."),
    (2, "reserve --for 1h --until 12:00", "--until: not allowed with argument --for"),
    (2, "reserve --until noon", "--until: 'noon' is no time: write 09:00"),
    (2, "reserve --from 2099-01-01T12:00 --until 2099-01-01T12:00", "that would be over at once"),
    (2, "query index,name", "index,name (did you mean --query-gpu?)"),
    (2, "who --watch 10ms", "--watch needs at least 100ms"),
    (2, "top --every 1ms", "--every needs at least 100ms"),
    (2, "top --once --device 9", "--device 9 names no GPU"),
    (2, "who --device 9", "--device 9 names no GPU"),
    (2, "who --device ''", "--device '' names no GPU in one place"),
    (2, "who --hosts ,", "is no name of a host"),
    (2, "who --hosts-file /no/such", "cannot be read: No such file"),
    (2, "who --hosts-file /dev/zero", "larger than 1MiB"),
    (2, "who --hosts-file /dev/null", "names no host"),
    (2, "who --timeout 5s", "--timeout is about other hosts"),
    (2, "who --hosts a --timeout 1ms", "between 100ms and 10m"),
    (2, "who --hosts a --parallel 0", "between 1 and 256"),
    (2, "who --hosts a --watch", "`gpuguard top --hosts` shows them"),
    (2, "who --hosts a --backend smi", "--backend does not go with --hosts: it is of this machine"),
    (2, 'who --hosts a --remote "\'x"', "a quote is open"),
    (2, "top --hosts a --tree", "--tree does not go with --hosts: a host is one line there"),
    (2, "top --hosts a --every 10ms", "--every needs at least 1s"),
    (2, "select --hosts a --newline", "--newline and --null do not go with --hosts"),
    (2, "events --since soon", "--since: 'soon' is not a duration"),
    (2, "events --device ''", "--device is empty: name a uuid or its beginning"),
    (2, "metrics --every 100ms", "at least 1s"),
    (2, "metrics --serve --every 5s", "does not go with --serve"),
    (2, "metrics --serve 0.0.0.0:0", "no password"),
    (2, "metrics --serve nowhere", "127.0.0.1:9835"),
    (2, "metrics --expose", "is about --serve"),
    (2, "metrics --textfile /nonexistent", "no directory"),
    (2, "metrics --influx 127.0.0.1:8086", "no address"),
    (2, "metrics --influx http://127.0.0.1:8086/", "which database"),
    (2, "metrics --influx http://me:secret@127.0.0.1/write", "--token-file"),
    (2, "metrics --influx - --compat dcgm", "names for Prometheus"),
    (2, "metrics --token-file /x", "is about --influx"),
    (2, "daemon --enforce", "--enforce needs a policy file"),
    (2, "daemon --interval 1ms", "100ms to 10m"),
    (2, "daemon --interval 1h", "100ms to 10m"),
    (2, "daemon --metrics 0.0.0.0:0", "no password"),
    (2, "daemon --metrics --once", "does not go with --once"),
    (2, "keep", "say for how long, by --for 4h; or --end, or --list"),
    (2, "keep --for 0s", "--for: write 1s to 365d"),
    (2, "keep --for 400d", "--for: write 1s to 365d"),
    (2, "keep --for 4h --end", "say for how long"),
    (2, "deny --end", "which user?  Name one"),
    (2, "deny 0 --for 2h", "root cannot be denied anything"),
    (2, "deny bin", "say for how long, by --for 2h; or --end"),
    (2, "deny bin --for 0s", "--for: write 1s to 365d"),
    (2, "deny bin --for 2h --end", "say for how long, by --for 2h; or --end"),
    (2, "deny nobody-has-this-name --for 2h", "there is no user 'nobody-has-this-name'"),
    (2, "quarantine --for 2d", "which GPU?  Name one"),
    (2, "quarantine 3 --end --for 2d", "either --for or --end"),
    (2, "completion", "gpuguard completion bash"),
    (2, "setup --dir ''", "--dir: the name of the directory is empty"),
    (1, "setup --dir PLACE/file", "/file cannot be made: Not a directory.  Name another directory with --dir"),
    (2, "sim", "required: ACTION"),
    (2, "sim start 4xFoo", "Foo-24GB"),
    (2, "sim start 0xH100-80GB", "a node has 1 to 64"),
    (1, "sim start 4xRTX4090", "`gpuguard sim stop` ends it, --force replaces it"),
    (4, "sim show --backend simulated:PLACE/file", "is not a directory"),
    (2, "sim use --memory 10GiB", "say which GPUs: --device 0,1"),
    (2, "sim use --memory 10GiB --device 9", "'9' is no GPU of the simulated node"),
    (2, "sim use --memory 1GiB --device 0 -- /", "cannot be run"),
    (1, "sim use --memory 900GiB --device 0", "900.0GiB wanted"),
    (2, "sim use --memory 1GiB --device 0 -- nonesuch", "there is no command 'nonesuch'"),
    (2, "sim set", "nothing to set.  See `gpuguard sim set --help`"),
    (2, "sim set --temperature 40C", "say on which GPU"),
    (2, "sim set --device 0 --utilization 120%", "more than 100%"),
    (2, "sim set --device 0 --temperature 40C --over 1m", "40C..95C"),
    (2, "sim fault --device 0 hnag", "did you mean hang?"),
    (2, "sim fault --device 0 na:powerdraw", "did you mean na:power_draw"),
    (2, "sim fault --device 0 na:uuid", "na:"),
    (2, "sim show --jsn", "--jsn (did you mean --json?).\nSee `gpuguard sim show --help`."),
    (2, "sim show --backend nvml", "`sim` steers simulated"),
]
IN_THIS_PROCESS = [
    *((125, f"run {words}", message) for words, message in RUN_WORDS),
    *(case for case in OTHERS if not case[1].startswith("sim ")),
]
AS_COMMANDS = [
    *((125, f"run {words}", message) for words, message in RUN_DEVICES),
    *((code, f"run {words}", message) for code, words, message in RUN_OTHERS),
    *(case for case in OTHERS if case[1].startswith("sim ")),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("bad-input")
    (place / "claims").mkdir()
    (place / "file").write_text("no program")
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    start(str(place / "node"), "8xH100-80GB")
    before = sorted(os.listdir(place))
    yield place
    # Neither an empty --dir nor anything else may have put files where the commands ran.
    assert sorted(os.listdir(place)) == before


def words_of(line: str, place: Path) -> list[str]:
    """As a shell would split it."""
    return [word.replace("PLACE", str(place)) for word in shlex.split(line)]


def complaint(stderr: str) -> list[str]:
    """The lines of the message, without the list of devices that may be part of it, and the log of a job around it."""
    log = re.compile(r"gpuguard: \S+ \S+ (started|ended) on GPU ")
    return [line for line in stderr.splitlines() if not line.startswith("  ") and not log.match(line)]


def check(line: str, place: Path, output: str, error: str) -> None:
    lines = complaint(error)
    assert output == ""
    assert [text.startswith("gpuguard: ") for text in lines[:2]].count(True) == 1
    assert lines[0].startswith("gpuguard: ")
    assert line == "" or (len(lines) <= LINES and "usage:" not in error)
    assert "\x1b" not in error
    assert locked_devices(lock_directory(str(place / "claims")), uuids(place)) == set()
    assert eventually(lambda: born_with(NODE.format(place)) == [])


@pytest.mark.parametrize(("code", "line", "message"), AS_COMMANDS, ids=[line[:60] for _, line, _ in AS_COMMANDS])
def test_bad_input_is_one_clear_message(place: Path, code: int, line: str, message: str) -> None:
    done = Gpuguard(place, None, GPUGUARD_EVENTS="/dev/null")(*words_of(line, place), cwd=place)

    assert (done.returncode, message in done.stderr) == (code, True)
    check(line, place, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("code", "line", "message"), IN_THIS_PROCESS, ids=[line[:60] or "nothing" for _, line, _ in IN_THIS_PROCESS]
)
def test_what_no_command_understands_is_one_clear_message(place, monkeypatch, capsys, code, line, message):
    monkeypatch.chdir(place)
    for name, value in Gpuguard(place, None, GPUGUARD_EVENTS="/dev/null").environment.items():
        monkeypatch.setenv(name, value)

    assert run_command_line(words_of(line, place)) == code
    output, error = capsys.readouterr()
    assert message in error
    check(line, place, output, error)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_is_125_where_2_could_be_the_code_of_the_job_and_else_2(capsys, command):
    codes = {run_command_line([command, *words]) for words in (["--no-such-option"], ["--gpus", "2"])}

    assert codes == {125 if command in ("run", "submit") else 2}
    assert capsys.readouterr().out == ""


def test_a_job_that_was_refused_did_not_run(place: Path) -> None:
    gpuguard = Gpuguard(place, None, GPUGUARD_EVENTS="/dev/null")

    gpuguard("run", "-n", "9", "--", "touch", str(place / "ran"))
    gpuguard("run", "--devices", "0,0", "--", "touch", str(place / "ran"))

    assert not (place / "ran").exists()


def test_a_process_that_is_left_and_a_device_that_stays_claimed_would_be_seen(place: Path) -> None:
    gpuguard = Gpuguard(place, None, GPUGUARD_EVENTS="/dev/null")

    with gpuguard.start("run", "--", "sh", "-c", "echo ready; exec sleep 60") as wrapper:
        wrapper.stdout.readline()  # type: ignore[union-attr]
        seen = born_with(NODE.format(place)), locked_devices(lock_directory(str(place / "claims")), uuids(place))
        wrapper.terminate()

    assert all(seen)


def uuids(place: Path) -> list[str]:
    from gpuguard.backends.simulated import current

    return [device.uuid for device in current(str(place / "node")).devices]


def test_a_fault_inside_gpuguard_is_a_sentence_for_the_user(monkeypatch, capsys):
    from gpuguard import cli

    def broken(command, words):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cli, "_dispatch", broken)

    assert (cli.run_command_line(["run"]), cli.run_command_line(["who"])) == (125, 1)
    assert "ZeroDivisionError('planted')" in capsys.readouterr().err
    monkeypatch.setenv("GPUGUARD_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.run_command_line(["run"])


def test_a_reader_that_has_gone_away_is_no_answer_of_a_command():
    """`gpuguard who | true` ended with 1, which is the answer no."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as unread:
        ended = subprocess.run([sys.executable, "-m", "gpuguard", "--help"], stdout=unread, stderr=subprocess.PIPE)

    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


# Ctrl-C as the command line is loaded, which takes a tenth of a second.
INTERRUPTED = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "gpuguard.cli":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["gpuguard", "queue"]
from gpuguard.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
