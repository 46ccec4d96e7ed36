# SPDX-License-Identifier: Apache-2.0
"""The TMA producer of absorbed MLA: a row of the cache is loaded once, and is key and value."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.loader.dense import LoadWarp, query_box
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.primitives.copy import EVICT_FIRST
from dsl_backend.primitives.ring import phase_of, stage_of


class MlaLoadWarp(LoadWarp):
    """Loads the key tiles of each work tile from the last to the first, and after the last one both parts of Q.

    Args:
        kernel: the `TiledMla`.
        barriers: a kernel's, as `tma_barriers` gives them.
        loads: `MlaLoads`.
        sQ: [row, column, 1]; sK: [key, column, stage], where TMA writes keys.
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: Any,
        loads: Any,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        requests: Requests,
    ) -> None:
        self.config, self.key = kernel.config, kernel.key
        self.page, self.box, self.tile_n = kernel.key.page_size, kernel.box, kernel.tile_n
        self.boxes = self.tile_n // self.box
        # Each CTA of a cluster loads a share of a tile's boxes, and multicasts it to all CTAs.
        cluster = self.config.cluster
        self.own_boxes, self.first_box, self.copy_options = self.boxes // cluster, 0, {}
        if cluster > 1:
            self.first_box = cute.arch.block_idx_in_cluster() * self.own_boxes
            self.copy_options["mcast_mask"] = cutlass.Int16((1 << cluster) - 1)
        if self.config.evict_first:
            self.copy_options["cache_policy"] = cutlass.Int64(EVICT_FIRST)
        self.group = kernel.key.heads_q // kernel.key.pack_gqa
        self.work_pipeline, self.barriers, self.requests = work_pipeline, barriers, requests
        self.tma_atom_k, self.mK = loads.tma_atom_k, loads.mK
        self.chunk, self.parts = kernel.chunk, kernel.parts
        self.stages = kernel.loaded_stages
        self.waits_for_peers = kernel.mma_commits_late and cluster > 1 and not kernel.dequantizes
        self.chunk_bytes = self.tile_n * kernel.chunk * self.key.kv.itemsize
        self.sK = self.in_boxes(sK, self.box, kernel.chunk)
        self.set_queries(kernel, loads, sQ)

    def set_queries(self, kernel: Any, loads: Any, sQ: cute.Tensor) -> None:
        """Set what the loads of Q need."""
        self.tma_atom_q, self.mQ, self.tma_atom_q_rope, self.mQRope = loads[:4]
        self.chunks, self.chunks_v = kernel.dims // kernel.chunk, kernel.dims_v // kernel.chunk
        self.set_query_boxes(kernel)
        # Rows of a chunk lie one after another: [head and token, box, chunk].
        box = query_box(kernel.key.pack_gqa, kernel.box_tokens, kernel.chunk)
        strides = (box.stride, kernel.rows_loaded * kernel.chunk, ROWS * kernel.chunk)
        layout = cute.make_layout((box.shape, self.q_boxes, self.chunks), stride=strides)
        self.sQ = cute.make_tensor(sQ.iterator, layout)
        few_rows = cute.make_layout(layout.shape, stride=(*strides[:2], kernel.few_rows_chunk))
        self.sQ_few_rows = cute.make_tensor(sQ.iterator, few_rows)

    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        """The TMA atoms, whose descriptors are prefetched."""
        return self.tma_atom_q, self.tma_atom_q_rope, self.tma_atom_k

    @cute.jit
    def run(self):
        for atom in self.atoms():
            cpasync.prefetch_descriptor(atom)
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                n_block = work.n_block_max - 1 - step
                self.load_rows(work, n_block, self.pages_of(work, n_block), tiles)
                if step == 0:
                    # After K, which comes from memory, and whose stage is empty while the work tile before is computed.
                    self.load_queries(work, work_tiles)
                tiles += 1
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid
        self.wait_for_peers(tiles)

    @cute.jit
    def wait_for_peers(self, count: cutlass.Int32):
        """Wait until the peers' MMAs have read all `count` tiles: they signal mbarriers of this CTA."""
        if cutlass.const_expr(self.waits_for_peers):
            for stage in cutlass.range(self.stages, unroll=1):
                for part in cutlass.range_constexpr(len(self.parts)):
                    self.wait_empty(count + stage, part)

    @cute.jit
    def wait_empty(self, count: cutlass.Int32, part: cutlass.Constexpr[int]):
        """Wait until a part of the stage of the count-th tile is empty; return the index of its mbarriers."""
        mbar_idx = stage_of(count, self.stages) * len(self.parts) + part
        cute.arch.mbarrier_wait(self.barriers.k_empty + mbar_idx, phase_of(count, self.stages) ^ 1)
        return mbar_idx

    @cute.jit
    def load_queries(self, work: WorkTile, count: cutlass.Int32):
        """Load the latent and the rope part of the rows of Q."""
        cute.arch.mbarrier_wait(self.barriers.q_empty, (count & 1) ^ self.q_phase)
        mbar_full = self.barriers.q_full
        boxes = self.expect_queries(work, mbar_full)
        if cutlass.const_expr(self.key.smem_fold_rows):
            if work.num_rows <= self.key.smem_fold_rows:
                self.copy_queries(work, self.sQ_few_rows, boxes, mbar_full)
            else:
                self.copy_queries(work, self.sQ, boxes, mbar_full)
        else:
            self.copy_queries(work, self.sQ, boxes, mbar_full)

    @cute.jit
    def copy_queries(self, work: WorkTile, sQ: cute.Tensor, boxes: cutlass.Int32 | int, mbar_full: cute.Pointer):
        """Load the boxes of Q to sQ [head and token, box, chunk]."""
        tile = (self.key.pack_gqa, self.box_tokens, self.chunk)
        first = 0
        for atom, mQ, chunks in (
            (self.tma_atom_q, self.mQ, self.chunks_v),
            (self.tma_atom_q_rope, self.mQRope, self.chunks - self.chunks_v),
        ):
            gQ = cute.domain_offset((0, work.q_offset, 0), mQ[None, None, None, work.head_block])
            gQ = cute.group_modes(cute.local_tile(gQ, tile, (0, None, None)), 0, 3)
            tQsQ, tQgQ = cpasync.tma_partition(atom, 0, cute.make_layout(1), sQ, gQ)
            for box in cutlass.range(boxes, unroll=1):
                for c in cutlass.range_constexpr(chunks):
                    cute.copy(atom, tQgQ[None, box, c], tQsQ[None, box, first + c], tma_bar_ptr=mbar_full)
            first += chunks

    @cute.jit
    def load_rows(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        """Load a key tile, each part once its stage is empty; `count` tiles were loaded before."""
        stage = stage_of(count, self.stages)
        for part in cutlass.range_constexpr(len(self.parts)):
            mbar_full = self.barriers.k_full + self.wait_empty(count, part)
            self.expect(mbar_full, len(self.parts[part]) * self.chunk_bytes)
            chunks = self.parts[part]
            self.load_tile(
                self.tma_atom_k, self.mK, self.sK, self.chunk, chunks, work, n_block, pages, stage, mbar_full
            )


class MlaKeyLoadWarp(MlaLoadWarp):
    """As MlaLoadWarp, for kernels whose other warps load Q: `loads` is `MlaKeyLoads`."""

    def set_queries(self, kernel: Any, loads: Any, sQ: cute.Tensor) -> None:
        """Nothing: the load warp does not see Q."""

    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return (self.tma_atom_k,)

    def load_queries(self, work: WorkTile, count: cutlass.Int32) -> None:
        """Nothing, as above."""
