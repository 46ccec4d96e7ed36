# SPDX-License-Identifier: Apache-2.0
"""The norm, the rotary embedding and the cache write of absorbed MLA in one launch.

The first CTAs of the grid have latent parts of keys: adjacent lanes of a warp have one token's, and exchange its sum of
squares. The other CTAs have rope parts, of query heads and of the token's key: a few lanes have one, 4 where it has 64
elements. A thread has 16 elements, both of each pair that is rotated. So a token's bits depend on nothing beside it.

The kernel has no instruction that only one of SM90 and SM100 has, so the same class serves both.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.rope import THREADS, RopeWrite, address, load, rms_factor
from dsl_backend.attention.cute.tiles import VECTOR
from dsl_backend.attention.rope_dispatch import PAIR
from dsl_backend.attention.rope_spec import MLARopeTensors, RopeStyle
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.fragment import to_float32
from dsl_backend.primitives.math import quotient
from dsl_backend.quant.format import KVFormat
from dsl_backend.rows import power_of_2


@dataclass(frozen=True, kw_only=True)
class MLARopeKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype: of queries, keys and weights; the cache's too, unless fp8. table_dtype: of cosines and sines.
        kv: format of the cache. page_size: tokens of its pages.
        heads: of queries. latent, rope: elements of the two parts of a key.
        style: which elements form pairs.
    """

    dtype: str
    table_dtype: str
    kv: KVFormat
    page_size: int
    heads: int
    latent: int
    rope: int
    style: RopeStyle


class RopeWriteMLA(RopeWrite):
    """Writes MLARopeTensors' outputs from its inputs; there is at least one token."""

    def __init__(self, key: MLARopeKey):
        super().__init__(key)
        self.latent, self.rope = key.latent, key.rope
        self.latent_lanes, self.rope_lanes = power_of_2(key.latent // PAIR), power_of_2(key.rope // PAIR)
        self.latents, self.ropes = THREADS // self.latent_lanes, THREADS // self.rope_lanes  # of a CTA
        self.parts = key.heads + 1  # that are rotated, of a token

    @cute.jit
    def __call__(self, tensors: MLARopeTensors, q: cute.Tensor, eps: cutlass.Float32, stream):
        """`q` is tensors.q once more: CuTe DSL (4.8) finds the stream only by a tensor that no tuple holds."""
        tokens = tensors.positions.shape[0]
        ctas = cute.ceil_div(tokens, self.latents) + cute.ceil_div(tokens * self.parts, self.ropes)
        self.kernel(tensors, eps).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, tensors: MLARopeTensors, eps: cutlass.Float32):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        latent_ctas = cute.ceil_div(tensors.positions.shape[0], self.latents)
        is_latent = cta < latent_ctas
        # Two vectors of eight adjacent elements, in halves of the row: lanes of a warp access adjacent addresses.
        first = thread % self.latent_lanes * VECTOR
        second = first + self.latent // 2
        has_latent = is_latent and first < self.latent // 2
        rW = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        rW.fill(self.dtype(0.0))
        if has_latent:
            # No kernel of a step writes weights: they need not wait for the one before.
            load(tensors.weight.iterator.toint(), self.dtype, first, rW[None, 0])
            load(tensors.weight.iterator.toint(), self.dtype, second, rW[None, 1])
        # The next kernel may start on free SMs; it waits for the end of this one.
        dependent_launch.launch_dependents()
        dependent_launch.wait()
        if is_latent:
            token = cta * self.latents + thread // self.latent_lanes
            self.normalise(tensors, rW, token, has_latent, eps)
        else:
            self.turn(tensors, (cta - latent_ctas) * self.ropes + thread // self.rope_lanes)

    @cute.jit
    def normalise(self, tensors: MLARopeTensors, rW: cute.Tensor, token: cutlass.Int32, has_latent, eps):
        """Normalise the latent part of a token's key and store it. All lanes of the warp call it."""
        first = cute.arch.thread_idx()[0] % self.latent_lanes * VECTOR
        second = first + self.latent // 2
        active = has_latent and token < tensors.positions.shape[0]
        rX = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        rX.fill(self.dtype(0.0))
        slot, divisor = cutlass.Int64(-1), cutlass.Float32(1.0)
        if active:
            row = address(tensors.latent, (token,))
            load(row, self.dtype, first, rX[None, 0])
            load(row, self.dtype, second, rX[None, 1])
            slot, divisor = self.target(tensors, token)
        rY = cute.make_rmem_tensor((VECTOR, 2), cutlass.Float32)
        rY.store(to_float32(rX))
        factor = rms_factor(rY, self.latent, self.latent_lanes, eps)
        rY.store(rY.load() * to_float32(rW) * factor)
        if active:
            self.store(rY, address(tensors.latent_out, (token,)), first, second)
            self.write(tensors, rY, slot, divisor, first, second)

    @cute.jit
    def turn(self, tensors: MLARopeTensors, number: cutlass.Int32):
        """Rotate a thread's elements of a rope part, the part of that number, and store them."""
        lane = cute.arch.thread_idx()[0] % self.rope_lanes
        token = quotient(number, cutlass.Int32(self.parts))
        part = number - token * self.parts
        is_key = part == self.key.heads
        first = lane * PAIR
        second = first + VECTOR
        if cutlass.const_expr(self.key.style is RopeStyle.NEOX):
            first = lane * VECTOR
            second = first + self.rope // 2
        if token < tensors.positions.shape[0] and lane * PAIR < self.rope:
            rX = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
            row = address(tensors.rope, (token,)) if is_key else address(tensors.q, (token, part))
            load(row, self.dtype, first, rX[None, 0])
            load(row, self.dtype, second, rX[None, 1])
            position = tensors.positions[token]
            slot, divisor = cutlass.Int64(-1), cutlass.Float32(1.0)
            if is_key:
                slot, divisor = self.target(tensors, token)
            position = position if cutlass.Uint64(position) < cutlass.Uint64(tensors.cos_sin.shape[0]) else position * 0
            rTable = cute.make_rmem_tensor((VECTOR, 2), self.table_dtype)
            row = address(tensors.cos_sin, (position,))
            load(row, self.table_dtype, lane * VECTOR, rTable[None, 0])
            load(row, self.table_dtype, lane * VECTOR + self.rope // 2, rTable[None, 1])
            rY = cute.make_rmem_tensor((VECTOR, 2), cutlass.Float32)
            rY.store(to_float32(rX))
            self.rotate(rY, rTable)
            row = address(tensors.rope_out, (token,)) if is_key else address(tensors.q_out, (token, part))
            self.store(rY, row, first, second)
            if is_key:
                self.write(tensors, rY, slot, divisor, self.latent + first, self.latent + second)

    @cute.jit
    def target(self, tensors: MLARopeTensors, token: cutlass.Int32):
        """(slot of a token, -1 where it has none; what an fp8 cache divides by)"""
        slot, divisor = cutlass.Int64(-1), cutlass.Float32(1.0)
        if token < tensors.slots.shape[0]:
            slot = tensors.slots[token]
            if cutlass.const_expr(self.kv.fp8):
                divisor = tensors.scale[0]
        return slot, divisor

    @cute.jit
    def write(
        self,
        tensors: MLARopeTensors,
        rY: cute.Tensor,
        slot: cutlass.Int64,
        divisor: cutlass.Float32,
        first: cutlass.Int32,
        second: cutlass.Int32,
    ):
        """Store a thread's elements at a slot of the cache, if there is such a slot."""
        page, inner = self.page_of(slot)
        if cutlass.Uint64(page) < cutlass.Uint64(tensors.cache.shape[0]):
            self.store_cached(rY, address(tensors.cache, (page, inner)), divisor, first, second)
