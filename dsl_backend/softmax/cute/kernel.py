# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows for SM90 and SM100.

One pass: a row is read once into registers. Each thread computes the maximum and the sum of its exponentials, and these
are merged within a warp by shuffles, within a CTA through shared memory, and within a cluster by stores to distributed
shared memory. Two passes: a row that does not fit the registers of a cluster is read twice, in a loop.

The same instructions serve SM90 and SM100.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.primitives import dependent_launch, math, reduce
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.primitives.copy import load_vector_as, load_vector_if, store_vector
from dsl_backend.primitives.fragment import elements, from_float32, to_float32, words
from dsl_backend.primitives.reduce import MaxSum
from dsl_backend.softmax.configs import SoftmaxConfig

NUMERIC = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}

# In each 32-bit word of registers.
NEGATIVE_INFINITY = {cutlass.Float32: 0xFF800000, cutlass.Float16: 0xFC00FC00, cutlass.BFloat16: 0xFF80FF80}


@dataclass(frozen=True, kw_only=True)
class SoftmaxKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype, out_dtype: names of input and output types.
        log: log-softmax.
        config: threads, CTAs, registers.
        exact: rows are exactly as wide as the registers that hold them, so no column is out of bounds.
    """

    dtype: str
    out_dtype: str
    log: bool
    config: SoftmaxConfig
    exact: bool


class Softmax:
    """out = softmax(x) or log_softmax(x); x and out [rows, width] with row strides, rows > 0."""

    def __init__(self, key: SoftmaxKey):
        config = key.config
        self.log, self.exact, self.two_pass = key.log, key.exact, config.two_pass
        self.vector, self.vectors_per_thread = config.vector, config.vectors_per_thread
        self.threads_per_row, self.rows_per_cta = config.threads_per_row, config.rows_per_cta
        self.cluster, self.warps_per_row, self.tile_elements = (
            config.cluster,
            config.warps_per_row,
            config.tile_elements,
        )
        self.threads, self.ctas_per_sm, self.recompute = config.threads, config.ctas_per_sm, config.recompute
        self.use_pdl, self.predicated = config.use_pdl, config.predicated
        self.priority = "evict_last" if config.evict_last else ""
        self.late_dependents = config.use_pdl and config.late_dependents
        self.dtype, self.out_dtype = NUMERIC[key.dtype], NUMERIC[key.out_dtype]

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(x, out).launch(
            grid=(cute.ceil_div(x.shape[0], self.rows_per_cta), self.cluster, 1),
            block=(self.threads, 1, 1),
            cluster=(1, self.cluster, 1) if cutlass.const_expr(self.cluster > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            # In percent; a few bytes are used. Without it CuTe DSL asks the driver of a GPU, and there may be none.
            preferred_smem_carveout=25,
            stream=stream,
            use_pdl=self.use_pdl,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        slots, barrier = reduce.row_smem(MaxSum, self.rows_per_cta, self.warps_per_row, self.cluster)
        if cutlass.const_expr(self.cluster > 1):
            reduce.init_cluster_reduce(barrier)
        if cutlass.const_expr(self.use_pdl):
            if cutlass.const_expr(not self.late_dependents):
                dependent_launch.launch_dependents()
            dependent_launch.wait()
        rows, width = mX.shape
        thread = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * self.rows_per_cta + thread // self.threads_per_row
        source_row, in_bounds = row, True
        if cutlass.const_expr(self.rows_per_cta > 1):
            # Threads of a row beyond the end read the last row: all lanes of a warp take part in shuffles.
            source_row, in_bounds = cutlass.min(row, rows - 1), row < rows
        x_offset = cutlass.Int64(source_row) * mX.stride[0]
        out_offset = cutlass.Int64(row) * mOut.stride[0]
        first = (cute.arch.block_idx()[1] * self.threads_per_row + thread % self.threads_per_row) * self.vector
        rX = cute.make_rmem_tensor((self.vector, self.vectors_per_thread), self.dtype)
        if cutlass.const_expr(self.two_pass):
            tiles = cute.ceil_div(width, self.tile_elements)
            own = self.scan(mX.iterator + 0, x_offset, rX, first, width, tiles)
            state = self.merged(own, slots, barrier)
            for tile in cutlass.range(tiles, unroll=1):
                start = first + tile * self.tile_elements
                self.load(mX.iterator, x_offset, rX, start, width)
                self.store(
                    lambda i: self.result(to_float32(rX[None, i]), state),
                    mOut.iterator,
                    out_offset,
                    start,
                    in_bounds,
                    width,
                )
        else:
            self.load(mX.iterator, x_offset, rX, first, width)
            thread_max = fragment_max(rX)
            safe = math.finite_or_zero(thread_max)
            rP = cute.make_rmem_tensor(rX.shape, cutlass.Float32)
            sums = []
            # One vector at a time, here and below: otherwise the float32 values of all are in registers at once.
            for i in cutlass.range_constexpr(self.vectors_per_thread):
                rP[None, i].store(math.exp_difference(to_float32(rX[None, i]), safe))
                sums.append(math.tree_sum(elements(rP[None, i].load())))
            state = self.merged(MaxSum(thread_max, math.tree_sum(sums)), slots, barrier)
            if cutlass.const_expr(self.recompute or self.log):
                if cutlass.const_expr(self.recompute and cute.size(rX) * self.dtype.width % 32 == 0):
                    # Otherwise the compiler keeps the float32 values in registers too.
                    fence_operand(words(rX))
                self.store(
                    lambda i: self.result(to_float32(rX[None, i]), state),
                    mOut.iterator,
                    out_offset,
                    first,
                    in_bounds,
                    width,
                )
            else:
                # NaN where the whole row is -inf.
                scale = math.exp_difference(thread_max, state.maximum) * cute.arch.rcp_approx(state.total)
                self.store(lambda i: rP[None, i].load() * scale, mOut.iterator, out_offset, first, in_bounds, width)

    def merged(self, state: MaxSum, slots, barrier) -> MaxSum:
        """The (maximum, sum) of the row, from those of its threads."""
        found = reduce.row_reduce(state, slots, barrier, self.threads_per_row, self.cluster)
        if cutlass.const_expr(self.late_dependents):
            dependent_launch.launch_dependents()
        return found

    @cute.jit
    def load(self, base: cute.Pointer, row_start: cutlass.Int64, rX: cute.Tensor, first, width):
        """Load a thread's vectors of a tile; -inf past the row's end.

        Vectors past the end load the row's start, or nothing, so that no load waits for a branch.
        """
        own = row_start + first
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            offset = i * (self.tile_elements // self.vectors_per_thread)
            if cutlass.const_expr(self.exact):
                load_vector_as(self.priority, base, own + offset, rX[None, i])
            elif cutlass.const_expr(self.predicated):
                load_vector_if(first + offset < width, base, own + offset, rX[None, i], NEGATIVE_INFINITY[self.dtype])
            else:
                inside = own + offset if first + offset < width else row_start
                load_vector_as(self.priority, base, inside, rX[None, i])
        if cutlass.const_expr(not self.exact and not self.predicated):
            for i in cutlass.range_constexpr(self.vectors_per_thread):
                if first + i * (self.tile_elements // self.vectors_per_thread) >= width:
                    rX[None, i].fill(-self.dtype.inf)

    @cute.jit
    def store(self, values, base: cute.Pointer, row_start: cutlass.Int64, first, in_bounds, width):
        """Store a thread's vectors of a tile in the output's type; none past the row's end.

        Args:
            values: from the index of a vector to its float32 values.
        """
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            rOut = cute.make_rmem_tensor(self.vector, self.out_dtype)
            from_float32(values(i), rOut)
            offset = i * (self.tile_elements // self.vectors_per_thread)
            if in_bounds and (cutlass.const_expr(self.exact) or first + offset < width):
                store_vector(rOut, base, row_start + first + offset)

    @cute.jit
    def scan(self, base: cute.Pointer, row_start: cutlass.Int64, rX: cute.Tensor, first, width, tiles) -> MaxSum:
        """The (maximum, sum) of a thread over all tiles of its row."""
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        for tile in cutlass.range(tiles, unroll=1):
            self.load(base, row_start, rX, first + tile * self.tile_elements, width)
            values = to_float32(rX)
            new_max = cute.arch.fmax(row_max, fragment_max(rX))
            safe = math.finite_or_zero(new_max)
            row_sum = row_sum * math.exp_difference(row_max, safe) + math.tree_sum(
                elements(math.exp_difference(values, safe))
            )
            row_max = new_max
        return MaxSum(row_max, row_sum)

    def result(self, values, state: MaxSum):
        """Outputs from inputs and the (maximum, sum) of the row."""
        if self.log:
            return (values - state.maximum) - math.log(state.total)
        return math.exp_difference(values, state.maximum) * cute.arch.rcp_approx(state.total)


def fragment_max(rX: cute.Tensor) -> cutlass.Float32:
    """The maximum of registers of the input's type; NaN is ignored. 16-bit values are compared in pairs."""
    if rX.element_type.width == 32 or cute.size(rX) % 2:
        return math.tree_max(elements(to_float32(rX)))
    kind = "bf16x2" if rX.element_type is cutlass.BFloat16 else "f16x2"
    pairs = words(rX)
    two = cute.make_rmem_tensor(2, rX.element_type)
    words(two)[0] = math.tree_reduce(
        [pairs[i] for i in range(cute.size(pairs))], lambda a, b: math.max_f16x2(a, b, kind)
    )
    return math.tree_max(elements(to_float32(two)))
