"""Make the directory of the claims for all users of this machine, once, as root.

It is /run/gpuguard: root's, with one lock file per GPU that everybody can lock and nobody can remove.  A tmpfiles.d
file makes it again after each boot.  Without it claims work too, by files in /run/lock or /tmp, but containers and
services with a private /tmp would not share them.

  sudo gpuguard setup              install /etc/tmpfiles.d/gpuguard.conf and make the directory now
  gpuguard setup --print           only show the tmpfiles.d lines
  gpuguard setup --dir PATH        make such a directory somewhere else, without tmpfiles.d
"""

from __future__ import annotations

import argparse
import os
import sys

from gpuguard.cli.options import add_source_options, backend_of
from gpuguard.errors import BackendError, LockDirectoryError
from gpuguard.lockfiles import ADMIN_DIRECTORY, lock_directory, open_lock

TMPFILES = "/etc/tmpfiles.d/gpuguard.conf"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--print", action="store_true", help="show the tmpfiles.d lines, change nothing")
    group.add_argument(
        "--remove", action="store_true", help=f"remove {TMPFILES}; the lock files stay until the next boot"
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    path = args.dir or ADMIN_DIRECTORY
    if args.remove:
        return _remove()
    uuids = _uuids(args)
    lines = tmpfiles_lines(path, uuids)
    if args.print:
        print("\n".join(lines))
        return 0
    if args.dir is None:
        if os.geteuid() != 0:
            raise LockDirectoryError(
                f"only root can make {ADMIN_DIRECTORY}.  Run `sudo gpuguard setup`; or `gpuguard setup --dir PATH` "
                "for a directory of your own, which nobody but you will use."
            )
        _install(lines)
    make_directory(path, uuids)
    print(f"{path} is ready: {len(uuids)} GPU{'s' * (len(uuids) != 1)}." + _next_step(args, uuids))
    return 0


def make_directory(path: str, uuids: list[str]) -> None:
    """Make the directory with a lock file for each device; harmless when it is there already.

    Raises:
        LockDirectoryError: it cannot be made, or what is there cannot be trusted.
    """
    root = os.geteuid() == 0
    modes = {path: 0o755, f"{path}/lock": 0o755, f"{path}/claims": 0o1777 if root else 0o755}
    try:
        for place, mode in modes.items():
            if not os.path.lexists(place):
                os.mkdir(place)
                os.chmod(place, mode)  # whatever the umask
    except OSError as error:
        raise LockDirectoryError(
            f"{path} cannot be made: {error.strerror}.  Name another directory with --dir."
        ) from error
    directory = lock_directory(path)
    for name in ("gate", *uuids, *(f"{uuid}.nested" for uuid in uuids)):
        os.close(open_lock(directory, name))


def tmpfiles_lines(path: str, uuids: list[str]) -> list[str]:
    """What systemd-tmpfiles must do at boot: see tmpfiles.d(5)."""
    names = ["gate", *uuids, *(f"{uuid}.nested" for uuid in uuids)]
    return [
        "# Claims of GPUs: made by `gpuguard setup`.  Run it again when GPUs or MIG instances have changed.",
        f"d {path} 0755 root root -",
        f"d {path}/lock 0755 root root -",
        f"d {path}/claims 1777 root root -",
        *(f"f {path}/lock/{name} 0444 root root -" for name in names),
    ]


def _uuids(args: argparse.Namespace) -> list[str]:
    from gpuguard.model import HEALTH

    backend = backend_of(args)
    try:
        return [device.uuid for device in backend.sample({HEALTH}).devices if not device.uuid.startswith("unknown")]
    except BackendError as error:
        print(f"gpuguard: no lock files for GPUs yet, because {error}", file=sys.stderr)
        return []
    finally:
        backend.close()


def _install(lines: list[str]) -> None:
    try:
        os.makedirs(os.path.dirname(TMPFILES), exist_ok=True)
        with open(TMPFILES, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as error:
        raise LockDirectoryError(f"{TMPFILES} cannot be written: {error.strerror}.") from error


def _remove() -> int:
    try:
        os.unlink(TMPFILES)
    except FileNotFoundError:
        print(f"{TMPFILES} is not there.")
        return 1
    except OSError as error:
        raise LockDirectoryError(f"{TMPFILES} cannot be removed: {error.strerror}.  Run it as root.") from error
    # The lock files stay: a file that is removed under its holder lets a second one in.
    print(f"{TMPFILES} is removed.  {ADMIN_DIRECTORY} stays until the next boot, because claims may live in it.")
    return 0


def _next_step(args: argparse.Namespace, uuids: list[str]) -> str:
    if args.dir:
        return f"  Use it with --dir {args.dir} or GPUGUARD_DIR={args.dir}."
    return "  Try `gpuguard who`." if uuids else "  Run it again when the driver works."
