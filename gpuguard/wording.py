"""The words of messages, one Words per language; a new language is one more row of WORDS.

``{braces}`` are filled by messages.py with our own text, ``$names`` of subject and body with what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENGLISH = "en"


@dataclass(frozen=True)
class Words:
    """Everything that is said in one language."""

    subject: str
    body: str
    actions: Mapping[str, str]  # of ACTIONS, as they fit into "next"
    next: str
    after: str
    at_once: str
    nothing_next: str
    observing: str
    stop: Mapping[str, str]  # by rule
    stop_otherwise: str
    more: str  # heads the lines of further findings
    left_out: str
    times: str  # before the subject of a joined message


WORDS: Mapping[str, Words] = {
    "en": Words(
        subject="[gpuguard] $host: $policy: $device $user",
        body="""\
gpuguard on $host, $time

What was seen:  $why
For how long:   $since
Device:         $device
User:           $user
Processes:      $processes
Policy:         $policy (rule: $rule)
What is next:   $next
How to stop it: $stop
""",
        actions={
            "log": "it is written to the log",
            "warn": "a warning on the user's terminal",
            "notify": "a message",
            "checkpoint": "the process is asked to save its state",
            "terminate": "the process is asked to end (SIGTERM)",
            "kill": "the process is killed (SIGKILL)",
            "pause": "the process is paused (SIGSTOP)",
            "resume": "the process is continued (SIGCONT)",
            "renice": "the process gets a lower priority",
            "deny": "the user gets no new claims for a time",
            "quarantine": "the device is taken out of service",
            "release": "the claim is released",
            "cancel": "the Slurm job is cancelled (scancel)",
            "run_hook": "a program of the administrator is run",
        },
        next="{when}, if nothing changes: {action}.",
        after="In {duration}",
        at_once="At once",
        nothing_next="Nothing: this was the last step.",
        observing="(This policy only observes: nothing of it is carried out.)",
        stop={
            "idle": "Use the device again, or free it: end the process.  `gpuguard keep --for 4h` buys time.",
            "utilization": "Use the device again, or free it: end the process.  `gpuguard keep --for 4h` buys time.",
            "memory": "Use less memory, or end the process.",
            "memory_growth": "Look for what keeps growing, or end the process.",
            "unclaimed": "Claim the device as it runs: `gpuguard adopt PID`.  Next time start it with `gpuguard run`.",
            "trespass": "End the process: the device is claimed by somebody else.  `gpuguard select` names a free one.",
            "temperature": "Let the device cool down: end or reduce what runs on it.",
            "power": "Reduce what runs on the device.",
            "health": "Save your work and leave the device: an administrator has to look at it.",
        },
        stop_otherwise="End the process and so free the device.",
        more="{count} findings in all; after the one above:",
        left_out="and {count} more",
        times="({count}x)",
    ),
    "zh": Words(
        subject="[gpuguard] $host：$policy：$device $user",
        body="""\
gpuguard，主机 $host，$time

发现情况： $why
已持续：   $since
设备：     $device
用户：     $user
进程：     $processes
策略：     $policy（规则：$rule）
后续操作： $next
如何避免： $stop
""",
        actions={
            "log": "写入日志",
            "warn": "在用户终端上发出警告",
            "notify": "发送通知",
            "checkpoint": "通知进程保存检查点",
            "terminate": "请求进程退出（SIGTERM）",
            "kill": "强制结束进程（SIGKILL）",
            "pause": "暂停进程（SIGSTOP）",
            "resume": "恢复进程（SIGCONT）",
            "renice": "降低进程优先级",
            "deny": "一段时间内不再接受该用户的新占用",
            "quarantine": "将设备停用隔离",
            "release": "释放该占用",
            "cancel": "取消 Slurm 作业（scancel）",
            "run_hook": "运行管理员设定的程序",
        },
        next="如果情况没有变化，{when}将执行：{action}。",
        after="{duration} 后",
        at_once="随即",
        nothing_next="无，这是最后一步。",
        observing="（该策略仅作观察，不会真正执行。）",
        stop={
            "idle": "请重新使用该设备，或结束进程以释放设备；如需保留，请运行 `gpuguard keep --for 4h`。",
            "utilization": "请重新使用该设备，或结束进程以释放设备；如需保留，请运行 `gpuguard keep --for 4h`。",
            "memory": "请减少显存用量，或结束进程。",
            "memory_growth": "请检查显存持续增长的原因，或结束进程。",
            "unclaimed": "请运行 `gpuguard adopt PID` 占用该设备，无需结束进程；下次请用 `gpuguard run` 启动。",
            "trespass": "请结束进程：该设备已被其他用户占用。`gpuguard select` 可列出空闲设备。",
            "temperature": "请让设备降温：结束或减少其上的任务。",
            "power": "请减少该设备上的任务。",
            "health": "请保存工作并离开该设备：需要管理员检查。",
        },
        stop_otherwise="请结束进程以释放设备。",
        more="共 {count} 条；除上面一条外：",
        left_out="另有 {count} 条",
        times="（{count} 条）",
    ),
}
