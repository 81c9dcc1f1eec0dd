"""A language of conditions, for what no other rule can say: ``memory_used > 30GiB and utilization < 5%``.

    conditions   and or not ( )     < <= > >= == !=     user in ('alice', 'bob')     executable like '/opt/*'
    amounts      + - * /            30GiB 5% 2h 85C 300W 1MB/s 3     'text'

It is read by hand, and there is nothing in it but what stands here: no calls, no attributes, no powers, no patterns but
globs.  Names, types and units are checked when it is read; what is left cannot raise, nor run for long.  Its logic has
three values: a comparison with something unknown is neither true nor false, and neither is its opposite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuguard.policies.expression_meaning import (
    EQUALITY,
    ORDER,
    Evaluate,
    Part,
    calculated,
    compared,
    is_in,
    is_like,
    join,
    must_be_truth,
    opposite,
)
from gpuguard.policies.expression_names import NAMES, NUMBER, TEXT, TEXTS, TRUTH, Place
from gpuguard.policies.expression_tokens import Word, fault, words

DEEPEST = 16  # brackets and nots within each other
_KEYWORDS = ("and", "or", "not", "in", "like")


@dataclass(frozen=True)
class Expression:
    """A condition that was read and checked."""

    text: str
    names: tuple[str, ...]  # that occur, in order
    evaluate: Evaluate = field(compare=False, repr=False)

    @property
    def of_process(self) -> bool:
        """Whether it is about processes, rather than about devices."""
        return any(NAMES[name].of_process for name in self.names)

    def holds(self, place: Place) -> bool:
        """Whether it is true of *place*; False too when nobody can know."""
        return self.evaluate(place) is True


def parse_expression(text: str) -> Expression:
    """The condition that *text* says.

    Raises:
        InvalidRequest: with the column of what is wrong, and what to write.
    """
    reader = _Reader(words(text))
    condition = reader.condition()
    if reader.next.kind != "end":
        raise fault(reader.next.column, f"{reader.next.text!r} comes after the end of the condition.")
    must_be_truth(condition)
    if not reader.names:
        raise fault(1, "this is about nothing on the machine: compare a name, like memory_used > 30GiB.")
    return Expression(text, tuple(dict.fromkeys(reader.names)), condition.value)


class _Reader:
    """Reads parts from the words, the loosest binding first."""

    def __init__(self, found: list[Word]) -> None:
        self.words = found
        self.place = 0
        self.depth = 0
        self.names: list[str] = []

    @property
    def next(self) -> Word:
        return self.words[self.place]

    def take(self, *texts: str) -> Word | None:
        """The next word, if it is a sign or keyword of *texts*."""
        word = self.next
        if word.kind not in ("sign", "name") or word.text not in texts:
            return None
        self.place += 1
        return word

    def condition(self) -> Part:
        return self._joined("or", lambda: self._joined("and", self._negation))

    def _joined(self, keyword: str, read: Callable[[], Part]) -> Part:
        parts = [read()]
        while self.take(keyword):
            parts.append(read())
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            must_be_truth(part)
        return Part(TRUTH, parts[0].word, join(keyword, [part.value for part in parts]))

    def _negation(self) -> Part:
        word = self.take("not")
        if word is None:
            return self._comparison()
        self._deeper(word)
        part = self._negation()
        self.depth -= 1
        must_be_truth(part)
        return Part(TRUTH, word, opposite(part.value))

    def _comparison(self) -> Part:
        left = self._sum()
        sign = self.take(*ORDER, *EQUALITY)
        if sign:
            part = compared(left, sign, self._sum())
        else:
            negated = self.take("not")
            sign = self.take("in", "like")
            if sign is None and negated is None:
                return left
            if sign is None:
                raise fault(self.next.column, "after this 'not' comes 'in' or 'like'.")
            value = self._membership(left) if sign.text == "in" else self._likeness(left)
            part = Part(TRUTH, left.word, opposite(value) if negated else value)
        if again := self.take(*ORDER, *EQUALITY, "in", "like"):
            raise fault(again.column, "one comparison at a time: write a < b and b < c.")
        return part

    def _sum(self) -> Part:
        part = self._product()
        while sign := self.take("+", "-"):
            part = calculated(part, sign, self._product())
        return part

    def _product(self) -> Part:
        part = self._atom()
        while sign := self.take("*", "/"):
            part = calculated(part, sign, self._atom())
        return part

    def _atom(self) -> Part:
        word = self.next
        if self.take("("):
            self._deeper(word)
            part = self.condition()
            self.depth -= 1
            if not self.take(")"):
                raise fault(self.next.column, f"a ) is missing for the ( in column {word.column}.")
            return part
        if word.kind in ("number", "text"):
            self.place += 1
            return Part(word.type, word, lambda place: word.value)
        if word.kind != "name" or word.text in _KEYWORDS:
            raise fault(word.column, f"a name, a number or a text is expected here, not {word.text!r}.")
        return self._name(word)

    def _name(self, word: Word) -> Part:
        self.place += 1
        known = NAMES.get(word.text)
        if self.next.text == "(" and self.next.kind == "sign":
            raise fault(self.next.column, f"{word.text!r} cannot be called: there are no functions.")
        if known is None:
            from difflib import get_close_matches  # only for whoever makes a mistake

            near = get_close_matches(word.text, NAMES, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(NAMES)}."
            raise fault(word.column, f"there is no name {word.text!r}.\n{advice}")
        self.names.append(word.text)
        return Part(known.type, word, known.value)

    def _membership(self, left: Part) -> Evaluate:
        if self.next.kind == "name" and self.next.text in NAMES:
            right = self._name(self.next)
            if right.type != TEXTS or left.type != TEXT:
                raise fault(right.word.column, f"{right.word.text} is no list: compare with == .")
            return lambda place: is_in(left.value(place), right.value(place))
        if left.type not in (TEXT, NUMBER):
            raise fault(left.word.column, f"'in' is for texts and plain numbers, and this is a {left.type}.")
        opening = self.take("(", "[")
        if opening is None:
            raise fault(self.next.column, "after 'in' comes a list, like ('alice', 'bob').")
        closing = ")" if opening.text == "(" else "]"
        listed: set[float | str] = set()
        while not self.take(closing):
            word = self.next
            if word.type != left.type or not isinstance(word.value, (float, str)):
                raise fault(word.column, f"{word.text!r} is no {left.type}, and the list is compared with one.")
            self.place += 1
            listed.add(word.value)
            if not self.take(",") and self.next.text != closing:
                raise fault(self.next.column, f"a , or {closing} is missing in the list.")
        if not listed:
            raise fault(opening.column, "the list is empty.")
        several = frozenset(listed)
        return lambda place: is_in(left.value(place), several)

    def _likeness(self, left: Part) -> Evaluate:
        glob = self.next
        if left.type != TEXT:
            raise fault(left.word.column, f"'like' is for texts, and this is a {left.type}.")
        if glob.kind != "text" or not isinstance(glob.value, str):
            raise fault(glob.column, "after 'like' comes a text with * for anything, like '/opt/*'.")
        self.place += 1
        pattern = glob.value
        return lambda place: is_like(left.value(place), pattern)

    def _deeper(self, word: Word) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise fault(word.column, f"more than {DEEPEST} brackets and nots within each other.")
