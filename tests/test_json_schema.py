"""`gpuguard schema`: the schemas are those of docs/json.md, and what commands really print is as they say."""

import copy
import json
import time

import pytest
from json_schemas import FILE, PAGE, faults, schemas, written
from nodes import GIB, Gpuguard, a_user
from test_who import a_full_output

SCHEMAS = json.loads(FILE.read_text(encoding="utf-8"))
COMMANDS = {
    "who": "who --json",
    "doctor": "doctor --json",
    "select": "select --json",
    "explain": "explain -n 1 --json",
    "queue": "queue --json",
    "reserve": "reserve --json",
    "wait": "wait -n 1 --json",
    "sim": "sim show --json",
    "events": "events --json",
    "report": "report --by claim --json",
}


def test_the_schemas_are_those_of_the_document():
    assert FILE.read_text(encoding="utf-8") == written(PAGE.read_text(encoding="utf-8")), "run scripts/generate"


def test_a_field_of_the_document_is_in_the_schema_with_its_type_and_whether_it_can_be_null():
    devices = schemas(PAGE.read_text(encoding="utf-8"))["who"]["properties"]["devices"]["items"]
    types = {name: devices["properties"][name].get("type") for name in ("memory_used_bytes", "claims", "reason")}

    assert types == {"memory_used_bytes": ["number", "null"], "claims": "array", "reason": ["string", "null"]}
    assert set(devices["required"]) == set(devices["properties"])


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """One device is used by a job, and a reservation is made."""
    place = tmp_path_factory.mktemp("machine")
    gpuguard = Gpuguard(place, None)
    gpuguard("sim", "start", "3xH100-80GB")
    later = time.strftime("%H:%M", time.localtime(time.time() + 7200))
    assert gpuguard("reserve", "-n", "1", "--from", later, "--for", "1h").returncode == 0
    with a_user(str(place / "node"), "0", GIB):
        yield gpuguard


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_is_as_its_schema_says(machine, name):
    done = machine("run", "--quiet", "-n", "1", "--", *machine.words(*COMMANDS[name].split()))

    assert done.returncode == 0, done.stderr
    assert faults(json.loads(done.stdout), SCHEMAS[name]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda content: content.pop("host"), ".host is missing"),
        (lambda content: content.update(host=None), ".host: None is no string"),
        (lambda content: content.update(schema=2), ".schema: 2 is not 1"),
        (lambda content: content["devices"][0].update(memory_used_bytes="1GiB"), "is no number or null"),
        (lambda content: content["devices"][0].update(claims={}), "is no array"),
        (lambda content: content["users"][0].update(claimed=None), ".users[0].claimed: null"),
        (lambda content: content["devices"][0].update(processes_plausible=1), "is no boolean"),
    ],
)
def test_what_is_not_as_the_schema_says_is_noticed(change, fault):
    content = copy.deepcopy(a_full_output())
    assert faults(content, SCHEMAS["who"]) == []
    change(content)

    assert [text for text in faults(content, SCHEMAS["who"]) if fault in text]


def test_the_command_prints_one_schema_or_the_names_of_all(gpuguard):
    names = [line.split()[0] for line in gpuguard("schema").stdout.splitlines()]
    unknown = gpuguard("schema", "wo")

    assert names == list(SCHEMAS) and json.loads(gpuguard("schema", "who").stdout) == SCHEMAS["who"]
    assert unknown.returncode == 2 and "choose one of who" in unknown.stderr
