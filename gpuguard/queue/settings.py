"""The site's settings of the queue, of reservations and of what jobs leave running: /etc/gpuguard/line.yaml.

    fair_share: true        # false: first come, first served
    half_life: 7d           # after which used GPU time counts half
    patience: 25%           # of the planned wait, by which shorter jobs may put a start off
    bound: 24h              # at least, before a request without a planned start is passed only by what ends in time
    priority: {everybody: normal, high: [alice], low: [bob]}
    reservations: {devices: 2, longest: 24h, ahead: 14d, no_show: 30m}     # for users; root may do more
    leftover: keep          # for how long what a job leaves running keeps its claim: keep, release or a duration

Without the file, or with faults in it, the values above hold (and no names).  Only root can have written it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gpuguard.errors import InvalidRequest, shortage
from gpuguard.locale import _
from gpuguard.policies.files.decoder import GROUP, USER, Accounts, Decoder
from gpuguard.policies.files.source import Fault, YamlSource, read_file
from gpuguard.queue.priority import QueueRules

PATH = "/etc/gpuguard/line.yaml"


@dataclass(frozen=True)
class QueueSettings:
    """What the file says; with faults, what holds without it."""

    rules: QueueRules = field(default_factory=QueueRules)
    faults: tuple[Fault, ...] = ()  # why the file does not count
    path: str = PATH  # of the file


def read_queue_settings(path: str | None = None) -> QueueSettings:
    """The site's file, or the one that $GPUGUARD_LINE names; never raises for what stands in it."""
    path = path or os.environ.get("GPUGUARD_LINE") or PATH
    if not os.path.lexists(path):
        return QueueSettings(path=path)
    try:
        # Root may not have chosen what the variable names, and faults are shown with the words that stand there.
        content = read_file(path, only_root=path == PATH, only_public=os.geteuid() == 0 and path != PATH)
    except FileNotFoundError:
        return QueueSettings(path=path)
    except OSError as error:
        if shortage(error):  # which says nothing of the file: the site's rules hold
            raise
        fault = Fault(0, 0, _("the file cannot be read: {strerror}.").format(strerror=error.strerror or error))
        return QueueSettings(faults=(fault,), path=path)
    except InvalidRequest as error:
        text, _end, hint = str(error).partition("\n")
        return QueueSettings(faults=(Fault(0, 0, text, hint),), path=path)
    return QueueSettings(*parse(content, Accounts()), path)


def parse(content: bytes, accounts: Accounts) -> tuple[QueueRules, tuple[Fault, ...]]:
    """What *content* says; with faults, what holds without it."""
    source = YamlSource(content, begin=None)
    rules = Decoder(source, {USER: accounts.user, GROUP: accounts.group}).root(QueueRules)
    return (QueueRules() if rules is None or source.faults else rules), tuple(source.faults)
