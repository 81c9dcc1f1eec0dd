from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.backends.simulated_node import DEVICES_AT_MOST, MODELS, find, instance_memory, new_node, parse_spec
from gpuguard.errors import InvalidRequest

GIB = 2**30


def a_group() -> st.SearchStrategy[tuple[str, int]]:
    known = st.sampled_from(sorted(MODELS)).map(lambda key: f"{key[0]}-{key[1]}GB")
    own = st.tuples(st.from_regex(r"Own[A-Za-z0-9_]{0,9}", fullmatch=True), st.integers(1, 999)).map(
        lambda facts: f"{facts[0]}-{facts[1]}GB"
    )
    return st.tuples(st.integers(1, 8), known | own).map(lambda facts: (f"{facts[0]}x{facts[1]}", facts[0]))


@given(st.lists(a_group(), min_size=1, max_size=8))
def test_a_spec_gives_as_many_devices_as_it_says(groups):
    parts = parse_spec("+".join(text for text, _ in groups))

    assert len(parts) == sum(count for _, count in groups)
    assert all(part.model.memory_total >= GIB for part in parts)


@given(st.text(max_size=30) | st.text("0123456789xAH10-GB:mig=.,+", max_size=30))
def test_any_other_text_is_refused_with_a_message_and_nothing_else(text):
    try:
        parts = parse_spec(text)
    except InvalidRequest as error:
        assert str(error)
    else:
        assert 1 <= len(parts) <= DEVICES_AT_MOST


def test_models_have_the_facts_of_the_real_ones():
    (h100,) = parse_spec("1xH100-80GB")
    (other,) = parse_spec("rtx4090")

    assert (h100.model.name, h100.model.memory_total) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert (other.model.name, other.model.nvlinks) == ("NVIDIA GeForce RTX 4090", 0)


def test_a_divided_device_knows_its_profiles():
    parts = parse_spec("2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb")

    assert [part.profiles for part in parts] == [(), (), ("3g.20gb", "3g.20gb")]
    assert instance_memory("3g.20gb") < 20 * GIB


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("", "8xH100-80GB"),
        ("8", "8xH100-80GB"),
        ("0xH100-80GB", "1 to 64"),
        ("65xH100-80GB", "1 to 64"),
        ("40xT4+40xT4", "at most 64"),
        ("4xFoo", "'Foo-24GB'"),
        ("4xRTX4080", "did you mean RTX4090"),
        ("1xH100-40GB", "write H100-80GB"),
        ("4xFoo-0GB", "'Foo-24GB'"),
        ("1xRTX4090:mig=1g.5gb", "cannot be divided"),
        ("1xA100-40GB:mig=3g20gb", "no MIG profile"),
        ("1xA100-40GB:mig=,", "no MIG profile"),
        ("1xA100-40GB:mig=4g.20gb,4g.20gb", "7 slices"),
        ("1xA100-40GB:mig=3g.40gb,3g.40gb", "40 GiB"),
    ],
)
def test_a_fault_in_a_spec_says_what_would_be_right(spec, advice):
    with pytest.raises(InvalidRequest, match=advice):
        parse_spec(spec)


def test_uuids_come_back_with_the_node_and_are_never_those_of_another_node():
    first, again, elsewhere = (new_node("4xH100-80GB", place, 0.0) for place in ("/a", "/a", "/b"))

    assert [device.uuid for device in first.devices] == [device.uuid for device in again.devices]
    assert len({device.uuid for node in (first, elsewhere) for device in node.devices}) == 8


def test_devices_are_found_by_index_by_uuid_and_by_the_beginning_of_a_uuid():
    node = new_node("3xT4", "/a", 0.0)
    uuids = [device.uuid for device in node.devices]

    assert find(node, f"1, {uuids[0]},{uuids[2][:12]}") == (uuids[1], uuids[0], uuids[2])
    assert find(node, "all") == tuple(uuids)


@pytest.mark.parametrize("names", ["3", "-1", "", ",", "GPU-", "x", "0,nonsense"])
def test_what_names_no_single_device_is_refused(names):
    with pytest.raises(InvalidRequest):
        find(new_node("3xT4", "/a", 0.0), names)
