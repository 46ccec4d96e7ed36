# SPDX-License-Identifier: Apache-2.0
"""The widening role: a warpgroup turns tiles of fp8 into tiles of 16 bits, where the products read them.

Keys and values arrive in rings of their own, and leave through the rings that tensor copies fill where a cache has 16
bits: who multiplies sees no difference. A kernel's barriers of the first have `_loaded` and `_taken` in their names.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.sizes import WARPGROUP, fp8_chunk
from dsl_backend.primitives.math import widen_e4m3

WARPS = WARPGROUP // 32
VECTOR = 4  # words of 16 bytes
AT_A_TIME = 8  # vectors of a thread, in registers at once


def rings_of_loader(barriers):
    """A kernel's barriers with those of the rings that tensor copies fill under the usual names."""
    if barriers.k_loaded is None:
        return barriers
    b = barriers
    return b._replace(k_full=b.k_loaded, k_empty=b.k_taken, v_full=b.v_loaded, v_empty=b.v_taken)


class Tiles:
    """Keys, or values, on their way from one ring to the other.

    Vectors of 16 elements are dealt out to the threads in turn. Where a row has eight, the second four are those of the
    row beside it: so the reads and the writes of eight lanes fall on all banks once.

    Args:
        source: [rows, width, stages] of bytes, as tensor copies wrote them; target: of 16 bits, swizzled.
        loaded, taken: barriers of the source's ring; full, empty: of the target's.
    """

    def __init__(self, kernel, width, source, target, loaded, taken, full, empty, thread):
        self.config, self.numeric = kernel.config, target.element_type
        self.loaded, self.taken, self.full, self.empty = loaded, taken, full, empty
        self.thread, self.rows, self.vectors = thread, kernel.tile_n, kernel.tile_n * width // 16
        self.each = fp8_chunk(width) // 16  # vectors of a row in one copy
        self.line = 2 * min(self.each, 4)  # vectors of a row in one swizzled chunk
        self.source = as_vectors(source, self.vectors, self.config.staging)
        self.target = as_vectors(target, 2 * self.vectors, self.config.stages)
        vector = thread % self.each
        row = (thread // self.each) ^ (vector // 4)
        place = row * self.line + vector % 4 * 2
        self.read = row * self.each + vector
        self.write = (place ^ (place // 8 % self.line)) + vector // 4 * self.rows * self.line

    @cute.jit
    def widen(self, count):
        """The count-th tile."""
        stages, staging = cutlass.const_expr(self.config.stages), cutlass.const_expr(self.config.staging)
        place, stage = count % staging, count % stages
        cute.arch.mbarrier_wait(self.loaded + place, (count // staging) & 1)
        turns = cutlass.const_expr(-(-self.vectors // WARPGROUP))
        held = cute.make_rmem_tensor((VECTOR, AT_A_TIME), cutlass.Int32)
        for first in cutlass.range_constexpr(0, turns, AT_A_TIME):
            last = cutlass.const_expr(min(first + AT_A_TIME, turns))
            for turn in cutlass.range_constexpr(first, last):
                if self.thread < self.vectors - turn * WARPGROUP:
                    cute.autovec_copy(self.source[None, self.read + turn * WARPGROUP, place], held[None, turn - first])
            if cutlass.const_expr(last == turns):
                arrive(self.taken + place)
            if cutlass.const_expr(first == 0):
                cute.arch.mbarrier_wait(self.empty + stage, ((count // stages) & 1) ^ 1)
            for turn in cutlass.range_constexpr(first, last):
                if self.thread < self.vectors - turn * WARPGROUP:
                    self.store(held[None, turn - first], self.write + self.offset(turn), stage)
        # Products read by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(self.full + stage)

    def offset(self, turn: int) -> int:
        """How many vectors behind its first target a thread's target of a later turn is."""
        chunk, row = divmod(turn * WARPGROUP // self.each, self.rows)
        return (chunk * self.rows * max(1, self.each // 4) + row) * self.line

    @cute.jit
    def store(self, stored, to, stage):
        """16 elements; the swizzle has the second half of them beside the first one."""
        words = cute.make_rmem_tensor((VECTOR, 2), cutlass.Int32)
        for i in cutlass.range_constexpr(VECTOR):
            low, high = widen_e4m3(stored[i], self.numeric)
            words[2 * i], words[2 * i + 1] = low, high
        cute.autovec_copy(words[None, 0], self.target[None, to, stage])
        cute.autovec_copy(words[None, 1], self.target[None, to ^ 1, stage])


class Widener:
    """In the order in which they are loaded: keys, and values one tile behind.

    Args:
        loaded_k, loaded_v: where tensor copies lay bytes; sK, sV: where products read.
    """

    def __init__(self, kernel, mailbox, barriers, loaded_k, sK, loaded_v, sV):
        self.mailbox, b = mailbox, barriers
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.keys = Tiles(kernel, kernel.dims, loaded_k, sK, b.k_loaded, b.k_taken, b.k_full, b.k_empty, thread)
        self.values = Tiles(kernel, kernel.dims_v, loaded_v, sV, b.v_loaded, b.v_taken, b.v_full, b.v_empty, thread)

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.mailbox.read(items)
        valid = work.valid
        while valid != 0:
            self.keys.widen(tiles)
            for _ in cutlass.range(work.end - work.begin - 1, unroll=1):
                self.keys.widen(tiles + 1)
                self.values.widen(tiles)
                tiles += 1
            self.values.widen(tiles)
            tiles += 1
            items += 1
            work = self.mailbox.read(items)
            valid = work.valid


def as_vectors(tensor: cute.Tensor, vectors: int, stages: int) -> cute.Tensor:
    """[words of a vector, vectors, stages] as they lie in shared memory, swizzle or not."""
    layout = cute.make_layout((VECTOR, vectors, stages), stride=(1, VECTOR, VECTOR * vectors))
    place = cute.make_ptr(cutlass.Int32, tensor.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(place, layout)


@cute.jit
def arrive(barrier):
    """By a lane, for the warp."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
