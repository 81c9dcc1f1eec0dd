"""A node of AMD under all rules, actions and commands: what is right there, or the reason why it does not apply."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from amd_trees import JUNCTION, MI300X, NAVI31, PHOENIX, AmdTree, put
from builders import GIB
from guard_scene import AMD_HERE, KFD, Scene, on_a_gpu_of
from ladders import a_policy
from nodes import Gpuguard
from worlds import BOBS, a_bad_day, a_job, shown

from gpuguard import users
from gpuguard.backends import amd, client, open_backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import DENIED, QUARANTINED, read_restrictions
from gpuguard.cli import COMMANDS
from gpuguard.device_state import usable_devices
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.enforcement.guard_limits import PastAction
from gpuguard.model import ALL_FIELDS, Finding, Snapshot
from gpuguard.policies.policy import unjudged
from gpuguard.policies.rule import Rule
from gpuguard.policies.rules import RULES
from gpuguard.policies.thresholds import HealthRule
from gpuguard.policies.view import RuleView
from gpuguard.procfs import boot_clock
from gpuguard.ray import guarded

OF_80 = replace(MI300X, vram=80 * GIB, used=GIB, xcps=1)
BROKEN = replace(OF_80, load=99, memory_load=90, temperatures={JUNCTION: (96, 100, 105)})
DIVIDED = replace(OF_80, mode="DPX", partitions=2)
# The processes of the bad day, by their pids there: the GPU, and the GiB.
JOBS = {100: (0, 26), 101: (0, 26), 102: (0, 26), 110: (1, 35), 130: (3, 35), 140: (4, 35), 150: (5, 35), 160: (6, 35)}
EVERY_RULE = [pytest.param(rule, id=name) for name in RULES for rule in shown(name, RULES[name])]
# What AMD tells only for a whole GPU, by the rule that needs it of a partition.
ONLY_OF_THE_WHOLE = dict.fromkeys(("utilization", "idle", "expression"), "utilization")


@cache
def the_bad_day(*, divided: bool = False) -> RuleView:
    """The machine on which all rules are tried, as a node of AMD: a broken GPU, and six others, *divided* or not.

    What the kernel shows is read by the backend; whose the processes are is as on the machine of NVIDIA's.
    """
    with TemporaryDirectory() as place, ExitStack() as stack:
        tree, labels = AmdTree(Path(place), BROKEN, *(6 * [DIVIDED if divided else OF_80])), {}
        put(tree.hwmon(0) / "power1_input", "295000000")
        put(tree.devices[0] / "ras/umc_err_count", "ue: 7\nce: 1000000")
        put(tree.devices[0] / "ras/gpu_vram_bad_pages", "0x00000063 : 0x00001000 : P")
        for label, (index, memory) in JOBS.items():
            job = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(job.kill)
            labels[job.pid] = label
            tree.computes(index, job.pid, memory * GIB)
        snapshot = amd.open(str(tree.root)).sample(ALL_FIELDS)
    own = {uuid: tuple(_named(row, labels[row.pid]) for row in rows or ()) for uuid, rows in _lists(snapshot)}
    devices = tuple(replace(device, processes=own[device.uuid]) for device in snapshot.devices)
    used = [device for device in usable_devices(snapshot) if device.gpu_instance_id in (None, 0)]
    first = tuple(devices[snapshot.devices.index(device)] for device in used)
    day = a_bad_day(devices=first + tuple(device for device in devices if device not in first))
    return replace(day, snapshot=replace(day.snapshot, gaps=snapshot.gaps))


def _lists(snapshot: Snapshot):
    return [(device.uuid, device.processes) for device in snapshot.devices]


def _named(row, label: int):
    told = {"memory_used": row.memory_used, "utilization": row.utilization, "kind": row.kind}
    return replace(a_job(label, **(BOBS if label == 160 else {})), **told)


def meant(findings: Iterable[Finding], view: RuleView) -> list[tuple]:
    """Whom *findings* mean: by the index of the GPU, of which a partition is a part."""
    indices = {device.uuid: device.index for device in view.snapshot.devices}
    return sorted(
        (each.subject.kind, indices.get(each.subject.device), each.subject.uid, each.subject.pid, each.subject.claim,
         *(process.pid for process in each.processes))
        for each in findings
    )  # fmt: skip


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_rule_finds_on_gpus_of_amd_whom_it_finds_on_those_of_nvidia(rule: Rule) -> None:
    nvidia, day = a_bad_day(), the_bad_day()
    # NVIDIA's day has what is rarely read as low and as high as can be on two GPUs, which AMD's has not.
    rare = {device.uuid for device in nvidia.snapshot.devices if device.ecc_mode is not None}
    expected = [each for each in rule.check(nvidia) if each.subject.kind != "device" or each.subject.device not in rare]

    assert meant(rule.check(day), day) == meant(expected, nvidia) != []
    assert list(unjudged(a_policy(rules=(rule,)), day.snapshot)) == []


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_rule_finds_on_a_partition_whom_it_finds_on_the_whole_or_says_that_it_cannot(rule: Rule) -> None:
    whole, day = the_bad_day(), the_bad_day(divided=True)
    field, broken = ONLY_OF_THE_WHOLE.get(rule.kind.name), whole.snapshot.devices[0].uuid
    expected = [each for each in rule.check(whole) if field is None or each.subject.device == broken]

    assert meant(rule.check(day), day) == meant(expected, whole)
    assert list(unjudged(a_policy(rules=(rule,)), day.snapshot)) == [
        f"p: {rule.kind.name} cannot judge {partitions()} by {field}: told only for the whole GPU"
    ] * bool(field)


def partitions() -> str:
    return ", ".join(f"partition {index}.{number} (dpx)" for index in range(1, 7) for number in (0, 1))


@pytest.mark.parametrize(
    ("keys", "field"),
    [({"throttle_reasons": ("*",)}, "throttle_reasons"), ({"remapped_rows_above": 0}, "remapped_rows")],
)
def test_a_rule_about_what_amd_never_tells_says_so(keys, field: str) -> None:
    day, rule = the_bad_day(), HealthRule(**keys)
    gpus = ", ".join(f"GPU {index}" for index in range(7))

    assert list(rule.check(day)) == []
    assert list(unjudged(a_policy(rules=(rule,)), day.snapshot)) == [
        f"p: health cannot judge {gpus} by {field}: this kernel or GPU does not tell it"
    ]


class Messenger:
    """In place of what sends messages: it takes each."""

    def notify(self, name: str, verdict: object, snapshot: object) -> str:
        return "queued"


@contextmanager
def on_a_node_of_amd(patch: pytest.MonkeyPatch, place: Path, opened: str, **context) -> Iterator[Scene]:
    """An offender whom KFD lists on the first of two GPUs, with the node *opened* open, and a guard that enforces."""
    with on_a_gpu_of(AMD_HERE, patch, place / "dri", 128, opened) as scene:
        patch.setitem(users._names, scene.process.uid or 0, "alice")  # whose process it is, /proc says
        tree = AmdTree(place / "machine", OF_80, OF_80)
        tree.computes(0, scene.pid, 10 * GIB)
        backend = amd.open(str(tree.root))
        patch.setattr(backend, "simulated", False)
        scene.context(backend=backend, notifier=Messenger(), **context)
        scene.snapshot = backend.sample(ALL_FIELDS)
        (scene.process,) = scene.snapshot.devices[0].processes or ()
        scene.subject = replace(scene.subject, device=tree.uuid(0))
        process = scene.pid, scene.start_time
        scene.context().limits.record(PastAction(boot_clock() - 31, "terminate", process, (tree.uuid(0),), live=True))
        yield scene  # which has been asked to end, or no process may be killed


# What becomes of each action on an offender, on GPUs of every vendor.
OUTCOMES = {
    **dict.fromkeys(("log", "notify", "run_hook", "deny", "quarantine"), "done"),
    **dict.fromkeys(("terminate", "kill", "pause", "resume", "renice"), "sent"),
    "checkpoint": "refused",  # it has no way to answer the signal
    "requeue": "refused",  # it is no job of `submit`
    "warn": "undelivered",  # it has no terminal
    "release": "refused",  # it computes: see test_action_release for a claim without a process
    "cancel": "refused",  # it is no job of Slurm
}
OPTIONS = {"notify": (("to", "mail"),), "run_hook": (("hook", "page"),)}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_on_a_gpu_of_amd_does_what_it_does_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: LockDirectory, action: str
) -> None:
    with on_a_node_of_amd(monkeypatch, tmp_path, KFD, directory=directory) as scene:
        assert scene.act(action, options=OPTIONS.get(action, ())).word == OUTCOMES[action]
        assert scene.dies() if action in ("terminate", "kill") else scene.lives()
        restricted = {kind: list(read_restrictions(directory, kind, 0.0)) for kind in (DENIED, QUARANTINED)}
        assert restricted == {
            DENIED: [str(scene.process.uid)] * (action == "deny"),
            QUARANTINED: [scene.subject.device] * (action == "quarantine"),
        }


@pytest.mark.parametrize("action", [name for name, action in ACTIONS.items() if action.on_process])
def test_no_action_means_a_process_with_a_pid_that_kfd_remembers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, action: str
) -> None:
    with on_a_node_of_amd(monkeypatch, tmp_path, "/dev/null") as scene:
        assert (scene.act(action, options=OPTIONS.get(action, ())).word, scene.lives()) == ("refused", True)
        assert scene.against() == {"driver"}


class InThisProcess:
    """In place of a worker: the backend itself."""

    def __init__(self, name: str, *_, **__) -> None:
        self.name, self._backend = name, open_backend(name)
        self.simulated, self.sample, self.close = self._backend.simulated, self._backend.sample, self._backend.close

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_) -> None:
        self.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AmdTree]:
    """Three GPUs: the first one is used, the second one is divided, the third one is free."""
    tree = AmdTree(tmp_path_factory.mktemp("node"), OF_80, DIVIDED, OF_80)
    with subprocess.Popen(["sleep", "600"]) as job:
        tree.computes(0, job.pid, 10 * GIB)
        yield tree
        job.kill()


WHO = r"""
0    Instinct MI300X OAM +11\.0GiB/80\.0GiB +0%   45C    90W  used without a claim
     pid .* sleep 600
1    Instinct MI300X OAM +1\.0GiB/80\.0GiB +0%   45C    90W  divided
1\.0  Instinct MI300X OAM dpx +0B/40\.0GiB +n/a   45C    n/a  free
1\.1  Instinct MI300X OAM dpx +0B/40\.0GiB +n/a   45C    n/a  free
2    Instinct MI300X OAM +1\.0GiB/80\.0GiB +0%   45C    90W  free
(.*\n)+  GPU 1\.0, 1\.1: power_draw, utilization: told only for the whole GPU"""
TOP = r"""
 GPU MODEL .*
   0 Instinct MI300X OAM .* 11\.0/80GiB .* 90/300W +1132MHz 5x16 used without a claim
   1 Instinct MI300X OAM .* 5x16 divided
 1\.0 dpx .* 0\.0/40GiB .* free(.*\n)+    0 .* n/a .* C    sleep 600"""
EXPLAIN = r"""
GPU 0 +REFUSED +11\.0GiB used by .*
GPU 1 +REFUSED +divided into 2 partitions: jobs run on those
partition 1\.0 \(dpx\) +ELIGIBLE .*
partition 1\.1 \(dpx\) +ELIGIBLE .*
GPU 2 +CHOSEN +choice 1, 79\.0GiB free"""
POLICY = """
version: 1
policies: [{name: hogs, when: {memory: {above: 5GiB, per: device}}, for: 500ms, steps: [warn]}]
"""
NO_STORE = r"there is no usage store at .*: `gpuguard daemon` makes it"
# What a command says on this node.  The indices of ROCm count partitions, so that its index of GPU 2 is 3.
ANSWERS = {
    "who": WHO,
    "who --json": r'"label": "1\.1",\n +"uuid": "XCP-e3aa140f9a5f9e32-1",(.*\n)+ +"vendor": "amd"',
    "top --once": TOP,
    "explain": EXPLAIN,
    "explain -n 4": r"GPU 2 +eligible|4 GPUs",
    "select": "^3$",
    "select -n 2 --mig dpx": "^1,2$",
    "select -O uuid": "^GPU-e3aa140f9a5f9e33$",
    "wait": "^2$",
    "queue": "no requests in the queue",
    "reserve -n 1 --for 1h": "reserved: 1 GPU for ",
    "quarantine 2": r"GPU 2 \(Instinct MI300X OAM, GPU-e3aa140f9a5f9e33\)",
    "quarantine XCP-e3aa140f9a5f9e32-1": r"XCP-e3aa140f9a5f9e32-1",
    "deny": "nothing is denied",
    "metrics": r'gpuguard_device_memory_used_bytes\{.*uuid="XCP-e3aa140f9a5f9e32-1"\} 0\n',
    "query --query-gpu index,name,uuid,memory.total,utilization.gpu --format csv": (
        r"1, AMD Instinct MI300X OAM, GPU-e3aa140f9a5f9e32, 81920 MiB, 0 %"
    ),
    "record {file} --for 1ms": "1 sample over",
    "doctor": "3 healthy, and 2 partitions",
    "setup --print": r"^f .*/lock/XCP-e3aa140f9a5f9e32-1 0444 root root",
    "slurm setup --print": "Prolog=",
    "daemon --once --policy {policy} --interval 500ms": (
        r"warn  dry run  GPU-e3aa140f  uses 11\.0GiB of GPU 0, 5GiB is allowed"
    ),
    "events": "no such events in ",
    "report": NO_STORE,
    "history": NO_STORE,
    "release": "there is no claim|no claim is yours",  # root, and others
    "resume": "only root may do that",
    "keep --for 1h": "no daemon answers in ",
    "cancel x1": "no request and no claim has an id that begins with 'x1', and it is no job: ",
    "jobs": "no jobs",
    "serve-ssh": "this key is for who, queue, select, explain, report",
}
# These ask no GPU what it is.
OF_NO_GPU = {"completion", "schema", "policy", "sim"}
# These start processes that live on, so they are not run in the process of a test: the first three take the options and
# the claims of `run`, and the page of the browser has the numbers of `top`.
OF_THEIR_OWN = {"run", "submit", "adopt", "web"}


@pytest.mark.parametrize("words", ANSWERS)
def test_a_command_says_on_a_node_of_amd_what_is_so(monkeypatch, tmp_path, node, command, words: str) -> None:
    monkeypatch.setattr(client, "WorkerBackend", InThisProcess)
    monkeypatch.setenv("GPUGUARD_BACKEND", f"amd:{node.root}")
    monkeypatch.setenv("GPUGUARD_DIR", str(tmp_path / "claims"))
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # of no jobs
    policy = put(tmp_path / "policy.yaml", POLICY)
    _, output, complaint = command(*words.format(file=tmp_path / "recording", policy=policy).split())

    assert re.search(ANSWERS[words], output + complaint, re.MULTILINE), output + complaint
    assert "MIG" not in output + complaint


def test_each_command_is_tried_here_or_has_a_reason() -> None:
    assert {words.split()[0] for words in ANSWERS} | OF_NO_GPU | OF_THEIR_OWN == COMMANDS.keys()


def test_a_job_sees_the_gpu_that_it_got_and_no_other(tmp_path, node) -> None:
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_BACKEND=f"amd:{node.root}")
    script = 'echo "$ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES ${ZE_AFFINITY_MASK-unset} $GPUGUARD_GPUS"'

    assert gpuguard("run", "--", "sh", "-c", script).stdout == "GPU-e3aa140f9a5f9e33 0 unset GPU-e3aa140f9a5f9e33\n"
    partitions = gpuguard("run", "-n", "2", "--mig", "dpx", "--", "sh", "-c", script).stdout
    assert partitions == "1,2 0,1 unset XCP-e3aa140f9a5f9e32-0,XCP-e3aa140f9a5f9e32-1\n"


def test_a_task_of_ray_gets_the_gpu_that_ray_means_behind_one_that_is_not_shown(monkeypatch, tmp_path) -> None:
    tree = AmdTree(tmp_path / "machine", PHOENIX, NAVI31)  # ROCm counts the one that is part of the CPU first
    context = SimpleNamespace(
        worker=SimpleNamespace(mode="worker"),
        get_accelerator_ids=lambda: {"GPU": ["1"]},
        get_assigned_resources=lambda: {"GPU": 1.0},
    )
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context, WORKER_MODE="worker")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(client, "WorkerBackend", InThisProcess)
    monkeypatch.setenv("GPUGUARD_BACKEND", f"amd:{tree.root}")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")  # by Ray

    @guarded
    def train() -> str:
        return os.environ["GPUGUARD_GPUS"]

    assert train() == tree.uuid(1)
