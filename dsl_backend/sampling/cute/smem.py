# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the sampler."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.sampling.configs import HISTOGRAM_BINS, MAX_GROUPS, ClusterConfig
from dsl_backend.sampling.cute.scan import WARP


class SharedStorage(NamedTuple):
    """Tensors in a CTA's shared memory.

    Attributes:
        sGroupMax: float32 [256], the maximum z of each group of the row; the same in every CTA of the cluster.
        sBinLow, sBinHigh: uint32 [bins], a histogram: low and high words of 64-bit sums, or counts in sBinLow.
        sCandZ, sCandId: float32 and uint32 [max_candidates], z and token id of the candidates.
        sCandProb: uint64 [max_candidates], their probabilities, 0 where top-k or min-p masks them.
        sCandKept: uint64 [max_candidates], the same after top-p.
        sCandDistance: uint32 [max_candidates].
        sWarpProb: uint64 [warps], the sum of the probabilities in a warp's segment, those at top-p's pivot left out.
        sWarpTies: uint32 [warps], how many logits of the segment lie at top-p's pivot.
        sScratch: uint64 [32, 4], for sums over the CTA.
        sResult: uint64 [4], results of one thread for all; the last one has the random bits.
        sIndex: uint32 [4], the index that one thread found for all.
        sCount: uint32 [4]: candidates of this CTA; the lowest token id of the row's maximum.
    """

    sGroupMax: cute.Tensor
    sBinLow: cute.Tensor
    sBinHigh: cute.Tensor
    sCandZ: cute.Tensor
    sCandId: cute.Tensor
    sCandProb: cute.Tensor
    sCandKept: cute.Tensor
    sCandDistance: cute.Tensor
    sWarpProb: cute.Tensor
    sWarpTies: cute.Tensor
    sScratch: cute.Tensor
    sResult: cute.Tensor
    sIndex: cute.Tensor
    sCount: cute.Tensor


def allocate(config: ClusterConfig) -> SharedStorage:
    allocator = cutlass.utils.SmemAllocator()

    def tensor(dtype, *shape: int) -> cute.Tensor:
        return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

    u32, u64, f32 = cutlass.Uint32, cutlass.Uint64, cutlass.Float32
    return SharedStorage(
        sGroupMax=tensor(f32, MAX_GROUPS),
        sBinLow=tensor(u32, HISTOGRAM_BINS),
        sBinHigh=tensor(u32, HISTOGRAM_BINS),
        sCandZ=tensor(f32, config.max_candidates),
        sCandId=tensor(u32, config.max_candidates),
        sCandProb=tensor(u64, config.max_candidates),
        sCandKept=tensor(u64, config.max_candidates),
        sCandDistance=tensor(u32, config.max_candidates),
        sWarpProb=tensor(u64, config.warps),
        sWarpTies=tensor(u32, config.warps),
        sScratch=tensor(u64, WARP, 4),
        sResult=tensor(u64, 4),
        sIndex=tensor(u32, 4),
        sCount=tensor(u32, 4),
    )
