"""Claim the GPUs that a job of yours uses already, for as long as it lives, so that everybody sees them as taken.

gpuguard adopt 4711                  the GPUs that process 4711 uses, until it has ended
gpuguard adopt 4711 --tree           and what it started and will start, until the last has ended
gpuguard adopt 4711 4712             one claim for both
sudo gpuguard adopt 4711             anybody's: the claim belongs to the owner of the job

A small process in the background holds the claim: if it is killed, the claim is gone and the job runs on.  Refused when
a GPU of the job is claimed already, or another process computes on it too.  A process that the job starts later and
that leaves its session is found only while its parent lives.
Exit codes: 0 claimed, 1 it cannot be and why, 2 usage, 4 no driver.
"""

from __future__ import annotations

import argparse
import os
import pwd
import sys
from contextlib import closing, suppress

from gpuguard.claims.claim import Claim
from gpuguard.cli.options import JSON, add_source_options, add_table, backend_of, directory_of
from gpuguard.errors import ClaimLost, InvalidRequest
from gpuguard.jobs.adoption import ENDING, ProcessFamily, adopt, detach, wake_pipe
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.model import EndOfClaim
from gpuguard.procfs import uid_of
from gpuguard.run import log_claim
from gpuguard.views.text import json_text, put

MOST_CHARACTERS = 980  # of pids in a line of the log


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("pids", "PID", "of a process that uses a GPU now", {"nargs": "+", "type": _pid}),
        ("--tree", None, "and everything that it started and will start"),
        ("--note", "TEXT", "what the claim is for; everybody can read it in `gpuguard who`"),
        ("--foreground", None, "hold the claim here, until Ctrl-C or the job's end"),
        JSON,
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    _become_owner(args.pids)
    if args.foreground:
        claim, family = _adopt(args)
        woken, _ = wake_pipe(ENDING)
        _print(args, claim, family)
        return _hold(claim, family, woken, detached=False)
    ready, report_ready = os.pipe()
    holder = os.fork()
    if holder:
        os.close(report_ready)
        if os.read(ready, 1):
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1])
        return code if code >= 0 else 128 - code
    os.close(ready)
    claim, family = _adopt(args)
    woken, wake = wake_pipe(ENDING)  # before its pid is printed
    _print(args, claim, family)
    sys.stdout.flush()
    detach({*claim.pass_fds, *family.descriptors, report_ready, woken, wake})
    os.write(report_ready, b"!")
    os.close(report_ready)
    os._exit(_hold(claim, family, woken, detached=True))


def _pid(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**22 + 1:
        raise argparse.ArgumentTypeError(
            _("{text!r} is no process id: `gpuguard who` shows those that use a GPU.").format(text=text)
        )
    return int(text)


def _become_owner(pids: list[int]) -> None:
    """If we are root, become the user of the jobs, so that the claim is theirs and we have no more rights than they."""
    owners = {uid for pid in pids if (uid := uid_of(pid)) is not None}
    if os.geteuid() != 0 or owners <= {0}:
        return
    if len(owners) > 1:
        raise InvalidRequest(_("these processes belong to several users: adopt those of each by themselves."))
    [uid] = owners
    name, group, home = str(uid), uid, "/"
    with suppress(KeyError):
        account = pwd.getpwuid(uid)
        name, group, home = account.pw_name, account.pw_gid, account.pw_dir
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(uid, uid, uid)
    os.environ.pop("XDG_STATE_HOME", None)
    os.environ.update(HOME=home, USER=name, LOGNAME=name)


def _adopt(args: argparse.Namespace) -> tuple[Claim, ProcessFamily]:
    with closing(backend_of(args)) as backend:
        claim, family = adopt(backend, directory_of(args, make=True), args.pids, tree=args.tree, note=args.note)
    pids = ", ".join(map(str, family.members))[:MOST_CHARACTERS]
    log_claim("claim", "adopted", claim, sentence("claim.adopted", "adopted: pid {pids}", pids=pids))
    return claim, family


def _print(args: argparse.Namespace, claim: Claim, family: ProcessFamily) -> None:
    indices = [device.index for device in claim]
    if args.json:
        answer = {
            "schema": 1,
            "claim": claim.id,
            "devices": [device.uuid for device in claim],
            "indices": indices,
            "processes": sorted(family.members),
            "tree": args.tree,
            "holder_pid": os.getpid(),
        }
        put([json_text(answer)], sys.stdout)
        return
    many = (
        _("{members} processes").format(members=len(family.members))
        if len(family.members) > 1
        else _("process {pid}").format(pid=next(iter(family.members)))
    )
    where = "here" if args.foreground else _("by process {pid}").format(pid=os.getpid())
    lines = [
        _("GPU {devices} · claim {id} · for {many} · held {where}").format(
            devices=",".join(map(str, indices)), id=claim.id, many=many, where=where
        )
    ]
    put([*lines, *([claim.warning] if claim.warning else [])], sys.stdout)


def _hold(claim: Claim, family: ProcessFamily, woken: int, *, detached: bool) -> int:
    """Keep the claim until the last of the family has ended, or this process is asked to end."""
    while family.wait(woken):
        try:
            number = os.read(woken, 1)[0]
        except BlockingIOError:
            continue
        _release(claim, "given back")
        return 0 if detached else 128 + number
    _release(claim, "job ended")
    return 0


def _release(claim: Claim, outcome: EndOfClaim) -> None:
    try:
        claim.reassert()
    except ClaimLost:
        outcome = "was not held any more"  # it was released from outside
    claim.release()
    log_claim("release", outcome, claim)
