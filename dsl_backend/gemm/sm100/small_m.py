# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows for SM100: one warp issues products into tensor memory, one or two warpgroups store.

A thread that stores has a row of each box of weights: a warp's neighbours have neighbouring columns of the output.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers

from dsl_backend.gemm.epilogue import Singles
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import (
    BUFFERS,
    LOAD,
    MMA_K,
    MULTIPLY,
    OTHER_REGISTERS,
    ROWS,
    STORE_REGISTERS,
    StreamConfig,
)
from dsl_backend.gemm.small_m import SharedStream, StreamArgs, Work
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives import tensor_memory
from dsl_backend.primitives.ring import Ring


class Stream(SharedStream):
    """See `gemm/small_m.py`."""

    def __init__(self, key: LinearKey[StreamConfig]):
        # A thread holds up to 128 sums, and what pairs need beside them spilled up to 32 bytes (64 tokens, residual).
        super().__init__(key, Singles())
        self.tensor_columns, self.threads = key.config.tensor_columns, key.config.threads
        self.held, self.trades_registers = self.accumulators // 2, key.config.trades_registers

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
        product = blackwell_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            tcgen05.CtaGroup.ONE,
            (ROWS, self.tokens),
        )
        args = self.arguments(x, weight, bias, residual, out, partials, flags)
        self.kernel(args, product, *self.layouts()).launch(
            grid=(cutlass.min(self.items(x, out), blocks), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
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
        full, empty = (shared.allocate_array(cutlass.Int64, self.stages) for _ in range(2))
        made, stored = (shared.allocate_array(cutlass.Int64, BUFFERS) for _ in range(2))
        place = shared.allocate_array(cutlass.Int32, 1)
        # Products arrive once, who stores by a lane of each warp.
        ring = Ring(full, empty, self.stages, 1)
        sums = Ring(made, stored, BUFFERS, self.groups * WARPGROUP // WARP)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        role = warp - self.groups * (WARPGROUP // WARP)
        if role == LOAD:
            with cute.arch.elect_one():
                ring.open()
                sums.open()
            cute.arch.mbarrier_init_fence()
            for atom in (args.weight_load, args.x_load):
                cpasync.prefetch_descriptor(atom)
        if role == MULTIPLY:
            cute.arch.alloc_tmem(self.tensor_columns, place)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
        # The next kernel's blocks may come once this one has its tensor memory: they would keep it from it.
        cute.arch.griddepcontrol_launch_dependents()
        work = self.work(args)
        if role < 0:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_increase(STORE_REGISTERS)
            self.store(args, sums, work, base, warp // (WARPGROUP // WARP))
        else:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if role == LOAD:
                self.load(args, sW, sX, ring, work)
            if role == MULTIPLY:
                self.multiply(product, sW, sX, ring, sums, work, base)
        cute.arch.sync_threads()
        if role == MULTIPLY:
            cute.arch.dealloc_tmem(base, self.tensor_columns)

    def tiles(self, work: Work):
        """(first tile of a share, how many)."""
        first = work.start // work.blocks
        return first, (work.end - 1) // work.blocks + 1 - first

    def within(self, work: Work, tile):
        """(items of a tile from ... to, of those in the share from ... to)."""
        top = tile * work.blocks
        bottom = top + work.blocks
        return top, bottom, cutlass.max(work.start, top), cutlass.min(work.end, bottom)

    @cute.jit
    def multiply(
        self,
        product: cute.TiledMma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        ring: Ring,
        sums: Ring,
        work: Work,
        base: cute.Pointer,
    ):
        """The warp that issues products."""
        boxes = cute.local_tile(sW, (self.box, self.tile_k), (None, 0, None))
        fW = [product.make_fragment_A(cute.tiled_divide(boxes[None, None, i, None], (ROWS, MMA_K))) for i in range(2)]
        fX = product.make_fragment_B(cute.tiled_divide(sX, (self.tokens, MMA_K)))
        shape = product.get_slice(0).partition_shape_C((ROWS, self.tokens))
        layout = product.make_fragment_C(shape).layout
        first, count = self.tiles(work)
        for turn in cutlass.range(count, unroll=1):
            _, _, begin, end = self.within(work, first + turn)
            cute.arch.mbarrier_wait(sums.empty + sums.stage(turn), sums.phase(turn) ^ 1)
            tensor_memory.after_sync()
            place = base + sums.stage(turn) * (2 * self.tokens)
            tiles = [cute.make_tensor(place + i * self.tokens, layout) for i in range(2)]
            for item in cutlass.range(begin, end, unroll=1):
                stage = ring.stage(item - work.start)
                ring.wait(item - work.start)
                adding = product.with_()
                for k in cutlass.range_constexpr(self.tile_k // MMA_K):
                    adding.set(tcgen05.Field.ACCUMULATE, item > begin if cutlass.const_expr(k == 0) else True)
                    for i in cutlass.range_constexpr(2):
                        cute.gemm(adding, tiles[i], fW[i][None, None, k, stage], fX[None, None, k, stage], tiles[i])
                with cute.arch.elect_one():
                    tcgen05.commit(ring.empty + stage)
            with cute.arch.elect_one():
                tcgen05.commit(sums.full + sums.stage(turn))

    @cute.jit
    def store(self, args: StreamArgs, sums: Ring, work: Work, base: cute.Pointer, group: cutlass.Int32):
        """A warpgroup that has the sums of every tile in the share, of some tokens."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        first_sums, second_sums = (cute.make_rmem_tensor(self.held, cutlass.Float32) for _ in range(2))
        # The residual is another kernel's, and what it read may be what this one writes.
        cute.arch.griddepcontrol_wait()
        first, count = self.tiles(work)
        for turn in cutlass.range(count, unroll=1):
            tile = first + turn
            top, bottom, begin, end = self.within(work, tile)
            sums.wait(turn)
            tensor_memory.after_sync()
            place = sums.stage(turn) * (2 * self.tokens) + group * self.held
            tensor_memory.load(base, place, first_sums, thread)
            tensor_memory.load(base, place + self.tokens, second_sums, thread)
            cute.arch.fence_view_async_tmem_load()
            tensor_memory.before_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums.empty + sums.stage(turn))
            if begin > top:
                self.hand_over(args, first_sums, second_sums, work.worker, group, thread)
            else:
                if end < bottom:
                    self.gather(args, first_sums, second_sums, work, bottom, group, thread)
                column = tile % work.beside * self.columns + thread
                token = tile // work.beside * self.tokens + group * self.held
                self.finish(args, first_sums, second_sums, column, token)

    @cute.jit
    def finish(
        self,
        args: StreamArgs,
        first: cute.Tensor,
        second: cute.Tensor,
        column: cutlass.Int32,
        top: cutlass.Int32,
    ):
        """Sums of tokens from `top` on to the output: to one column, or of a plain product to two, a box apart."""
        m, n = args.out.shape
        biases = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
        if cutlass.const_expr(args.bias is not None):
            for i in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.gated):
                    biases[i] = bias_of(args.bias, column, i, n, self.interleaved)
                else:
                    biases[i] = bias_of(args.bias, column + i * self.box, 0, n, False)
        for j in cutlass.range(self.held, unroll_full=True):
            one, other = first[j] + biases[0], second[j] + biases[1]
            if cutlass.const_expr(self.gated):
                self.put(args, self.activate([one], [other])[0], top + j, column, m, n)
            else:
                self.put(args, one, top + j, column, m, n)
                self.put(args, other, top + j, column + self.box, m, n)
