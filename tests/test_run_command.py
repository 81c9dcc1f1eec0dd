"""`gpuguard run` as a user types it, on a simulated node of two devices."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import replace

import pytest
from builders import GIB, a_device, a_mig_instance
from endpoints import a_web_server
from nodes import Gpuguard, on_terminal, until
from proc import children_of

from gpuguard.cli.run import summary_line
from gpuguard.run import JobEnd

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


def test_devices_are_named_by_index_or_by_uuid(gpuguard):
    by_index, by_uuid = gpuguard("run", "-n", "2", *LOOK), gpuguard("run", "--visible", "uuid", *LOOK)

    assert by_index.stdout == "0,1\n"
    assert by_uuid.stdout.startswith("GPU-")


def test_gpuguard_inside_the_job_means_the_same_machine_and_claims(gpuguard, tmp_path):
    for name in ("GPUGUARD_DIR", "GPUGUARD_BACKEND", "GPUGUARD_SIM_DIR"):
        del gpuguard.environment[name]
    inner = gpuguard.words("run", "--no-wait", *LOOK)
    outer = ["run", "--backend", "simulated:node", "--dir", "claims", "--gpus", "1", "--", "sh", "-c"]

    assert gpuguard(*outer, 'cd /; "$@"', "sh", *inner, cwd=tmp_path).stdout == "1\n"


@pytest.mark.terminal
def test_a_terminal_shows_the_devices_and_at_the_end_the_numbers_unless_it_is_to_be_quiet(gpuguard):
    shown = at_terminal(gpuguard, "run", "-n", "2", "--", "sleep", "0.5").splitlines()

    assert re.fullmatch(r"gpuguard: GPU 0,1 \(SIMULATED\) · claim [0-9a-f]{8}", shown[0])
    assert re.fullmatch(r"gpuguard: GPU 0,1 · 5\d\dms · peak .*iB · .*Wh · exit 0", shown[-1])
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

    assert re.fullmatch(rf"gpuguard: {TIME} queued: wanted 1 GPU: number 1 of 1 in line, .*\n", said[0])
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
    everything = JobEnd(0, None, 751.0, "settled", int(61.2 * GIB), 87.4, 504_000.0)
    nothing = JobEnd(143, None, 0.2, "driver unreachable")
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
        wrapper.wait(timeout=30)

        assert len(claims(gpuguard)) == 1
        os.kill(child, signal.SIGKILL)
        until(lambda: claims(gpuguard) == [])


def test_with_exec_the_signals_are_as_without_us(gpuguard):
    look = ("grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status")
    bare = subprocess.run(look, stdout=subprocess.PIPE, text=True)

    assert signals_in(gpuguard("run", "--exec", "--", *look).stdout) == signals_in(bare.stdout)


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
