"""Programs that are started with a message: hooks of the administrator, and apprise for chat and push services.

A hook runs as it is written, without a shell, and none of its words come from the message.  It gets the message as JSON
on its standard input, and in its environment GPUGUARD_SUBJECT, GPUGUARD_BODY and GPUGUARD_POLICY, _USER, _DEVICE_UUID
... for each fact that is known.

apprise (Slack, DingTalk, Feishu, WeCom, ntfy, Telegram ...) runs in a process of its own, because it has no bound for
the whole, neither of time nor of memory, and so that the daemon need not carry it.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time

from gpuguard.locale.messages import all_of, sentence
from gpuguard.notify.targets import Apprise, Hook, Undelivered
from gpuguard.notify.templates import Message
from gpuguard.notify.webhook import to_json

INSTALL_APPRISE = sentence("notify.apprise_missing", "apprise is missing: pip install 'gpuguard[notify]'")
_GRACE_SECONDS = 5.0  # for the program timeout to do its work
_MAX_MEMORY = 512 * 2**20  # bytes, of apprise: an answer of 2 MB can be packed so that it unpacks to 2 GiB
_MISSING, _NO_SERVICE, _REFUSED = 10, 11, 12
_ENDS = {
    _MISSING: INSTALL_APPRISE,
    _NO_SERVICE: sentence("notify.no_service", "apprise knows no service with such an address"),
    _REFUSED: sentence("notify.not_taken", "the service did not take the message"),
}
# The address comes on standard input, because everybody can read a command line.
_APPRISE_PROGRAM = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({_MAX_MEMORY}, {_MAX_MEMORY}))
order = json.load(sys.stdin)
sys.path[:] = order["path"]
try:
    import apprise
except ImportError:
    sys.exit({_MISSING})
service = apprise.Apprise()
if not service.add(order["url"]):
    sys.exit({_NO_SERVICE})
sent = service.notify(title=order["title"], body=order["body"], body_format=apprise.NotifyFormat.TEXT)
sys.exit(0 if sent else {_REFUSED})
"""


def run_hook(target: Hook, message: Message) -> None:
    """Run the program of *target* now.  Raises Undelivered, which says why."""
    name, deadline = target.command[0], time.monotonic() + target.timeout
    # coreutils' timeout also ends what the program has started: a script whose curl hangs would otherwise leave one
    # behind each time.
    command = ["timeout", "-s", "KILL", f"{target.timeout:.3f}", *target.command]
    # The program does not get our own environment, which may hold the secrets of other targets.
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **{f"GPUGUARD_{fact.upper()}": str(value) for fact, value in message.facts if value is not None},
        "GPUGUARD_SUBJECT": message.subject,
        "GPUGUARD_BODY": message.body,
        "GPUGUARD_COUNT": str(message.count),
    }
    # Only root can become another user, and a service that could (CAP_SETUID) could become root as well.  So without
    # root the program runs as the service's user, and the daemon keeps all capabilities from its children: the program
    # can signal only that user's processes, and cannot look into the daemon, which has more rights than it.
    uid, gid = _identity(target.user)
    try:
        os.stat(name)
        ended = subprocess.run(
            command, input=to_json(message), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=target.timeout + _GRACE_SECONDS, check=False, cwd="/", env=environment,
            start_new_session=True, user=uid, group=gid, extra_groups=None if uid is None else [],
        )  # fmt: skip
    except OSError as error:
        what = sentence("notify.cannot_run", "{program} cannot be run", program=name)
        raise Undelivered(all_of((what, str(error.strerror)), ": ")) from None
    if ended.returncode and time.monotonic() >= deadline:
        raise Undelivered(sentence("notify.not_done", "{program} was not done in time", program=name))
    if status := ended.returncode:
        raise Undelivered(
            sentence("notify.ends_with", "{program} ends with status {status}", program=name, status=status)
        )


def hook_problem(target: Hook) -> str | None:
    """Say what is wrong with the user that the hook would run as, or return None."""
    if os.geteuid() != 0 and target.user != "nobody":
        return sentence(
            "notify.runs_as_we_do",
            "only root can run a program as {user}: it will run as gpuguard's own user",
            user=repr(target.user),
        )
    try:
        _identity(target.user)
    except Undelivered as error:
        return str(error)
    return None


def _identity(user: str) -> tuple[int | None, int | None]:
    if os.geteuid() != 0:
        return None, None
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        why = sentence("notify.no_such_user", "there is no user {user} to run a hook as", user=repr(user))
        raise Undelivered(why) from None
    return entry.pw_uid, entry.pw_gid


def send_by_apprise(target: Apprise, message: Message) -> None:
    """Send *message* now.  Raises Undelivered, which says why."""
    order = {"path": sys.path, "url": target.url.read(), "title": message.subject, "body": message.body}
    ended = subprocess.run(
        [sys.executable, "-I", "-c", _APPRISE_PROGRAM], input=json.dumps(order).encode("ascii"), cwd="/",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=target.timeout, check=False,
    )  # fmt: skip
    if status := ended.returncode:
        raise Undelivered(
            _ENDS.get(status)
            or sentence("notify.ends_with", "{program} ends with status {status}", program="apprise", status=status)
        )
