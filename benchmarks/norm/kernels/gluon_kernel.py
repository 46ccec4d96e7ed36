# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in Gluon: a program has a row, which stays in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr, width, eps, BLOCK: gl.constexpr):
    """residual_ptr and residual_out_ptr: None without a residual."""
    # Eight elements of a thread side by side: 16 bytes of a row of 16 bits.
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    first = gl.program_id(0).to(gl.int64) * width
    column = gl.arange(0, BLOCK, layout=layout)
    inside = column < width
    x = gl.load(x_ptr + first + column, mask=inside, other=0.0)
    if residual_ptr is not None:
        added = gl.load(residual_ptr + first + column, mask=inside, other=0.0)
        x = (x.to(gl.float32) + added.to(gl.float32)).to(x.dtype)
        gl.store(residual_out_ptr + first + column, x, mask=inside)
    wide = x.to(gl.float32)
    scale = gl.rsqrt(gl.sum(wide * wide, 0) / width + eps)
    weight = gl.load(weight_ptr + column, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + first + column, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
