# SPDX-License-Identifier: Apache-2.0
"""Runs a few lines of PTX on lanes of values."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from snippets import module

from emulator.core import Kind, Program, Warp
from emulator.ptx.ir import BITS, Reg

FULL = 0xFFFFFFFF
POISON = 0xA5A5A5A5A5A5A5A5A5A5A5A5A5A5A5A5

REGISTERS = (("%p", "pred"), ("%rs", "b16"), ("%rd", "b64"), ("%rq", "b128"), ("%r", "b32"), ("%f", "f32"))


def reg(name: str) -> Reg:
    """A register of the snippets' declarations."""
    return next(Reg(name, kind) for prefix, kind in REGISTERS if name.startswith(prefix))


def program(body: str, **options: str) -> Program:
    made = module(body, **options)
    return Program(made, made.entries["k"])


def warp(body_or_program: "str | Program", **options) -> Warp:
    made = program(body_or_program) if isinstance(body_or_program, str) else body_or_program
    return Warp(made, **{"specials": {}, **options})


def put(w: Warp, name: str, values: Sequence[int], mask: int = FULL) -> None:
    """Give a register a value a lane."""
    of = reg(name)
    if of.bits == 128:
        w.put_b128(of, np.array([[v & (1 << 64) - 1, v >> 64] for v in values], np.uint64), mask)
    elif of.bits == 64:
        w.put64(of, np.array(values, np.uint64), mask)
    else:
        w.put32(of, np.array(values, np.uint32), mask)


def get(w: Warp, name: str) -> list[int]:
    of = reg(name)
    if of.bits == 128:
        return [int(low) | int(high) << 64 for low, high in w.b128(of)]
    return [int(v) for v in (w.u64(of) if of.bits == 64 else w.u32(of))]


def run(body: str, inputs: Mapping[str, Sequence[int]], outputs: Sequence[str], **options) -> list[list[int]]:
    """The outputs' lanes after the body, which must neither trap nor read what was not written.

    Inputs may be longer than a warp; they run 32 at a time. Outputs hold a pattern before.
    """
    made = program(body)
    count = len(next(iter(inputs.values())))
    found: list[list[int]] = [[] for _ in outputs]
    for start in range(0, count, 32):
        w = warp(made, **options)
        for name in outputs:
            put(w, name, [POISON & ((1 << reg(name).bits) - 1)] * 32)
        for name in inputs.keys() & made.registers:
            values = inputs[name]
            batch = list(values[start : start + 32])
            put(w, name, batch + [batch[0]] * (32 - len(batch)))
        event = w.run()
        assert event.kind is Kind.DONE, made.instrs[event.index]
        assert not w.faults()
        for out, name in zip(found, outputs, strict=True):
            out += get(w, name)
    return [out[:count] for out in found]


def edges(bits: int) -> list[int]:
    """Integers at the corners of a width."""
    top = 1 << bits - 1
    return sorted({v % (1 << bits) for v in (0, 1, 2, 3, 7, 8, 15, 31, 32, 33, -1, -2, -8, top, top - 1, top + 1)})


def samples(bits: int, count: int = 64, seed: int = 0) -> list[int]:
    """Corners and random values of all magnitudes."""
    rng = random.Random(seed * 1000 + bits)
    return edges(bits) + [rng.getrandbits(rng.randint(1, bits)) for _ in range(count)]


def tuples(*widths: int, count: int = 160, seed: int = 0) -> list[list[int]]:
    """One list a source: pairs of corners, then random ones."""
    rng = random.Random(seed)
    columns = [samples(bits, seed=place) for place, bits in enumerate(widths)]
    rows = [tuple(rng.choice(column) for column in columns) for _ in range(count)]
    if len(widths) == 1:
        rows = [(v,) for v in columns[0]]
    elif len(widths) == 2:
        rows += [(a, b) for a in edges(widths[0]) for b in edges(widths[1])]
    return [list(column) for column in zip(*rows, strict=True)]


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def registers_of(types: Sequence[str]) -> list[str]:
    """A register for each type, none twice."""
    prefixes = {1: "%p", 8: "%rs", 16: "%rs", 32: "%r", 64: "%rd", 128: "%rq"}
    return [f"{prefixes[BITS[kind]]}{place + 1}" for place, kind in enumerate(types)]


def check(opcode: str, result: str, sources: Sequence[str], expected: Callable[..., int], count: int = 160) -> None:
    """One instruction against a function of Python integers, both of the types' widths."""
    d = registers_of([result])[0]
    names = [name[:-1] + str(place + 2) for place, name in enumerate(registers_of(sources))]
    columns = tuples(*(BITS[kind] for kind in sources), count=count)
    (found,) = run(f"{opcode} {', '.join([d, *names])};", dict(zip(names, columns, strict=True)), [d])
    bits = BITS[result]
    for row, value in zip(zip(*columns, strict=True), found, strict=True):
        wanted = expected(*row) & ((1 << bits) - 1)
        assert value == wanted, f"{opcode} {[hex(v) for v in row]}: {value:#x}, not {wanted:#x}"
