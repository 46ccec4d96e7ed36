# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in cuTile: a block has a row, which is one tile."""

import cuda.tile as ct


@ct.kernel
def rms_norm(x, weight, out, eps: ct.Constant[float], block: ct.Constant[int]):
    row, width = ct.bid(0), x.shape[1]
    wide = ct.astype(ct.load(x, index=(row, 0), shape=(1, block), padding_mode=ct.PaddingMode.ZERO), ct.float32)
    factors = ct.astype(ct.load(weight, index=(0,), shape=(block,)), ct.float32)
    scale = ct.rsqrt(ct.sum(wide * wide, 1, keepdims=True) / width + eps)
    ct.store(out, index=(row, 0), tile=ct.astype(wide * scale * factors, out.dtype))


@ct.kernel
def rms_norm_of_sum(x, residual, weight, out, residual_out, eps: ct.Constant[float], block: ct.Constant[int]):
    row, width = ct.bid(0), x.shape[1]
    mine = ct.load(x, index=(row, 0), shape=(1, block), padding_mode=ct.PaddingMode.ZERO)
    added = ct.load(residual, index=(row, 0), shape=(1, block), padding_mode=ct.PaddingMode.ZERO)
    total = ct.astype(ct.astype(mine, ct.float32) + ct.astype(added, ct.float32), x.dtype)
    ct.store(residual_out, index=(row, 0), tile=total)
    wide = ct.astype(total, ct.float32)
    factors = ct.astype(ct.load(weight, index=(0,), shape=(block,)), ct.float32)
    scale = ct.rsqrt(ct.sum(wide * wide, 1, keepdims=True) / width + eps)
    ct.store(out, index=(row, 0), tile=ct.astype(wide * scale * factors, out.dtype))
