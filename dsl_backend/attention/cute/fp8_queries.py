# SPDX-License-Identifier: Apache-2.0
"""Queries in e4m3: threads load rows and quantize each by its own maximum; rows that are in e4m3 are copied."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import MlaKeyLoads
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.rows import QUAD
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, q_head_of
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.math import f32_to_e4m3, max_f16x2, tree_reduce

LARGEST = 448.0  # of e4m3
LEAST_MAXIMUM = 2.0**-100  # of a row of Q: its scale and the scale's inverse are finite
MAGNITUDES = 0x7FFF7FFF  # of two elements of 16 bits: without their signs
VECTOR = 8  # elements of Q that a thread loads at once: 16 bytes


def pair_kind(dtype: Any) -> str:
    """How instructions name two elements in a word."""
    return "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"


def largest_pair(values: cute.Tensor) -> cutlass.Uint32:
    """Two of the magnitudes of values of 16 bits, one of which is the largest. NaN is ignored, if not all are NaN."""
    flat = cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
    words, kind = cute.recast_tensor(flat, cutlass.Uint32), pair_kind(values.element_type)
    every = [words[i] for i in range(cute.size(words))]
    return tree_reduce(every, lambda a, b: max_f16x2(a, b, f"xorsign.abs.{kind}")) & MAGNITUDES


def halves_of(pair: cutlass.Uint32, dtype: Any) -> tuple[cutlass.Float32, cutlass.Float32]:
    """The two elements of a word."""
    elements = cute.make_rmem_tensor(2, dtype)
    cute.recast_tensor(elements, cutlass.Uint32)[0] = pair
    return elements[0].to(cutlass.Float32), elements[1].to(cutlass.Float32)


class Queries:
    """The rows of Q of a work tile, from global memory to e4m3 in shared memory; `lanes` threads have a row.

    Args:
        kernel: the `TiledKernel`, or the `TiledMla`.
        mQ: as it is in global memory.
        rows: of a work tile, or as many of them, from `first_row` on.
        threads: that take part; thread: which of them this is.
        ahead: rows that a thread loads before it quantizes the first of them: Q comes from memory, not from L2. They
            need registers.
    """

    def __init__(
        self,
        kernel: Any,
        mQ: cute.Tensor,
        rows: int,
        thread: cutlass.Int32,
        threads: int,
        lanes: int = QUAD,
        ahead: int = 1,
        first_row: cutlass.Int32 | int = 0,
    ) -> None:
        self.kernel, self.key, self.mQ, self.rows, self.lanes = kernel, kernel.key, mQ, rows, lanes
        self.thread, self.rows_at_once, self.ahead = thread, threads // lanes, ahead
        self.first_row = first_row
        self.dtype: Any = kernel.dtype  # of queries in global memory

    @cute.jit
    def quantize(self, work: WorkTile, sQ_bytes: cute.Tensor, sScale: cute.Tensor):
        """Store Q, sQ_bytes [row, column], and the scale of each row, sScale [row]; zeros for rows that do not exist.

        Waits for nothing, and nothing makes it visible to MMAs: a proxy fence and a barrier follow.
        """
        lane = self.thread % self.lanes
        vectors = cutlass.const_expr(self.kernel.dims // VECTOR // self.lanes)
        # A loop: two rounds of MLA's rows at once spill 160 bytes with SM100's 168 registers (ptxas 13.0).
        for first in cutlass.range(0, self.rows, self.rows_at_once * self.ahead, unroll=1):
            values = cute.make_rmem_tensor((VECTOR, vectors, self.ahead), self.dtype)
            values.fill(self.dtype(0))
            for i in cutlass.range_constexpr(self.ahead):
                row = self.first_row + first + i * self.rows_at_once + self.thread // self.lanes
                if row < work.num_rows:
                    self.load_row(work, row, lane, values[None, None, i])
            for i in cutlass.range_constexpr(self.ahead):
                row = self.first_row + first + i * self.rows_at_once + self.thread // self.lanes
                self.store_row(row, lane, values[None, None, i], sQ_bytes, sScale)

    @cute.jit
    def load_row(self, work: WorkTile, row: cutlass.Int32, lane: cutlass.Int32, values: cute.Tensor):
        """Load a thread's part of a row of Q: a vector of each `lanes`."""
        token = work.q_offset + row // self.key.pack_gqa
        head = q_head_of(self.key, work.head_block, row)
        offset = cutlass.Int64(token) * self.mQ.stride[0] + head * self.mQ.stride[1]
        for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
            load_vector(self.mQ.iterator, offset + (lane + self.lanes * i) * VECTOR, values[None, i])

    @cute.jit
    def store_row(
        self,
        row: cutlass.Int32,
        lane: cutlass.Int32,
        values: cute.Tensor,
        sQ_bytes: cute.Tensor,
        sScale: cute.Tensor,
    ):
        """Quantize and store a thread's part of a row; values: (VECTOR, vectors)."""
        self.store_scaled(row, lane, self.row_max(largest_pair(values)), values, sQ_bytes, sScale)

    @cute.jit
    def store_scaled(
        self,
        row: cutlass.Int32,
        lane: cutlass.Int32,
        row_max: cutlass.Float32,
        values: cute.Tensor,
        sQ_bytes: cute.Tensor,
        sScale: cute.Tensor,
    ):
        inverse, words = LARGEST / row_max, cute.make_rmem_tensor(2, cutlass.Int32)
        for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
            for half in cutlass.range_constexpr(2):
                four = [values[half * 4 + j, i].to(cutlass.Float32) for j in range(4)]
                words[half] = f32_to_e4m3(*self.products(four, inverse))
            self.store_vector(row, lane + self.lanes * i, cute.recast_tensor(words, cutlass.Uint8), sQ_bytes)
        if lane == 0:
            sScale[row] = row_max * (1.0 / LARGEST)

    def row_max(self, pair: cutlass.Uint32) -> cutlass.Float32:
        """The largest magnitude of a row, and at least LEAST_MAXIMUM; `pair`: of `largest_pair` of the lane's part."""
        kind = pair_kind(self.dtype)
        for bit in range(self.lanes.bit_length() - 1):
            pair = max_f16x2(pair, cute.arch.shuffle_sync_bfly(pair, 1 << bit), kind)
        return cute.arch.fmax(cutlass.Float32(LEAST_MAXIMUM), cute.arch.fmax(*halves_of(pair, self.dtype)))

    def products(self, values: list[cutlass.Float32], factor: cutlass.Float32) -> list[cutlass.Float32]:
        return [value * factor for value in values]

    def store_vector(self, row: cutlass.Int32, index: cutlass.Int32, values: cute.Tensor, sQ_bytes: cute.Tensor):
        target = cute.local_tile(sQ_bytes, (1, VECTOR), (row, index))
        cute.autovec_copy(values, cute.group_modes(target, 0, 2))


class MlaQueries(Queries):
    """The same of absorbed MLA, whose rope part is a tensor of its own."""

    def __init__(self, kernel: Any, loads: MlaKeyLoads, thread: cutlass.Int32, threads: int) -> None:
        super().__init__(kernel, loads.mQ, ROWS, thread, threads)
        self.mQRope = loads.mQRope

    @cute.jit
    def load_row(self, work: WorkTile, row: cutlass.Int32, lane: cutlass.Int32, values: cute.Tensor):
        token = work.q_offset + row // self.key.pack_gqa
        head = q_head_of(self.key, work.head_block, row)
        latent = cutlass.const_expr(self.kernel.dims_v // VECTOR // QUAD)
        for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
            mQ, first = (self.mQ, 0) if cutlass.const_expr(i < latent) else (self.mQRope, latent)
            offset = cutlass.Int64(token) * mQ.stride[0] + head * mQ.stride[1]
            load_vector(mQ.iterator, offset + (lane + QUAD * (i - first)) * VECTOR, values[None, i])


class QuantizedMlaQueries(MlaQueries):
    """The same where queries arrive in e4m3: they are copied. Their scale is a factor of the softmax scale."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dtype = cutlass.Uint8

    @cute.jit
    def store_row(
        self,
        row: cutlass.Int32,
        lane: cutlass.Int32,
        values: cute.Tensor,
        sQ_bytes: cute.Tensor,
        sScale: cute.Tensor,
    ):
        for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
            self.store_vector(row, lane + self.lanes * i, values[None, i], sQ_bytes)
        if lane == 0:
            sScale[row] = 1.0


def mla_queries(kernel: Any, *args: Any) -> MlaQueries:
    """What loads a kernel's queries, of the dtype in which they arrive; arguments as of `MlaQueries`."""
    return (QuantizedMlaQueries if kernel.key.fp8_q else MlaQueries)(kernel, *args)
