# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows for SM90 and later.

A row is read once into registers, and its threads merge one (maximum, sum) each: within a warp by shuffles, within a
block through shared memory, within a cluster by stores into each other's shared memory. Rows longer than what a cluster
holds are read twice, in a loop.

Nothing here is an instruction of one generation: the same class serves SM90 and SM100.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.primitives import math, reduce
from dsl_backend.primitives.accumulators import settle
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import MaxSum
from dsl_backend.softmax.configs import RowConfig

NUMERIC = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


@dataclass(frozen=True, kw_only=True)
class SoftmaxKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype, out_dtype: names of input and output types.
        log: log-softmax.
        config: threads, blocks, registers.
        exact: rows are exactly as wide as what is held: no column is outside.
    """

    dtype: str
    out_dtype: str
    log: bool
    config: RowConfig
    exact: bool


class Softmax:
    """out = softmax(x) or log_softmax(x); x and out [rows, width] with row strides, rows > 0."""

    def __init__(self, key: SoftmaxKey):
        config = key.config
        self.log, self.exact, self.streamed = key.log, key.exact, config.streamed
        self.vector, self.vectors = config.vector, config.vectors
        self.threads_per_row, self.rows_per_block = config.threads_per_row, config.rows_per_block
        self.cluster, self.warps_per_row, self.tile = config.cluster, config.warps_per_row, config.tile
        self.threads, self.resident, self.recompute = config.threads, config.resident, config.recompute
        self.overlap = config.overlap
        self.dtype, self.out_dtype = NUMERIC[key.dtype], NUMERIC[key.out_dtype]

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(x, out).launch(
            grid=(cute.ceil_div(x.shape[0], self.rows_per_block), self.cluster, 1),
            block=(self.threads, 1, 1),
            cluster=(1, self.cluster, 1) if cutlass.const_expr(self.cluster > 1) else None,
            min_blocks_per_mp=self.resident,
            # Percent: states are all that is there. Without it CuTe DSL asks a GPU, which need not be one's own.
            preferred_smem_carveout=25,
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        slots, barrier = self.shared()
        if cutlass.const_expr(self.cluster > 1):
            reduce.open_exchange(barrier)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        rows, width = mX.shape
        thread = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * self.rows_per_block + thread // self.threads_per_row
        source, wanted = row, True
        if cutlass.const_expr(self.rows_per_block > 1):
            # Threads of a row that is not there follow the last one: all of a warp take part in shuffles.
            source, wanted = cutlass.min(row, rows - 1), row < rows
        from_x = cutlass.Int64(source) * mX.stride[0]
        to_out = cutlass.Int64(row) * mOut.stride[0]
        first = (cute.arch.block_idx()[1] * self.threads_per_row + thread % self.threads_per_row) * self.vector
        rX = cute.make_rmem_tensor((self.vector, self.vectors), self.dtype)
        if cutlass.const_expr(self.streamed):
            tiles = cute.ceil_div(width, self.tile)
            own = self.scan(mX.iterator + 0, from_x, rX, first, width, tiles)
            state = self.merged(own, slots, barrier)
            for tile in cutlass.range(tiles, unroll=1):
                start = first + tile * self.tile
                self.load(mX.iterator, from_x, rX, start, width)
                self.store(
                    lambda i: self.result(widened(rX[None, i]), state), mOut.iterator, to_out, start, wanted, width
                )
        else:
            self.load(mX.iterator, from_x, rX, first, width)
            maximum = largest(rX)
            safe = math.finite_or_zero(maximum)
            weights = cute.make_rmem_tensor(rX.shape, cutlass.Float32)
            totals = []
            # One vector after the other here and below, or the wider values of all would be held at once.
            for i in cutlass.range_constexpr(self.vectors):
                weights[None, i].store(math.weight(widened(rX[None, i]), safe))
                totals.append(math.total(elements(weights[None, i].load())))
            state = self.merged(MaxSum(maximum, math.total(totals)), slots, barrier)
            if cutlass.const_expr(self.recompute or self.log):
                if cutlass.const_expr(self.recompute and cute.size(rX) * self.dtype.width % 32 == 0):
                    # Or the compiler would hold the wider values as well.
                    settle(words(rX))
                self.store(
                    lambda i: self.result(widened(rX[None, i]), state), mOut.iterator, to_out, first, wanted, width
                )
            else:
                # NaN where the whole row is -inf.
                factor = math.weight(maximum, state.maximum) * cute.arch.rcp_approx(state.total)
                self.store(lambda i: weights[None, i].load() * factor, mOut.iterator, to_out, first, wanted, width)

    def shared(self):
        """Slots for the states of warps, and the mbarrier of their exchange; None where they are not needed."""
        if self.warps_per_row == 1 and self.cluster == 1:
            return None, None
        allocator = cutlass.utils.SmemAllocator()
        barrier = allocator.allocate_array(cutlass.Int64, 1) if self.cluster > 1 else None
        layout = reduce.slots_layout(self.rows_per_block, self.warps_per_row, self.cluster)
        return allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=8), barrier

    def merged(self, state: MaxSum, slots, barrier) -> MaxSum:
        """The row's state, from each thread's."""
        state = reduce.in_warp(state, min(self.threads_per_row, reduce.WARP))
        if self.cluster > 1:
            return reduce.in_cluster(state, slots, barrier, self.warps_per_row, self.cluster)
        return state if self.warps_per_row == 1 else reduce.in_block(state, slots, self.warps_per_row)

    @cute.jit
    def load(self, base: cute.Pointer, row_start: cutlass.Int64, rX: cute.Tensor, first, width):
        """A thread's vectors of a tile; -inf past the row's end.

        What lies past it is loaded from the row's start, so that no load waits for a branch.
        """
        own = row_start + first
        for i in cutlass.range_constexpr(self.vectors):
            offset = i * (self.tile // self.vectors)
            if cutlass.const_expr(self.exact):
                load_vector(base, own + offset, rX[None, i])
            else:
                load_vector(base, own + offset if first + offset < width else row_start, rX[None, i])
        if cutlass.const_expr(not self.exact):
            for i in cutlass.range_constexpr(self.vectors):
                if first + i * (self.tile // self.vectors) >= width:
                    rX[None, i].fill(-self.dtype.inf)

    @cute.jit
    def store(self, values, base: cute.Pointer, row_start: cutlass.Int64, first, wanted, width):
        """A thread's vectors of a tile, as the output's type, where there are such columns.

        Args:
            values: from the number of a vector to its float32.
        """
        for i in cutlass.range_constexpr(self.vectors):
            rOut = cute.make_rmem_tensor(self.vector, self.out_dtype)
            narrow(values(i), rOut)
            offset = i * (self.tile // self.vectors)
            if wanted and (cutlass.const_expr(self.exact) or first + offset < width):
                store_vector(rOut, base, row_start + first + offset)

    @cute.jit
    def scan(self, base: cute.Pointer, row_start: cutlass.Int64, rX: cute.Tensor, first, width, tiles) -> MaxSum:
        """A thread's state over all tiles of its row."""
        maximum, total = -cutlass.Float32.inf, cutlass.Float32(0.0)
        for tile in cutlass.range(tiles, unroll=1):
            self.load(base, row_start, rX, first + tile * self.tile, width)
            values = widened(rX)
            larger = cute.arch.fmax(maximum, largest(rX))
            safe = math.finite_or_zero(larger)
            total = total * math.weight(maximum, safe) + math.total(elements(math.weight(values, safe)))
            maximum = larger
        return MaxSum(maximum, total)

    def result(self, values, state: MaxSum):
        """Outputs from inputs and the row's state."""
        if self.log:
            return (values - state.maximum) - math.natural_log(state.total)
        return math.weight(values, state.maximum) * cute.arch.rcp_approx(state.total)


def largest(held: cute.Tensor) -> cutlass.Float32:
    """The maximum of registers of the input's type, NaN left out; 16-bit ones are compared in pairs, as they are."""
    if held.element_type.width == 32 or cute.size(held) % 2:
        return math.largest(elements(widened(held)))
    kind = "bf16x2" if held.element_type is cutlass.BFloat16 else "f16x2"
    pairs = words(held)
    two = cute.make_rmem_tensor(2, held.element_type)
    words(two)[0] = math.tree([pairs[i] for i in range(cute.size(pairs))], lambda a, b: math.larger_pair(a, b, kind))
    return math.largest(elements(widened(two)))


def widened(held: cute.Tensor) -> cute.TensorSSA:
    """Registers of the input's type as float32.

    libNVVM does not compile bfloat16 vectors of an odd length for sm_100a (CuTe DSL 4.6.0): those go one by one. Of an
    even length it takes three instructions for two, which a shift and a mask do in two.
    """
    wide = cute.make_rmem_tensor(held.shape, cutlass.Float32)
    if cute.size(held) % 2:
        for i in range(cute.size(held)):
            wide[i] = held[i].to(cutlass.Float32)
    elif held.element_type is cutlass.BFloat16:
        pairs, halves = words(held), words(wide)
        for i in range(cute.size(pairs)):
            halves[2 * i] = pairs[i] << cutlass.Uint32(16)
            halves[2 * i + 1] = pairs[i] & cutlass.Uint32(0xFFFF0000)
    else:
        wide.store(held.load().to(cutlass.Float32))
    return wide.load()


def words(held: cute.Tensor) -> cute.Tensor:
    """The same registers as 32 bits each; 16-bit ones are an even number."""
    flat = cute.make_tensor(held.iterator, cute.make_layout(cute.size(held)))
    return cute.recast_tensor(flat, cutlass.Uint32)


def narrow(values: cute.TensorSSA, held: cute.Tensor):
    """Float32 into registers of the output's type; see `widened`."""
    if cute.size(held) % 2 == 0:
        held.store(values.to(held.element_type))
    else:
        for i, value in enumerate(elements(values)):
            held[i] = value.to(held.element_type)


def elements(values: cute.TensorSSA) -> list:
    """A register tensor's elements, one by one."""
    held = cute.make_rmem_tensor(values.shape, cutlass.Float32)
    held.store(values)
    return [held[i] for i in range(cute.size(held))]
