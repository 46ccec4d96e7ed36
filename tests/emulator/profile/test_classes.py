# SPDX-License-Identifier: Apache-2.0
"""Classes of instructions, and what they cost."""

from collections.abc import Iterator
from itertools import product

import pytest

from emulator.profile.classes import FREE, Class, Unit, classify, cost
from emulator.ptx.forms import FORMS, candidates
from emulator.ptx.grammar import Form, Op

# Modifiers that a class may depend on.
DECIDING = ("type", "space", "dtype", "atype", "mode")


def ops(form: Form) -> Iterator[Op]:
    """An instruction of a form for each value of the modifiers that decide."""
    groups = [group for group in form.groups if group.name in DECIDING]
    for values in product(*(group.values + ((None,) if group.optional else ()) for group in groups)):
        mods = {group.name: value for group, value in zip(groups, values, strict=True) if value}
        yield Op(f"{form.id} {' '.join(mods.values())}", form, mods)


def test_every_form_has_a_class() -> None:
    found = set()
    for form in FORMS:
        for op in ops(form):
            found.add(classify(op))
            assert cost(op).results > 0
    assert found == set(Class)


@pytest.mark.parametrize(
    ("text", "kind", "unit", "results"),
    [
        ("add.s32", Class.INTEGER, Unit.ALU, 32),
        ("popc.b32", Class.INTEGER, Unit.ALU, 128),
        ("mad.lo.s32", Class.MULTIPLY, Unit.FMA, 64),
        ("fma.rn.f32", Class.FP32, Unit.FMA, 32),
        ("fma.rn.f32x2", Class.FP32X2, Unit.FMA, 64),
        ("fma.rn.bf16x2", Class.HALF, Unit.FMA, 32),
        ("fma.rn.f64", Class.FP64, Unit.FP64, 32),
        ("max.f32", Class.SELECT, Unit.ALU, 32),
        ("setp.lt.f32", Class.SELECT, Unit.ALU, 32),
        ("and.pred", Class.SELECT, Unit.ALU, 32),
        ("and.b32", Class.INTEGER, Unit.ALU, 32),
        ("ex2.approx.ftz.f32", Class.MUFU, Unit.XU, 32),
        ("tanh.approx.f16x2", Class.MUFU, Unit.XU, 64),
        ("rcp.approx.ftz.f32", Class.MUFU, Unit.XU, 32),
        ("cvt.rn.bf16x2.f32", Class.PACK, None, 32),
        ("cvt.rn.satfinite.e4m3x2.f32", Class.PACK, None, 32),
        ("cvt.rn.f32.s32", Class.CONVERT, Unit.XU, 32),
        ("cvt.rn.f16x2.e4m3x2", Class.PACK, None, 32),
        ("cvt.rn.f16x2.e2m1x2", Class.PACK, None, 32),
        ("cvt.rn.bf16x2.ue8m0x2", Class.PACK, None, 32),
        ("cvt.f32.f16", Class.HALF, Unit.FMA, 32),
        ("cvt.f32.bf16", Class.INTEGER, Unit.ALU, 32),
        ("cvt.u64.u32", Class.MOVE, None, 32),
        ("cvt.s64.s32", Class.INTEGER, Unit.ALU, 32),
        ("cvt.u32.u16", Class.INTEGER, Unit.ALU, 32),
        ("mov.f32", Class.MOVE, None, 32),
        ("ld.param.b64", Class.PARAMETER, None, 32),
        ("ld.shared.v4.b32", Class.SHARED, None, 32),
        ("ld.global.nc.b32", Class.GLOBAL, None, 32),
        ("st.local.b32", Class.LOCAL, None, 32),
        ("shfl.sync.bfly.b32", Class.SHUFFLE, Unit.SHUFFLE, 32),
        ("redux.sync.add.s32", Class.SHUFFLE, Unit.SHUFFLE, 64),
        ("bar.warp.sync", Class.SHUFFLE, None, 32),
        ("bar.sync", Class.BARRIER, None, 32),
        ("mbarrier.try_wait.parity.shared.b64", Class.MBARRIER, None, 32),
        ("cp.async.cg.shared.global", Class.CP_ASYNC, None, 32),
        ("cp.async.bulk.commit_group", Class.TMA, None, 32),
        ("tcgen05.wait::ld.sync.aligned", Class.TENSOR, None, 32),
        ("tcgen05.ld.sync.aligned.32x32b.x8.b32", Class.TENSOR_MOVE, None, 32),
        ("wgmma.wait_group.sync.aligned", Class.WGMMA, None, 32),
    ],
)
def test_instructions(text, kind, unit, results) -> None:
    op = candidates(text)[0]
    assert classify(op) is kind
    assert (cost(op).unit, cost(op).results) == (unit, results)


@pytest.mark.parametrize(
    ("form", "kind", "free"), [("mov#pack", "b64", True), ("mov#pack", "b32", False), ("mov#unpack", "b32", True)]
)
def test_only_moves_that_the_assembler_removes_are_free(form, kind, free) -> None:
    (op,) = [op for op in candidates(f"mov.{kind}") if op.form.id == form]
    assert (classify(op) in FREE) == free
