"""The rule ``expression``, for conditions that no other rule can express: a condition in a small language.

    conditions   and or not ( )     < <= > >= == !=     user in ('alice', 'bob')     executable like '/opt/*'
    amounts      + - * /            30GiB 5% 2h 85C 300W 1MB/s 3     'text'

The parser is written by hand, and the language has nothing but the above: no calls, no attributes, no powers, and no
patterns except globs.  Names, types and units are checked when a condition is parsed; its evaluation can neither raise
nor run for long.  The logic has three values: a comparison with something unknown is neither true nor false, and
neither is its opposite.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated

from gpuguard.device_state import claims_on, claims_readable, usable_devices
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _
from gpuguard.locale.messages import sentence
from gpuguard.model import DEVICE_FIELDS, WHO_FIELDS, Device, DeviceField, Finding, GpuProcess
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import HostUse, RuleView, computing, device_subject, process_subject
from gpuguard.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_celsius,
    parse_cores,
    parse_duration,
    parse_rate,
    parse_watts,
)

# The names of types in error messages.
BYTES, PERCENT, SECONDS = N_("memory size"), N_("percentage"), N_("duration")
CELSIUS, WATTS, RATE = N_("temperature"), N_("power"), N_("rate")
NUMBER, TEXT, TEXTS, TRUTH = N_("number"), N_("text"), N_("list of texts"), N_("truth")
_BY_UNIT = {"B": BYTES, "%": PERCENT, "C": CELSIUS, "W": WATTS, "B/s": RATE, "": NUMBER}
EXAMPLES = {BYTES: "30GiB", PERCENT: "5%", SECONDS: "2h", CELSIUS: "85C", WATTS: "300W", RATE: "1MB/s"}

Value = float | str | bool | frozenset[str] | frozenset[float | str] | None
LONGEST_TEXT = 4096  # characters of a text that are looked at, because users choose their command lines
_NOTHING = HostUse()


@dataclass(frozen=True)
class NameSource:
    """The things from which the names of an expression take their values."""

    view: RuleView
    device: Device
    process: GpuProcess | None = None

    @property
    def host(self) -> HostUse:
        """The use of the host by the process, beside the GPU."""
        if self.process is None or self.process.start_time is None:
            return _NOTHING
        return self.view.host.get((self.process.pid, self.process.start_time), _NOTHING)


@dataclass(frozen=True)
class Name:
    """A name: its type, whether it is about a process, its meaning, and how to get its value."""

    type: str
    of_process: bool
    meaning: str
    value: Callable[[NameSource], Value]
    group: str = ""  # the group of fields with which it is read; "" for one that is always read


def _of_process(kind: str, meaning: str, get: Callable[[GpuProcess], Value]) -> Name:
    return Name(kind, True, meaning, lambda source: None if source.process is None else get(source.process))


def _of_field(facts: DeviceField, meaning: str) -> Name:
    kind = _BY_UNIT[facts.unit] if facts.is_number else TEXT
    group = "" if facts.group in WHO_FIELDS else facts.group
    return Name(kind, False, meaning, lambda source: getattr(source.device, facts.name), group)


def _run_time(source: NameSource) -> Value:
    started = source.process.start_time if source.process else None
    return None if started is None else source.view.clock - started


def _groups(source: NameSource) -> Value:
    uid = source.process.uid if source.process else None
    return None if uid is None else source.view.groups.get(uid)


def _claimed(source: NameSource) -> Value:
    return bool(claims_on(source.view.snapshot, source.device)) if claims_readable(source.view.snapshot) else None


def _claimed_by(source: NameSource) -> Value:
    records = claims_on(source.view.snapshot, source.device)
    if not claims_readable(source.view.snapshot) or any(record.uid < 0 for record in records):
        return None
    process, arrivals = source.process, source.view.arrivals
    older = [
        record
        for record in records
        if process is None or process.uid == record.uid or not arrivals.was_there_before(record, source.device, process)
    ]
    # A process cannot trespass on a claim that came after it.  If all claims did, it is unknown who should be there.
    return frozenset(record.user for record in older) if older or not records else None


def _command(process: GpuProcess) -> Value:
    return None if process.command is None else " ".join(process.command)[:LONGEST_TEXT]


def _process_count(source: NameSource) -> Value:
    device = source.device
    return len(computing(device)) if device.processes is not None and device.processes_plausible else None


# A single name about a process makes the whole expression about processes; otherwise it is about devices.
NAMES: dict[str, Name] = {
    "memory_used": _of_process(BYTES, "of the process on the GPU", lambda process: process.memory_used),
    "process_utilization": _of_process(PERCENT, "of the SMs, by the process", lambda process: process.utilization),
    "run_time": Name(SECONDS, True, "since the start of the process", _run_time),
    "user": _of_process(TEXT, "name of the user", lambda process: process.user),
    "uid": _of_process(NUMBER, "number of the user", lambda process: process.uid),
    "groups": Name(TEXTS, True, "names of the groups of the user: 'students' in groups", _groups),
    "executable": _of_process(TEXT, "path of the file that runs", lambda process: process.executable),
    "command": _of_process(TEXT, "the command line, which its user chooses", _command),
    "container": _of_process(TEXT, "id of the container, unknown outside", lambda process: process.container),
    "cpu": Name(PERCENT, True, "of one core, by the process", lambda source: source.host.cpu),
    "host_memory": Name(BYTES, True, "resident, beside the GPU", lambda source: source.host.memory),
    "network": Name(RATE, True, "of the process, both ways", lambda source: source.host.network),
    **{
        facts.expression[0]: _of_field(facts, facts.expression[1])
        for facts in DEVICE_FIELDS.values()
        if facts.expression
    },
    "device_index": Name(NUMBER, False, "0 is the first GPU", lambda source: source.device.index),
    "processes": Name(NUMBER, False, "how many compute on the GPU", _process_count),
    "claimed": Name(TRUTH, False, "whether the GPU is claimed", _claimed),
    "claimed_by": Name(
        TEXTS, False, "names of the users who had claimed it when the process came: user not in claimed_by", _claimed_by
    ),
}
NAMES_OF_HOST = frozenset({"cpu", "host_memory", "network"})  # the names that need RuleView.host
_NAMES_OF_SIZE = frozenset({"device_memory_total", "device_memory_free"})

LONGEST = 1000  # characters of an expression
MOST = 200  # words
DEEPEST = 16  # nested brackets and nots
_KEYWORDS = ("and", "or", "not", "in", "like")

_WORD = re.compile(
    r"""(?P<blank>[ \t\n]+)
      | (?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>(?:[A-Za-z%°][A-Za-z%°0-9.]*(?:/s)?)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<text>'[^'\\\n]*'|"[^"\\\n]*")
      | (?P<sign><=|>=|==|!=|<|>|\+|-|\*|/|\(|\)|\[|\]|,)""",
    re.VERBOSE,
)
_READERS: dict[str, Callable[[str], float]] = {  # type -> reader of number and unit together
    BYTES: parse_bytes, PERCENT: parse_cores, SECONDS: parse_duration,
    CELSIUS: parse_celsius, WATTS: parse_watts, RATE: lambda text: parse_rate(text).per_second,
}  # fmt: skip
_QUOTES = N_("a text ends with the quote that it began with, and has no \\ in it")
_ADVICE = {
    "=": N_("== compares"), "&": N_("write: and"), "|": N_("write: or"), "!": N_("write: not"),
    ";": N_("an expression is one condition"), "'": _QUOTES, '"': _QUOTES, "**": N_("there are no exponents"),
    "//": N_("write /"), ".": N_("a name has no parts"), "{": N_("lists stand in ( )"), "`": N_("texts stand in ' '"),
}  # fmt: skip


@dataclass(frozen=True)
class Token:
    """One word.  Its kind is number (with a unit or without), text, name, sign or end."""

    kind: str
    text: str
    column: int  # from 1 on
    type: str = ""  # of numbers and texts
    value: Value = None


def _fault(column: int, text: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(_("column {column}: {text}").format(column=column, text=text), hint)


def _words(expression: str) -> list[Token]:
    """Return the words of *expression*, followed by an end."""
    if len(expression) > LONGEST:
        raise _fault(
            LONGEST,
            _("an expression has at most {most} characters, this one {count}.").format(
                most=LONGEST, count=len(expression)
            ),
        )
    found: list[Token] = []
    position = 0
    while position < len(expression):
        match = _WORD.match(expression, position)
        if match is None:
            advice = next((advice for start, advice in _ADVICE.items() if expression.startswith(start, position)), "")
            hint = f": {_(advice)}" if advice else ""
            raise _fault(
                position + 1,
                _("{letter!r} has no meaning here{hint}.").format(letter=expression[position], hint=hint),
            )
        if match["number"]:
            found.append(_number(match["number"], match["unit"], position + 1))
        elif match["text"]:
            found.append(Token("text", match[0], position + 1, TEXT, match[0][1:-1]))
        elif match.lastgroup != "blank":
            found.append(Token("name" if match["name"] else "sign", match[0], position + 1))
        if len(found) > MOST:
            raise _fault(position + 1, _("an expression has at most {most} words.").format(most=MOST))
        position = match.end()
    return [*found, Token("end", "the end", position + 1)]


def _number(digits: str, unit: str, column: int) -> Token:
    whole, _point, part = digits.partition(".")
    if len(whole) > 15 or len(part) > 9:
        raise _fault(column, _("a number has at most 15 digits, and 9 behind the point."))
    if len(whole) > 1 and whole[0] == "0":
        raise _fault(
            column, _("{digits} begins with 0: write {whole}.").format(digits=digits, whole=whole.lstrip("0") or "0")
        )
    if not unit:
        return Token("number", digits, column, NUMBER, float(digits))
    for kind, read in _READERS.items():
        with suppress(InvalidRequest):
            return Token("number", digits + unit, column, kind, float(read(digits + unit)))
    raise _fault(
        column,
        _("{unit!r} is no unit: write an amount like {values}.").format(unit=unit, values=", ".join(EXAMPLES.values())),
    )


ORDER = ("<", "<=", ">", ">=")
_COMPARISONS: dict[str, Callable[..., bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

Evaluate = Callable[[NameSource], Value]


@dataclass(frozen=True)
class ExpressionPart:
    """A part of an expression, checked when it is made: its type, its first word, and its value, which cannot raise."""

    type: str
    word: Token
    value: Evaluate


def _compared(left: ExpressionPart, sign: Token, right: ExpressionPart) -> ExpressionPart:
    if sign.text in ORDER and left.type in (TEXT, TEXTS, TRUTH):
        raise _fault(
            sign.column,
            _("{sign} is for amounts, and {text} is a {type}.").format(
                sign=sign.text, text=left.word.text, type=_(left.type)
            ),
        )
    if left.type != right.type:
        raise _fault(right.word.column, _mismatch(left, right))
    if left.type in (TEXTS, TRUTH):
        name = left.word.text
        either = (
            _("{name}, or not {name}").format(name=name) if left.word.kind == "name" else _("it without a comparison")
        )
        way = f"'alice' in {name}" if left.type == TEXTS else either
        raise _fault(sign.column, _("{name} is a {type}: write {way}.").format(name=name, type=_(left.type), way=way))
    compare = _COMPARISONS[sign.text]

    def value(source: NameSource) -> Value:
        first, second = left.value(source), right.value(source)
        if left.type != TEXT:
            first, second = _known_number(first), _known_number(second)
        return None if first is None or second is None else compare(first, second)

    return ExpressionPart(TRUTH, left.word, value)


def _calculated(left: ExpressionPart, sign: Token, right: ExpressionPart) -> ExpressionPart:
    """Return the sum, difference, product or quotient; its value is unknown if it is no finite number."""
    for part in (left, right):
        if part.type in (TEXT, TEXTS, TRUTH):
            raise _fault(
                part.word.column,
                _("nothing can be calculated with {text}, a {type}.").format(text=part.word.text, type=_(part.type)),
            )
    if sign.text in "+-" and left.type != right.type:
        raise _fault(right.word.column, _mismatch(left, right))
    kind = left.type
    if sign.text == "*" and NUMBER not in (left.type, right.type):
        raise _fault(
            sign.column, _("a {left} times a {right} makes no sense.").format(left=_(left.type), right=_(right.type))
        )
    if sign.text == "*" and left.type == NUMBER:
        kind = right.type
    if sign.text == "/" and right.type != NUMBER:
        if left.type != right.type:
            raise _fault(right.word.column, _mismatch(left, right))
        kind = NUMBER

    def value(source: NameSource) -> Value:
        first, second = _known_number(left.value(source)), _known_number(right.value(source))
        if first is None or second is None or (sign.text == "/" and second == 0):
            return None
        return _known_number(_ARITHMETIC[sign.text](first, second))

    return ExpressionPart(kind, left.word, value)


def _mismatch(left: ExpressionPart, right: ExpressionPart) -> str:
    for bare, other in ((right, left), (left, right)):
        if bare.word.kind == "number" and bare.type == NUMBER and other.type in EXAMPLES:
            return _("{text} has no unit: write a {type}, like {example}.").format(
                text=bare.word.text, type=_(other.type), example=EXAMPLES[other.type]
            )
    return _("{text} is a {type}, and {other} is a {other_type}: they cannot be compared.").format(
        text=right.word.text, type=_(right.type), other=left.word.text, other_type=_(left.type)
    )


def _must_be_truth(part: ExpressionPart) -> None:
    if part.type != TRUTH:
        raise _fault(
            part.word.column,
            _("{text} is a {type}, not a condition: compare it with something.").format(
                text=part.word.text, type=_(part.type)
            ),
        )


def _join(keyword: str, values: list[Evaluate]) -> Evaluate:
    decisive = keyword == "or"  # one true part decides an "or", one false part an "and", even if others are unknown

    def value(source: NameSource) -> Value:
        known: Value = not decisive
        for evaluate in values:
            truth = evaluate(source)
            if truth is decisive:
                return decisive
            known = None if truth is None else known
        return known

    return value


def _opposite(value: Evaluate) -> Evaluate:
    return lambda source: None if (truth := value(source)) is None else not truth


def _known_number(value: Value) -> float | None:
    """Return *value* as a float, so that no number grows without end, or None if it is no finite number."""
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Expression:
    """A condition that was parsed and checked."""

    text: str
    names: tuple[str, ...]  # that occur in it, in order
    evaluate: Evaluate = field(compare=False, repr=False)

    @property
    def of_process(self) -> bool:
        """Whether the condition is about processes, rather than about devices."""
        return any(NAMES[name].of_process for name in self.names)

    def holds(self, source: NameSource) -> bool:
        """Return whether the condition is true of *source*, or False if that is unknown."""
        return self.evaluate(source) is True


def parse_expression(text: str) -> Expression:
    """Return the condition that *text* expresses.

    Raises:
        InvalidRequest: *text* is no condition; the error names the column, and what to write.
    """
    reader = _Reader(_words(text))
    condition = reader.condition()
    if reader.next.kind != "end":
        raise _fault(
            reader.next.column, _("{text!r} comes after the end of the condition.").format(text=reader.next.text)
        )
    _must_be_truth(condition)
    if not reader.names:
        raise _fault(1, _("this is about nothing on the machine: compare a name, like memory_used > 30GiB."))
    return Expression(text, tuple(dict.fromkeys(reader.names)), condition.value)


class _Reader:
    """Parses the words into parts, beginning with the loosest binding."""

    def __init__(self, found: list[Token]) -> None:
        self.words = found
        self.position = 0
        self.depth = 0
        self.names: list[str] = []

    @property
    def next(self) -> Token:
        return self.words[self.position]

    def take(self, *texts: str) -> Token | None:
        """Consume and return the next word if it is one of the signs or keywords *texts*, or return None."""
        word = self.next
        if word.kind not in ("sign", "name") or word.text not in texts:
            return None
        self.position += 1
        return word

    def condition(self) -> ExpressionPart:
        return self._joined("or", lambda: self._joined("and", self._negation))

    def _joined(self, keyword: str, read: Callable[[], ExpressionPart]) -> ExpressionPart:
        parts = [read()]
        while self.take(keyword):
            parts.append(read())
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            _must_be_truth(part)
        return ExpressionPart(TRUTH, parts[0].word, _join(keyword, [part.value for part in parts]))

    def _negation(self) -> ExpressionPart:
        word = self.take("not")
        if word is None:
            return self._comparison()
        self._deeper(word)
        part = self._negation()
        self.depth -= 1
        _must_be_truth(part)
        return ExpressionPart(TRUTH, word, _opposite(part.value))

    def _comparison(self) -> ExpressionPart:
        left = self._sum()
        sign = self.take(*_COMPARISONS)
        if sign:
            part = _compared(left, sign, self._sum())
        else:
            negated = self.take("not")
            sign = self.take("in", "like")
            if sign is None and negated is None:
                return left
            if sign is None:
                raise _fault(self.next.column, _("after this 'not' comes 'in' or 'like'."))
            value = self._membership(left) if sign.text == "in" else self._likeness(left)
            part = ExpressionPart(TRUTH, left.word, _opposite(value) if negated else value)
        if again := self.take(*_COMPARISONS, "in", "like"):
            raise _fault(again.column, _("one comparison at a time: write a < b and b < c."))
        return part

    def _sum(self) -> ExpressionPart:
        return self._calculation(lambda: self._calculation(self._atom, "*", "/"), "+", "-")

    def _calculation(self, read: Callable[[], ExpressionPart], *signs: str) -> ExpressionPart:
        part = read()
        while sign := self.take(*signs):
            part = _calculated(part, sign, read())
        return part

    def _atom(self) -> ExpressionPart:
        word = self.next
        if self.take("("):
            self._deeper(word)
            part = self.condition()
            self.depth -= 1
            if not self.take(")"):
                raise _fault(
                    self.next.column, _("a ) is missing for the ( in column {column}.").format(column=word.column)
                )
            return part
        if word.kind in ("number", "text"):
            self.position += 1
            return ExpressionPart(word.type, word, lambda source: word.value)
        if word.kind != "name" or word.text in _KEYWORDS:
            raise _fault(
                word.column, _("a name, a number or a text is expected here, not {text!r}.").format(text=word.text)
            )
        return self._name(word)

    def _name(self, word: Token) -> ExpressionPart:
        self.position += 1
        known = NAMES.get(word.text)
        if self.next.text == "(" and self.next.kind == "sign":
            raise _fault(
                self.next.column, _("{text!r} cannot be called: there are no functions.").format(text=word.text)
            )
        if known is None:
            near = get_close_matches(word.text, NAMES, n=1)
            advice = _("Known: {names}.").format(names=", ".join(NAMES))
            if near:
                advice = _("Did you mean {near!r}?").format(near=near[0])
            raise _fault(word.column, _("there is no name {text!r}.").format(text=word.text), advice)
        self.names.append(word.text)
        return ExpressionPart(known.type, word, known.value)

    def _membership(self, left: ExpressionPart) -> Evaluate:
        if self.next.kind == "name" and self.next.text in NAMES:
            right = self._name(self.next)
            if right.type != TEXTS or left.type != TEXT:
                raise _fault(right.word.column, _("{text} is no list: compare with == .").format(text=right.word.text))
            among: Evaluate = right.value
        else:
            several = self._list(left)
            among = lambda source: several  # noqa: E731

        def value(source: NameSource) -> Value:
            item, found = left.value(source), among(source)
            return item in found if item is not None and isinstance(found, frozenset) else None

        return value

    def _list(self, left: ExpressionPart) -> frozenset[float | str]:
        if left.type not in (TEXT, NUMBER):
            raise _fault(
                left.word.column,
                _("'in' is for texts and plain numbers, and this is a {type}.").format(type=_(left.type)),
            )
        opening = self.take("(", "[")
        if opening is None:
            raise _fault(self.next.column, _("after 'in' comes a list, like ('alice', 'bob')."))
        closing = ")" if opening.text == "(" else "]"
        listed: set[float | str] = set()
        while not self.take(closing):
            word = self.next
            if word.type != left.type or not isinstance(word.value, (float, str)):
                raise _fault(
                    word.column,
                    _("{text!r} is no {type}, and the list is compared with one.").format(
                        text=word.text, type=_(left.type)
                    ),
                )
            self.position += 1
            listed.add(word.value)
            if not self.take(",") and self.next.text != closing:
                raise _fault(self.next.column, _("a , or {closing} is missing in the list.").format(closing=closing))
        if not listed:
            raise _fault(opening.column, _("the list is empty."))
        return frozenset(listed)

    def _likeness(self, left: ExpressionPart) -> Evaluate:
        glob = self.next
        if left.type != TEXT:
            raise _fault(left.word.column, _("'like' is for texts, and this is a {type}.").format(type=_(left.type)))
        if glob.kind != "text" or not isinstance(glob.value, str):
            raise _fault(glob.column, _("after 'like' comes a text with * for anything, like '/opt/*'."))
        self.position += 1
        pattern = glob.value  # this comes from the admin; the text comes from the user

        def value(source: NameSource) -> Value:
            text = left.value(source)
            return fnmatchcase(text[:LONGEST_TEXT], pattern) if isinstance(text, str) else None

        return value

    def _deeper(self, word: Token) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _fault(
                word.column, _("more than {deepest} brackets and nots within each other.").format(deepest=DEEPEST)
            )


_LONGEST_SHOWN = 80  # characters
_SHOWN: dict[str, Callable[[float], str]] = {
    BYTES: format_bytes, RATE: lambda number: f"{format_bytes(number)}/s", SECONDS: format_duration,
    PERCENT: lambda number: f"{number:.3g}%", CELSIUS: lambda number: f"{number:g}C",
    WATTS: lambda number: f"{number:.0f}W",
}  # fmt: skip


def _groups_of(names: Iterable[str]) -> frozenset[str]:
    return frozenset(NAMES[name].group for name in names) - {""}


@dataclass(frozen=True)
class ExpressionRule(Rule):
    """A condition in a small language is true.

    expr: names, compared with amounts (30GiB, 5%, 2h, 85C, 300W, 1MB/s, 3) or texts ('alice'), by < <= > >= == != and
        by in, like, joined by and, or, not; + - * / for amounts.

    With a name about processes it is judged for each process on each GPU, else for each GPU.  What compares
    something unknown is neither true nor false.

    Names about processes are memory_used, process_utilization, run_time, user, uid, groups, executable, command,
    container, cpu, host_memory, network.  About devices: utilization, memory_utilization, device_memory_used,
    device_memory_free, device_memory_total, temperature, temperature_slowdown, power_draw, power_limit, device_index,
    model, processes, claimed, claimed_by.

        when: {expression: {expr: "memory_used > 30GiB and utilization < 5% and user not in ('bob',)"}}
    """

    kind = RuleKind("expression", innocent=False, by_content=True, needs=RuleNeeds(_groups_of(NAMES)))

    expr: Annotated[Expression, parse_expression]

    @property
    def needs(self) -> RuleNeeds:
        """The field groups and the facts of the host that its names need."""
        return RuleNeeds(
            _groups_of(self.expr.names),
            host=not NAMES_OF_HOST.isdisjoint(self.expr.names),
            memory_size=not _NAMES_OF_SIZE.isdisjoint(self.expr.names),
        )

    @property
    def judges_by(self) -> frozenset[str]:
        """Its names about devices."""
        return frozenset(name for name in self.expr.names if not NAMES[name].of_process)

    @property
    def reaches(self) -> frozenset[str]:
        """Processes, if one of its names is about processes."""
        return frozenset({"process"} if self.expr.of_process else ())

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding for each process on each device, or for each device, for which the condition is true."""
        for device in usable_devices(view.snapshot):
            if not self.expr.of_process:
                if self.expr.holds(source := NameSource(view, device)):
                    yield Finding("expression", device_subject(device), self._why(source))
                continue
            for process in computing(device):
                if self.expr.holds(source := NameSource(view, device, process)):
                    yield Finding("expression", process_subject(device, process), self._why(source), (process,))

    def _why(self, source: NameSource) -> str:
        facts = [f"{name} is {_shown(NAMES[name].type, NAMES[name].value(source))}" for name in self.expr.names]
        return sentence(
            "expression.true",
            "{facts}: true is {condition}",
            facts=", ".join(facts),
            condition=" ".join(self.expr.text.split()),
        )


def _shown(kind: str, value: Value) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return _SHOWN[kind](value) if kind in _SHOWN else f"{value:g}"
    texts = [value] if isinstance(value, str) else sorted(map(str, value))
    return ", ".join(texts)[:_LONGEST_SHOWN]
