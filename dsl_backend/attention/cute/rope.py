# SPDX-License-Identifier: Apache-2.0
"""Norms of heads, rotary embedding and cache write in one launch.

Adjacent lanes of a warp have one head of one token: a query, a key or a value. A thread has 16 elements of it, chosen
so that it has both elements of each pair that is rotated: no element is exchanged. The sum of squares is exchanged
between a head's lanes. So a head's bits depend on nothing beside it.

The kernel has no instruction that only one of SM90 and SM100 has, so the same class serves both.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.tiles import NUMERIC, VECTOR
from dsl_backend.attention.cute.write_kv import F32_TO_FP8, offset
from dsl_backend.attention.rope_dispatch import PAIR
from dsl_backend.attention.rope_spec import RopeStyle, RopeTensors
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import VECTOR_BYTES
from dsl_backend.primitives.fragment import from_float32, to_float32
from dsl_backend.primitives.math import quotient, tree_sum
from dsl_backend.primitives.reduce import Sum, warp_reduce
from dsl_backend.quant.format import KVFormat
from dsl_backend.rows import power_of_2

# Of a CTA. With one token and 48 heads of 128 there are three CTAs, each on an SM of its own.
THREADS = 128


@dataclass(frozen=True, kw_only=True)
class RopeKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype: of queries, keys, values and weights; the cache's too, unless fp8. table_dtype: of cosines and sines.
        kv: format of the cache. page_size: tokens of its pages.
        heads_q, heads_kv: of the layer. dim, dim_v: elements of a query or key, and of a value.
        rotary_dim: elements of a head that are rotated. style: which of them form pairs.
        norm: each query and key head is normalised, by a weight plus weight_offset.
    """

    dtype: str
    table_dtype: str
    kv: KVFormat
    page_size: int
    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int
    rotary_dim: int
    style: RopeStyle
    norm: bool
    weight_offset: float


class RopeWrite:
    """What the kernels for heads and for MLA share: how a thread rotates, normalises and stores sixteen elements.

    A key has at least dtype, table_dtype, kv, page_size and style.
    """

    def __init__(self, key):
        self.key = key
        self.dtype, self.kv = NUMERIC[key.dtype], key.kv
        self.table_dtype = {**NUMERIC, "float32": cutlass.Float32}[key.table_dtype]

    @cute.jit
    def rotate(self, rY: cute.Tensor, rTable: cute.Tensor):
        """Rotate a thread's eight pairs."""
        rAngle = cute.make_rmem_tensor((VECTOR, 2), cutlass.Float32)
        rAngle.store(to_float32(rTable))
        for i in cutlass.range_constexpr(VECTOR):
            # Elements in the order of rY, whose second vector begins with the ninth.
            one, other = (i, i + VECTOR) if self.key.style is RopeStyle.NEOX else (2 * i, 2 * i + 1)
            a, b, cos, sin = rY[one], rY[other], rAngle[i], rAngle[i + VECTOR]
            rY[one] = a * cos - b * sin
            rY[other] = b * cos + a * sin

    @cute.jit
    def store(self, rY: cute.Tensor, row: cutlass.Int64, first: cutlass.Int32, second: cutlass.Int32):
        """Store a thread's elements in 16 bits, in the row that begins at an address."""
        rOut = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        from_float32(rY.load(), rOut)
        cute.autovec_copy(rOut[None, 0], vector(row, self.dtype, first, VECTOR))
        cute.autovec_copy(rOut[None, 1], vector(row, self.dtype, second, VECTOR))

    @cute.jit
    def store_cached(
        self,
        rY: cute.Tensor,
        row: cutlass.Int64,
        divisor: cutlass.Float32,
        first: cutlass.Int32,
        second: cutlass.Int32,
    ):
        """Store a thread's elements in the cache's format, in the row that begins at an address."""
        if cutlass.const_expr(self.kv.fp8):
            rY.store(rY.load() / divisor)
            words = cute.make_rmem_tensor(PAIR // 4, cutlass.Int32)
            for i in cutlass.range_constexpr(PAIR // 4):
                words[i] = F32_TO_FP8[self.kv](*(rY[4 * i + j] for j in range(4)))
            stored = cute.make_tensor(cute.recast_tensor(words, cutlass.Uint8).iterator, cute.make_layout((VECTOR, 2)))
            cute.autovec_copy(stored[None, 0], vector(row, cutlass.Uint8, first, VECTOR))
            cute.autovec_copy(stored[None, 1], vector(row, cutlass.Uint8, second, VECTOR))
        else:
            self.store(rY, row, first, second)

    def page_of(self, slot: cutlass.Int64) -> tuple[cutlass.Int64, cutlass.Int64]:
        """The page of a slot and its token there; a page beyond the last one where the slot is negative (padding)."""
        # Unsigned: division by a page size that is a power of two is a shift.
        page = cutlass.Int64(cutlass.Uint64(slot) // self.key.page_size)
        return page, cutlass.Int64(cutlass.Uint64(slot) % self.key.page_size)


class RopeWriteKV(RopeWrite):
    """Writes RopeTensors' outputs from its inputs; there is at least one token."""

    def __init__(self, key: RopeKey):
        super().__init__(key)
        self.heads_q, self.heads_kv, self.dim, self.dim_v = key.heads_q, key.heads_kv, key.dim, key.dim_v
        self.heads = key.heads_q + 2 * key.heads_kv  # of a token
        self.lanes = power_of_2(max(key.dim, key.dim_v) // PAIR)  # of a head
        self.cta_heads = THREADS // self.lanes

    @cute.jit
    def __call__(self, tensors: RopeTensors, q: cute.Tensor, eps: cutlass.Float32, stream):
        """`q` is tensors.q once more: CuTe DSL (4.8) finds the stream only by a tensor that no tuple holds."""
        self.kernel(tensors, eps).launch(
            grid=(cute.ceil_div(tensors.positions.shape[0] * self.heads, self.cta_heads), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tensors: RopeTensors, eps: cutlass.Float32):
        thread = cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        number = cute.arch.block_idx()[0] * self.cta_heads + thread // self.lanes
        token = quotient(number, cutlass.Int32(self.heads))
        head = number - token * self.heads
        is_query, is_value = head < self.heads_q, head >= self.heads_q + self.heads_kv
        head_kv = head - self.heads_q
        head_kv = head_kv - self.heads_kv if is_value else head_kv
        elements = self.dim_v if is_value else cutlass.Int32(self.dim)
        active = token < tensors.positions.shape[0] and lane * PAIR < elements
        rotates = not is_value and lane * PAIR < self.key.rotary_dim
        first, second = lane * PAIR, lane * PAIR + VECTOR
        if cutlass.const_expr(self.key.style is RopeStyle.NEOX):
            first = lane * VECTOR if rotates else first
            second = first + self.key.rotary_dim // 2 if rotates else second

        rW = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        if cutlass.const_expr(self.key.norm):
            # No kernel of a step writes weights: they need not wait for the one before.
            rW.fill(self.dtype(0.0))
            if active and not is_value:
                weight = tensors.k_weight.iterator.toint()
                weight = tensors.q_weight.iterator.toint() if is_query else weight
                load(weight, self.dtype, first, rW[None, 0])
                load(weight, self.dtype, second, rW[None, 1])
        # The attention kernel may start on free SMs; it waits for the end of this one.
        dependent_launch.launch_dependents()
        dependent_launch.wait()

        rX = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        rX.fill(self.dtype(0.0))
        slot, divisor = cutlass.Int64(-1), cutlass.Float32(1.0)
        if active:
            row = address(tensors.value, (token, head_kv)) if is_value else address(tensors.key, (token, head_kv))
            row = address(tensors.q, (token, head)) if is_query else row
            load(row, self.dtype, first, rX[None, 0])
            load(row, self.dtype, second, rX[None, 1])
            if not is_query and token < tensors.slots.shape[0]:
                slot = tensors.slots[token]
                if cutlass.const_expr(self.kv.fp8):
                    divisor = tensors.v_scale[head_kv] if is_value else tensors.k_scale[head_kv]
        rTable = cute.make_rmem_tensor((VECTOR, 2), self.table_dtype)
        rTable.fill(self.table_dtype(0.0))
        if active and rotates:
            position = tensors.positions[token]
            position = position if cutlass.Uint64(position) < cutlass.Uint64(tensors.cos_sin.shape[0]) else position * 0
            row = address(tensors.cos_sin, (position,))
            load(row, self.table_dtype, lane * VECTOR, rTable[None, 0])
            load(row, self.table_dtype, lane * VECTOR + self.key.rotary_dim // 2, rTable[None, 1])

        rY = cute.make_rmem_tensor((VECTOR, 2), cutlass.Float32)
        rY.store(to_float32(rX))
        if cutlass.const_expr(self.key.norm):
            self.normalise(rY, rW, is_value, eps)
        if rotates:
            self.rotate(rY, rTable)
        if active:
            if is_query:
                row = address(tensors.q_out, (token, head))
                self.store(rY, row, first, second)
            else:
                self.write(tensors, rY, slot, divisor, is_value, head_kv, first, second)

    @cute.jit
    def normalise(self, rY: cute.Tensor, rW: cute.Tensor, is_value, eps: cutlass.Float32):
        """RMSNorm of a head that its lanes hold; values are left. All lanes of the warp call it."""
        factor = rms_factor(rY, self.dim, self.lanes, eps)
        if not is_value:
            weight = to_float32(rW) + cutlass.Float32(self.key.weight_offset)
            rY.store(rY.load() * weight * factor)

    @cute.jit
    def write(
        self,
        tensors: RopeTensors,
        rY: cute.Tensor,
        slot: cutlass.Int64,
        divisor: cutlass.Float32,
        is_value,
        head: cutlass.Int32,
        first: cutlass.Int32,
        second: cutlass.Int32,
    ):
        """Store a key's or value's elements at a slot of the cache, if there is such a slot."""
        page, inner = self.page_of(slot)
        if cutlass.Uint64(page) < cutlass.Uint64(tensors.key_cache.shape[0]):
            row = address(tensors.key_cache, (page, inner, head))
            row = address(tensors.value_cache, (page, inner, head)) if is_value else row
            self.store_cached(rY, row, divisor, first, second)


@cute.jit
def rms_factor(rY: cute.Tensor, dim: cutlass.Constexpr[int], lanes: cutlass.Constexpr[int], eps: cutlass.Float32):
    """1 / the root of the mean square of a row that its lanes hold. All lanes of the warp call it."""
    squares = tree_sum([rY[i] * rY[i] for i in range(PAIR)])
    total = warp_reduce(Sum(squares), lanes).total
    return cute.math.rsqrt(total / cutlass.Float32(dim) + eps, fastmath=True)


def address(tensor: cute.Tensor, coord: tuple) -> cutlass.Int64:
    """Address of the row of a tensor at a coordinate, which has no last mode."""
    return tensor.iterator.toint() + offset(coord, tensor.stride) * (tensor.element_type.width // 8)


def vector(row: cutlass.Int64, dtype: type[cutlass.Numeric], column: cutlass.Int32, elements: int) -> cute.Tensor:
    """View adjacent elements of the row that begins at an address as one vector access."""
    size = dtype.width // 8
    pointer = cute.make_ptr(
        dtype, row + cutlass.Int64(column) * size, cute.AddressSpace.gmem, assumed_align=elements * size
    )
    return cute.make_tensor(pointer, cute.make_layout(elements))


@cute.jit
def load(row: cutlass.Int64, dtype: cutlass.Constexpr, column: cutlass.Int32, fragment: cute.Tensor):
    """Load eight elements of the row that begins at an address, in accesses of up to 16 bytes."""
    elements = cutlass.const_expr(min(VECTOR, VECTOR_BYTES * 8 // dtype.width))
    for i in cutlass.range_constexpr(VECTOR // elements):
        part = cute.make_tensor(fragment.iterator + i * elements, cute.make_layout(elements))
        cute.autovec_copy(vector(row, dtype, column + i * elements, elements), part)
