# SPDX-License-Identifier: Apache-2.0
"""What the tests of matrix instructions compare with: element values by definition and CuTe layouts.

Layouts are evaluated as CUTLASS's documentation of CuTe defines them: coordinates run through the first mode fastest.
"""

import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.ptx import Instr, parse
from emulator.ptx.forms import FORMS

# exponent bits, mantissa bits, bias; what the highest exponent means is left out: no case uses it
SMALL = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e3m2": (3, 2, 3), "e2m3": (2, 3, 1), "e2m1": (2, 1, 1)}
BITS = {"tf32": 32, "f32": 32, "s32": 32, "f16": 16, "bf16": 16} | dict.fromkeys((*SMALL, "s8", "u8"), 8)


def instruction(line: str) -> Instr:
    """One instruction between registers %r0.. (32 bits), %rd0.. (64 bits) and %p0.."""
    registers = ".reg .b32 %r<400>;\n.reg .b64 %rd<8>;\n.reg .pred %p<2>;"
    module = parse(
        f".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k() {{\n{registers}\n{line}\n}}\n"
    )
    code = module.entries["k"].code
    assert code is not None
    return code[0]


def vector(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + index}" for index in range(count)) + "}"


def spellings(form_id: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every opcode with modifiers that rows of the table of forms allow, and its modifiers by group."""
    for form in (form for form in FORMS if form.id == form_id):
        choices = [(*group.values, *((None,) if group.optional else ())) for group in form.groups]
        for values in itertools.product(*choices):
            found = {group.name: value for group, value in zip(form.groups, values, strict=True) if value is not None}
            yield ".".join((form.opcode, *found.values())), found


def value(code: int, element: str) -> float:
    """The number that a code stands for; of formats below 8 bits the code alone, without its container."""
    if element == "u8":
        return code
    if element == "s8":
        return code - 256 if code >= 128 else code
    if element == "s32":
        return int(struct.unpack("<i", struct.pack("<I", code))[0])
    if element == "f16":
        return float(struct.unpack("<e", struct.pack("<H", code))[0])
    if element == "bf16":
        return float(struct.unpack("<f", struct.pack("<I", code << 16))[0])
    if element in ("f32", "tf32"):
        return float(struct.unpack("<f", struct.pack("<I", code & 0xFFFFE000 if element == "tf32" else code))[0])
    exponent, mantissa, bias = SMALL[element]
    sign = -1 if code >> (exponent + mantissa) else 1
    power, fraction = code >> mantissa & ((1 << exponent) - 1), code & ((1 << mantissa) - 1)
    if power == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / 2**mantissa) * 2.0 ** (power - bias)


def codes(element: str, shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Random codes of numbers between 1/16 and 8, or zero: sums of their products are exact in float64."""
    draw = np.random.default_rng(seed)
    if element in ("s8", "u8"):
        return draw.integers(0, 256, shape)
    count = math.prod(shape)
    if element in SMALL:
        exponent, mantissa, _ = SMALL[element]
        pool = np.array([one for one in range(2 << (exponent + mantissa)) if usable(value(one, element))])
        return draw.choice(pool, shape)
    numbers = (draw.integers(1024, 2048, count) * 2.0 ** draw.integers(-14, -7, count)) * draw.choice([-1, 0, 1], count)
    if element == "bf16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.int64).reshape(shape)
    if element == "f16":
        return numbers.astype(np.float16).view(np.uint16).astype(np.int64).reshape(shape)
    # Bits that tf32 has not: they must not count.
    noise = draw.integers(0, 1 << 13, count) if element == "tf32" else 0
    return (numbers.astype(np.float32).view(np.uint32) | noise).astype(np.int64).reshape(shape)


def usable(number: float) -> bool:
    return number == 0 or 1 / 16 <= abs(number) <= 8


def values(array: NDArray[np.int64], element: str) -> NDArray[np.float64]:
    return np.array([value(int(code), element) for code in array.ravel()], dtype=np.float64).reshape(array.shape)


def contained(array: NDArray[np.int64], element: str) -> NDArray[np.int64]:
    """Codes in what holds them in registers: four bits in the middle of a byte, 0b00ABCD00."""
    return array << 2 if element == "e2m1" else array


def accumulators(element: str, shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Random codes of accumulators, large enough that results are rounded."""
    draw = np.random.default_rng(seed)
    if element == "s32":
        return draw.integers(0, 1 << 32, shape)
    if element == "f16":
        return (draw.standard_normal(shape) * 100).astype(np.float16).view(np.uint16).astype(np.int64)
    return np.ldexp(draw.integers(-(1 << 20), 1 << 20, shape), -6).astype(np.float32).view(np.uint32).astype(np.int64)


def rounded(total: NDArray[np.float64], element: str, *, saturate: bool = False) -> NDArray[np.int64]:
    """Codes of results."""
    if element == "s32":
        whole = [int(one) for one in total.ravel()]
        if saturate:
            whole = [min(max(one, -(2**31)), 2**31 - 1) for one in whole]
        return np.array([one % 2**32 for one in whole], dtype=np.int64).reshape(total.shape)
    if element == "f16":
        return total.astype(np.float16).view(np.uint16).astype(np.int64)
    return total.astype(np.float32).view(np.uint32).astype(np.int64)


def cut(number: float, bits: int, exponent: int | None = None) -> float:
    """A number cut towards zero behind so many bits of its leading one, or of a power of two."""
    if exponent is None:
        exponent = math.frexp(number)[1] - 1
    return math.ldexp(math.trunc(math.ldexp(number, bits - exponent)), exponent - bits)


def narrow_sum(
    a: NDArray[np.float64], b: NDArray[np.float64], c: NDArray[np.float64] | None, element: str
) -> NDArray[np.float64]:
    """What an SM90 keeps of products of normal 8-bit floats and c, term by term; an H200's bits."""
    total = np.zeros((len(a), len(b)))
    for i, j in np.ndindex(total.shape):
        pairs = [(x, y) for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True) if x and y]
        before = 0.0 if c is None else float(c[i, j])
        powers = [math.frexp(x)[1] + math.frexp(y)[1] - 2 for x, y in pairs]
        powers += [math.frexp(before)[1] - 1] if before else []
        if powers:
            terms = [before, *(x * y for x, y in pairs)]
            found = sum(cut(one, 13, max(powers)) for one in terms)
            total[i, j] = cut(found, 13) if element == "f32" and found else found
    return total


def pack(elements: dict[tuple[int, int, int], int], count: int, bits: int) -> NDArray[np.uint32]:
    """Registers [count, 32] from code by (register, lane, place in the register)."""
    registers = np.zeros((count, 32), dtype=np.uint64)
    for (register, lane, place), code in elements.items():
        registers[register, lane] |= np.uint64(code << (place * bits))
    assert registers.max() < 1 << 32
    return registers.astype(np.uint32)


def layout(coordinate: int, shape: Any, stride: Any) -> int:
    """CuTe: the index of a coordinate, counted through the modes in order."""
    if not isinstance(shape, tuple):
        return coordinate * stride
    index = 0
    for one_shape, one_stride in zip(shape, stride, strict=True):
        size = extent(one_shape)
        index += layout(coordinate % size, one_shape, one_stride)
        coordinate //= size
    return index


def extent(shape: Any) -> int:
    return math.prod(extent(one) for one in shape) if isinstance(shape, tuple) else shape


def swizzled(address: int, bits: int) -> int:
    """CuTe: Swizzle<bits, 4, 3>."""
    return address ^ ((address >> 7 & ((1 << bits) - 1)) << 4)
