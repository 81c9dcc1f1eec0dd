"""The words of a job: those of `gpuguard run` that were submitted, and the values of a task in its command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from gpuguard.batch.job_records import JobRecord
from gpuguard.cli import build_parser
from gpuguard.jsonio import loads


def arguments_of(record: JobRecord, task: int) -> argparse.Namespace:
    """Return what `gpuguard run` would have parsed for a task.  Options that are newer than the record are unset."""
    defaults = vars(build_parser("run").parse_args(["--", "true"]))
    options = {**defaults, **loads(record.options.encode()), "exec": False, "after": None}
    options["leftover"] = options["leftover"] or "end"
    return argparse.Namespace(**{**options, "command": filled(record.command, record.tasks[task])})


def names_of_run() -> frozenset[str]:
    """Return the names of the options of `gpuguard run` that a job of `gpuguard submit` takes from its record."""
    return frozenset(vars(build_parser("run").parse_args(["--", "true"]))) - {"command", "after"}


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return *command* with `{name}` replaced by the value of each declared name; other braces stay."""
    if not values:
        return list(command)
    names = re.compile("|".join(rf"\{{{re.escape(name)}\}}" for name in values))
    return [names.sub(lambda found: values[found[0][1:-1]], word) for word in command]
