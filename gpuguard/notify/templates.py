"""The messages about a verdict: what was seen, by which rule, where, what comes next, and how to stop it.

The texts are templates that an admin can change, one pair per language:

    messages:
      en: {subject: "$host: $policy", body: "..."}

``$name`` or ``${name}`` is one of NAMES, ``$$`` is a dollar sign; anything else is a fault when the file is loaded.  A
line of a body is left out if all of its names are empty.  Text of users is inserted as neutral text and never looked at
again, so ``${host}`` in a command line stays as it is.  Pure; does not send: see notify.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.errors import InvalidRequest
from gpuguard.locale import _, catalogue, translated
from gpuguard.locale.messages import Sentence
from gpuguard.model import GpuProcess, Snapshot, Verdict, claim_named
from gpuguard.policies.action_kinds import ACTION_KINDS
from gpuguard.sanitize import display_width, neutral_command, neutralise
from gpuguard.units import format_bytes, format_duration, local_time

ENGLISH = "en"


@dataclass(frozen=True)
class Words:
    """The texts of one language: {braces} are filled with our own text, $names with facts of the verdict."""

    subject: str
    body: str
    actions: Mapping[str, str]  # of ACTIONS, as they fit into "next"
    next: str
    at: str
    after: str
    at_once: str
    nothing_next: str
    observing: str
    stop: str  # if the rule itself gives no advice
    stop_claim: str  # if no process is meant
    keep: str  # follows the advice of rules that suggest `gpuguard keep`
    more: str  # heads the lines of further findings
    left_out: str
    times: str  # before the subject of a joined message


def _actions(language: str) -> Mapping[str, str]:
    return {name: kind.words[language] for name, kind in ACTION_KINDS.items()}


WORDS: Mapping[str, Words] = {
    "en": Words(
        subject="[gpuguard] $host: $policy: $device $user",
        body="""\
gpuguard on $host, $time

What was done:  $done
What was seen:  $why
For how long:   $since
GPU:            $device
User:           $user
Processes:      $processes
Policy:         $policy (rule: $rule)
What is next:   $next
How to stop it: $stop
""",
        actions=_actions("en"),
        next="{when}, if nothing changes: {action}.",
        at="At {time} or later",
        after="In {duration}",
        at_once="At once",
        nothing_next="Nothing: this was the last step.",
        observing="(This policy only observes: nothing of it is carried out.)",
        stop="End the process and so free the GPU.",
        stop_claim="Release what you do not use: `gpuguard release {claim}`.",
        keep="  `gpuguard keep --for {duration}` buys time.",
        more="{count} findings in all; after the one above:",
        left_out="and {count} more",
        times="({count}x)",
    ),
    "zh": Words(
        subject="[gpuguard] $host：$policy：$device $user",
        body="""\
gpuguard，主机 $host，$time

已执行：   $done
发现情况： $why
已持续：   $since
GPU：      $device
用户：     $user
进程：     $processes
策略：     $policy（规则：$rule）
后续操作： $next
如何避免： $stop
""",
        actions=_actions("zh"),
        next="如果情况没有变化，{when}将执行：{action}。",
        at="{time} 或之后",
        after="{duration} 后",
        at_once="随即",
        nothing_next="无，这是最后一步。",
        observing="（该策略仅作观察，不会真正执行。）",
        stop="请结束进程以释放设备。",
        stop_claim="请释放不再使用的占用：`gpuguard release {claim}`。",
        keep="如需保留，请运行 `gpuguard keep --for {duration}`。",
        more="共 {count} 条；除上面一条外：",
        left_out="另有 {count} 条",
        times="（{count} 条）",
    ),
}

Fact = tuple[str, float | int | str | bool | None]

NAMES = frozenset({
    "host", "policy", "rule", "why", "device", "user", "processes", "action", "since", "time", "next", "stop", "done",
})  # fmt: skip
LONGEST_KEEP = 86400.0  # unless the policy file says otherwise
LONGEST_VALUE = 300  # characters of one value, because a command line can have 2 MiB
LONGEST_SUBJECT = 200
MOST_PROCESSES = 5
MOST_LINES = 20  # of further findings in one message

# Text that a chat program turns into a mention or a link: <!channel>, <at user_id="all">, @everyone, [text](address),
# and a bare https://address.
_CALL = re.compile(r"<(?=\S)|@|\](?=\()|:(?=//)")
_CALLED = {"<": "\u2039", "@": "@ ", "]": "] ", ":": ": "}
_OURS = frozenset({"action", "since", "time", "next", "done"})  # these hold no text of strangers
_NAME = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\}|)", re.ASCII)


@dataclass(frozen=True)
class Template:
    """Texts in one language; for one that is left out our own text is used.

    Args:
        subject: one line.
        body: plain text; a line is left out if all of its names are empty.
    """

    subject: str = ""
    body: str = ""

    def __post_init__(self) -> None:
        for text in (self.subject, self.body):
            for match in _NAME.finditer(text):
                name = match[2] or match[3]
                if not match[1] and name is None:
                    raise InvalidRequest(f"a single $ in {text!r}: write $$ for a dollar sign.")
                if name is not None and name not in NAMES:
                    raise InvalidRequest(f"a message has no ${name}.", f"Known: {', '.join(sorted(NAMES))}.")
        if "\n" in self.subject.strip():
            raise InvalidRequest("the subject has more than one line: a subject is one line.")


TEMPLATES: Mapping[str, Template] = {
    language: Template(words.subject, words.body) for language, words in WORDS.items()
}  # the defaults, for an admin who writes none


@dataclass(frozen=True)
class Message:
    """One message; everything in it is neutral text."""

    subject: str  # one line
    body: str
    facts: tuple[Fact, ...] = ()  # the same facts for programs; their names carry the unit
    language: str = ENGLISH
    line: str = ""  # the message in one line, for a message about several findings
    key: str = ""  # the policy's name; messages with the same key may be joined
    user: str | None = None  # whom it is about
    count: int = 1  # how many findings it is about
    further: tuple[tuple[Fact, ...], ...] = ()  # the facts of the other findings, MOST_LINES at most


def message_for(
    verdict: Verdict,
    snapshot: Snapshot,
    language: str = ENGLISH,
    templates: Mapping[str, Template] = TEMPLATES,
    *,
    chat: bool = False,
    longest_keep: float = LONGEST_KEEP,
) -> Message:
    """Return the message about *verdict* in *language*, or in English if there are no texts in that language.

    Args:
        verdict: what a policy found and wants done.
        snapshot: from which it was judged.
        language: en or zh.
        templates: of the admin, by language.
        chat: whether it may reach a chat program; then no text of strangers becomes a mention or a link there.
        longest_keep: seconds for which users may exempt their own processes and claims; 0 if not at all.
    """
    language = language if language in WORDS else ENGLISH
    own, template = TEMPLATES[language], templates.get(language, TEMPLATES[language])
    given = _values(verdict, snapshot, language)
    # If something was done and nothing harmful follows, it is too late to explain how to prevent it.
    given["stop"] = "" if given["done"] and not verdict.harm_action else _stop(verdict, language, longest_keep)
    values = {name: neutralise(text)[:LONGEST_VALUE] for name, text in given.items()}
    values["processes"] = "\n".join(_processes(verdict.finding.processes, WORDS[language]))
    if chat:
        values |= {name: _CALL.sub(lambda m: _CALLED[m[0]], text) for name, text in values.items() if name not in _OURS}
    subject_values = {name: text.replace("\n", ", ") for name, text in values.items()}
    subject = _filled(template.subject or own.subject, subject_values)
    summary = [values[name] for name in ("device", "user", "why") if values[name]]
    return Message(
        subject=neutralise(" ".join(subject.split()).rstrip(" :："))[:LONGEST_SUBJECT],
        body=_body(template.body or own.body, values),
        facts=_facts(verdict, snapshot),
        language=language,
        line=": ".join([values["time"], *summary]),
        key=verdict.policy,
        user=verdict.finding.subject.user,
    )


_DEEDS: Mapping[str, str] = {name: kind.deed for name, kind in ACTION_KINDS.items() if kind.deed}


def deed_text(line: Mapping[str, Any]) -> str | None:
    """Return the text that the owner reads about a line of the audit log, or None if it does not concern them.

    As in ``"policy idle asked pid 7 to end (SIGTERM): idle for 20s"``.  A line concerns the owner if it is about
    something that a policy did to them, or about a warning to them.
    """
    facts, kind, message = line["facts"], line["kind"], line["message"] or ""
    if not facts.get("policy"):
        return None
    if kind == "warn" and line["outcome"] in ("done", "logged", "undelivered", "failed"):  # the last: of older versions
        unseen = line["outcome"] in ("undelivered", "failed")
        if unseen and isinstance(message, Sentence) and message.key == "because":
            message = message.values.get("what", message)  # without the reason why no terminal shows it
        text = _("warning of policy {policy}: {why}").format(policy=facts["policy"], why=translated(message))
        harm, at = facts.get("harm_action"), facts.get("harm_unix_seconds")
        words = WORDS[_("en").partition("-")[0]]  # "zh-CN", as a page writes it, becomes "zh"
        if harm in words.actions and isinstance(at, float | int):
            when = words.at.format(time=local_time(at, "%Y-%m-%d %H:%M:%S"))
            text += _(".  {next}").format(next=words.next.format(when=when, action=words.actions[harm]))
        return neutralise(text)
    if kind not in _DEEDS or line["outcome"] not in ("about to", "done"):
        return None
    return neutralise(_(_DEEDS[kind]).format(**line, policy=facts["policy"], why=translated(message)))


def joined(messages: Sequence[Message], count: int) -> Message:
    """Join several messages, the oldest first: that one is kept in full, and each other one becomes a line.

    *count* is the number of all findings, including those whose messages were not kept.
    """
    first, others = messages[0], messages[1 : MOST_LINES + 1]
    if count <= 1:
        return first
    words = WORDS[first.language]
    lines = [words.more.format(count=count), "", *(f"  {message.line}" for message in others)]
    left = count - 1 - len(others)
    if left > 0:
        lines.append("  " + words.left_out.format(count=left))
    return replace(
        first,
        subject=f"{words.times.format(count=count)} {first.subject}"[:LONGEST_SUBJECT],
        body=f"{first.body}\n" + "\n".join(lines) + "\n",
        count=count,
        further=tuple(message.facts for message in others),
    )


def _values(verdict: Verdict, snapshot: Snapshot, language: str) -> dict[str, str]:
    words, finding, subject = WORDS[language], verdict.finding, verdict.finding.subject
    say = catalogue("zh_CN").gettext if language == "zh" else None
    claim = claim_named(snapshot.claims, subject.uid, subject.claim)
    uuids = (subject.device,) if subject.device else claim.devices if claim else ()
    return {
        "host": snapshot.host,
        "policy": verdict.policy,
        "rule": finding.rule,
        "why": translated(finding.why, say) if say else finding.why,
        "device": ", ".join(_device_name(uuid, snapshot) for uuid in uuids),
        "user": subject.user or ("" if subject.uid is None else f"uid {subject.uid}"),
        "action": words.actions.get(verdict.action, verdict.action),
        "since": format_duration(max(0.0, snapshot.clock - verdict.since)),
        "time": local_time(snapshot.taken_at, "%Y-%m-%d %H:%M:%S %z"),
        "done": words.actions.get(str(dict(verdict.options).get("done")), ""),
        "next": _next(verdict, snapshot.taken_at, words),
    }


def _device_name(uuid: str, snapshot: Snapshot) -> str:
    device = snapshot.device(uuid)
    return f"GPU {device.label}" + (f" ({device.name})" if device.name else "") if device else uuid


def _stop(verdict: Verdict, language: str, longest_keep: float) -> str:
    words = WORDS[language]
    finding, kind = verdict.finding, verdict.kind
    text = (kind and kind.advice.get(language)) or words.stop
    if len(pids := {process.pid for process in finding.processes}) == 1:
        text = text.replace("PID", str(*pids))
    if finding.subject.kind in ("claim", "user") and not finding.processes:
        text = words.stop_claim.format(claim=finding.subject.claim or "ID")
    if longest_keep and verdict.may_be_kept and kind and kind.suggests_keep:
        text += words.keep.format(duration=format_duration(min(longest_keep, 4 * 3600)))
    return text


def _next(verdict: Verdict, now: float, words: Words) -> str:
    """Say which step comes next: the first that takes something away if there is one, otherwise the very next one.

    The former is given with a time of day, because a mail can be late.
    """
    if verdict.next_action is None:
        return words.nothing_next
    action, after = verdict.harm_action or verdict.next_action, verdict.next_after
    if verdict.harm_action:
        after = verdict.harm_after
    if not after:
        when = words.at_once
    elif verdict.harm_action:
        when = words.at.format(time=local_time(now + after, "%Y-%m-%d %H:%M:%S"))
    else:
        when = words.after.format(duration=format_duration(after))
    sentence = words.next.format(when=when, action=words.actions.get(action, action))
    return sentence if verdict.enforce else f"{sentence} {words.observing}"


def _processes(processes: Sequence[GpuProcess], words: Words) -> list[str]:
    lines = []
    for process in processes[:MOST_PROCESSES]:
        who = process.user or ("?" if process.uid is None else f"uid {process.uid}")
        memory = "" if process.memory_used is None else f", {format_bytes(process.memory_used)}"
        line = f"pid {process.pid} ({who}{memory}): {neutral_command(process.command, brief=True)}"
        lines.append(neutralise(line)[:LONGEST_VALUE])
    if len(processes) > MOST_PROCESSES:
        lines.append(words.left_out.format(count=len(processes) - MOST_PROCESSES))
    return lines


def _facts(verdict: Verdict, snapshot: Snapshot) -> tuple[Fact, ...]:
    finding, subject = verdict.finding, verdict.finding.subject
    device = snapshot.device(subject.device) if subject.device else None
    facts: dict[str, float | int | str | bool | None] = {
        "time_unix_seconds": snapshot.taken_at,
        "host": snapshot.host,
        "policy": verdict.policy,
        "rule": finding.rule,
        "why": finding.why,
        "subject": subject.kind,
        "action": verdict.action,
        "step": verdict.step,
        "enforce": verdict.enforce,
        "since_seconds": max(0.0, snapshot.clock - verdict.since),
        "next_action": verdict.next_action,
        "next_after_seconds": verdict.next_after,
        "harm_action": verdict.harm_action,
        "harm_unix_seconds": None if verdict.harm_after is None else snapshot.taken_at + verdict.harm_after,
        "device_uuid": subject.device,
        "device_index": device.index if device else None,
        "device_name": device.name if device else None,
        "user": subject.user,
        "uid": subject.uid,
        "pid": subject.pid,
        "claim": subject.claim,
        "pids": " ".join(str(process.pid) for process in finding.processes) or None,
        "command": neutral_command(finding.processes[0].command) if finding.processes else None,
    }
    return tuple(
        (name, neutralise(value)[:LONGEST_VALUE] if isinstance(value, str) else value) for name, value in facts.items()
    )


def _body(template: str, values: Mapping[str, str]) -> str:
    lines: list[str] = []
    for line in template.strip("\n").split("\n"):
        names = [match[2] or match[3] for match in _NAME.finditer(line) if not match[1]]
        if names and not any(values[name] for name in names):
            continue
        # Several processes are written one below the other, aligned with the first one.
        margin = "\n" + " " * display_width(line.partition("$")[0])
        filled = _filled(line, values).replace("\n", margin)
        lines.extend(neutralise(piece).rstrip() for piece in filled.split("\n"))
    return "\n".join(lines) + "\n"


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Replace the names in *template*, in one pass, so that the inserted text is not looked at again."""
    return _NAME.sub(lambda match: "$" if match[1] else values[match[2] or match[3]], template)
