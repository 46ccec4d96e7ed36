# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows for SM90: wgmma by one or two consumer warp groups, whose registers have the sums."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.epilogue import Singles
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.small_m import SharedStream, StreamArgs, Work
from dsl_backend.gemm.views import bias_of
from dsl_backend.linear.configs import CONSUMER_REGISTERS, MMA_M, PRODUCER_REGISTERS, StreamConfig
from dsl_backend.primitives.accumulators import settle
from dsl_backend.primitives.ring import Ring

# Items that a block begins before another asks for its sums.
HEAD_START = 4


class Stream(SharedStream):
    """See `gemm/small_m.py`."""

    def __init__(self, key: LinearKey[StreamConfig]):
        super().__init__(key, Singles())
        config = key.config
        self.split_tokens, self.threads = config.split_tokens, config.threads
        self.trades_registers = config.trades_registers

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
        product = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (MMA_M, self.tokens),
        )
        args = self.arguments(x, weight, bias, residual, out, partials, flags)
        self.kernel(args, product, *self.layouts()).launch(
            grid=(cutlass.min(self.items(x, out), blocks), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
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
            rest = top + work.blocks - end
            # Of the block behind this one, which began with them: then they are there, and nothing is left to wait for
            # when the weights end.
            early = begin == top and rest > 0 and rest + HEAD_START <= begin - work.start
            if early:
                first.fill(0.0)
                second.fill(0.0)
                self.gather(args, first, second, work, top + work.blocks, group, thread)
            self.products(
                product, first, second, fFirst, fSecond, fX, ring, begin - work.start, end - begin, early, thread
            )
            wgmma.wait_group(0)
            settle(first)
            settle(second)
            ring.release(end - 1 - work.start, thread, 1)
            if begin > top:
                self.hand_over(args, first, second, work.worker, group, thread)
            else:
                if rest > 0 and not early:
                    self.gather(args, first, second, work, top + work.blocks, group, thread)
                column = tile % work.beside * self.columns + rows * MMA_M
                token = tile // work.beside * self.tile_tokens + columns * self.tokens
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
        continued: cutlass.Boolean,
        thread: cutlass.Int32,
    ):
        """Issue the products of `count` positions, added to the sums there are if `continued`.

        The last ones are still under way when this returns.
        """
        product.set(wgmma.Field.ACCUMULATE, continued)
        # The first position by itself: sums that another block's are loaded into go round the loop as products alone.
        # Otherwise ptxas waits for each product before the next one.
        self.position(product, first, second, fFirst, fSecond, fX, ring, start)
        for i in cutlass.range(1, count, unroll=1):
            self.position(product, first, second, fFirst, fSecond, fX, ring, start + i)
            # The position before this one is done.
            wgmma.wait_group(1)
            ring.release(start + i - 1, thread, 1)

    @cute.jit
    def position(
        self,
        product: cute.TiledMma,
        first: cute.Tensor,
        second: cute.Tensor,
        fFirst: cute.Tensor,
        fSecond: cute.Tensor,
        fX: cute.Tensor,
        ring: Ring,
        position: cutlass.Int32,
    ):
        """Issue the products of one position."""
        stage = ring.stage(position)
        ring.wait(position)
        wgmma.fence()
        for part in cutlass.range_constexpr(cute.size(fX, mode=[2])):
            step = (None, None, part, stage)
            cute.gemm(product, first, fFirst[step], fX[step], first)
            cute.gemm(product, second, fSecond[step], fX[step], second)
            product.set(wgmma.Field.ACCUMULATE, True)
        wgmma.commit_group()

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
                        self.put(args, self.activate([one], [other])[0], token, column, m, n)
                    else:
                        self.put(args, one, token, column, m, n)
                        self.put(args, other, token, column + self.box, m, n)
