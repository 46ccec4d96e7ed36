# SPDX-License-Identifier: Apache-2.0
"""The products of experts for few tokens: all SMs read equal parts of the weights of the experts that were chosen.

They are the swap-AB stream-K GEMM of `gemm/small_m.py`, whose list of iterations only the device knows. Every CTA reads
the numbers of the tokens' experts and lists the experts among them; no launch sorts anything.

Each chosen expert is multiplied with all tokens, whose number is small. Tokens that are not routed to it cost nothing
while memory is slower than the products: an expert's weights are read once either way, nothing is gathered, and every
operand comes by TMA. What the activation returns for them is set to zero, and for the others it is multiplied with the
router's weight. The second product is then one product with a long k, all columns of all chosen experts, whose sum is
the sum over a token's experts: in float32, in the order of experts, without a launch that adds up.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.args import DecodeArgs
from dsl_backend.experts.cute.grouped import shared_view
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.routing import expert_of, flat, place_of_id
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.small_m import WARPGROUP_BARRIER, SmallMGemmBase, SmallMParams, StreamKWork
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.gemm.views import bias_of, expert_parts_view
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.barrier import cta_barrier
from dsl_backend.primitives.copy import store_vector
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.schedule import share

TilesT = TypeVar("TilesT", bound=SmallMTiles)


@dataclass(frozen=True)
class DecodeParams(SmallMParams):
    """What the kernel's warps work with; M tokens, k slots of each, D chosen experts.

    mW has coordinates [n, k, parts, E]. Of the first product mX has coordinates [M, H] and mOut is [M, I, D]; of the
    second one mX has coordinates [M, I, D] and mOut is [M, H]. mBias is [E, parts * n].

    Attributes:
        mIds: [M k]. mMap: int32 [global experts], or missing.
        mWeights: float32 [M k], or missing.
        tma_atom_shared, mShared: as those of mW, of S shared experts, or missing; coordinates [n, k, parts, S].
    """

    mIds: cute.Tensor
    mMap: cute.Tensor
    mWeights: cute.Tensor
    tma_atom_shared: cute.CopyAtom
    mShared: cute.Tensor


@dataclass(frozen=True)
class DecodeWork(StreamKWork):
    """A CTA's range of the list of iterations, and what the list is about.

    Attributes:
        of_expert: tiles of columns of an expert in the first product, its k tiles in the second one.
        sExperts: int32 [D], the chosen experts in rising order. Where no token has one, expert 0 is listed.
        sIds: int32 [pairs], this rank's expert of each pair; -1 where there is none.
        sScales: float32 [groups, tile_tokens], a tile's router weight of each token.
        sHits: int32 [groups, tile_tokens], slots of each token that have the tile's expert.
    """

    of_expert: cutlass.Int32
    sExperts: cute.Tensor
    sIds: cute.Tensor
    sScales: cute.Tensor
    sHits: cute.Tensor


def gemm_key(key: ExpertsKey, config: TilesT, first: bool) -> GemmKey[TilesT]:
    """Of one of the products; the experts' biases are added here."""
    return GemmKey(
        dtypes=Dtypes.of(key.dtype),
        activation=key.activation if first else None,
        interleaved=key.interleaved and first,
        bias=False,
        residual=False,
        config=config,
    )


class DecodeProduct(SmallMGemmBase):
    """What the products of all SMs share. A class of an SM adds its `SmallMGemm` and an epilogue."""

    # Of an SM's class.
    threads: int
    # Whether `list_experts` leaves each chosen expert's place in the list behind.
    keeps_places = False

    def set_up(self, key: ExpertsKey) -> None:
        self.slots, self.shared_weight = key.slots, key.shared_weight
        self.experts = key.slots.all_experts
        self.listed = min(key.num_experts, self.tile_tokens * key.topk) + key.shared_experts
        self.has_bias = key.w13_bias if self.gated else key.w2_bias
        self.router_weights = key.router_weights
        self.waits = self.gated or not key.prefetches

    @cute.jit
    def launch_product(self, args: DecodeArgs, stream):
        """Launch `args.ctas` CTAs."""
        operands, scratch = args.operands, args.scratch
        first = cutlass.const_expr(self.gated)
        x, weight, out = self.matrices(args)
        weights = self.weights_view(weight)
        weighted = cutlass.const_expr(self.router_weights is not RouterWeights.NONE)
        tma_atom_w, mW, tma_atom_x, mX = self.tma_atoms(weights, x)
        tma_atom_shared, mShared = None, None
        if cutlass.const_expr(self.slots.shared > 0):
            tma_atom_shared, mShared, _, _ = self.tma_atoms(shared_view(operands, first), x)
        params = DecodeParams(
            tma_atom_w,
            mW,
            tma_atom_x,
            mX,
            (operands.w13_bias if first else operands.w2_bias) if cutlass.const_expr(self.has_bias) else None,
            None,
            out,
            scratch.partials,
            scratch.flags,
            flat(operands.topk_ids),
            operands.expert_map,
            flat(operands.topk_weights) if weighted else None,
            tma_atom_shared,
            mShared,
        )
        self.launch(self.extended(params, args), args.ctas, stream)

    def matrices(self, args: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(x, weight, out) of the product."""
        operands, hidden = args.operands, by_expert(args.scratch.hidden)
        return (operands.x, operands.w13, hidden) if self.gated else (hidden, operands.w2, operands.out)

    def extended(self, params: DecodeParams, args: Any) -> DecodeParams:
        """The parameters with what a class adds."""
        return params

    def weights_view(self, weight: cute.Tensor) -> cute.Tensor:
        """Weights as `tma_atoms` takes them."""
        return expert_parts_view(weight, self.parts, self.interleaved)

    @cute.jit
    def begin(self, params: DecodeParams, smem: SmemAllocator):
        """List the experts, let the next kernel start, and find this CTA's range.

        The first product waits before it lets the second one start: what the router wrote is there for both, and the
        second one lists the experts and requests their weights before the first one has ended.
        """
        sListed = smem.allocate_tensor(cutlass.Int32, cute.make_layout(self.experts), 16)
        sExperts = smem.allocate_tensor(cutlass.Int32, cute.make_layout(self.listed), 16)
        sCount = smem.allocate_tensor(cutlass.Int32, cute.make_layout(1), 16)
        sIds = smem.allocate_tensor(cutlass.Int32, cute.make_layout(self.tile_tokens * self.slots.of_token), 16)
        of_groups = cute.make_layout((self.groups, self.tile_tokens), stride=(self.tile_tokens, 1))
        sScales = smem.allocate_tensor(cutlass.Float32, of_groups, 16)
        sHits = smem.allocate_tensor(cutlass.Int32, of_groups, 16)
        if cutlass.const_expr(self.waits):
            dependent_launch.wait()
        self.list_experts(params, sListed, sExperts, sCount, sIds)
        self.note_pairs(params, sListed, sIds)
        dependent_launch.launch_dependents()
        return self.range_of_cta(params, sCount[0], sExperts, sIds, sScales, sHits)

    @cute.jit
    def list_experts(
        self, params: DecodeParams, sListed: cute.Tensor, sExperts: cute.Tensor, sCount: cute.Tensor, sIds: cute.Tensor
    ):
        """Each pair's expert, and the experts that have one; by all threads."""
        thread = cute.arch.thread_idx()[0]
        pairs = cute.size(params.mIds) // self.slots.topk * self.slots.of_token
        for expert in cutlass.range(thread, self.experts, self.threads, unroll=1):
            sListed[expert] = cutlass.Int32(0)
        cta_barrier()
        for pair in cutlass.range(thread, pairs, self.threads, unroll=1):
            routed = params.mIds[place_of_id(pair, self.slots)]
            expert = expert_of(routed, params.mMap, pair, self.slots)
            sIds[pair] = expert
            if expert >= 0:
                cute.arch.atomic_max(sListed.iterator + expert, cutlass.Int32(1), sem="relaxed", scope="cta")
        cta_barrier()
        if thread < WARP:
            count = cutlass.Int32(0)
            for first in cutlass.range_constexpr(0, self.experts, WARP):
                expert = first + thread
                listed = cutlass.Int32(0)
                if expert < self.experts:
                    listed = sListed[expert]
                lanes = cutlass.Uint32(cute.arch.vote_ballot_sync(listed != 0))
                if listed != 0:
                    place = count + cute.arch.popc(lanes & cute.arch.lanemask_lt())
                    sExperts[place] = expert
                    if cutlass.const_expr(self.keeps_places):
                        sListed[expert] = place
                count += cutlass.Int32(cute.arch.popc(lanes))
            if thread == 0:
                # A list of one expert whose results are set to zero writes the zeros of tokens without experts.
                if count == 0:
                    sExperts[0] = cutlass.Int32(0)
                sCount[0] = cutlass.max(count, 1)
        cta_barrier()

    def note_pairs(self, params: Any, sListed: cute.Tensor, sIds: cute.Tensor):
        """By all threads, once the experts are listed: what a class writes down of the pairs."""

    def range_of_cta(self, params: DecodeParams, count, sExperts, sIds, sScales, sHits) -> DecodeWork:
        """Its part of the iterations of so many experts; none where there are fewer than CTAs."""
        first = self.gated
        k_tiles = cute.ceil_div(params.mX.shape[1], self.tile_k)
        n_tiles = cute.ceil_div(params.mOut.shape[1], self.columns)
        of_expert = n_tiles if first else k_tiles
        n_tiles, k_tiles = (count * n_tiles, k_tiles) if first else (n_tiles, count * k_tiles)
        total = n_tiles * k_tiles
        workers = cutlass.min(total, cute.arch.grid_dim()[0])
        worker = workers - 1 - cute.arch.block_idx()[0]
        # CTAs beyond the workers have an empty range at the beginning.
        start = share(total, workers, cutlass.max(worker, 0))
        end = share(total, workers, cutlass.max(worker + 1, 0))
        tables = (sExperts, sIds, sScales, sHits)
        return DecodeWork(k_tiles, n_tiles, total, workers, worker, start, end, of_expert, *tables)

    def partition_weights(self, params: Any, sW: cute.Tensor):
        """Sources of routed experts, and of shared ones where there are any."""
        tWsW, of_routed = self.partition_boxes(params.tma_atom_w, params.mW, sW)
        if not self.slots.shared:
            return tWsW, of_routed
        return tWsW, (of_routed, self.partition_boxes(params.tma_atom_shared, params.mShared, sW)[1])

    @cute.jit
    def copy_weights(self, params: DecodeParams, tWsW: cute.Tensor, tWgW: Any, work: Any, n_tile, k_tile, stage, mbar):
        """Of the expert that an iteration is of. Shared ones have a TMA descriptor of their own."""
        listed = n_tile // work.of_expert if cutlass.const_expr(self.gated) else k_tile // work.of_expert
        if cutlass.const_expr(self.gated):
            n_tile = n_tile % work.of_expert
        else:
            k_tile = k_tile % work.of_expert
        expert = work.sExperts[listed]
        if cutlass.const_expr(self.slots.shared == 0):
            self.copy_of(params.tma_atom_w, tWgW, expert, tWsW, n_tile, k_tile, stage, mbar)
        else:
            expert = cute.arch.make_warp_uniform(expert)
            if expert < self.slots.experts:
                self.copy_of(params.tma_atom_w, tWgW[0], expert, tWsW, n_tile, k_tile, stage, mbar)
            else:
                expert = expert - self.slots.experts
                self.copy_of(params.tma_atom_shared, tWgW[1], expert, tWsW, n_tile, k_tile, stage, mbar)

    def copy_of(self, tma_atom_w, tWgW: cute.Tensor, expert, tWsW: cute.Tensor, n_tile, k_tile, stage, mbar):
        """Both boxes of an expert of sources [copy, n, k, parts, experts]."""
        self.copy_boxes(tma_atom_w, tWgW[None, None, None, None, expert], tWsW, n_tile, k_tile, stage, mbar)

    def x_box(self, tXgX: cute.Tensor, work: Any, m_tile, k_tile):
        """The source of x, or of what the activation returned for an expert."""
        if self.gated:
            return tXgX[None, m_tile, k_tile]
        return tXgX[None, m_tile, k_tile % work.of_expert, k_tile // work.of_expert]

    @cute.jit
    def weight_of(self, params: DecodeParams, token: cutlass.Int32, slot: cutlass.Int32):
        """What the router says of a token's expert, 1 without its weights; or what shared experts have."""
        weight = cutlass.Float32(1.0)
        if cutlass.const_expr(self.router_weights is not RouterWeights.NONE):
            place = token * self.slots.topk + slot
            if cutlass.const_expr(self.slots.shared > 0):
                # Any place of the token for a shared expert.
                place = token * self.slots.topk + cutlass.min(slot, self.slots.topk - 1)
            weight = params.mWeights[place]
        if cutlass.const_expr(self.slots.shared > 0):
            if slot >= self.slots.topk:
                weight = cutlass.Float32(self.shared_weight)
        return weight

    @cute.jit
    def scale_tokens(
        self, params: DecodeParams, work: DecodeWork, expert: cutlass.Int32, group: cutlass.Int32, thread: cutlass.Int32
    ):
        """Fill a warpgroup's scales and hits for an expert's tile; by its threads, one for each token."""
        tokens = params.mOut.shape[0]
        # All threads have read those of the last tile.
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)
        for token in cutlass.range(thread, self.tile_tokens, WARPGROUP, unroll=1):
            scale, hits = cutlass.Float32(0.0), cutlass.Int32(0)
            if token < tokens:
                for slot in cutlass.range(self.slots.of_token, unroll=1):
                    if work.sIds[token * self.slots.of_token + slot] == expert:
                        scale += self.weight_of(params, token, slot)
                        hits += 1
            work.sScales[group, token] = scale
            work.sHits[group, token] = hits
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)

    @cute.jit
    def biases_of(self, params: DecodeParams, expert: cutlass.Int32, column: cutlass.Int32):
        """Of an expert's column of the first product, its gate's and its up's."""
        biases = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
        if cutlass.const_expr(self.has_bias):
            mBias, n = params.mBias[expert, None], params.mOut.shape[1]
            biases = [bias_of(mBias, column, part, n, self.interleaved) for part in range(2)]
        return biases

    @cute.jit
    def store_hidden(
        self,
        params: DecodeParams,
        work: DecodeWork,
        gate: cutlass.Float32,
        up: cutlass.Float32,
        bias_0: cutlass.Float32,
        bias_1: cutlass.Float32,
        token: cutlass.Int32,
        column: cutlass.Int32,
        listed: cutlass.Int32,
        group: cutlass.Int32,
    ):
        """One element of the first product's output, of a place in the list of experts."""
        tokens, n, _ = params.mOut.shape
        if token < tokens:
            if column < n:
                scale = work.sScales[group, token]
                if cutlass.const_expr(self.router_weights is RouterWeights.INPUT):
                    gate, up = gate * scale, up * scale
                value = self.activate([gate + bias_0], [up + bias_1])[0]
                if cutlass.const_expr(self.router_weights is not RouterWeights.INPUT):
                    value = value * scale
                # Not multiplied with zero: it may be NaN.
                if work.sHits[group, token] == 0:
                    value = cutlass.Float32(0.0)
                self.store_element(params.mOut, value.to(self.out_dtype), token, column, listed)

    def store_element(self, mOut: cute.Tensor, value: Any, token, column, listed):
        """Store one element of a matrix [M, I, D]."""
        rOut = cute.make_rmem_tensor(1, mOut.element_type)
        rOut[0] = value
        row = cutlass.Int64(token) * mOut.stride[0] + cutlass.Int64(listed) * mOut.stride[2]
        store_vector(rOut, mOut.iterator, row + column)

    @cute.jit
    def store_out(
        self,
        params: DecodeParams,
        work: DecodeWork,
        value: cutlass.Float32,
        token: cutlass.Int32,
        column: cutlass.Int32,
    ):
        """One element of the output, with the biases of its token's experts."""
        tokens, n = params.mOut.shape
        if cutlass.const_expr(self.has_bias):
            if token < tokens and column < n:
                for slot in cutlass.range(self.slots.of_token, unroll=4):
                    expert = work.sIds[token * self.slots.of_token + slot]
                    if expert >= 0:
                        bias = params.mBias[expert, column].to(cutlass.Float32)
                        if cutlass.const_expr(self.router_weights is RouterWeights.OUTPUT):
                            bias = bias * self.weight_of(params, token, slot)
                        value += bias
        self.store(params, value, token, column, tokens, n)


def by_expert(hidden: cute.Tensor) -> cute.Tensor:
    """What the activation returned, [D, M, I], as [M, I, D]."""
    experts, tokens, width = hidden.shape
    layout = cute.make_layout((tokens, width, experts), stride=(hidden.stride[1], 1, hidden.stride[0]))
    return cute.make_tensor(hidden.iterator, layout)
