"""What `gpuguard setup --root DIR` writes into an image or a chroot: files with which machines that run it do the rest.

All of it lies below DIR.  A link on the way is refused, because it means a path of the image but would lead into this
machine if it were followed from here.  Nothing is started, and this machine's users, GPUs and services are not
consulted.  Does not make the claim directory, which every boot makes anew: see setup.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuguard.claims.directory import ADMIN_DIRECTORY
from gpuguard.cli.setup import installation as own
from gpuguard.errors import InvalidRequest, LockDirectoryError
from gpuguard.files import closed_after, open_along, write_file
from gpuguard.locale import _

_WANTS = ".wants/"  # in the paths of links by which systemd starts units


def image(name: str) -> str:
    """Return the directory that --root names, without links.  Raises InvalidRequest: it is none, or this machine's."""
    root = os.path.realpath(name)
    if not os.path.isdir(root) or root == "/":
        raise InvalidRequest(_("--root {name}: name the directory of an image or a chroot.").format(name=name))
    return root


@contextmanager
def _place(root: str, path: str, *, make: bool = False) -> Iterator[str]:
    """Name the file at *path* of the image; in this block the name holds, whatever becomes of the directories above it.

    Args:
        make: whether to make the directories that are missing.

    Raises:
        FileNotFoundError: a directory is missing.
        LockDirectoryError: one is a link, or cannot be opened.
    """

    def open_beside(here: int, name: str, way: str, flags: int) -> int:
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=here)
        try:
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=here)
        except FileNotFoundError:
            raise
        except OSError as error:
            # With O_DIRECTORY, a link is reported as no directory.
            is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
            reason = _("it is a link, which can lead out of the image, or no directory") if is_link else error.strerror
            raise LockDirectoryError(
                _("{path} cannot be used: {reason}.  Nothing is written there.").format(path=way, reason=reason)
            ) from error

    folder, name = os.path.split(path)
    with closed_after(open_along(f"{root}{folder}", os.O_PATH | os.O_DIRECTORY, open_beside)) as opened:
        yield f"/proc/self/fd/{opened}/{name}"


def _content(root: str, path: str) -> bytes | None:
    """Return the content of a file of the image, or the target of a link, or None if there is nothing."""
    try:
        with _place(root, path) as place:
            return os.readlink(place).encode() if os.path.islink(place) else own.content_of(place)
    except FileNotFoundError:
        return None


def wanted(root: str, lines: str, user: str, *, service: bool) -> dict[str, bytes]:
    """Return the content of each file that the image needs, and the target of each link, by its path in the image.

    A file that a package or the admin of the image has put there stays as it is.

    Args:
        lines: the lines for systemd-tmpfiles.
        service: whether the image gets the daemon.

    Raises:
        LockDirectoryError: the image has another unit of the service, or the service cannot work there.
    """
    texts = {own.TMPFILES: lines}
    accounts = (_content(root, "/etc/passwd") or b"").splitlines()
    if user != "root" and not any(line.startswith(f"{user}:".encode()) for line in accounts):
        texts[own.SYSUSERS] = own.SYSUSERS_LINES.format(name=user)
    is_in_fstab = own.is_in_fstab(_content(root, own.FSTAB), f"{ADMIN_DIRECTORY}/claims")
    if not (is_in_fstab or _is_others(root, own.MOUNT_UNIT)):
        texts[own.MOUNT_UNIT] = own.packaged(own.MOUNT)
    if service:
        python = _python_of(root)
        if doubt := own.doubts_about(python):
            raise LockDirectoryError(_("{doubt}\nNothing was changed.").format(doubt=doubt))
        if _is_others(root, own.UNIT):
            text = _("{root} has a unit of the service that is not of setup: enable that.  Nothing was changed.")
            raise LockDirectoryError(text.format(root=root))
        texts[own.UNIT] = own.unit_for(user, python)
        if _content(root, own.POLICY) is None:
            texts[own.POLICY] = own.packaged("policy.yaml")
    files = {path: own.sealed(text.encode()) for path, text in texts.items()}
    for unit in {own.MOUNT_UNIT, own.UNIT} & texts.keys():
        target = re.findall(r"^WantedBy=(.+)$", texts[unit], re.MULTILINE)[0]
        files[f"{os.path.dirname(unit)}/{target}{_WANTS}{os.path.basename(unit)}"] = unit.encode()
    return files


def _is_others(root: str, unit: str) -> bool:
    """Whether *unit* comes from a package or is the admin's own."""
    if _content(root, f"{own.PACKAGED[0]}/{os.path.basename(unit)}") is not None:
        return True
    found = _content(root, unit)
    return found is not None and not own.is_sealed(found)


def _python_of(root: str) -> str:
    """Return the path of the Python that runs now, as seen in the image if it lies there."""
    folder, name = os.path.split(sys.executable)
    inside = f"{os.path.realpath(folder)}/{name}"
    return inside.removeprefix(root) if inside.startswith(f"{root}/") else sys.executable


def has_service(root: str) -> bool:
    """Whether setup has written the unit of the daemon."""
    return _content(root, own.UNIT) is not None and not _is_others(root, own.UNIT)


def lacks_python(root: str) -> str | None:
    """Say in words why the service cannot start in the image as it is, or return None if it can."""
    python = _python_of(root)
    with suppress(FileNotFoundError, LockDirectoryError), _place(root, python) as place:
        if os.path.lexists(place):
            return None
    return _("{root} has no {python}: the service starts there once gpuguard is installed for that Python.").format(
        root=root, python=python
    )


def found_of(root: str, files: dict[str, bytes]) -> dict[str, object]:
    """Return those of *files* that exist, with their content as it is now, by their path on this machine."""
    found = {f"{root}{path}": _content(root, path) for path in files}
    return {path: content for path, content in found.items() if content is not None}


def write(root: str, files: dict[str, bytes]) -> None:
    """Write the files and make the links that are not as wanted() says."""
    for path, content in files.items():
        if _content(root, path) == content:
            continue
        fault = _("{path} cannot be written").format(path=f"{root}{path}")
        with own.fault_as(fault), _place(root, path, make=True) as place:
            if _WANTS not in path:
                write_file(place, content)
            elif not os.path.lexists(place):
                os.symlink(content, place)


def faults(root: str, files: dict[str, bytes]) -> list[str]:
    """Say in sentences what write() would do."""
    sentences = []
    for path, content in files.items():
        found = _content(root, path)
        if found != content:
            sentence = _("{path} is not as this version of gpuguard writes it.") if found else _("{path} is missing.")
            sentences.append(sentence.format(path=f"{root}{path}"))
    return sentences
