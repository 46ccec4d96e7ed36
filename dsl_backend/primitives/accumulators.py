# SPDX-License-Identifier: Apache-2.0
"""Registers of WGMMA accumulators and operands: compiler fences, and conversion to the operand type.

WGMMA is asynchronous, but the compiler sees its registers as written where the instruction stands. The fences here emit
no instruction. They only stop the compiler from moving arithmetic on such registers.
"""

from collections.abc import Sequence
from typing import TypeVar

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from dsl_backend.primitives.math import f32_to_e4m3

Word = TypeVar("Word", cutlass.Int32, cutlass.Uint32, cutlass.Int64, cutlass.Float32)


@dsl_user_op
def fence_register(value: Word, *, loc=None, ip=None) -> Word:
    """Return the same value; the compiler cannot move its uses before this point."""
    kind, of_ir, register = (cutlass.Float32, T.f32(), "f")
    if isinstance(value, cutlass.Int32 | cutlass.Uint32):
        kind, of_ir, register = (type(value), T.i32(), "r")
    elif isinstance(value, cutlass.Int64):
        kind, of_ir, register = (cutlass.Int64, T.i64(), "l")
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


def fence_pointer(pointer: cute.Pointer) -> cute.Pointer:
    """Return the same pointer to global memory, whose address cannot be computed anew behind this point."""
    address = fence_register(cutlass.Int64(pointer.toint()))
    return cute.make_ptr(pointer.dtype, address, cute.AddressSpace.gmem, assumed_align=pointer.alignment)


def fence_operand(accumulator: cute.Tensor) -> None:
    """Fence all 32-bit registers of an accumulator: call it after `wait_group`, before the accumulator is read.

    For the compiler, arithmetic on registers is not ordered after the wait. It moved conversions in front of the wait
    (CuTe DSL 4.6.0).
    """
    for i in range(cute.size(accumulator)):
        accumulator[i] = fence_register(accumulator[i])


@dsl_user_op
def keep_alive(value: cutlass.Int32, *, loc=None, ip=None) -> None:
    """Make the compiler take the value to be read here, so that its register is not reused before."""
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
def cvt_f16x2(low: cutlass.Float32, high: cutlass.Float32, dtype: cutlass.Constexpr):
    """Round two float32 to bfloat16 or float16, packed in a word. The instruction stays where it stands.

    The compiler moves its own conversions behind the wgmma.fence that follows. ptxas then waits for each WGMMA before
    it issues the next one (C7512, C7519: CuTe DSL 4.6.0, CUDA 13.0).
    """
    name = cutlass.const_expr("bf16x2" if dtype is cutlass.BFloat16 else "f16x2")
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[cutlass.Int32], read_only_args=[low, high]
    )


def round_to(values: Sequence[cutlass.Float32], result: cute.Tensor) -> None:
    """Round float32 to the elements of `result`, in order: numbers of 16 bits, or bytes, which receive e4m3.

    These saturate at 448, infinities too; NaN stays NaN. There are one, two or a multiple of four.
    """
    if result.element_type is not cutlass.Uint8:
        for i, value in enumerate(values):
            result[i] = value.to(result.element_type)
    elif len(values) % 4 == 0:
        words = words_of(result)
        for i in range(0, len(values), 4):
            words[i // 4] = f32_to_e4m3(*values[i : i + 4])
    else:
        # A whole word: its other numbers are the same ones again, as libNVVM (CuTe DSL 4.6.0) refuses constants here.
        quad = cute.make_rmem_tensor(4, cutlass.Uint8)
        words_of(quad)[0] = f32_to_e4m3(*(list(values) * 4)[:4])
        for i in range(len(values)):
            result[i] = quad[i]


def words_of(operand: cute.Tensor) -> cute.Tensor:
    """View registers of 16-bit elements or bytes as 32-bit words."""
    return cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(cute.size(operand))), cutlass.Int32)


@cute.jit
def downcast(accumulator: cute.Tensor, operand: cute.Tensor):
    """Convert an accumulator to a 16-bit A operand: both hold their elements in the same register order."""
    words = words_of(operand)
    pairs = cute.make_tensor(accumulator.iterator, cute.make_layout((2, cute.size(words))))
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = cvt_f16x2(pairs[0, i], pairs[1, i], operand.element_type)
