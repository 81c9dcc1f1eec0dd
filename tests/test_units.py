"""Text with a unit, there and back."""

from __future__ import annotations

import contextlib
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.errors import InvalidRequest
from gpuguard.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rounded,
    parse_bytes,
    parse_celsius,
    parse_duration,
    parse_percent,
    parse_watts,
)

PARSERS = [parse_bytes, parse_percent, parse_duration, parse_celsius, parse_watts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20GiB", 20 * 2**30),
        ("20 GiB", 20 * 2**30),
        (" 1.5TiB ", 3 * 2**39),
        ("500MB", 500_000_000),
        ("500MiB", 500 * 2**20),
        ("1kB", 1000),
        ("0B", 0),
    ],
)
def test_a_memory_size_is_in_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("1w", 604800), ("250ms", 0.25), ("0s", 0)],
)
def test_a_duration_is_in_seconds(text, expected):
    assert parse_duration(text) == pytest.approx(expected)


def test_the_other_units_are_in_percent_celsius_and_watts():
    assert (parse_percent("10%"), parse_celsius("85C"), parse_celsius("85°C"), parse_watts("1.2kW")) == (
        10,
        85,
        85,
        1200,
    )


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", ["20", "20.5", "0"])
def test_a_bare_number_is_an_error_that_shows_how_to_write_it(parse, text):
    with pytest.raises(InvalidRequest, match=rf"^'{re.escape(text)}' has no unit: write .* like '.+'"):
        parse(text)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "-5GiB", "-5%", "-1s", "1e3B", "nan%", "infs", "5 5s", "10X", "1_000B", "9" * 400 + "B"]
)
def test_anything_else_is_an_error_and_not_a_guess(parse, text):
    with pytest.raises(InvalidRequest):
        parse(text)


@pytest.mark.parametrize("text", ["20gib", "20G", "20g", "20mb", "1m"])
def test_an_ambiguous_memory_unit_is_refused(text):
    with pytest.raises(InvalidRequest, match="GiB"):
        parse_bytes(text)


def test_no_percentage_is_above_100():
    with pytest.raises(InvalidRequest, match="more than 100%"):
        parse_percent("101%")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (0, "0B"),
        (999, "999B"),
        (4 * 2**20, "4MiB"),
        (1000 * 2**20, "1.0GiB"),
        (20 * 2**30, "20.0GiB"),
        (1.5 * 2**40, "1.5TiB"),
    ],
)
def test_bytes_are_shown_in_a_unit_that_fits_and_unknown_is_never_zero(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0, "0s"),
        (0.25, "250ms"),
        (59.9, "59s"),
        (60, "1m"),
        (3661, "1h1m"),
        (3605, "1h"),
        (200_000, "2d7h"),
        (-3, "0s"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


@given(st.integers(min_value=10 * 2**20, max_value=2**47))
def test_what_is_shown_as_bytes_can_be_read_again_and_is_right_to_a_few_percent(count):
    shown = parse_bytes(format_bytes(count))

    assert math.isclose(shown, count, rel_tol=0.06)


@given(st.integers(min_value=0, max_value=10**9))
def test_what_is_shown_as_a_duration_can_be_read_again_and_never_exaggerates(seconds):
    shown = parse_duration(format_duration(seconds))

    assert shown <= seconds
    assert math.isclose(shown, seconds, rel_tol=0.05)


@given(st.text(max_size=12))
def test_no_text_makes_a_parser_fail_in_another_way(text):
    for parse in PARSERS:
        with contextlib.suppress(InvalidRequest):
            assert parse(text) >= 0


def test_a_count_has_its_noun():
    assert [format_count(1, "policy", "policies"), format_count(2000, "policy", "policies")] == [
        "1 policy",
        "2,000 policies",
    ]
    assert [format_count(0, "fault"), format_count(1, "fault")] == ["0 faults", "1 fault"]


def test_a_rounded_number_has_its_unit_or_is_not_known():
    assert [format_rounded(86.6, "%"), format_rounded(0, "W"), format_rounded(None, "%")] == ["87%", "0W", "n/a"]
