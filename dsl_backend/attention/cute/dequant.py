# SPDX-License-Identifier: Apache-2.0
"""The widening role: a warpgroup turns tiles of fp8 into tiles of 16 bits, where the products read them.

Keys and values arrive in rings of their own, and leave through the rings that tensor copies fill where a cache has 16
bits: who multiplies sees no difference. A kernel's barriers of the first have `_loaded` and `_taken` in their names.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.primitives.math import e4m3_to_f16, e5m2_to_f16
from dsl_backend.quant.format import E4M3, E5M2

WARPS = WARPGROUP // 32
VECTOR = 4  # words of 16 bytes
AT_A_TIME = 8  # vectors of a thread, in registers at once
FP8_TO_F16 = {E4M3: e4m3_to_f16, E5M2: e5m2_to_f16}
USUAL = {"k_loaded": "k_full", "k_taken": "k_empty", "v_loaded": "v_full", "v_taken": "v_empty"}


def tma_barriers(barriers):
    """A kernel's barriers with those of the rings that tensor copies fill under the usual names."""
    filled = {usual: getattr(barriers, name, None) for name, usual in USUAL.items()}
    return barriers._replace(**{name: pointer for name, pointer in filled.items() if pointer is not None})


def fp8_smem_layout(rows: int, width: int, copied: int, stages: int) -> cute.Layout:
    """[rows, width, stages] of fp8 in shared memory: chunks of `copied` columns, without a swizzle."""
    shape = (rows, (copied, width // copied), stages)
    return cute.make_layout(shape, stride=(copied, (1, rows * copied), rows * width))


def fp8_tma_box(rows: int, copied: int) -> tuple[cute.Layout, tuple[int, int]]:
    """A box of one tensor copy of them: how it lies in shared memory, and its shape."""
    return cute.make_layout((rows, copied), stride=(copied, 1)), (rows, copied)


class DequantTiles:
    """Keys, or values, or some columns of them, on their way from one ring to the other.

    Vectors of 16 elements are dealt out to the threads in turn. Where a row has eight, the second four are those of the
    row beside it: so the reads and the writes of eight lanes fall on all banks once.

    Args:
        kv: what the bytes are.
        copied: elements of a row in one tensor copy.
        source: [rows, width, stages] of bytes, as tensor copies wrote them; target: of 16 bits, swizzled.
        rings: barriers (loaded, taken) of the source's, (full, empty) of the target's.
        columns: those of a row, whole copies; all of them where none are named.
        part: (which one, of how many) where a tile comes in parts, each with barriers of its own.
        blocks: that write to each other's sources.
    """

    def __init__(self, kv, copied, source, target, rings, columns=None, part=(0, 1), num_ctas=1):
        self.rows, width, self.dequant_stages = (cute.size(source, mode=[i]) for i in range(3))
        self.stages, self.numeric = cute.size(target, mode=[2]), target.element_type
        self.widen_word = FP8_TO_F16[kv]
        which, self.parts = part
        self.loaded, self.taken, self.full, self.empty = (ring + which for ring in rings)
        self.num_ctas, self.thread = num_ctas, cute.arch.thread_idx()[0] % WARPGROUP
        columns = columns or range(width)
        self.vectors = self.rows * len(columns) // 16
        self.each = copied // 16  # vectors of a row in one copy
        self.line = 2 * min(self.each, 4)  # vectors of a row in one swizzled chunk
        self.source = as_vectors(source, self.rows * width // 16, self.dequant_stages)
        self.target = as_vectors(target, self.rows * width // 8, self.stages)
        first = self.rows * columns.start // 16
        vector = self.thread % self.each
        row = (self.thread // self.each) ^ (vector // 4)
        place = row * self.line + vector % 4 * 2
        self.read = first + row * self.each + vector
        self.write = 2 * first + (place ^ (place // 8 % self.line)) + vector // 4 * self.rows * self.line

    @cute.jit
    def widen(self, count):
        """The count-th tile."""
        stages, dequant_stages, parts = (cutlass.const_expr(n) for n in (self.stages, self.dequant_stages, self.parts))
        place, stage = count % dequant_stages, count % stages
        cute.arch.mbarrier_wait(self.loaded + place * parts, (count // dequant_stages) & 1)
        turns = cutlass.const_expr(-(-self.vectors // WARPGROUP))
        held = cute.make_rmem_tensor((VECTOR, AT_A_TIME), cutlass.Int32)
        for first in cutlass.range_constexpr(0, turns, AT_A_TIME):
            last = cutlass.const_expr(min(first + AT_A_TIME, turns))
            for turn in cutlass.range_constexpr(first, last):
                if self.thread < self.vectors - turn * WARPGROUP:
                    cute.autovec_copy(self.source[None, self.read + turn * WARPGROUP, place], held[None, turn - first])
            if cutlass.const_expr(first == 0):
                cute.arch.mbarrier_wait(self.empty + stage * parts, ((count // stages) & 1) ^ 1)
            for turn in cutlass.range_constexpr(first, last):
                if self.thread < self.vectors - turn * WARPGROUP:
                    self.store(held[None, turn - first], self.write + self.offset(turn), stage)
        # Behind the stores, which wait for the loads. A copy that the arrival lets in writes by another proxy: on an
        # H200 arrivals overtook loads that were under way, and copies wrote over what these were to read.
        self.arrive(self.taken + place * parts, self.num_ctas)
        # Products read by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        self.arrive(self.full + stage * parts, 1)

    @cute.jit
    def arrive(self, barrier, num_ctas: cutlass.Constexpr[int]):
        """By a lane, for the warp, in each of so many blocks."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(num_ctas == 1):
                cute.arch.mbarrier_arrive(barrier)
            else:
                for block in cutlass.range_constexpr(num_ctas):
                    cute.arch.mbarrier_arrive(barrier, block)

    def offset(self, turn: int) -> int:
        """How many vectors behind its first target a thread's target of a later turn is."""
        chunk, row = divmod(turn * WARPGROUP // self.each, self.rows)
        return (chunk * self.rows * max(1, self.each // 4) + row) * self.line

    @cute.jit
    def store(self, stored, to, stage):
        """16 elements; the swizzle has the second half of them beside the first one."""
        words = cute.make_rmem_tensor((VECTOR, 2), cutlass.Int32)
        for i in cutlass.range_constexpr(VECTOR):
            low, high = self.widen_word(stored[i], self.numeric)
            words[2 * i], words[2 * i + 1] = low, high
        cute.autovec_copy(words[None, 0], self.target[None, to, stage])
        cute.autovec_copy(words[None, 1], self.target[None, to ^ 1, stage])


class DequantWarps:
    """In the order in which they are loaded: keys, and values one tile behind.

    Args:
        loaded_k, loaded_v: where tensor copies lay bytes; sK, sV: where products read.
    """

    def __init__(self, kernel, work_pipeline, barriers, loaded_k, sK, loaded_v, sV):
        self.work_pipeline, b = work_pipeline, barriers
        self.keys = DequantTiles(
            kernel.key.kv, kernel.copied, loaded_k, sK, (b.k_loaded, b.k_taken, b.k_full, b.k_empty)
        )
        self.values = DequantTiles(
            kernel.key.kv, kernel.copied_v, loaded_v, sV, (b.v_loaded, b.v_taken, b.v_full, b.v_empty)
        )

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            self.keys.widen(tiles)
            for _ in cutlass.range(work.n_block_max - work.n_block_min - 1, unroll=1):
                self.keys.widen(tiles + 1)
                self.values.widen(tiles)
                tiles += 1
            self.values.widen(tiles)
            tiles += 1
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid


def as_vectors(tensor: cute.Tensor, vectors: int, stages: int) -> cute.Tensor:
    """[words of a vector, vectors, stages] as they lie in shared memory, swizzle or not."""
    layout = cute.make_layout((VECTOR, vectors, stages), stride=(1, VECTOR, VECTOR * vectors))
    place = cute.make_ptr(cutlass.Int32, tensor.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(place, layout)
