# SPDX-License-Identifier: Apache-2.0
"""A linear layer in Helion. The fastest of a few configurations is chosen; nothing else is searched."""

from functools import cache

import helion
import helion.language as hl
import torch


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for tile_m, tile_n in hl.tile([x.size(0), weight.size(0)]):
        total = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(x.size(1)):
            total = hl.dot(x[tile_m, tile_k], weight[tile_n, tile_k].T, acc=total)
        out[tile_m, tile_n] = total.to(out.dtype)
    return out


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for tile_m, tile_n in hl.tile([x.size(0), gate.size(0)]):
        gates = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        ups = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(x.size(1)):
            rows = x[tile_m, tile_k]
            gates = hl.dot(rows, gate[tile_n, tile_k].T, acc=gates)
            ups = hl.dot(rows, up[tile_n, tile_k].T, acc=ups)
        out[tile_m, tile_n] = (gates * torch.sigmoid(gates) * ups).to(out.dtype)
    return out


# A CTA of two warpgroups has accumulators of 128 x 256 at most.
PLAIN = (([128, 256, 64], 8, 3), ([128, 256, 64], 8, 4), ([128, 128, 64], 8, 4), ([128, 128, 64], 4, 3))
GATED = (([128, 128, 64], 8, 3), ([128, 128, 64], 8, 4), ([128, 64, 64], 4, 4))


@cache
def linear(gated: bool, tma: bool) -> helion.Kernel:
    """A kernel (x, weight, out), or (x, gate, up, out).

    Args:
        tma: it copies the tiles, with descriptors that the host makes.
    """
    how = {"indexing": "tensor_descriptor", "host_tensor_descriptors": True} if tma else {"indexing": "pointer"}
    configs = [
        # A group of 8 tiles of rows shares its weights in the L2 cache.
        helion.Config(block_sizes=sizes, num_warps=warps, num_stages=stages, l2_groupings=[8], pid_type="flat", **how)
        for sizes, warps, stages in (GATED if gated else PLAIN)
    ]
    return helion.kernel(swiglu if gated else product, configs=configs)
