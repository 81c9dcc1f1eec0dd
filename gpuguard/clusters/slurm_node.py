"""On a node of a Slurm cluster: the users to whom Slurm has given each device, for the guard.

`scontrol` is asked, because only the controller knows everything: an allocation without a step (salloc) leaves no trace
on the node, and a process's environment belongs to its owner.  Uncertainty counts in favour of users: a job whose
devices are unknown may have any of them, a user who started a process after the list was made may have got a device
since, and where Slurm's numbers may differ from the driver's, nothing is said at all.  Text that users can write into
the list (names of jobs) can only name more users.  Asks in a thread of its own.  Does not judge: see
OutsideSchedulerRule.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpuguard.device_state import vendor_of
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, Snapshot
from gpuguard.procfs import boot_clock
from gpuguard.sanitize import neutralise

# A node has one of these files; it has the last one if the nodes of its cluster fetch their configuration.
TRACES = (
    "/run/slurmd.pid", "/run/slurm/slurmd.pid", "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf", "/var/spool/slurmd/conf-cache/slurm.conf",
)  # fmt: skip
SLURM_SECONDS = 20.0  # for an answer of the controller
ASK_SECONDS = 30.0  # between two queries; the controller answers with all jobs of the cluster
REST = 50.0  # and at least so many times as long as the last answer took, so that a large cluster is asked less often
TIMEOUT_SECONDS = 15.0  # for an answer with all jobs
STALE_SECONDS = 180.0  # after which an answer does not count any more
TICKS_SECONDS = 2.0  # a process that started so shortly before the query may belong to a job that the answer lacks

OVER = frozenset({
    "PENDING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
    "OUT_OF_MEMORY", "REVOKED", "SPECIAL_EXIT", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
})  # fmt: skip
_OUT_OF_SERVICE = ("DOWN", "DRAIN", "FAIL", "MAINT", "RESERVED", "UNKNOWN", "FUTURE", "POWER")
_DETAIL = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_UID = re.compile(r"(?:^|\s)UserId=\S*\((\d{1,10})\)", re.ASCII)
# Numbers have at most three digits, or the name of a job could make the guard count until its memory is gone.
_INDEX = re.compile(r"\(IDX:((?:(?:\d{1,3}(?:-\d{1,3})?)?(?:,|(?=\))))*)\)", re.ASCII)
_GRES = re.compile(r"(?:^|,)(gpu|mps|shard)\b([^,()]*)(\([^)]*\))?")


@dataclass(frozen=True)
class NodeJob:
    """A job that has resources of this node."""

    uids: frozenset[int]  # of its owner; more than one if the job's name was made to look like further owners
    gpus: frozenset[int] | None  # Slurm's numbers of the GPUs that it has on this node, or None if they are unknown


@dataclass(frozen=True)
class SlurmNodeState:
    """What Slurm says about this node."""

    name: str
    gpus: int  # how many it gives away, or 0 if they are of several types, which it numbers in an order of its own
    in_service: bool  # whether no user may use a device that no job has; on a drained node an admin may, by hand


Answer = tuple[float, SlurmNodeState, tuple[NodeJob, ...]]  # the first is the time of the query on the boot clock


def node_of(text: str, host: str) -> SlurmNodeState | None:
    """The node in the output of `scontrol show node -o NAME`, or None if *host* (our name's first part) is another."""
    facts: dict[str, str] = dict(re.findall(r"(?:^|\s)(NodeName|NodeHostName|Gres|State)=(\S+)", text))
    if "NodeName" not in facts or facts.get("NodeHostName", facts["NodeName"]).partition(".")[0] != host:
        return None
    resources = re.findall(r"[^,(]+(?:\([^)]*\))?", facts.get("Gres", ""))
    gpus = [re.fullmatch(r"gpu(?::[^:()]+)*?:(\d{1,6})(?:\(.*\))?", resource) for resource in resources]
    state = facts.get("State", "UNKNOWN")
    counts = [int(match[1]) for match in gpus if match]
    return SlurmNodeState(
        facts["NodeName"],
        counts[0] if len(counts) == 1 else 0,
        not any(word in state for word in _OUT_OF_SERVICE) and not state.endswith("*"),
    )


def jobs_on(text: str, node: str) -> tuple[NodeJob, ...]:
    """The living jobs on *node* in the output of `scontrol show job -d -o`, which has one job per line."""
    jobs = []
    for line in text.splitlines():
        states = re.findall(r"(?:^|\s)JobState=(\w+)", line)
        listed = any(is_in(node, names) for names in re.findall(r"(?:^|\s)NodeList=(\S+)", line))
        details = [gres for names, gres in _DETAIL.findall(line) if is_in(node, names)]
        if (not details and not listed) or (states and OVER.issuperset(states)):
            continue
        given_here = [numbers for gres in details for numbers in _gpus_in(gres)]
        known = bool(details) and None not in given_here
        gpus = frozenset(number for numbers in given_here for number in numbers or ()) if known else None
        jobs.append(NodeJob(frozenset(map(int, _UID.findall(line))), gpus))
    return tuple(jobs)


def given(
    jobs: Sequence[NodeJob], node: SlurmNodeState, devices: Sequence[Device], newcomers: frozenset[int] = frozenset()
) -> Mapping[str, frozenset[int]]:
    """uuid -> uids to which Slurm has given the device, for devices of which that is certain.

    *jobs* are all living jobs of the node; *newcomers* are uids that may have got any device since those were listed.
    """
    if misnumbered(node, devices):
        return {}
    gpus = sorted(devices, key=lambda device: device.index)
    anywhere = newcomers.union(*(job.uids for job in jobs if job.gpus is None))
    mapping = {}
    for number, device in enumerate(gpus):
        users: frozenset[int] = frozenset().union(*(job.uids for job in jobs if number in (job.gpus or ())))
        if users or node.in_service:
            mapping[device.uuid] = users | anywhere
    return mapping


def misnumbered(node: SlurmNodeState, devices: Sequence[Device]) -> str | None:
    """Why Slurm's numbers may mean other devices than the driver's, or None if they mean the same."""
    ordered = sorted(devices, key=lambda device: device.index)
    minors = [device.minor_number for device in ordered if device.minor_number is not None]
    if any(device.parent_uuid for device in devices):
        return "GPUs are divided, and which part of one Slurm means by a number is not known"
    if len(devices) != node.gpus:
        return f"Slurm gives away {node.gpus or 'no'} GPUs of one type here, and the driver shows {len(devices)}"
    if minors != sorted(minors):
        return f"the driver numbers the GPUs in another order than {vendor_of(ordered[0]).device_node}*"
    return None


def is_in(node: str, hostlist: str) -> bool:
    """Whether a list like "n1,n[08-09]" names *node*; this one names n09.  A name with two brackets names no node.

    The list is not expanded: users can write text that looks like such a list, and a short one names millions.
    """
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?[^,\[\]]*", hostlist):
        start, bracket, rest = part.partition("[")
        inner, _, end = rest.partition("]")
        if part == node:
            return True
        number = node[len(start) : len(node) - len(end)]
        if not bracket or f"{start}{number}{end}" != node or not number.isdecimal():
            continue
        for numbers in inner.split(","):
            first, _, last = numbers.partition("-")
            if first.isdecimal() and (last or first).isdecimal() and len(numbers) < 40:
                among = int(first) <= int(number) <= int(last or first)
                if among and number == f"{int(number):0{len(first)}}":
                    return True
    return False


def _gpus_in(gres: str) -> Iterator[frozenset[int] | None]:
    """The numbers of each GPU resource in "gpu:tesla:2(IDX:0-1),shard:1(1/8,0/8)", or None if it names none."""
    for _, count, place in _GRES.findall(gres):
        if index := _INDEX.fullmatch(place):
            spans = [span.partition("-") for span in index[1].split(",") if span]
            yield frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))
        elif not count.endswith(":0"):
            yield None


def is_here(root: str = "/") -> bool:
    """Whether this machine is, or may be, a node of a Slurm cluster."""
    return any(os.path.exists(os.path.join(root, trace.lstrip("/"))) for trace in TRACES)


@dataclass(frozen=True)
class SlurmReply:
    """The reply of a Slurm command."""

    status: int
    output: str
    fault: str

    @property
    def reason(self) -> str:
        """Why it failed: the first line of its error messages, made harmless."""
        first = neutralise(self.fault.partition("\n")[0])
        return first or sentence("slurm.ends_with", "it ends with {status}", status=self.status)


def run_slurm(*words: str, seconds: float = SLURM_SECONDS) -> SlurmReply | None:
    """Run a Slurm command and return its reply, or None if it cannot be started or hangs."""
    program = shutil.which(words[0]) or shutil.which(words[0], path="/usr/bin:/usr/local/bin:/opt/slurm/bin")
    if program is None:
        return None
    environment = {name: os.environ[name] for name in ("PATH", "SLURM_CONF") if name in os.environ}
    try:
        done = subprocess.run(
            [program, *words[1:]],
            env={"PATH": os.defpath, **environment, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    output, fault = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return SlurmReply(done.returncode, output, fault.strip())


def scontrol(*words: str) -> str | None:
    """Run `scontrol` and return its output, or None if it fails."""
    reply = run_slurm("scontrol", *words, seconds=TIMEOUT_SECONDS)
    return reply.output if reply and reply.status == 0 else None


class SlurmNode:
    """What Slurm said about this node some seconds ago.

    Args:
        ask: runs `scontrol` with these words and returns its output.
        is_root: whether Slurm shows us the jobs of all users in any case; others see them without PrivateData=jobs.
        every: seconds between two queries.
        say: is called with the reason when nothing is known of this node, once for each reason in a row.
    """

    def __init__(
        self,
        ask: Callable[..., str | None] = scontrol,
        host: str | None = None,
        *,
        is_root: bool | None = None,
        every: float = ASK_SECONDS,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._ask, self._every, self._say = ask, every, say
        self._host = host or socket.gethostname().partition(".")[0]
        self._is_root = os.geteuid() == 0 if is_root is None else is_root
        self._hidden = False  # whether Slurm hides the jobs of others from us
        self._answer: Answer | None = None
        self._failed = False  # whether the last query was not answered
        self._next = 0.0
        self._told: str | None = None
        self._thread: threading.Thread | None = None

    def given(self, snapshot: Snapshot) -> Mapping[str, frozenset[int]] | None:
        """Apply given() to the last answer, or return None if there is no Slurm; asks again when it is time."""
        here, now = is_here(), time.monotonic()
        if here and now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + self._every
            self._thread = threading.Thread(target=self.refresh, name="gpuguard-slurm", daemon=True)
            with suppress(RuntimeError):  # there are too many threads; a later call tries again
                self._thread.start()
        answer = self._answer
        if answer and not 0 <= snapshot.clock - answer[0] <= STALE_SECONDS:
            answer = None
        self._report(here, answer, snapshot)
        if answer is None or not here:
            return {} if here else None
        asked, node, jobs = answer
        newcomers = {
            process.uid
            for device in snapshot.devices
            for process in device.processes or ()
            if process.uid is not None and (process.start_time or asked) >= asked - TICKS_SECONDS
        }
        return given(jobs, node, snapshot.devices, frozenset(newcomers))

    def _report(self, here: bool, answer: Answer | None, snapshot: Snapshot) -> None:
        """Report why the rule `outside_scheduler` fires nowhere."""
        why = misnumbered(answer[1], snapshot.devices) if answer else None
        if not here:
            why = "this is no node of a Slurm cluster: it has neither a slurmd nor a slurm.conf"
        elif self._hidden:
            why = "slurm.conf has PrivateData=jobs, which shows the jobs of others to a daemon of root alone"
        elif answer is None and self._failed:
            why = f"`scontrol show node -o {self._host}` or `scontrol show job -a -d -o` fails"
        if why and why != self._told:
            self._say(f"outside_scheduler does not fire: {why}")
        self._told = why

    def refresh(self) -> None:
        """Ask now, and wait for the answer."""
        if not is_here():
            return
        asked, began = boot_clock(), time.monotonic()
        found = self._ask("show", "node", "-o", self._host)
        node = node_of(found, self._host) if found else None
        shown = self._shows_all() if node else None
        listed = self._ask("show", "job", "-a", "-d", "-o") if shown else None
        self._hidden = shown is False
        took = time.monotonic() - began
        self._next = began + max(self._every, REST * took)
        # Without an answer nothing changes: the last one counts until it is stale.
        self._failed = node is None or listed is None
        if node is not None and listed is not None:
            self._answer = asked, node, jobs_on(listed, node.name)

    def _shows_all(self) -> bool | None:
        """Whether Slurm shows us the jobs of all users (PrivateData), or None if it does not say."""
        if self._is_root:
            return True
        found = re.search(r"^PrivateData\s*=\s*(.*)$", self._ask("show", "config") or "", re.MULTILINE)
        return "jobs" not in found[1].split(",") if found else None
