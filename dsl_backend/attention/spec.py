# SPDX-License-Identifier: Apache-2.0
"""An attention problem: the static facts of a layer, and the batch of one step."""

import enum
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.quant.format import E4M3, NVFP4, TENSOR_SCALED, KVFormat, ScaledFormat, format_of, is_fp8

# How outputs may be quantised.
OUTPUT_FORMATS = (TENSOR_SCALED, NVFP4)
# Kernels compute c tanh(s / c) as c (1 - 2 / (e^(2s/c) + 1)) in float32: a score is wrong by up to c / 2^23.
MOST_SOFTCAP = 1024.0


class Causality(enum.Enum):
    """Whether a query may see keys after its own position."""

    FULL = "full"
    CAUSAL = "causal"
    PER_REQUEST = "per_request"  # Batch.causal says which


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static facts of one attention layer: all that dispatch decides by and kernels are compiled for.

    Query row i of a request with `q_len` queries and `kv_len` keys has position `kv_len - q_len + i`. It sees the
    keys j with `position - window_left <= j <= position + window_right`, and j <= position where causal.

    Attributes:
        heads_q, heads_kv: query and key/value heads; heads_q is a multiple of heads_kv (1: MQA).
        head_dim: elements of a query and key row; for absorbed MLA latent + rope, such as 576.
        head_dim_v: elements of a value and output row.
        dtype: of queries and outputs, unless these are quantised.
        q_dtype: torch.float8_e4m3fn where queries are quantised, which needs an fp8 or NVFP4 cache; None: as dtype.
        kv_dtype: of keys and values; equal to dtype, or torch.float8_e4m3fn or torch.float8_e5m2, or
            torch.float4_e2m1fn_x2 for NVFP4 (`quant.format.KVFormat` says how it is stored). The reference alone has
            keys of another floating-point dtype.
        out_format: how outputs are quantised: `quant.format.TENSOR_SCALED` (e4m3, one scale) or `NVFP4` (scales of 16
            columns in the order of SM100's matrix products, rows of all heads one behind another); None: they are of
            dtype.
        scales_by_request: scales of 8-bit tensors are [requests, heads_kv], as FlashAttention-3's descale tensors.
        page_size: tokens a page; None where keys and values are packed without pages.
        scale: multiplies q·k.
        causality: which keys a position may see.
        window_left, window_right: keys visible before and after the position; None is unbounded.
        softcap: c > 0, at most 1024, replaces a score s by c·tanh(s / c); 0 is off.
        sinks: each query head has a logit that joins the softmax's denominator and attends to nothing.
        alibi: each query head has a slope; -slope·|position - j| is added to the score (Press et al., 2022).
        mla: absorbed MLA: the value of a key is its own first head_dim_v elements.
        batch_invariant: on one GPU, a request's results are the same bits whatever other requests are in the batch, and
            however its queries are cut into chunks.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int | None
    scale: float
    causality: Causality = Causality.CAUSAL
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    mla: bool = False
    batch_invariant: bool = False
    scales_by_request: bool = False
    q_dtype: torch.dtype | None = None
    out_format: ScaledFormat | None = None

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)  # the class is frozen
        for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v"):
            set_field(name, checks.integer(name, getattr(self, name), 1))
        for name, least in (("page_size", 1), ("window_left", 0), ("window_right", 0)):
            value = getattr(self, name)
            set_field(name, value if value is None else checks.integer(name, value, least))
        set_field("scale", checks.number("scale", self.scale))
        set_field("softcap", checks.number("softcap", self.softcap, 0))
        require(
            self.softcap <= MOST_SOFTCAP,
            f"softcap is {self.softcap:g}: at most {MOST_SOFTCAP:g}, or 0 for scores without one, is possible",
        )
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)
            checks.dtype(name, value)
            require(value.is_floating_point, f"{name} is {short(value)}: a floating-point dtype is needed")
        if self.q_dtype is not None:
            checks.dtype("q_dtype", self.q_dtype)
            require(
                self.q_dtype == E4M3.dtype and self.is_quantized_kv,
                f"q_dtype is {short(self.q_dtype)} with keys of {short(self.kv_dtype)}: None, or {E4M3.name} with an "
                f"fp8 or NVFP4 cache, is possible",
            )
        if self.out_format is not None:
            checks.instance("out_format", self.out_format, ScaledFormat)
            require(
                self.out_format in OUTPUT_FORMATS and not self.mla,
                f"out_format is {self.out_format}{' with the latent values of MLA' if self.mla else ''}: None, or "
                f"{' or '.join(map(str, OUTPUT_FORMATS))} with values of their own, is possible",
            )
        if self.is_nvfp4_out:
            require(
                self.head_dim_v % 16 == 0 and self.heads_q * self.head_dim_v % 64 == 0,
                f"outputs in {NVFP4} have {self.heads_q=} times {self.head_dim_v=} columns: head_dim_v must be a "
                f"multiple of 16, the columns of a block, and their product one of 64, since scales lie in fours",
            )
        checks.member("causality", self.causality, Causality)
        for name in ("sinks", "alibi", "mla", "batch_invariant", "scales_by_request"):
            checks.flag(name, getattr(self, name))
        require(
            self.heads_q % self.heads_kv == 0,
            f"heads_q is {self.heads_q}: a multiple of heads_kv, {self.heads_kv}, is needed",
        )
        require(
            not self.mla or (self.heads_kv == 1 and self.head_dim_v <= self.head_dim),
            f"absorbed MLA has one key head and head_dim_v <= head_dim, "
            f"not {self.heads_kv=}, {self.head_dim=}, {self.head_dim_v=}",
        )
        require(
            not self.scales_by_request or (is_fp8(self.kv_dtype) and self.page_size is not None and not self.mla),
            f"scales of each request are those of a paged fp8 cache with keys and values of their own, "
            f"not kv_dtype {short(self.kv_dtype)}, {self.page_size=}, {self.mla=}",
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all fields; computed once, since the plans of a step are found by their spec."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process does not share."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads_q // self.heads_kv

    # Each layer of a step asks for these.
    @cached_property
    def kv(self) -> KVFormat:
        """How keys and values are stored."""
        return format_of(self.kv_dtype)

    @cached_property
    def is_fp8_kv(self) -> bool:
        return is_fp8(self.kv_dtype)

    @cached_property
    def is_quantized_kv(self) -> bool:
        """Whether keys and values have scales: fp8 and NVFP4."""
        return self.kv.quantized

    @property
    def is_fp8_q(self) -> bool:
        """Whether queries arrive quantised, with scales."""
        return self.q_dtype is not None

    @property
    def query_dtype(self) -> torch.dtype:
        """Of queries as they arrive."""
        return self.dtype if self.q_dtype is None else self.q_dtype

    @property
    def is_quantized_out(self) -> bool:
        """Whether outputs are quantised, with a scale."""
        return self.out_format is not None

    @cached_property
    def is_nvfp4_out(self) -> bool:
        return self.out_format == NVFP4

    @property
    def output_dtype(self) -> torch.dtype:
        """Of outputs as they are stored."""
        return self.dtype if self.out_format is None else self.out_format.values

    @property
    def output_width(self) -> int:
        """Elements of the tensor for an output row of a head: of NVFP4 bytes."""
        return self.head_dim_v if self.out_format is None else self.head_dim_v // self.out_format.packed

    def block_scale_shape(self, rows: int) -> tuple[int, ...]:
        """Of the scales of NVFP4 outputs of so many rows."""
        return NVFP4.scale_shape(rows, self.heads_q * self.head_dim_v)

    @property
    def written_dims(self) -> tuple[int, int]:
        """Elements of what is written into the cache as a key and as a value: of absorbed MLA the latent, then rope."""
        return (self.head_dim_v, self.head_dim - self.head_dim_v) if self.mla else (self.head_dim, self.head_dim_v)

    def __str__(self) -> str:
        features = [self.causality.value]
        if self.window_left is not None or self.window_right is not None:
            features.append(f"window({self.window_left}, {self.window_right})")
        features += [f"softcap {self.softcap}"] if self.softcap else []
        features += [name for name in ("sinks", "alibi", "mla") if getattr(self, name)]
        features += ["batch-invariant"] if self.batch_invariant else []
        features += ["scales by request"] if self.scales_by_request else []
        kv = "" if self.kv_dtype == self.dtype else f", {self.kv} keys"
        page = "packed" if self.page_size is None else f"page {self.page_size}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim}, {self.head_dim_v})"
        q = f", {short(self.q_dtype)} queries" if self.q_dtype is not None else ""
        out = "" if self.out_format is None else f", {self.out_format} outputs"
        heads = f"{self.heads_q}/{self.heads_kv} heads of {dim}"
        return f"{heads}, {short(self.dtype)}{q}{kv}{out}, {page}, {' '.join(features)}"


@dataclass(frozen=True)
class HostLengths:
    """Each request's lengths as far as the host knows them, for a caller that has them there anyway.

    They are for estimates alone: results are right for every batch within the batch's bounds.

    Attributes:
        queries, keys: [requests]; keys include those of this step's queries.
    """

    queries: np.ndarray
    keys: np.ndarray

    def has_queries_up_to(self, limit: int) -> bool:
        """Whether a request has so many queries or fewer, and some."""
        return bool(((self.queries > 0) & (self.queries <= limit)).any())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's requests. Lengths stay on the device and are never read on the host.

    Wrong values are therefore not detected on a GPU: a query_start_loc that decreases, a length beyond its bound, a
    page number below 0 or beyond the cache. Such a step reads or writes out of bounds. The reference reads values, and
    raises InvalidInput for pages that do not exist.

    Attributes:
        query_start_loc: [requests + 1] int32; request r's queries are rows [r] to [r + 1] of q.
        seq_lens: [requests] int32; keys of each request, those of this step's queries included. A request without
            queries and keys is padding.
        num_tokens: rows of q that may belong to a request (an upper bound).
        max_query_len, max_seq_len: upper bounds over the requests, in tokens.
        block_table: [requests, pages] int32, where keys are paged. Entries past a request's length are not read.
        kv_start_loc: [requests + 1] int32, where keys are packed.
        causal: [requests] bool or int32 (0 or 1), with Causality.PER_REQUEST.
        host_lengths: where the host knows each request's lengths, by which launches are chosen better than by bounds.
            None in a batch that stands for others, as that of a captured graph does.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: torch.Tensor | None = None
    kv_start_loc: torch.Tensor | None = None
    causal: torch.Tensor | None = None
    host_lengths: HostLengths | None = None

    def __post_init__(self) -> None:
        checks.tensor("query_start_loc", self.query_start_loc)
        checks.tensor("seq_lens", self.seq_lens)
        for name in ("block_table", "kv_start_loc", "causal"):
            value = getattr(self, name)
            if value is not None:
                checks.tensor(name, value)
        for name in ("num_tokens", "max_query_len", "max_seq_len"):
            value = getattr(self, name)
            # A batch is made in every step: a valid int is not stored again, which saves host time.
            if type(value) is not int or not 0 <= value <= checks.MOST:
                object.__setattr__(self, name, checks.integer(name, value, 0))
        if self.host_lengths is not None:
            checks.instance("host_lengths", self.host_lengths, HostLengths)
            for name, lengths in (("queries", self.host_lengths.queries), ("keys", self.host_lengths.keys)):
                checks.instance(f"host_lengths.{name}", lengths, np.ndarray)
                require(
                    lengths.shape == (self.num_requests,),
                    f"host_lengths.{name} has shape {lengths.shape}: ({self.num_requests},) is needed",
                )

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]
