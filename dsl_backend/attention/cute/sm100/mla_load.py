# SPDX-License-Identifier: Apache-2.0
"""The load warp of absorbed MLA for SM100, where a CTA multiplies alone."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.loader.mla import MlaKeyLoadWarp, MlaLoadWarp
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile


class PagesAhead(MlaLoadWarp):
    """A load warp that reads the number of a tile's page, which comes from memory too, a tile ahead."""

    @cute.jit
    def run(self):
        for atom in self.atoms():
            cpasync.prefetch_descriptor(atom)
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        pages = self.pages_from(work, work.n_block_max - 1)
        valid = work.valid
        while valid != 0:
            for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                n_block = work.n_block_max - 1 - step
                pages_ahead = self.pages_from(work, n_block - 1)
                self.load_rows(work, n_block, pages, tiles)
                if step == 0:
                    # After K, which comes from memory, and whose stage is empty while the work tile before is computed.
                    self.load_queries(work, work_tiles)
                pages = pages_ahead
                tiles += 1
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            pages = self.pages_from(work, work.n_block_max - 1)
            valid = work.valid
        self.wait_for_peers(tiles)

    @cute.jit
    def pages_from(self, work: WorkTile, n_block: cutlass.Int32):
        """The pages of a key tile, as `pages_of` gives them; any where the work tile has no such key tile."""
        pages = cutlass.Int32(0)
        if work.valid != 0 and n_block >= work.n_block_min:
            pages = self.pages_of(work, n_block)
        return pages


class PagesAheadMlaKeyLoadWarp(PagesAhead, MlaKeyLoadWarp):
    """The same, for kernels whose other warps load Q."""
