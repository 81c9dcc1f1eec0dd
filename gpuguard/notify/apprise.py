"""Everything else (Slack, DingTalk, Feishu, WeCom, ntfy, Telegram ...), through the apprise package.

    chat: {apprise: {url: {file: /etc/gpuguard/chat-url}}}      the file holds an address of https://appriseit.com

apprise runs in a process of its own: it has no bound for the whole, neither of time nor of memory, and takes 115 ms and
15 MB that the daemon does not need to carry.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.notify.secrets import Secret, Undelivered
from gpuguard.notify.templates import Message
from gpuguard.units import parse_duration

INSTALL = "apprise is missing: pip install 'gpuguard[notify]'"
MOST_BYTES = 512 * 2**20  # of memory: 2 MB of an answer can be packed so that they are 2 GiB
_MISSING, _NO_SERVICE, _REFUSED = 10, 11, 12
_ENDS = {
    _MISSING: INSTALL,
    _NO_SERVICE: "apprise knows no service with such an address",
    _REFUSED: "the service did not take the message",
}
# The address comes by standard input: a command line can be read by everybody.
_PROGRAM = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({MOST_BYTES}, {MOST_BYTES}))
asked = json.load(sys.stdin)
sys.path[:] = asked["path"]
try:
    import apprise
except ImportError:
    sys.exit({_MISSING})
service = apprise.Apprise()
if not service.add(asked["url"]):
    sys.exit({_NO_SERVICE})
sent = service.notify(title=asked["title"], body=asked["body"], body_format=apprise.NotifyFormat.TEXT)
sys.exit(0 if sent else {_REFUSED})
"""


@dataclass(frozen=True)
class Apprise:
    """Send through a chat or push service.

    Args:
        url: where the address of the service lies: {file: PATH} or {env: NAME}, because it holds the token.
        timeout: how long it may take.
        language: of the message.
    """

    url: Secret
    timeout: Annotated[float, parse_duration] = 30.0
    language: Literal["en", "zh"] = "en"


def installed() -> bool:
    """Whether apprise can be imported."""
    from importlib.util import find_spec

    return find_spec("apprise") is not None


def deliver(target: Apprise, message: Message) -> None:
    """Send *message* now.

    Raises:
        Undelivered: and why.
    """
    import subprocess

    asked = {"path": sys.path, "url": target.url.read(), "title": message.subject, "body": message.body}
    ended = subprocess.run(
        [sys.executable, "-I", "-c", _PROGRAM], input=json.dumps(asked).encode("ascii"), cwd="/",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=target.timeout, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise Undelivered(_ENDS.get(ended.returncode, f"apprise ends with status {ended.returncode}"))
