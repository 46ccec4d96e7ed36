# SPDX-License-Identifier: Apache-2.0
"""The load role of absorbed MLA: rows of the cache come once, and are keys and values."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.parts.load import Loader, query_box
from dsl_backend.attention.sm90.configs import ROWS
from dsl_backend.attention.sm90.latent_configs import PARTS


class LatentLoader(Loader):
    """Fills the ring: for each item the queries' two parts, then key tiles from the last to the first."""

    def __init__(self, kernel, mailbox, barriers, v_load, mV, r_load, mR, sQ, k_load, mK, sK, requests):
        self.config, self.key = kernel.config, kernel.key
        self.page, self.box, self.tile_n = kernel.key.page_size, kernel.box, kernel.tile_n
        self.boxes = self.tile_n // self.box
        # Blocks of a cluster load a share of each tile, for all of them.
        cluster = self.config.cluster
        self.own_boxes, self.first_box, self.multicast = self.boxes // cluster, 0, {}
        if cluster > 1:
            self.first_box = cute.arch.block_idx_in_cluster() * self.own_boxes
            self.multicast = {"mcast_mask": cutlass.Int16((1 << cluster) - 1)}
        self.group = kernel.key.heads_q // kernel.key.pack
        self.mailbox, self.barriers, self.requests = mailbox, barriers, requests
        # Queries against what is value too, and against the rest.
        self.v_load, self.mV, self.r_load, self.mR = v_load, mV, r_load, mR
        self.k_load, self.mK = k_load, mK
        self.chunk, self.parts = kernel.chunk, kernel.parts
        self.chunks, self.chunks_v = kernel.dims // kernel.chunk, kernel.dims_v // kernel.chunk
        self.tokens_per_tile = kernel.tokens_per_tile
        self.q_bytes = self.tokens_per_tile * self.key.pack * kernel.dims * 2
        self.chunk_bytes = self.tile_n * kernel.chunk * 2
        # Rows of a chunk lie one after another: [head and token, 1, chunk, 1].
        shape = (query_box(kernel).shape, 1, self.chunks, 1)
        layout = cute.make_layout(shape, stride=(query_box(kernel).stride, 0, ROWS * kernel.chunk, 0))
        self.sQ = cute.make_tensor(sQ.iterator, layout)
        self.sK = self.in_boxes(sK, self.box, kernel.chunk)

    @cute.jit
    def run(self):
        for atom in (self.v_load, self.r_load, self.k_load):
            cpasync.prefetch_descriptor(atom)
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.mailbox.read(items)
        valid = work.valid
        while valid != 0:
            self.load_queries(work, items)
            for step in cutlass.range(work.end - work.begin, unroll=1):
                tile = work.end - 1 - step
                self.load_rows(work, tile, self.pages_of(work, tile), tiles)
                tiles += 1
            items += 1
            work = self.mailbox.read(items)
            valid = work.valid

    @cute.jit
    def load_queries(self, work, count):
        cute.arch.mbarrier_wait(self.barriers.q_empty, (count & 1) ^ 1)
        full = self.barriers.q_full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.q_bytes)
        tile = (self.key.pack, self.tokens_per_tile, self.chunk)
        first = 0
        for atom, source, chunks in (
            (self.v_load, self.mV, self.chunks_v),
            (self.r_load, self.mR, self.chunks - self.chunks_v),
        ):
            rows = cute.domain_offset((0, work.query, 0), source[None, None, None, work.unit])
            given = cute.group_modes(cute.local_tile(rows, tile, (0, 0, None)), 0, 3)
            to, given = cpasync.tma_partition(atom, 0, cute.make_layout(1), self.sQ, given)
            for c in cutlass.range_constexpr(chunks):
                cute.copy(atom, given[None, c], to[None, 0, first + c, 0], tma_bar_ptr=full)
            first += chunks

    @cute.jit
    def load_rows(self, work, tile, pages, count):
        """A key tile, part by part as they become free."""
        stage = count % self.config.stages
        for part in cutlass.range_constexpr(PARTS):
            place = stage * PARTS + part
            cute.arch.mbarrier_wait(self.barriers.k_empty + place, ((count // self.config.stages) & 1) ^ 1)
            full = self.barriers.k_full + place
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, len(self.parts[part]) * self.chunk_bytes)
            chunks = self.parts[part]
            self.load_tile(self.k_load, self.mK, self.sK, self.chunk, chunks, work, tile, pages, stage, full)
