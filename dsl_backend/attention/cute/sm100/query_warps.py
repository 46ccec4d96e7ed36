# SPDX-License-Identifier: Apache-2.0
"""The role that quantizes Q, of SM100 kernels with e4m3 products."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.fp8_queries import VECTOR, Queries, largest_pair
from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline, q_head_of
from dsl_backend.primitives.copy import VECTOR_BYTES, cp_async_zfill
from dsl_backend.primitives.math import mul_pair
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


class PairedQueries(Queries):
    """As `Queries`, with SM100's products of pairs."""

    def products(self, values: list[cutlass.Float32], factor: cutlass.Float32) -> list[cutlass.Float32]:
        return [one for pair in zip(values[::2], values[1::2], strict=True) for one in mul_pair(pair, (factor, factor))]


class CopiedQueries(PairedQueries):
    """The same by few threads: rows come to shared memory by cp.async, many ahead. A lane reads what it has copied.

    A batch is `ahead` rows of each `lanes` threads. It is read twice, once for the rows' largest magnitudes: its
    elements would be more registers than the threads have.

    Args:
        place: shared memory for `batches` batches, aligned to 16 bytes.
    """

    def __init__(self, *args: Any, place: cute.Pointer, batches: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches = batches
        self.vectors = self.kernel.dims // VECTOR // self.lanes
        self.threads = self.rows_at_once * self.lanes
        self.batch_rows = self.rows_at_once * self.ahead
        self.batch_bytes = self.batch_rows * self.kernel.dims * self.mQ.element_type.width // 8
        self.place = cutlass.Int32(place.toint()) + self.thread * VECTOR_BYTES

    def place_of(self, slot: cutlass.Int32 | int, i: int, vector: int) -> cutlass.Int32:
        """Of a vector of the thread's i-th row of a batch."""
        return self.place + slot * self.batch_bytes + (i * self.vectors + vector) * self.threads * VECTOR_BYTES

    @cute.jit
    def copy_batch(self, work: WorkTile, batch: cutlass.Int32 | int, slot: cutlass.Int32 | int):
        """Begin to copy a batch of a work tile; rows that do not exist are zeros."""
        lane = self.thread % self.lanes
        for i in cutlass.range_constexpr(self.ahead):
            row = batch * self.batch_rows + i * self.rows_at_once + self.thread // self.lanes
            exists = row < work.num_rows
            token = work.q_offset + row // self.key.pack_gqa
            head = q_head_of(self.key, work.head_block, row)
            offset = cutlass.Int64(token) * self.mQ.stride[0] + head * self.mQ.stride[1] + lane * VECTOR
            source = self.mQ.iterator.toint() + (offset if exists else cutlass.Int64(0)) * (VECTOR_BYTES // VECTOR)
            count = cutlass.Int32(VECTOR_BYTES) if exists else cutlass.Int32(0)
            for vector in cutlass.range_constexpr(self.vectors):
                cp_async_zfill(self.place_of(slot, i, vector), source + vector * self.lanes * VECTOR_BYTES, count)

    @cute.jit
    def begin(self, work: WorkTile):
        """Begin to copy the first batches of a work tile."""
        for batch in cutlass.range_constexpr(self.batches):
            self.copy_batch(work, batch, batch)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def quantize(self, work: WorkTile, sQ_bytes: cute.Tensor, sScale: cute.Tensor):
        """As of `Queries`, after `begin`."""
        batches = cutlass.const_expr(self.rows // self.batch_rows)
        for batch in cutlass.range(batches, unroll=1):
            slot = stage_of(batch, self.batches)
            cute.arch.cp_async_wait_group(self.batches - 1)
            self.store_batch(batch, slot, sQ_bytes, sScale)
            if batch + self.batches < batches:
                self.copy_batch(work, batch + self.batches, slot)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def store_batch(self, batch: cutlass.Int32, slot: cutlass.Int32, sQ_bytes: cute.Tensor, sScale: cute.Tensor):
        lane = self.thread % self.lanes
        pairs = [largest_pair(self.copied(slot, i)) for i in range(self.ahead)]
        for i in cutlass.range_constexpr(self.ahead):
            row = batch * self.batch_rows + i * self.rows_at_once + self.thread // self.lanes
            self.store_scaled(row, lane, self.row_max(pairs[i]), self.copied(slot, i), sQ_bytes, sScale)

    def copied(self, slot: cutlass.Int32, i: int) -> cute.Tensor:
        """The thread's part of the i-th row of a batch, (VECTOR, vectors)."""
        values = cute.make_rmem_tensor((VECTOR, self.vectors), self.dtype)
        for vector in range(self.vectors):
            address = self.place_of(slot, i, vector)
            source = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), values[None, vector])
        return values


class DenseQueryWarps(QueryWarps):
    """The same of all work tiles but a CTA's first one, whose Q softmax warps quantize. Rows are copied ahead.

    Args:
        arrivals: of each warp for a work tile.
    """

    def __init__(self, queries: CopiedQueries, *args: Any) -> None:
        *others, self.arrivals = args
        super().__init__(queries, *others)

    @cute.jit
    def run(self):
        work_tiles = cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid
            if valid != 0:
                self.quantize(work, work_tiles)

    @cute.jit
    def quantize(self, work: WorkTile, count: cutlass.Int32):
        """Q of a work tile, after `count` others."""
        stage, scale_stage = stage_of(count, self.stages), stage_of(count, self.scale_stages)
        self.queries.begin(work)
        cute.arch.mbarrier_wait(self.barriers.q_empty + stage, phase_of(count, self.stages) ^ 1)
        self.queries.quantize(work, self.sQ_bytes[None, None, stage], self.sQScale[None, scale_stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.q_full + stage, arrive_count=self.arrivals)
            cute.arch.mbarrier_arrive(self.barriers.q_scale_full + scale_stage, arrive_count=self.arrivals)
        # Or other lanes might wait for the next work tile before the one that arrives has done so.
        cute.arch.sync_warp()
