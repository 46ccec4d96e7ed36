# SPDX-License-Identifier: Apache-2.0
"""A row of logits and how a cluster's threads read it, by blocks."""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.copy import load_vector
from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.philox import random_bits
from dsl_backend.sampling.cute.scan import WARP, warp_max, warp_sum
from dsl_backend.sampling.cute.smem import SharedStorage

# Logits of a lane in a block, and how many masses fit 32 bits together.
LOGITS_PER_LANE = constants.BLOCK // WARP
MASSES_AT_ONCE = 4
# A lane's bound in 32 bits: the upper half of its maximum as an ordered integer, and that of its mass as a float32, in
# units of 2**(LANE_UNIT_BITS - MANTISSA_BITS), so that 16 masses fit 32 bits.
HALF_WORD = 16
LANE_UNIT_BITS = 2
# Loads of a lane that are in flight when a few threads' logits are read again.
REVISIT_LOADS = 4
# Indices in SharedStorage.sResult: of the sum below which the likelier tokens have to stay, and of the first random
# bits.
LIMIT, RANDOM_BITS = 1, 3


class Logits(NamedTuple):
    """The logits of a row.

    Attributes:
        base, offset: pointer to the logits tensor, and the row's first element in it (64 bits).
        vocab: how many there are.
    """

    base: Any
    offset: Any
    vocab: Any


class Row(NamedTuple):
    """A row and how to sample from it.

    Attributes:
        logits: of the row.
        scale: of differences of logits.
        row_max: float32, the largest logit.
        reference: the same, but finite.
        min_prob: uint64, the least probability that min-p keeps; 0 where min-p is off.
        args, index: of the launch, and of the row in it: what is loaded where it is needed, for which no register is
            held before.
    """

    logits: Logits
    scale: fixed_point.Scale
    row_max: Any
    reference: Any
    min_prob: Any
    args: Any
    index: Any

    @property
    def vocab(self):
        return self.logits.vocab

    @property
    def top_k(self):
        """int32, from 1; vocab where top-k is off."""
        return top_k_of(self.args, self.index)


@cute.jit
def top_k_of(args: SampleArgs, index):
    """int32, from 1, of a row; vocab where top-k is off."""
    vocab = args.logits.shape[1]
    top_k = cutlass.Int64(args.top_k[index])
    has_top_k = top_k > 0 and top_k < vocab
    return cutlass.Int32(top_k) if has_top_k else vocab


@cute.jit
def top_p_of(row: Row):
    """float32; 1 where top-p is off."""
    top_p = row.args.top_p[row.index]
    return top_p if top_p < 1.0 else cutlass.Float32(1.0)


@cute.jit
def bits_of_draw(smem: SharedStorage, row: Row, draw):
    """62 random bits, uint64, for the number of a draw from the row."""
    bits = cutlass.Uint64(smem.sResult[RANDOM_BITS])
    if draw > 0:
        bits = random_bits(row.args.seeds[row.index], row.args.positions[row.index], draw)
    return bits


def write_token(row: Row, token_id):
    """Write a row's token. Its address is computed here: kept from the first pass, its registers spilled."""
    tokens = row.args.tokens
    tokens[row.index] = tokens.element_type(token_id)


def write_kept(row: Row, prob_sum, pivot, tie_id):
    """Write what the filters keep of a row (`spec.Kept`). By one thread.

    Args:
        prob_sum: of what is kept, uint64; 0 for a row without a logit above -inf.
        pivot: uint32.
    """
    args, index = row.args, row.index
    args.references[index] = row.reference
    args.normals[index] = cutlass.Int64(fixed_point.normal_of(prob_sum))
    args.pivots[index] = cutlass.Int64(pivot)
    args.tie_ids[index] = cutlass.Int32(tie_id)
    args.min_probs[index] = cutlass.Int64(row.min_prob)


class RowReader:
    """Every CTA has adjacent blocks of a row, and every warp of it the block of its index, and so on.

    Args:
        exp_sums: the first pass also sums the logits' exponentials; else its sums are 0.
    """

    def __init__(self, config: ClusterConfig, cluster: Cluster, dtype: type[cutlass.Numeric], exp_sums: bool = False):
        self.threads, self.warps, self.vector = config.threads, config.warps, config.vector
        self.blocks_ahead, self.reread_blocks = bool(config.blocks_ahead), config.reread_blocks
        self.reread_backward, self.lane_bounds = config.reread_backward, config.lane_bound_blocks > 0
        self.loads = constants.BLOCK // (WARP * config.vector)
        self.cluster, self.dtype, self.exp_sums = cluster, dtype, exp_sums

    def blocks(self, vocab):
        """Blocks of a CTA; the last ones of the row may be empty."""
        return cute.ceil_div(cute.ceil_div(vocab, constants.BLOCK), self.cluster.ctas)

    def block(self, vocab, index):
        """In the row, of an index in the CTA."""
        return self.cluster.rank() * self.blocks(vocab) + index

    # --- the first pass ---

    @cute.jit
    def read(self, smem: SharedStorage, logits: Logits, scale, has_masses, has_exp_sums):
        """Write the maximum of each block of the CTA, and where masses are asked for its sum of them and lanes' bounds.

        Args:
            has_masses, has_exp_sums: the same in all threads.

        Returns:
            The maximum of this thread's logits, and the sum of their exponentials below it (`exp_sums`). NaN is
            ignored; -inf and 0 where the thread has none.
        """
        thread_max, exp_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        blocks = self.blocks(logits.vocab)
        rNext = cute.make_rmem_tensor((self.vector, self.loads), self.dtype)
        if self.blocks_ahead and cute.arch.warp_idx() < blocks:
            self.load_block(logits, self.block(logits.vocab, cute.arch.warp_idx()), rNext)
        for index in cutlass.range(cute.arch.warp_idx(), blocks, self.warps, unroll=1):
            rX = cute.make_rmem_tensor(LOGITS_PER_LANE, cutlass.Float32)
            lane_max = -cutlass.Float32.inf
            if cutlass.const_expr(not self.blocks_ahead):
                self.load_block(logits, self.block(logits.vocab, index), rNext)
            for i in cutlass.range_constexpr(LOGITS_PER_LANE):
                rX[i] = cutlass.Float32(rNext[i])
                lane_max = cute.arch.fmax(lane_max, rX[i])
            if self.blocks_ahead and index + self.warps < blocks:
                self.load_block(logits, self.block(logits.vocab, index + self.warps), rNext)
            if cutlass.const_expr(self.exp_sums):
                if has_exp_sums:
                    exp_sum = self.rescaled(exp_sum, thread_max, lane_max)
                    exp_sum = exp_sum + self.exponentials(rX, cute.arch.fmax(thread_max, lane_max))
            thread_max = cute.arch.fmax(thread_max, lane_max)
            reference = fixed_point.finite(warp_max(lane_max))
            mass_sum = cutlass.Uint64(0)
            if has_masses:
                lane_sum = self.lane_mass(rX, reference, scale)
                mass_sum = warp_sum(lane_sum)
                if cutlass.const_expr(self.lane_bounds):
                    self.write_lane_bound(smem, index, lane_max, lane_sum)
            if cute.arch.lane_idx() == 0:
                smem.sBlockMax[index] = reference
                smem.sBlockSum[index] = mass_sum
        return thread_max, exp_sum

    @cute.jit
    def lane_mass(self, rX: cute.Tensor, reference, scale):
        """The sum of the masses of this lane's logits of a block, uint64 in units of 2**-29."""
        # As often as there are lanes: a condition alone would become one more instruction for each logit of any block.
        infinite = popc(cute.arch.vote_ballot_sync(reference == cutlass.Float32(constants.MAX_LOGIT)))
        for _ in cutlass.range(infinite, unroll=1):
            for i in cutlass.range_constexpr(LOGITS_PER_LANE):
                # Infinity counts as the reference. NaN stays below it.
                rX[i] = reference if rX[i] > reference else rX[i]
        lane_sum = cutlass.Uint64(0)
        for first in cutlass.range_constexpr(0, LOGITS_PER_LANE, MASSES_AT_ONCE):
            mass = cutlass.Uint32(0)
            for i in cutlass.range_constexpr(first, first + MASSES_AT_ONCE):
                mass = mass + fixed_point.mass_of(rX[i], reference, scale)
            lane_sum = lane_sum + cutlass.Uint64(mass)
        return lane_sum

    @cute.jit
    def write_lane_bound(self, smem: SharedStorage, index, lane_max, lane_sum):
        """Write at most what a comparison needs of this lane's maximum, and at least its mass, for a block.

        The mass has a unit more for each logit, since each mass is rounded down.
        """
        # Zeros have a sign here, and none where they are compared.
        key = fixed_point.to_ordered_uint(lane_max + cutlass.Float32(0.0)) >> cutlass.Uint32(HALF_WORD)
        spare = cutlass.Uint64(LOGITS_PER_LANE + (1 << LANE_UNIT_BITS) - 1)
        mass = cutlass.Float32(cutlass.Uint32((lane_sum + spare) >> cutlass.Uint64(LANE_UNIT_BITS)))
        upper = (mass.bitcast(cutlass.Uint32) + cutlass.Uint32((1 << HALF_WORD) - 1)) >> cutlass.Uint32(HALF_WORD)
        smem.sLaneBounds[index * WARP + cute.arch.lane_idx()] = key << cutlass.Uint32(HALF_WORD) | upper

    @cute.jit
    def exponentials(self, rX: cute.Tensor, reference):
        """The sum of exp(x - reference), as `fixed_point.exponential`."""
        exp_sum = cutlass.Float32(0.0)
        if cutlass.const_expr(self.exp_sums):
            reference = fixed_point.finite(reference)
            for i in cutlass.range_constexpr(cute.size(rX)):
                exp_sum = exp_sum + fixed_point.exponential(rX[i], reference)
        return exp_sum

    @cute.jit
    def rescaled(self, exp_sum, reference, other):
        """A sum of exponentials below a reference, below the larger one of that and another."""
        if cutlass.const_expr(self.exp_sums):
            larger = fixed_point.finite(cute.arch.fmax(reference, other))
            exp_sum = exp_sum * fixed_point.exponential(reference, larger)
        return exp_sum

    # --- blocks and logits ---

    @cute.jit
    def for_each_block(self, smem: SharedStorage, row: Row, bound, visit: cutlass.Constexpr):
        """Call visit(index, rLogits) for each block of the warp with a logit of at least a bound.

        The next ones are loaded before. A block's maximum is finite where it is infinite.

        Args:
            visit: by all lanes, each with its logits [vector, loads].
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        blocks, begin = self.blocks(row.vocab), (2 * warp + 1) * WARP
        for first in cutlass.range(warp, blocks, self.warps * WARP, unroll=1):
            index = first + (WARP - 1 - lane if cutlass.const_expr(self.reread_backward) else lane) * self.warps
            needed = cutlass.Boolean(False)
            if index < blocks:
                needed = cutlass.Float32(smem.sBlockMax[index]) >= fixed_point.finite(bound)
            found = cutlass.Uint32(cute.arch.vote_ballot_sync(needed))
            self.write_list(smem.sLists, begin, found, index)
            cute.arch.sync_warp()
            if cutlass.const_expr(self.reread_blocks == 2):
                self.visit_in_pairs(smem, row, popc(found), visit)
            else:
                self.visit_in_turn(smem, row, popc(found), visit)
            cute.arch.sync_warp()

    @cute.jit
    def visit_in_pairs(self, smem: SharedStorage, row: Row, count, visit: cutlass.Constexpr):
        """Visit so many blocks of the warp's list, while the next two are loaded."""
        begin = (2 * cute.arch.warp_idx() + 1) * WARP
        rPair = cute.make_rmem_tensor((self.vector, self.loads, 2), self.dtype)
        for one in cutlass.range_constexpr(2):
            if one < count:
                self.load_listed(smem, row, begin + one, rPair[None, None, one])
        for first in cutlass.range(0, count, 2, unroll=1):
            for one in cutlass.range_constexpr(2):
                if first + one < count:
                    visit(cutlass.Int32(smem.sLists[begin + first + one]), rPair[None, None, one])
                if first + one + 2 < count:
                    self.load_listed(smem, row, begin + first + one + 2, rPair[None, None, one])

    @cute.jit
    def load_listed(self, smem: SharedStorage, row: Row, place, rLogits: cute.Tensor):
        """Load this lane's logits of the block at a place of the lists."""
        self.load_block(row.logits, self.block(row.vocab, cutlass.Int32(smem.sLists[place])), rLogits)

    @cute.jit
    def visit_in_turn(self, smem: SharedStorage, row: Row, count, visit: cutlass.Constexpr):
        """Visit so many blocks of the warp's list, while the next one is loaded."""
        begin = (2 * cute.arch.warp_idx() + 1) * WARP
        rNext = cute.make_rmem_tensor((self.vector, self.loads), self.dtype)
        if count > 0:
            self.load_listed(smem, row, begin, rNext)
        for i in cutlass.range(count, unroll=1):
            rLogits = cute.make_rmem_tensor((self.vector, self.loads), self.dtype)
            for e in cutlass.range_constexpr(LOGITS_PER_LANE):
                rLogits[e] = rNext[e]
            if i + 1 < count:
                self.load_listed(smem, row, begin + i + 1, rNext)
            visit(cutlass.Int32(smem.sLists[begin + i]), rLogits)

    @cute.jit
    def load_block(self, logits: Logits, block, rLogits: cute.Tensor):
        """Load this lane's logits of a block, [vector, loads]; -inf past the row's end."""
        begin = block * constants.BLOCK + cute.arch.lane_idx() * self.vector
        if (block + 1) * constants.BLOCK <= logits.vocab:
            for i in cutlass.range_constexpr(self.loads):
                load_vector(logits.base, logits.offset + begin + i * (WARP * self.vector), rLogits[None, i])
        else:
            for i in cutlass.range_constexpr(self.loads):
                for e in cutlass.range_constexpr(self.vector):
                    rLogits[e, i] = self.dtype(float("-inf"))
                column = begin + i * (WARP * self.vector)
                if column < logits.vocab:
                    load_vector(logits.base, logits.offset + column, rLogits[None, i])

    @cute.jit
    def load_logit(self, logits: Logits, token_id):
        """One logit in float32."""
        rLogit = cute.make_rmem_tensor(1, self.dtype)
        load_vector(logits.base, logits.offset + token_id, rLogit)
        return cutlass.Float32(rLogit[0])

    @cute.jit
    def for_each_logit(self, row: Row, visit: cutlass.Constexpr):
        """Call visit(x) for each of this thread's logits; x may be NaN or negative zero.

        One load at a time: a visit takes longer than a read from the cache.
        """
        blocks = self.blocks(row.vocab)
        for index in cutlass.range(cute.arch.warp_idx(), blocks, self.warps, unroll=1):
            begin = self.block(row.vocab, index) * constants.BLOCK + cute.arch.lane_idx() * self.vector
            for i in cutlass.range(self.loads, unroll=1):
                column = begin + i * (WARP * self.vector)
                if column < row.vocab:
                    rLogits = cute.make_rmem_tensor(self.vector, self.dtype)
                    load_vector(row.logits.base, row.logits.offset + column, rLogits)
                    for e in cutlass.range_constexpr(self.vector):
                        visit(cutlass.Float32(rLogits[e]))

    @cute.jit
    def for_each_logit_once(self, row: Row, visit: cutlass.Constexpr):
        """Call visit(x, token_id) for each logit of a short row, in as many threads of the cluster as there are."""
        first = self.cluster.rank() * self.threads + cute.arch.thread_idx()[0]
        for column in cutlass.range(first, row.vocab, self.cluster.ctas * self.threads, unroll=1):
            visit(self.load_logit(row.logits, column), column)

    @cute.jit
    def for_each_logit_of(
        self, smem: SharedStorage, row: Row, thread_max, may_count: cutlass.Constexpr, visit: cutlass.Constexpr
    ):
        """Call visit(x, token_id) for each logit of the threads and the blocks whose maxima may count.

        The lanes of a warp share these logits, one vector for each at a time. The warp stops once visit has returned
        true in a lane.

        Args:
            may_count: whether a logit may; if not, no smaller one does.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        threads = cutlass.Uint32(cute.arch.vote_ballot_sync(may_count(thread_max)))
        if threads != 0:
            self.write_list(smem.sLists, 2 * warp * WARP, threads, lane)
            blocks = self.blocks(row.vocab)
            stop = cutlass.Boolean(False)
            for first in cutlass.range(warp, blocks, self.warps * WARP, unroll=1):
                index = first + lane * self.warps
                needed = cutlass.Boolean(False)
                if index < blocks:
                    # A block's maximum is finite where it is infinite, so that it may count although it does not.
                    block_max = cutlass.Float32(smem.sBlockMax[index])
                    needed = block_max == row.reference or may_count(block_max)
                found = cutlass.Uint32(cute.arch.vote_ballot_sync(needed))
                if found != 0 and not stop:
                    self.write_list(smem.sLists, (2 * warp + 1) * WARP, found, index)
                    cute.arch.sync_warp()
                    stop = self.visit_vectors(smem, row, popc(threads), popc(found), visit)
                    cute.arch.sync_warp()

    @cute.jit
    def write_list(self, sLists: cute.Tensor, begin, chosen, value):
        """Write the values of the chosen lanes, a mask, side by side."""
        lane = cute.arch.lane_idx()
        mine = cutlass.Uint32(1) << cutlass.Uint32(lane)
        if (chosen & mine) != 0:
            sLists[begin + popc(chosen & (mine - 1))] = cutlass.Uint32(value)

    @cute.jit
    def visit_vectors(self, smem: SharedStorage, row: Row, threads, blocks, visit: cutlass.Constexpr):
        """Visit the logits of the listed threads and blocks of the warp; whether visit has returned true."""
        lane, lists = cute.arch.lane_idx(), 2 * cute.arch.warp_idx() * WARP
        vectors = threads * blocks * self.loads
        stop = cutlass.Boolean(False)
        for first in cutlass.range(lane, vectors + lane, WARP * REVISIT_LOADS, unroll=1):
            rLogits = cute.make_rmem_tensor((self.vector, REVISIT_LOADS), self.dtype)
            rColumns = cute.make_rmem_tensor(REVISIT_LOADS, cutlass.Int32)
            for i in cutlass.range_constexpr(REVISIT_LOADS):
                vector = first + i * WARP
                column = row.vocab
                if vector < vectors and not stop:
                    # Threads change fastest: of adjacent ones a load is adjacent too.
                    load = cutlass.Uint32(vector) // cutlass.Uint32(threads)
                    thread = smem.sLists[lists + cutlass.Int32(cutlass.Uint32(vector) - load * cutlass.Uint32(threads))]
                    block = self.block(
                        row.vocab, cutlass.Int32(smem.sLists[lists + WARP + cutlass.Int32(load) // self.loads])
                    )
                    in_block = cutlass.Int32(load) % self.loads * WARP + cutlass.Int32(thread)
                    column = cutlass.Int32(block * constants.BLOCK + in_block * self.vector)
                rColumns[i] = column
                load_vector(
                    row.logits.base, row.logits.offset + (column if column < row.vocab else 0), rLogits[None, i]
                )
            # Not unrolled: the visit's code would be repeated for every load.
            for i in cutlass.range(REVISIT_LOADS, unroll=1):
                column = rColumns[0]
                for other in cutlass.range_constexpr(1, REVISIT_LOADS):
                    column = rColumns[other] if i == other else column
                if column < row.vocab:
                    for e in cutlass.range_constexpr(self.vector):
                        x = rLogits[e, 0]
                        for other in cutlass.range_constexpr(1, REVISIT_LOADS):
                            x = rLogits[e, other] if i == other else x
                        full = visit(cutlass.Float32(x), column + e)
                        stop = stop or full
            stop = cutlass.Boolean(cute.arch.vote_any_sync(stop))
        return stop


def popc(mask):
    return cutlass.Int32(cute.arch.popc(mask))


def all_count(x):
    """Every logit, for `RowReader.for_each_logit_of`."""
    return cutlass.Boolean(True)
