# SPDX-License-Identifier: Apache-2.0
"""The role that quantizes Q, of SM100 kernels with e4m3 products."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.fp8_queries import Queries
from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.primitives.ring import phase_of, stage_of


class QueryWarps:
    """The warpgroup that loads and quantizes Q, of the next work tiles while this one's keys are processed.

    Args:
        sQ_bytes: (row, column, stage).
        sQScale: (row, stage). There is a stage more than of Q: the scales of a work tile are read before P of its first
            key tile is written, thus before Q of the next one is free.
    """

    def __init__(
        self,
        queries: Queries,
        work_pipeline: WorkTilePipeline,
        barriers: Any,
        sQ_bytes: cute.Tensor,
        sQScale: cute.Tensor,
    ) -> None:
        self.queries, self.work_pipeline, self.barriers = queries, work_pipeline, barriers
        self.sQ_bytes, self.sQScale = sQ_bytes, sQScale
        self.stages, self.scale_stages = (cute.size(one, mode=[cute.rank(one) - 1]) for one in (sQ_bytes, sQScale))

    @cute.jit
    def run(self):
        work_tiles = cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            stage, scale_stage = stage_of(work_tiles, self.stages), stage_of(work_tiles, self.scale_stages)
            cute.arch.mbarrier_wait(self.barriers.q_empty + stage, phase_of(work_tiles, self.stages) ^ 1)
            self.queries.quantize(work, self.sQ_bytes[None, None, stage], self.sQScale[None, scale_stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive_warp(self.barriers.q_full + stage)
            arrive_warp(self.barriers.q_scale_full + scale_stage)
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid
