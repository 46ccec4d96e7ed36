# SPDX-License-Identifier: Apache-2.0
"""The attention problems that are timed, with the bytes and operations that each needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import short
from dsl_backend.providers import Limits
from dsl_backend.quant.format import is_fp8

from ..check import BF16_LIMITS, EXACT


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Causal attention over a batch. The functions below make problems with different layouts of the keys.

    Attributes:
        heads_q, heads_kv: query and key/value heads.
        head_dim, head_dim_v: elements of a query or key row, and of a value or output row.
        q_lens, kv_lens: tokens of each request; its keys include those of its queries.
        page_size: tokens of a page; None if keys are packed.
        window_left: the number of visible keys before a position; None if there is no window.
        scale: the factor of q·k (softmax_scale).
        batch_invariant: a request's result is bitwise the same in every batch.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int | None = 16
    window_left: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    mla: bool = False
    scale: float
    batch_invariant: bool = False

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            scale=self.scale,
            window_left=self.window_left,
            mla=self.mla,
            batch_invariant=self.batch_invariant,
        )

    @property
    def requests(self) -> int:
        return len(self.kv_lens)

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def uniform(self) -> bool:
        """Whether all requests have the same lengths."""
        return len(set(self.q_lens)) == 1 and len(set(self.kv_lens)) == 1

    @property
    def is_fp8_kv(self) -> bool:
        return is_fp8(self.kv_dtype)

    @property
    def traffic_bytes(self) -> int:
        """Keys and values that at least one query sees are read once, queries are read, outputs are written."""
        keys = sum(keys_seen(q, kv, self.window_left) for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        row = self.head_dim if self.mla else self.head_dim + self.head_dim_v
        stored = keys * self.heads_kv * row * self.kv_dtype.itemsize
        return stored + self.tokens * self.heads_q * (self.head_dim + self.head_dim_v) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """The two matrix products of the visible pairs only: a causal square counts as half of the full one."""
        twice = sum(twice_pairs(q, kv, self.window_left) for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return twice * self.heads_q * (self.head_dim + self.head_dim_v)

    @property
    def limits(self) -> Limits:
        return BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "heads_q": self.heads_q,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "requests": self.requests,
            "tokens": self.tokens,
            "max_q_len": max(self.q_lens),
            "max_kv_len": max(self.kv_lens),
            "mean_kv_len": sum(self.kv_lens) / self.requests,
            "page_size": self.page_size,
            "window_left": self.window_left,
            "dtype": short(self.dtype),
            "kv_dtype": short(self.kv_dtype),
            "batch_invariant": self.batch_invariant,
        }


def keys_seen(q_len: int, kv_len: int, window_left: int | None) -> int:
    """The number of keys of a request that at least one of its queries sees."""
    return kv_len if window_left is None else min(kv_len, q_len + window_left)


def twice_pairs(q_len: int, kv_len: int, window_left: int | None) -> int:
    """Twice the number of visible (query, key) pairs of a request. The diagonal of a causal square counts half."""
    twice = 2 * q_len * kv_len - q_len * q_len
    if window_left is not None:
        # the query at position p misses its first p - window_left keys
        first, last = max(kv_len - q_len - window_left, 1), kv_len - 1 - window_left
        twice -= (last + first) * (last - first + 1) if last >= first else 0
    return twice


def dense(
    head_dim: int,
    heads_q: int,
    heads_kv: int,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int = 16,
    window_left: int | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    head_dim_v: int | None = None,
) -> Problem:
    """Separate keys and values, in pages.

    Args:
        head_dim_v: elements of a value row; by default as of a key row.
    """
    return Problem(
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        page_size=page_size,
        window_left=window_left,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
        scale=head_dim**-0.5,
    )


def latent(
    heads: int,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int = 16,
    kv_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> Problem:
    """Absorbed MLA with DeepSeek's sizes: all heads share one latent row of 512 and a rope part of 64."""
    return Problem(
        heads_q=heads,
        heads_kv=1,
        head_dim=576,
        head_dim_v=512,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        page_size=page_size,
        mla=True,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
        scale=192**-0.5,
    )


def packed(heads: int, lens: Sequence[int]) -> Problem:
    """MLA prefill with DeepSeek's sizes, without absorption: packed keys of 128 + 64 and values of 128."""
    return Problem(
        heads_q=heads,
        heads_kv=heads,
        head_dim=192,
        head_dim_v=128,
        q_lens=tuple(lens),
        kv_lens=tuple(lens),
        page_size=None,
        scale=192**-0.5,
    )


@dataclass(frozen=True, kw_only=True)
class WriteProblem:
    """New keys and values to write to the cache.

    Attributes:
        mla: one row of head_dim + head_dim_v elements (512 + 64) instead of a key and a value.
    """

    tokens: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int = 16
    mla: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads_kv,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim + self.head_dim_v if self.mla else self.head_dim,
            head_dim_v=self.head_dim if self.mla else self.head_dim_v,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            scale=1.0,
            mla=self.mla,
        )

    @property
    def traffic_bytes(self) -> int:
        elements = self.tokens * self.heads_kv * (self.head_dim + self.head_dim_v)
        return elements * (self.dtype.itemsize + self.kv_dtype.itemsize) + 8 * self.tokens

    @property
    def limits(self) -> Limits:
        return EXACT

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "page_size": self.page_size,
            "kv_dtype": short(self.kv_dtype),
        }
