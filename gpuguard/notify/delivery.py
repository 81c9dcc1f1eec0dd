"""One delivery: the function of each kind of target, and the border at which foreign errors become words of ours.

No text of an answer or of an exception gets through that could hold a secret: only codes, and what the system says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuguard.messages import Message
from gpuguard.notify import chat, hook, mail, webhook
from gpuguard.notify.chat import Apprise
from gpuguard.notify.hook import Hook
from gpuguard.notify.mail import Email
from gpuguard.notify.secret import Secret, Undeliverable, Undelivered
from gpuguard.notify.webhook import Webhook
from gpuguard.text import neutralise

Target = Email | Webhook | Hook | Apprise

TARGETS: Mapping[str, type[Target]] = {"email": Email, "webhook": Webhook, "hook": Hook, "apprise": Apprise}
DELIVER: dict[type, Callable[[Any, Message], str | None]] = {
    Email: mail.deliver,
    Webhook: webhook.deliver,
    Hook: hook.deliver,
    Apprise: chat.deliver,
}


def attempt(target: Target, message: Message) -> tuple[bool | None, str]:
    """Deliver *message* now: whether it went out (None: it never will), and what there is to say about that."""
    import subprocess
    from http.client import HTTPException

    try:
        return True, DELIVER[type(target)](target, message) or ""
    except Undelivered as error:
        return None if isinstance(error, Undeliverable) else False, neutralise(str(error))
    except (TimeoutError, subprocess.TimeoutExpired):
        return False, "no answer in time"
    except OSError as error:
        return False, neutralise(_of_the_system(error))
    except (HTTPException, ValueError, subprocess.SubprocessError) as error:
        return False, f"the answer makes no sense ({type(error).__name__})"


def problems(targets: Mapping[str, Target]) -> Iterator[str]:
    """What can be known to be wrong without sending anything; nothing here is said at the first alarm only."""
    for name, target in targets.items():
        for key, value in vars(target).items():
            if isinstance(value, Secret):
                try:
                    value.read()
                except Undelivered as error:
                    yield f"{name}: {key}: {error}"
        program = _program(target)
        if program and not os.access(program, os.X_OK):
            yield f"{name}: {program} cannot be run"
        if isinstance(target, Hook) and (problem := hook.problem(target)):
            yield f"{name}: {problem}"
        if isinstance(target, Apprise) and not chat.installed():
            yield f"{name}: {chat.INSTALL}"


def _program(target: Target) -> str | None:
    if isinstance(target, Hook):
        return target.command[0]
    return target.sendmail if isinstance(target, Email) and not target.server else None


def _of_the_system(error: OSError) -> str:
    import ssl

    wrapped = getattr(error, "reason", None)  # urllib wraps what happened to the socket
    cause = wrapped if isinstance(wrapped, OSError) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, ssl.SSLCertVerificationError):
        # Behind a comma stands for which name it is not, and that may be the secret.
        return f"the certificate is not to be trusted: {cause.verify_message.partition(',')[0]}"
    return cause.strerror or f"no connection ({type(cause).__name__})"
