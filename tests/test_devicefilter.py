"""The device filter, executed by a small interpreter of its own: it refuses what isolation hides, and nothing else."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.jobs.device_filter import BLOCK, CHARACTER, program
from gpuguard.jobs.isolation import Nodes

READ_WRITE, MAKE = 6, 1  # BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE, BPF_DEVCG_ACC_MKNOD of linux/bpf.h
INSTRUCTION = struct.Struct("=BBhi")


def executed(code: bytes, kind: int, major: int, minor: int, access: int = READ_WRITE) -> int:
    """What the kernel would answer, 1 is "allowed"; instructions as Linux's instruction-set.rst has them."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    lines = list(INSTRUCTION.iter_unpack(code))
    registers = {1: 0}
    place = steps = 0
    while steps < 10_000:
        opcode, operands, offset, constant = lines[place]
        target, source = operands & 15, operands >> 4
        place, steps = place + 1, steps + 1
        match opcode:
            case 0x61:  # load a word
                registers[target] = struct.unpack_from("=I", context, registers[source] + offset)[0]
            case 0x57:
                registers[target] &= constant & 0xFFFFFFFFFFFFFFFF
            case 0xB7:
                registers[target] = constant
            case 0x15:
                place += offset if registers[target] == constant else 0
            case 0x55:
                place += offset if registers[target] != constant else 0
            case 0x25:
                place += offset if registers[target] > constant else 0
            case 0x95:
                return registers[0]
            case _:
                raise AssertionError(f"the kernel knows no instruction {opcode:#x} like that")
    raise AssertionError("it does not end")


minors = st.frozensets(st.integers(0, 300), max_size=20)
nodes = st.builds(Nodes, minors, minors, st.none() | st.integers(234, 511))


@given(nodes, st.integers(0, 600) | st.sampled_from([195, 507]), st.integers(0, 2**20 - 1) | st.integers(0, 300))
def test_it_refuses_exactly_the_hidden_nodes(wanted, major, minor):
    code = program(wanted.rules())

    assert executed(code, CHARACTER, major, minor) == (not wanted.hides(major, minor))
    assert executed(code, CHARACTER, major, minor, MAKE) == (not wanted.hides(major, minor))
    assert executed(code, BLOCK, major, minor) == 1


@pytest.mark.parametrize(
    ("major", "minor", "allowed"),
    [
        (195, 0, 0), (195, 1, 1), (195, 2, 0), (195, 247, 0),  # devices, of which 1 is claimed
        (195, 254, 1), (195, 255, 1),  # nvidia-modeset, nvidiactl
        (507, 12, 1), (507, 13, 0), (507, 1, 0),  # capabilities
        (1, 3, 1), (5, 2, 1), (136, 0, 1), (510, 0, 1),  # null, ptmx, a terminal, nvidia-uvm
    ],
)  # fmt: skip
def test_a_job_on_one_device(major, minor, allowed):
    code = program(Nodes(frozenset({1}), frozenset({12}), 507).rules())

    assert executed(code, CHARACTER, major, minor) == allowed


@given(nodes)
def test_every_jump_goes_forward_and_stays_inside(wanted):
    lines = list(INSTRUCTION.iter_unpack(program(wanted.rules())))

    for place, (opcode, _, offset, _) in enumerate(lines):
        if opcode in (0x15, 0x55, 0x25):
            assert offset >= 0 and place + 1 + offset < len(lines)


@pytest.mark.parametrize("place", range(4, 8))
def test_a_program_with_another_constant_is_caught(place):
    right = program(Nodes(frozenset({1})).rules())
    wrong = bytearray(right)
    wrong[place * 8 + 4] ^= 1

    assert any(
        executed(bytes(wrong), kind, major, minor) != executed(right, kind, major, minor)
        for kind in (BLOCK, CHARACTER)
        for major in (194, 195, 196)
        for minor in range(256)
    )
