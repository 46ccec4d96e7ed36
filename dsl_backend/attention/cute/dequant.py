# SPDX-License-Identifier: Apache-2.0
"""Dequantization warps: convert fp8 and NVFP4 tiles of K and V to 16 bits in shared memory.

TMA fills fp8 stages of their own (barriers `_loaded` and `_taken`). The dequantization warps fill the 16-bit stages,
which for a 16-bit cache TMA fills, so that the MMA warps are the same for both.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.primitives.math import e4m3_to_f16, e4m3_to_f16_twice, e5m2_to_f16, scaled_e2m1_to_f16
from dsl_backend.quant.format import E4M3, E5M2, KV_BLOCK

WARPS = WARPGROUP // 32
VECTOR = 4  # words of a vector of 16 bytes
VECTORS_IN_FLIGHT = 8  # of a thread, in registers
FP8_TO_F16 = {E4M3: e4m3_to_f16, E5M2: e5m2_to_f16}
# Barriers of the fp8 stages, and those of the 16-bit stages that TMA fills without them.
FP8_BARRIERS = {"k_loaded": "k_full", "k_taken": "k_empty", "v_loaded": "v_full", "v_taken": "v_empty"}


def tma_barriers(barriers: Any) -> Any:
    """A kernel's barriers as the load warp uses them: for an fp8 cache, `k_full` is that of the fp8 stages."""
    fp8 = {name: getattr(barriers, fp8_name, None) for fp8_name, name in FP8_BARRIERS.items()}
    return barriers._replace(**{name: mbars for name, mbars in fp8.items() if mbars is not None})


def fp8_smem_layout(rows: int, width: int, copied: int, stages: int) -> cute.Layout:
    """[row, column, stage] of fp8 in shared memory: chunks of `copied` columns, one for each TMA box, not swizzled."""
    shape = (rows, (copied, width // copied), stages)
    return cute.make_layout(shape, stride=(copied, (1, rows * copied), rows * width))


def fp8_tma_box(rows: int, copied: int) -> tuple[cute.Layout, tuple[int, int]]:
    """The box of one TMA load of such a chunk: its layout in shared memory, and its shape."""
    return cute.make_layout((rows, copied), stride=(copied, 1)), (rows, copied)


class DequantTiles:
    """Convert tiles of K, or of V, or some of their columns, by a warpgroup.

    Consecutive threads take consecutive vectors of 16 elements. If a row has eight vectors, the second four of a row
    are swapped with those of the next row, so that the reads and the writes of eight lanes hit every bank once.

    Attributes:
        source_words: of 16 elements. words: in registers, of 16 elements with what else they need.

    Args:
        kv: format of the source.
        copied: elements of a row in one TMA box.
        source: (row, column, dequant_stage) of bytes, as TMA wrote them.
        target: (row, column, stage) of 16 bits, swizzled.
        rings: mbarriers (full, empty) of the source's stages, then those of the target's.
        columns: of a row, whole boxes; None for all.
        part: (index, count) if a tile comes in parts, each with mbarriers of its own.
        num_ctas: CTAs whose TMA loads write to this CTA's source (multicast).
    """

    source_words = words = VECTOR

    def __init__(self, kv, copied, source, target, rings, columns=None, part=(0, 1), num_ctas=1):
        self.rows, width, self.dequant_stages = (cute.size(source, mode=[i]) for i in range(3))
        width = width * VECTOR // self.source_words
        self.stages, self.numeric = cute.size(target, mode=[2]), target.element_type
        self.kv = kv
        part_idx, self.parts = part
        self.loaded, self.taken, self.full, self.empty = (mbars + part_idx for mbars in rings)
        self.num_ctas, self.thread = num_ctas, cute.arch.thread_idx()[0] % WARPGROUP
        columns = columns or range(width)
        self.vectors = self.rows * len(columns) // 16
        self.box_vectors = copied // 16  # of a row in one TMA box
        self.chunk_vectors = 2 * min(self.box_vectors, 4)  # of a row in one swizzled chunk
        self.source = as_vectors(source, self.rows * width // 16, self.dequant_stages, self.source_words)
        self.target = as_vectors(target, self.rows * width // 8, self.stages)
        first = self.rows * columns.start // 16
        vector = self.thread % self.box_vectors
        row = (self.thread // self.box_vectors) ^ (vector // 4)
        index = row * self.chunk_vectors + vector % 4 * 2
        self.row, self.vector, self.row_vectors = row, vector, width // 16
        self.read = first + row * self.box_vectors + vector
        self.write = (
            2 * first + (index ^ (index // 8 % self.chunk_vectors)) + vector // 4 * self.rows * self.chunk_vectors
        )

    @cute.jit
    def dequantize(self, kv_idx: cutlass.Int32):
        """Convert one tile; kv_idx counts the tiles of all work tiles, and gives both stages."""
        stages, dequant_stages, parts = (cutlass.const_expr(n) for n in (self.stages, self.dequant_stages, self.parts))
        fp8_stage, stage = kv_idx % dequant_stages, kv_idx % stages
        cute.arch.mbarrier_wait(self.loaded + fp8_stage * parts, (kv_idx // dequant_stages) & 1)
        rounds = cutlass.const_expr(-(-self.vectors // WARPGROUP))
        words = cute.make_rmem_tensor((self.words, VECTORS_IN_FLIGHT), cutlass.Int32)
        for first in cutlass.range_constexpr(0, rounds, VECTORS_IN_FLIGHT):
            last = cutlass.const_expr(min(first + VECTORS_IN_FLIGHT, rounds))
            for i in cutlass.range_constexpr(first, last):
                if self.thread < self.vectors - i * WARPGROUP:
                    self.load(i, fp8_stage, words[None, i - first])
            if cutlass.const_expr(first == 0):
                cute.arch.mbarrier_wait(self.empty + stage * parts, ((kv_idx // stages) & 1) ^ 1)
            for i in cutlass.range_constexpr(first, last):
                if self.thread < self.vectors - i * WARPGROUP:
                    self.store(words[None, i - first], self.write + self.offset(i), stage)
        # After the stores, which depend on the loads. TMA, which the arrival lets in, writes through another proxy: on
        # an H200 arrivals overtook loads in flight, and TMA overwrote what these were to read.
        arrive_warp(self.taken + fp8_stage * parts, self.num_ctas)
        # MMAs read through the async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_warp(self.full + stage * parts)

    @cute.jit
    def load(self, i: cutlass.Constexpr[int], stage: cutlass.Int32, words: cute.Tensor):
        """Load a thread's i-th 16 elements."""
        cute.autovec_copy(self.source[None, self.read + i * WARPGROUP, stage], words)

    def box_and_row(self, i: int) -> tuple[int, int]:
        """By how many boxes and rows a thread's i-th 16 elements lie behind its first ones."""
        return divmod(i * WARPGROUP // self.box_vectors, self.rows)

    def offset(self, i: int) -> int:
        """Offset of a thread's i-th target vector from its first one, in vectors."""
        chunk, row = self.box_and_row(i)
        return (chunk * self.rows * max(1, self.box_vectors // 4) + row) * self.chunk_vectors

    @cute.jit
    def store(self, fp8_words: cute.Tensor, index: cutlass.Int32, stage: cutlass.Int32):
        """Store 16 elements as two vectors, whose swizzled indices differ in bit 0 alone."""
        words = cute.make_rmem_tensor((VECTOR, 2), cutlass.Int32)
        for i in cutlass.range_constexpr(VECTOR):
            low, high = FP8_TO_F16[self.kv](fp8_words[i], self.numeric)
            words[2 * i], words[2 * i + 1] = low, high
        self.store_vectors(words, index, stage)

    @cute.jit
    def store_vectors(self, words: cute.Tensor, index: cutlass.Int32, stage: cutlass.Int32):
        cute.autovec_copy(words[None, 0], self.target[None, index, stage])
        cute.autovec_copy(words[None, 1], self.target[None, index ^ 1, stage])


class Nvfp4DequantTiles(DequantTiles):
    """The same of NVFP4: a thread's 16 elements are a block, two words, with a scale.

    Args:
        source: `tiles.Nvfp4Stages`.
    """

    source_words, words = 2, 3

    def __init__(self, kv, copied, source, target, rings):
        super().__init__(kv, copied, source.elements, target, rings)
        (box_blocks, boxes), _, _ = source.scales.shape
        _, step = source.scales.stride[0]
        self.box, self.box_bytes = box_blocks * KV_BLOCK, step
        layout = cute.make_layout((boxes * step, self.dequant_stages), stride=(1, boxes * step))
        self.scales = cute.make_tensor(source.scales.iterator, layout)
        self.first_scale = self.scale_of_row(self.row) + self.vector

    def scale_of_row(self, row):
        """Offset of a row's scales in a stage."""
        return row // self.box * self.box_bytes + row % self.box * self.row_vectors

    def scale_index(self, i: int) -> cutlass.Int32:
        """Offset of the scale of a thread's i-th 16 elements."""
        (box, row), rows = self.box_and_row(i), WARPGROUP // self.box_vectors
        if rows % self.box == 0 or self.box % rows == 0:
            # Whole boxes further, or in the same box.
            return self.first_scale + self.scale_of_row(row) + box * self.box_vectors
        return self.scale_of_row(self.row + row) + self.vector + box * self.box_vectors

    @cute.jit
    def load(self, i: cutlass.Constexpr[int], stage: cutlass.Int32, words: cute.Tensor):
        elements = cute.make_rmem_tensor(self.source_words, cutlass.Int32)
        cute.autovec_copy(self.source[None, self.read + i * WARPGROUP, stage], elements)
        words[0], words[1] = elements[0], elements[1]
        words[2] = cutlass.Int32(self.scales[self.scale_index(i), stage])

    @cute.jit
    def store(self, nvfp4_words: cute.Tensor, index: cutlass.Int32, stage: cutlass.Int32):
        """As of fp8; a block's elements are multiplied with its scale, exactly."""
        words = cute.make_rmem_tensor((VECTOR, 2), cutlass.Int32)
        scale = e4m3_to_f16_twice(nvfp4_words[2])
        for i in cutlass.range_constexpr(2):
            found = scaled_e2m1_to_f16(nvfp4_words[i], scale, self.numeric)
            for j in cutlass.range_constexpr(VECTOR):
                words[j, i] = found[j]
        self.store_vectors(words, index, stage)


class DequantWarps:
    """The dequantization warpgroup's loop: K, and V one tile later, in the order in which they are loaded.

    Args:
        sK_tma, sV_tma: fp8 stages, which TMA fills.
        sK, sV: 16-bit stages, which MMAs read.
    """

    tiles_type: type[DequantTiles] = DequantTiles

    def __init__(self, kernel, work_pipeline, barriers, sK_tma, sK, sV_tma, sV):
        self.work_pipeline, b = work_pipeline, barriers
        self.keys = self.tiles_type(
            kernel.key.kv, kernel.copied, sK_tma, sK, (b.k_loaded, b.k_taken, b.k_full, b.k_empty)
        )
        self.values = self.tiles_type(
            kernel.key.kv, kernel.copied_v, sV_tma, sV, (b.v_loaded, b.v_taken, b.v_full, b.v_empty)
        )

    @cute.jit
    def run(self):
        tile_count, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(tile_count)
        valid = work.valid
        while valid != 0:
            self.keys.dequantize(kv_idx)
            for _ in cutlass.range(work.n_block_max - work.n_block_min - 1, unroll=1):
                self.keys.dequantize(kv_idx + 1)
                self.values.dequantize(kv_idx)
                kv_idx += 1
            self.values.dequantize(kv_idx)
            kv_idx += 1
            tile_count += 1
            work = self.work_pipeline.consume(tile_count)
            valid = work.valid


class Nvfp4DequantWarps(DequantWarps):
    """The same of NVFP4; sK_tma and sV_tma are `tiles.Nvfp4Stages`."""

    tiles_type = Nvfp4DequantTiles


class MlaDequantWarps:
    """As DequantWarps, for absorbed MLA: one tensor, in the parts in which it is loaded.

    Args:
        kernel: the `TiledMla`.
        sK_tma: fp8 stages, which TMA fills; sK: 16-bit stages, which MMAs read. [key, column, stage].
    """

    def __init__(
        self, kernel: Any, work_pipeline: WorkTilePipeline, barriers: Any, sK_tma: cute.Tensor, sK: cute.Tensor
    ) -> None:
        self.work_pipeline, b = work_pipeline, barriers
        rings, chunk = (b.k_loaded, b.k_taken, b.k_full, b.k_empty), kernel.chunk
        self.tiles = [
            DequantTiles(
                kernel.key.kv,
                chunk,
                sK_tma,
                sK,
                rings,
                columns=range(part.start * chunk, part.stop * chunk),
                part=(i, len(kernel.parts)),
                num_ctas=kernel.config.cluster,
            )
            for i, part in enumerate(kernel.parts)
        ]

    @cute.jit
    def run(self):
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            for _ in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                for part in cutlass.range_constexpr(len(self.tiles)):
                    self.tiles[part].dequantize(tiles)
                tiles += 1
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid


def as_vectors(tensor: cute.Tensor, vectors: int, stages: int, words: int = VECTOR) -> cute.Tensor:
    """View [word, vector, stage] in the order of addresses, regardless of the swizzle."""
    layout = cute.make_layout((words, vectors, stages), stride=(1, words, words * vectors))
    pointer = cute.make_ptr(cutlass.Int32, tensor.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, layout)
