# SPDX-License-Identifier: Apache-2.0
"""Atomics and reductions of a warp's threads (PTX ISA 9.2, 9.7.13.5 to 9.7.13.7)."""

from typing import Any

import numpy as np

from emulator.errors import Unsupported
from emulator.machine import copies
from emulator.machine.access import shared_parts, touch_global, touch_shared, words_of
from emulator.machine.floats import flush
from emulator.machine.handlers.flags import acquire, release
from emulator.machine.handlers.memory import items, parts, read_items, write_items
from emulator.machine.handlers.registry import executes
from emulator.machine.runner import Runner
from emulator.ptx.ir import BITS, Instr

Values = np.ndarray[Any, Any]


def combine(op: str, kind: str, old: Values, new: Values, other: Values | None, flushes: bool) -> Values:
    """The new content of [1, count] words; all of them unsigned integers of the type's width.

    Args:
        other: the third operand of `cas`.
        flushes: subnormal f32, terms and sum, become zeros.
    """
    if op == "exch":
        return new
    if op == "cas":
        # `cas` compares with b and stores c.
        assert other is not None
        # 128 bits are two words, and one comparison.
        return np.where((old == new).all(axis=1, keepdims=True), other, old)
    # Packed halves are halves: each of them is atomic on its own.
    element = kind.removesuffix("x2")

    def flushed(words: Values) -> Values:
        return flush(words.view(np.float32)).view(np.uint8) if flushes else words.view(np.uint8)

    flat = flushed(copies.reduce(op, element, flushed(old.ravel()), flushed(new.ravel()), cluster=False))
    return flat.view(old.dtype).reshape(old.shape)


@executes("atom", "red")
def execute_atomic(runner: Runner, instr: Instr) -> None:
    """Lane by lane: the order within a warp is open, and any is right."""
    op, kind = instr.op["op"] or "", instr.op["type"] or ""
    source = instr["b"]
    assert source is not None
    bits = BITS[kind]
    values = read_items(runner, items(source), bits)
    third = instr["c"] if "c" in instr.op.form.place else None
    others = None if third is None else read_items(runner, items(third), bits)
    size = values.dtype.itemsize * values.shape[1]
    before = np.empty_like(values)
    for space, lanes, addresses in parts(runner, instr, "a"):
        release(runner, instr, space, addresses, atomic=True)
        if space == "shared":
            for cta, some, offsets in shared_parts(runner, addresses):
                cta.shared.check(offsets, size)
                touch_shared(runner, cta, *words_of(offsets, size), write=True, atomic=True)
                update(cta.shared.bytes, offsets, lanes[some], op, kind, values, others, before, flushes=False)
        elif space == "global":
            if runner.run.stand_for > 1 and claims(instr, values):
                values = values * values.dtype.type(runner.run.stand_for)
            for region, some, offsets in touch_global(runner, addresses, size, write=True, atomic=True):
                # The ISA: sums of f32 flush subnormal numbers in global memory, and keep them in shared memory.
                update(region.bytes, offsets, lanes[some], op, kind, values, others, before, flushes=kind == "f32")
        else:
            raise Unsupported(f"{instr.op.text} on local memory, on line {instr.line}")
        acquire(runner, instr, space, addresses, atomic=True)
    runner.run.profile.count(f"{instr.op.name} operations", runner.count)
    runner.run.progress += 1
    to = instr["d"] if "d" in instr.op.form.place else None
    if to is not None:
        write_items(runner, items(to), before, kind if kind[0] != "s" else f"u{bits}")


def claims(instr: Instr, values: Values) -> bool:
    """Whether one thread counts one in memory of the GPU, and wants to know how many were counted before."""
    return instr.op.name == "atom" and instr.op["op"] == "add" and values.size == 1 and int(values[0, 0]) == 1


def update(memory: Any, offsets: Values, lanes: Values, op: str, kind: str, values: Values, others: Values | None,
           before: Values, *, flushes: bool) -> None:  # fmt: skip
    element, count = values.dtype.itemsize, values.shape[1]
    for lane, offset in zip(lanes, offsets, strict=True):
        place = np.array([offset], np.int64)
        old = memory.load(place, element, count)
        other = None if others is None else others[lane : lane + 1]
        memory.store(place, combine(op, kind, old, values[lane : lane + 1], other, flushes))
        before[lane] = old[0]
