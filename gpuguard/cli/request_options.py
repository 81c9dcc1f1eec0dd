"""The options that choose GPUs, and the request that they make."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from gpuguard.cli.options import add_repeatable, add_table, quantity, selectors, whole_number
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.model import IDLE_TOLERANCE, SLOTS
from gpuguard.request import STRATEGIES, Request
from gpuguard.units import format_count, parse_bytes, parse_celsius, parse_percent
from gpuguard.vendors import VENDORS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_OPTIONS = (
    ("--exclude", "LIST", "not these"),
    ("--prefer", "LIST", "these first, in this order, if they are eligible"),
    ("--min-free", "SIZE", "each has at least so much free memory, as in 20GiB"),
    ("--min-total", "SIZE", "each has at least so much memory in all"),
    ("--max-util", "PERCENT", "each is at most so busy, as in 10%%"),
    ("--max-memory-util", "PERCENT", "each moves data at most so much of the time"),
    (
        "--max-processes",
        "N",
        "share a GPU with up to N processes of others; then --min-free decides about memory, not --tolerance",
    ),
    ("--max-temperature", "TEMP", "each is at most so hot, as in 70C"),
)


def add_choice_options(parser: argparse.ArgumentParser, also: Mapping[str, Sequence[str]] | None = None) -> None:
    """Add the options that choose GPUs; *also* gives further spellings of some: ``{"--min-free": ("-f",)}``."""
    group = parser.add_argument_group("which GPUs")
    rows = ((" ".join((flag, *(also or {}).get(flag, ()))), metavar, text) for flag, metavar, text in _OPTIONS)
    add_table(group, ("-n --num-gpus", "N", "how many (default: 1)"))
    add_device_options(group, "only these: indices, uuids or beginnings of uuids, as in 0,3 (without -n: all of them)")
    add_table(group, *rows)
    add_repeatable(group, ("--model", "GLOB", "the name fits, as in H100 or 'RTX*'; several: one of them fits"))
    add_vendor_option(group)
    strategies = "; ".join(f"{name}: {what}" for name, what in STRATEGIES.items())
    group.add_argument("--strategy", choices=STRATEGIES, default="spread", help=f"{strategies} (default: spread)")
    add_table(
        group,
        ("--mig", "PROFILE", "instances of this profile: 3g.40gb (MIG), cpx (AMD)"),
        ("--allow-mig-set", None, "several MIG instances will do: one process is started for each"),
        ("--mine-as-free", None, "my own processes do not make a GPU busy"),
        ("--tolerance", "SIZE", f"memory that an idle GPU may hold (default: {IDLE_TOLERANCE // 2**20}MiB)"),
    )
    add_table(
        parser.add_argument_group("sharing a GPU with others who share it too"),
        ("--share", None, "others may claim the rest of each GPU; needs --memory"),
        ("--memory", "SIZE", "my part of each GPU's memory, as in 10GiB"),
        ("--slots", "K", f"at most K jobs on each GPU, mine included (default and most: {SLOTS})"),
    )


def add_vendor_option(group: Any) -> None:
    """Add --vendor."""
    group.add_argument(
        "--vendor",
        choices=tuple(VENDORS),
        help="its vendor is this one (default: any, the same for all GPUs of a job)",
    )


def add_device_options(group: Any, text: str) -> None:
    """Add --devices and its former name --gpus, after which a number is a count in Slurm and docker."""
    spellings = group.add_mutually_exclusive_group()
    add_table(spellings, ("--devices", "LIST", text))
    add_table(
        spellings, ("--gpus", "LIST", "the same; not for one number alone"), dest="devices", type=_no_number_alone
    )


def _no_number_alone(text: str) -> str:
    number = text.strip()
    if not number.isdecimal() or len(number) > 4:
        return text
    count = format_count(int(number), "GPU") if number.strip("0") else ""
    either = _("`-n {number}` for {count}").format(number=number, count=count) if count else "`-n N` for N GPUs"
    raise argparse.ArgumentTypeError(
        _("{number} can mean a count or a GPU: write {either}, or `--devices {number}` for GPU number {number}").format(
            number=number, either=either
        )
    )


_AMOUNTS: Mapping[str, Callable[[str], Any]] = {  # fields of a request that are given by an option of that name
    "min_free": parse_bytes, "min_total": parse_bytes, "memory": parse_bytes, "max_util": parse_percent,
    "max_memory_util": parse_percent, "max_temperature": parse_celsius,
}  # fmt: skip


def request_of(args: argparse.Namespace) -> Request:
    """Return the request that the parsed options make.  An option that the command lacks counts as not given.

    Raises:
        InvalidRequest: a value cannot be understood, or two contradict each other.
    """
    given = vars(args).get
    devices, number = selectors("--devices", args.devices), whole_number("-n", args.num_gpus)
    if devices is not None and number is not None and number > len(devices):
        raise InvalidRequest(
            _("-n {number} wants more than the {count} that --devices {devices} names.").format(
                number=number, count=len(devices), devices=args.devices
            )
        )
    exclude = selectors("--exclude", args.exclude) or ()
    if both := set(devices or ()) & set(exclude):
        raise InvalidRequest(
            _("{both} stands in --devices and in --exclude: decide for one.").format(both=", ".join(sorted(both)))
        )
    slots = whole_number("--slots", given("slots"))
    tolerance = quantity("--tolerance", given("tolerance"), parse_bytes)
    amounts: dict[str, Any] = {
        field: quantity(f"--{field.replace('_', '-')}", given(field), parse) for field, parse in _AMOUNTS.items()
    }
    return Request(
        num_gpus=number if number is not None else len(devices or "1"),
        devices=devices,
        max_processes=whole_number("--max-processes", given("max_processes")),
        models=tuple(args.model),
        vendor=given("vendor"),
        exclude=exclude,
        prefer=selectors("--prefer", given("prefer")) or (),
        strategy=given("strategy", "spread"),
        mine_as_free=frozenset((os.getuid(),)) if given("mine_as_free") else frozenset(),
        tolerance=IDLE_TOLERANCE if tolerance is None else tolerance,
        share=given("share", False),
        slots=SLOTS if slots is None else slots,
        mig=args.mig,
        allow_mig_set=given("allow_mig_set", False),
        **amounts,
    )
