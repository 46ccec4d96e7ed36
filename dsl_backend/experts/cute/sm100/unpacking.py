# SPDX-License-Identifier: Apache-2.0
"""From packed weights to operands of tcgen05.mma: stages of both, and the warps in between."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.experts.weight_only_sm100_configs import UNPACKING_WARPGROUPS
from dsl_backend.gemm.mxfp4_unpacking import Mxfp4Unpacking
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import UMMA, Edge, Pipeline, warps


@dataclass(frozen=True)
class WeightStages:
    """Packed weights, and how they become operands.

    Attributes:
        sPacked: words [packed tile or half of it with its scales, packed tile, stage], stages of x.
        unpacked: from the warps that unpack to the MMA warp. Products that are done have read packed weights too.
    """

    sPacked: cute.Tensor
    unpacked: Pipeline


class UnpackingWarps(Mxfp4Unpacking):
    """What the kernels of packed weights on SM100 do to them."""

    threads: int
    stages: int
    unpacking_warps = UNPACKING_WARPGROUPS * WARPGROUP // WARP

    def unpacked_edge(self, stages: int) -> Edge:
        """From the warps that unpack."""
        return Edge("unpacked weights", warps(self.unpacking_warps), UMMA, stages)

    def weight_stages(self, smem: SmemAllocator, words: int, unpacked: int) -> WeightStages:
        """So many words of each packed tile of a stage, and barriers of so many stages of unpacked weights."""
        layout = cute.make_layout((words, self.row_tiles, self.stages))
        packed = smem.allocate_tensor(cutlass.Int32, layout, byte_alignment=128)
        return WeightStages(packed, self.unpacked_edge(unpacked).allocate(smem))

    def init_stages(self, beside: WeightStages):
        """By one thread."""
        beside.unpacked.init()

    def unpacker(self):
        """(warpgroup, thread in it) among those that unpack."""
        place = cute.arch.thread_idx()[0] - (self.threads - self.unpacking_warps * WARP)
        return cute.arch.make_warp_uniform(place // WARPGROUP), place % WARPGROUP

    def hand_over(self, unpacked: Pipeline, position):
        """By a warp: its part of a position's weights is where products read it."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(unpacked.full(position))
