# SPDX-License-Identifier: Apache-2.0
"""Products and gated activations of tiles."""

import triton
import triton.language as tl

from dsl_backend.gemm.activation import Activation, Geglu
from dsl_backend.quant.triton.convert import dequantize
from dsl_backend.runtime.target import triton_interpreted

INTERPRETED = tl.constexpr(triton_interpreted())
# Tiles of a column of tiles that run at the same time, so that their weights are in L2.
GROUPED = tl.constexpr(8)
NONE, SWIGLU, GEGLU, GEGLU_TANH = range(4)


@triton.jit
def tile_of_program(rows, n, M: tl.constexpr, N: tl.constexpr):
    """(first row, number of the column's tile) of this program's tile [M, N] of an output [rows, n]."""
    tiles_m, tiles_n = tl.cdiv(rows, M), tl.cdiv(n, N)
    program = tl.program_id(0).to(tl.int64)
    first = program // (GROUPED * tiles_n) * GROUPED
    height = tl.minimum(tiles_m - first, GROUPED)
    within = program % (GROUPED * tiles_n)
    return (first + within % height) * M, within // height


@triton.jit
def dot(a, b, acc):
    """The sum acc + a @ b in float32. Triton's interpreter multiplies bfloat16 as integers: there it is converted."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def elements(stored):
    """Operands of a product: e4m3, or where the target has no conversion float16 of its bits."""
    if stored.dtype == tl.uint8:
        return dequantize(stored, tl.float16, False)
    else:
        return stored


@triton.jit
def product(x, weight, K: tl.constexpr, WGMMA: tl.constexpr):
    """The product of `elements` of K columns, in accumulators of its own, which are added to float32 afterwards.

    Triton can do that inside of one product that is given the sum (`max_num_imprecise_acc`), but with two products in a
    pipelined loop its code for SM90 (WGMMA) reads accumulators that wgmma still writes (Triton 3.9: the emulator finds
    it).
    """
    zeros = tl.zeros((x.shape[0], weight.shape[1]), tl.float32)
    if x.dtype != tl.float8e4nv:
        return dot(x, weight, zeros)
    elif WGMMA:
        # Its default is a limit past every k, with which a sum is not folded into the product.
        return tl.dot(x, weight, zeros)
    else:
        # Any limit but 0 keeps it from being folded: SM89's matrix unit keeps few bits of a sum too.
        return tl.dot(x, weight, zeros, max_num_imprecise_acc=K)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def activated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of float32 tiles. LIMIT None clamps nothing; comparisons keep NaN, which a minimum may lose."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if KIND == 1:
        return gate * sigmoid(ALPHA * gate) * (up + BETA)
    elif KIND == 2:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        # (1 + tanh(u)) / 2 is sigmoid(2 u).
        return gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


def kind_of(activation: Activation | None) -> tuple[int, float, float, float | None]:
    """An activation as kernels' constants: kind, alpha, beta, limit."""
    if activation is None:
        return NONE, 1.0, 0.0, None
    if isinstance(activation, Geglu):
        return GEGLU_TANH if activation.tanh else GEGLU, 1.0, 0.0, None
    return SWIGLU, activation.alpha, activation.beta, activation.limit
