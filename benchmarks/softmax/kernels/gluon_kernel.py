# SPDX-License-Identifier: Apache-2.0
"""Softmax in Gluon: a program has a row, which stays in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def softmax(x_ptr, out_ptr, width, LOG: gl.constexpr, BLOCK: gl.constexpr):
    # Eight elements of a thread side by side: 16 bytes of a row of 16 bits.
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    first = gl.program_id(0).to(gl.int64) * width
    column = gl.arange(0, BLOCK, layout=layout)
    inside = column < width
    x = gl.load(x_ptr + first + column, mask=inside, other=-float("inf")).to(gl.float32)
    below = x - gl.max(x, 0)
    powers = gl.exp(below)
    total = gl.sum(powers, 0)
    result = below - gl.log(total) if LOG else powers / total
    gl.store(out_ptr + first + column, result.to(out_ptr.dtype.element_ty), mask=inside)
