"""Completion scripts for shells: what the commands understand -> one text per shell.

A script knows commands, options and fixed words by itself.  What changes from minute to minute (devices, users,
claims) it asks `gpuguard completion --values KIND WORD` for when somebody presses TAB.  Does not read parsers: see
cli.completion.
"""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of a value that a shell completes itself; every other kind is asked for.  TEXT: nobody knows.
TEXT, FILE, DIRECTORY, JOB, WORDS = "text", "file", "directory", "job", "words"
OWN = (TEXT, FILE, DIRECTORY, JOB, WORDS)


@dataclass(frozen=True)
class ShellWord:
    """An option, or, without flags, a positional word."""

    flags: tuple[str, ...]
    name: str  # of its value: LIST, SIZE
    purpose: str  # one line
    kind: str | None  # of its value; None: it takes none
    words: tuple[str, ...] = ()  # of the kind WORDS
    optional: bool = False  # the value may be missing
    many: bool = False  # it may stand there again


@dataclass(frozen=True)
class ShellCommand:
    """A command, or one of a command: ("policy", "check")."""

    path: tuple[str, ...]
    purpose: str
    words: tuple[ShellWord, ...]
    commands: tuple[tuple[str, str], ...] = ()  # what may follow, with its purpose

    def options(self) -> tuple[ShellWord, ...]:
        """The words with flags."""
        return tuple(word for word in self.words if word.flags)

    def positionals(self) -> tuple[ShellWord, ...]:
        """The words without."""
        return tuple(word for word in self.words if not word.flags)


def quoted(text: str) -> str:
    """*text* in single quotes, as bash and zsh read them."""
    return "'" + text.replace("'", "'\\''") + "'"
