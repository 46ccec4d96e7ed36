# SPDX-License-Identifier: Apache-2.0
"""Registers that an asynchronous matrix product writes to."""

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def settled(value: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Float32:
    """The same value, which the compiler takes to be made here; no instruction."""
    made = llvm.inline_asm(
        T.f32(),
        [cutlass.Float32(value).ir_value(loc=loc, ip=ip)],
        "",
        "=f,0",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return cutlass.Float32(made)


def settle(sums: cute.Tensor):
    """To be called behind `wait_group`, before float32 sums are read.

    The compiler knows no order between the wait and arithmetic on registers: it moved roundings in front of the wait,
    where a product that never ran leaves something simple to round (CuTe DSL 4.6.0).
    """
    for i in range(cute.size(sums)):
        sums[i] = settled(sums[i])
