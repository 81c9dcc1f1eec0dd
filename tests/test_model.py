"""The nouns: frozen, plain, unknown by default; quantities with their units, errors and their exit codes."""

import ast
import contextlib
import dataclasses
import errno
import inspect
import marshal
import math
import os
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import get_args

import pytest
from builders import a_claim_record, a_device, a_mig_instance, a_process, a_snapshot
from hypothesis import example, given
from hypothesis import strategies as st
from sources import module_name, modules, tree

from gpuguard import cli, errors, model
from gpuguard.claims.claim import Claim, Lock
from gpuguard.cli import exit_code
from gpuguard.errors import (
    EXIT_FAILED,
    EXIT_NO,
    EXIT_NO_DRIVER,
    EXIT_NOT_NOW,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    BackendError,
    GpuguardError,
    InvalidRequest,
    NotEnoughGpus,
)
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    ALL_FIELDS,
    DEVICE_FIELDS,
    VERIFY_FIELDS,
    WHO_FIELDS,
    ClaimRecord,
    Device,
    Event,
    Gap,
    GpuProcess,
    NoteKind,
    SubjectKind,
    Verdict,
)
from gpuguard.policies.engine import NARROWEST_FIRST
from gpuguard.policies.policy import NOTES
from gpuguard.queue.calendar import StartingJob
from gpuguard.run import JobEnd, JobSettings
from gpuguard.units import (
    format_bytes,
    format_bytes_exactly,
    format_bytes_within,
    format_count,
    format_duration,
    format_energy,
    format_ranges,
    format_rounded,
    local_time,
    parse_bytes,
    parse_celsius,
    parse_duration,
    parse_field,
    parse_percent,
    parse_watts,
)
from gpuguard.views import events

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
    measured.pop("desktop_memory", None)  # which a site sets

    assert measured
    assert set(measured.values()) == {None}


def test_a_reader_that_asks_for_more_gets_what_the_others_get():
    assert VERIFY_FIELDS < WHO_FIELDS < ALL_FIELDS


def test_the_names_of_the_groups_are_all_in_all_fields():
    named = {value for name, value in vars(model).items() if name.isupper() and isinstance(value, str)}

    assert named - {model.IDLE_PROCESSES, model.BRIEF} == ALL_FIELDS  # these are nothing of the driver's


def test_a_snapshot_is_made_of_plain_values_only():
    snapshot = a_snapshot(a_device(processes=(a_process(),)), claims=(ClaimRecord("id", 0, "root", ("GPU-a",)),))

    assert marshal.loads(marshal.dumps(dataclasses.astuple(snapshot))) == dataclasses.astuple(snapshot)


def test_an_update_replaces_what_was_read_again_and_keeps_the_order():
    first, second, third = a_device(0), a_device(1), a_device(2)
    gaps = (Gap(first.uuid, "memory", "old"), Gap(third.uuid, "memory", "kept"))
    old = a_snapshot(first, second, third, clock=1.0, gaps=gaps)
    hot = a_device(1, temperature=90.0)

    updated = old.updated(a_snapshot(first, hot, clock=2.0, taken_at=5.0, gaps=(Gap(first.uuid, "health", "new"),)))

    assert updated.devices == (first, hot, third)
    assert updated.gaps == (gaps[1], Gap(first.uuid, "health", "new"))
    assert (updated.clock, updated.taken_at) == (2.0, 5.0)


def test_mig_instances_that_turn_up_later_stand_behind_their_device():
    first, second = a_device(0), a_device(1)
    small, large = a_mig_instance(first, 0), a_mig_instance(first, 1)

    updated = a_snapshot(first, second).updated(a_snapshot(first, small, large))

    assert updated.devices == (first, small, large, second)


PARSERS = [parse_bytes, parse_percent, parse_duration, parse_celsius, parse_watts]


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (parse_bytes, {"20GiB": 20 * 2**30, "20 GiB": 20 * 2**30, " 1.5TiB ": 3 * 2**39, "500MB": 500_000_000}),
        (parse_bytes, {"500MiB": 500 * 2**20, "1kB": 1000, "0B": 0}),
        (
            parse_bytes,
            {"20G": 20 * 2**30, "20g": 20 * 2**30, "1.5 T": 3 * 2**39, "20GB": 2 * 10**10},
        ),
        (parse_duration, {"90s": 90, "10m": 600, "1h30m": 5400, "2d": 172800, "1w": 604800, "250ms": 0.25, "0s": 0}),
        (parse_percent, {"10%": 10}),
        (parse_celsius, {"85C": 85, "85°C": 85}),
        (parse_watts, {"1.2kW": 1200}),
    ],
)
def test_a_quantity_is_in_bytes_seconds_percent_celsius_or_watts(parse, values):
    assert {text: parse(text) for text in values} == pytest.approx(values)


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


@pytest.mark.parametrize("text", ["20gib", "20mb", "1m", "101%"])
def test_an_ambiguous_unit_of_memory_and_more_than_all_are_refused(text):
    with pytest.raises(InvalidRequest, match="more than 100%" if "%" in text else "GiB"):
        (parse_percent if "%" in text else parse_bytes)(text)


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (format_bytes, {None: "n/a", 0: "0B", 999: "999B", 4 * 2**20: "4MiB", 1000 * 2**20: "1.0GiB"}),
        (format_bytes, {20 * 2**30: "20.0GiB", 1.5 * 2**40: "1.5TiB"}),
        (format_duration, {None: "n/a", 0: "0s", 0.25: "250ms", 59.9: "59s", 60: "1m", 3661: "1h1m", 3605: "1h"}),
        (format_duration, {200_000: "2d7h", -3: "0s", 0.9994: "999ms", 0.9996: "1s", 0.0004: "0s"}),
        (format_energy, {500: "0.14Wh", 44_280: "12.3Wh", 504_000: "0.14kWh"}),
        (lambda watts: format_rounded(watts, "W"), {None: "n/a", 0: "0W", 86.6: "87W"}),
        (lambda number: format_count(number, "fault"), {0: "0 faults", 1: "1 fault"}),
        (lambda number: format_count(number, "policy", "policies"), {1: "1 policy", 2000: "2,000 policies"}),
    ],
)
def test_a_quantity_is_shown_in_a_unit_that_fits_and_unknown_is_never_zero(shown, texts):
    assert {quantity: shown(quantity) for quantity in texts} == texts


@given(st.integers(min_value=10 * 2**20, max_value=2**47))
def test_what_is_shown_as_bytes_can_be_read_again_and_is_right_to_a_few_percent(count):
    shown = parse_bytes(format_bytes(count))

    assert math.isclose(shown, count, rel_tol=0.06)


@given(st.integers(0, 10**15 - 1))
def test_a_size_that_is_spelled_exactly_is_read_back_as_the_same(count):
    assert parse_bytes(format_bytes_exactly(count)) == count


@pytest.mark.parametrize("text", ["20.0GiB", "30GB", "1.5TB", "500MB", "512MiB", "80.1GiB", "0B"])
def test_a_size_comes_back_as_it_was_typed(text):
    assert format_bytes_exactly(parse_bytes(text)) == text.replace("1.5TB", "1500GB")


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((8, 0, 1, 2), "0-2,8"), ((1, 3), "1,3")])
def test_numbers_that_follow_each_other_are_one_range(numbers, text):
    assert format_ranges(numbers) == text


@given(st.integers(2**20, 999 * 2**30))
def test_a_size_that_can_be_asked_for_is_never_more_than_there_is(count):
    assert 0 <= count - parse_bytes(format_bytes_within(count)) < max(2**20, 2**30 / 10) + 1


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


CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, GpuguardError)
}


def drawn() -> dict[str, str]:
    """Parent of each class in the drawing at the top of errors.py."""
    parents: dict[str, str] = {}
    path = ["GpuguardError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:    |\|   )*)\+-- (\w+)", line)
        if match:
            depth = len(match[1]) // 4 + 1
            path = [*path[:depth], match[2]]
            parents[match[2]] = path[-2]
    return parents


def test_the_drawing_is_the_tree():
    real = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items() if kind is not GpuguardError}

    assert drawn() == real
    assert issubclass(InvalidRequest, ValueError)


@pytest.mark.parametrize("kind", CLASSES.values())
def test_an_error_can_be_made_from_its_message_alone_and_survives_a_process_border(kind):
    assert str(pickle.loads(pickle.dumps(kind("what to do")))) == "what to do"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("20GiB", "B", 20 * 2**30), ("1MB/s", "B/s", 1e6), ("50%", "%", 50.0), ("85C", "C", 85.0), ("300W", "W", 300.0),
        ("2Wh", "J", 7200.0), ("1.98GHz", "MHz", 1980.0), (" 7 ", "", 7),
    ],
)  # fmt: skip
def test_the_value_of_a_field_is_written_with_its_unit(text, unit, value):
    assert parse_field(text, unit) == value
    for other in ("", "x", "7.5", "-1", "9 bananas"):
        with pytest.raises(InvalidRequest):
            parse_field(other, unit)


def test_a_field_of_a_device_says_what_can_be_true_of_it_and_what_may_be_told():
    temperature, clock, bus = (DEVICE_FIELDS[name] for name in ("temperature", "clock_sm", "pci_bus_id"))

    assert [temperature.holds(value) for value in (-1, 0, 130, 131)] == [False, True, True, False]
    assert bus.holds("anything")
    assert (repr(temperature.number(3)), repr(clock.number(3.0))) == ("3.0", "3")
    assert {name for name, field in DEVICE_FIELDS.items() if field.masked} == {
        "pci_bus_id", "processes", "problems", "nvlink_links",
    }  # fmt: skip


def test_the_parts_of_an_error_are_attributes_also_behind_a_process_border():
    missing = NotEnoughGpus("wanted 2 GPUs", 2, 1, reasons=["  GPU 0: busy"], advice="Ask for 1 GPU.", see="see x")
    for error, text in (
        (InvalidRequest("fault", "hint"), "fault\nhint"),
        (missing, "wanted 2 GPUs\n  GPU 0: busy\nAsk for 1 GPU.\nsee x"),
        (
            NotEnoughGpus.under("number 3 in the queue", missing),
            "number 3 in the queue\n  GPU 0: busy\nAsk for 1 GPU.\nsee x",
        ),
    ):
        other = pickle.loads(pickle.dumps(error))

        assert str(error) == str(other) == text
        assert vars(error) == vars(other)


def taken_apart(module: ast.AST) -> list[int]:
    """The lines in which a part of the text of an error is taken."""
    found = set()
    for node in ast.walk(module):
        call = node.value if isinstance(node, ast.Subscript) else node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            takes = call.func.attr in ("partition", "rpartition") or (call.func.attr == "split" and call.args)
            if (takes or call is not node) and ast.unparse(call.func.value) in ("str(error)", "str(missing)"):
                found.add(call.lineno)
    return sorted(found)


def test_nothing_takes_the_text_of_an_error_apart():
    assert {module_name(path): lines for path in modules() if (lines := taken_apart(tree(path)))} == {}
    planted = "str(error).partition(':')\nstr(missing).split(',')\nstr(error).splitlines()[0]"
    assert taken_apart(ast.parse(planted)) == [1, 2, 3]
    assert taken_apart(ast.parse("' '.join(str(error).split())")) == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_has_an_exit_code_for_every_kind_of_command(name):
    error = CLASSES[name]("x")
    run = {"NotEnoughGpus": EXIT_NOT_NOW, "WaitTimeout": EXIT_TIMEOUT}.get(name, EXIT_FAILED)
    usual = EXIT_USAGE if name == "InvalidRequest" else EXIT_NO_DRIVER if isinstance(error, BackendError) else EXIT_NO

    assert (exit_code("run", error), exit_code("who", error)) == (run, usual)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EMFILE, "see `ulimit -n`"),
        (errno.ENFILE, "/proc/sys/fs/file-nr"),
        (errno.EDQUOT, "Make room"),
        (errno.EAGAIN, "see `ulimit -u`"),
        (errno.ENOMEM, "`free -h`"),
        (errno.EIO, "an error inside gpuguard"),
    ],
)
def test_a_fault_of_the_machine_is_told_as_such(monkeypatch, capsys, code, said):
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cli, "_dispatch", fail)

    assert cli.run_command_line(["who"]) == EXIT_NO
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status"), [(["select", "-n", "x"], EXIT_USAGE), (["run", "-n", "x", "--", "true"], 125)]
)
def test_a_failure_that_cannot_be_told_has_its_exit_code_all_the_same(words, status):
    """With standard error on a full disk a traceback was tried instead, and `run` ended as a job that ends with 1."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "gpuguard", *words], stderr=full, check=False)

    assert done.returncode == status


@pytest.mark.parametrize("words", [["--version"], ["policy", "rules"]], ids=["a line", "more than a buffer"])
def test_an_answer_for_which_the_disk_is_full_is_no_success_and_no_fault_of_gpuguard(words):
    with open("/dev/full", "w") as full:
        call = [sys.executable, "-m", "gpuguard", *words]
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    told = "what this command prints could not be written: No space left on device."
    assert done.returncode == EXIT_NO
    assert done.stderr.startswith(f"gpuguard: {told}") and done.stderr.count("\n") == 1


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


def test_a_snapshot_is_a_table_of_its_devices_and_one_of_its_claims_in_which_unknown_is_not_0():
    device = a_device(memory_used=30 * 2**30, utilization=47.0, processes=(a_process(),))
    record = a_claim_record(device, note="ablation 3")
    read = Read(a_snapshot(device, claims=(record,))._repr_html_())

    assert [tag for tag, _ in read.tags].count("table") == 2
    for word in ("node1", "30.0GiB", "47%", "alice", "ablation 3", "1h", "python train.py"):
        assert word in read.words
    assert "ablation 3" in Read(record._repr_html_()).words

    unknown = a_device(memory_used=None, utilization=None, temperature=None, power_draw=None, processes=None, name=None)
    assert Read(a_snapshot(unknown)._repr_html_()).words.count("n/a") >= 5


def test_a_snapshot_prints_as_a_line_for_each_device():
    """`print(gpuguard.who())` was a wall."""
    used = a_device(0, memory_used=30 * 2**30, utilization=47.0, processes=(a_process(),))
    machine = a_snapshot(used, a_device(1, name=HOSTILE + "\x1b\n", utilization=None), claims=(a_claim_record(used),))
    title, heads, *rows = str(dataclasses.replace(machine, recorded=True)).splitlines()

    assert (title, heads.split()) == ("RECORDED node1", ["GPU", "name", "memory", "util", "temp", "power", "processes",
                                                         "claimed", "by"])  # fmt: skip
    assert re.split(" {2,}", rows[0]) == [
        "0", "NVIDIA H100 80GB HBM3", "30.0GiB / 80.0GiB", "47%", "35°C", "70W", "1", "alice",
    ]  # fmt: skip
    assert len(rows) == 2 and rows[1].startswith("1    <") and "n/a" in rows[1] and "\x1b" not in rows[1]


def test_a_claim_of_this_process_is_a_table_of_its_devices_as_programs_in_it_count_them():
    claim = Claim("1f2e", (a_device(index=2), a_device(index=5, name=HOSTILE, memory_total=None)), (NO_LOCK,))
    read = Read(claim._repr_html_())

    assert [tag for tag, _ in read.tags].count("tr") == 3 and {tag for tag, _ in read.tags} <= TAGS
    for word in ("claim 1f2e", "in this process", claim[0].uuid, claim[1].uuid, "<img", "n/a"):
        assert word in read.words


def test_a_share_shows_its_part_and_a_claim_that_was_given_back_says_so():
    assert "10.0GiB" in Claim("1f2e", (a_device(),), (NO_LOCK,), memory=10 * 2**30)._repr_html_()
    assert "claim 1f2e was given back" in Read(Claim("1f2e", (a_device(),), ())._repr_html_()).words


@given(st.text(alphabet="<>&\"'/= script!-\x00\x1b", max_size=30))
@example(HOSTILE)
def test_no_text_is_markup(text):
    device = a_device(name=text)
    claim = a_claim_record(device, user=text, note=text, command=(text,), id=text)
    html = a_snapshot(device, claims=(claim,), host=text)._repr_html_()
    read = Read(html)

    assert {tag for tag, _ in read.tags} <= TAGS
    assert all(not attributes for _, attributes in read.tags)
    assert "\x1b" not in html and "\u202e" not in html


@pytest.mark.parametrize("kind", [Event, JobEnd, JobSettings, StartingJob, Verdict])
def test_what_has_many_fields_of_one_type_takes_keywords_only(kind):
    """Two numbers in the wrong order are no fault that a type checker could find."""
    names = [field.name for field in dataclasses.fields(kind)]
    made = kind(**dict.fromkeys(names, 1))

    assert [getattr(made, name) for name in names] == [1] * len(names)
    with pytest.raises(TypeError, match="positional"):
        kind(*[1] * len(names))


def test_a_table_over_a_closed_set_has_a_row_for_each_of_its_words():
    for words, table in ((NoteKind, NOTES), (SubjectKind, NARROWEST_FIRST)):
        assert set(table) == set(get_args(words))


def test_a_word_of_another_version_is_shown_as_it_was_recorded():
    [line] = events.to_table(
        [{"time_unix_seconds": 0.0, "kind": "levitate", "outcome": "half done"}], {}, headers=False
    )

    assert "levitate half done" in line


def test_the_lines_of_a_message_of_our_own_are_joined_in_a_row_and_those_of_users_stay_visible():
    own = sentence("driver.gone", "no driver.\nInstall one.")
    for message, shown in ((own, "no driver.  Install one."), ("sh -c 'a\nb'", "sh -c 'a\\nb'")):
        line = {"time_unix_seconds": 0.0, "kind": "watchdog", "outcome": "failed", "message": message}
        assert shown in events.to_text(line)
        assert shown.rstrip(".") in events.to_table([line], {}, headers=False)[0]


def test_what_policies_did_to_a_user_is_folded_at_the_width_of_the_terminal():
    facts = {"policy": "idle"}
    deed = {
        "time_unix_seconds": 0.0,
        "kind": "terminate",
        "outcome": "about to",
        "message": "idle" + 8 * " idle",
        "facts": facts,
    }
    [heading, *lines] = events.deeds([{**deed, "user": "al", "pid": 7}], 44)

    assert len(lines) > 1 and all(line.startswith("  ") and len(line) <= 44 for line in lines)
    assert [heading, "  " + " ".join(map(str.strip, lines))] == events.deeds([{**deed, "user": "al", "pid": 7}])
    assert events.deeds([]) == []


def test_what_a_warning_announces_is_in_words_for_people():
    facts = {"harm_action": "terminate", "harm_unix_seconds": 1795759200.0}
    [line] = events.to_table([{"time_unix_seconds": 0.0, "kind": "warn", "facts": facts}], {}, headers=False)

    assert f"then terminate, not before {local_time(1795759200, '%m-%d %H:%M:%S')}" in line
