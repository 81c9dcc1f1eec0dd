"""The JSON Schemas of `gpuguard schema`, from docs/json.md.  Anew: scripts/generate."""

import json
import re
import sys
from typing import Any

from sources import ROOT

PAGE = ROOT / "docs" / "json.md"
FILE = ROOT / "gpuguard" / "cli" / "schemas.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_UNITS = ("_bytes", "_seconds", "_percent", "_celsius", "_watts", "_joules")
_NAMES = {  # of the same type wherever they stand
    **dict.fromkeys(("index", "uid", "gid", "made_by_uid", "pid", "num_gpus", "since", "rank", "number"), "number"),
    **dict.fromkeys(("begin", "end", "exit_status", "record_begins", "expected_start", "latest_start"), "number"),
    **dict.fromkeys(("uuid", "parent_uuid", "id", "user", "group", "name", "host", "state", "exact_state"), "string"),
    **dict.fromkeys(("reason", "executable", "working_directory", "error", "refusal", "message"), "string"),
}
# What the words of a field begin with, or have in them, and the type that this means; the first that fits.
_TYPES = (
    (r"(list|texts|uuids|pids)\b", "array"),
    (r"(true|false|whether)\b", "boolean"),
    (r"(seconds|bytes|how many|watts|percent|when)\b", "number"),
    (r"(name|model|path|uuid|id|machine)\b|`|.*\btext\b", "string"),
)
_NULL = re.compile(r"\bor null\b|\bnull(:| as\b)|\balways null\b")

Schema = dict[str, Any]
Lists = dict[str, tuple[dict[str, str], bool]]  # by path the words of each field, and whether all are always there


def schemas(page: str) -> dict[str, Schema]:
    """By the name of an output in *page* what it is like: of those whose object has a list of its own."""
    titles: dict[str, str] = {}
    lists: Lists = {}
    for title, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S):
        for heading, section in re.findall(r"^### (\S+(?:, \S+)*)\n(.*?)(?=^#|\Z)", body, re.M | re.S):
            fields = {
                name: " ".join(words.removeprefix(":").split())
                for names, words in re.findall(r"^- ((?:`\w+`(?:, )?)+)(.*(?:\n  .*)*)", section, re.M)
                for name in re.findall(r"\w+", names)
            }
            for path in heading.split(", "):
                titles.setdefault(path, title)
                lists[path] = fields, not re.search(r"fields\s+are left out", body.partition("\n### ")[0] + section)
    return {
        path: {"$schema": DIALECT, "title": titles[path], **_object(path, lists)}
        for path in lists
        if path.isidentifier()
    }


def _object(path: str, lists: Lists) -> Schema:
    fields, complete = lists[path]
    properties = {name: _field(f"{path}.{name}", words, lists) for name, words in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields) if complete else []}


def _field(path: str, words: str, lists: Lists) -> Schema:
    field: Schema = {"description": words} if words else {}
    if words == "1":
        return {"const": 1}
    if f"{path}[]" in lists:
        field |= {"type": "array", "items": _object(f"{path}[]", lists)}
    elif path in lists:
        field |= _object(path, lists)
    elif path.endswith(_UNITS):
        field["type"] = "number"
    elif kind := _NAMES.get(path.rpartition(".")[2]) or next(
        (kind for pattern, kind in _TYPES if re.match(pattern, words)), None
    ):
        field["type"] = kind
    if not _NULL.search(words):
        if "type" not in field:
            field["not"] = {"type": "null"}
    elif "type" in field:
        field["type"] = [field["type"], "null"]
    return field


def written(page: str) -> str:
    """What FILE has to be."""
    return json.dumps(schemas(page), indent=1, ensure_ascii=False) + "\n"


def faults(value: Any, schema: Schema, path: str = "") -> list[str]:
    """Where *value* is not as *schema* says, of the words of JSON Schema that schemas() writes."""
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "number": (int, float), "null": type(None),
    }  # fmt: skip
    wanted = schema.get("type", list(kinds))
    names = [wanted] if isinstance(wanted, str) else wanted
    is_number = "number" in names and not isinstance(value, bool)
    if not any(isinstance(value, kinds[name]) for name in names if name != "number" or is_number):
        return [f"{path}: {value!r:.40} is no {' or '.join(names)}"]
    found = []
    if "const" in schema and value != schema["const"]:
        found.append(f"{path}: {value!r:.40} is not {schema['const']}")
    if schema.get("not") == {"type": "null"} and value is None:
        found.append(f"{path}: null")
    if isinstance(value, dict):
        found += [f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, inner in schema.get("properties", {}).items():
            found += faults(value[name], inner, f"{path}.{name}") if name in value else []
    for number, inner in enumerate(value if isinstance(value, list) and "items" in schema else ()):
        found += faults(inner, schema["items"], f"{path}[{number}]")
    return found


if __name__ == "__main__" and "--write" in sys.argv:
    FILE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
