# SPDX-License-Identifier: Apache-2.0
"""out = x + 1 in Triton."""

import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    inside = index < elements
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=inside) + 1, mask=inside)
