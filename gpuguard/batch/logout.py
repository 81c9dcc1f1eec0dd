"""What becomes of this user's processes at logout: systemd-logind may end them, and with them all jobs.

logind ends what is left in the scope of a session, if KillUserProcesses=yes.  What runs in a scope of the user's own
systemd lives on, but only if that lingers: otherwise it ends with the last session, and all of its scopes with it.
Whether a user lingers is a file: `loginctl enable-linger` makes it.  See logind.conf(5) and loginctl(1).
"""

from __future__ import annotations

import os
import re
import subprocess

from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.procfs import read_text
from gpuguard.users import user_name

STAYS = "stays"  # processes live on after the logout
NEEDS_SCOPE = "needs a scope"  # those in a scope of the user's own systemd live on
ENDS = "ends"  # all end
IN_SCOPE = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "--")  # before a command: in such a scope

_LINGER = "/var/lib/systemd/linger"
_SESSION = re.compile(r"/session-[^/]+\.scope\b")
_ASK = ("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
_ANSWER_SECONDS = 5.0


def outliving() -> tuple[str, ...]:
    """Return the words before a command with which it outlives the logout.  Raises InvalidRequest if nothing does."""
    fate = fate_at_logout()
    if fate == ENDS:
        raise InvalidRequest(
            _(
                "this machine ends all processes of a user at logout (KillUserProcesses=yes).  Let yours stay by "
                "`loginctl enable-linger`, then try again."
            )
        )
    return IN_SCOPE if fate == NEEDS_SCOPE else ()


def fate_at_logout() -> str:
    """Return what becomes of processes that this one starts: STAYS, NEEDS_SCOPE or ENDS."""
    if not _SESSION.search(read_text("/proc/self/cgroup") or "") or not _ends_users():
        return STAYS
    return NEEDS_SCOPE if os.path.exists(os.path.join(_LINGER, user_name(os.geteuid()))) else ENDS


def _ends_users() -> bool:
    """Return whether logind ends processes of this user at logout, by its own word.  Without an answer it does not."""
    try:
        done = subprocess.run(
            [*_ASK, "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return told_to_end(done.stdout, user_name(os.geteuid())) if done.returncode == 0 else False


def told_to_end(answer: str, user: str) -> bool:
    """Return whether logind ends the processes of *user*, by the lines of busctl about its settings."""
    kills, only, excluded = [*answer.splitlines(), "", "", ""][:3]
    chosen = re.findall(r'"([^"]*)"', only)
    return kills == "b true" and user not in re.findall(r'"([^"]*)"', excluded) and (not chosen or user in chosen)
