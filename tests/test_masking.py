"""A masked recording tells who is the same, and lets no name through."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import pytest
from test_tape import SECRETS, a_view

from gpuguard import model
from gpuguard.backends.recording import TapeWriter
from gpuguard.backtest.masking import KEPT, MASKED, Mask
from gpuguard.backtest.recording import pack, views
from gpuguard.policies.view import HostUse


def masked_text(path: Path) -> str:
    mask, tape = Mask(), TapeWriter(str(path), {})
    for second in range(3):
        tape.write(mask(pack(a_view(second))))
    tape.close()
    return gzip.decompress(path.read_bytes()).decode("ascii")


def test_a_mask_lets_no_name_through(tmp_path):
    text = masked_text(tmp_path / "m.rec")
    view = a_view()

    names = {
        *SECRETS.values(),
        "wolf",
        "boson",
        "hilbert",
        "pts/77",
        "python",
        *(d.uuid for d in view.snapshot.devices),
    }
    assert [name for name in names if name in text] == []
    assert [json.dumps(name) for name in names if json.dumps(name)[1:-1] in text] == []


def test_a_masked_recording_still_tells_who_is_the_same(tmp_path):
    masked_text(tmp_path / "m.rec")
    plain, masked = a_view(2).snapshot, list(views(str(tmp_path / "m.rec")))[2].snapshot

    def people_of(snapshot: model.Snapshot) -> list[list[int]]:
        users = [process.user for device in snapshot.devices for process in device.processes or ()]
        return [[place for place, user in enumerate(users) if user == one] for one in dict.fromkeys(users)]

    assert people_of(masked) == people_of(plain)
    assert masked.devices[8].parent_uuid == masked.devices[7].uuid
    assert masked.claims[0].devices == (masked.devices[0].uuid,)
    assert [device.memory_used for device in masked.devices] == [device.memory_used for device in plain.devices]
    assert masked.devices[7].problems == ("masked problem",)


@pytest.mark.parametrize(
    ("noun", "kind"),
    [("snapshot", model.Snapshot), ("device", model.Device), ("process", model.GpuProcess),
     ("claim", model.ClaimRecord), ("host", HostUse)],
)  # fmt: skip
def test_every_field_is_either_masked_or_known_to_be_harmless(noun, kind):
    names = {field.name for field in fields(kind)}

    assert KEPT[noun] | MASKED[noun] == names
    assert not KEPT[noun] & MASKED[noun]


def test_a_field_that_the_mask_does_not_know_does_not_pass():
    sample = pack(a_view())
    sample["snapshot"]["devices"][0]["serial"] = "1650522003820"

    assert "1650522003820" not in json.dumps(Mask()(sample))
