# SPDX-License-Identifier: Apache-2.0
"""Registers whose values the compiler must not trace further back, as an asynchronous matrix product's."""

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def settled(value: cutlass.Int32 | cutlass.Uint32 | cutlass.Float32, *, loc=None, ip=None):
    """The same value, which the compiler takes to be made here; no instruction."""
    kind, of_ir, register = (cutlass.Float32, T.f32(), "f")
    if isinstance(value, cutlass.Int32 | cutlass.Uint32):
        kind, of_ir, register = (type(value), T.i32(), "r")
    made = llvm.inline_asm(
        of_ir,
        [value.ir_value(loc=loc, ip=ip)],
        "",
        f"={register},0",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return kind(made)


def settle(sums: cute.Tensor):
    """Registers of 32 bits as if they were written here.

    To be called behind `wait_group`, before sums are read.

    The compiler knows no order between the wait and arithmetic on registers: it moved roundings in front of the wait,
    where a product that never ran leaves something simple to round (CuTe DSL 4.6.0).
    """
    for i in range(cute.size(sums)):
        sums[i] = settled(sums[i])


@dsl_user_op
def keep(value: cutlass.Int32, *, loc=None, ip=None):
    """The compiler takes the value to be read here; no instruction."""
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip)],
        "",
        "r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def packed(low, high, dtype: cutlass.Constexpr):
    """Two float32 values rounded to bfloat16 or float16, in a word; the instruction stays where it stands.

    The compiler moves conversions of its own behind the wgmma.fence that follows, and ptxas then waits for each product
    before the next one (C7512, C7519: CuTe DSL 4.6.0, CUDA 13.0).
    """
    name = cutlass.const_expr("bf16x2" if dtype is cutlass.BFloat16 else "f16x2")
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[cutlass.Int32],
        read_only_args=[low, high],
    )


def words_of(weights: cute.Tensor) -> cute.Tensor:
    """A product's operand as words of two."""
    return cute.recast_tensor(cute.make_tensor(weights.iterator, cute.make_layout(cute.size(weights))), cutlass.Int32)


@cute.jit
def narrow(scores: cute.Tensor, weights: cute.Tensor):
    """Weights as the products take them: an accumulator's registers are an operand's, in the same order."""
    words = words_of(weights)
    pairs = cute.make_tensor(scores.iterator, cute.make_layout((2, cute.size(words))))
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = packed(pairs[0, i], pairs[1, i], weights.element_type)
