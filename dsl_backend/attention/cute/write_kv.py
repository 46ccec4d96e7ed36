# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values to a paged cache: a thread writes eight consecutive elements of one row.

The kernel has no instruction of one generation: the same class serves SM90 and SM100.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.tiles import NUMERIC, VECTOR
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import f32_to_e4m3, f32_to_e5m2
from dsl_backend.quant.format import E4M3, E5M2, KVFormat

F32_TO_FP8 = {E4M3: f32_to_e4m3, E5M2: f32_to_e5m2}
MAX_THREADS = 256  # of a CTA
WARP = 32


@dataclass(frozen=True, kw_only=True)
class WriteKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype: of keys and values; the cache's too, unless fp8.
        kv: format of the cache.
        heads: KV heads.
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
    """Write rows of keys and values to their slots of the caches.

    A CTA writes whole tokens. If a token has more vectors than a CTA threads, it writes an equal part of one.
    """

    def __init__(self, key: WriteKey):
        self.heads, self.page_size, self.kv = key.heads, key.page_size, key.kv
        self.dtype = NUMERIC[key.dtype]
        self.vectors_k, self.vectors_v = key.dim // VECTOR, key.dim_v // VECTOR  # of a row
        self.key_vectors = self.heads * self.vectors_k  # of a token
        self.token_vectors = self.key_vectors + self.heads * self.vectors_v
        self.parts = -(-self.token_vectors // MAX_THREADS)
        self.cta_vectors = -(-self.token_vectors // self.parts)
        self.tokens = MAX_THREADS // self.cta_vectors if self.parts == 1 else 1
        self.threads = -(-self.tokens * self.cta_vectors // WARP) * WARP

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
        mK: cute.Tensor,  # (num_tokens, head_kv, dim)
        mV: cute.Tensor,  # (num_tokens, head_kv, dim_v)
        mKCache: cute.Tensor,  # (pages, page_size, head_kv, dim)
        mVCache: cute.Tensor,  # (pages, page_size, head_kv, dim_v)
        mSlots: cute.Tensor,  # (num_tokens)
        mKScale: cute.Tensor | None,  # (head_kv)
        mVScale: cute.Tensor | None,  # (head_kv)
    ):
        # The attention kernel may start on free SMs; it waits for the end of this one.
        dependent_launch.launch_dependents()
        dependent_launch.wait()
        thread = cute.arch.thread_idx()[0]
        token_of_cta = thread // self.cta_vectors
        token = cute.arch.block_idx()[0] * self.tokens + token_of_cta
        vector = cute.arch.block_idx()[1] * self.cta_vectors + thread % self.cta_vectors
        if token_of_cta < self.tokens and token < mSlots.shape[0] and vector < self.token_vectors:
            slot = mSlots[token]
            if vector < self.key_vectors:
                self.copy(mK, mKCache, mKScale, token, slot, vector, self.vectors_k)
            else:
                self.copy(mV, mVCache, mVScale, token, slot, vector - self.key_vectors, self.vectors_v)

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
        """Copy one vector of a token. It is loaded before the slot is known to be valid, so that both loads overlap."""
        head, column = vector // vectors, vector % vectors * VECTOR
        fragment = cute.make_rmem_tensor(VECTOR, self.dtype)
        load_vector(rows.iterator, offset((token, head), rows.stride) + column, fragment)
        if cutlass.const_expr(self.kv.fp8):
            divisor = scale[head]
        # Unsigned: division by a page size that is a power of two is a shift, and a negative slot (padding) is beyond
        # the last page.
        unsigned_slot = cutlass.Uint64(slot)
        page = cutlass.Int64(unsigned_slot // self.page_size)
        inner = cutlass.Int64(unsigned_slot % self.page_size)
        if cutlass.Uint64(page) < cutlass.Uint64(cache.shape[0]):
            target = offset((page, inner, head), cache.stride) + column
            if cutlass.const_expr(self.kv.fp8):
                quotients = fragment.load().to(cutlass.Float32) / divisor
                words = cute.make_rmem_tensor(VECTOR // 4, cutlass.Int32)
                for i in cutlass.range_constexpr(VECTOR // 4):
                    words[i] = F32_TO_FP8[self.kv](*(quotients[4 * i + j] for j in range(4)))
                store_vector(cute.recast_tensor(words, cutlass.Uint8), cache.iterator, target)
            else:
                store_vector(fragment, cache.iterator, target)


def offset(coord: tuple, strides: tuple) -> cutlass.Int64:
    """Offset of a coordinate in elements, 64 bits; the last stride is 1 and has no coordinate."""
    return sum(
        (cutlass.Int64(index) * cutlass.Int64(stride) for index, stride in zip(coord, strides[:-1], strict=True)),
        cutlass.Int64(0),
    )
