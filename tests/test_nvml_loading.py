"""The binding as a sampler loads it is the binding: what was put off is the same once it is used.

scripts/matrix runs this with nvidia-ml-py of 2023 and of today.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from fake_nvml import FakeNvml
from nvml_child import answer_of

ROOT = Path(__file__).parent.parent
BOTH = """
import ctypes
from gpuguard.backends import nvml_loading
sys.modules.pop("pynvml")
import pynvml as full
sys.modules.pop("pynvml")
nvml_loading.load_bindings()
import pynvml
put_off = {name: kind for name, kind in vars(pynvml).items() if isinstance(kind, nvml_loading.Later)}
"""
# What is wrong with this binding: it uses a structure while it loads in a way that cannot be put off.
STUBBORN = """
from ctypes import *

class One(Structure):
    _fields_ = [("number", c_uint)]

assert issubclass(One, Structure)
"""


def test_each_structure_is_as_the_binding_describes_it(fake: FakeNvml) -> None:
    script = (
        BOTH
        + """
def described(kind):
    fields = getattr(kind, "_fields_", ())
    places = [(getattr(kind, field[0]).offset, getattr(kind, field[0]).size) for field in fields]
    pointed = getattr(kind, "_type_", None)
    more = described(pointed) if isinstance(pointed, type) else pointed
    bases = [base.__name__ for base in kind.__mro__]
    inner = [(name, described(of)) for name, of, *_ in fields]
    return bases, ctypes.sizeof(kind), places, inner, more, vars(kind).get("_fmt_")

names = sorted(put_off)
different = [name for name in names if described(nvml_loading.made(put_off[name])) != described(getattr(full, name))]
answer = len(names), different
"""
    )
    count, different = answer_of(fake, script)

    assert count > 60
    assert different == []


def test_everything_else_is_there_too(fake: FakeNvml) -> None:
    script = (
        BOTH
        + """
pynvml.NVMLError(3)  # whereupon it makes the classes of its errors
values = {name: value for name, value in vars(full).items() if isinstance(value, (int, str, bytes))}
answer = set(vars(full)) ^ set(vars(pynvml)), {name for name in values if vars(pynvml).get(name) != values[name]}
"""
    )
    names, values = answer_of(fake, script)

    assert names <= {"util"}  # of ctypes, if somebody else has loaded it
    assert values == set()


def test_arrays_and_pointers_of_what_is_made_later_can_be_used_as_any_other(fake: FakeNvml) -> None:
    script = (
        BOTH
        + """
row = pynvml.c_nvmlProcessInfo_t
rows = (3 * row)()
rows[1].pid = 7
pointer = pynvml.cast(rows, pynvml.POINTER(row))
text = str(pynvml.c_nvmlUtilization_t(gpu=5, memory=6))
same = pynvml.c_nvmlUtilization_t is nvml_loading.made(put_off["c_nvmlUtilization_t"])
answer = len((row * 2)()), pointer[1].pid, pynvml.sizeof(row) == pynvml.sizeof(rows[0]), text, same
"""
    )
    assert answer_of(fake, script) == (2, 7, True, "c_nvmlUtilization_t(gpu: 5 %, memory: 6 %)", True)


def test_a_sampler_makes_the_structures_that_it_uses_and_no_others(fake: FakeNvml) -> None:
    script = """
from gpuguard.backends import nvml_loading
backend = nvml.open()
backend.sample(ALL_FIELDS)
import pynvml
kinds = [kind for kind in vars(pynvml).values() if isinstance(kind, nvml_loading.Later)]
structures = [kind for kind in vars(pynvml).values() if isinstance(kind, type) and hasattr(kind, "_fields_")]
answer = len(kinds), len(structures)
"""
    put_off, used = answer_of(fake, script)

    assert used <= 14
    assert put_off > 4 * used


def test_a_binding_that_cannot_be_put_off_is_loaded_in_full(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(STUBBORN)
    code = """
from gpuguard.backends import nvml_loading
nvml_loading.load_bindings()
import ctypes, pynvml
print(type(pynvml.One) is type(ctypes.Structure), pynvml.One(3).number, hasattr(ctypes, "__path__"))
"""
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == ("True 3 True\n", "")


@pytest.mark.parametrize("before", ["", "sys.modules['pynvml'] = None"], ids=["missing", "forbidden"])
def test_a_binding_that_is_missing_is_told_when_it_is_used(before: str) -> None:
    code = f"""
import sys
{before}
from gpuguard.backends import nvml_calls, nvml_loading
nvml_loading.load_bindings()
try:
    nvml_calls.start()
except nvml_calls.DriverNotFound as error:
    print(error)
"""
    words = [sys.executable, "-S", "-c", code]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == (
        "the Python package nvidia-ml-py is missing: `pip install nvidia-ml-py`.\n",
        "",
    )


def test_the_bindings_load_nothing_that_they_hardly_need_and_get_it_when_they_ask(fake: FakeNvml) -> None:
    script = """
names = {"subprocess", "shutil", "tempfile", "ctypes.util", "functools", "collections", "string", "re", "threading"}
for name in (*names, "pynvml"):  # which the fake machine has loaded
    sys.modules.pop(name, None)
from gpuguard.backends import nvml_loading
nvml_loading.load_bindings()
heavy = names & set(sys.modules)
import pynvml
later = pynvml.threading.Event().is_set(), pynvml.string.digits, hasattr(pynvml.string, "nothing")
import ctypes.util, functools, string, threading
kept = [module.__name__ for module in (ctypes.util, functools, string, threading) if not module.__spec__]
answer = heavy, later, kept, pynvml.find_library("c") == ctypes.util.find_library("c")
"""
    heavy, later, kept, same = answer_of(fake, script)

    assert (heavy, kept, same) == (set(), [], True)
    assert later == (False, "0123456789", False)


def test_the_binding_has_the_classes_of_its_errors_when_it_raises_one_and_not_before(fake: FakeNvml) -> None:
    script = (
        BOTH
        + """
import pynvml
def named():
    return {name for name in vars(pynvml) if name.startswith("NVMLError_")}
def told(binding, code):
    try:
        binding._nvmlCheckReturn(code)
    except binding.NVMLError as error:
        return type(error).__name__, error.value, str(error)
before = named()
codes = sorted(full.NVMLError._valClassMapping)
sys.modules["pynvml"] = full  # in which it looks for itself
wanted = [told(full, code) for code in codes]
sys.modules["pynvml"] = pynvml
same = [told(pynvml, code) for code in codes] == wanted
real = {name for name in vars(full) if name.startswith("NVMLError_")}
answer = before, len(codes), same, named() ^ real, pynvml.nvmlExceptionClass(3).__name__
"""
    )
    before, count, same, different, third = answer_of(fake, script)

    assert (before, same, different, third) == (set(), True, set(), "NVMLError_NotSupported")
    assert count > 10


def test_ctypes_loads_nothing_that_it_hardly_needs_and_is_ctypes_all_the_same() -> None:
    code = """
import sys
from gpuguard.backends import nvml_loading
nvml_loading.load_bindings()
print(sorted({"struct", "_struct", "types", "ctypes._endian"} & set(sys.modules)))
import ctypes, struct, types
print({name for name in ("struct", "types") if not sys.modules[name].__spec__})
class Big(ctypes.BigEndianStructure):
    _fields_ = [("number", ctypes.c_uint16)]
print(bytes(nvml_loading.made(Big)(1)), ctypes.Array[int], ctypes.c_long(-1).value, ctypes.sizeof(ctypes.c_void_p))
"""
    words = [sys.executable, "-S", "-c", code]
    environment = {"PYTHONPATH": f"{ROOT}:{Path(pynvml.__file__).parent}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    early = str(["_struct", "struct"] if sys.version_info[:2] == (3, 14) else [])  # for complex numbers
    assert (done.stdout.splitlines(), done.stderr) == (
        [early, "set()", "b'\\x00\\x01' _ctypes.Array[int] -1 8"],
        "",
    )
