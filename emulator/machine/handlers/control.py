# SPDX-License-Identifier: Apache-2.0
"""Fences, registers, launches, calls: what is neither memory nor matrices (PTX ISA 9.2, 9.7.13.4, 9.7.12, 9.7.19)."""

import ctypes
import sys

import numpy as np

from emulator.core.warp import lanes_of
from emulator.errors import Unsupported
from emulator.machine.clocks import Knowledge
from emulator.machine.findings import Kind
from emulator.machine.handlers.barriers import announce
from emulator.machine.handlers.registry import executes
from emulator.machine.runner import Abort, Runner, Wait
from emulator.ptx.ir import Imm, Instr, Names

WARPGROUP = 4


@executes("fence", "fence#restrict", "membar")
def execute_fence(runner: Runner, instr: Instr) -> None:
    """Relaxed loads in front of it acquire, relaxed stores behind it release."""
    if runner.unfenced is not None:
        runner.clock.acquire(runner.unfenced)
        runner.unfenced = None
    given = Knowledge.none(runner.clock.components)
    runner.clock.release(given)
    runner.fence = given


@executes("fence.proxy.async", "fence.proxy.async::generic", "membar.proxy", "fence.proxy.alias")
def execute_proxy_fence(runner: Runner, instr: Instr) -> None:
    if "alias" not in instr.op.text:
        runner.clock.proxy_fence()


@executes("fence.mbarrier_init", "fence.proxy.tensormap::generic", "fence.proxy.tensormap::generic#acquire")
def execute_init_fence(runner: Runner, instr: Instr) -> None:
    """Initialised mbarriers are visible by a relaxed arrival behind it; tensor maps are read as they are.

    The ISA promises it of mbarriers alone; here it is what a whole fence would do, so that no order is missed.
    """
    if "mbarrier_init" in instr.op.text:
        announce(runner)
        execute_fence(runner, instr)


@executes("griddepcontrol.wait")
def execute_dependency_wait(runner: Runner, instr: Instr) -> Wait | None:
    """Where launches do not overlap, whatever a grid depends on is complete."""
    runner.run.profile.count(instr.op.text)
    order = runner.run.order
    before = None if order is None else order.before
    if order is None or before is None:
        return None
    return Wait(
        "waits for the launch before",
        lambda: before.complete,
        lambda: runner.clock.knows.join_foreign(order.over_after_wait()),
    )


@executes("griddepcontrol.launch_dependents")
def execute_launch_dependents(runner: Runner, instr: Instr) -> Wait | None:
    """The first of a CTA counts; it orders no access to memory."""
    runner.run.profile.count(instr.op.text)
    order = runner.run.order
    if order is None or order.is_last or not order.release(runner.cta, runner.clock.knows.foreign):
        return None
    runner.run.progress += 1
    return pause("lets the next launch start")


@executes("nanosleep")
def execute_sleep(runner: Runner, instr: Instr) -> Wait:
    return pause("sleeps")


def pause(what: str) -> Wait:
    """Others have their turns."""
    turns = iter((False, True))
    return Wait(what, lambda: next(turns, True))


@executes("setmaxnreg")
def execute_registers(runner: Runner, instr: Instr) -> Wait | None:
    """A warpgroup gives registers back, or waits until as many as it asks for are free."""
    wanted = instr["n"]
    assert isinstance(wanted, Imm)
    count, cta = wanted.value, runner.cta
    held = cta.registers[runner.number]
    if count % 8 or not 24 <= count <= 256:
        runner.report(Kind.REGISTERS, f"{count} registers: a multiple of 8 from 24 to 256 is possible")
        raise Abort
    falls = instr.op["action"] == "dec"
    if cta.asked[runner.number] and (count > held if falls else count < held):
        change = "a decrease" if falls else "an increase"
        runner.report(Kind.REGISTERS, f"{change} to {count} registers by a warp that has {held}")

    def take() -> None:
        cta.registers[runner.number], cta.asked[runner.number] = count, True
        runner.run.progress += 1

    if falls or count <= held:
        take()
        return None
    return Wait(
        f"waits for {count} registers a thread; it has {held}, {cta.pool} of the SM's are free",
        lambda: cta.pool >= 32 * (count - held),
        take,
    )


@executes("trap", "brkpt")
def execute_trap(runner: Runner, instr: Instr) -> None:
    runner.report(Kind.TRAP, f"lanes {runner.mask:#010x} reach {instr.op.text}")
    raise Abort


@executes("call")
def execute_call(runner: Runner, instr: Instr) -> None:
    """Vprintf prints, __assertfail ends the launch; other functions are not called."""
    target, arguments, results = instr["callee"], instr["args"], instr["results"]
    name = str(getattr(target, "name", target))
    assert isinstance(arguments, Names)
    if name == "vprintf":
        for lane in runner.lanes:
            sys.stdout.write(formatted(runner, arguments, int(lane)))
        if isinstance(results, Names):
            for item in results.items:
                put_parameter(runner, item, 0)
        return
    if name == "__assertfail":
        runner.report(Kind.TRAP, f"an assertion fails in lanes {runner.mask:#010x}")
        raise Abort
    raise Unsupported(f"a call of {name}, on line {instr.line}")


def put_parameter(runner: Runner, item: object, value: int) -> None:
    name = getattr(item, "name", "")
    at = runner.warp.program.locals.get(name)
    if at is not None:
        runner.warp.local[lanes_of(runner.mask), at : at + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)


def parameter(runner: Runner, item: object, lane: int) -> int:
    at = runner.warp.program.locals[getattr(item, "name", "")]
    return int.from_bytes(runner.warp.local[lane, at : at + 8].tobytes(), "little")


def formatted(runner: Runner, arguments: Names, lane: int) -> str:
    """The text of a printf: the format is a C string in global memory, the values lie in local memory."""
    from emulator.core.program import LOCAL_BASE

    text = ctypes.string_at(parameter(runner, arguments.items[0], lane)).decode(errors="replace")
    at = parameter(runner, arguments.items[1], lane)
    values = runner.warp.local[lane, at - LOCAL_BASE if at >= LOCAL_BASE else at :].tobytes()
    return printf(text, values)


def printf(text: str, values: bytes) -> str:
    """C's printf, with values as vprintf takes them: each aligned to its size."""
    import re
    import struct

    offset = 0

    def take(size: int, code: str) -> object:
        nonlocal offset
        offset = -(-offset // size) * size
        (found,) = struct.unpack_from(code, values, offset)
        offset += size
        return found

    def replace(found: "re.Match[str]") -> str:
        flags, length, kind = found.groups()
        if kind == "%":
            return "%"
        if kind == "s":
            address = take(8, "<Q")
            return ("%" + flags + "s") % ctypes.string_at(address).decode(errors="replace")  # type: ignore[arg-type]
        if kind in "fFeEgG":
            return ("%" + flags + kind) % take(8, "<d")
        if kind == "c":
            return ("%" + flags + "c") % chr(int(take(4, "<i")))  # type: ignore[call-overload]
        if kind == "p":
            return hex(int(take(8, "<Q")))  # type: ignore[call-overload]
        wide = "l" in length or "z" in length
        code = ("<q" if kind in "di" else "<Q") if wide else ("<i" if kind in "di" else "<I")
        return ("%" + flags + ("d" if kind in "diu" else kind)) % take(8 if wide else 4, code)

    return re.sub(r"%([-+ #0]*\d*(?:\.\d+)?)([hlz]*)([diouxXfFeEgGcsp%])", replace, text)
