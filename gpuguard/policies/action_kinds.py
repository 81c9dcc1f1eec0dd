"""The kinds of actions: what each takes away, and its name in messages.  The actions are in enforcement.actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from gpuguard.locale import N_

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuguard.model import ActionName


class Takes(IntEnum):
    """What an action takes away.  A check that holds for one value also holds for every higher one."""

    NOTHING = 0
    DEVICE = 1  # from everybody.  From here on the breaker counts actions, because too many at once are a mistake
    NEW_CLAIMS = 2  # of a user.  From here on an action does harm, and may hit an innocent user
    CLAIM = 3  # From here on there is one action per device at a time, until its effect is seen
    TIME = 4  # From here on a person in front of the process is given time, and few are hit in an hour
    PROCESS = 5  # which is gone afterwards


@dataclass(frozen=True)
class ActionKind:
    """The properties of an action.  No other place lists actions by their properties."""

    words: Mapping[str, str]  # language -> a phrase for it, which fits after "what is next"
    takes: Takes = Takes.NOTHING
    deed: str = ""  # what was done, as the owner of the process or claim reads it; "" if it does not concern them
    on_processes: bool = False  # it needs a process: without one it would only delay a step that has its target
    is_message: bool = False
    private: bool = False  # its text and recipients are the administrator's: the owner does not hear of it


ACTION_KINDS: Mapping[ActionName, ActionKind] = {
    "log": ActionKind({"en": "it is written to the log", "zh": "写入日志"}),
    "warn": ActionKind({"en": "a warning on the user's terminal", "zh": "在用户终端上发出警告"}, is_message=True),
    "notify": ActionKind({"en": "a message", "zh": "发送通知"}, is_message=True, private=True),
    "checkpoint": ActionKind(
        {"en": "the process is asked to save its state", "zh": "通知进程保存检查点"},
        deed=N_("policy {policy} asked pid {pid} to save its state: {why}"),
        on_processes=True,
    ),
    "terminate": ActionKind(
        {
            "en": "the process, or its whole claimed job, is asked to end (SIGTERM)",
            "zh": "请求进程（或其占用下的整个任务）退出（SIGTERM）",
        },
        Takes.PROCESS,
        N_("policy {policy} asked pid {pid} to end (SIGTERM): {why}"),
        on_processes=True,
    ),
    "kill": ActionKind(
        {
            "en": "the process, or its whole claimed job, is killed (SIGKILL)",
            "zh": "强制结束进程（或其占用下的整个任务）（SIGKILL）",
        },
        Takes.PROCESS,
        N_("policy {policy} killed pid {pid} (SIGKILL): {why}"),
        on_processes=True,
    ),
    "pause": ActionKind(
        {"en": "the process is paused (SIGSTOP)", "zh": "暂停进程（SIGSTOP）"},
        Takes.TIME,
        N_("policy {policy} stopped pid {pid} (SIGSTOP): {why}"),
        on_processes=True,
    ),
    "resume": ActionKind(
        {"en": "the process is continued (SIGCONT)", "zh": "恢复进程（SIGCONT）"},
        deed=N_("policy {policy} let pid {pid} go on (SIGCONT): {why}"),
        on_processes=True,
    ),
    "renice": ActionKind(
        {"en": "the process gets a lower priority", "zh": "降低进程优先级"},
        deed=N_("policy {policy} gave pid {pid} a lower priority: {why}"),
        on_processes=True,
    ),
    "deny": ActionKind(
        {"en": "the user gets no new claims for a time", "zh": "一段时间内不再接受该用户的新占用"},
        Takes.NEW_CLAIMS,
        N_("policy {policy} denied new claims: {why}"),
    ),
    "quarantine": ActionKind({"en": "the GPU is taken out of service", "zh": "将设备停用隔离"}, Takes.DEVICE),
    "release": ActionKind(
        {"en": "the claim is released", "zh": "释放该占用"},
        Takes.CLAIM,
        N_("policy {policy} released the claim {claim}: {why}"),
    ),
    "cancel": ActionKind(
        {"en": "the Slurm job is cancelled (scancel)", "zh": "取消 Slurm 作业（scancel）"},
        Takes.PROCESS,
        N_("policy {policy} cancelled the Slurm job: {why}"),
    ),
    "requeue": ActionKind(
        {"en": "the job is asked to end, and to stand in the queue again", "zh": "请求任务退出并重新排队"},
        Takes.PROCESS,
        N_("policy {policy} asked pid {pid} to end (SIGTERM), and its job to stand in the queue again: {why}"),
        on_processes=True,
    ),
    # An older name for notify with a hook.
    "run_hook": ActionKind({"en": "a program of the administrator is run", "zh": "运行管理员设定的程序"}, private=True),
}


def _taking(least: Takes) -> frozenset[ActionName]:
    return frozenset(name for name, kind in ACTION_KINDS.items() if kind.takes >= least)


COUNTED, HARMFUL, DESTRUCTIVE = _taking(Takes.DEVICE), _taking(Takes.NEW_CLAIMS), _taking(Takes.CLAIM)
DISRUPTIVE, ENDING_ACTIONS = _taking(Takes.TIME), _taking(Takes.PROCESS)
MESSAGES = frozenset(name for name, kind in ACTION_KINDS.items() if kind.is_message)
ON_PROCESSES = frozenset(name for name, kind in ACTION_KINDS.items() if kind.on_processes)
WHOLE = ENDING_ACTIONS & ON_PROCESSES  # a claimed job ends whole
PRIVATE = frozenset(name for name, kind in ACTION_KINDS.items() if kind.private)
