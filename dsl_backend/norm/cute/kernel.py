# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of rows for SM90 and SM100 in one pass.

A row is read once into registers. Each thread sums its squares, and these sums are added within a warp by shuffles,
within a CTA through shared memory, and within a cluster by stores to distributed shared memory. A scale for each row
needs no reduction of its own: max|y| is max|z * weight| times the row's factor, which is known afterwards, so that sum
and maximum travel together. Neighbouring lanes of a warp have the columns of a group, so that a scale for each group
needs shuffles alone.

The same instructions serve SM90 and SM100.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.norm.configs import NormConfig, lanes_of_group
from dsl_backend.norm.spec import FP8_MAX, MIN_SCALE, NormTensors, Scaling
from dsl_backend.primitives import dependent_launch, math, reduce
from dsl_backend.primitives.copy import load_vector_as, store_vector
from dsl_backend.primitives.fragment import elements, from_float32, to_e4m3, to_float32
from dsl_backend.primitives.reduce import Sum, SumMax
from dsl_backend.quant.format import GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP

NUMERIC = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Uint8,
}


@dataclass(frozen=True, kw_only=True)
class NormKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype, out_dtype, weight_dtype: names of the types of inputs, output and weight; None without a weight.
        residual: there is a residual.
        weight_offset: added to the weight.
        scaling: of an 8-bit output.
        config: threads, CTAs, registers.
        exact: rows are exactly as wide as the registers that hold them, so no column is out of bounds.
    """

    dtype: str
    out_dtype: str
    weight_dtype: str | None
    residual: bool
    weight_offset: float
    scaling: Scaling
    config: NormConfig
    exact: bool


class RMSNorm:
    """Writes NormTensors' outputs from its inputs; matrices [rows, width] with row strides, rows > 0."""

    def __init__(self, key: NormKey):
        config = key.config
        self.config, self.exact, self.residual = config, key.exact, key.residual
        self.scaling, self.weight_offset = key.scaling, key.weight_offset
        self.vector, self.vectors_per_thread = config.vector, config.vectors_per_thread
        self.dtype, self.out_dtype = NUMERIC[key.dtype], NUMERIC[key.out_dtype]
        self.weight_dtype = key.weight_dtype and NUMERIC[key.weight_dtype]
        self.priority = "evict_last" if config.evict_last else ""
        self.state = SumMax if key.scaling is Scaling.TOKEN else Sum
        # Between the vectors of a thread.
        self.step = config.tile_elements // config.vectors_per_thread

    @cute.jit
    def __call__(self, mX, mResidual, mWeight, mScale, mOut, mResidualOut, mScaleOut, eps: cutlass.Float32, stream):
        config = self.config
        args = NormTensors(mX, mResidual, mWeight, mScale, mOut, mResidualOut, mScaleOut)
        self.kernel(args, eps).launch(
            grid=(cute.ceil_div(mX.shape[0], config.rows_per_cta), config.cluster, 1),
            block=(config.threads, 1, 1),
            cluster=(1, config.cluster, 1) if cutlass.const_expr(config.cluster > 1) else None,
            min_blocks_per_mp=config.ctas_per_sm,
            # In percent; a few bytes are used. Without it CuTe DSL asks the driver of a GPU, and there may be none.
            preferred_smem_carveout=25,
            stream=stream,
            use_pdl=config.use_pdl,
        )

    @cute.kernel
    def kernel(self, args: NormTensors, eps: cutlass.Float32):
        config = self.config
        buffer, mbar = reduce.row_smem(self.state, config.rows_per_cta, config.warps_per_row, config.cluster)
        if cutlass.const_expr(config.cluster > 1):
            reduce.init_cluster_reduce(mbar)
        rows, width = args.x.shape
        thread = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * config.rows_per_cta + thread // config.threads_per_row
        first = (cute.arch.block_idx()[1] * config.threads_per_row + thread % config.threads_per_row) * self.vector
        # Threads beyond the last row, or with no column of it, still take part in shuffles and barriers.
        in_rows = row < rows if cutlass.const_expr(config.rows_per_cta > 1) else True
        active = in_rows if cutlass.const_expr(self.exact) else in_rows and first < width
        rW = None
        if cutlass.const_expr(self.weight_dtype is not None):
            # No kernel of a step writes weights: they need not wait for the one before.
            rW = self.load(args.weight, cutlass.Int64(0), first, width, first < width)
        if cutlass.const_expr(config.use_pdl):
            dependent_launch.launch_dependents()
            dependent_launch.wait()
        rZ = self.load(args.x, row_start(args.x, row), first, width, active, self.priority)
        if cutlass.const_expr(self.residual):
            rR = self.load(args.residual, row_start(args.residual, row), first, width, active, self.priority)
            self.add(rZ, rR)
            residual_start = row_start(args.residual_out, row)
            for i in cutlass.range_constexpr(self.vectors_per_thread):
                if in_rows and self.in_columns(i, first, width):
                    store_vector(rZ[None, i], args.residual_out.iterator, residual_start + first + i * self.step)
        if cutlass.const_expr(not self.exact):
            for i in cutlass.range_constexpr(self.vectors_per_thread):
                if first + i * self.step >= width:
                    rZ[None, i].fill(self.dtype(0.0))
        # One vector at a time, here and below: otherwise the float32 values of all are in registers at once.
        own = self.state.tree([self.state_of(rZ, rW, i) for i in range(self.vectors_per_thread)])
        state = reduce.row_reduce(own, buffer, mbar, config.threads_per_row, config.cluster)
        factor = cute.math.rsqrt(state.total / cutlass.Float32(width) + eps, fastmath=True)
        if cutlass.const_expr(self.scaling is Scaling.TENSOR):
            inverse = cutlass.Float32(1.0) / args.scale[0]
        if cutlass.const_expr(self.scaling is Scaling.TOKEN):
            # NaN where the factor is.
            scale = math.fmax_nan(state.maximum * factor / cutlass.Float32(FP8_MAX), MIN_SCALE)
            inverse = cutlass.Float32(1.0) / scale
            if in_rows and first == 0:
                args.scale_out[row] = scale
        out_start = row_start(args.out, row)
        for i in cutlass.range_constexpr(self.vectors_per_thread):
            values = self.weighted(rZ, rW, i) * factor
            if cutlass.const_expr(self.scaling is Scaling.GROUP):
                scale = self.scale_of_group(values)
                inverse = cutlass.Float32(1.0) / scale
                column = first + i * self.step
                if in_rows and self.in_columns(i, first, width) and column % GROUP == 0:
                    args.scale_out[row, column // GROUP] = scale
            if cutlass.const_expr(self.scaling is Scaling.NONE):
                rOut = cute.make_rmem_tensor(self.vector, self.out_dtype)
                from_float32(values, rOut)
            else:
                rOut = to_e4m3(values * inverse)
            if in_rows and self.in_columns(i, first, width):
                store_vector(rOut, args.out.iterator, out_start + first + i * self.step)

    def in_columns(self, i: int, first, width):
        """Whether vector i of a thread is within its row."""
        return True if self.exact else first + i * self.step < width

    @cute.jit
    def load(
        self, tensor: cute.Tensor, start: cutlass.Int64, first, width, active, priority: cutlass.Constexpr[str] = ""
    ) -> cute.Tensor:
        """Load a thread's vectors of a row that begins at `start`; zeros where the thread is not active.

        Vectors past the end load the thread's first one, so that no load waits for a branch of its own. Another
        thread's would be a data race where the output is written in place.
        """
        fragment = cute.make_rmem_tensor((self.vector, self.vectors_per_thread), tensor.element_type)
        if cutlass.const_expr(active is not True):
            fragment.fill(tensor.element_type(0.0))
        if active:
            for i in cutlass.range_constexpr(self.vectors_per_thread):
                load_vector_as(priority, tensor.iterator, self.offset(start, first, width, i), fragment[None, i])
        return fragment

    @cute.jit
    def offset(self, start: cutlass.Int64, first, width, i: cutlass.Constexpr[int]) -> cutlass.Int64:
        """Of vector i of a thread, or of its first one where that is past the row's end."""
        offset = start + first + i * self.step
        if cutlass.const_expr(not self.exact):
            offset = offset if first + i * self.step < width else start + first
        return offset

    def add(self, rZ: cute.Tensor, rR: cute.Tensor):
        """Add the residual in float32, rounded to the input's type."""
        for i in range(self.vectors_per_thread):
            from_float32(to_float32(rZ[None, i]) + to_float32(rR[None, i]), rZ[None, i])

    def state_of(self, rZ: cute.Tensor, rW, i: int):
        """The state of vector i: its sum of squares, and with a scale for each row max|z * weight|."""
        total = math.tree_sum([value * value for value in elements(to_float32(rZ[None, i]))])
        if self.scaling is not Scaling.TOKEN:
            return Sum(total)
        return SumMax(total, math.tree_max([absolute(value) for value in elements(self.weighted(rZ, rW, i))]))

    def scale_of_group(self, values: cute.TensorSSA) -> cutlass.Float32:
        """The scale of the 128 columns of which a thread has these; NaN where one of them is. All lanes call it."""
        own = math.tree_reduce([absolute(value) for value in elements(values)], math.fmax_nan)
        largest = cute.arch.warp_reduction(own, math.fmax_nan, threads_in_group=lanes_of_group(self.vector))
        return math.fmax_nan(largest, LEAST_OF_GROUP) / cutlass.Float32(FP8_MAX)

    def weighted(self, rZ: cute.Tensor, rW, i: int) -> cute.TensorSSA:
        """Vector i times its weight, float32."""
        values = to_float32(rZ[None, i])
        if rW is None:
            return values
        weight = to_float32(rW[None, i])
        return values * (weight + self.weight_offset if self.weight_offset else weight)


def row_start(tensor: cute.Tensor, row: cutlass.Int32) -> cutlass.Int64:
    """Offset of a row's first element; 64 bits."""
    return cutlass.Int64(row) * tensor.stride[0]


def absolute(value: cutlass.Float32) -> cutlass.Float32:
    return cute.arch.fmax(value, -value)
