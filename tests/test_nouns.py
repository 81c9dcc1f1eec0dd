"""Our frozen dataclasses behave as the standard library's do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot

from gpuguard import nouns
from gpuguard.model import Device, Gap


class _Point:
    """A point."""

    x: int
    y: int = 2
    name: str | None = None

    def __post_init__(self) -> None:
        if self.y < 0:
            raise ValueError("below")


def made(decorate: Any) -> Any:
    copy = {name: value for name, value in vars(_Point).items() if name not in ("__dict__", "__weakref__")}
    return decorate(frozen=True)(type("Point", (), copy))


OURS: Any = made(nouns.dataclass)
THEIRS: Any = made(dataclasses.dataclass)
BOTH = pytest.mark.parametrize("point", [OURS, THEIRS], ids=["ours", "the standard library's"])


@BOTH
def test_fields_come_by_place_by_name_or_by_default(point: Any) -> None:
    assert vars(point(1)) == {"x": 1, "y": 2, "name": None}
    assert vars(point(1, 5, name="a")) == {"x": 1, "y": 5, "name": "a"}


@BOTH
@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1, 2, "a", 4), {}), ((1,), {"z": 1}), ((1,), {"x": 1}), ((), {"y": 1})]
)
def test_wrong_fields_are_a_type_error(point: Any, values: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        point(*values, **named)


@BOTH
def test_equal_fields_are_equal_and_hash_alike(point: Any) -> None:
    assert point(1) == point(1, 2)
    assert point(1) != point(2)
    assert point(1) != (1, 2, None)
    assert len({point(1), point(x=1, y=2), point(y=2, x=1), point(3)}) == 2


@BOTH
def test_nothing_can_be_changed(point: Any) -> None:
    noun = point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        noun.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        noun.z = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del noun.x

    assert noun.x == 1


@BOTH
def test_post_init_runs(point: Any) -> None:
    with pytest.raises(ValueError, match="below"):
        point(1, -1)


@BOTH
def test_the_standard_librarys_functions_work_on_it(point: Any) -> None:
    assert [field.name for field in dataclasses.fields(point)] == ["x", "y", "name"]
    assert dataclasses.asdict(point(1)) == {"x": 1, "y": 2, "name": None}
    assert dataclasses.replace(point(1), y=9) == point(1, 9)


@BOTH
def test_fields_are_made_once_and_apart_for_each_noun(point: Any) -> None:
    assert dataclasses.fields(point)[0] is dataclasses.fields(point(1))[0]
    assert dataclasses.fields(Gap) != dataclasses.fields(point)


@BOTH
def test_it_is_a_dataclass_to_whoever_asks(point: Any) -> None:
    kind, noun = dataclasses.is_dataclass(point), dataclasses.is_dataclass(point(1))

    assert (kind, noun) == (True, True)


def test_repr_reads_as_the_standard_librarys_does() -> None:
    assert repr(OURS(1)) == repr(THEIRS(1))


def test_replace_makes_a_changed_copy() -> None:
    device = a_device()
    hot = nouns.replace(device, temperature=91.0)

    assert (device.temperature, hot.temperature, hot.uuid) == (35.0, 91.0, device.uuid)


def test_what_is_replaced_is_checked_as_what_is_made() -> None:
    with pytest.raises(ValueError, match="below"):
        nouns.replace(OURS(1), y=-1)
    with pytest.raises(TypeError):
        nouns.replace(a_device(), **{"colour": "green"})


def test_a_whole_snapshot_becomes_plain_values() -> None:
    plain = dataclasses.asdict(a_snapshot(a_device(processes=(a_process(),)), gaps=(Gap(None, "f", "why"),)))

    assert plain["devices"][0]["processes"][0]["user"] == "alice"
    assert plain["gaps"] == ({"device": None, "field": "f", "reason": "why"},)


def test_fields_match_in_a_pattern() -> None:
    match a_device(index=3):
        case Device(index, uuid):
            assert (index, uuid[:12]) == (3, "GPU-00000003")
