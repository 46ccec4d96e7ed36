# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows for SM90: weights are streamed once, at the speed of memory, by all SMs alike.

Operands are swapped: weight rows are wgmma's rows, tokens its columns. All work is a list, tile by tile and within a
tile block of k by block of k, and every thread block gets an equal share of it (stream-K). A tile that lies in several
shares is summed by the block that has its beginning, which is the last thing that this one does; the others have its
rest at their start, so that their partial sums are there when they are asked for.

A tile's weights are two boxes of rows: with a gated activation the gate and the up rows of the same output columns,
which lie in the same registers of a thread.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.utils import LayoutEnum, hopper_helpers

from dsl_backend.linear.configs import CONSUMER_REGISTERS, MMA_M, PRODUCER_REGISTERS, WARPGROUP, StreamConfig
from dsl_backend.linear.epilogue import epilogue_of
from dsl_backend.linear.sm90.views import NUMERIC, bias_of, parts_view
from dsl_backend.linear.spec import Activation
from dsl_backend.primitives.accumulators import settle
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.ring import Ring
from dsl_backend.primitives.schedule import share

# The L2 cache's descriptor of lines to evict first (CUTLASS, TMA::CacheHintSm90).
EVICT_FIRST = 0x12F0000000000000
# Named barriers of consumers.
OWN = 1


@dataclass(frozen=True, kw_only=True)
class StreamKey:
    """All that the kernel's code depends on; see `spec.LinearSpec`."""

    dtype: str
    activation: Activation | None
    interleaved: bool
    bias: bool
    residual: bool
    config: StreamConfig


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
        rows_of_tiles: tiles above each other, of the same weights.
        total: items of the list.
        worker: this thread block's place; the first launched has the last share, since who sums waits for later ones.
        start, end: of the share.
    """

    blocks: cutlass.Int32
    rows_of_tiles: cutlass.Int32
    total: cutlass.Int32
    worker: cutlass.Int32
    start: cutlass.Int32
    end: cutlass.Int32


class Stream:
    """out [m, n] = activation(x [m, k] @ weight [parts * n, k]^T + bias) + residual; m, n, k > 0."""

    def __init__(self, key: StreamKey):
        config = key.config
        self.tokens, self.groups, self.split_tokens = config.tokens, config.groups, config.split_tokens
        self.box, self.tile_tokens, self.tile_k = config.box, config.tile_tokens, config.tile_k
        self.stages, self.stage_bytes, self.threads = config.stages, config.stage_bytes, config.threads
        self.accumulators, self.trades_registers = config.accumulators, config.trades_registers
        self.gated, self.interleaved = key.activation is not None, key.interleaved
        self.activate = epilogue_of(key.activation)
        self.parts = 2 if self.gated else 1
        self.columns = 2 * self.box // self.parts
        self.dtype = NUMERIC[key.dtype]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        out: cute.Tensor,
        partials: cute.Tensor,
        flags: cute.Tensor,
        blocks: cutlass.Int32,
        stream,
    ):
        """At most `blocks` thread blocks, which need not run at the same time."""
        tile = (2 * self.box, self.tile_tokens, self.tile_k)
        weight_staged = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages)
        x_staged = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages)
        box = hopper_helpers.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (self.box, self.tile_tokens, self.tile_k), self.dtype, 1
        )
        product = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (MMA_M, self.tokens),
        )
        weight_load, weights = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            parts_view(weight, self.parts, self.interleaved),
            cute.slice_(box, (None, None, 0)),
            (self.box, self.tile_k),
        )
        x_load, xs = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            x,
            cute.slice_(x_staged, (None, None, 0)),
            (self.tile_tokens, self.tile_k),
        )
        items = (
            cute.ceil_div(x.shape[1], self.tile_k)
            * cute.ceil_div(x.shape[0], self.tile_tokens)
            * cute.ceil_div(out.shape[1], self.columns)
        )
        args = StreamArgs(weight_load, weights, x_load, xs, bias, residual, out, partials, flags)
        self.kernel(args, product, weight_staged, x_staged).launch(
            grid=(cutlass.min(items, blocks), 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        args: StreamArgs,
        product: cute.TiledMma,
        weight_staged: cute.ComposedLayout,
        x_staged: cute.ComposedLayout,
    ):
        shared = cutlass.utils.SmemAllocator()
        sW = shared.allocate_tensor(self.dtype, weight_staged.outer, byte_alignment=1024, swizzle=weight_staged.inner)
        sX = shared.allocate_tensor(self.dtype, x_staged.outer, byte_alignment=1024, swizzle=x_staged.inner)
        full = shared.allocate_array(cutlass.Int64, self.stages)
        empty = shared.allocate_array(cutlass.Int64, self.stages)
        ring = Ring(full, empty, self.stages, self.groups)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                ring.open()
            cute.arch.mbarrier_init_fence()
            for atom in (args.weight_load, args.x_load):
                cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        work = self.work(args)
        group = warp // (WARPGROUP // 32)
        if group == self.groups:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.groups * (WARPGROUP // 32):
                self.load(args, sW, sX, ring, work)
        else:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(args, product, sW, sX, ring, work, group)

    def work(self, args: StreamArgs) -> Work:
        """This thread block's share."""
        blocks = cute.ceil_div(args.x.shape[1], self.tile_k)
        rows_of_tiles = cute.ceil_div(args.x.shape[0], self.tile_tokens)
        total = blocks * rows_of_tiles * cute.ceil_div(args.out.shape[1], self.columns)
        workers = cute.arch.grid_dim()[0]
        worker = workers - 1 - cute.arch.block_idx()[0]
        start, end = share(total, workers, worker), share(total, workers, worker + 1)
        return Work(blocks, rows_of_tiles, total, worker, start, end)

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
        block, column = item % work.blocks, item // work.blocks // work.rows_of_tiles
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
        block, row = item % work.blocks, item // work.blocks % work.rows_of_tiles
        stage = ring.stage(position)
        cute.copy(args.x_load, gXIn[None, row, block], sXIn[None, stage], tma_bar_ptr=ring.full + stage)

    @cute.jit
    def multiply(
        self,
        args: StreamArgs,
        product: cute.TiledMma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        ring: Ring,
        work: Work,
        group: cutlass.Int32,
    ):
        """A consumer warp group: 64 rows of each box for some tokens, of every tile in the share."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        mine = product.get_slice(thread)
        rows = 0 if cutlass.const_expr(self.split_tokens) else group
        columns = group if cutlass.const_expr(self.split_tokens) else 0
        boxes = cute.local_tile(sW, (MMA_M, self.tile_k), (None, 0, None))
        fFirst = product.make_fragment_A(mine.partition_A(boxes[None, None, rows, None]))
        fSecond = product.make_fragment_A(mine.partition_A(boxes[None, None, self.box // MMA_M + rows, None]))
        fX = product.make_fragment_B(
            mine.partition_B(cute.local_tile(sX, (self.tokens, self.tile_k), (columns, 0, None)))
        )
        shape = product.partition_shape_C((MMA_M, self.tokens))
        first, second = (cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(2))
        # The residual is another kernel's, and what it read may be what this one writes.
        cute.arch.griddepcontrol_wait()
        for tile in cutlass.range(work.start // work.blocks, (work.end - 1) // work.blocks + 1, unroll=1):
            top = tile * work.blocks
            begin = cutlass.max(work.start, top)
            end = cutlass.min(work.end, top + work.blocks)
            self.products(product, first, second, fFirst, fSecond, fX, ring, begin - work.start, end - begin, thread)
            wgmma.wait_group(0)
            settle(first)
            settle(second)
            ring.release(end - 1 - work.start, thread, 1)
            if begin > top:
                self.hand_over(args, first, second, work.worker, group, thread)
            else:
                if end < top + work.blocks:
                    self.gather(args, first, second, work, top + work.blocks, group, thread)
                column = tile // work.rows_of_tiles * self.columns + rows * MMA_M
                token = tile % work.rows_of_tiles * self.tile_tokens + columns * self.tokens
                self.finish(args, first, second, column, token, thread)

    @cute.jit
    def products(
        self,
        product: cute.TiledMma,
        first: cute.Tensor,
        second: cute.Tensor,
        fFirst: cute.Tensor,
        fSecond: cute.Tensor,
        fX: cute.Tensor,
        ring: Ring,
        start: cutlass.Int32,
        count: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Issue the products of `count` positions; the last ones are still under way when this returns."""
        product.set(wgmma.Field.ACCUMULATE, False)
        for i in cutlass.range(count, unroll=1):
            position = start + i
            stage = ring.stage(position)
            ring.wait(position)
            wgmma.fence()
            for part in cutlass.range_constexpr(cute.size(fX, mode=[2])):
                step = (None, None, part, stage)
                cute.gemm(product, first, fFirst[step], fX[step], first)
                cute.gemm(product, second, fSecond[step], fX[step], second)
                product.set(wgmma.Field.ACCUMULATE, True)
            wgmma.commit_group()
            # The position before this one is done.
            wgmma.wait_group(1)
            if i > 0:
                ring.release(position - 1, thread, 1)

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
        """Add the partial sums of the blocks behind this one, in order, up to the item `until`."""
        half = cutlass.const_expr(self.accumulators // 2)
        worker, reached = work.worker, work.end
        while reached < until:
            worker += 1
            reached = share(work.total, cute.arch.grid_dim()[0], worker + 1)
            if thread == 0:
                flag = args.flags.iterator + self.slot(worker, group)
                there = cutlass.Int32(0)
                while there == 0:
                    there = cute.arch.load(flag, cutlass.Int32, sem="acquire", scope="gpu")
                # For the next launch.
                cute.arch.store(flag, cutlass.Int32(0), sem="relaxed", scope="gpu")
            cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
            place = self.handed(args, worker, group, thread)
            for i in cutlass.range(half, unroll_full=True):
                first[i] += place[i]
                second[i] += place[half + i]

    @cute.jit
    def finish(
        self,
        args: StreamArgs,
        first: cute.Tensor,
        second: cute.Tensor,
        left: cutlass.Int32,
        top: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Sums to the output, from column `left` and token `top` on.

        Accumulators are transposed: a thread has tokens 8 j + 2 (lane % 4) + a of columns 16 warp + lane / 4 + 8 b.
        """
        lane = thread % 32
        m, n = args.out.shape
        for b in cutlass.range_constexpr(2):
            column = left + thread // 32 * 16 + lane // 4 + 8 * b
            biases = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
            if cutlass.const_expr(args.bias is not None):
                for i in cutlass.range_constexpr(2):
                    if cutlass.const_expr(self.gated):
                        biases[i] = bias_of(args.bias, column, i, n, self.interleaved)
                    else:
                        biases[i] = bias_of(args.bias, column + i * self.box, 0, n, False)
            for j in cutlass.range_constexpr(self.tokens // 8):
                for a in cutlass.range_constexpr(2):
                    token = top + 8 * j + 2 * (lane % 4) + a
                    one, other = first[a + 2 * b + 4 * j] + biases[0], second[a + 2 * b + 4 * j] + biases[1]
                    if cutlass.const_expr(self.gated):
                        self.put(args, self.activate(one, other), token, column, m, n)
                    else:
                        self.put(args, one, token, column, m, n)
                        self.put(args, other, token, column + self.box, m, n)

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
