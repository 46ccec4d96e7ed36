# SPDX-License-Identifier: Apache-2.0
"""Every ordinary form in every combination of modifiers is encoded as an operation that the interpreter has."""

import itertools
import time

import pytest
from lanes import program

from emulator.core.library import operations
from emulator.core.program import BY_HAND
from emulator.core.recipes import recipe
from emulator.errors import Unsupported
from emulator.ptx.flow import GATHERING
from emulator.ptx.forms import arithmetic, conversion, synchronization
from emulator.ptx.grammar import Op

# What has no operation: the machine refuses it in words.
TRAPS = {
    "fma#half": lambda op: op["oob"],
    "rcp": lambda op: op["mode"] == "approx" and op["type"] == "f64",
    "cvt#pack2rs": lambda op: True,
    "cvt#pack4": lambda op: True,
    "cvta": lambda op: op["type"] == "u32",
    "cvta#to": lambda op: op["type"] == "u32",
}

ORDERED = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
UNSIGNED = frozenset({"lo", "ls", "hi", "hs"})


def exists(op):
    """The tables join types and comparisons more freely than the ISA does (9.7.1.3, 9.7.6.1)."""
    kind = op["type"] or ""
    if op["mode"] == "wide":
        return "64" not in kind
    if op["cmp"] is None:
        return True
    return op["cmp"] in ORDERED or (op["cmp"] not in UNSIGNED if "f" in kind else op["cmp"] in UNSIGNED)


def every(form):
    choices = [(*group.values, None) if group.optional else group.values for group in form.groups]
    for values in itertools.product(*choices):
        mods = {group.name: value for group, value in zip(form.groups, values, strict=True) if value}
        yield Op(".".join([form.opcode, *mods.values()]), form, mods)


def test_every_ordinary_opcode_has_an_operation():
    ordinary = [*arithmetic.FORMS, *conversion.FORMS]
    ordinary += [form for form in synchronization.FORMS if form.opcode in GATHERING or form.opcode == "activemask"]
    count, missing = 0, set()
    for form in ordinary:
        for op in every(form):
            if form.id in BY_HAND or (form.id in TRAPS and TRAPS[form.id](op)):
                continue
            made = recipe(op)
            count += 1
            if (made is not None and made.name in operations()) != exists(op):
                missing.add(f"{op.text} -> {made and made.name}")
    assert not missing, sorted(missing)[:20]
    assert count > 2000


def test_what_the_isa_does_not_have_is_refused():
    for line in ("mul.wide.u64 %rd1, %rd2, %rd3;", "setp.equ.s32 %p1, %r1, %r2;", "setp.lo.f32 %p1, %f1, %f2;"):
        with pytest.raises(Unsupported, match=line.split()[0].replace(".", r"\.")):
            program(line)


def test_a_large_kernel_is_encoded_quickly():
    lines = "".join(
        f"add.s32 %r{k % 199}, %r{(k + 1) % 199}, {k}; mov.b64 %rd{k % 8}, {{%r{k % 199}, %r{(k + 7) % 199}}};"
        for k in range(10_000)
    )
    made = program(lines)
    started = time.perf_counter()
    type(made)(made.module, made.function)
    assert time.perf_counter() - started < 3
    assert len(made.instrs) == 20_000
