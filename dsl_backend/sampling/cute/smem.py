# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the sampler."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.sampling.configs import HISTOGRAM_BINS, MAX_CLUSTER, MAX_GROUPS, ClusterConfig
from dsl_backend.sampling.cute.scan import WARP


class SharedStorage(NamedTuple):
    """Tensors in a CTA's shared memory.

    Attributes:
        sGroupMax: float32 [256], the maximum logit of each group of the row; the same in every CTA of the cluster.
        sBins: uint32 [bins], a histogram of counts.
        sCandX, sCandId: float32 and uint32 [max_candidates], logit and token id of the candidates.
        sCandProb: uint64 [max_candidates], their probabilities, 0 where a filter masks them.
        sBlockMax: float32 [max_blocks], the maximum of each of the CTA's blocks, infinity as the largest number.
        sBlockSum: uint64 [max_blocks], the sum of each block.
        sTotal: uint64 [16], the sum of each CTA of the cluster.
        sUpper: uint64 [16], an upper bound of the sum of each CTA.
        sLists: uint32 [64 * warps], for each warp 32 threads and 32 blocks that it visits.
        sPacked: float32 [512 * warps], logits of a block that each warp has packed.
        sLaneBounds: uint32 [32 * lane_bound_blocks], a bound for each lane of a block (`RowReader.write_lane_bound`).
            They share their memory with sPacked, which is written when they have been read.
        sRanks: uint32 [16], for each CTA how many of its logits are at least the token's.
        sExpSums: float32 [16], for each CTA the sum of exp(logit - the row's maximum).
        sScratch: uint64 [32, 5], for sums over the CTA.
        sFloatScratch: float32 [32], the same.
        sResult: uint64 [4], results of one thread for all; the last one has the random bits.
        sIndex: uint32 [4], the indices that one thread found for all; the third comes from another CTA.
        sCount: uint32 [4]: candidates of this CTA; the lowest token id of the row's maximum.
    """

    sGroupMax: cute.Tensor
    sBins: cute.Tensor
    sCandX: cute.Tensor
    sCandId: cute.Tensor
    sCandProb: cute.Tensor
    sBlockMax: cute.Tensor
    sBlockSum: cute.Tensor
    sTotal: cute.Tensor
    sUpper: cute.Tensor
    sLists: cute.Tensor
    sPacked: cute.Tensor
    sLaneBounds: cute.Tensor
    sRanks: cute.Tensor
    sExpSums: cute.Tensor
    sScratch: cute.Tensor
    sFloatScratch: cute.Tensor
    sResult: cute.Tensor
    sIndex: cute.Tensor
    sCount: cute.Tensor


def allocate(config: ClusterConfig) -> SharedStorage:
    allocator = SmemAllocator()

    def tensor(dtype, *shape: int) -> cute.Tensor:
        return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

    u32, u64, f32 = cutlass.Uint32, cutlass.Uint64, cutlass.Float32
    sPacked = tensor(f32, config.packed_words)
    return SharedStorage(
        sGroupMax=tensor(f32, MAX_GROUPS),
        sBins=tensor(u32, HISTOGRAM_BINS),
        sCandX=tensor(f32, config.max_candidates),
        sCandId=tensor(u32, config.max_candidates),
        sCandProb=tensor(u64, config.max_candidates),
        sBlockMax=tensor(f32, config.max_blocks),
        sBlockSum=tensor(u64, config.max_blocks),
        sTotal=tensor(u64, MAX_CLUSTER),
        sUpper=tensor(u64, MAX_CLUSTER),
        sLists=tensor(u32, 2 * config.threads),
        sPacked=sPacked,
        sLaneBounds=cute.make_tensor(cute.recast_ptr(sPacked.iterator, dtype=u32), sPacked.layout),
        sRanks=tensor(u32, MAX_CLUSTER),
        sExpSums=tensor(f32, MAX_CLUSTER),
        sScratch=tensor(u64, WARP, 5),
        sFloatScratch=tensor(f32, WARP),
        sResult=tensor(u64, 4),
        sIndex=tensor(u32, 4),
        sCount=tensor(u32, 4),
    )
