"""The site's settings for the queue, reservations and processes that jobs leave running: /etc/gpuguard/line.yaml.

    fair_share: true        # false: first come, first served
    half_life: 7d           # after which used GPU time counts half
    patience: 25%           # of the planned wait, by which shorter jobs may put a start off
    bound: 24h              # at least, before a request without a planned start is passed only by jobs that end in time
    priority: {everybody: normal, high: [alice], low: [bob]}
    reservations: {devices: 2, longest: 24h, ahead: 14d, no_show: 30m}     # for users; root may do more
    leftover: keep          # how long processes that a job leaves running keep its claim: keep, release or a duration

Without the file the values above hold, but without the names.  Only root can have written it.  While it has faults, the
last good one holds: the daemon keeps its text for all readers among its files, in LAST_GOOD.  If that is missing, the
values above hold.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace

from gpuguard import files
from gpuguard.claims.directory import LockDirectory, daemon_files
from gpuguard.claims.restrictions import COPIES
from gpuguard.errors import InvalidRequest, shortage
from gpuguard.jsonio import decode, loads
from gpuguard.locale import _
from gpuguard.queue.priority import QueueRules
from gpuguard.yaml_files.decoder import GROUP, USER, Accounts, Decoder
from gpuguard.yaml_files.yaml_text import LARGEST, Fault, YamlSource, read_file

PATH = "/etc/gpuguard/line.yaml"
LAST_GOOD = "line.last-good.json"


@dataclass(frozen=True)
class QueueSettings:
    """What the file says or, if it has faults, what holds in its place."""

    rules: QueueRules = field(default_factory=QueueRules)
    faults: tuple[Fault, ...] = ()  # why the file does not count
    path: str = PATH  # of the file
    text: str = "{}"  # of a file without faults
    is_last_good: bool = False  # whether the rules are those of the last good file


@dataclass(frozen=True)
class _KeptText:
    """The content of LAST_GOOD."""

    path: str
    text: str


def settings_path() -> str:
    """The path of the site's file: PATH, unless $GPUGUARD_LINE names another one."""
    return os.environ.get("GPUGUARD_LINE") or PATH


def read_queue_settings(directory: LockDirectory | None = None, path: str | None = None) -> QueueSettings:
    """Read the site's file or, while it has faults, the last good one of *directory*.  Faults never raise.

    Args:
        directory: the claim directory whose daemon keeps the last good file, or None if there is none.
        path: of the site's file, or None for settings_path().
    """
    accounts = Accounts()
    site = _read(path or settings_path(), accounts)
    text = _last_good_text(directory, site.path) if site.faults and directory else None
    if text is None:
        return site
    accounts.remembered = {}  # a name that is gone matches no user, and a silent service is not waited for again
    rules, faults = parse(text, accounts)
    return site if faults else replace(site, rules=rules, is_last_good=True)


def keep_last_good(directory: LockDirectory, site: QueueSettings) -> None:
    """Keep the text of a file without faults for all readers, and across a reboot.  Raises OSError."""
    folder = daemon_files(directory)
    content = json.dumps(asdict(_KeptText(site.path, site.text)), ensure_ascii=False).encode()
    files.write_file(folder.file(LAST_GOOD), content)
    if place := COPIES.get(folder.path):
        os.makedirs(place, exist_ok=True)
        files.write_file(os.path.join(place, LAST_GOOD), content, sync=True)


def _last_good_text(directory: LockDirectory, path: str) -> bytes | None:
    """The text kept of the file at *path*, or None if there is none that only root or the daemon can have written."""
    folder = daemon_files(directory)
    if folder.owner is None:  # any user could have made it
        return None
    try:
        kept = decode(_KeptText, loads(files.read_file(folder.file(LAST_GOOD), 2 * LARGEST, folder.owners())))
    except (OSError, ValueError) as error:
        if shortage(error):  # it says nothing about the file
            raise
        return None
    return kept.text.encode() if kept.path == path else None


def _read(path: str, accounts: Accounts) -> QueueSettings:
    if not os.path.lexists(path):
        return QueueSettings(path=path)
    try:
        # Root may not have chosen the file that the variable names, and faults are shown with words from the file.
        content = read_file(path, only_root=path == PATH, only_public=os.geteuid() == 0 and path != PATH)
    except FileNotFoundError:
        return QueueSettings(path=path)
    except OSError as error:
        if shortage(error):  # it says nothing about the file, so the site's rules still hold
            raise
        fault = Fault(0, 0, _("the file cannot be read: {strerror}.").format(strerror=error.strerror or error))
        return QueueSettings(faults=(fault,), path=path)
    except InvalidRequest as error:
        return QueueSettings(faults=(Fault(0, 0, error.fault, error.hint),), path=path)
    rules, faults = parse(content, accounts)
    return QueueSettings(rules, faults, path, content.decode("utf-8", "replace"))


def parse(content: bytes, accounts: Accounts) -> tuple[QueueRules, tuple[Fault, ...]]:
    """The rules and the faults in *content*; if there are faults, the rules are those that hold without a file."""
    source = YamlSource(content, begin=None)
    rules = Decoder(source, {USER: accounts.user, GROUP: accounts.group}).root(QueueRules)
    return (QueueRules() if rules is None or source.faults else rules), tuple(source.faults)
