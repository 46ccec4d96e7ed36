# SPDX-License-Identifier: Apache-2.0
"""The sampler for SM90 and later: a cluster for a row, which it streams once to find the largest logits.

The first pass keeps one number a thread: its largest logit. Groups of threads merge theirs, and the k-th largest of the
256 groups bounds the k-th largest logit of the row from below, since groups have no logit in common. So the row's top k
are among the few logits above the bound, and only threads that saw one look at their logits again. These candidates go
to the cluster's first block, which applies the filters and draws, each in one pass over all pairs of them. Min-p finds
its candidates the same way.

Rows that have too many candidates, or no filter that bounds them, are looked at again as a whole: top-k's threshold by
a radix select over counts, top-p's by one over weights, then sums of kept weights of each warp's run of neighbouring
logits, and at last the logits of the one run that the draw falls into.

Nothing here is an instruction of one generation: the same class serves SM90 and SM100.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.copy import load_vector
from dsl_backend.sampling import fixed
from dsl_backend.sampling.configs import BINS, MOST_GROUPS, ClusterConfig
from dsl_backend.sampling.cute import blocks
from dsl_backend.sampling.cute import philox as numbers
from dsl_backend.sampling.cute.blocks import WARP, add, read_peer

NUMERIC = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
# Place of the random bits among what one thread finds for all.
BITS = 3
# Steps between the largest logit and the smallest group, in which candidates are told from others.
LEVELS = 256
# Where all groups' largest logits are equal.
LEAST_REACH = 1e-30
# Accesses that a lane has in flight when a warp looks at a thread's logits again.
ROUNDS = 4
# Lanes that share the pairs of one candidate.
PART = 8
NO_BOUND = (1 << 31) - 1
NO_ID = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class SampleKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype, token_dtype, k_dtype: names of the types of logits, tokens and top_k.
        config: threads, blocks, vectors.
    """

    dtype: str
    token_dtype: str
    k_dtype: str
    config: ClusterConfig


class Shared(NamedTuple):
    """A block's shared memory.

    Attributes:
        groups: float32 [256], the largest z of every group of the row; the same in every block.
        low, high: uint32 [bins], 64-bit sums in two words, or counts in the first.
        z, ids, w, left: [room] of candidates: z, id, weight after top-k and min-p, weight after top-p.
        v: uint32 [room], their distances.
        sums, ties: [warps], what a warp's run keeps below top-p's bound, and how many logits lie at it.
        slots: uint64 [4, 32] for sums over the block.
        found: uint64 [4]; digit: uint32 [4]: what one thread found for all.
        count: uint32 [4]: candidates of this block; the lowest id of the largest logit.
    """

    groups: cute.Tensor
    low: cute.Tensor
    high: cute.Tensor
    z: cute.Tensor
    ids: cute.Tensor
    w: cute.Tensor
    left: cute.Tensor
    v: cute.Tensor
    sums: cute.Tensor
    ties: cute.Tensor
    slots: cute.Tensor
    found: cute.Tensor
    digit: cute.Tensor
    count: cute.Tensor


class Row(NamedTuple):
    """What a row's passes need.

    Attributes:
        base, start: the tensor, and the row's first element in it.
        width: logits.
        run, end: first logit of the warp's run, and behind its last one.
        steps: of a warp along its run.
        temperature, largest: float32; largest is a z.
        k: top-k, the row's width where off.
        least: uint64, the weight that min-p asks for.
        p: float32; 1 where off.
        bits: 62 random ones.
    """

    base: Any
    start: Any
    width: Any
    run: Any
    end: Any
    steps: Any
    temperature: Any
    largest: Any
    k: Any
    least: Any
    p: Any
    bits: Any


class Cut(NamedTuple):
    """What the filters leave of a row: z of at least kth, at distances below the end, and some at top-p's bound.

    Attributes:
        kth: float32, -inf where top-k is off.
        end: uint32, the first distance that top-p or min-p takes away.
        bound: uint32, no distance where top-p is off.
    """

    kth: Any
    end: Any
    bound: Any


class Sums(NamedTuple):
    """A histogram of uint64 over the threads of a block.

    Attributes:
        held: the thread's bins.
        above: the sum of all bins behind them.
        total: of all.
    """

    held: cute.Tensor
    above: Any
    total: Any


class Sample:
    """tokens [rows] from logits [rows, vocab], rows > 0; a parameter that is off is given as tensor as well."""

    def __init__(self, key: SampleKey):
        config = key.config
        self.cluster, self.threads, self.warps = config.cluster, config.threads, config.warps
        self.vector, self.loads, self.room = config.vector, config.loads, config.room
        self.groups, self.lanes_per_group = config.groups, config.lanes_per_group
        self.blocks_per_sm, self.smem_percent = config.blocks_per_sm, config.smem_percent
        self.dtype, self.token_dtype = NUMERIC[key.dtype], NUMERIC[key.token_dtype]

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        seeds: cute.Tensor,
        positions: cute.Tensor,
        temperature: cute.Tensor,
        top_k: cute.Tensor,
        top_p: cute.Tensor,
        min_p: cute.Tensor,
        tokens: cute.Tensor,
        stream,
    ):
        self.kernel(logits, seeds, positions, temperature, top_k, top_p, min_p, tokens).launch(
            grid=(logits.shape[0], self.cluster, 1),
            block=(self.threads, 1, 1),
            cluster=(1, self.cluster, 1) if cutlass.const_expr(self.cluster > 1) else None,
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=self.smem_percent,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        seeds: cute.Tensor,
        positions: cute.Tensor,
        temperatures: cute.Tensor,
        top_k: cute.Tensor,
        top_p: cute.Tensor,
        min_p: cute.Tensor,
        tokens: cute.Tensor,
    ):
        s = self.shared()
        thread = cute.arch.thread_idx()[0]
        self.clear(s)
        if thread == 0:
            s.count[0] = cutlass.Uint32(0)
            s.count[1] = cutlass.Uint32(NO_ID)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
        # What came before on the stream may still run until here.
        cute.arch.griddepcontrol_wait()

        index = cute.arch.block_idx()[0]
        width = mX.shape[1]
        warp = self.rank() * self.warps + cute.arch.warp_idx()
        steps = cute.ceil_div(width, self.cluster * self.warps * WARP * self.vector)
        run = warp * steps * (WARP * self.vector)
        end = cutlass.min(run + steps * (WARP * self.vector), width)
        start = cutlass.Int64(index) * mX.stride[0]

        if cute.arch.warp_idx() == self.warps - 1:
            # One warp computes them for all, before it waits for logits.
            bits = numbers.random_bits(seeds[index], positions[index])
            if cute.arch.lane_idx() == 0:
                s.found[BITS] = bits
        temperature = temperatures[index]
        drawn = temperature >= cutlass.Float32(fixed.LEAST_TEMPERATURE)
        temperature = temperature if drawn else cutlass.Float32(1.0)
        top = self.top(mX.iterator + 0, start, run, end, steps)
        own = numbers.scale(top, temperature)
        self.exchange(s, own)
        largest, lowest = self.extremes(s)

        wanted = cutlass.Int64(top_k[index])
        limited = wanted > 0 and wanted < width
        p = top_p[index]
        row = Row(
            base=mX.iterator + 0,
            start=start,
            width=width,
            run=run,
            end=end,
            steps=steps,
            temperature=temperature,
            largest=largest,
            k=cutlass.Int32(wanted) if limited else width,
            least=numbers.least_weight(min_p[index]),
            p=p if p < 1.0 else cutlass.Float32(1.0),
            bits=cutlass.Uint64(s.found[BITS]),
        )
        to = tokens.iterator + index
        if largest == -cutlass.Float32.inf:
            if self.rank() == 0 and thread == 0:
                cute.make_tensor(to, cute.make_layout(1))[0] = self.token_dtype(0)
        elif drawn:
            self.draw(s, row, own, lowest, to)
        else:
            self.first(s, row, own, to)

    # --- blocks and threads ---

    def shared(self) -> Shared:
        allocator = cutlass.utils.SmemAllocator()

        def tensor(dtype, *shape: int) -> cute.Tensor:
            return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

        u32, u64, f32 = cutlass.Uint32, cutlass.Uint64, cutlass.Float32
        return Shared(
            groups=tensor(f32, MOST_GROUPS),
            low=tensor(u32, BINS),
            high=tensor(u32, BINS),
            z=tensor(f32, self.room),
            ids=tensor(cutlass.Uint32, self.room),
            w=tensor(u64, self.room),
            left=tensor(u64, self.room),
            v=tensor(u32, self.room),
            sums=tensor(u64, self.warps),
            ties=tensor(u32, self.warps),
            slots=tensor(u64, WARP, 4),
            found=tensor(u64, 4),
            digit=tensor(u32, 4),
            count=tensor(u32, 4),
        )

    def rank(self):
        """This block's place in its row's cluster."""
        return cute.arch.block_idx()[1]

    @cute.jit
    def barrier(self):
        """All threads of the row; what they wrote to shared memory is seen by all of them."""
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            blocks.barrier()

    @cute.jit
    def of_peer(self, tensor: cute.Tensor, place, block, dtype: cutlass.Constexpr):
        """An element of another block's tensor."""
        if cutlass.const_expr(self.cluster > 1):
            return read_peer(tensor.iterator + place, dtype, block)
        return dtype(tensor[place])

    @cute.jit
    def clear(self, s: Shared):
        """The histogram, by all threads."""
        for at in cutlass.range(cute.arch.thread_idx()[0], BINS, self.threads):
            s.low[at] = cutlass.Uint32(0)
            s.high[at] = cutlass.Uint32(0)

    # --- passes over a row ---

    @cute.jit
    def top(self, base: cute.Pointer, start, run, end, steps):
        """The thread's largest logit, NaN left out; -inf where it has none."""
        own = run + cute.arch.lane_idx() * self.vector
        largest = -cutlass.Float32.inf
        for first in cutlass.range(0, steps, self.loads, unroll=1):
            held = cute.make_rmem_tensor((self.vector, self.loads), self.dtype)
            for i in cutlass.range_constexpr(self.loads):
                # What lies behind the run is loaded from its start, so that no load waits for a branch.
                column = own + (first + i) * (WARP * self.vector)
                load_vector(base, start + (column if column < end else 0), held[None, i])
            for i in cutlass.range_constexpr(self.loads):
                here = cutlass.Float32(held[0, i])
                for e in cutlass.range_constexpr(1, self.vector):
                    here = cute.arch.fmax(here, cutlass.Float32(held[e, i]))
                inside = own + (first + i) * (WARP * self.vector) < end
                largest = cute.arch.fmax(largest, here) if inside else largest
        return largest

    @cute.jit
    def each(self, row: Row, visit: cutlass.Constexpr):
        """Call visit(z) for each of the thread's logits; z may be NaN, or a negative zero.

        One access at a time: what is done with its logits takes longer than a read of a cache.
        """
        by = numbers.divisor(row.temperature)
        own = row.run + cute.arch.lane_idx() * self.vector
        for column in cutlass.range(own, row.end, WARP * self.vector, unroll=1):
            held = cute.make_rmem_tensor(self.vector, self.dtype)
            load_vector(row.base, row.start + column, held)
            z = cute.make_rmem_tensor(self.vector, cutlass.Float32)
            for e in cutlass.range_constexpr(self.vector):
                z[e] = cutlass.Float32(held[e])
            numbers.quotients(z, by)
            for e in cutlass.range_constexpr(self.vector):
                visit(z[e])

    @cute.jit
    def again(self, row: Row, wanted, visit: cutlass.Constexpr):
        """Call visit(z, id) for each logit of the threads that want it; the lanes of a warp share one's.

        It ends early once visit has returned true in a lane.
        """
        lane = cute.arch.lane_idx()
        left = cutlass.Uint32(cute.arch.vote_ballot_sync(wanted))
        while left != 0:
            source = cutlass.Int32(cute.arch.popc((left & (~left + 1)) - 1))
            left = left & (left - 1)
            stop = cutlass.Boolean(False)
            for first in cutlass.range(0, row.steps, WARP * ROUNDS, unroll=1):
                held = cute.make_rmem_tensor((self.vector, ROUNDS), self.dtype)
                for i in cutlass.range_constexpr(ROUNDS):
                    column = row.run + ((first + i * WARP + lane) * WARP + source) * self.vector
                    load_vector(row.base, row.start + (column if column < row.end else 0), held[None, i])
                # One by one, as code for all of them would be long.
                for i in cutlass.range(ROUNDS, unroll=1):
                    column = row.run + ((first + i * WARP + lane) * WARP + source) * self.vector
                    if column < row.end:
                        for e in cutlass.range_constexpr(self.vector):
                            x = held[e, 0]
                            for other in cutlass.range_constexpr(1, ROUNDS):
                                x = held[e, other] if i == other else x
                            over = visit(numbers.scale(cutlass.Float32(x), row.temperature), column + e)
                            stop = stop or over
            if cute.arch.vote_any_sync(stop):
                left = cutlass.Uint32(0)

    # --- the largest logits ---

    @cute.jit
    def exchange(self, s: Shared, own):
        """Every group's largest z to every block."""
        value = cute.arch.warp_reduction(own, cute.arch.fmax, threads_in_group=self.lanes_per_group)
        thread = cute.arch.thread_idx()[0]
        group = (self.rank() * self.threads + thread) // self.lanes_per_group
        if cutlass.const_expr(self.cluster > 1):
            # All blocks run by now, or their shared memory could not be written.
            cute.arch.cluster_wait()
        if thread % self.lanes_per_group == 0:
            if cutlass.const_expr(self.cluster > 1):
                for peer in cutlass.range_constexpr(self.cluster):
                    blocks.write_peer(value, s.groups.iterator + group, peer)
            else:
                s.groups[group] = value
        self.barrier()

    @cute.jit
    def extremes(self, s: Shared):
        """The largest z, and the smallest of a group's that is no infinity; by each warp."""
        largest, lowest = -cutlass.Float32.inf, cutlass.Float32.inf
        count = cutlass.const_expr(self.groups // WARP)
        held = blocks.neighbours(s.groups, cute.arch.lane_idx() * count, count)
        for i in cutlass.range_constexpr(count):
            value = held[i]
            largest = cute.arch.fmax(largest, value)
            lowest = cute.arch.fmin(lowest, value) if value > -cutlass.Float32.inf else lowest
        return (
            cute.arch.warp_reduction(largest, cute.arch.fmax),
            cute.arch.warp_reduction(lowest, cute.arch.fmin),
        )

    @cute.jit
    def first(self, s: Shared, row: Row, own, to: cute.Pointer):
        """The lowest id of the largest logit."""
        self.again(row, own == row.largest, partial(self.lower, s, row))
        self.barrier()
        lane = cute.arch.lane_idx()
        if self.rank() == 0 and cute.arch.warp_idx() == 0:
            found = cutlass.Uint32(NO_ID)
            if lane < self.cluster:
                found = self.of_peer(s.count, 1, lane, cutlass.Uint32)
            found = cute.arch.warp_reduction(found, cutlass.min)
            if lane == 0:
                cute.make_tensor(to, cute.make_layout(1))[0] = self.token_dtype(found)
        self.leave()

    @cute.jit
    def lower(self, s: Shared, row: Row, z, column):
        if z == row.largest:
            cute.arch.atomic_min(s.count.iterator + 1, cutlass.Uint32(column), sem="relaxed", scope="cta")
        return cutlass.Boolean(False)

    @cute.jit
    def leave(self):
        """A block's shared memory is there until all of its peers have read it."""
        if cutlass.const_expr(self.cluster > 1):
            self.barrier()

    # --- drawing ---

    @cute.jit
    def draw(self, s: Shared, row: Row, own, lowest, to: cute.Pointer):
        """A token of what the filters leave."""
        count = cutlass.Uint32(self.room + 1)
        limited = row.k <= self.groups
        if limited or row.least > 0:
            # Levels are counted from the largest logit on; they never fall as z falls.
            reach = cute.arch.fmax(row.largest - lowest, cutlass.Float32(LEAST_REACH))
            factor = cutlass.Float32(LEVELS - 1) / reach
            level = cutlass.Uint32(LEVELS - 1)
            if limited:
                level = self.bounding_level(s, row, factor)
            self.again(row, self.candidate(row, factor, level, own), partial(self.gather, s, row, factor, level))
            self.barrier()
            count = self.all_candidates(s)
        if count <= self.room:
            if self.rank() == 0:
                self.pull(s)
            self.leave()
            if self.rank() == 0:
                self.among_candidates(s, row, cutlass.Int32(count), to)
        else:
            self.among_all(s, row, to)

    @cute.jit
    def level_of(self, row: Row, factor, z):
        """From 0 for the largest z to 255, never less for a smaller one; a product of infinity and 0 is 255."""
        far = cute.arch.fmin(numbers.away(z, row.largest) * factor, cutlass.Float32(LEVELS - 1))
        return cutlass.Uint32(far)

    @cute.jit
    def bounding_level(self, s: Shared, row: Row, factor):
        """The first level that has k groups up to it."""
        for at in cutlass.range(cute.arch.thread_idx()[0], self.groups, self.threads, unroll=1):
            level = self.level_of(row, factor, s.groups[at])
            cute.arch.atomic_add(s.low.iterator + level, cutlass.Uint32(1), sem="relaxed", scope="cta")
        blocks.barrier()
        lane = cute.arch.lane_idx()
        each = cutlass.const_expr(LEVELS // WARP)
        total = cutlass.Uint32(0)
        held = blocks.neighbours(s.low, lane * each, each)
        upto = cute.make_rmem_tensor(each, cutlass.Uint32)
        for i in cutlass.range_constexpr(each):
            total = total + cutlass.Uint32(held[i])
            upto[i] = total
        before = blocks.running_in_warp(total) - total
        short = cutlass.Uint32(0)
        for i in cutlass.range_constexpr(each):
            short = short + 1 if before + upto[i] < cutlass.Uint32(row.k) else short
        return cute.arch.warp_reduction(short, add)

    @cute.jit
    def candidate(self, row: Row, factor, level, z):
        """Whether a z may be among the k largest, and has what min-p asks for; never one whose weight is 0."""
        heavy = row.least == 0 or numbers.weigh(numbers.distance(z, row.largest)) >= row.least
        drawable = numbers.away(z, row.largest) < cutlass.Float32(fixed.FARTHEST)
        return heavy and drawable and self.level_of(row, factor, z) <= level

    @cute.jit
    def gather(self, s: Shared, row: Row, factor, level, z, column):
        """Keep a candidate; whether there is no more room."""
        over = cutlass.Boolean(False)
        if self.candidate(row, factor, level, z):
            place = cute.arch.atomic_add(s.count.iterator, cutlass.Uint32(1), sem="relaxed", scope="cta")
            if place < self.room:
                s.z[place] = z
                s.ids[place] = cutlass.Uint32(column)
            else:
                over = cutlass.Boolean(True)
        return over

    @cute.jit
    def all_candidates(self, s: Shared):
        """How many the cluster has; more than there is room for where a block had none left."""
        lane = cute.arch.lane_idx()
        own = cutlass.Uint32(0)
        if lane < self.cluster:
            own = self.of_peer(s.count, 0, lane, cutlass.Uint32)
        return cute.arch.warp_reduction(own, add)

    @cute.jit
    def pull(self, s: Shared):
        """The candidates of all other blocks, behind the first block's own."""
        if cutlass.const_expr(self.cluster > 1):
            lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
            own = cutlass.Uint32(0)
            if lane < self.cluster:
                own = read_peer(s.count.iterator, cutlass.Uint32, lane)
            behind = blocks.running_in_warp(own)
            for peer in cutlass.range(1 + warp, self.cluster, self.warps, unroll=1):
                count = cute.arch.shuffle_sync(own, peer)
                place = cute.arch.shuffle_sync(behind, peer) - count
                for at in cutlass.range(lane, count, WARP, unroll=1):
                    s.z[place + at] = read_peer(s.z.iterator + at, cutlass.Float32, peer)
                    s.ids[place + at] = read_peer(s.ids.iterator + at, cutlass.Uint32, peer)
        blocks.barrier()

    @cute.jit
    def among_candidates(self, s: Shared, row: Row, count, to: cute.Pointer):
        """A token of the first block's candidates."""
        thread = cute.arch.thread_idx()[0]
        for at in cutlass.range(thread, count, self.threads, unroll=1):
            v = numbers.distance(s.z[at], row.largest)
            s.v[at] = v
            s.w[at] = numbers.weigh(v)
        blocks.barrier()

        part = thread % PART
        kept = cutlass.Uint64(0)
        for first in cutlass.range(0, count, self.threads // PART, unroll=1):
            at = first + thread // PART
            own = cutlass.min(at, count - 1)
            z = s.z[own]
            larger = cutlass.Int32(0)
            for other in cutlass.range(part, count, PART, unroll=4):
                larger = larger + 1 if s.z[other] > z else larger
            larger = cute.arch.warp_reduction(larger, add, threads_in_group=PART)
            if part == 0 and at < count:
                w = s.w[at]
                w = w if larger < row.k and w >= row.least else cutlass.Uint64(0)
                s.w[at] = w
                s.left[at] = w
                kept = kept + w
        total = blocks.summed(kept, s.slots[None, 0], self.warps)

        if row.p < 1.0:
            budget = self.budget(row, total)
            kept = cutlass.Uint64(0)
            for first in cutlass.range(0, count, self.threads // PART, unroll=1):
                at = first + thread // PART
                own = cutlass.min(at, count - 1)
                v, name = s.v[own], s.ids[own]
                upto = cutlass.Uint64(0)
                for other in cutlass.range(part, count, PART, unroll=4):
                    farther = s.v[other] > v or (s.v[other] == v and s.ids[other] <= name)
                    upto = upto + s.w[other] if farther else upto
                upto = cute.arch.warp_reduction(upto, add, threads_in_group=PART)
                if part == 0 and at < count:
                    w = s.w[at] if upto > budget else cutlass.Uint64(0)
                    s.left[at] = w
                    kept = kept + w
            total = blocks.summed(kept, s.slots[None, 1], self.warps)

        goal = numbers.shifted_product(row.bits, total, 62)
        for first in cutlass.range(0, count, self.threads // PART, unroll=1):
            at = first + thread // PART
            own = cutlass.min(at, count - 1)
            name = s.ids[own]
            upto = cutlass.Uint64(0)
            for other in cutlass.range(part, count, PART, unroll=4):
                upto = upto + s.left[other] if s.ids[other] <= name else upto
            upto = cute.arch.warp_reduction(upto, add, threads_in_group=PART)
            if part == 0 and at < count:
                if upto > goal and upto - s.left[at] <= goal:
                    cute.make_tensor(to, cute.make_layout(1))[0] = self.token_dtype(name)

    def budget(self, row: Row, total):
        """What top-p may take away, the last token excepted."""
        share = numbers.shifted_product(numbers.share_removed(row.p), total, fixed.SHARE_BITS)
        return cutlass.min(share, total - 1)

    # --- drawing from a row that is looked at as a whole ---

    @cute.jit
    def among_all(self, s: Shared, row: Row, to: cute.Pointer):
        kth = -cutlass.Float32.inf
        if row.k < row.width:
            kth = numbers.unordered(self.kth_largest(s, row))
        limit = numbers.farthest(row.least)
        bound = cutlass.Uint32(NO_BOUND)
        removed = cutlass.Uint64(0)
        if row.p < 1.0:
            bound, removed = self.top_p_bound(s, row, kth, limit)
        cut = Cut(kth, cutlass.min(bound, limit + 1), bound)
        each = numbers.weigh(bound & cutlass.Uint32((1 << 30) - 1))

        mass = cute.make_rmem_tensor(1, cutlass.Uint64)
        ties = cute.make_rmem_tensor(1, cutlass.Uint32)
        mass[0], ties[0] = cutlass.Uint64(0), cutlass.Uint32(0)
        self.each(row, partial(self.weigh_in, row, cut, mass, ties))
        mass_of_warp = cute.arch.warp_reduction(mass[0], add)
        ties_of_warp = cute.arch.warp_reduction(ties[0], add)
        if cute.arch.lane_idx() == 0:
            s.sums[cute.arch.warp_idx()] = mass_of_warp
            s.ties[cute.arch.warp_idx()] = ties_of_warp
        self.barrier()

        # A thread for each run of the row.
        thread = cute.arch.thread_idx()[0]
        mass_of_run, ties_of_run = cutlass.Uint64(0), cutlass.Uint64(0)
        if thread < self.cluster * self.warps:
            mass_of_run = self.of_peer(s.sums, thread % self.warps, thread // self.warps, cutlass.Uint64)
            ties_there = self.of_peer(s.ties, thread % self.warps, thread // self.warps, cutlass.Uint32)
            ties_of_run = cutlass.Uint64(ties_there)
        self.leave()
        ties_upto, _ = blocks.running(ties_of_run, s.slots[None, 0], self.warps)
        ties_before = ties_upto - ties_of_run
        gone = removed - cutlass.min(ties_before, removed)
        kept = ties_of_run - cutlass.min(gone, ties_of_run)
        mass_of_run = mass_of_run + kept * each
        upto, total = blocks.running(mass_of_run, s.slots[None, 1], self.warps)
        goal = numbers.shifted_product(row.bits, total, 62)
        if upto > goal and upto - mass_of_run <= goal:
            s.digit[0] = cutlass.Uint32(thread)
            s.found[0] = upto - mass_of_run
            s.found[1] = ties_before
        blocks.barrier()
        chosen = cutlass.Int32(s.digit[0])
        if chosen // self.warps == self.rank():
            place = chosen % self.warps
            self.within(s, row, place, goal - s.found[0], s.found[1], cut, removed, to)

    @cute.jit
    def within(self, s: Shared, row: Row, warp, goal, ties_before, cut: Cut, removed, to: cute.Pointer):
        """The token at which a run's sum of kept weights passes the goal, found by a block.

        Args:
            ties_before: logits at top-p's bound before the run.
            removed: how many of those go, the first ones.
        """
        each = numbers.weigh(cut.bound & cutlass.Uint32((1 << 30) - 1))
        thread = cute.arch.thread_idx()[0]
        length = row.steps * (WARP * self.vector)
        base = (self.rank() * self.warps + warp) * length
        end = cutlass.min(base + length, row.width)
        passed = cutlass.Uint64(0)
        while base < end and passed <= goal:
            column = base + thread
            w, tie = cutlass.Uint64(0), cutlass.Boolean(False)
            if column < end:
                held = cute.make_rmem_tensor(1, self.dtype)
                load_vector(row.base, row.start + column, held)
                w, tie = self.judged(row, cut, numbers.scale(cutlass.Float32(held[0]), row.temperature))
            one = cutlass.Uint64(1) if tie else cutlass.Uint64(0)
            ties_upto, ties = blocks.running(one, s.slots[None, 2], self.warps)
            w = each if tie and ties_before + ties_upto > removed else w
            upto, total = blocks.running(w, s.slots[None, 3], self.warps)
            upto = upto + passed
            if upto > goal and upto - w <= goal:
                cute.make_tensor(to, cute.make_layout(1))[0] = self.token_dtype(column)
            passed = passed + total
            ties_before = ties_before + ties
            base = base + self.threads

    @cute.jit
    def judged(self, row: Row, cut: Cut, z):
        """(weight, whether it lies at top-p's bound) of a z; the weight is 0 where it is not kept for certain."""
        inside = z >= cut.kth
        v = numbers.near(z, row.largest)
        return numbers.weigh(v, inside and v < cut.end), inside and v == cut.bound

    @cute.jit
    def weigh_in(self, row: Row, cut: Cut, mass: cute.Tensor, ties: cute.Tensor, z):
        w, tie = self.judged(row, cut, z)
        mass[0] = mass[0] + w
        ties[0] = ties[0] + 1 if tie else ties[0]

    @cute.jit
    def kth_largest(self, s: Shared, row: Row):
        """The k-th largest z as `ordered` has it, eight bits at a time."""
        found = cutlass.Uint32(0)
        # What is at a digit or above reaches k where what is above alone does not: the sum passes k - 1.
        left = cutlass.Uint64(row.k - 1)
        for place in cutlass.range(4, unroll=1):
            shift = cutlass.Uint32(24 - 8 * place)
            self.clear(s)
            blocks.barrier()
            self.each(row, partial(self.count_digit, s, found, shift))
            digit, left = self.crossing(s, self.merged(s), left)
            found = found | (digit << shift)
        return found

    @cute.jit
    def count_digit(self, s: Shared, found, shift, z):
        key = numbers.ordered(numbers.cleaned(z))
        if (key ^ found) >> shift <= 255:
            at = (key >> shift) & 255
            cute.arch.atomic_add(s.low.iterator + at, cutlass.Uint32(1), sem="relaxed", scope="cta")

    @cute.jit
    def top_p_bound(self, s: Shared, row: Row, kth, limit):
        """The distance at which top-p's budget ends, and how many logits of that distance go too."""
        bound = cutlass.Uint32(0)
        left = cutlass.Uint64(0)
        for place in cutlass.range(3, unroll=1):
            shift = cutlass.Uint32(20 - 10 * place)
            self.clear(s)
            blocks.barrier()
            self.each(row, partial(self.add_digit, s, row, kth, limit, bound, shift))
            sums = self.merged(s)
            # The first histogram has all that is kept, and so the budget.
            left = self.budget(row, sums.total) if place == 0 else left
            digit, left = self.crossing(s, sums, left)
            bound = bound | (digit << shift)
        return bound, left // numbers.weigh(bound)

    @cute.jit
    def add_digit(self, s: Shared, row: Row, kth, limit, bound, shift, z):
        v = numbers.near(z, row.largest)
        if (v ^ bound) >> shift < BINS and v <= limit and z >= kth:
            w = numbers.weigh(v)
            if w > 0:
                at = (v >> shift) & (BINS - 1)
                low = cutlass.Uint32(w & numbers.LOW_32)
                before = cute.arch.atomic_add(s.low.iterator + at, low, sem="relaxed", scope="cta")
                # The sum's upper word: what the lower one carries over goes with this weight's.
                high = cutlass.Uint32(w >> 32) + (cutlass.Uint32(1) if before + low < low else cutlass.Uint32(0))
                if high > 0:
                    cute.arch.atomic_add(s.high.iterator + at, high, sem="relaxed", scope="cta")

    @cute.jit
    def merged(self, s: Shared) -> Sums:
        """The cluster's histogram, each thread some neighbouring bins of it."""
        self.barrier()
        count = cutlass.const_expr(BINS // self.threads)
        held = cute.make_rmem_tensor(count, cutlass.Uint64)
        own = cutlass.Uint64(0)
        for i in cutlass.range_constexpr(count):
            at = cute.arch.thread_idx()[0] * count + i
            held[i] = cutlass.Uint64(0)
            for peer in cutlass.range_constexpr(self.cluster):
                low = self.of_peer(s.low, at, peer, cutlass.Uint32)
                high = self.of_peer(s.high, at, peer, cutlass.Uint32)
                held[i] = held[i] + (cutlass.Uint64(low) | cutlass.Uint64(high) << 32)
            own = own + held[i]
        self.leave()
        upto, total = blocks.running(own, s.slots[None, 2], self.warps)
        return Sums(held, total - upto, total)

    @cute.jit
    def crossing(self, s: Shared, sums: Sums, budget):
        """(bin, budget left) where the sum of all bins from the last one on passes a budget below the total."""
        count = cutlass.const_expr(BINS // self.threads)
        above = sums.above
        for i in cutlass.range_constexpr(count - 1, -1, -1):
            if above <= budget and above + sums.held[i] > budget:
                s.digit[0] = cutlass.Uint32(cute.arch.thread_idx()[0] * count + i)
                s.found[0] = budget - above
            above = above + sums.held[i]
        blocks.barrier()
        return s.digit[0], s.found[0]
