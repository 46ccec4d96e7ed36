# SPDX-License-Identifier: Apache-2.0
"""Multiplications that the assembler makes part of an addition: `mul` and `add` become FFMA.

PTX allows it where neither has a rounding (9.7.3.3, 9.7.3.4), and ptxas does it.
"""

from collections import defaultdict
from functools import lru_cache

from emulator.core.program import Program
from emulator.ptx.flow import graph
from emulator.ptx.ir import Instr, Reg
from emulator.ptx.overtaken import registers

FORMS = ("float", "packed")
PRODUCTS = frozenset(f"mul#{form}" for form in FORMS)
SUMS = frozenset(f"{name}#{form}" for name in ("add", "sub") for form in FORMS)


@lru_cache(maxsize=64)
def contracted(program: Program) -> frozenset[int]:
    """The multiplications that are gone: all that read one are additions of its block, which become FFMA.

    An addition takes one product. Of two it takes the one that fewer others read: of `x * s - m * s` for many x that is
    `x * s`.
    """
    block = [one.index for one in graph(program.function, ()).blocks for _ in range(one.start, one.stop)]
    readers, writers = _uses(program)
    gone: set[int] = set()
    taken: set[int] = set()
    products = [index for index, instr in enumerate(program.instrs) if instr.op.form.id in PRODUCTS]
    for index in sorted(products, key=lambda one: (len(readers[_result(program.instrs[one])]), one)):
        product = program.instrs[index]
        sums = readers[_result(product)]
        if (
            sums
            and len(writers[_result(product)]) == 1
            and _may(product)
            and all(block[one] == block[index] and _takes(program.instrs[one], product) for one in sums)
            and taken.isdisjoint(sums)
        ):
            gone.add(index)
            taken.update(sums)
    return frozenset(gone)


def _uses(program: Program) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """(Of each register the instructions that read it, those that write it)."""
    readers: dict[str, set[int]] = defaultdict(set)
    writers: dict[str, set[int]] = defaultdict(set)
    for index, instr in enumerate(program.instrs):
        if instr.guard is not None:
            readers[instr.guard.reg.name].add(index)
        for role, operand in zip(instr.op.form.roles, instr.args, strict=True):
            for name in registers(operand):
                if role.access != "w" or role.address:
                    readers[name].add(index)
                if role.access != "r":
                    writers[name].add(index)
    return readers, writers


def _result(product: Instr) -> str:
    result = product["d"]
    assert isinstance(result, Reg)
    return result.name


def _may(product: Instr) -> bool:
    return product.guard is None and product.op["rnd"] is None and product.op["sat"] is None


def _takes(instr: Instr, product: Instr) -> bool:
    """Whether an instruction is an addition that can have the product in it."""
    if instr.op.form.id not in SUMS or instr.guard is not None or instr.op["rnd"] is not None:
        return False
    operands = [instr[role] for role in ("a", "b")]
    alike = all(instr.op[name] == product.op[name] for name in ("type", "ftz"))
    return alike and operands.count(product["d"]) == 1
