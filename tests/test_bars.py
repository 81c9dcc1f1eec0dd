"""Bars, sparklines and alarm colours: what is unknown is neither a number nor an alarm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.sanitize import display_width
from gpuguard.views.charts import alarm, bar, fitted, sparkline

SHARES = st.none() | st.floats(-1, 3, allow_nan=False)


def width_of(parts):
    return sum(display_width(text) for text, _ in parts)


@given(SHARES, st.integers(1, 80), st.booleans())
def test_a_bar_takes_exactly_its_columns(share, width, ascii_only):
    parts = bar(share, width, "green", ascii_only=ascii_only)

    assert width_of(parts) == width
    assert not ascii_only or all(text.isascii() for text, _ in parts)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "░░░░"), (0.5, "██░░"), (1.0, "████"), (2.0, "████"), (0.3, "█▎░░"), (0.001, "▏░░░"), (None, "╌╌╌╌")],
)
def test_a_bar_is_as_full_as_its_share(share, text):
    assert "".join(part for part, _ in bar(share, 4, "green")) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "...."), (0.5, "##.."), (1.0, "####"), (0.01, "#..."), (None, "----")]
)
def test_a_bar_without_drawing_characters(share, text):
    assert "".join(part for part, _ in bar(share, 4, "green", ascii_only=True)) == text


def test_a_sparkline_has_the_newest_at_the_right_and_a_blank_where_nothing_is_known():
    assert sparkline([0.0, 0.5, None, 1.0], 6, 1.0) == "  ▁▅ █"
    assert sparkline([0.0, 0.5, None, 1.0], 2, 1.0) == " █"
    assert sparkline([0.0, 0.5, 1.0], 3, 1.0, ascii_only=True) == "_=#"
    assert sparkline([1.0], 3, 0.0) == "   "


@pytest.mark.parametrize(
    ("value", "warn", "bad", "colour"),
    [
        (None, 80, 90, "dim"),
        (95, None, None, "green"),
        (79, 80, 90, "green"),
        (80, 80, 90, "yellow"),
        (90, 80, 90, "bold red"),
    ],
)
def test_an_unknown_value_or_limit_gives_no_alarm(value, warn, bad, colour):
    assert alarm(value, warn, bad) == colour


@given(st.lists(st.tuples(st.text(st.sampled_from("ab 实験\u0301"), max_size=9), st.just(""))), st.integers(0, 40))
def test_fitted_parts_take_exactly_so_many_columns_whatever_their_characters(parts, width):
    found = fitted(parts, width)

    # A wide character that does not fit leaves a column free, which is filled with a blank.
    assert width_of(found) == width
