# SPDX-License-Identifier: Apache-2.0
"""Store new keys and values in a paged cache, on any SM: a thread takes eight neighbouring elements of one row.

Nothing here is an instruction of one generation: the same class serves SM90 and SM100.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.tiles import NUMERIC, VECTOR
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import f32_to_e4m3, f32_to_e5m2
from dsl_backend.quant.format import E4M3, E5M2, KVFormat

F32_TO_FP8 = {E4M3: f32_to_e4m3, E5M2: f32_to_e5m2}
THREADS = 256  # of a block, at most
WARP = 32


@dataclass(frozen=True, kw_only=True)
class WriteKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype: of keys and values; the cache's too, unless fp8.
        kv: what the cache holds.
        heads: of keys and of values.
        dim, dim_v: elements of a key and of a value; of MLA's latent and rope parts.
        page_size: tokens of a page.
    """

    dtype: str
    kv: KVFormat
    heads: int
    dim: int
    dim_v: int
    page_size: int


class WriteRows:
    """Rows of keys and values [rows, heads, dim] to their slots of caches [pages, page_size, heads, dim].

    A block has whole tokens, or where these have more vectors than threads, an equal part of one.
    """

    def __init__(self, key: WriteKey):
        self.heads, self.page_size, self.kv = key.heads, key.page_size, key.kv
        self.dtype = NUMERIC[key.dtype]
        self.vectors_k, self.vectors_v = key.dim // VECTOR, key.dim_v // VECTOR  # of a row
        self.of_keys = self.heads * self.vectors_k  # vectors of a token's keys
        self.of_token = self.of_keys + self.heads * self.vectors_v
        self.parts = -(-self.of_token // THREADS)
        self.share = -(-self.of_token // self.parts)
        self.tokens = THREADS // self.share if self.parts == 1 else 1
        self.threads = -(-self.tokens * self.share // WARP) * WARP

    @cute.jit
    def __call__(
        self,
        key: cute.Tensor,
        value: cute.Tensor,
        key_cache: cute.Tensor,
        value_cache: cute.Tensor,
        slots: cute.Tensor,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        stream,
    ):
        self.kernel(key, value, key_cache, value_cache, slots, k_scale, v_scale).launch(
            grid=(cute.ceil_div(slots.shape[0], self.tokens), self.parts, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKCache: cute.Tensor,
        mVCache: cute.Tensor,
        mSlots: cute.Tensor,
        mKScale: cute.Tensor | None,
        mVScale: cute.Tensor | None,
    ):
        # Attention may take its place beside this kernel, and waits there.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0]
        nth = thread // self.share
        token = cute.arch.block_idx()[0] * self.tokens + nth
        vector = cute.arch.block_idx()[1] * self.share + thread % self.share
        if nth < self.tokens and token < mSlots.shape[0] and vector < self.of_token:
            slot = mSlots[token]
            if vector < self.of_keys:
                self.copy(mK, mKCache, mKScale, token, slot, vector, self.vectors_k)
            else:
                self.copy(mV, mVCache, mVScale, token, slot, vector - self.of_keys, self.vectors_v)

    @cute.jit
    def copy(
        self,
        rows: cute.Tensor,
        cache: cute.Tensor,
        scale: cute.Tensor | None,
        token: cutlass.Int32,
        slot: cutlass.Int64,
        vector: cutlass.Int32,
        vectors: cutlass.Constexpr[int],
    ):
        """A vector of a token's: it is there even if the slot is none, so nothing is loaded behind the slot."""
        head, column = vector // vectors, vector % vectors * VECTOR
        held = cute.make_rmem_tensor(VECTOR, self.dtype)
        load_vector(rows.iterator, offset((token, head), rows.stride) + column, held)
        if cutlass.const_expr(self.kv.fp8):
            divisor = scale[head]
        # Unsigned, so that a page size that is a power of two is a shift, and a negative slot beyond the last page.
        place = cutlass.Uint64(slot)
        page, inner = cutlass.Int64(place // self.page_size), cutlass.Int64(place % self.page_size)
        if cutlass.Uint64(page) < cutlass.Uint64(cache.shape[0]):
            to = offset((page, inner, head), cache.stride) + column
            if cutlass.const_expr(self.kv.fp8):
                quotients = held.load().to(cutlass.Float32) / divisor
                words = cute.make_rmem_tensor(VECTOR // 4, cutlass.Int32)
                for i in cutlass.range_constexpr(VECTOR // 4):
                    words[i] = F32_TO_FP8[self.kv](*(quotients[4 * i + j] for j in range(4)))
                store_vector(cute.recast_tensor(words, cutlass.Uint8), cache.iterator, to)
            else:
                store_vector(held, cache.iterator, to)


def offset(place: tuple, strides: tuple):
    """In elements, 64 bits; the last stride is 1."""
    return sum(
        (cutlass.Int64(index) * cutlass.Int64(stride) for index, stride in zip(place, strides[:-1], strict=True)),
        cutlass.Int64(0),
    )
