# SPDX-License-Identifier: Apache-2.0
"""Sorts the pairs of tokens and slots by expert and lists the work tiles, without a value on the host.

A counting sort. Each warp counts the experts of a contiguous range of pairs in shared memory; where an expert's rows
begin, and a warp's among them, follows by prefix sums; each warp then places its pairs. Pairs of one expert keep their
order, so that the result is the same at every run.

With few pairs one CTA does all of it, in one launch. Otherwise a launch before it counts, one range of pairs for each
CTA, and each CTA adds up the counts of all ranges.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.args import RECORD, ExpertsArgs
from dsl_backend.experts.cute.key import Slots
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.copy import load_vector_if, store_vector
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.scan import warp_inclusive_sum
from dsl_backend.primitives.schedule import share

WARP = 32
WARPS = 16
ALL_LANES = 0xFFFFFFFF
# Pairs of a lane whose experts are loaded at once.
UNROLLED = 4


def place_of_id(pair, slots: Slots):
    """Where the router's number of a pair is; of a shared expert's pair some place of its token."""
    if not slots.shared:
        return pair
    token, slot = pair // slots.of_token, pair % slots.of_token
    return token * slots.topk + cutlass.min(slot, slots.topk - 1)


@cute.jit
def expert_of(routed, mMap: cute.Tensor, pair: cutlass.Int32, slots: cutlass.Constexpr[Slots]):
    """This rank's expert of a pair; -1 where there is none.

    Args:
        routed: the router's number, int32 or int64, at `place_of_id`.
        mMap: int32 [global experts], or missing.
    """
    local = local_of(routed, mMap, slots.experts)
    if cutlass.const_expr(slots.shared > 0):
        slot = pair % slots.of_token
        if slot >= slots.topk:
            local = cutlass.Int32(slots.experts - slots.topk) + slot
    return local


@cute.jit
def local_of(expert, mMap: cute.Tensor, experts: cutlass.Constexpr[int]):
    """This rank's number of an expert, int32 or int64; -1 where there is none."""
    known = cute.size(mMap) if cutlass.const_expr(mMap is not None) else experts
    inside = expert >= 0 and expert < known
    local = cutlass.Int32(expert) if inside else cutlass.Int32(-1)
    if cutlass.const_expr(mMap is not None):
        # Without a branch: callers have several of these on their way.
        rLocal = cute.make_rmem_tensor(1, cutlass.Int32)
        load_vector_if(inside, mMap.iterator, cutlass.Int64(local), rLocal, -1)
        local = rLocal[0]
        if local >= experts:
            local = cutlass.Int32(-1)
    return local


def flat(tensor: cute.Tensor) -> cute.Tensor:
    """A contiguous matrix as a vector."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(cute.size(tensor)))


@dataclass(frozen=True)
class RoutingParams:
    """What the kernels work with: see `args`.

    Attributes:
        mIds: [M k]. mMap: [global experts], or missing.
        mCounts: [CTAs, E].
        mTiles: [tiles, RECORD]. mTileCount: [2]. mPairs: [pairs].
    """

    mIds: cute.Tensor
    mMap: cute.Tensor
    mCounts: cute.Tensor
    mTiles: cute.Tensor
    mTileCount: cute.Tensor
    mPairs: cute.Tensor


@dataclass(frozen=True)
class RoutingSmem:
    """Int32 in shared memory.

    Attributes:
        sCounts: [warp, E], rows of each expert among a warp's pairs, then where the next of them goes.
        sTotals: [E], rows of each expert.
        sBefore: [E], those among the pairs of earlier CTAs.
        sStarts: [E + 1], first rows. sTileStarts: [E + 1], first work tiles.
    """

    sCounts: cute.Tensor
    sTotals: cute.Tensor
    sBefore: cute.Tensor
    sStarts: cute.Tensor
    sTileStarts: cute.Tensor


class Routing:
    """Writes tiles, tile_count and pairs of the scratch; counts too where several CTAs sort.

    Args:
        slots: of a token.
        tile_m: rows of a work tile at most.
        waits_first: the next kernel starts when all before this one have ended: it need not wait for them.
    """

    def __init__(self, slots: Slots, tile_m: int, waits_first: bool = False):
        self.slots, self.experts = slots, slots.all_experts
        self.tile_m, self.waits_first = tile_m, waits_first
        self.threads = WARPS * WARP

    @cute.jit
    def launch(self, args: ExpertsArgs, stream):
        """One launch, or two where several CTAs sort."""
        scratch = args.scratch
        params = RoutingParams(
            flat(args.operands.topk_ids),
            args.operands.expert_map,
            scratch.counts,
            scratch.tiles,
            scratch.tile_count,
            scratch.pairs,
        )
        ctas = args.routing_ctas
        if ctas > 1:
            self.count_kernel(params).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True)
        self.place_kernel(params).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def count_kernel(self, params: RoutingParams):
        """Counts of a CTA's range of pairs."""
        smem = self.allocate()
        self.wait()
        self.count(params, smem)
        for expert in cutlass.range(cute.arch.thread_idx()[0], self.experts, self.threads, unroll=1):
            params.mCounts[cute.arch.block_idx()[0], expert] = self.total(smem, expert)

    @cute.kernel
    def place_kernel(self, params: RoutingParams):
        """Pairs of a CTA's range, and a part of the work tiles."""
        smem = self.allocate()
        thread = cute.arch.thread_idx()[0]
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        self.wait()
        self.count(params, smem)
        for expert in cutlass.range(thread, self.experts, self.threads, unroll=1):
            total, before = cutlass.Int32(0), cutlass.Int32(0)
            if ctas > 1:
                for other in cutlass.range(ctas, unroll=4):
                    count = params.mCounts[other, expert]
                    total += count
                    if other < cta:
                        before += count
            else:
                total = self.total(smem, expert)
            smem.sTotals[expert], smem.sBefore[expert] = total, before
        cta_barrier()
        if thread < WARP:
            self.scan(smem, thread)
        cta_barrier()
        for expert in cutlass.range(thread, self.experts, self.threads, unroll=1):
            row = smem.sStarts[expert] + smem.sBefore[expert]
            for warp in cutlass.range_constexpr(WARPS):
                count = smem.sCounts[warp, expert]
                smem.sCounts[warp, expert] = row
                row += count
        cta_barrier()
        self.walk(params, smem, True)
        self.list_tiles(params, smem, cta * self.threads + thread, ctas * self.threads)

    @cute.jit
    def wait(self):
        """Let the next kernel start, and wait for the one before this one."""
        if cutlass.const_expr(self.waits_first):
            dependent_launch.wait()
        dependent_launch.launch_dependents()
        if cutlass.const_expr(not self.waits_first):
            dependent_launch.wait()

    def allocate(self) -> RoutingSmem:
        smem, experts = SmemAllocator(), self.experts
        shapes = ((WARPS, experts), (experts,), (experts,), (experts + 1,), (experts + 1,))
        return RoutingSmem(
            *(
                smem.allocate_tensor(cutlass.Int32, cute.make_ordered_layout(shape, order=(1, 0)[-len(shape) :]), 16)
                for shape in shapes
            )
        )

    @cute.jit
    def total(self, smem: RoutingSmem, expert: cutlass.Int32):
        """Rows of an expert among the CTA's pairs."""
        total = cutlass.Int32(0)
        for warp in cutlass.range_constexpr(WARPS):
            total += smem.sCounts[warp, expert]
        return total

    @cute.jit
    def count(self, params: RoutingParams, smem: RoutingSmem):
        """Counts of each warp's pairs, of all threads."""
        for i in cutlass.range(cute.arch.thread_idx()[0], WARPS * self.experts, self.threads, unroll=1):
            smem.sCounts[i // self.experts, i % self.experts] = cutlass.Int32(0)
        cta_barrier()
        self.walk(params, smem, False)
        cta_barrier()

    @cute.jit
    def walk(self, params: RoutingParams, smem: RoutingSmem, place: cutlass.Constexpr[bool]):
        """A warp's pairs: counts them, or places them where its counts say and moves these on."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        pairs = cute.size(params.mIds)
        if cutlass.const_expr(self.slots.shared > 0):
            pairs = pairs // self.slots.topk * self.slots.of_token
        cta_start = share(pairs, ctas, cta)
        of_cta = share(pairs, ctas, cta + 1) - cta_start
        start, end = cta_start + share(of_cta, WARPS, warp), cta_start + share(of_cta, WARPS, warp + 1)
        for first in cutlass.range(start, end, UNROLLED * WARP, unroll=1):
            # All loads are on their way before the first one is waited for.
            pairs_of_lane = [cutlass.min(first + i * WARP + lane, end - 1) for i in range(UNROLLED)]
            ids = [params.mIds[place_of_id(pair, self.slots)] for pair in pairs_of_lane]
            for i in cutlass.range_constexpr(UNROLLED):
                pair = first + i * WARP + lane
                expert = expert_of(ids[i], params.mMap, pair, self.slots)
                if pair >= end:
                    expert = cutlass.Int32(-1)
                self.count_or_place(params, smem, warp, pair, expert, place)

    @cute.jit
    def count_or_place(
        self,
        params: RoutingParams,
        smem: RoutingSmem,
        warp: cutlass.Int32,
        pair: cutlass.Int32,
        expert: cutlass.Int32,
        place: cutlass.Constexpr[bool],
    ):
        """A pair of each lane; without an expert it is -1."""
        cute.arch.sync_warp()
        same = cute.arch.match_sync(ALL_LANES, expert)
        rank = cutlass.Int32(cute.arch.popc(same & cute.arch.lanemask_lt()))
        if cutlass.const_expr(place):
            if expert >= 0:
                params.mPairs[smem.sCounts[warp, expert] + rank] = pair
            cute.arch.sync_warp()
        if expert >= 0 and rank == 0:
            smem.sCounts[warp, expert] += cutlass.Int32(cute.arch.popc(same))
        cute.arch.sync_warp()

    @cute.jit
    def scan(self, smem: RoutingSmem, lane: cutlass.Int32):
        """First rows and first work tiles of the experts, by one warp."""
        per_lane = cutlass.const_expr((self.experts + WARP - 1) // WARP)
        rows, tiles = cutlass.Int32(0), cutlass.Int32(0)
        for i in cutlass.range_constexpr(per_lane):
            expert = lane * per_lane + i
            if expert < self.experts:
                rows += smem.sTotals[expert]
                tiles += self.tiles_of(smem.sTotals[expert])
        row, tile = warp_inclusive_sum(rows) - rows, warp_inclusive_sum(tiles) - tiles
        for i in cutlass.range_constexpr(per_lane):
            expert = lane * per_lane + i
            if expert < self.experts:
                smem.sStarts[expert], smem.sTileStarts[expert] = row, tile
                row += smem.sTotals[expert]
                tile += self.tiles_of(smem.sTotals[expert])
        if lane == WARP - 1:
            smem.sStarts[self.experts], smem.sTileStarts[self.experts] = row, tile

    def tiles_of(self, rows):
        return (rows + (self.tile_m - 1)) // self.tile_m

    @cute.jit
    def list_tiles(self, params: RoutingParams, smem: RoutingSmem, thread: cutlass.Int32, threads: cutlass.Int32):
        """A thread's work tiles; the thread is one of the whole grid."""
        count = smem.sTileStarts[self.experts]
        if thread == 0:
            params.mTileCount[0], params.mTileCount[1] = count, smem.sStarts[self.experts]
        rRecord = cute.make_rmem_tensor(RECORD, cutlass.Int32)
        rRecord.fill(0)
        for tile in cutlass.range(thread, count, threads, unroll=1):
            # The last expert whose tiles begin at this one or before it: those without rows begin where the next does.
            low, high = cutlass.Int32(0), cutlass.Int32(self.experts)
            for _ in cutlass.range_constexpr(self.experts.bit_length()):
                middle = (low + high) // 2
                if smem.sTileStarts[middle] <= tile:
                    low = middle
                else:
                    high = middle
            first = smem.sStarts[low] + (tile - smem.sTileStarts[low]) * self.tile_m
            rRecord[0], rRecord[1] = low, first
            rRecord[2] = cutlass.min(smem.sStarts[low + 1] - first, self.tile_m)
            store_vector(rRecord, params.mTiles.iterator, cutlass.Int64(tile) * RECORD)
