"""Policy files for tests: a harmless one around the piece that matters, with accounts of its own.

A ``«`` in a text marks a place: marked() takes it out and says at which line and column it stood.
"""

from gpuguard.policy_files.loader import PolicyFile, parse
from gpuguard.yaml_files.decoder import Accounts

USERS = {"alice": 1000, "bob": 1001, "no": 1002, "root": 0, "on": 1003}
GROUPS = {"staff": 50, "students": 51}


def accounts() -> Accounts:
    return Accounts(USERS.__getitem__, GROUPS.__getitem__)


_ACCOUNTS = accounts()  # one for all: each new name is asked for in a thread


def document(when: str = "{idle: {below: 5%}}", steps: str = "[warn]", more: str = "", top: str = "") -> str:
    """A file with one policy; *more* are lines of the policy, *top* lines of the file."""
    lines = "".join(f"    {line}\n" for line in more.splitlines())
    end = "" if top.endswith("\n") or not top else "\n"
    return f"version: 1\n{top}{end}policies:\n  - name: p\n    when: {when}\n{lines}    steps: {steps}\n"


def marked(text: str) -> tuple[str, set[tuple[int, int]]]:
    """*text* without its marks, and where they stood."""
    places, plain = set(), ""
    for character in text:
        if character == "«":
            places.add((plain.count("\n") + 1, len(plain) - plain.rfind("\n")))
        else:
            plain += character
    return plain, places


def read(text: str | bytes) -> PolicyFile:
    """Decoded with the accounts of above."""
    return parse(text, "policy.yaml", accounts=_ACCOUNTS)


def good(text: str) -> PolicyFile:
    """The same; a fault fails the test."""
    file = read(text)
    assert file.faults == (), "\n".join(line for fault in file.faults for line in fault.lines("policy.yaml"))
    return file
