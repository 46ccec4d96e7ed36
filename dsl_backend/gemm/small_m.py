# SPDX-License-Identifier: Apache-2.0
"""What the kernels for few rows share: weights are streamed once, at the speed of memory, by all SMs alike.

Operands are swapped: weight rows are the rows of a matrix product, tokens its columns. All work is a list, tile by tile
and within a tile block of k by block of k, and every thread block gets an equal share of it (stream-K). A tile that
lies in several shares is summed by the block that has its beginning, which is the last thing that this one does; the
others have its rest at their start, so that their partial sums are there when they are asked for.

With more tokens than a tile holds, every row of tiles has as many blocks, whose shares begin at the same weights: all
rows read them at the same time, from memory once.

A tile's weights are two boxes of rows: with a gated activation the gate and the up rows of the same output columns,
whose sums the same thread has.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum, hopper_helpers

from dsl_backend.gemm.epilogue import Arithmetic, epilogue_of
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.views import NUMERIC, parts_view
from dsl_backend.linear.configs import Streams
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.ring import Ring
from dsl_backend.primitives.schedule import owner, share

# The L2 cache's descriptor of lines to evict first (CUTLASS, TMA::CacheHintSm90).
EVICT_FIRST = 0x12F0000000000000
# Named barriers of consumers.
OWN = 1


@dataclass(frozen=True)
class StreamArgs:
    """What the kernel's roles work with.

    Attributes:
        weight_load, x_load: copies of [box, tile_k] and [tokens, tile_k].
        weight, x: coordinates [n, k, parts] and [m, k].
        bias: [parts * n]. residual: [m, n]. Either may be missing.
        out: [m, n].
        partials, flags: see `kernel.Workspace`; for every block partial sums, and a flag for each consumer.
    """

    weight_load: cute.CopyAtom
    weight: cute.Tensor
    x_load: cute.CopyAtom
    x: cute.Tensor
    bias: cute.Tensor
    residual: cute.Tensor
    out: cute.Tensor
    partials: cute.Tensor
    flags: cute.Tensor


@dataclass(frozen=True)
class Work:
    """A thread block's share of the list.

    Attributes:
        blocks: of k, in every tile.
        beside: tiles of the same tokens.
        total: items of the list.
        worker: this thread block's place; the first launched has the last share, since who sums waits for later ones.
        start, end: of the share.
    """

    blocks: cutlass.Int32
    beside: cutlass.Int32
    total: cutlass.Int32
    worker: cutlass.Int32
    start: cutlass.Int32
    end: cutlass.Int32


class SharedStream:
    """out [m, n] = activation(x [m, k] @ weight [parts * n, k]^T + bias) + residual; m, n, k > 0.

    A kernel adds who multiplies. Its consumers hold sums of both boxes, `accumulators` a thread.
    """

    def __init__(self, key: LinearKey[Streams], arithmetic: Arithmetic):
        config = key.config
        self.tokens, self.groups, self.accumulators = config.tokens, config.groups, config.accumulators
        self.box, self.tile_tokens, self.tile_k = config.box, config.tile_tokens, config.tile_k
        self.stages, self.stage_bytes = config.stages, config.stage_bytes
        self.gated, self.interleaved = key.activation is not None, key.interleaved
        self.activate = epilogue_of(key.activation, arithmetic)
        self.parts = 2 if self.gated else 1
        self.columns = 2 * self.box // self.parts
        # Of other blocks' partial sums, as many as 64 registers hold.
        self.asked_at_once = max(1, 64 // self.accumulators)
        self.dtype = NUMERIC[key.dtype]

    def layouts(self):
        """Of the stages of weights [2 * box, tile_k] and of x [tile_tokens, tile_k]."""
        tile = (2 * self.box, self.tile_tokens, self.tile_k)
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages),
        )

    def arguments(self, x, weight, bias, residual, out, partials, flags) -> StreamArgs:
        """Of host code's tensors."""
        tile = (self.box, self.tile_tokens, self.tile_k)
        box = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, 1)
        tokens = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, 1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        weights = parts_view(weight, self.parts, self.interleaved)
        weight_load, mW = cpasync.make_tiled_tma_atom(
            load, weights, cute.slice_(box, (None, None, 0)), (self.box, self.tile_k)
        )
        x_load, mX = cpasync.make_tiled_tma_atom(
            load, x, cute.slice_(tokens, (None, None, 0)), (self.tile_tokens, self.tile_k)
        )
        return StreamArgs(weight_load, mW, x_load, mX, bias, residual, out, partials, flags)

    def items(self, x: cute.Tensor, out: cute.Tensor):
        """Of the list."""
        return (
            cute.ceil_div(x.shape[1], self.tile_k)
            * cute.ceil_div(x.shape[0], self.tile_tokens)
            * cute.ceil_div(out.shape[1], self.columns)
        )

    def work(self, args: StreamArgs) -> Work:
        """This thread block's share."""
        blocks = cute.ceil_div(args.x.shape[1], self.tile_k)
        beside = cute.ceil_div(args.out.shape[1], self.columns)
        total = self.items(args.x, args.out)
        workers = cute.arch.grid_dim()[0]
        worker = workers - 1 - cute.arch.block_idx()[0]
        start, end = share(total, workers, worker), share(total, workers, worker + 1)
        return Work(blocks, beside, total, worker, start, end)

    @cute.jit
    def load(self, args: StreamArgs, sW: cute.Tensor, sX: cute.Tensor, ring: Ring, work: Work):
        """The producer's warp. Weights depend on no kernel before this one: as many as fit are asked for at once."""
        one = cute.make_layout(1)
        gW = cute.local_tile(args.weight, (self.box, self.tile_k), (None, None, None))
        gX = cute.local_tile(args.x, (self.tile_tokens, self.tile_k), (None, None))
        boxes = cute.local_tile(sW, (self.box, self.tile_k), (None, 0, None))
        sWIn, gWIn = cpasync.tma_partition(
            args.weight_load, 0, one, cute.group_modes(boxes, 0, 2), cute.group_modes(gW, 0, 2)
        )
        sXIn, gXIn = cpasync.tma_partition(args.x_load, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        count = work.end - work.start
        ahead = cutlass.min(count, self.stages)
        for position in cutlass.range(ahead, unroll=1):
            self.load_weights(args, sWIn, gWIn, ring, work, position)
        cute.arch.griddepcontrol_wait()
        for position in cutlass.range(ahead, unroll=1):
            self.load_x(args, sXIn, gXIn, ring, work, position)
        for position in cutlass.range(ahead, count, unroll=1):
            self.load_weights(args, sWIn, gWIn, ring, work, position)
            self.load_x(args, sXIn, gXIn, ring, work, position)

    @cute.jit
    def load_weights(
        self, args: StreamArgs, sWIn: cute.Tensor, gWIn: cute.Tensor, ring: Ring, work: Work, position: cutlass.Int32
    ):
        """Both boxes of an item, once its stage is empty."""
        item = work.start + position
        block, column = item % work.blocks, item // work.blocks % work.beside
        arrived = ring.acquire(position, self.stage_bytes)
        for i in cutlass.range_constexpr(2):
            source = gWIn[None, column, block, i] if self.gated else gWIn[None, 2 * column + i, block, 0]
            cute.copy(
                args.weight_load,
                source,
                sWIn[None, i, ring.stage(position)],
                tma_bar_ptr=arrived,
                cache_policy=cutlass.Int64(EVICT_FIRST),
            )

    @cute.jit
    def load_x(
        self, args: StreamArgs, sXIn: cute.Tensor, gXIn: cute.Tensor, ring: Ring, work: Work, position: cutlass.Int32
    ):
        item = work.start + position
        block, row = item % work.blocks, item // work.blocks // work.beside
        stage = ring.stage(position)
        cute.copy(args.x_load, gXIn[None, row, block], sXIn[None, stage], tma_bar_ptr=ring.full + stage)

    def slot(self, worker, group):
        """A consumer's number among all of the grid."""
        return worker * self.groups + group

    def handed(self, args: StreamArgs, worker, group, thread) -> cute.Tensor:
        """A thread's partial sums in memory, [accumulators]; neighbours of a warp lie side by side."""
        start = cutlass.Int64(self.slot(worker, group)) * (self.accumulators * WARPGROUP) + thread
        return cute.make_tensor(args.partials.iterator + start, cute.make_layout(self.accumulators, stride=WARPGROUP))

    @cute.jit
    def hand_over(
        self,
        args: StreamArgs,
        first: cute.Tensor,
        second: cute.Tensor,
        worker: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Leave partial sums for the block that has the tile's beginning; once in a launch at most."""
        place = self.handed(args, worker, group, thread)
        half = cutlass.const_expr(self.accumulators // 2)
        for i in cutlass.range(half, unroll_full=True):
            place[i] = first[i]
            place[half + i] = second[i]
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        if thread == 0:
            flag = args.flags.iterator + self.slot(worker, group)
            cute.arch.store(flag, cutlass.Int32(1), sem="release", scope="gpu")

    @cute.jit
    def gather(
        self,
        args: StreamArgs,
        first: cute.Tensor,
        second: cute.Tensor,
        work: Work,
        until: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Add the partial sums of the blocks behind this one, in order, up to the item `until`.

        All are awaited at once: one after the other took 1 us each.
        """
        half = cutlass.const_expr(self.accumulators // 2)
        helpers = owner(work.total, cute.arch.grid_dim()[0], until - 1) - work.worker
        for i in cutlass.range(thread, helpers, WARPGROUP, unroll=1):
            flag = args.flags.iterator + self.slot(work.worker + 1 + i, group)
            there = cutlass.Int32(0)
            while there == 0:
                there = cute.arch.load(flag, cutlass.Int32, sem="acquire", scope="gpu")
            # For the next launch.
            cute.arch.store(flag, cutlass.Int32(0), sem="relaxed", scope="gpu")
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        for i in cutlass.range(helpers, unroll=self.asked_at_once):
            place = self.handed(args, work.worker + 1 + i, group, thread)
            for j in cutlass.range(half, unroll_full=True):
                first[j] += place[j]
                second[j] += place[half + j]

    @cute.jit
    def put(
        self,
        args: StreamArgs,
        value: cutlass.Float32,
        token: cutlass.Int32,
        column: cutlass.Int32,
        m: cutlass.Int32,
        n: cutlass.Int32,
    ):
        """One element of the output, where there is one."""
        if token < m:
            if column < n:
                held = cute.make_rmem_tensor(1, self.dtype)
                if cutlass.const_expr(args.residual is not None):
                    load_vector(args.residual.iterator, cutlass.Int64(token) * args.residual.stride[0] + column, held)
                    value += held[0].to(cutlass.Float32)
                held[0] = value.to(self.dtype)
                store_vector(held, args.out.iterator, cutlass.Int64(token) * args.out.stride[0] + column)
