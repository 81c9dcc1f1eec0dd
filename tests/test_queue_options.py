"""--or, --after and --priority: what they mean, what they refuse, and what becomes of them on real claims."""

import os
import re
import shlex
import signal
import subprocess

import pytest
from builders import GIB
from claimholders import a_holder
from nodes import until

from gpuguard.cli import build_parser
from gpuguard.cli.options import Parser, add_choice_options, request_of
from gpuguard.cli.run import MOST_ALTERNATIVES, PRIORITY_NAMES, alternatives_of, priority_of, wait_of
from gpuguard.errors import InvalidRequest, LockDirectoryError
from gpuguard.queue import leader, tickets, waiter
from gpuguard.queue.priority import PRIORITIES
from gpuguard.queue.tickets import new_ticket
from gpuguard.request import Request, spelled

LOOK = ("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def parsed(*words):
    return build_parser("run").parse_args([*words, "--", "true"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nothing is no option that says which GPUs"),
        ("two", "two is no option that says which GPUs"),
        ("--wait 5m", "--wait is no option that says which GPUs"),
        ("-n", "-n/--num-gpus: expected one argument"),
        ("-n 0", "ask for at least 1"),
        ("-n x", "'x' is not a whole number"),
        ("--min-free 20", "'20' has no unit"),
        ("--strategy wide", "invalid choice: 'wide'"),
        ("--min", "--min is no option"),
        ("'", "No closing quotation"),
    ],
)
def test_a_wrong_alternative_is_one_message_with_advice(text, reason):
    with pytest.raises(InvalidRequest) as caught:
        alternatives_of(parsed(f"--or={text}"))

    message, advice = str(caught.value).split("\n")
    assert message.startswith(f"--or {text!r}: ") and reason in message and not message.endswith("..")
    assert advice == "Write options that say which GPUs: --or '-n 1'."


def test_as_many_alternatives_as_a_ticket_takes():
    ways = ["--or=-n 1"] * MOST_ALTERNATIVES

    assert MOST_ALTERNATIVES == tickets.MOST_ALTERNATIVES - 1
    assert len(alternatives_of(parsed(*ways))) == MOST_ALTERNATIVES
    with pytest.raises(InvalidRequest, match="--or can be given 3 times"):
        alternatives_of(parsed(*ways, "--or=-n 1"))


def test_how_long_to_wait():
    assert [wait_of(parsed(*words)) for words in ((), ("--wait",), ("--wait", "2m"), ("--no-wait",))] == [
        None, None, 120.0, 0.0,
    ]  # fmt: skip


def test_the_names_of_priorities_are_those_of_the_queue():
    assert {name: number - 1 for number, name in enumerate(PRIORITY_NAMES)} == PRIORITIES


@pytest.mark.parametrize(
    ("rules", "asked", "given", "told"),
    [
        ("", "normal", 0, ""),
        ("", "low", -1, ""),
        ("", "high", 0, "gpuguard: --priority high is not yours at this site: normal it is.\n"),
        ("priority: {everybody: high}", "high", 1, ""),
        (f"priority: {{high: [{os.geteuid()}]}}", "high", 1, ""),
        (f"priority: {{low: [{os.geteuid()}]}}", "high", -1, "--priority high is not yours at this site: low it is.\n"),
        ("priority: {everybody: hihg}", "high", 0, "normal it is"),
    ],
)
def test_a_site_bounds_the_priority_and_that_is_said(tmp_path, monkeypatch, capsys, rules, asked, given, told):
    (tmp_path / "line.yaml").write_text(f"fair_share: true\n{rules}\n")
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "line.yaml"))

    assert priority_of(parsed("--priority", asked)) == given
    said = capsys.readouterr().err
    assert told in said and bool(said) == bool(told)


@pytest.fixture
def follow(directory):
    """Wait for the end of something; returns what was told."""

    def run(what, **environ):
        told = []
        waiter.wait_until_over(what, directory, new_ticket([Request()]), told.append, environ)
        return told

    return run


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("", "--after is empty"),
        ("zzz", "--after zzz: there is no such claim or process now, and no event of such a claim.\n`gpuguard who`"),
        ("0", "there is no such claim or process"),
        ("-5", "there is no such claim or process"),
        ("4194303", "--after 4194303: there is no such claim or process now"),
        ("99999999", "there is no such claim or process"),
    ],
)
def test_what_is_not_there_is_refused(follow, what, message):
    with pytest.raises(InvalidRequest) as caught:
        follow(what)

    assert message in str(caught.value)


def test_a_whole_id_is_never_ambiguous_and_its_beginning_is_enough_unless_it_could_be_two(
    directory, follow, monkeypatch
):
    found = []
    monkeypatch.setattr(waiter, "_wait_for_claim", lambda claim, *_: found.append(claim.id))
    message = "--after abcd could be abcd1111, abcd1111.0badcafe: write more of it"
    with a_holder(directory, "GPU-a", name="abcd1111"), a_holder(directory, "GPU-b", name="abcd1111.0badcafe"):
        follow("abcd1111")
        with pytest.raises(InvalidRequest, match=message):
            follow("abcd")

    assert found == ["abcd1111"]


@pytest.mark.parametrize("own", ["abcd1111", "abcd1111.0badcafe"])
def test_a_job_does_not_wait_for_the_claim_that_it_runs_in(directory, follow, monkeypatch, own):
    monkeypatch.setattr(waiter, "_wait_for_claim", lambda *_: None)  # or else it would, if it were not refused
    message = "--after abcd is the claim that this runs in: it would wait for itself"
    with a_holder(directory, "GPU-a", name="abcd1111"), pytest.raises(InvalidRequest, match=message):
        follow("abcd", GPUGUARD_CLAIM=own)


def test_a_process_that_has_ended_and_was_not_collected_has_ended(follow):
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert follow(str(child.pid)) == [f"waits until process {child.pid} has ended"]


def test_a_claim_that_ends_while_it_is_looked_at_is_over(directory, follow, monkeypatch):
    with a_holder(directory, "GPU-a", name="abcd1111") as holder:
        real = leader.DirectoryWatch

        def ends_first(path):
            holder.child.kill()
            holder.child.wait()
            return real(path)

        monkeypatch.setattr(leader, "DirectoryWatch", ends_first)

        assert follow("abcd1111") == []


def test_without_inotify_the_end_of_a_holder_that_is_killed_is_heard(directory, monkeypatch):
    def none_left(path):
        raise OSError("no more instances")

    monkeypatch.setattr(leader, "DirectoryWatch", none_left)
    monkeypatch.setattr(waiter, "POLL_SECONDS", 0.05)
    with a_holder(directory, "GPU-a", name="abcd1111") as holder:
        told, ticket = [], new_ticket([Request()])
        waiter.wait_until_over("abcd", directory, ticket, lambda text: told.append(text) or holder.child.kill(), {})

    assert re.fullmatch(r"waits until \S+'s claim abcd1111 has ended", told[0])


def test_a_directory_that_takes_no_ticket_is_said(directory, follow, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(waiter, "OwnTicket", full)
    with pytest.raises(LockDirectoryError, match=r"no ticket can be written into .*: No space left on device"):
        follow(str(os.getpid()))


@pytest.fixture
def job(gpuguard):
    """A job on one of the two devices."""
    with gpuguard.start("run", "--", "sh", "-c", "echo ready; exec sleep 60") as job:
        job.stdout.readline()
        yield job
        job.terminate()


@pytest.mark.parametrize("words", [("--or", "-n 1"), ("--or=-n 1", "--"), ("--or", "-n 1 --min-free 40GiB", "--")])
def test_the_first_way_that_fits_is_taken(gpuguard, job, words):
    second = gpuguard("run", "-n", "2", *words, *LOOK)
    job.terminate()
    job.wait()
    both = gpuguard("run", "-n", "2", *words, *LOOK)

    assert (second.stdout, both.stdout) == ("0\n", "0,1\n")


def test_a_choice_of_devices_holds_for_its_own_way_only(gpuguard, job):
    # The job has device 1.
    assert gpuguard("run", "--devices", "1", "--or", "-n 1", *LOOK).stdout == "0\n"
    assert gpuguard("run", "--no-wait", "--devices", "1", "--or", "--exclude 0", *LOOK).returncode == 75


@pytest.mark.parametrize(("words", "code"), [(("-n", "9", "--or", "-n 1"), 0), (("-n", "9", "--or", "-n 8"), 125)])
def test_ways_that_can_never_be_had_are_refused_only_when_all_are(gpuguard, words, code):
    done = gpuguard("run", *words, *LOOK)

    assert done.returncode == code
    assert code == 0 or "only 2 exist" in done.stderr


def test_all_ways_stand_in_the_line(gpuguard, job):
    with gpuguard.start("run", "-n", "2", "--or", "--devices 1", "--note", "either", "--", "true") as second:
        until(lambda: gpuguard.json("queue")["places"])
        (place,) = gpuguard.json("queue")["places"]
        shown = gpuguard("queue").stdout
        second.kill()

    assert (place["requests"], place["note"], place["command"]) == (["-n 2", "-n 1 --devices 1"], "either", ["true"])
    assert "  2 or 1  " in shown


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_after_a_claim_comes_when_its_last_process_has_ended(gpuguard, job, signum, tmp_path):
    claim = next(claim for device in gpuguard.json("who")["devices"] for claim in device["claims"])
    with gpuguard.start("run", "--after", claim["id"], "--", "echo", "now") as second:
        until(lambda: gpuguard.json("queue")["places"])
        (place,) = gpuguard.json("queue")["places"]
        explained = gpuguard("explain").returncode
        children = [pid for pid in claim["holders"] if pid != job.pid]
        job.send_signal(signum)
        if signum == signal.SIGKILL:  # the wrapper alone: its job keeps the claim
            job.wait()
            assert second.poll() is None and len(gpuguard.json("queue")["places"]) == 1
            os.kill(children[0], signum)
        output, error = second.communicate(timeout=60)

    assert (second.returncode, output) == (0, "now\n")
    assert place["why"] == f"not queued yet: waits until {claim['user']}'s claim {claim['id']} has ended"
    assert (place["command"], place["expected_start"], explained) == (["echo", "now"], None, 0)
    said = f"waits until {claim['user']}'s claim {claim['id']} has ended"
    assert re.match(rf"gpuguard: {TIME} queued: {re.escape(said)}\n", error)


def test_after_a_claim_that_has_ended_already_comes_at_once(gpuguard):
    assert gpuguard("run", "--", "true").returncode == 0
    claim = next(event["claim"] for event in gpuguard.json("events")["events"] if event["kind"] == "release")

    second = gpuguard("run", "--after", claim, "--", "echo", "now")
    said, *_ = second.stderr.splitlines()

    assert (second.returncode, second.stdout) == (0, "now\n")
    assert said == f"gpuguard: the claim {claim} has ended already: nothing to wait for."


@pytest.mark.parametrize(("place", "code"), [("", 0), ("elsewhere", 125)])
def test_after_a_claim_that_was_killed_comes_at_once_if_it_was_of_this_machine(gpuguard, tmp_path, place, code):
    with gpuguard.start("run", "--exec", "--quiet", "--", "sh", "-c", "echo $GPUGUARD_CLAIM; exec sleep 600") as first:
        claim = first.stdout.readline().strip()
        first.kill()

    assert gpuguard("run", "--dir", str(tmp_path / "claims" / place), "--after", claim, "--", "true").returncode == code


def test_after_a_process_comes_when_it_has_ended_however_that_was(gpuguard):
    with subprocess.Popen(["sleep", "600"]) as process:
        second = gpuguard.start("run", "--after", str(process.pid), "--quiet", "--", "echo", "now")
        until(lambda: gpuguard.json("queue")["places"])
        process.kill()

    assert second.communicate(timeout=60) == ("now\n", "")


@pytest.mark.parametrize(("number", "code"), [("1", 0), ("2", 75)])
def test_no_wait_is_about_gpus_alone_and_begins_when_what_is_waited_for_has_ended(gpuguard, job, number, code):
    with subprocess.Popen(["sleep", "600"]) as process:
        words = ("run", "-n", number, "--no-wait", "--after", str(process.pid), "--quiet", "--", "true")
        second = gpuguard.start(*words)
        until(lambda: gpuguard.json("queue")["places"])
        assert second.poll() is None
        process.kill()

    second.communicate(timeout=30)
    assert second.returncode == code
    assert "--wait and --no-wait count from then" in " ".join(gpuguard("run", "--help").stdout.split())


def test_ctrl_c_while_it_waits_for_something_else_leaves_nothing(gpuguard, tmp_path):
    with gpuguard.start("run", "--after", str(os.getpid()), "--", "true") as second:
        said = second.stderr.readline()
        assert re.fullmatch(rf"gpuguard: {TIME} queued: waits until process {os.getpid()} has ended\n", said)
        second.send_signal(signal.SIGINT)

        assert second.wait(60) == -signal.SIGINT
        assert second.stderr.read() == ""
    assert list((tmp_path / "claims").rglob("*ticket.*")) == []


def request(line=""):
    parser = Parser(prog="gpuguard run", allow_abbrev=False)
    add_choice_options(parser)
    return request_of(parser.parse_args(shlex.split(line)))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", Request()),
        ("-n 2", Request(2)),
        ("--num-gpus=2 --min-free 20GiB --min-total 40GB", Request(2, min_free=20 * GIB, min_total=40 * 10**9)),
        ("--max-util 10% --max-memory-util 5.5%", Request(max_util=10.0, max_memory_util=5.5)),
        ("--max-processes 2 --max-temperature 80C", Request(max_processes=2, max_temperature=80.0)),
        ("--model 'A100*' --model H100", Request(models=("A100*", "H100"))),
        ("--devices 0,GPU-ab", Request(2, devices=("0", "GPU-ab"))),
        ("--devices 0,1,2 -n 1", Request(1, devices=("0", "1", "2"))),
        ("--devices 2", Request(devices=("2",))),
        ("--gpus 0,2", Request(2, devices=("0", "2"))),  # as --devices was called
        ("--gpus GPU-ab", Request(devices=("GPU-ab",))),
        ("--gpus 1.2", Request(devices=("1.2",))),
        ("--exclude 0 --prefer 3,2", Request(exclude=("0",), prefer=("3", "2"))),
        ("--strategy pack --tolerance 1GiB", Request(strategy="pack", tolerance=GIB)),
        ("--mine-as-free", Request(mine_as_free=frozenset({os.getuid()}))),
    ],
)
def test_options_make_a_request(line, wanted):
    assert request(line) == wanted


@pytest.mark.parametrize(
    "line",
    [
        "-n 5 --model 'A100*'",
        "-n 2 --devices 0,1,3 --min-free 20.0GiB --max-util 10% --max-processes 1 --exclude 4 --prefer 3",
        "-n 2 --mine-as-free --allow-mig-set",
        "-n 1 --min-total 40.0GiB --max-memory-util 5% --max-temperature 80C --strategy pack --tolerance 1.0GiB",
    ],
)
def test_the_spelling_of_a_request_makes_the_same_request(line):
    assert request(spelled(request(line))) == request(line)
