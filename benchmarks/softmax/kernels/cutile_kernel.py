# SPDX-License-Identifier: Apache-2.0
"""Softmax in cuTile: a block has a row, which is one tile."""

import cuda.tile as ct


@ct.kernel
def softmax(x, out, log: ct.Constant[bool], block: ct.Constant[int]):
    row = ct.bid(0)
    tile = ct.load(x, index=(row, 0), shape=(1, block), padding_mode=ct.PaddingMode.NEG_INF)
    wide = ct.astype(tile, ct.float32)
    below = wide - ct.max(wide, 1, keepdims=True)
    powers = ct.exp(below)
    total = ct.sum(powers, 1, keepdims=True)
    result = below - ct.log(total) if log else powers / total
    ct.store(out, index=(row, 0), tile=ct.astype(result, out.dtype))
