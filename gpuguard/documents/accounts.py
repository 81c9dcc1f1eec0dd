"""Names of users and groups -> the numbers that the kernel knows, once, when a policy file is loaded.

A name that cannot be resolved is a fault, never a rule that matches nobody or everybody.  The directory service (NSS:
LDAP, SSSD) may hang, so each question is asked in a thread of its own, and after SECONDS in all nobody is asked again.
For the way back, a number -> a name for people, see users.
"""

from __future__ import annotations

import grp
import pwd
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from gpuguard.errors import InvalidRequest

SECONDS = 5.0
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_LARGEST = 2**32 - 2  # the number above it means "no user" to the kernel

T = TypeVar("T")


def _user_number(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _group_number(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def _local_names(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as lines:
        return [line.partition(":")[0] for line in lines]


@dataclass
class Accounts:
    """Who is who on this machine; the two functions raise KeyError for a name that nobody has."""

    user_number: Callable[[str], int] = _user_number
    group_number: Callable[[str], int] = _group_number
    seconds: float = SECONDS
    _waited: float = field(default=0.0, init=False)
    _known: dict[tuple[str, str], int] = field(default_factory=dict, init=False)

    def user(self, text: str) -> int:
        """The uid of a user's name, or of the uid itself in digits.

        Raises:
            InvalidRequest: nobody has that name, or nobody could say so in time.
        """
        if _NUMBER.fullmatch(text):
            if int(text) > _LARGEST:
                raise InvalidRequest(f"{text} is no uid: the largest is {_LARGEST}.")
            return int(text)
        return self._number("user", text, self.user_number, "/etc/passwd")

    def group(self, text: str) -> str:
        """The name of a group, known to exist.

        Raises:
            InvalidRequest: there is none, or nobody could say so in time.
        """
        self._number("group", text, self.group_number, "/etc/group")
        return text

    def _number(self, what: str, name: str, look_up: Callable[[str], int], names: str) -> int:
        if (what, name) not in self._known:
            try:
                self._known[what, name] = self._in_time(lambda: look_up(name))
            except (KeyError, ValueError):
                hint = _similar(name, names)
                raise InvalidRequest(f"there is no {what} {name!r} on this machine.\n{hint}") from None
            except TimeoutError:
                raise InvalidRequest(
                    f"{what} {name!r} is unknown: the directory service did not answer within {self.seconds:g} s.\n"
                    "Is LDAP or SSSD up?  A uid in digits needs no answer."
                ) from None
        return self._known[what, name]

    def _in_time(self, question: Callable[[], T]) -> T:
        if self._waited >= self.seconds:
            raise TimeoutError
        answers: list[T | KeyError | ValueError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except (KeyError, ValueError) as error:  # ValueError: a name with a NUL byte
                answers.append(error)
            except OSError as error:
                answers.append(KeyError(str(error)))

        begin = time.monotonic()
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self.seconds - self._waited)
        self._waited += time.monotonic() - begin
        if not answers:
            self._waited = self.seconds
            raise TimeoutError
        answer = answers[0]
        if isinstance(answer, KeyError | ValueError):
            raise answer
        return answer


def _similar(name: str, path: str) -> str:
    """A near miss among the local names; those of a directory service cannot be listed."""
    try:
        import difflib  # only for whoever makes a mistake

        near = difflib.get_close_matches(name, _local_names(path), n=1)
    except OSError:
        near = []
    return f"Did you mean {near[0]!r}?" if near else "Write another name, or make the account first."
