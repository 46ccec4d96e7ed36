# SPDX-License-Identifier: Apache-2.0
"""Tensor maps in memory: reading them (PTX ISA 9.2, 5.5.8) and changing them (9.7.9.28).

They are read as they are: what the tensormap proxy sees of changes without its fences is not followed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import SHARED_BASE
from emulator.errors import Unsupported
from emulator.host.tensor_map import BYTES, Element, TensorMap, decode
from emulator.machine.access import by_space, load, store
from emulator.machine.findings import Kind
from emulator.machine.handlers.issue import distinct
from emulator.machine.handlers.memory import space_of
from emulator.machine.handlers.registry import executes
from emulator.machine.memory import MemoryFault
from emulator.machine.runner import Runner
from emulator.ptx.ir import Imm, Instr

ALIGNMENT = 64

decoded = lru_cache(maxsize=1024)(decode)


def tensor_map(runner: Runner, address: int) -> TensorMap:
    """The tensor map at a generic address: in a parameter, in constant or in global memory.

    Raises:
        MemoryFault: there is nothing, or the address is misaligned.
        Unsupported: the map cannot be read.
    """
    if address >= SHARED_BASE:
        raise MemoryFault(Kind.BOUNDS, f"a tensor map at {address:#x}, which is not in global memory", 0)
    if address % ALIGNMENT:
        raise MemoryFault(Kind.ALIGNMENT, f"tensor map {address:#x} is not aligned to {ALIGNMENT} bytes", 0)
    offset = address - runner.warp.param_base
    if 0 <= offset <= runner.run.parameters.size - BYTES:
        return decoded(runner.run.parameters[offset : offset + BYTES].tobytes())
    return decoded(runner.run.memory.load(np.array([address]), 8, BYTES // 8).tobytes())


# Changing them, in the layout that `emulator.host.tensor_map` describes.


@dataclass(frozen=True)
class Bits:
    """Where a field's value lies: bits of the little-endian number that a map is, and how the value gets there."""

    first: int
    count: int
    encode: Callable[[int], int]


def less_one(value: int) -> int:
    return value - 1


# By the operand of `.elemtype` (PTX ISA 9.2, table 34): the element, and whether it is rounded to tf32.
ELEMENT_TYPES = {
    0: (Element.U8, False),
    1: (Element.U16, False),
    2: (Element.U32, False),
    4: (Element.U64, False),
    6: (Element.F16, False),
    7: (Element.F32, False),
    9: (Element.F64, False),
    10: (Element.BF16, False),
    11: (Element.F32, True),
}
# Bits of the word at byte 8.
FLAGS = 8 * 8
SWIZZLE_MODES = 4


def element_type(value: int) -> tuple[Element, bool]:
    if value not in ELEMENT_TYPES:
        raise Unsupported(f"tensormap.replace of elemtype by {value}")
    return ELEMENT_TYPES[value]


def up_to(field: str, count: int) -> Callable[[int], int]:
    """The value itself, which is below `count`: others are not followed."""

    def encode(value: int) -> int:
        if value >= count:
            raise Unsupported(f"tensormap.replace of {field} by {value}")
        return value

    return encode


def places(field: str, number: int) -> tuple[Bits, ...]:
    """The bits of a field, or of its element `number`."""
    if field == "global_address":
        return (Bits(0, 64, int),)
    if field == "rank":
        # The operand is the rank less one, as in a map.
        return (Bits(8 * 8 + 4, 3, int),)
    if field == "global_dim":
        return (Bits(8 * (32 + 4 * number), 32, less_one),)
    if field == "global_stride":
        low = Bits(8 * (12 + 4 * number), 32, lambda step: step >> 4)
        return (low, Bits(8 * 28 + 4 * number, 4, lambda step: step >> 36))
    if field == "box_dim":
        return (Bits(8 * (55 + number), 8, less_one),)
    if field == "element_stride":
        return (Bits(8 * 52 + 3 * number, 3, less_one),)
    if field == "elemtype":
        is_tf32 = Bits(FLAGS + 16, 1, lambda value: int(element_type(value)[1]))
        return (Bits(FLAGS + 7, 4, lambda value: int(element_type(value)[0].value[0])), is_tf32)
    if field == "swizzle_mode":
        return (Bits(FLAGS + 13, 3, up_to(field, SWIZZLE_MODES)),)
    if field in ("interleave_layout", "fill_mode"):
        # No layout, and zeros: what no bit says.
        return (Bits(FLAGS, 0, up_to(field, 1)),)
    raise Unsupported(f"tensormap.replace of {field}")


@executes("tensormap.replace")
def execute_replace(runner: Runner, instr: Instr) -> None:
    """Writes a field of a map in shared or global memory, by the tensormap proxy."""
    address, value, number = instr["a"], instr["value"], 0
    assert address is not None
    assert value is not None
    if "ord" in instr.op.form.place and isinstance(operand := instr["ord"], Imm):
        number = operand.value
    field = instr.op["field"] or ""
    for at, new in distinct(runner, address, value):
        data, written = whole(runner, space_of(instr), at)
        bits = int.from_bytes(data.tobytes(), "little")
        for one in places(field, number):
            mask = (1 << one.count) - 1
            bits = bits & ~(mask << one.first) | (one.encode(new) & mask) << one.first
        written(np.frombuffer(bits.to_bytes(BYTES, "little"), np.uint8))
    runner.run.progress += 1


@executes("tensormap.cp_fenceproxy")
def execute_copy(runner: Runner, instr: Instr) -> None:
    """A map from shared to global memory."""
    to, source = instr["d"], instr["a"]
    assert to is not None
    assert source is not None
    for at, origin in distinct(runner, to, source):
        data, _ = whole(runner, "shared", origin)
        _, write = whole(runner, "global", at)
        write(data)
    runner.run.progress += 1


def whole(
    runner: Runner, space: str | None, address: int
) -> tuple[NDArray[np.uint8], Callable[[NDArray[np.uint8]], None]]:
    """A map's bytes, and a function that writes them."""
    if space is None:
        ((space, _, found),) = by_space(np.array([address]))
        address = int(found[0])
    if address % ALIGNMENT:
        raise MemoryFault(Kind.ALIGNMENT, f"tensor map {address:#x} is not aligned to {ALIGNMENT} bytes", 0)
    addresses = np.array([address])
    words = address + np.arange(0, BYTES, 4)
    if space == "shared":
        data, _ = load(runner, "shared", words, 4, 1)
        return data.reshape(-1).view(np.uint8), lambda new: store(runner, "shared", words, new.view(np.uint32)[:, None])
    memory = runner.run.memory
    data = memory.load(addresses, 8, BYTES // 8)
    return data.reshape(-1).view(np.uint8), lambda new: memory.store(addresses, new.view(np.uint64)[None])
