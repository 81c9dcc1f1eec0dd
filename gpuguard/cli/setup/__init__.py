"""Make the directory of the claims for all users of this machine, once, as root.

It is /run/gpuguard: root's, with one lock file per GPU that everybody can lock and no user can remove.  A tmpfiles.d
file makes it again after each boot.  Without it claims work too, by files in /run/lock or /tmp, but containers and
services with a private /tmp do not share them.

  sudo gpuguard setup              install /etc/tmpfiles.d/gpuguard.conf and make user and directories now
  sudo gpuguard setup --systemd    and the service that guards them: it only observes, by /etc/gpuguard/policy.yaml
  sudo gpuguard setup --remove     take away what setup has installed, and nothing else (--dir: that directory alone)
  gpuguard setup --print           only show the tmpfiles.d lines
  gpuguard setup --print-unit      show the unit of the daemon for systemd: see docs/daemon.md
  gpuguard setup --dir PATH        make such a directory somewhere else, without tmpfiles.d
  sudo gpuguard setup --root DIR   write into an image or a chroot what its machines need to set themselves up; with
                                   --systemd the service, too; with --check say what is missing there
  sudo gpuguard setup --broker     for hostile users: the daemon alone can open the lock files and gives the locks
"""

from __future__ import annotations

import argparse
import os
import pwd
import stat
import sys
from contextlib import suppress
from dataclasses import replace
from glob import escape, glob

from gpuguard.backends import RECORDED, is_simulated, parts_of, simulated, simulated_node
from gpuguard.claims.directory import (
    ADMIN_DIRECTORY,
    BROKERED,
    NAME,
    USER,
    Gate,
    LockDirectory,
    lock_directory,
    open_lock,
)
from gpuguard.claims.grants import EARLIER, grant_of, names_of, renew, replace_file
from gpuguard.claims.records import slot_names
from gpuguard.claims.restrictions import COPIES
from gpuguard.cli.options import add_source_options, add_table, sampled
from gpuguard.cli.progress import progress
from gpuguard.cli.setup import image, installation
from gpuguard.cli.setup.installation import LASTING, fault_as
from gpuguard.errors import BackendError, InvalidRequest, LockDirectoryError
from gpuguard.files import closed_after
from gpuguard.locale import N_, _
from gpuguard.model import HEALTH
from gpuguard.units import format_count
from gpuguard.users import user_name

MOST_SHOWN = 10  # missing paths that are listed
_HOW_TO_GUARD = N_(
    "To guard them by policies, as the user {user}:\n  1. sudo gpuguard setup --systemd\n  2. "
    "gpuguard policy explain /etc/gpuguard/policy.yaml: what it would do.  Change the file as you "
    "like\n  3. gpuguard events --follow: what it would have done.  It acts only when you switch it "
    "on twice: see docs/daemon.md"
)
_HOW_TO_BROKER = N_(
    "The daemon alone gives the GPUs of this machine from now on.  Without it nothing can be "
    "claimed; what is claimed stays.\n  1. systemctl edit gpuguard, and add, so that it can make "
    "lock files anew:\n       [Service]\n       ReadWritePaths={path}/lock\n  2. systemctl restart "
    "gpuguard: a daemon that runs already does not know of it\nBack: gpuguard setup --no-broker.  "
    'What it stops, and what it does not: docs/daemon.md, "Hostile users".'
)
_IMAGE_READY = N_(
    "{root} is ready: a machine that boots from it makes {path}, and its service, which only observes, the lock files "
    "of its GPUs."
)
_IMAGE_READY_WITHOUT_SERVICE = N_(
    "{root} is ready: a machine that boots from it makes {path}.  Run `sudo gpuguard setup` on that machine for the "
    "lock files of its GPUs; with --systemd here its service makes them."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser.add_mutually_exclusive_group(),
        ("--print", None, "show the tmpfiles.d lines, change nothing"),
        ("--check", None, "say what setup would make or change, change nothing; exit code 1 if there is something"),
        ("--systemd", None, "install and start the service, too; until you say so it only observes"),
        (
            "--remove",
            None,
            "remove what setup installed and was not changed; log and history stay, and lock files that are held",
        ),
        ("--lock-files", None, "only make the lock files of GPUs that are new; the service does so when it starts"),
        ("--print-unit", None, "show the daemon's unit for systemd, change nothing"),
    )
    add_table(
        parser,
        (
            "--daemon-user",
            "USER",
            "as whom the daemon runs; root: without a user of its own (default: gpuguard, with --dir root)",
        ),
    )
    parser.add_argument(
        "--broker",
        action=argparse.BooleanOptionalAction,
        help="make the lock files the daemon's alone, which then gives the locks, or everybody's again; for hostile "
        "users: see docs/daemon.md (default: as they are, at first everybody's)",
    )
    add_table(
        parser,
        ("--root", "DIR", "write below DIR only, an image or a chroot, start nothing, and ask nothing of this machine"),
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    path = args.dir or ADMIN_DIRECTORY
    if args.root is not None:
        return _prepare_image(args)
    if args.remove:
        return installation.remove_directory(args.dir) if args.dir else installation.remove(ADMIN_DIRECTORY)
    if args.print_unit:
        print(installation.unit_for(args.daemon_user or USER), end="")
        if doubt := installation.doubts_about(sys.executable):
            print(f"gpuguard: {doubt}", file=sys.stderr)
        return 0
    _refuse_what_cannot_be(args)
    uuids = _uuids(args)
    if args.lock_files:
        make_lock_files(lock_directory(args.dir), uuids)
        return 0
    is_brokered = _is_brokered(path)  # as it is now, which setup keeps unless asked to change it
    keeper = user_name(os.lstat(f"{path}/lock/gate").st_uid) if is_brokered else "root"
    user = args.daemon_user or (keeper if args.dir else USER)
    broker = is_brokered if args.broker is None else args.broker
    lines = tmpfiles_lines(path, uuids, user, broker=broker)
    if args.print:
        print("\n".join(lines))
        return 0
    if args.check:
        texts = [lines, tmpfiles_lines(path, [], user, broker=broker)]
        return _check(path, uuids, user, [] if args.dir else ["\n".join(text) + "\n" for text in texts])
    before = _installed(path)

    if args.dir is None:
        if os.geteuid() != 0:
            raise LockDirectoryError(
                _(
                    "only root can make {admin_directory}.  Run `sudo gpuguard setup`; or `gpuguard setup --dir "
                    "PATH` for a directory of your own, which only you will use."
                ).format(admin_directory=ADMIN_DIRECTORY)
            )
        if user != "root":
            installation.make_user(user)
        installation.write(installation.TMPFILES, "\n".join(lines) + "\n")
        installation.mount_claims(f"{ADMIN_DIRECTORY}/claims")
    if args.broker and os.geteuid() != 0:
        raise LockDirectoryError(_("only root can give the lock files to the daemon alone.  Run it with sudo."))
    make_directory(path, uuids)
    if user != "root":
        make_daemon_directory(path, user)
    if broker or _is_brokered(path):
        change_broker(path, user, brokered=broker)

    if args.systemd:
        installation.install_service(user)
    _say_what_changed(before, _installed(path))
    _say_ready(path, args.dir, len(uuids))
    if broker:
        print(_(_HOW_TO_BROKER).format(path=path))
    elif args.dir is None and not args.systemd:
        print(_(_HOW_TO_GUARD).format(user=user))
    return 0


def _refuse_what_cannot_be(args: argparse.Namespace) -> None:
    if args.systemd:
        if args.dir:
            raise InvalidRequest(
                _("--systemd is about {admin_directory}: leave --dir away, and GPUGUARD_DIR.").format(
                    admin_directory=ADMIN_DIRECTORY
                )
            )
        installation.refuse_where_it_cannot_work(args.daemon_user or USER)
    if args.dir is None and not args.print and (args.backend.startswith(RECORDED) or is_simulated(args.backend)):
        raise InvalidRequest(
            _(
                "{admin_directory} is for the GPUs of this machine, not for those of --backend {backend}.\n"
                "`unset GPUGUARD_BACKEND`, or name another directory with --dir.  The simulated node needs no "
                "setup."
            ).format(admin_directory=ADMIN_DIRECTORY, backend=args.backend)
        )


def _prepare_image(args: argparse.Namespace) -> int:
    """Write what an image needs, or with --check look for it."""
    for name in ("dir", "print", "remove", "lock_files", "print_unit", "broker"):
        if getattr(args, name) not in (None, False):
            raise InvalidRequest(
                _("--{name} does not go with --root: it is about a machine that runs.").format(
                    name=name.replace("_", "-") + (_(" (or GPUGUARD_DIR)") if name == "dir" else "")
                )
            )
    root, user = image.image(args.root), args.daemon_user or USER
    with_service = args.systemd or (args.check and image.has_service(root))
    lines = "\n".join(tmpfiles_lines(ADMIN_DIRECTORY, [], user)) + "\n"
    files = image.wanted(root, lines, user, service=with_service)
    if args.check:
        faults = image.faults(root, files)
        print("\n".join(faults or [_("Everything is as `gpuguard setup` would make it.")]))
        return bool(faults)
    before = image.found_of(root, files)
    image.write(root, files)
    _say_what_changed(before, image.found_of(root, files))
    text = _IMAGE_READY if image.has_service(root) else _IMAGE_READY_WITHOUT_SERVICE
    print(_(text).format(root=root, path=ADMIN_DIRECTORY))
    if with_service and (doubt := image.lacks_python(root)):
        print(f"gpuguard: {doubt}", file=sys.stderr)
    return 0


def _check(path: str, uuids: list[str], user: str, lines: list[str]) -> int:
    """Print what is missing or is not as this version makes it, and return 1 if there is something, else 0.

    *lines* holds the texts that the file for systemd-tmpfiles may have; the second one will do only where the service
    makes the lock files of GPUs at each boot, as in an image.  It is empty if this directory has no such file.
    """
    folders = [path, f"{path}/lock", f"{path}/claims", *([] if user == "root" else [f"{path}/{NAME}"])]
    places = [*folders, *(f"{path}/lock/{name}" for name in _lock_names(uuids))]
    # Leave out what is missing only because the directory around it is.
    found = [place for place in places if not os.path.lexists(place)]
    found = [place for place in found if os.path.dirname(place) not in found]
    missing = [_("{path} is missing.").format(path=place) for place in found[:MOST_SHOWN]]
    if len(found) > MOST_SHOWN:
        missing.append(_("and {number} more").format(number=len(found) - MOST_SHOWN))
    if lines:
        texts = {installation.TMPFILES: lines[:1]}
        if os.path.lexists(installation.UNIT):
            texts = {installation.TMPFILES: lines, installation.UNIT: [installation.unit_for(user)]}
        for file, allowed in texts.items():
            if installation.content_of(file) not in [installation.sealed(text.encode()) for text in allowed]:
                other = _("{path} is not as this version of gpuguard writes it.")
                missing.append((other if os.path.lexists(file) else _("{path} is missing.")).format(path=file))
    account = installation.account_of(user)
    daemons = f"{path}/{NAME}"
    if user != "root" and os.path.isdir(daemons) and (not account or os.stat(daemons).st_uid != account.pw_uid):
        missing.append(_("{path} does not belong to {user}.").format(path=daemons, user=user))
    print("\n".join(missing or [_("Everything is as `gpuguard setup` would make it.")]))
    return bool(missing)


def _installed(path: str) -> dict[str, object]:
    """Return what setup makes, as it is now: path -> its content, or its mode and its owner."""
    own = installation
    files = {file: own.content_of(file) for file in (own.TMPFILES, own.SYSUSERS, own.MOUNT_UNIT, own.UNIT, own.POLICY)}
    found: dict[str, object] = {file: content for file, content in files.items() if content is not None}
    locks = glob(f"{escape(path)}/lock/*")
    for place in (path, f"{path}/lock", f"{path}/claims", f"{path}/{NAME}", *locks):
        with suppress(OSError):
            status = os.lstat(place)
            found[place] = status.st_mode, status.st_uid
    return found


def _say_what_changed(before: dict[str, object], after: dict[str, object]) -> None:
    made = [place for place in after if place not in before]
    changed = [place for place in after if place in before and before[place] != after[place]]
    for text, places in ((_("Made: {what}."), made), (_("Changed: {what}."), changed)):
        locks = [place for place in places if "/lock/" in place]
        what = [place for place in places if place not in locks]
        what += [format_count(len(locks), "lock file")] if locks else []
        if what:
            print(text.format(what=", ".join(what)))
    if not made and not changed:
        print(_("Nothing had to be changed."))


def _say_ready(path: str, own: str | None, gpus: int) -> None:
    next_step = _("Try `gpuguard who`.") if gpus else _("Run it again when the driver works.")
    if own:
        next_step = _("Use it with --dir {own} or GPUGUARD_DIR={own}.").format(own=own)
    print(
        _("{path} is ready: {count}.  {next_step}").format(
            path=path, count=format_count(gpus, "GPU"), next_step=next_step
        )
    )
    if own is None and not os.path.ismount(f"{path}/claims"):
        print(
            _(
                "{path}/claims lies on the file system of {path}, which any user can fill by writing there, "
                "until the next boot (without systemd: until it is mounted by /etc/fstab)."
            ).format(path=path)
        )


def _uuids(args: argparse.Namespace) -> list[str]:
    parts = (part.partition(":") for part in parts_of(args.backend))
    nodes = [spec for kind, _colon, spec in parts if kind == simulated.Simulated.name]
    try:
        if any(simulated_node.load(simulated.directory(node)) is None for node in nodes):
            # Reading it would make one of the default kind, whose GPUs are not those of the node that is meant.
            raise InvalidRequest(
                _(
                    "there is no simulated node yet.  Start the one that you want first, such as `gpuguard sim "
                    "start {default_spec}`, so that its GPUs get their lock files."
                ).format(default_spec=simulated.DEFAULT_SPEC)
            )
        with progress(_("reading the GPUs")):
            devices = sampled(args, {HEALTH}).devices
    except BackendError as error:
        print(_("gpuguard: no lock files for GPUs yet, because {error}").format(error=error), file=sys.stderr)
        return []
    return [device.uuid for device in devices if not device.uuid.startswith("unknown")]


def make_directory(path: str, uuids: list[str]) -> None:
    """Make the directory with a lock file for each device; harmless when it is there already."""
    modes = {path: 0o755, f"{path}/lock": 0o755, f"{path}/claims": 0o755 if os.geteuid() else 0o1777}
    with fault_as(_("{path} cannot be made").format(path=path), _("  Name another directory with --dir.")):
        for folder, mode in modes.items():
            if not os.path.lexists(folder):
                os.mkdir(folder)
                os.chmod(folder, mode)  # whatever the umask is
    make_lock_files(lock_directory(path), uuids)


def make_daemon_directory(path: str, name: str) -> None:
    """Make the directory of the daemon in *path*, or give the one that is there to *name*."""
    place = f"{path}/{NAME}"
    if (account := installation.account_of(name)) is None:
        raise LockDirectoryError(_("there is no user {name}.  `sudo gpuguard setup` makes gpuguard.").format(name=name))
    with fault_as(_("{place} cannot be made for {name}").format(place=place, name=name)):
        if not os.path.lexists(place):
            os.mkdir(place, 0o700)
        # A descriptor is used, because what is given away must be the directory itself.
        with closed_after(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as opened:
            os.fchown(opened, account.pw_uid, account.pw_gid)
            os.fchmod(opened, 0o755)


def tmpfiles_lines(path: str, uuids: list[str], user: str = "root", *, broker: bool = False) -> list[str]:
    """Return the lines that tell systemd-tmpfiles what to do at boot: see tmpfiles.d(5)."""
    keeper = user if broker else "root"
    files = dict.fromkeys(_lock_names(uuids), f"0600 {keeper} {keeper}" if broker else "0444 root root")
    files["queue"] = "0444 root root"
    return [
        "# Claims of GPUs: made by `gpuguard setup`.  Run it again when GPUs or their parts have changed.",
        f"d {path} 0755 root root -",
        f"d {path}/lock 0755 {keeper} {keeper} -",
        f"d {path}/claims 1777 root root -",
        *([] if user == "root" else [f"d {path}/{NAME} 0755 {user} {user} -"]),
        *(f"f {path}/lock/{name} {given} -" for name, given in files.items()),
        *(
            f"C {folder}/{name} 0644 {owner} {owner} - {COPIES[folder]}/{name}"
            for folder, owner in ((path, "root"), (f"{path}/{NAME}", user))
            for name in LASTING
            if folder in COPIES and not (user == "root" and folder != path)
        ),
    ]


def _lock_names(uuids: list[str]) -> list[str]:
    """Return the names of all lock files of a machine, because only root can make one later."""
    slots = [name for uuid in uuids for name in slot_names(uuid)]
    return ["gate", "queue", *uuids, *(f"{uuid}.nested" for uuid in uuids), *slots]


def make_lock_files(directory: LockDirectory, uuids: list[str]) -> None:
    """Make the lock files of these devices that are not there yet."""
    for name in _lock_names(uuids):
        os.close(open_lock(directory, name))


def _is_brokered(path: str) -> bool:
    """Return whether the lock files of *path* are now the daemon's alone."""
    try:
        found = os.lstat(f"{path}/lock/gate")
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == BROKERED


def change_broker(path: str, user: str, *, brokered: bool) -> None:
    """Give the lock files to *user* alone, or to everybody.  The gate comes last, because it says whose they are."""
    account = pwd.getpwnam(user)
    directory = lock_directory(path)
    directory = replace(directory, keeper=account.pw_uid if brokered else directory.keeper)
    with fault_as(_("{locks} cannot be changed").format(locks=directory.locks), _("  Run it again.")):
        with Gate(directory):
            if not brokered and _is_brokered(path):
                # A share that the daemon gave holds only its slot, which keeps no process from taking the lock of the
                # device itself.
                slots = grant_of(directory, [name for name in names_of(directory) if ".slot" in name])
                if shared := sorted({name.partition(".slot")[0] for name in slots}):
                    raise LockDirectoryError(
                        _(
                            "{count} GPUs are shared by claims that the daemon gave ({devices}): wait until these "
                            "have ended (`gpuguard who` shows them), then run it again.  Nothing was changed."
                        ).format(count=len(shared), devices=", ".join(shared))
                    )
            for name in names_of(directory):
                _change_file(directory, name, account, brokered=brokered)
        if not brokered:
            os.chown(directory.locks, 0, 0)
        _change_file(directory, "gate", account, brokered=brokered)
        if brokered:
            replace_file(directory, "gate")  # a process with the old one open would make the daemon wait
            os.chown(directory.locks, account.pw_uid, account.pw_gid)


def _change_file(directory: LockDirectory, name: str, account: pwd.struct_passwd, *, brokered: bool) -> None:
    with closed_after(open_lock(directory, name)) as descriptor:
        was_open = stat.S_IMODE(os.fstat(descriptor).st_mode) != BROKERED
        os.fchown(descriptor, *((account.pw_uid, account.pw_gid) if brokered else (0, 0)))
        os.fchmod(descriptor, BROKERED if brokered else 0o444)
        if brokered and was_open and name != "gate":
            # Write to the file that was opened, whatever bears its name by now, because the directory may already be
            # another user's.
            with open(f"/proc/self/fd/{descriptor}", "wb") as file:
                file.write(EARLIER)
        if brokered and name != "gate":
            renew(directory, name, descriptor)
