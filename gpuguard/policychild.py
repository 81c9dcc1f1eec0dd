"""What a policy file says, found out by another process: YAML and all that reads it stay out of the guard.

They would take 2 MiB of a daemon for as long as it runs, and a fault in them a daemon of root.  The file itself is
read here, where its owner is checked; the child gets its text, and answers with plain values, of which only nouns of
our own are made again.  Does not know what may stand in a file: see policyfile.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module

from gpuguard import __version__, actions, capabilities
from gpuguard.backends.sampler import interpreter
from gpuguard.documents.faults import LARGEST, Fault
from gpuguard.documents.rootfile import read_file
from gpuguard.errors import INSTALLED_ANEW, InvalidRequest
from gpuguard.guards.identity import Protected
from gpuguard.hints import TYPE_CHECKING, Any
from gpuguard.messages import Template
from gpuguard.policies.policy import Policy

if TYPE_CHECKING:
    from gpuguard.notify import Target

_CHILD = "import gpuguard.policyfile as p; p.answer(sys.argv[1])"
_EXPRESSION = "gpuguard.policies.expression_language:Expression"
READ_SECONDS = 20.0  # it takes 0.2 s; systemd starts a daemon anew that shows no sign of life for 60
KILL_SECONDS = 1.0
TOO_LONG = (
    "What was in force stays so.  Names of users and groups may come from a server that does not answer: see whether "
    "`gpuguard policy check` takes as long, then try `gpuguard daemon --reload`."
)
_SEVERAL = {kind.__name__: kind for kind in (tuple, list, frozenset)}


@dataclass(frozen=True)
class PolicyFile:
    """What a file says.

    Args:
        path: as it was named.
        policies: none when there is a fault.
        notify: target name -> where its messages go.
        messages: language -> texts of the admin's own.
        interval: (shortest, longest) seconds between samples.
        longest_keep: seconds for which users may ask to be left alone.
        protected: who is never touched.
        faults: what makes the file useless, in the order of the lines.
        warnings: what is allowed, but hardly meant.
        fingerprint: SHA-256 of the text.
    """

    path: str
    policies: tuple[Policy, ...] = ()
    notify: Mapping[str, Target] = field(default_factory=dict)
    messages: Mapping[str, Template] = field(default_factory=dict)
    interval: tuple[float, float] = (2.0, 10.0)
    longest_keep: float = 86400.0
    protected: Protected = field(default_factory=Protected)
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    fingerprint: str = ""


def load_apart(path: str) -> PolicyFile:
    """As policyfile.load_policies(), by a process of its own."""
    content = content_of(path)
    if isinstance(content, PolicyFile):
        return content
    try:
        told = _told(content, path)
    except OSError as error:
        return faulty(path, f"no process could be started that reads the file: {error.strerror}.")
    if told is None:
        return faulty(path, f"the process that reads the file took more than {READ_SECONDS:.0f} s.", TOO_LONG)
    if not told:
        return faulty(path, "the process that reads the file ended by itself.", "Try `gpuguard policy check`.")
    try:
        version, file = marshal.loads(told)
        if version != __version__:
            return faulty(path, INSTALLED_ANEW.format(f"gpuguard {version}", __version__))
        file = rebuilt(file)
    except (ValueError, EOFError, TypeError, LookupError, AttributeError, ImportError):
        file = None  # a library of the child has printed into its answer
    if not isinstance(file, PolicyFile):
        return faulty(path, "what the process that reads the file says cannot be understood.", "Try it again.")
    return file


def content_of(path: str, *, trusted_owner: bool | None = None) -> bytes | PolicyFile:
    """The text of a policy file, or why it cannot be had; *trusted_owner* as for load_policies()."""
    only_root = capabilities.is_powerful() if trusted_owner is None else trusted_owner
    try:
        return read_file(path, LARGEST, only_root=only_root)
    except OSError as error:
        return faulty(path, f"the file cannot be read: {error.strerror or error}.")
    except InvalidRequest as error:
        text, _, hint = str(error).partition("\n")
        return faulty(path, text, hint)


def faulty(path: str, text: str, hint: str = "") -> PolicyFile:
    """A file that is of no use as a whole."""
    return PolicyFile(path, faults=(Fault(0, 0, text, hint),))


def _told(content: bytes, path: str) -> bytes | None:
    """What the child says, None when it takes too long."""
    # Files in memory rather than pipes: none of the two ever waits for the other to take something.
    question, answer = os.memfd_create("gpuguard-policy"), -1
    try:
        answer = os.memfd_create("gpuguard-policies")
        os.pwrite(question, content, 0)
        words = interpreter(_CHILD, path)
        places = [(os.POSIX_SPAWN_DUP2, question, 0), (os.POSIX_SPAWN_DUP2, answer, 1)]
        status = _status_of(os.posix_spawn(words[0], words, os.environ, file_actions=places, setsigmask=()))
        if status is None:
            return None
        return b"" if status else os.pread(answer, os.fstat(answer).st_size, 0)
    finally:
        for descriptor in (question, answer):
            if descriptor >= 0:
                os.close(descriptor)


def _status_of(child: int) -> int | None:
    """How it ended, by itself; None: it took too long, and was killed."""
    status, late = 0, False
    # Where whoever started us ignores SIGCHLD, one that has ended is gone, and nobody is told how.
    with suppress(ChildProcessError, ProcessLookupError):
        pidfd = os.pidfd_open(child)
        try:
            late = not _ends_within(pidfd, READ_SECONDS)
            if late:
                actions.forward(pidfd, signal.SIGKILL)
                _ends_within(pidfd, KILL_SECONDS)
        finally:
            os.close(pidfd)
        status = os.waitpid(child, os.WNOHANG if late else 0)[1]  # nobody waits for one that outlives SIGKILL
    return None if late else status


def _ends_within(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def plain(value: Any) -> Any:
    """*value*, made of nouns, as what marshal can write."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind.__name__ in _SEVERAL:
        return kind.__name__, [plain(one) for one in value]
    if kind is dict:
        return "dict", [(plain(name), plain(one)) for name, one in value.items()]
    name = f"{kind.__module__}:{kind.__qualname__}"
    if name == _EXPRESSION:
        return name, value.text  # the rest of it are functions
    return name, [(name, plain(one)) for name, one in vars(value).items()]


def rebuilt(told: Any) -> Any:
    """What plain() made plain."""
    if type(told) is not tuple:
        return told
    kind, parts = told
    if kind in _SEVERAL:
        return _SEVERAL[kind](map(rebuilt, parts))
    if kind == _EXPRESSION:
        from gpuguard.policies.expression_language import parse_expression

        return parse_expression(parts)
    if kind == "dict":
        return {rebuilt(name): one for name, one in _values(parts)}
    module, _, name = kind.partition(":")
    if not module.startswith("gpuguard."):
        raise ValueError(f"{kind} is no noun of ours")
    noun = object.__new__(getattr(import_module(module), name))
    vars(noun).update(_values(parts))
    return noun


def _values(parts: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(name, rebuilt(one)) for name, one in parts]
