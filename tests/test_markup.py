"""What a notebook shows of a snapshot and of a claim: tables in which whatever strangers wrote is text."""

from __future__ import annotations

from contextlib import nullcontext
from html.parser import HTMLParser

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.claims.claim import Claim, Lock
from gpuguard.cli.notebook import NotebookClaim, _card

NO_LOCK = Lock(-1, "/nowhere", 0, (0, 0))
HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[31m\u202e"
TAGS = {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}


class Read(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.words += data


def test_a_snapshot_is_a_table_of_its_devices_and_one_of_its_claims():
    device = a_device(memory_used=30 * 2**30, utilization=47.0, processes=(a_process(),))
    read = Read(a_snapshot(device, claims=(a_claim_record(device, note="ablation 3"),))._repr_html_())

    assert [tag for tag, _ in read.tags].count("table") == 2
    for word in ("node1", "30.0GiB", "47%", "alice", "ablation 3", "1h", "python train.py"):
        assert word in read.words


def test_a_claim_is_a_table():
    assert "ablation 3" in Read(a_claim_record(note="ablation 3")._repr_html_()).words


def test_a_claim_of_this_process_is_a_table_of_its_devices_as_programs_in_it_count_them():
    claim = Claim("1f2e", (a_device(index=2), a_device(index=5, name=HOSTILE, memory_total=None)), (NO_LOCK,))
    read = Read(claim._repr_html_())

    assert [tag for tag, _ in read.tags].count("tr") == 3 and {tag for tag, _ in read.tags} <= TAGS
    for word in ("claim 1f2e", "in this process", claim[0].uuid, claim[1].uuid, "<img", "n/a"):
        assert word in read.words


def test_a_model_that_nobody_asked_for_is_left_out_of_the_line_of_a_notebook():
    known, unread = (
        _card(NotebookClaim(Claim("1f2e", (a_device(name=name),), (NO_LOCK,)), (), {"backend": None}, nullcontext()))[0]
        for name in ("NVIDIA T4", None)
    )

    assert known == "GPU 0 · NVIDIA T4 · claim 1f2e · until the kernel ends"
    assert unread == "GPU 0 · claim 1f2e · until the kernel ends"


def test_a_share_shows_its_part_and_a_claim_that_was_given_back_says_so():
    assert "10.0GiB" in Claim("1f2e", (a_device(),), (NO_LOCK,), memory=10 * 2**30)._repr_html_()
    assert "claim 1f2e was given back" in Read(Claim("1f2e", (a_device(),), ())._repr_html_()).words


def test_what_is_unknown_is_not_0():
    unknown = a_device(memory_used=None, utilization=None, temperature=None, power_draw=None, processes=None, name=None)

    assert Read(a_snapshot(unknown)._repr_html_()).words.count("n/a") >= 5


@pytest.mark.parametrize("field", ["host", "name", "user", "note", "command", "id"])
def test_hostile_text_is_text(field):
    assert_harmless(field, HOSTILE)


@given(
    st.sampled_from(["host", "name", "user", "note", "command", "id"]),
    st.text(alphabet="<>&\"'/= script!-\x00\x1b", max_size=30),
)
def test_no_text_is_markup(field, text):
    assert_harmless(field, text)


def assert_harmless(field: str, text: str) -> None:
    given = {"command": (text,)} if field == "command" else {field: text}
    device = a_device(**(given if field == "name" else {}))
    claim = a_claim_record(device, **(given if field in ("user", "note", "command", "id") else {}))
    html = a_snapshot(device, claims=(claim,), **(given if field == "host" else {}))._repr_html_()
    read = Read(html)

    assert {tag for tag, _ in read.tags} <= TAGS
    assert all(not attributes for _, attributes in read.tags)
    assert "\x1b" not in html and "\u202e" not in html
