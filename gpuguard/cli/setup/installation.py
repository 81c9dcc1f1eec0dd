"""What `gpuguard setup` installs on the machine and removes: files below /etc, the daemon's user, service and mount.

Each file begins with the SHA-256 of the rest, so that a file that an admin has changed is known as theirs.  It stays,
and so do the log and the history, which become root's.  The lock files go only while no process holds one of them,
because a file that is removed under its holder lets a second one in.  Does not make the claim directory: see setup.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuguard.claims.directory import USER, is_same_file, lock_directory, try_flock
from gpuguard.claims.restrictions import COPIES, DENIED, QUARANTINED
from gpuguard.cli.progress import progress
from gpuguard.enforcement.identity import uid_min
from gpuguard.errors import GpuguardError, LockDirectoryError
from gpuguard.files import close_all, closed_after, open_in_place, read_file, write_file
from gpuguard.history.audit_log import MACHINE_EVENTS
from gpuguard.history.queries import MACHINE_STATE
from gpuguard.jsonio import loads
from gpuguard.locale import N_, _
from gpuguard.queue.settings import LAST_GOOD

SERVICE, MOUNT = "gpuguard.service", "run-gpuguard-claims.mount"
UNIT = f"/etc/systemd/system/{SERVICE}"
MOUNT_UNIT = f"/etc/systemd/system/{MOUNT}"
POLICY = "/etc/gpuguard/policy.yaml"
SYSUSERS = "/etc/sysusers.d/gpuguard.conf"
TMPFILES = "/etc/tmpfiles.d/gpuguard.conf"
# These outlive a boot: see claims.restrictions.COPIES.
LASTING = (f"{DENIED}.json", f"{QUARANTINED}.json", LAST_GOOD)
LIST = "/etc/gpuguard/installed.json"  # where gpuguard 0.1 kept the SHA-256 of what it had installed
PACKAGED = ("/usr/lib/systemd/system", "/lib/systemd/system")  # where a package puts its units
FSTAB = "/etc/fstab"
BOOTED = "/run/systemd/system"  # exists while systemd is the first process: sd_booted(3)

SYSUSERS_LINES = """\
# The user of the daemon.
u {name} - "gpuguard, the guard of the GPUs" - -
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # gpuguard/
_LARGEST = 2**20  # bytes: no file of ours is larger
_SEAL = "# Written by `gpuguard setup`.  The SHA-256 of what follows: "
_PYTHON = "/usr/bin/python3"  # in the packaged unit
_SYSTEM_WIDE = N_("Install gpuguard for the system, for example into /opt/gpuguard, and call setup from there.")


@contextmanager
def fault_as(text: str, advice: str = "") -> Iterator[None]:
    """Turn what the system refuses in this block into a LockDirectoryError: *text*, the reason, *advice*."""
    try:
        yield
    except OSError as error:
        raise LockDirectoryError(f"{text}: {error.strerror}.{advice}") from error


def fault_of(*command: str) -> str | None:
    """Run a program; return in its words why it failed, or None if it did not."""
    with fault_as(_("{command} cannot be started").format(command=command[0])):
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return (
        (" ".join(done.stderr.split()) or _("exit code {returncode}").format(returncode=done.returncode))
        if done.returncode
        else None
    )


def systemctl(*words: str, advice: str = "") -> None:
    with progress(f"systemctl {' '.join(words)}"):
        reason = fault_of("systemctl", *words)
    if reason:
        raise LockDirectoryError(
            _("`systemctl {words}` failed: {reason}  {advice}")
            .format(words=" ".join(words), reason=reason, advice=advice)
            .rstrip()
        )


def write(path: str, text: str) -> None:
    """Write a file that belongs to root and that everybody may read, sealed as ours."""
    with fault_as(_("{path} cannot be written").format(path=path)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, sealed(text.encode()))


def content_of(path: str) -> bytes | None:
    """Return the content of a file, or None if it is missing, no regular file, or larger than any of ours."""
    try:
        return read_file(path, _LARGEST)
    except OSError:
        return None


def is_as_written(path: str) -> bool:
    content = content_of(path) or b""
    return is_sealed(content) or hashlib.sha256(content).hexdigest() == listed("files", path)


def listed(*keys: str) -> str | None:
    """Return the text at *keys* of the list that gpuguard 0.1 kept, or None if there is none."""
    try:
        found = loads(content_of(LIST) or b"{}")
    except ValueError:
        return None
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def sealed(content: bytes) -> bytes:
    """Put *content* below a line that says that it is ours."""
    return f"{_SEAL}{hashlib.sha256(content).hexdigest()}\n".encode() + content


def is_sealed(content: bytes) -> bool:
    """Whether *content* is ours and was not changed since."""
    return content == sealed(content.partition(b"\n")[2])


def packaged(name: str) -> str:
    for folder in (_PACKAGE, os.path.dirname(_PACKAGE)):
        with suppress(FileNotFoundError):
            return Path(folder, "packaging", name).read_text(encoding="utf-8")
    raise GpuguardError(
        _("{name} is not installed with this package: take it from packaging/ of its sources.").format(name=name)
    )


def account_of(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def make_user(name: str) -> None:
    """Make the system user *name*, unless there is one."""
    account = account_of(name)
    if account is None:
        # The file comes first, with and without systemd, because it says that the user is ours to remove.
        write(SYSUSERS, SYSUSERS_LINES.format(name=name))
        if sysusers := shutil.which("systemd-sysusers"):
            fault_of(sysusers, SYSUSERS)
        elif useradd := shutil.which("useradd"):
            home = ("--no-create-home", "--home-dir", "/", "--shell", "/usr/sbin/nologin")
            fault_of(useradd, "--system", "--user-group", *home, name)
        account = account_of(name)
    if account is None:
        os.unlink(SYSUSERS)
        raise LockDirectoryError(
            _(
                "the user {name} cannot be made here: neither systemd-sysusers nor useradd does it.  Make it by "
                "hand, or let the daemon run as root: `gpuguard setup --daemon-user root`."
            ).format(name=name)
        )
    if account.pw_uid >= uid_min() and name == USER:
        raise LockDirectoryError(
            _(
                "{name} is the account of a person here (uid {pw_uid}).  Name another user for the daemon with "
                "--daemon-user, one with a uid of the system's."
            ).format(name=name, pw_uid=account.pw_uid)
        )


def made_user() -> str | None:
    """Return the user that setup has made, or None if it was there before or its file was changed."""
    if not is_as_written(SYSUSERS):
        return listed("user")
    lines = (content_of(SYSUSERS) or b"").decode(errors="replace").splitlines()
    return next((line.split()[1] for line in lines if line.startswith("u ")), None)


def mount_claims(claims: str) -> None:
    """Limit what users can write in *claims*: at each boot, and now if that directory is yet to be made.

    A mount over a directory that is in use would hide what lives there from some (containers) and not from others, so
    it waits for the next boot: the unit has this as its condition.
    """
    if _is_packaged(MOUNT) or is_in_fstab(content_of(FSTAB), claims):
        return
    if not shutil.which("systemctl"):
        if not os.path.lexists(claims):
            os.makedirs(claims, 0o755)
            lines = packaged(MOUNT).splitlines()
            options = next(line.removeprefix("Options=") for line in lines if line.startswith("Options="))
            if reason := fault_of("mount", "-t", "tmpfs", "-o", options, "tmpfs", claims):
                print(reason, file=sys.stderr)
            os.chmod(claims, 0o1777)
        return
    if os.path.lexists(MOUNT_UNIT) and not is_as_written(MOUNT_UNIT):
        return  # the admin's own
    write(MOUNT_UNIT, packaged(MOUNT))
    if is_booted():
        systemctl("daemon-reload")
    systemctl("enable", *(["--now"] if is_booted() else []), MOUNT)


def is_in_fstab(fstab: bytes | None, claims: str) -> bool:
    """Whether *fstab*, the content of that file, mounts the file system of *claims*."""
    lines = (fstab or b"").decode(errors="replace").splitlines()
    return any(line.split()[1:2] == [claims] for line in lines if not line.lstrip().startswith("#"))


def _is_packaged(unit: str) -> str | None:
    return next((path for folder in PACKAGED if os.path.exists(path := f"{folder}/{unit}")), None)


def refuse_where_it_cannot_work(user: str) -> None:
    """Check everything that the service needs before anything is changed."""
    if os.geteuid() != 0:
        raise LockDirectoryError(_("only root can install a service.  Run `sudo gpuguard setup --systemd`."))
    if not shutil.which("systemctl"):
        raise LockDirectoryError(_("there is no systemd here.  Let what starts services here start `gpuguard daemon`."))
    if path := _is_packaged(SERVICE):
        raise LockDirectoryError(
            _("a package has installed {path}: run `sudo systemctl enable --now gpuguard`.").format(path=path)
        )
    if doubt := doubts_about(sys.executable) or open_to_others(sys.executable, _PACKAGE):
        raise LockDirectoryError(_("{doubt}\nNothing was changed.").format(doubt=doubt))
    ours = is_as_written(UNIT) or content_of(UNIT) == unit_for(user).encode()
    if os.path.lexists(UNIT) and not ours:
        raise LockDirectoryError(
            _(
                "{unit} is there, and it is not the one that would be installed.  Remove it (your own lines "
                "belong into `systemctl edit gpuguard`), and run this again.  Nothing was changed."
            ).format(unit=UNIT)
        )


def install_service(user: str) -> None:
    """Write the unit and a first policy, by both of which the service only observes, and start it.

    An existing policy file stays.
    """
    if not os.path.lexists(POLICY):
        write(POLICY, packaged("policy.yaml"))
    write(UNIT, unit_for(user))
    systemctl("enable", SERVICE)
    if not is_booted():
        print(_("systemd does not run now: the service starts with the next boot."))
        return
    systemctl("daemon-reload")
    systemctl("restart", SERVICE, advice=_("`journalctl -u gpuguard -n 20` says why."))
    program = os.path.join(os.path.dirname(sys.executable), "gpuguard")
    print(
        _(
            "The service runs, and only observes: `systemctl status gpuguard`, `gpuguard events --follow`.\n"
            "It judges by {policy}.  To switch it on, twice: see docs/daemon.md.\nAway again: {program} "
            "setup --remove"
        ).format(policy=POLICY, program=program if os.path.exists(program) else "gpuguard")
    )


def unit_for(user: str, python: str | None = None) -> str:
    """Return the unit with *user* and *python* in it, by default the Python that runs now."""
    return (
        packaged(SERVICE).replace(f"{_PYTHON} -I", f"{python or sys.executable} -I").replace(f"={USER}\n", f"={user}\n")
    )


def doubts_about(executable: str) -> str | None:
    """Say in words why the service could not run this Python, or return None if nothing is known against it."""
    real = os.path.realpath(executable)
    if not any(path.startswith(("/home/", "/root/", "/run/user/")) for path in (executable, real)):
        return None
    whole = (
        executable if real == executable else _("{executable} (really {real})").format(executable=executable, real=real)
    )
    return _(
        "{whole} lies in a home directory, which the service cannot see (ProtectHome=) and its owner "
        "could change.  {system_wide}"
    ).format(whole=whole, system_wide=_(_SYSTEM_WIDE))


def open_to_others(*paths: str) -> str | None:
    """Say in words why users other than root could change what the service runs, or return None if they cannot."""
    for start in {variant for path in paths for variant in (path, os.path.realpath(path))}:
        whole = Path(os.path.abspath(start))
        for path in (whole, *whole.parents):
            try:
                status = os.stat(path)
            except OSError as error:
                return _("{path} cannot be looked at: {strerror}.").format(path=path, strerror=error.strerror)
            sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
            if status.st_uid != 0 or (status.st_mode & 0o022 and not sticky):
                return _(
                    "{path} can be changed by others than root, and the service would run what they put there.  "
                    "{system_wide}"
                ).format(path=path, system_wide=_(_SYSTEM_WIDE))
    return None


def is_booted() -> bool:
    return os.path.isdir(BOOTED)


# `gpuguard setup --remove`.


def remove(directory: str) -> int:
    """Remove everything that setup has installed, and report it; return 1 if there was nothing."""
    if os.geteuid() != 0:
        raise LockDirectoryError(
            _("only root can remove what root has installed.  Run `sudo gpuguard setup --remove`.")
        )
    files = [path for path in (UNIT, MOUNT_UNIT, POLICY, SYSUSERS, TMPFILES) if os.path.lexists(path)]
    ours = [path for path in files if is_as_written(path)]
    sealed = [path for path in files if (content_of(path) or b"").startswith(_SEAL.encode())]
    changed = [path for path in files if path not in ours and (path in sealed or listed("files", path) is not None)]
    user = made_user()
    if not ours and not user and not os.path.lexists(directory):
        print(_("Nothing is installed."))
        return 1
    has_systemd = shutil.which("systemctl") is not None
    if has_systemd and UNIT in ours:
        systemctl("disable", *(["--now"] if is_booted() else []), SERVICE)
        print(_("The service is stopped.  Jobs and their claims go on."))
    elif has_systemd and UNIT in files:
        print(
            _(
                "The service goes on: {unit} is not as setup wrote it.  `systemctl disable --now gpuguard` ends it."
            ).format(unit=UNIT)
        )
    if has_systemd and MOUNT_UNIT in ours:
        systemctl("disable", MOUNT)
    for path in ours:
        with fault_as(_("{path} cannot be removed").format(path=path)):
            os.unlink(path)
        print(_("{path} is removed.").format(path=path))
    if has_systemd and {UNIT, MOUNT_UNIT} & {*ours} and is_booted():
        systemctl("daemon-reload")
    clear(directory)
    if user:
        _remove_user(user)
    for path in (LIST, *(f"{COPIES[directory]}/{name}" for name in LASTING if directory in COPIES)):
        with suppress(FileNotFoundError):
            os.unlink(path)
    for folder in (COPIES.get(directory, ""), os.path.dirname(POLICY)):
        with suppress(OSError):  # it holds something that is not ours
            os.rmdir(folder)
    for path in changed:
        print(_("{path} stays: it has been changed since it was installed.").format(path=path))
    stay = [path for path in (os.path.dirname(MACHINE_EVENTS), MACHINE_STATE, f"{UNIT}.d") if os.path.lexists(path)]
    if stay:
        print(_("What stays: {stay} (log, history, what you wrote yourself).").format(stay=", ".join(stay)))
    return 0


def remove_directory(path: str) -> int:
    """Remove the claim directory that --dir or GPUGUARD_DIR names, and nothing else; return 1 if there is none."""
    if not os.path.lexists(path):
        print(_("{path} does not exist: nothing was removed.").format(path=path))
        return 1
    clear(path)
    return 0


def clear(path: str) -> None:
    """Remove the claim directory, if no process holds a lock in it."""
    if not os.path.lexists(path):
        return
    lock_directory(path)  # raises if it is not what it should be, because then it is not ours to remove
    held: list[int] = []
    try:
        with fault_as(_("{path} cannot be removed").format(path=path)):
            if busy := lock_all(path, held):
                print(_("{path} stays until the next boot: {busy}.").format(path=path, busy=busy))
                return
            # While we hold all locks no claim can be made; processes that wait for one then find that its file is gone.
            if os.path.ismount(f"{path}/claims") and (reason := fault_of("umount", "--lazy", f"{path}/claims")):
                raise LockDirectoryError(_("{path}/claims stays: {reason}.").format(path=path, reason=reason))
            held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            _empty(held[-1])
            os.rmdir(path)
    finally:
        close_all(held)
    print(_("{path} is removed: there was no claim.").format(path=path))


def lock_all(path: str, held: list[int]) -> str | None:
    """Lock all files in *path*, and add their descriptors to *held*; return in words what another process holds."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a machine with MIG has more files than the usual 1024
    for folder in (path, *(f"{path}/{name}" for name in ("lock", "claims", "daemon"))):  # no file deeper down is locked
        if not os.path.isdir(folder):
            continue
        with os.scandir(folder) as entries:
            files = sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))
        for file in files:
            try:
                descriptor = open_in_place(file)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    return _("whether {file} is held cannot be seen ({strerror})").format(
                        file=file, strerror=error.strerror
                    )
                continue  # it has gone meanwhile
            held.append(descriptor)
            if not try_flock(descriptor) or not is_same_file(descriptor, file):
                return _("{file} is held, by a claim, a request in the queue, or a daemon").format(file=file)
    return None


def _empty(folder: int) -> None:
    """Remove everything in an open directory.

    Users may have made folders in folders, deeper than Python or a path can reach, so the content of each is moved up.
    """
    while subfolders := _without_files(folder):
        for name in subfolders:
            with closed_after(
                os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            ) as inner:
                # Otherwise a user who goes on writing there could keep it from being removed.
                os.fchown(inner, os.geteuid(), os.getegid())
                os.fchmod(inner, 0o700)
                for deeper in _without_files(inner):
                    os.rename(deeper, os.urandom(8).hex(), src_dir_fd=inner, dst_dir_fd=folder)
            os.rmdir(name, dir_fd=folder)


def _without_files(folder: int) -> list[str]:
    """Remove everything but the folders, and return their names."""
    with os.scandir(folder) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in names:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in names if is_folder]


def _remove_user(name: str) -> None:
    account = account_of(name)
    if account is None:
        return
    for top in (os.path.dirname(MACHINE_EVENTS), MACHINE_STATE):
        # The uid may be given to another user, who would then own the log.
        for folder, folders, files in os.walk(top):
            for path in (folder, *(f"{folder}/{entry}" for entry in (*folders, *files))):
                if os.lstat(path).st_uid == account.pw_uid:
                    os.lchown(path, 0, 0)
    program = shutil.which("userdel")
    reason = fault_of(program, name) if program else _("there is no userdel here.")
    print(
        _("The user {name} stays: {reason}").format(name=name, reason=reason)
        if reason
        else _("The user {name} is removed.").format(name=name)
    )
