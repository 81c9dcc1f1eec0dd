"""`gpuguard run`: what the job gets, what reaches it, how long its claim lasts, and what the user is told."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GIB, a_device, a_mig_instance, a_snapshot
from chances import NUMBER
from endpoints import a_web_server
from nodes import Gpuguard, on_terminal, until
from proc import children_of
from supervised_job import UUIDS, end, first_line, python

from gpuguard.cli.job_log import summary_line
from gpuguard.history.store_schema import DEVICE_COLUMNS, UsageSums
from gpuguard.jobs.surroundings import JobMeter
from gpuguard.run import JobEnd

SIGNAL_MASKS = ("grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status")
FAST = {"TICK_SECONDS": 0.05, "SAMPLE_SECONDS": 0.05, "FIRST_SAMPLE_SECONDS": 0.02}


def test_the_job_has_the_claims_descriptors_and_no_other(wrapped):
    bare = subprocess.run(["ls", "-l", "/proc/self/fd"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    _, out, _ = wrapped.run("ls", "-l", "/proc/self/fd")

    more = [line.split()[-1] for line in out.splitlines()[4:] if "/proc/" not in line]
    assert len(out.splitlines()) == len(bare.stdout.splitlines()) + 2
    assert [f"lock/{UUIDS[0]}" in place or ".json" in place for place in more] == [True, True]


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)])
@pytest.mark.parametrize("blocked", [(), (signal.SIGTERM, signal.SIGUSR2)])
def test_the_job_ignores_and_blocks_the_same_signals_as_without_us(wrapped, ignored, blocked):
    def dispose() -> None:
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    bare = subprocess.run(SIGNAL_MASKS, stdout=subprocess.PIPE, text=True, preexec_fn=dispose)

    assert wrapped.run(*SIGNAL_MASKS, preexec_fn=dispose)[1] == bare.stdout


def test_the_job_stays_in_our_process_group_and_session(wrapped):
    script = "import os; print(os.getpgid(0), os.getsid(0), os.getppid())"
    wrapper = wrapped.start(*python(script), start_new_session=True)

    assert first_line(wrapper).split() == [str(wrapper.pid)] * 3
    end(wrapper)


@pytest.mark.parametrize("name", ["TERM", "HUP", "USR1", "USR2", "CONT", "INT", "QUIT"])
def test_a_signal_sent_to_us_alone_reaches_the_job_once(wrapped, name):
    script = (
        "import signal, time; seen = []; "
        f"signal.signal(signal.SIG{name}, lambda *_: seen.append(1)); print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.2); print(len(seen))"
    )
    wrapper = wrapped.start(*python(script))
    first_line(wrapper)
    os.kill(wrapper.pid, getattr(signal, f"SIG{name}"))

    assert first_line(wrapper) == "1"
    end(wrapper)
    assert wrapper.returncode == 0


def test_no_signal_is_lost_while_the_job_is_being_started(wrapped):
    # As soon as the audit log shows the job, and before it can have done anything.
    wrappers = []
    for _ in range(5):
        (wrapped.place / "events").unlink(missing_ok=True)
        wrapper = wrapped.start("sleep", "60")
        until((wrapped.place / "events").exists)
        os.kill(wrapper.pid, signal.SIGTERM)
        end(wrapper)
        wrappers.append(wrapper)

    assert [wrapper.returncode for wrapper in wrappers] == [128 + signal.SIGTERM] * 5


def test_a_job_that_ignores_the_hang_up_survives_it(wrapped):
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.3; exit 4", preexec_fn=ignore)
    first_line(wrapper)
    os.kill(wrapper.pid, signal.SIGHUP)
    end(wrapper)

    assert wrapper.returncode == 4


def test_orphans_of_the_job_are_collected(wrapped):
    script = "for i in 1 2 3; do (sh -c 'echo $$; sleep 0.05' &) ; done; exec sleep 600"
    wrapper = wrapped.start("sh", "-c", script)
    orphans = [first_line(wrapper) for _ in range(3)]

    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))
    wrapper.terminate()
    end(wrapper)


def test_a_lock_that_the_job_gave_away_is_taken_again(wrapped):
    script = """
import fcntl, os, time
for name in os.listdir('/proc/self/fd'):
    try:
        if '/lock/' in os.readlink(f'/proc/self/fd/{name}'): fcntl.flock(int(name), fcntl.LOCK_UN)
    except OSError: pass
print('given away', flush=True); time.sleep(60)
"""
    wrapper = wrapped.start(*python(script), constants=FAST)
    first_line(wrapper)

    until(wrapped.is_claimed)
    wrapper.terminate()
    assert "LOST" not in end(wrapper)


def test_a_claim_that_is_lost_is_said_loudly_once_and_the_job_goes_on(wrapped):
    wait = f"echo ready; while [ ! -e {wrapped.place}/go ]; do sleep 0.02; done; exit 6"
    wrapper = wrapped.start("sh", "-c", wait, constants=FAST)
    first_line(wrapper)
    lock = wrapped.claims / "lock" / UUIDS[0]
    lock.rename(lock.with_suffix(".stolen"))
    said, looked = wrapper.stderr.readline(), wrapped.samples
    until(lambda: wrapped.samples > looked + 3)
    (wrapped.place / "go").touch()

    assert "CLAIM LOST" in said
    assert "LOST" not in end(wrapper)
    assert wrapper.returncode == 6
    assert [event["outcome"] for event in wrapped.events() if event["kind"] == "claim lost"] == ["job goes on"]


def test_a_driver_that_fails_costs_the_numbers_and_not_the_job_and_is_asked_ever_more_rarely(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.8; exit 6", constants=FAST)
    first_line(wrapper)
    wrapped.machine(fail=True)
    before = wrapped.samples
    end(wrapper)

    assert wrapper.returncode == 6
    assert wrapped.samples - before <= 8  # 16 without a longer and longer pause
    assert wrapped.events()[-1]["outcome"] == "driver unreachable"
    assert not wrapped.is_claimed()


def test_a_machine_without_files_for_a_moment_costs_the_job_neither_its_supervisor_nor_its_limits(wrapped):
    """The first tick that found no file, no memory or no lock ended `gpuguard run` with 125, and the job ran on."""
    wait = f"echo ready; while [ ! -e {wrapped.place}/go ]; do sleep 0.02; done; exit 6"
    wrapper = wrapped.start("sh", "-c", wait, constants=FAST)
    first_line(wrapper)
    samples = wrapped.place / "samples"

    def taken() -> bool:
        samples.unlink(missing_ok=True)
        with suppress(FileExistsError):  # it was there again a moment later
            samples.mkdir()
        return bool(samples.is_dir())

    until(taken)
    said = wrapper.stderr.readline()
    samples.rmdir()
    (wrapped.place / "go").touch()

    assert "cannot be looked after now" in said
    assert "looked after" not in end(wrapper)
    assert wrapper.returncode == 6 and not wrapped.is_claimed()


def test_the_command_is_in_the_event_as_it_is_written_for_a_shell(wrapped):
    wrapped.run("sh", "-c", "exit 3")

    assert wrapped.events()[0]["message"] == "sh -c 'exit 3'"


def test_the_numbers_of_the_job_are_in_its_event(wrapped):
    wrapped.machine(energy=1000.0)
    wrapper = wrapped.start("sh", "-c", "echo ready; exec sleep 60", constants=FAST)
    first_line(wrapper)
    until(lambda: wrapped.samples >= 2)
    wrapped.machine(memory_used=61 * GIB, utilization=80.0, energy=1010.0)
    before = wrapped.samples
    until(lambda: wrapped.samples >= before + 3)
    wrapped.machine(energy=1010.0)
    wrapper.terminate()
    end(wrapper)

    facts = wrapped.events()[-1]["facts"]
    assert (facts["peak_memory_bytes"], facts["energy_joules"], facts["exit_status"]) == (61 * GIB, 10.0, 143)
    assert 0 < facts["mean_utilization_percent"] <= 80


def test_unknown_numbers_stay_unknown():
    meter = JobMeter([a_device(0).uuid])
    for clock in range(3):
        unknown = a_device(0, memory_used=None, utilization=None, total_energy=None)
        meter.add(a_snapshot(unknown, clock=float(clock)))

    assert (meter.peak_memory, meter.utilization(), meter.energy()) == (None, None, None)


def test_an_energy_counter_that_was_set_back_is_unknown():
    meter = JobMeter([a_device(0).uuid, a_device(1).uuid])
    for clock, first in enumerate((5000.0, 10.0)):
        meter.add(a_snapshot(a_device(0, total_energy=first), a_device(1, total_energy=9000.0), clock=float(clock)))

    assert meter.energy() is None


def test_the_summary_of_a_job_and_the_usage_store_sum_alike():
    """Samples of a job come closer together at first: each counts for the time since the one before."""
    meter, tally = JobMeter([a_device(0).uuid]), UsageSums()
    for clock, utilization, joules in ((0.0, 0.0, 0.0), (1.0, 90.0, 300.0), (10.0, 10.0, 1200.0)):
        device = a_device(0, utilization=utilization, total_energy=joules)
        snapshot = a_snapshot(device, clock=clock, taken_at=1_700_000_000.0 + clock)
        meter.add(snapshot)
        tally.add(snapshot, longest=60.0)
    rows = [dict(zip(DEVICE_COLUMNS, *slot.devices.values(), strict=True)) for slot in tally.slots.values()]

    def stored(column: str) -> float:
        return sum(row[column] or 0.0 for row in rows)

    assert meter.energy() == pytest.approx(stored("energy_joules")) == pytest.approx(1200.0)
    mean = stored("utilization_percent_sum") / stored("seen_ms") * 1000
    assert meter.utilization() == pytest.approx(mean) == pytest.approx(18.0)


# Each job in a process of its own, forked from one that has imported everything: 320 of them take seconds.
MANY = """
import os, sys
from pathlib import Path
sys.path.insert(0, "{tests}")
from supervised_job import FileBackend, Request, a_directory, acquire, become_subreaper, run
become_subreaper()
place = Path(sys.argv[1])
os.environ["GPUGUARD_EVENTS"] = "/dev/null"
(place / "samples").write_text("")
for script in sys.stdin.read().splitlines():
    pid = os.fork()
    if pid == 0:
        backend = FileBackend(place)
        claim = acquire(backend, Request(devices=("0",)), a_directory(place / "claims"))
        ended = run.run(["sh", "-c", script], claim, backend)
        os._exit(ended.status if ended.die_of is None else 255)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
SIGNALS = sorted(signal.valid_signals() - STOPPING)


def statuses(place: Path, scripts: list[str]) -> list[int]:
    program = MANY.format(tests=Path(__file__).parent / "support")
    words = [sys.executable, "-c", program, str(place)]
    # Against a hang: 256 jobs take 15 s, and were seen to take more than 60 where others compute.
    done = subprocess.run(words, input="\n".join(scripts), stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [int(line) for line in done.stdout.split()]


def test_every_exit_code_comes_through(wrapped):
    codes = range(256) if NUMBER else [*range(4), *range(5, 120, 9), *range(120, 132), *range(133, 250, 9), 254, 255]
    assert statuses(wrapped.place, [f"exit {code}" for code in codes]) == list(codes)


def test_every_signal_becomes_what_a_shell_says_of_it(wrapped):
    scripts = [f"ulimit -c 0; kill -{int(signum)} $$; exit 7" for signum in SIGNALS]
    bare = [subprocess.run(["sh", "-c", script]).returncode for script in scripts]

    assert statuses(wrapped.place, scripts) == [128 - code if code < 0 else code for code in bare]
    assert sum(code < 0 for code in bare) > 50


@pytest.mark.parametrize(
    ("program", "file", "status", "text"),
    [
        ("nonesuch-program", None, 127, "nonesuch-program: command not found.  Is it installed, and in PATH?\n"),
        ("train.py", ("#!/bin/sh\n", 0o755), 127, "not found in PATH, but here.  Write `gpuguard run ... -- python t"),
        ("job", ("#!/bin/sh\n", 0o755), 127, "not found in PATH, but here.  Write `gpuguard run ... -- ./job`."),
        ("NCCL_DEBUG=INFO", None, 127, "To set a variable: env NCCL_DEBUG=INFO CMD."),
        ("", None, 127, "command not found"),
        ("./train.py", ("print()", 0o644), 126, "Permission denied.  Write `gpuguard run ... -- python ./train.py`."),
        ("./job", ("echo hello\n", 0o755), 126, "A script needs a first line such as #!/bin/sh."),
        ("./job", ("#!/no/such/interpreter\n", 0o755), 127, "the interpreter that its first line names does not exist"),
        (".", None, 126, "it is a directory"),
    ],
)
def test_what_cannot_be_started_has_the_status_of_a_shell_and_advice(
    wrapped, tmp_path, monkeypatch, program, file, status, text
):
    monkeypatch.chdir(tmp_path)
    if file:
        place = tmp_path / program.removeprefix("./")
        place.write_text(file[0])
        place.chmod(file[1])

    ended, _, err = wrapped.run(program, "-x")

    assert (ended, text in err, wrapped.is_claimed()) == (status, True, False)


def test_the_status_is_right_where_our_parent_ignores_the_end_of_children(wrapped):
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    status, out, _ = wrapped.run("grep", "SigIgn", "/proc/self/status", "/no/such/file", preexec_fn=ignore)

    assert status == 2
    assert int(out.split()[1], 16) & 1 << signal.SIGCHLD - 1, "the job inherits it as without us"


LOOK = ("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')


def claims(gpuguard: Gpuguard) -> list[dict[str, object]]:
    """The living claims, as `who` shows them."""
    return [claim for device in gpuguard.json("who")["devices"] for claim in device["claims"]]


def at_terminal(gpuguard: Gpuguard, *words: str) -> str:
    """What a run shows on a terminal."""
    with on_terminal(gpuguard.words(*words), gpuguard.environment) as (_, shown_until):
        return shown_until()


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_the_command_begins_where_the_options_end(gpuguard, dashes):
    done = gpuguard("run", "-n", "2", *dashes, "echo", "-n", "5", "--help", "--")

    assert (done.returncode, done.stdout) == (0, "5 --help --\n"[:-1])


def test_the_job_has_the_variables_of_its_caller_and_those_of_its_claim_and_no_others(gpuguard):
    """In cron, which names no locale, Python sets LC_CTYPE for itself; ssh took that along to other machines."""
    bare = {name: value for name, value in gpuguard.environment.items() if not name.startswith(("LC_", "LANG"))}
    ours = {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPUGUARD_CLAIM", "GPUGUARD_GPUS"}
    for way in ((), ("--exec",)):
        for named in ({}, {"LC_CTYPE": "C.UTF-8"}):
            gpuguard.environment = bare | named
            names = {line.partition("=")[0] for line in gpuguard("run", *way, "--", "env", "-0").stdout.split("\0")}

            assert names - {""} - ours == set(gpuguard.environment) - ours


@pytest.mark.parametrize("way", [[], ["--exec"]])
def test_a_program_that_does_not_exist_is_named_without_its_escape_codes(gpuguard, way):
    done = gpuguard("run", *way, "--", "no\x1b[2Jsuch")

    assert (done.returncode, claims(gpuguard)) == (127, [])
    assert " no\\x1b[2Jsuch: command not found." in done.stderr
    assert "started on" not in done.stderr and "ended on" not in done.stderr


@pytest.mark.parametrize(
    ("program", "status", "advice"),
    [
        ("nosuchprogram", 127, "Is it installed, and in PATH?"),
        ("train.py", 127, "not found in PATH, but here.  Write `gpuguard run ... -- python train.py`."),
        ("./train.py", 126, "Write `gpuguard run ... -- python ./train.py`."),
        ("below/nosuch", 127, "command not found"),
        ("./below", 126, "it is a directory"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_before_it_waits(
    gpuguard, both_taken, tmp_path, program, status, advice
):
    (tmp_path / "work" / "below").mkdir(parents=True)
    (tmp_path / "work" / "train.py").write_text("print()")

    done = gpuguard("run", "--", program, cwd=tmp_path / "work")

    assert (done.returncode, advice in done.stderr, "queued" in done.stderr) == (status, True, False)


@pytest.mark.parametrize("words", [("job",), ("./bin/job",)])
def test_what_the_path_of_the_job_or_its_directory_has_waits_and_starts(gpuguard, tmp_path, words):
    program = tmp_path / "bin" / "job"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    gpuguard.environment["PATH"] = f"{tmp_path / 'unreadable'}:bin:{gpuguard.environment['PATH']}"

    assert gpuguard("run", "--", *words, cwd=tmp_path).stdout == "ran\n"


def test_a_program_that_the_job_before_it_makes_may_be_missing_while_it_waits(gpuguard, tmp_path):
    script = "until [ -e go ]; do sleep 0.05; done; echo '#!/bin/sh\necho made' >made; chmod +x made"
    with gpuguard.start("run", "--note", "make", "--", "sh", "-c", script, cwd=tmp_path) as maker:
        until(lambda: claims(gpuguard))
        after = claims(gpuguard)[0]["id"]
        with gpuguard.start("run", "--after", after, "--", "./made", cwd=tmp_path) as user:
            until(lambda: gpuguard.json("queue")["places"])
            (tmp_path / "go").touch()
            said = user.stdout.read()
        maker.wait()

    assert said == "made\n"


def test_devices_are_named_by_index_or_by_uuid(gpuguard):
    by_index, by_uuid = gpuguard("run", "-n", "2", *LOOK), gpuguard("run", "--visible", "uuid", *LOOK)

    assert by_index.stdout == "0,1\n"
    assert by_uuid.stdout.startswith("GPU-")


def test_gpuguard_inside_the_job_means_the_same_machine_and_claims(gpuguard, tmp_path):
    for name in ("GPUGUARD_DIR", "GPUGUARD_BACKEND", "GPUGUARD_SIM_DIR"):
        del gpuguard.environment[name]
    inner = gpuguard.words("run", "--no-wait", *LOOK)
    outer = ["run", "--backend", "simulated:node", "--dir", "claims", "--devices", "1", "--", "sh", "-c"]

    assert gpuguard(*outer, 'cd /; "$@"', "sh", *inner, cwd=tmp_path).stdout == "1\n"


@pytest.mark.terminal
def test_a_terminal_shows_the_devices_and_at_the_end_the_numbers_unless_it_is_to_be_quiet(gpuguard):
    shown = at_terminal(gpuguard, "run", "-n", "2", "--", "sleep", "0.5").splitlines()

    assert re.fullmatch(r"gpuguard: GPU 0,1 \(SIMULATED\) · claim [0-9a-f]{8}", shown[0])
    assert re.fullmatch(r"gpuguard: GPU 0,1 · ([5-9]\d\dms|[\d.]+s) · peak .*iB · .*Wh · exit 0", shown[-1])
    assert at_terminal(gpuguard, "run", "--quiet", "--", "echo", "hello") == "hello\r\n"


HOST = os.uname().nodename
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_off_a_terminal_it_says_when_the_job_starts_and_ends_and_how_unless_it_is_to_be_quiet(gpuguard, tmp_path):
    told = gpuguard("run", "-n", "2", "--log-file", str(tmp_path / "log"), "--", "sh", "-c", "echo hello; kill -9 $$")
    quiet = gpuguard("run", "--quiet", "--", "echo", "hello")
    started, ended = told.stderr.splitlines()

    assert (told.returncode, told.stdout) == (137, "hello\n")
    assert re.fullmatch(rf"gpuguard: {TIME} started on GPU 0,1 \(SIMULATED\), claim [0-9a-f]{{8}}: sh -c .*", started)
    assert re.fullmatch(
        rf"gpuguard: {TIME} ended on GPU 0,1: exit 137, killed by SIGKILL, not by gpuguard run.*", ended
    )
    assert (tmp_path / "log").read_text() == told.stderr.replace("gpuguard: ", "", 1).replace("\ngpuguard: ", "\n")
    assert (quiet.stdout, quiet.stderr) == ("hello\n", "")


def test_off_a_terminal_it_says_why_it_waits_and_when_it_starts(gpuguard, both_taken):
    with gpuguard.start("run", "--", "true") as second:
        said = [second.stderr.readline()]
        both_taken.terminate()
        said += second.communicate(timeout=60)[1].splitlines()

    assert re.fullmatch(rf"gpuguard: {TIME} queued: wanted 1 GPU: number 1 of 1 in the queue, .*\n", said[0])
    assert re.fullmatch(rf"gpuguard: {TIME} started on GPU . \(SIMULATED\), claim .*: true", said[-2])
    assert re.fullmatch(rf"gpuguard: {TIME} ended on GPU .: exit 0; ran .*", said[-1])


def test_why_it_did_not_start_is_in_its_log_file(gpuguard, tmp_path):
    done = gpuguard("run", "--log-file", str(tmp_path / "log"), "-n", "9", "--", "true")
    nowhere = gpuguard("run", "--log-file", str(tmp_path / "none" / "log"), "--", "true")

    assert done.returncode == 125
    assert re.match(rf"{TIME} not started: wanted 9 GPUs, but only 2 exist\.\n", (tmp_path / "log").read_text())
    assert nowhere.stderr == f"gpuguard: --log-file {tmp_path}/none/log: No such file or directory.\n"


def test_a_message_tells_of_the_start_and_of_how_the_job_failed(gpuguard):
    with a_web_server() as web:
        done = gpuguard("run", "--notify", web.url, "--", "sh", "-c", "sleep 0.6; exit 3")
    began, failed = [json.loads(body) for _, body in web.requests]

    assert done.returncode == 3
    assert (began["facts"]["event"], began["subject"]) == ("started", f"started on {HOST}: sh -c 'sleep 0.6; exit 3'")
    assert (failed["facts"]["event"], failed["facts"]["exit_status"]) == ("failed", 3)
    assert "ended on GPU 1: exit 3; ran " in failed["text"]


def test_a_message_tells_that_the_job_could_not_start_and_a_server_that_refuses_it_changes_nothing(gpuguard):
    with a_web_server() as web:
        done = gpuguard("run", "--notify", web.url, "-n", "9", "--", "true")
    (message,) = [json.loads(body) for _, body in web.requests]
    with a_web_server(status=503) as web:
        refused = gpuguard("run", "--notify", web.url, "--", "sh", "-c", "exit 4")

    with a_web_server() as web:
        gpuguard("run", "--notify", web.url, "--", "nosuch")
    (missing,) = [json.loads(body) for _, body in web.requests]

    assert missing["facts"]["event"] == "not_started" and "not started: nosuch: command not found." in missing["text"]
    assert (done.returncode, message["facts"]["event"]) == (125, "not_started")
    assert "wanted 9 GPUs, but only 2 exist." in message["text"]
    assert refused.returncode == 4
    assert "the message (failed) could not be sent: the web server answers 503." in refused.stderr


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_closed_standard_stream_breaks_nothing(gpuguard, descriptor):
    words = ["sh", "-c", f'"$@" {descriptor}>&-', "sh", *gpuguard.words("run", "--quiet", "--", "sh", "-c", "exit 3")]
    done = subprocess.run(words, env=gpuguard.environment, stderr=subprocess.PIPE, text=True)

    assert (done.returncode, done.stderr) == (3, "")


def test_a_summary_leaves_out_what_is_unknown():
    everything = JobEnd(
        status=0,
        die_of=None,
        wall_time=751.0,
        outcome="settled",
        peak_memory=int(61.2 * GIB),
        utilization=87.4,
        energy=504_000.0,
    )
    nothing = JobEnd(status=143, die_of=None, wall_time=0.2, outcome="driver unreachable")
    devices = [a_device(2), a_device(3), a_mig_instance(a_device(1))]

    names = "GPU 2,3,1.1[3g.40gb]"
    assert summary_line(devices, everything) == f"{names} · 12m31s · peak 61.2GiB · mean 87% · 0.14kWh · exit 0"
    assert "· 25.0Wh ·" in summary_line(devices, replace(everything, energy=90_000.0))
    assert "· 0.025Wh ·" in summary_line(devices, replace(everything, energy=90.0))
    assert summary_line(devices, nothing) == f"{names} · 200ms · exit 143"


def test_with_exec_the_command_takes_our_place_and_nothing_else_is_left(gpuguard):
    with gpuguard.start("run", "--exec", "--", "sh", "-c", "echo $$; exec sleep 60") as wrapper:
        assert wrapper.stdout.readline() == f"{wrapper.pid}\n"

        until(lambda: set(children_of(wrapper.pid).values()) <= {"Z"})
        assert [claim["pid"] for claim in claims(gpuguard)] == [wrapper.pid]
        wrapper.kill()
        wrapper.wait()
        assert claims(gpuguard) == []


def test_with_exec_the_claim_lives_as_long_as_a_child_that_holds_it(gpuguard):
    with gpuguard.start("run", "--exec", "--", "sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $!") as wrapper:
        child = int(wrapper.stdout.readline())
        wrapper.wait(60)

        assert len(claims(gpuguard)) == 1
        os.kill(child, signal.SIGKILL)
        until(lambda: claims(gpuguard) == [])


def test_with_exec_the_signals_are_as_without_us(gpuguard):
    bare = subprocess.run(SIGNAL_MASKS, stdout=subprocess.PIPE, text=True)

    assert signals_in(gpuguard("run", "--exec", "--", *SIGNAL_MASKS).stdout) == signals_in(bare.stdout)


def signals_in(status: str) -> list[int]:
    """The masks, without 32 and 33: the C library keeps those to itself, and Python 3.13's subprocess ignores them."""
    return [int(line.split()[1], 16) & ~(0b11 << 31) for line in status.splitlines()]


def test_the_claim_is_kept_by_a_script_that_redirects_each_descriptor_with_one_digit(gpuguard):
    script = f"exec {' '.join(f'{number}>/dev/null' for number in range(3, 10))}; echo ready; exec sleep 60"
    with gpuguard.start("run", "--exec", "--", "sh", "-c", script) as job:
        assert job.stdout.readline() == "ready\n"
        held = claims(gpuguard)
        job.kill()

    assert [claim["pid"] for claim in held] == [job.pid]
