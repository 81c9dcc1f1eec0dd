"""Other hosts, asked with a program that stands in for ssh: names, questions, time-outs, streaming.

The real ssh and a real sshd are in test_fleet_ssh, what strangers answer in test_fleet_answers.
"""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fleets import REFUSED, Hosts, an_answer
from nodes import eventually, on_terminal

from gpuguard.cli import build_parser
from gpuguard.cli.serve_ssh import judged
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.fleet.hosts import MOST, VIEWS, host_names, requested_words, words_of
from gpuguard.fleet.ssh import ERR_MOST, OUT_MOST, FleetQuery, Pool, Reply, ssh_words


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def test_names_of_hosts_come_from_a_list_a_range_and_a_file_each_once(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the old ones\ngpu1, gpu7   # slow\n\nssh://eve@[::1]:2222\n")

    assert host_names("gpu1,alice@gpu2.example.org,gpu[08-10],fe80::1", str(file)) == (
        "gpu1", "alice@gpu2.example.org", "gpu08", "gpu09", "gpu10", "fe80::1", "gpu7", "ssh://eve@[::1]:2222",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "-oProxyCommand=reboot", "--", "-", "a@-oProxyCommand=x", "-l@host", "ssh://-oProxyCommand=x", "a b", "$(id)",
        "`id`", "a;b", "a|b", "a&b", "a'b", 'a"b', "a\nb", "a\x1b[2Jb", "a/b", "..\\b", "%h", "a%b", "böse", "a=b", "",
        "gpu[9-1]", "gpu[1-99999]", "gpu[1-2", "x" * 256, "ssh://a/b", "ssh://", "~root", "*", "a@@", "@a", "{a}",
        "a\0b",
    ],
)  # fmt: skip
def test_a_name_that_ssh_or_a_shell_could_take_for_something_else_is_refused(name):
    with pytest.raises(InvalidRequest):
        host_names(f"good,{name}" if name else "", None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["gpu1", "-oProxyCommand=touch${IFS}/x"], ":2: '-oProxyCommand=touch${IFS}/x' is no name of a"),
        ([f"h{number}" for number in range(MOST + 1)], "docs/scale.md"),
    ],
)
def test_a_fault_in_a_file_is_named_with_its_line_and_so_many_hosts_are_refused(tmp_path, lines, message):
    (tmp_path / "list").write_text("\n".join(lines))

    with pytest.raises(InvalidRequest, match=re.escape(message)):
        host_names(None, str(tmp_path / "list"))


def test_ssh_asks_nobody_forwards_nothing_and_takes_the_host_for_no_option():
    words = ssh_words(FleetQuery("gpuguard who --json", timeout=4.0), "gpu1")

    assert {"-T", "-n", "-x", "-a", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oConnectTimeout=4"} <= set(words)
    assert words[-3:] == ["--", "gpu1", "gpuguard who --json"]


def test_the_question_has_the_options_of_the_command_and_no_others(hosts):
    hosts.say("a", an_answer())
    there = "'/opt/gpu guard/gpuguard'"
    hosts("who", "--user", "al ice", "--device", "0,1", "--fresh", "--hosts", "a", "--remote", there)

    assert hosts.asked("a") == ["'/opt/gpu guard/gpuguard' who --json '--user=al ice' --device=0,1 --fresh"]


def test_the_question_of_select_can_be_asked_and_is_the_same_on_the_other_side(hosts):
    hosts.say("b", {"schema": 1, "devices": []})
    hosts("select", "-n", "2", "--model", "RTX*", "--model", "$(id)", "-f", "20GiB", "-S", "--hosts", "b")

    (line,) = hosts.asked("b")
    assert requested_words(line) == [
        "select", "--json", "--num-gpus=2", "--min-free=20GiB", "--model=RTX*", "--model=$(id)", "--strategy=spread",
        "--no-sort",
    ]  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_that_can_be_asked_has_these_options(name):
    lists: dict[str, object] = {"user": ["a"], "device": ["0"], "model": ["x"]}
    flags: dict[str, object] = dict.fromkeys(("fresh", "share", "mine_as_free", "allow_mig_set", "no_sort"), True)
    given = dict.fromkeys(VIEWS[name], "1") | lists | flags | {"strategy": "first", "by": "claim", "vendor": "amd"}
    parsed = vars(build_parser(name).parse_args(words_of(name, given)[1:]))

    assert {option: parsed[option] for option in VIEWS[name]} == {option: given[option] for option in VIEWS[name]}


def test_a_command_line_for_a_shell_comes_back_as_the_same_words():
    words = ["who", "--json", "--user=a b'c", "--device=0"]

    assert requested_words(shlex.join(["/opt/x/gpuguard", *words])) == requested_words(shlex.join(words)) == words
    for other in ("sh -c gpuguard", "gpuguardx who", "gpuguard", "'open", ""):
        assert requested_words(other) == []


@pytest.mark.parametrize(("command", "reason"), REFUSED.items())
def test_what_a_locked_down_account_does_not_answer_has_a_reason(command, reason):
    words, why = judged(command)

    assert words == [] and why and reason in why


def test_what_a_locked_down_account_answers_comes_back_as_it_was_asked():
    asked_for = "gpuguard select --json -n 2 --model 'RTX*' -f 20GiB -c 1 -C 3 --no-sort"
    assert judged(asked_for) == (asked_for.replace("'", "").split()[1:], "")


def test_a_host_that_hangs_costs_one_timeout_and_the_others_nothing(hosts):
    hosts.say("a", an_answer())
    hosts.say("b", waits=True)
    hosts.say("c", err="ssh: connect to host c port 22: Connection refused\r\n", status=255)
    done = hosts("who", "--hosts", "b,c,a", "--timeout", "6s", "--json")
    found = {host["host"]: host for host in json.loads(done.stdout)["hosts"]}

    assert done.returncode == 1
    assert list(found) == ["b", "c", "a"]  # as they were named
    assert found["b"]["error"] == "no answer within 6s" and found["b"]["answer"] is None
    assert found["c"]["error"].startswith("ssh: connect to host c port 22: Connection refused (no sshd listens there")
    assert found["a"]["error"] is None and found["a"]["answer"]["devices"][0]["index"] == 0
    assert found["a"]["seconds"] < 6 <= found["b"]["seconds"]
    assert eventually(lambda: not Path(f"/proc/{(hosts.place / 'b.pid').read_text().strip()}").exists())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_no_ssh_is_left_behind_by_a_command_that_is_interrupted(hosts, number, status):
    hosts.say("b", waits=True)
    with hosts.gpuguard.start("who", "--hosts", "b", "--ssh", hosts.ssh, "--timeout", "60s") as process:
        assert eventually(lambda: (hosts.place / "b.pid").exists() and (hosts.place / "b.pid").read_text() != "")
        process.send_signal(number)
        process.communicate(timeout=60)
        pid = int((hosts.place / "b.pid").read_text())

        assert process.returncode == status
        assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def replies_of(how: FleetQuery, *hosts: str) -> list[Reply]:
    with closing(Pool(how)) as pool:
        pool.query(hosts)
        return rest_of(pool)


def rest_of(pool: Pool) -> list[Reply]:
    replies: list[Reply] = []
    while pool.waiting_for:
        replies += pool.step(1.0)
    return replies


def first_reply(script: str, timeout: float = 60.0) -> Reply:
    """What *script* of a shell, in the place of ssh, comes to."""
    [reply] = replies_of(FleetQuery("x", ssh=("sh", "-c", script), timeout=timeout), "a")
    return reply


def test_an_ssh_that_ignores_the_first_signal_is_killed():
    reply = first_reply("trap '' TERM; while :; do sleep 0.1; done", timeout=0.5)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()

    assert reply.fault == "no answer within 500ms"
    assert not [pid for pid in children if "trap '' TERM" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_connection_that_stays_open_behind_ssh_does_not_delay_its_answer():
    # As a master of ControlPersist in older versions: it keeps standard error.
    reply = first_reply("(exec sleep 600 >/dev/null) & echo $!; echo '{\"schema\": 1}'")
    pid, _, answer = reply.out.partition(b"\n")

    assert (reply.status, reply.fault, answer) == (0, None, b'{"schema": 1}\n')
    os.kill(int(pid), signal.SIGKILL)


def test_the_pool_is_bounded(hosts):
    for name in "abcdef":
        hosts.say(name, an_answer(), waits=True)
    how = FleetQuery("x", ssh=tuple(hosts.ssh.split()), timeout=60.0, parallel=2)
    started = lambda: sorted(path.stem for path in hosts.place.glob("*.pid"))  # noqa: E731
    with closing(Pool(how)) as pool:
        pool.query(list("abcdef"))
        while len(started()) < 2:
            pool.step(0.05)
        for _ in range(5):
            pool.step(0.05)
        assert started() == ["a", "b"]
        assert pool.waiting_for == list("abcdef")
        for name in "abcdef":
            hosts.go(name)
        replies = rest_of(pool)

    assert sorted(reply.host for reply in replies) == list("abcdef")
    assert {reply.status for reply in replies} == {0}


def test_where_few_files_may_be_open_fewer_hosts_are_asked_at_once(hosts, monkeypatch):
    """They were told to install ssh."""
    for name in "abcdef":
        hosts.say(name, an_answer())
    started, most = subprocess.Popen, 2

    def start(*words: Any, **more: Any) -> Any:
        if len(pool._running) >= most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return started(*words, **more)

    monkeypatch.setattr(subprocess, "Popen", start)
    with closing(Pool(FleetQuery("x", ssh=tuple(hosts.ssh.split()), timeout=60.0))) as pool:
        pool.query(list("abcdef"))
        replies = rest_of(pool)
        most = 0
        pool.query(["g"])
        with pytest.raises(OSError, match="Too many open files"):
            pool.step(1.0)

    assert sorted(reply.host for reply in replies) == list("abcdef")


def test_an_answer_and_complaints_without_end_are_cut_off():
    endless = first_reply("exec cat /dev/zero")
    noisy = first_reply("head -c 1000000 /dev/zero | tr '\\0' x >&2; echo '{}'")

    assert endless.fault == f"it answered with more than {OUT_MOST >> 20}MiB" and not endless.out
    assert len(noisy.err) <= ERR_MOST and noisy.out == b"{}\n"


def test_a_machine_without_ssh_is_told_how_to_get_it(hosts):
    done = hosts.gpuguard("who", "--hosts", "a", "--ssh", "/no/ssh")

    assert done.returncode == 1
    assert "/no/ssh cannot be run: No such file or directory.  Install it (apt-get" in done.stderr
    with pytest.raises(GpuguardError):
        replies_of(FleetQuery("x", ssh=("/no/ssh",)), "a")


@pytest.mark.terminal
def test_on_a_terminal_an_answer_is_shown_while_others_are_waited_for(hosts):
    hosts.say("slow", an_answer(), waits=True)
    hosts.say("fast", an_answer())
    words = ("who", "--hosts", "slow,fast", "--timeout", "60s", "--ssh", hosts.ssh)
    with on_terminal(hosts.gpuguard.words(*words), hosts.gpuguard.environment, columns=120) as (process, shown_until):
        seen = shown_until(lambda text: "fast: 1 GPU" in text and "waiting for 1 of 2 hosts: slow" in text)
        assert "slow: 1 GPU" not in seen
        hosts.go("slow")

        assert "slow: 1 GPU" in shown_until(lambda text: "2 of 2 hosts answered." in text)
        assert process.wait(60) == 0


@pytest.mark.terminal
def test_top_asks_again_and_shows_what_came_until_it_is_left(hosts):
    hosts.say("a", an_answer())
    hosts.say("slow", an_answer(), waits=True)
    words = ("top", "--hosts", "a,slow", "--every", "1s", "--timeout", "60s", "--ssh", hosts.ssh)
    with on_terminal(hosts.gpuguard.words(*words), hosts.gpuguard.environment, columns=120) as (process, shown_until):
        shown_until(lambda text: "slow" in text and "2 hosts, 1 GPU: 1 " in text)
        shown_until(lambda text: len(hosts.asked("a")) >= 2)
        hosts.go("slow")
        shown_until(lambda text: "2 hosts, 2 GPUs" in text)
        process.send_signal(signal.SIGINT)
        shown_until(lambda text: text.endswith("\x1b[?25h\x1b[?1049l"))

        assert process.wait(60) == 0
