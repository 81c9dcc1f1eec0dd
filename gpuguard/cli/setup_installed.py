"""The list of what `gpuguard setup` installed, with the SHA-256 of each file, so that it can be removed again.

A file that is not as it was written is somebody's own by now.  Removes nothing: see setup_remove.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TypedDict

from gpuguard.errors import LockDirectoryError
from gpuguard.files import read_file, write_file
from gpuguard.jsonio import loads

LIST = "/etc/gpuguard/installed.json"
LARGEST = 2**20


class Installed(TypedDict):
    """*files*: path -> SHA-256 of what was written; *folders* and the *user* of the daemon: those that were made."""

    files: dict[str, str]
    folders: list[str]
    user: str | None


def write(path: str, text: str) -> None:
    """Write a file of root's that everybody may read, and remember that it is ours.

    Raises:
        LockDirectoryError: it cannot be written.
    """
    found = installed()
    found["files"][path] = digest(text.encode())
    _enter(found, os.path.dirname(path))
    _put(path, text)


def remember_user(name: str | None) -> None:
    """The account *name* is made for the daemon; None: there is none."""
    _enter({**installed(), "user": name})


def installed() -> Installed:
    """What stands in the list; nothing when there is none, or it is not one."""
    found = Installed(files={}, folders=[], user=None)
    try:
        listed = loads(content_of(LIST) or b"{}")
    except ValueError:
        listed = {}
    listed = listed if isinstance(listed, dict) else {}
    files, folders, user = (listed.get(name) for name in ("files", "folders", "user"))
    if isinstance(files, dict):
        found["files"] = {str(path): str(digest) for path, digest in files.items()}
    if isinstance(folders, list):
        found["folders"] = [str(path) for path in folders]
    found["user"] = user if isinstance(user, str) else None
    return found


def is_as_written(path: str, found: Installed) -> bool:
    """Whether *path* was written by us, and nobody has changed it."""
    content = content_of(path)
    return content is not None and found["files"].get(path) == digest(content)


def content_of(path: str) -> bytes | None:
    """What stands in a file; None where there is none, or it is no file, or of a size that none of ours has."""
    try:
        return read_file(path, LARGEST)
    except OSError:
        return None


def digest(content: bytes) -> str:
    """The SHA-256 of a file, as it stands in the list."""
    return hashlib.sha256(content).hexdigest()


def _enter(found: Installed, *folders: str) -> None:
    missing = {folder for folder in (*folders, os.path.dirname(LIST)) if not os.path.lexists(folder)}
    found = {**found, "folders": sorted({*found["folders"], *missing})}
    _put(LIST, json.dumps({"schema": 1, **found}, indent=1) + "\n")


def _put(path: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise LockDirectoryError(f"{path} cannot be written: {error.strerror}.") from error
