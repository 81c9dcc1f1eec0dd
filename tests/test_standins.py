"""A module that is put off is loaded when somebody uses it, and not before."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from gpuguard.cli import dispatch


def said(code: str) -> str:
    words = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path[:] = {sys.path!r}\nfrom gpuguard import standins\n{code}",
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize(
    "use",
    [
        "import colorsys; used = colorsys.rgb_to_hls(0.0, 0.0, 0.0)",
        "from colorsys import rgb_to_hls; used = rgb_to_hls(0.0, 0.0, 0.0)",
        "import colorsys; import colorsys as again; used = again.rgb_to_hls(0.0, 0.0, 0.0)",
    ],
)
def test_it_is_loaded_when_it_is_used(use: str) -> None:
    code = "standins.put_off('colorsys')\nimport colorsys\nbefore = 'ONE_THIRD' in vars(colorsys)\n"

    assert (
        said(f"{code}{use}\nprint(before, used, sys.modules['colorsys'].__spec__.name)")
        == "False (0.0, 0.0, 0.0) colorsys"
    )


def test_what_it_does_not_have_is_an_attribute_error() -> None:
    assert said("standins.put_off('colorsys'); import colorsys; print(hasattr(colorsys, 'nothing'))") == "False"


def test_what_is_loaded_already_stays() -> None:
    assert said(
        "import colorsys; standins.put_off('colorsys'); print('ONE_THIRD' in vars(sys.modules['colorsys']))"
    ) == ("True")


class Above:
    x: int = 1
    y: str


class Below(Above):
    pass


def made(x: int) -> str:
    return str(x)


@pytest.mark.parametrize("noun", [Above, Below, int, made])
def test_what_dataclasses_asks_of_inspect_is_what_inspect_says(noun: object) -> None:
    assert dispatch._annotations(noun) == inspect.get_annotations(noun)  # type: ignore[arg-type]
