# SPDX-License-Identifier: Apache-2.0
"""What the GEMMs for few rows share: swap-AB, and sums over k of several CTAs, so that all SMs read weights.

Swap-AB: weight rows are the M of the matrix product, tokens (rows of x) its N.

Stream-K: the iterations of all tiles, one for each k tile, form one list, and each CTA gets an equal contiguous range
of it: all SMs read an equal part of the weights, once. The CTA whose range has a tile's first iteration finishes the
tile, which is the last thing that it does. The other CTAs of the tile have their part at the beginning of their ranges,
so that their partial sums are there by then. With more tokens than a tile holds, every row of tiles has equally many
CTAs, whose ranges begin at the same weights: all rows of tiles read them at the same time, and memory delivers them
once.

Split-K: a cluster of CTAs for each tile, each with a part of k. Every CTA sends its partial sums through distributed
shared memory, and finishes a part of the tile: the same part of each thread's accumulators. It serves where so many
CTAs run at once.

A tile's weights are two boxes of rows. With a gated activation these are the gate and the up rows of the same output
columns, and one thread has the accumulators of both.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.args import GemmArgs, GemmOperands, ScaledArgs, StreamKScratch
from dsl_backend.gemm.epilogue import Arithmetic, epilogue_of
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.gemm.views import NUMERIC, bias_of, parts_view
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import EVICT_FIRST, load_vector, store_shared_remote, store_vector
from dsl_backend.primitives.moved import LayoutEnum, SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.primitives.schedule import owner, share

# More than any number of tokens, and no overflow when it is added to one.
BEYOND = 1 << 30
# The first named barrier of the warpgroups that hold accumulators.
WARPGROUP_BARRIER = 1


@dataclass(frozen=True)
class SmallMParams:
    """What the kernel's warps work with.

    Attributes:
        tma_atom_w, tma_atom_x: copies of [box, tile_k] and [tokens, tile_k].
        mW, mX: coordinates [n, k, parts] and [m, k].
        mBias: [parts * n]. mResidual: [m, n]. Either may be missing.
        mOut: [m, n].
        mPartials, mFlags: see `args.StreamKScratch`; None with split-K.
    """

    tma_atom_w: cute.CopyAtom
    mW: cute.Tensor
    tma_atom_x: cute.CopyAtom
    mX: cute.Tensor
    mBias: cute.Tensor
    mResidual: cute.Tensor
    mOut: cute.Tensor
    mPartials: cute.Tensor
    mFlags: cute.Tensor


@dataclass(frozen=True)
class Received:
    """Where a CTA of a cluster receives partial sums, its own too.

    Attributes:
        sPartials: float32 [box, accumulator of a thread that this CTA finishes, thread, split].
        mbar: an mbarrier that counts their bytes.
    """

    sPartials: cute.Tensor
    mbar: cute.Pointer


@dataclass(frozen=True)
class StreamKWork:
    """A CTA's range of the list of iterations. With split-K it is a part of one tile's.

    Attributes:
        k_tiles: iterations of a tile.
        n_tiles: tiles of the same tokens.
        total: iterations of the list.
        workers: CTAs that have a part of it.
        worker: this CTA's place in the list. The CTA launched first has the last range, since a CTA that finishes a
            tile waits for those behind it.
        start, end: of the range.
    """

    k_tiles: cutlass.Int32
    n_tiles: cutlass.Int32
    total: cutlass.Int32
    workers: cutlass.Int32
    worker: cutlass.Int32
    start: cutlass.Int32
    end: cutlass.Int32


class SmallMGemmBase:
    """out [m, n] = activation(x [m, k] @ weight [parts * n, k]^T + bias) + residual; m, n, k > 0.

    A kernel adds `__call__`, `kernel`, `mma` and the epilogue. Its warpgroups hold the accumulators of both boxes,
    `accumulators` in a thread.
    """

    def __init__(self, key: GemmKey[SmallMTiles], arithmetic: Arithmetic):
        config = key.config
        self.tokens, self.groups, self.accumulators = config.tokens, config.groups, config.accumulators
        self.box, self.tile_tokens, self.tile_k = config.box, config.tile_tokens, config.tile_k
        self.stages, self.stage_bytes = config.stages, config.stage_bytes(key.dtypes)
        self.gated, self.interleaved = key.activation is not None, key.interleaved
        self.activate = epilogue_of(key.activation, arithmetic)
        self.num_splits, self.stream_k = config.num_splits, config.stream_k
        self.cluster = None if self.stream_k else (self.num_splits, 1, 1)
        # Of each box, that a thread finishes; where parts are uneven, the last ones of two CTAs have some in common.
        self.finished = config.finished
        self.shared = self.finished * self.num_splits - self.accumulators // 2
        self.sent_at_once = 1 if self.finished % 2 else 2
        self.parts = 2 if self.gated else 1
        self.columns = 2 * self.box // self.parts
        # Other CTAs' partial sums are loaded together, as many as 64 registers hold.
        self.partials_unroll = max(1, 64 // self.accumulators)
        self.x_dtype, self.weight_dtype = NUMERIC[key.dtypes.x], NUMERIC[key.dtypes.weight]
        self.out_dtype = NUMERIC[key.dtypes.out]

    def smem_layouts(self):
        """(sW_layout, sX_layout): stages of weights [2 * box, tile_k] and of x [tile_tokens, tile_k]."""
        tile = (2 * self.box, self.tile_tokens, self.tile_k)
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.weight_dtype, self.stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.x_dtype, self.stages),
        )

    def params(self, operands: GemmOperands, scratch: StreamKScratch | None) -> SmallMParams:
        """The kernel's, with TMA descriptors."""
        partials, flags = (None, None) if scratch is None else scratch
        weights = parts_view(operands.weight, self.parts, self.interleaved)
        tma_atom_w, mW, tma_atom_x, mX = self.tma_atoms(weights, operands.x)
        return SmallMParams(
            tma_atom_w, mW, tma_atom_x, mX, operands.bias, operands.residual, operands.out, partials, flags
        )

    def tma_atoms(self, weights: cute.Tensor, x: cute.Tensor):
        """(tma_atom_w, mW, tma_atom_x, mX) of weights [n, k, parts, ...] and x [m, k, ...]."""
        tile = (self.box, self.tile_tokens, self.tile_k)
        sW_box = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.weight_dtype, 1)
        sX_box = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.x_dtype, 1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_atom_w, mW = cpasync.make_tiled_tma_atom(
            load, weights, cute.slice_(sW_box, (None, None, 0)), (self.box, self.tile_k)
        )
        tma_atom_x, mX = cpasync.make_tiled_tma_atom(
            load, x, cute.slice_(sX_box, (None, None, 0)), (self.tile_tokens, self.tile_k)
        )
        return tma_atom_w, mW, tma_atom_x, mX

    def total_iterations(self, mX: cute.Tensor, mOut: cute.Tensor):
        """Of all tiles."""
        return (
            cute.ceil_div(mX.shape[1], self.tile_k)
            * cute.ceil_div(mX.shape[0], self.tile_tokens)
            * cute.ceil_div(mOut.shape[1], self.columns)
        )

    def ctas(self, args: GemmArgs | ScaledArgs):
        """CTAs of a launch: as many as fit, with an equal share each, or a cluster for each tile."""
        mX, mOut = args.operands.x, args.operands.out
        if self.stream_k:
            return cutlass.min(self.total_iterations(mX, mOut), args.max_ctas)
        m_tiles = cute.ceil_div(mX.shape[0], self.tile_tokens)
        return m_tiles * cute.ceil_div(mOut.shape[1], self.columns) * self.num_splits

    def received(self, smem: SmemAllocator) -> Received | None:
        """Shared memory for partial sums; None with stream-K."""
        if self.stream_k:
            return None
        threads = WARPGROUP * self.groups
        sent = self.sent_at_once
        layout = cute.make_layout(
            (2, (sent, self.finished // sent), threads, self.num_splits),
            # Neighbouring threads store 8 or 16 bytes side by side.
            stride=(1, (2, 2 * sent * threads), 2 * sent, 2 * self.finished * threads),
        )
        sPartials = smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        return Received(sPartials, smem.allocate_array(cutlass.Int64, 1))

    def expect_partials(self, received: Received | None):
        """By one thread, before the cluster's CTAs meet: what the CTA will receive."""
        if received is not None:
            cute.arch.mbarrier_init(received.mbar, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(received.mbar, 4 * cute.size(received.sPartials.layout))

    def meet_begin(self):
        """By all threads, behind `expect_partials`: with split-K, the CTAs of a cluster meet before they send."""
        if not self.stream_k:
            cute.arch.cluster_arrive()

    def meet_end(self):
        """By all threads, once each."""
        if not self.stream_k:
            cute.arch.cluster_wait()

    def first_finished(self, split):
        """Of a thread's accumulators of a box, the first that a CTA of the cluster finishes."""
        last = split // (self.num_splits - 1)
        return split * self.finished - last * self.shared

    def finished_token(self, token: cutlass.Int32, i: int):
        """The token of the i-th accumulator that this CTA sums up; beyond all where the CTA before it stores it."""
        if i >= self.shared:
            return token
        return token + cute.arch.block_idx_in_cluster() // (self.num_splits - 1) * BEYOND

    def sum_splits(self, received: Received, acc_0: cute.Tensor, acc_1: cute.Tensor, thread: cutlass.Int32):
        """Split-K: the sums over k of what this CTA finishes of a thread's accumulators, of both boxes.

        Partial sums are added in the order of k. When this returns, the CTA has received all that is sent to it.

        Args:
            thread: among those with accumulators.
        """
        own = cute.arch.block_idx_in_cluster()
        for split in range(self.num_splits):
            for i in range(0, self.finished, self.sent_at_once):
                j = self.first_finished(split) + i
                words = [acc[at] for at in range(j, j + self.sent_at_once) for acc in (acc_0, acc_1)]
                target = received.sPartials.iterator + received.sPartials.layout((0, i, thread, own))
                store_shared_remote(words, target, received.mbar, split)
        cute.arch.mbarrier_wait(received.mbar, 0)
        sum_0, sum_1 = (cute.make_rmem_tensor(self.finished, cutlass.Float32) for _ in range(2))
        sum_0.fill(0.0)
        sum_1.fill(0.0)
        for split in range(self.num_splits):
            for i in range(self.finished):
                sum_0[i] += received.sPartials[0, i, thread, split]
                sum_1[i] += received.sPartials[1, i, thread, split]
        return sum_0, sum_1

    def work(self, params: SmallMParams) -> StreamKWork:
        """This CTA's range."""
        k_tiles = cute.ceil_div(params.mX.shape[1], self.tile_k)
        n_tiles = cute.ceil_div(params.mOut.shape[1], self.columns)
        total = self.total_iterations(params.mX, params.mOut)
        ctas = cute.arch.grid_dim()[0]
        worker = ctas - 1 - cute.arch.block_idx()[0]
        if self.stream_k:
            start, end = share(total, ctas, worker), share(total, ctas, worker + 1)
        else:
            first = cute.arch.block_idx()[0] // self.num_splits * k_tiles
            split = cute.arch.block_idx_in_cluster()
            start = first + share(k_tiles, self.num_splits, split)
            end = first + share(k_tiles, self.num_splits, split + 1)
        return StreamKWork(k_tiles, n_tiles, total, ctas, worker, start, end)

    def begin(self, params: SmallMParams, smem: SmemAllocator) -> StreamKWork:
        """Let the next kernel start, and find this CTA's range; by all threads, once barriers are initialised."""
        dependent_launch.launch_dependents()
        return self.work(params)

    def tile_range(self, work: StreamKWork):
        """(first tile of the CTA's range, number of tiles)."""
        first = work.start // work.k_tiles
        return first, cute.ceil_div(work.end, work.k_tiles) - first

    @cute.jit
    def load(self, params: SmallMParams, sW: cute.Tensor, sX: cute.Tensor, pipeline: Pipeline, work: StreamKWork):
        """The load warp. Weights depend on no kernel before this one: as many as fit are loaded before the wait."""
        gX = cute.local_tile(params.mX, (self.tile_tokens, self.tile_k), (None,) * cute.rank(params.mX))
        tWsW, tWgW = self.partition_weights(params, sW)
        tXsX, tXgX = cpasync.tma_partition(
            params.tma_atom_x, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        count = work.end - work.start
        prologue = cutlass.min(count, self.stages)
        for position in cutlass.range(prologue, unroll=1):
            self.load_weights(params, tWsW, tWgW, pipeline, work, position)
        dependent_launch.wait()
        for position in cutlass.range(prologue, unroll=1):
            self.load_x(params, tXsX, tXgX, pipeline, work, position)
        for position in cutlass.range(prologue, count, unroll=1):
            self.load_weights(params, tWsW, tWgW, pipeline, work, position)
            self.load_x(params, tXsX, tXgX, pipeline, work, position)

    def partition_weights(self, params: SmallMParams, sW: cute.Tensor):
        """(tWsW, tWgW): where copies of weights go, [copy, box, stage], and what `copy_weights` finds them in."""
        return self.partition_boxes(params.tma_atom_w, params.mW, sW)

    def partition_boxes(self, tma_atom_w, mW: cute.Tensor, sW: cute.Tensor):
        """The same of an atom, with sources [copy, n, k, ...]."""
        gW = cute.local_tile(mW, (self.box, self.tile_k), (None,) * cute.rank(mW))
        boxes = cute.local_tile(sW, (self.box, self.tile_k), (None, 0, None))
        return cpasync.tma_partition(
            tma_atom_w, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(gW, 0, 2)
        )

    @cute.jit
    def load_weights(
        self,
        params: SmallMParams,
        tWsW: cute.Tensor,
        tWgW: Any,
        pipeline: Pipeline,
        work: StreamKWork,
        position: cutlass.Int32,
    ):
        """Both boxes of an iteration, once its stage is empty."""
        iteration = work.start + position
        k_tile, n_tile = iteration % work.k_tiles, iteration // work.k_tiles % work.n_tiles
        pipeline.producer_acquire(position)
        pipeline.producer_expect(position, self.stage_bytes)
        mbar_full = pipeline.full(position)
        self.copy_weights(params, tWsW, tWgW, work, n_tile, k_tile, pipeline.stage(position), mbar_full)

    @cute.jit
    def copy_weights(self, params: SmallMParams, tWsW: cute.Tensor, tWgW: Any, work: Any, n_tile, k_tile, stage, mbar):
        """Both boxes of a tile's weights to a stage."""
        self.copy_boxes(params.tma_atom_w, tWgW, tWsW, n_tile, k_tile, stage, mbar)

    def copy_boxes(self, tma_atom_w, tWgW: cute.Tensor, tWsW: cute.Tensor, n_tile, k_tile, stage, mbar):
        """The same, of sources [copy, n, k, parts]."""
        for i in range(2):
            cute.copy(
                tma_atom_w,
                tWgW[None, n_tile, k_tile, i] if self.gated else tWgW[None, 2 * n_tile + i, k_tile, 0],
                tWsW[None, i, stage],
                tma_bar_ptr=mbar,
                cache_policy=cutlass.Int64(EVICT_FIRST),
            )

    def x_box(self, tXgX: cute.Tensor, work: StreamKWork, m_tile, k_tile):
        """The source of x."""
        return tXgX[None, m_tile, k_tile]

    @cute.jit
    def load_x(
        self,
        params: SmallMParams,
        tXsX: cute.Tensor,
        tXgX: cute.Tensor,
        pipeline: Pipeline,
        work: StreamKWork,
        position: cutlass.Int32,
    ):
        """X of an iteration, into the stage of its weights."""
        iteration = work.start + position
        k_tile, m_tile = iteration % work.k_tiles, iteration // work.k_tiles // work.n_tiles
        stage = pipeline.stage(position)
        source = self.x_box(tXgX, work, m_tile, k_tile)
        cute.copy(params.tma_atom_x, source, tXsX[None, stage], tma_bar_ptr=pipeline.mbar_full + stage)

    def flag_index(self, worker, group):
        """Of a warpgroup among all of the grid."""
        return worker * self.groups + group

    def partials_of(self, params: SmallMParams, worker, group, thread) -> cute.Tensor:
        """A thread's partial sums in memory, [accumulators]; those of a warp's lanes are neighbours."""
        start = cutlass.Int64(self.flag_index(worker, group)) * (self.accumulators * WARPGROUP) + thread
        layout = cute.make_layout(self.accumulators, stride=WARPGROUP)
        return cute.make_tensor(params.mPartials.iterator + start, layout)

    @cute.jit
    def store_partials(
        self,
        params: SmallMParams,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        worker: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Store a tile's accumulators for the CTA that finishes it; at most once in a launch."""
        partials = self.partials_of(params, worker, group, thread)
        half = cutlass.const_expr(self.accumulators // 2)
        for i in cutlass.range(half, unroll_full=True):
            partials[i] = acc_0[i]
            partials[half + i] = acc_1[i]
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)
        if thread == 0:
            flag = params.mFlags.iterator + self.flag_index(worker, group)
            cute.arch.store(flag, cutlass.Int32(1), sem="release", scope="gpu")

    @cute.jit
    def add_partials(
        self,
        params: SmallMParams,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        work: StreamKWork,
        until: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Stream-K fixup: add the partial sums of the CTAs behind this one, in order, up to the iteration `until`.

        All flags are awaited at once: one after the other took 1 us each.
        """
        half = cutlass.const_expr(self.accumulators // 2)
        peers = owner(work.total, work.workers, until - 1) - work.worker
        for i in cutlass.range(thread, peers, WARPGROUP, unroll=1):
            flag = params.mFlags.iterator + self.flag_index(work.worker + 1 + i, group)
            stored = cutlass.Int32(0)
            while stored == 0:
                stored = cute.arch.load(flag, cutlass.Int32, sem="acquire", scope="gpu")
            # For the next launch.
            cute.arch.store(flag, cutlass.Int32(0), sem="relaxed", scope="gpu")
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)
        for i in cutlass.range(peers, unroll=self.partials_unroll):
            partials = self.partials_of(params, work.worker + 1 + i, group, thread)
            for j in cutlass.range(half, unroll_full=True):
                acc_0[j] += partials[j]
                acc_1[j] += partials[half + j]

    def biases(self, params: SmallMParams, column: cutlass.Int32):
        """Of a column of the first box and what lies beside it in the second: [2] float32, 0 where there are none."""
        n = params.mOut.shape[1]
        if params.mBias is None:
            return [cutlass.Float32(0.0), cutlass.Float32(0.0)]
        if self.gated:
            return [bias_of(params.mBias, column, part, n, self.interleaved) for part in range(2)]
        return [bias_of(params.mBias, column + box * self.box, 0, n, False) for box in range(2)]

    @cute.jit
    def finish(
        self,
        params: SmallMParams,
        value_0: cutlass.Float32,
        value_1: cutlass.Float32,
        token: cutlass.Int32,
        column: cutlass.Int32,
    ):
        """Both boxes' values to the output: to one column, or without an activation to two, a box apart."""
        m, n = params.mOut.shape
        if cutlass.const_expr(self.gated):
            self.store(params, self.activate([value_0], [value_1])[0], token, column, m, n)
        else:
            self.store(params, value_0, token, column, m, n)
            self.store(params, value_1, token, column + self.box, m, n)

    @cute.jit
    def store(
        self,
        params: SmallMParams,
        value: cutlass.Float32,
        token: cutlass.Int32,
        column: cutlass.Int32,
        m: cutlass.Int32,
        n: cutlass.Int32,
    ):
        """Add the residual to one element of the output and store it, where it is inside."""
        if token < m:
            if column < n:
                rOut = cute.make_rmem_tensor(1, self.out_dtype)
                if cutlass.const_expr(params.mResidual is not None):
                    row = cutlass.Int64(token) * params.mResidual.stride[0]
                    load_vector(params.mResidual.iterator, row + column, rOut)
                    value += rOut[0].to(cutlass.Float32)
                rOut[0] = self.rounded(params, value)
                store_vector(rOut, params.mOut.iterator, cutlass.Int64(token) * params.mOut.stride[0] + column)

    def rounded(self, params: SmallMParams, value: cutlass.Float32):
        """An element in the output's type."""
        return value.to(self.out_dtype)
