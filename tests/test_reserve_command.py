"""`gpuguard reserve` of two users and root: who gets what is kept, whoever is killed at whatever moment."""

import grp
import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from chances import often
from nodes import Gpuguard, until
from test_who import DOCUMENT, documented, printed
from users import ALICE, BOB, DEVICES, IN_BOTH_DIRECTORIES, Machine

pytestmark = pytest.mark.root

LOOK = ("--", "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')
# The command line, but a request that waits looks around by itself only after longer than any test waits for it.
PATIENT = """
import sys
from gpuguard.queue import waiter
waiter.OWN_CHECK_SECONDS = 600.0
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""


def reserve(machine: Machine, user: Any, *words: str, **options: Any) -> dict[str, Any]:
    """The reservation that was made."""
    done = machine(user, "reserve", "--json", *words, **options)
    assert done.returncode == 0, done.stderr
    (made,) = json.loads(done.stdout)["reservations"]
    return dict(made)


def listed(machine: Machine, user: Any = BOB) -> list[dict[str, Any]]:
    """All of them, as *user* sees them."""
    return list(json.loads(machine(user, "reserve", "--json").stdout)["reservations"])


@IN_BOTH_DIRECTORIES
def test_what_is_reserved_is_kept_from_others_and_given_to_its_user(machine):
    reserve(machine, ALICE, "-n", "2", "--for", "1h", "--note", "course")
    many, few = machine(BOB, "run", "--no-wait", "-n", "7", *LOOK), machine(BOB, "run", "--no-wait", "-n", "6", *LOOK)

    assert (many.returncode, many.stdout, few.returncode) == (75, "", 0)
    assert f"it would delay the reservation of {ALICE.pw_name} until " in many.stderr
    assert f"GPU 0, GPU 1: kept for {ALICE.pw_name}'s reservation until " in many.stderr
    with machine.job(BOB, "-n", "6") as (_, his), machine.job(ALICE, "-n", "2") as (_, hers):
        assert sorted(f"{his},{hers}".split(",")) == [str(index) for index in range(DEVICES)]
        assert [one["state"] for one in listed(machine)] == ["2 of 2 used"]


def test_every_way_to_devices_honours_it_and_says_why(admin):
    reserve(admin, None, "-n", "3", "--from", "in 1h", "--for", "1h", "--user", ALICE.pw_name)
    grab = """
import gpuguard
try:
    print(len(gpuguard.grab_gpus(6)))
except gpuguard.NotEnoughGpus as error:
    print(error)
"""

    for done in (
        admin(BOB, "select", "-n", "6"),
        admin(BOB, "explain", "-n", "6"),
        admin(BOB, "wait", "-n", "6", "--no-wait"),
    ):
        assert done.returncode != 0
        assert f"kept for {ALICE.pw_name}'s reservation from " in done.stdout + done.stderr
    assert f"kept for {ALICE.pw_name}'s reservation from " in admin.python(BOB, grab)
    assert len(admin(BOB, "select", "-n", "5").stdout.split(",")) == 5
    assert len(admin(BOB, "select", "-C", "8").stdout.split(",")) == 5
    assert admin(BOB, "run", "--no-wait", "-n", "8", "--time-limit", "30m", "--", "true").returncode == 0
    assert admin(BOB, "run", "--no-wait", "-n", "8", "--time-limit", "2h", "--", "true").returncode == 75
    assert admin(ALICE, "run", "--no-wait", "-n", "8", "--", "true").returncode == 0


def test_who_and_queue_show_it_and_json_is_documented(admin):
    made = reserve(admin, ALICE, "-n", "1", "--from", "in 2h", "--for", "1h", "--note", "\x1b[31mcourse")
    content = json.loads(admin(BOB, "reserve", "--json").stdout)

    assert documented("reserve", DOCUMENT.read_text(encoding="utf-8")) == printed("reserve", content)
    for command in ("who", "queue", "reserve"):
        shown = admin(BOB, command).stdout
        assert made["id"] in shown and "begins in " in shown and "\x1b" not in shown
    for command in ("who", "queue"):
        (found,) = json.loads(admin(BOB, command, "--json").stdout)["reservations"]
        assert (found["id"], found["user"], found["counts"]) == (made["id"], ALICE.pw_name, True)


def test_users_stay_inside_the_quota_of_the_site(admin):
    reserve(admin, ALICE, "-n", "2", "--for", "1h")
    refused = [
        admin(ALICE, "reserve", *words)
        for words in (
            ("-n", "1", "--for", "1h"), ("-n", "1", "--for", "2d"), ("--for", "1h", "--user", BOB.pw_name),
            ("-n", "9", "--for", "1h"), ("--for", "1s"), ("--from", "2020-01-01T00:00", "--for", "1h"), ("-n", "2"),
        )
    ]  # fmt: skip

    assert [done.returncode for done in refused] == [1, 1, 2, 1, 2, 2, 2]
    assert all(done.stderr.startswith("gpuguard: ") and not done.stdout for done in refused)
    assert len(listed(admin)) == 1
    rules = admin.place / "line.yaml"
    rules.write_text("reservations: {devices: 0}")
    (only,) = json.loads(admin(BOB, "reserve", "--json", environment={"GPUGUARD_LINE": str(rules)}).stdout)[
        "reservations"
    ]
    assert not only["counts"] and "no GPUs" in only["state"]


def test_members_of_a_group_use_what_is_reserved_for_it_and_others_are_told_whose_it_is(admin):
    own = grp.getgrgid(ALICE.pw_gid).gr_name  # in which she alone is
    made = reserve(admin, None, "-n", "3", "--for", "1h", "--group", own)
    assert (made["user"], made["uid"], made["group"], made["gid"]) == (None, None, own, ALICE.pw_gid)
    refused = admin(BOB, "run", "--no-wait", "-n", "6", "--", "true")
    explained = admin(BOB, "explain", "-n", "6").stdout

    assert (refused.returncode, f"kept for group {own}'s reservation until " in refused.stderr) == (75, True)
    assert f"the reservation of group {own} until " in refused.stderr and f"group {own}" in explained
    assert json.loads(admin(BOB, "who", "--json").stdout)["reservations"] == listed(admin)
    assert admin(BOB, "run", "--no-wait", "-n", "5", "--", "true").returncode == 0
    for command in ("who", "queue", "reserve"):
        assert f"group {own}" in admin(BOB, command).stdout
    with admin.job(ALICE, "-n", "3"):
        assert [one["state"] for one in listed(admin)] == ["3 of 3 used"]


def test_a_user_reserves_for_a_group_that_they_are_in_and_ends_that_and_no_member_ends_roots(admin):
    own, bobs = (grp.getgrgid(user.pw_gid).gr_name for user in (ALICE, BOB))
    others, unknown = (admin(ALICE, "reserve", "--for", "1h", "--group", name) for name in (bobs, "no-such-group"))
    both = admin(None, "reserve", "--for", "1h", "--group", own, "--user", ALICE.pw_name)
    made = reserve(admin, ALICE, "-n", "2", "--for", "1h", "--group", own)
    too_much = admin(ALICE, "reserve", "-n", "1", "--for", "1h")
    roots = reserve(admin, None, "-n", "1", "--for", "1h", "--group", own)

    assert (others.returncode, f"you are not in the group {bobs}" in others.stderr) == (2, True)
    assert (unknown.returncode, "there is no group 'no-such-group'" in unknown.stderr) == (2, True)
    assert (both.returncode, "not allowed with" in both.stderr) == (2, True)
    assert (too_much.returncode, "(2 of them in earlier ones)" in too_much.stderr) == (1, True)
    assert "only root can cancel it" in admin(ALICE, "reserve", "--cancel", roots["id"]).stderr
    assert (
        admin(ALICE, "reserve", "--cancel", made["id"]).stdout
        == f"cancelled: reservation {made['id']} of group {own}.\n"
    )
    assert admin(None, "reserve", "--cancel", roots["id"]).returncode == 0


def test_a_forged_reservation_keeps_nothing_from_anybody(admin):
    made = reserve(admin, ALICE, "-n", "2", "--for", "1h")
    path = next(Path(admin.directory.records).glob(f"*reserve.*.{made['id']}.json"))
    content = json.loads(path.read_text())
    forge = "import os, sys\nos.umask(0o022)\nopen(sys.argv[1], 'w').write(sys.argv[2])\n"
    records = f"{admin.directory.records}/reserve"
    for name, change in (
        (f"{BOB.pw_uid}.big", {"uid": BOB.pw_uid, "num_gpus": 6}),
        (f"{BOB.pw_uid}.other", {"uid": ALICE.pw_uid}),
        (f"{BOB.pw_uid}.roots", {"uid": 0}),
        ("0.root", {"uid": 0, "num_gpus": 6}),
        (f"{BOB.pw_uid}.group", {"uid": BOB.pw_uid, "gid": ALICE.pw_gid}),
        (f"{ALICE.pw_uid}.hers", {"uid": ALICE.pw_uid}),
    ):
        admin.python(BOB, forge, f"{records}.{name}.json", json.dumps({**content, **change}))
    seen = admin(ALICE, "queue").stdout

    assert [one["counts"] for one in listed(admin)] == [True, False]
    assert seen.count("not counted: reservation ") == 5 and "users may reserve 2 GPUs" in seen
    assert admin(None, "run", "--no-wait", "-n", "6", "--", "true").returncode == 0


def test_its_maker_its_user_or_root_cancels_it_and_nobody_else(admin):
    own = reserve(admin, ALICE, "--for", "1h")["id"]
    roots, bobs = (reserve(admin, None, "--for", "1h", "--user", user.pw_name)["id"] for user in (ALICE, BOB))
    squatted = f"{admin.directory.records}/waived.{ALICE.pw_uid}.0.{roots}"
    admin.python(BOB, "import sys\nopen(sys.argv[1], 'w').close()", squatted)

    for id in (own, roots):
        refused = admin(BOB, "reserve", "--cancel", id)
        assert (refused.returncode, f"only {ALICE.pw_name} or root can cancel it" in refused.stderr) == (1, True)
    assert admin(ALICE, "reserve", "--cancel", own).returncode == 0
    assert admin(ALICE, "reserve", "--cancel", roots).returncode == 0
    assert "there is no reservation" in admin(ALICE, "reserve", "--cancel", roots).stderr
    assert [one["id"] for one in listed(admin)] == [bobs]
    assert admin(None, "reserve", "--cancel", bobs).returncode == 0
    assert listed(admin) == []
    assert not list(Path(admin.directory.records).glob("reserve.*"))  # the daemon and root remove what its user waived


def test_its_user_goes_before_who_waits_longer_and_the_end_wakes_them(admin):
    roots = reserve(admin, None, "-n", "8", "--for", "1h", "--user", ALICE.pw_name)["id"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [admin.python_path, "-c", PATIENT, "run", "--quiet", "-n", "8", *LOOK]
    waiter = subprocess.Popen(words, **pipes, **admin._as(BOB))
    try:
        until(lambda: list(Path(admin.directory.records).glob("*ticket.*.json")))
        assert admin(ALICE, "run", "--no-wait", "-n", "8", "--", "true").returncode == 0
        assert waiter.poll() is None
        admin(None, "reserve", "--cancel", roots)
        output, errors = waiter.communicate(timeout=60)
        assert (output.count(","), waiter.returncode) == (7, 0), errors
    finally:
        waiter.kill()
        waiter.communicate()


def test_a_missed_reservation_is_over_and_one_whose_user_comes_is_not(admin):
    rules = admin.place / "line.yaml"
    rules.write_text("reservations: {no_show: 2s}")
    rules.chmod(0o644)
    admin.environment["GPUGUARD_LINE"] = str(rules)
    missed = reserve(admin, None, "-n", "7", "--for", "1h", "--user", ALICE.pw_name)["id"]
    done = admin(BOB, "run", "--quiet", "--wait", "60s", "-n", "8", "--", "true")

    assert done.returncode == 0, done.stderr
    assert ["over: " in one["state"] for one in listed(admin)] == [True]
    admin(None, "reserve", "--cancel", missed)
    rules.write_text("reservations: {no_show: 10s}")  # in which she comes, on a busy machine too
    reserve(admin, None, "-n", "7", "--for", "1h", "--user", ALICE.pw_name)
    with admin.job(ALICE):
        time.sleep(10.1)  # the time that nobody may pass
        assert [one["counts"] for one in listed(admin)] == [True]
        assert admin(BOB, "run", "--no-wait", "-n", "2", "--", "true").returncode == 75


def test_a_reservation_that_ends_before_its_user_is_missed_is_over_at_its_end(admin):
    said = admin(ALICE, "reserve", "-n", "1", "--for", "10m").stdout
    (made,) = listed(admin)

    assert "reserved: 1 GPU" in said and "unless" not in said
    assert (made["over_at"], made["state"]) == (made["ends"], "0 of 1 used")


def test_two_who_reserve_at_once_never_both_get_what_only_one_can(admin):
    words = ("reserve", "-n", "5", "--for", "1h", "--user")
    both = [admin.start(None, *words, user.pw_name) for user in (ALICE, BOB)]  # type: ignore[arg-type]

    # Each may see the other and go back, which the newer one alone does unless both files have the same time.
    assert [process.wait(60) for process in both].count(0) <= 1
    assert [one["counts"] for one in listed(admin)].count(True) <= 1


def test_a_command_that_is_killed_at_any_moment_leaves_a_whole_reservation_or_none(admin):
    rng = random.Random(5)
    killed, longest = 0, 0.2
    for turn in range(often(48)):
        words: tuple[str, ...] = ("reserve", "-n", "1", "--for", "1h")
        before = listed(admin)
        if before and turn % 2:
            words = ("reserve", "--cancel", before[0]["id"])
        process = admin.start(ALICE, *words)
        try:
            process.wait(rng.uniform(0.0, longest))
            longest *= 0.7  # some instants lie before its end and some behind it
        except subprocess.TimeoutExpired:
            killed += 1
            longest *= 1.4
        process.kill()
        process.wait()
        after = json.loads(admin(BOB, "queue", "--json").stdout)
        assert after["not_counted"] == []
        assert len(after["reservations"]) <= 2 and all(one["counts"] for one in after["reservations"])
        free = DEVICES - len(after["reservations"])
        if turn % 8 == 0:
            assert admin(BOB, "run", "--no-wait", "-n", str(free), "--", "true").returncode == 0
    assert killed > 2


@pytest.mark.parametrize("victim", ["wrapper", "job"])
def test_a_job_inside_its_reservation_that_is_killed_leaves_the_reservation(admin, victim):
    reserve(admin, ALICE, "-n", "2", "--for", "1h")
    with admin.job(ALICE, "-n", "2") as (wrapper, _):
        job = int(Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children").read_text().split()[-1])
        os.kill(wrapper.pid if victim == "wrapper" else job, 9)
        wrapper.wait(60)
        if victim == "wrapper":
            os.kill(job, 9)

    assert [one["counts"] for one in listed(admin)] == [True]
    assert admin(BOB, "run", "--no-wait", "-n", "7", "--", "true").returncode == 75


@pytest.mark.parametrize("options", [("--mig", "3g.40gb"), (), ("--share", "--memory", "5GiB")])
def test_a_reserved_mig_instance_is_kept_also_from_whoever_asked_for_no_instance(tmp_path, options):
    gpuguard = Gpuguard(tmp_path, None)
    gpuguard("sim", "start", "1xA100-80GB:mig=3g.40gb,3g.40gb")
    words = ("--mig", "3g.40gb", "--for", "1h", "--user", BOB.pw_name)
    gpuguard("reserve", "-n", "1", "--from", "in 2h", *words)
    one = gpuguard("run", "--no-wait", *options, *LOOK)
    gpuguard("reserve", "-n", "1", "--from", "in 3h", *words)
    gpuguard("reserve", "-n", "2", "--from", "in 5h", *words)
    none, select = gpuguard("run", "--no-wait", *options, *LOOK), gpuguard("select", *options)
    short = gpuguard("run", "--no-wait", "--time-limit", "1h", *options, *LOOK)

    assert one.stdout.startswith("MIG-") and short.stdout.startswith("MIG-")
    assert (none.returncode, none.stdout, select.returncode) == (75, "", 1)
    assert f"kept for {BOB.pw_name}'s reservation from " in none.stderr
