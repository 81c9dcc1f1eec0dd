"""The nouns: frozen, plain, unknown by default."""

from __future__ import annotations

import dataclasses
import marshal

import pytest
from builders import a_device, a_mig_instance, a_process, a_snapshot

from gpuguard import model
from gpuguard.model import ALL_FIELDS, VERIFY_FIELDS, WHO_FIELDS, ClaimRecord, Device, Gap, GpuProcess, Snapshot

NOUNS = [kind for kind in vars(model).values() if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("noun", NOUNS)
def test_a_noun_is_frozen(noun):
    with pytest.raises(dataclasses.FrozenInstanceError):
        object.__new__(noun).anything = 1


@pytest.mark.parametrize("noun", [Device, GpuProcess, ClaimRecord])
def test_a_measured_value_is_unknown_until_it_is_read_and_never_zero(noun):
    defaults = {
        field.name: field.default for field in dataclasses.fields(noun) if field.default is not dataclasses.MISSING
    }
    measured = {name: value for name, value in defaults.items() if not isinstance(value, bool | str | tuple)}

    assert measured
    assert set(measured.values()) == {None}


def test_a_reader_that_asks_for_more_gets_what_the_others_get():
    assert VERIFY_FIELDS < WHO_FIELDS < ALL_FIELDS


def test_the_names_of_the_groups_are_all_in_all_fields():
    named = {value for name, value in vars(model).items() if name.isupper() and isinstance(value, str)}

    assert named - {model.IDLE_PROCESSES, model.BRIEF, model.STATS} == ALL_FIELDS  # these are nothing of the driver's


def test_a_snapshot_is_made_of_plain_values_only():
    snapshot = a_snapshot(a_device(processes=(a_process(),)), claims=(ClaimRecord("id", 0, "root", ("GPU-a",)),))

    assert marshal.loads(marshal.dumps(dataclasses.astuple(snapshot))) == dataclasses.astuple(snapshot)


def test_a_device_is_found_by_its_uuid_and_by_nothing_else():
    first, second = a_device(0), a_device(1)

    assert a_snapshot(first, second).device(second.uuid) is second
    assert a_snapshot(first).device(second.uuid) is None


def test_an_update_replaces_the_devices_that_were_read_again_and_keeps_the_order():
    first, second, third = a_device(0), a_device(1), a_device(2)
    hot = a_device(1, temperature=90.0)

    updated = a_snapshot(first, second, third, clock=1.0).updated(a_snapshot(hot, clock=2.0, taken_at=5.0))

    assert updated.devices == (first, hot, third)
    assert (updated.clock, updated.taken_at) == (2.0, 5.0)


def test_an_update_replaces_the_gaps_of_the_devices_that_were_read_again():
    first, second = a_device(0), a_device(1)
    old = a_snapshot(first, second, gaps=(Gap(first.uuid, "memory", "old"), Gap(second.uuid, "memory", "kept")))

    updated = old.updated(a_snapshot(first, gaps=(Gap(first.uuid, "health", "new"),)))

    assert updated.gaps == (Gap(second.uuid, "memory", "kept"), Gap(first.uuid, "health", "new"))


def test_an_update_leaves_the_old_snapshot_as_it_was():
    old = a_snapshot(a_device(0))
    old.updated(a_snapshot(a_device(0, temperature=90.0)))

    assert old == a_snapshot(a_device(0))


def test_mig_instances_that_turn_up_later_stand_behind_their_device():
    first, second = a_device(0), a_device(1)
    small, large = a_mig_instance(first, 0), a_mig_instance(first, 1)

    updated = a_snapshot(first, second).updated(a_snapshot(first, small, large))

    assert updated.devices == (first, small, large, second)


def test_a_snapshot_of_no_device_is_a_snapshot():
    assert Snapshot("host", "nvml", 0.0, 0.0, ()).devices == ()
