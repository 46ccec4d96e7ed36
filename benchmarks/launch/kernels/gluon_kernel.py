# SPDX-License-Identifier: Apache-2.0
"""out = x + 1 in Gluon, Triton's language with explicit layouts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_one(x_ptr, out_ptr, elements, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index = gl.arange(0, BLOCK, layout=layout)
    inside = index < elements
    gl.store(out_ptr + index, gl.load(x_ptr + index, mask=inside) + 1, mask=inside)
