"""How a site wants its waiting line and its reservations: /etc/gpuguard/line.yaml, read by everybody who waits.

    fair_share: true        # false: whoever comes first is served first
    half_life: 7d           # after which used GPU time counts half
    patience: 25%           # of the planned wait, by which shorter jobs may put a start off
    bound: 24h              # after which nobody passes a request for which no start can be planned
    priority: {everybody: normal, high: [alice], low: [bob]}
    reservations: {devices: 2, longest: 24h, ahead: 14d, no_show: 30m}     # for users; root may do more

Without the file, or with faults in it, the values above hold (and no names).  Only root can have written it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest, shortage
from gpuguard.line.order import ReservationKeys, Rules

if TYPE_CHECKING:  # everybody who looks at the line looks for this file, and it is not there: yaml costs 20 ms
    from gpuguard.documents.accounts import Accounts
    from gpuguard.documents.yaml_nodes import Fault

PATH = "/etc/gpuguard/line.yaml"


@dataclass(frozen=True)
class LineFile:
    """What the file says; with faults, what holds without it.

    Args:
        rules: of the line.
        reservations: of users.
        faults: why the file does not count.
        path: of the file.
    """

    rules: Rules = field(default_factory=Rules)
    reservations: ReservationKeys = field(default_factory=ReservationKeys)
    faults: tuple[Fault, ...] = ()
    path: str = PATH


def read_line_file(path: str | None = None, *, accounts: Accounts | None = None) -> LineFile:
    """The site's file, or the one that $GPUGUARD_LINE names; never raises for what stands in it."""
    path = path or os.environ.get("GPUGUARD_LINE") or PATH
    return replace(_read(path, accounts), path=path)


def _read(path: str, accounts: Accounts | None) -> LineFile:
    if not os.path.lexists(path):
        return LineFile()
    from gpuguard.documents.accounts import Accounts
    from gpuguard.documents.rootfile import read_file
    from gpuguard.documents.yaml_nodes import LARGEST, Fault
    from gpuguard.line.keys import parse

    try:
        # Root may not have chosen what the variable names, and faults are shown with the words that stand there.
        content = read_file(path, LARGEST, only_root=path == PATH, only_public=os.geteuid() == 0 and path != PATH)
    except FileNotFoundError:
        return LineFile()
    except OSError as error:
        if shortage(error):  # which says nothing of the file: the site's rules hold
            raise
        return LineFile(faults=(Fault(0, 0, f"the file cannot be read: {error.strerror or error}."),))
    except InvalidRequest as error:
        text, _, hint = str(error).partition("\n")
        return LineFile(faults=(Fault(0, 0, text, hint),))
    rules, reservations, faults = parse(content, accounts or Accounts())
    return LineFile(rules, reservations, faults)
