# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, prefetches and cache policies (PTX ISA 9.2, 9.7.9.8 to 9.7.9.18)."""

from contextlib import nullcontext

import numpy as np

from emulator.core.warp import lanes_of
from emulator.machine.access import Addresses, Values, by_space, load, store
from emulator.machine.handlers.flags import acquire, release, strong
from emulator.machine.handlers.registry import executes
from emulator.machine.runner import Runner
from emulator.ptx.ir import BITS, Address, Instr, Operand, Sink, Vec


def space_of(instr: Instr, modifier: str = "space") -> str | None:
    """shared, global or local; None for a generic address."""
    space = instr.op[modifier]
    if space is None:
        return None
    name = space.partition("::")[0]
    return "global" if name in ("const", "param") else name


def items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def parts(runner: Runner, instr: Instr, operand: str) -> list[tuple[str, np.ndarray, Addresses]]:
    """The lanes' addresses by space: (space, places among the lanes, addresses)."""
    address = instr[operand]
    assert isinstance(address, Address)
    addresses = runner.warp.address(address)[runner.lanes]
    space = space_of(instr)
    if space is None:
        return list(by_space(addresses))
    return [(space, np.arange(addresses.size), addresses)]


def read_items(runner: Runner, operands: tuple[Operand, ...], bits: int) -> Values:
    """[lanes, count] of registers, as integers of that many bits; those of 128 bits as two of 64."""
    warp, lanes = runner.warp, runner.lanes
    if bits == 128:
        return np.concatenate([warp.b128(one)[lanes] for one in operands], axis=1)
    if bits == 64:
        return np.stack([warp.u64(one)[lanes] for one in operands], axis=1)
    return np.stack([warp.u32(one, bits)[lanes] for one in operands], axis=1).astype(f"u{bits // 8}")


def write_items(runner: Runner, operands: tuple[Operand, ...], values: Values, kind: str) -> None:
    """Put values [lanes, count] of a type into registers; signed ones are extended."""
    warp, lanes, bits = runner.warp, runner.lanes, BITS[kind]
    if bits == 128:
        for number, one in enumerate(operands):
            wide = np.zeros((32, 2), np.uint64)
            wide[lanes] = values[:, 2 * number : 2 * number + 2]
            warp.put_b128(one, wide)
        return
    if kind[0] == "s":
        values = values.view(f"i{bits // 8}")
    for number, one in enumerate(operands):
        if isinstance(one, Sink):
            continue
        if getattr(one, "bits", 32) > 32:
            all_lanes = np.zeros(32, np.uint64)
            all_lanes[lanes] = values[:, number].astype(np.int64 if kind[0] == "s" else np.uint64).view(np.uint64)
            warp.put64(one, all_lanes)
        else:
            some_lanes = np.zeros(32, np.uint32)
            signed = kind[0] == "s"
            some_lanes[lanes] = values[:, number].astype(np.int32).view(np.uint32) if signed else values[:, number]
            warp.put32(one, some_lanes)


@executes("ld", "ld#nc")
def execute_load(runner: Runner, instr: Instr) -> None:
    kind = instr.op["type"] or ""
    to = instr["d"]
    assert to is not None
    wanted = items(to)
    bits = BITS[kind]
    element, count = (8, 2 * len(wanted)) if bits == 128 else (bits // 8, len(wanted))
    values = np.empty((runner.count, count), f"u{element}")
    missing = None
    for space, lanes, addresses in parts(runner, instr, "a"):
        values[lanes], unwritten = load(runner, space, addresses, element, count, strong=strong(instr))
        if unwritten is not None:
            missing = np.zeros(values.shape, np.bool_) if missing is None else missing
            missing[lanes] = unwritten
        acquire(runner, instr, space, addresses)
    write_items(runner, wanted, values, kind)
    if missing is not None:
        per_item = missing.reshape(runner.count, len(wanted), -1).max(axis=-1)
        for number, one in enumerate(wanted):
            runner.warp.undefine(one, mask_of(runner.lanes[per_item[:, number]]))


def mask_of(lanes: Addresses) -> int:
    return sum(1 << int(lane) for lane in lanes)


def undefined_items(runner: Runner, operands: tuple[Operand, ...], bits: int) -> "np.ndarray | None":
    """[lanes, count] as read_items: which values hold nothing; None if all hold something."""
    masks = [runner.mask & ~runner.warp.defined(one, bits) for one in operands]
    if not any(masks):
        return None
    found = np.stack([lanes_of(mask)[runner.lanes] for mask in masks], axis=1)
    return np.repeat(found, 2, axis=1) if bits == 128 else found


@executes("st")
def execute_store(runner: Runner, instr: Instr) -> None:
    """A value that was never written may be passed on through shared memory; a store to other memory uses it."""
    source = instr["b"]
    assert source is not None
    operands, bits = items(source), BITS[instr.op["type"] or ""]
    where = parts(runner, instr, "a")
    undefined = None
    if all(space == "shared" for space, _, _ in where):
        undefined = undefined_items(runner, operands, bits)
    with runner.warp.passing() if undefined is not None else nullcontext():
        values = read_items(runner, operands, bits)
    for space, lanes, addresses in where:
        release(runner, instr, space, addresses)
        holding_nothing = None if undefined is None else undefined[lanes]
        store(runner, space, addresses, values[lanes], strong=strong(instr), undefined=holding_nothing)


@executes("prefetch", "prefetchu", "applypriority", "discard", "prefetch.tensormap", "prefetch#tensormap")
def execute_prefetch(runner: Runner, instr: Instr) -> None:
    """Changes nothing that a kernel can see."""


@executes("createpolicy.fractional", "createpolicy.range", "createpolicy.cvt")
def execute_policy(runner: Runner, instr: Instr) -> None:
    """A policy is a hint: any value does."""
    to = instr["policy"]
    assert to is not None
    runner.warp.put64(to, 0)
