# SPDX-License-Identifier: Apache-2.0
"""What a micro-kernel is: its text, its inputs and how far a chip's results may lie from the emulator's.

This module and the micro_*.py that build on it need numpy alone, so that make.py runs them where there is a GPU.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

VERSION, TARGET = "8.6", "sm_90a"
HEADER = f".version {VERSION}\n.target {TARGET}\n.address_size 64\n.extern .shared .align 1024 .b8 shared[];\n"
REGISTERS = ".reg .pred %p<32>;\n.reg .b16 %rs<32>;\n.reg .b32 %r<300>;\n.reg .b64 %rd<80>;\n.reg .b128 %rq<4>;\n"
ALIGN = 256


# Rules: how a result of the chip may differ from the emulator's.


@dataclass(frozen=True)
class Bits:
    """Not at all.

    Attributes:
        nan: format, one of f16, bf16, f32, f64, in which any NaN equals any other: the ISA fixes no payload there.
    """

    nan: str = ""


@dataclass(frozen=True)
class Close:
    """An approximate unit: the ISA's bound on the error, relative or absolute, of either side's result.

    Attributes:
        format: of the elements, f16, bf16 or f32.
        relative: to the exact value.
        absolute: holds where it is larger.
        source: what the bound is from.
    """

    format: str
    relative: float
    source: str
    absolute: float = 0.0


@dataclass(frozen=True)
class Sum:
    """A matrix product: `terms` products and sums, aligned to the largest and cut to `bits` bits behind its first one.

    The bound is terms * 2^-bits times the sum of the products' magnitudes, found by running the kernel on inputs
    without signs, and one unit of the result's last place.
    """

    format: str
    terms: int
    bits: int


Rule = Bits | Close | Sum


@dataclass(frozen=True)
class Result:
    """A stretch of the output.

    Attributes:
        label: the instruction that it is of.
        content: before the launch.
        rule: how it is compared.
    """

    label: str
    content: Array
    rule: Rule = field(default_factory=Bits)


@dataclass(frozen=True)
class Map:
    """A tensor map, of an input or, with `input` None, of the first result.

    Attributes:
        type: a name of DATA_TYPES.
        dims, box: elements, the contiguous dimension first.
        strides: bytes, of the dimensions 1 and up.
    """

    input: int | None
    type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()


# Numbers of CUtensorMapDataType, and bytes of an element.
DATA_TYPES = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "s32": (3, 4),
    "u64": (4, 8),
    "s64": (5, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "f64": (8, 8),
    "bf16": (9, 2),
    "tf32": (11, 4),
}


@dataclass(frozen=True)
class Case:
    """A kernel and its launch.

    Parameters of the kernel are p0, p1, ... for the inputs, `out` for the results, which lie one behind the other, each
    at a multiple of 16 bytes, and m0, m1, ... for the tensor maps.

    Attributes:
        name: family/what.
        signs: inputs by index with the bits to be cleared for their magnitudes, where a rule is Sum.
    """

    name: str
    body: str
    inputs: tuple[Array, ...]
    results: tuple[Result, ...]
    grid: int = 1
    block: int = 128
    cluster: int = 1
    shared: int = 0
    maps: tuple[Map, ...] = ()
    signs: tuple[tuple[int, int], ...] = ()

    @property
    def entry(self) -> str:
        return "k_" + re.sub(r"\W", "_", self.name)

    @property
    def offsets(self) -> list[int]:
        """Bytes from the output's start to each result, and to its end."""
        found = [0]
        for result in self.results:
            found.append(found[-1] + -(-result.content.nbytes // 16) * 16)
        return found

    def text(self) -> str:
        """The `.entry`, without a module's header."""
        params = [f".param .b64 p{index}" for index in range(len(self.inputs))] + [".param .b64 out"]
        params += [f".param .align 64 .b8 m{index}[128]" for index in range(len(self.maps))]
        return f".visible .entry {self.entry}({', '.join(params)})\n{{\n{REGISTERS}{self.body}\nret;\n}}\n"

    def output(self) -> NDArray[np.uint8]:
        """What the output holds before the launch."""
        offsets = self.offsets
        found = np.zeros(offsets[-1], np.uint8)
        for result, start in zip(self.results, offsets[:-1], strict=True):
            found[start : start + result.content.nbytes] = np.frombuffer(result.content.tobytes(), np.uint8)
        return found

    def magnitudes(self) -> tuple[Array, ...]:
        """The inputs without their signs."""
        masks = dict(self.signs)
        return tuple(
            one & one.dtype.type(~masks[index] & ((1 << 8 * one.itemsize) - 1)) if index in masks else one
            for index, one in enumerate(self.inputs)
        )

    def digest(self) -> str:
        """Changes with everything that decides what a chip answers."""
        made = hashlib.sha256(f"{HEADER}{self.text()}{self.grid, self.block, self.cluster, self.shared}".encode())
        made.update(repr(self.maps).encode())
        for one in (*self.inputs, self.output()):
            made.update(one.tobytes())
        return made.hexdigest()[:16]


# Inputs. The generator is written out: numpy's own streams may change between its versions.


def bits(count: int, seed: int) -> NDArray[np.uint64]:
    """Random 64-bit words (splitmix64: Steele, Lea and Flood, 2014)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        seed * 0x632BE59BD9B4E019 & (1 << 64) - 1
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def pick(choices: "list[int] | Array", count: int, seed: int, dtype: Any) -> Array:
    """Random ones of the choices."""
    table = np.array(choices, dtype=np.uint64)
    return table[(bits(count, seed) >> np.uint64(11)) % np.uint64(len(table))].astype(dtype)


def seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
