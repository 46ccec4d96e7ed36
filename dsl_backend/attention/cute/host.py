# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to CuTe DSL kernels: their keys, functions and launches."""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.attention.cute.args import DenseTensors, MlaTensors, int32s
from dsl_backend.attention.cute.combine import fold_workspace_size, partial_size
from dsl_backend.attention.cute.mla import MlaKey
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import max_row_tiles
from dsl_backend.attention.cute.score_mod import ScoreModArgs, ScoreModKey
from dsl_backend.attention.cute.sizes import packed_gqa_heads, padded, v_splits
from dsl_backend.attention.cute.tiles import NUMERIC, LayerKey
from dsl_backend.attention.protocol import COUNTERS, Launch, Misaligned, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.attention.tuned import config_of
from dsl_backend.checks import short
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Of a request's key range where its shares are its own: more would take more room for every request, and more merging.
MOST_SHARES = 32
# And of the room for the partial results of a token and a unit: 64 heads of 512 columns have 8 shares.
MOST_SHARES_BYTES = 1 << 20
# For partial results of splits that begin at fixed keys, of all requests: what finds no room is not split.
MOST_PARTIALS_BYTES = 128 << 20
ALIGNMENT = 16  # bytes: of the addresses and strides that tensor copies take


def window(width: int | None) -> int:
    """A window as the kernel takes it; what int32 positions could not be added to is unbounded."""
    return 0 if width is None else min(width, 1 << 30)


def facts_of(
    spec: AttentionSpec,
    *,
    lse: bool,
    sinks: torch.dtype | None,
    pack_gqa: int,
    split: bool,
    max_splits: int,
    tiles_per_split: int,
) -> dict[str, Any]:
    """The fields of a LayerKey."""
    return {
        "dtype": short(spec.dtype),
        "heads_q": spec.heads_q,
        "heads_kv": spec.heads_kv,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "pack_gqa": pack_gqa,
        "page_size": spec.page_size or 0,
        "kv": spec.kv,
        "causality": spec.causality.value,
        "has_window_left": spec.window_left is not None,
        "has_window_right": spec.window_right is not None,
        "lse": lse,
        "split": split,
        "max_splits": max_splits,
        "tiles_per_split": tiles_per_split,
        "scores": ScoreModKey(
            softcap=spec.softcap > 0, alibi=spec.alibi, sinks=short(sinks) if sinks else None, signed=spec.scale <= 0
        ),
    }


def fake_rows(numeric: Any, dim: int, heads: int, *lead: Any) -> Any:
    """[*lead, heads, dim]."""
    strides = tuple(cute.sym_int64(divisibility=ALIGNMENT * 8 // numeric.width) for _ in (*lead, heads))
    return make_fake_tensor(numeric, (*lead, heads, dim), (*strides, 1), assumed_align=ALIGNMENT)


def fake_pages(key: LayerKey) -> tuple[Any, ...]:
    """The leading dimensions of keys."""
    return (cute.sym_int(), key.page_size) if key.page_size else (cute.sym_int(),)


def fake_scheduler_workspace(key: LayerKey) -> Any:
    """What blocks leave each other: what to merge of split key ranges, or how many row tiles were claimed."""
    if key.split and key.tiles_per_split:
        return make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=ALIGNMENT)
    if key.split and not key.max_splits:
        return make_fake_tensor(
            cutlass.Int32, (cute.sym_int(), SPLIT_RANGE_FIELDS), (SPLIT_RANGE_FIELDS, 1), assumed_align=ALIGNMENT
        )
    return make_fake_tensor(cutlass.Int32, (COUNTERS,), (1,), assumed_align=4) if key.claims else None


def fake_scale(heads_kv: int) -> Any:
    """Of each key head, at any stride: 0 where all have the same."""
    stride = 1 if heads_kv == 1 else cute.sym_int64()
    return make_fake_tensor(cutlass.Float32, (heads_kv,), (stride,), assumed_align=4)


def fake_vector(numeric: Any, length: Any, align: int = 4) -> Any:
    return make_fake_tensor(numeric, (length,), (1,), assumed_align=align)


def fake_requests(key: LayerKey) -> Requests:
    many = cute.sym_int
    page_table = make_fake_tensor(cutlass.Int32, (many(), many()), (cute.sym_int64(), 1), assumed_align=4)
    return Requests(
        fake_vector(cutlass.Int32, many()),
        fake_vector(cutlass.Int32, many()),
        page_table if key.page_size else None,
        None if key.page_size else fake_vector(cutlass.Int32, many()),
        fake_flags() if key.causality == Causality.PER_REQUEST.value else None,
        *int32s(5),
    )


def fake_score_mod_args(key: LayerKey) -> ScoreModArgs:
    sinks = key.scores.sinks
    return ScoreModArgs(
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        fake_vector(SINKS[sinks], key.heads_q, SINKS[sinks].width // 8) if sinks else None,
        fake_vector(cutlass.Float32, key.heads_q) if key.scores.alibi else None,
        *[fake_scale(key.heads_kv) if key.kv.fp8 else None] * 2,
    )


def fake_args(key: LayerKey, tensors: DenseTensors | MlaTensors) -> tuple[Any, ...]:
    """What a kernel's `__call__` takes."""
    partials = fake_vector(cutlass.Float32, cute.sym_int(), ALIGNMENT) if key.split or key.tiles_per_split else None
    return (
        tensors,
        *fake_outputs(key),
        partials,
        fake_scheduler_workspace(key),
        fake_requests(key),
        fake_score_mod_args(key),
        *int32s(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def fake_outputs(key: LayerKey) -> tuple[Any, Any]:
    """`out` and `lse`."""
    out = fake_rows(NUMERIC[key.dtype], key.head_dim_v, key.heads_q, cute.sym_int())
    if not key.lse:
        return out, None
    strides = (cute.sym_int64(), cute.sym_int64())
    return out, make_fake_tensor(cutlass.Float32, (cute.sym_int(), key.heads_q), strides, assumed_align=4)


SINKS = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def fake_dense_tensors(key: LayerKey) -> DenseTensors:
    lead = fake_pages(key)
    numeric = NUMERIC[key.dtype]
    stored = cutlass.Uint8 if key.kv.fp8 else numeric
    return DenseTensors(
        fake_rows(numeric, key.head_dim, key.heads_q, cute.sym_int()),
        fake_rows(stored, key.head_dim, key.heads_kv, *lead),
        fake_rows(stored, key.head_dim_v, key.heads_kv, *lead),
    )


def fake_mla_tensors(key: LayerKey) -> MlaTensors:
    numeric = NUMERIC[key.dtype]
    stored = cutlass.Uint8 if key.kv.fp8 else numeric
    return MlaTensors(
        fake_rows(numeric, key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(numeric, key.head_dim - key.head_dim_v, key.heads_q, cute.sym_int()),
        fake_rows(stored, key.head_dim, key.heads_kv, *fake_pages(key)),
    )


Build = Callable[[Any, Target], Function]


@cache
def function_of(build: Build, key: LayerKey, target: Target, libraries: str) -> Function:
    """The function of a key, kept by what host code is linked with."""
    return build(key, target)


def check_alignment(**tensors: torch.Tensor) -> None:
    """Raises Misaligned where a tensor copy could not take a tensor."""
    for name, tensor in tensors.items():
        elements = 0
        for stride in tensor.stride()[:-1]:
            elements |= stride
        if (tensor.data_ptr() | elements * tensor.itemsize) % ALIGNMENT:
            strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
            raise Misaligned(
                f"{name} begins at {tensor.data_ptr():#x} and has strides of {strides} bytes: multiples of {ALIGNMENT} "
                f"are needed"
            )


def scales_of(spec: AttentionSpec, operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """The scales of fp8 keys and values, each [heads_kv]; other layers' mean nothing."""
    if not spec.is_fp8_kv:
        return None, None
    assert operands.k_scale is not None
    assert operands.v_scale is not None
    return by_head(operands.k_scale, spec.heads_kv), by_head(operands.v_scale, spec.heads_kv)


def by_head(scale: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """A scale as kernels take it, [heads_kv]; one that all heads share has a stride of 0."""
    if scale.dim() == 1 and scale.shape[0] == heads_kv:
        return scale
    return scale.as_strided((heads_kv,), (1 if heads_kv == 1 else 0,))


def stored(spec: AttentionSpec, rows: torch.Tensor) -> torch.Tensor:
    """Keys or values as kernels take them: fp8 as bytes."""
    return rows.view(torch.uint8) if spec.is_fp8_kv else rows


def fake_flags() -> Any:
    """A byte for each request, at any stride."""
    return make_fake_tensor(cutlass.Uint8, (cute.sym_int(),), (cute.sym_int64(),), assumed_align=1)


def flags_of(causal: torch.Tensor) -> torch.Tensor:
    """0 or 1 for each request, of an int32 its lowest byte. A view, so that a captured graph reads it again."""
    return causal.view(torch.uint8)[:: causal.itemsize]


def nothing(operands: Operands) -> None:
    """The launch of an empty batch."""


class LayerKernel:
    """Attention of one layer spec by a kernel that a subclass names.

    Attributes:
        build: compiles the kernel of a key.
        key_type: the key's.
        default: the configuration for a spec, where none was measured to be faster.
        split: key ranges are cut into equal shares.
        claims: query tiles are claimed by the workspace's counters.
    """

    build: Build
    key_type: Any
    default: Callable[[AttentionSpec], Any]
    split = False

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self.config = config or config_of(spec, target, self.default)
        self.num_ctas, self.pack_gqa, self.tile_m = self.sizes()
        self.claims = self.key(lse=False, sinks=None).claims
        if self.claims:
            # Now, and not while a graph is captured.
            workspace.flags(COUNTERS)
        self._functions: dict[tuple[bool, torch.dtype | None, str], Function] = {}

    def sizes(self) -> tuple[int, int, int]:
        """Blocks of the grid, heads packed into a tile's rows, rows of a tile."""
        raise NotImplementedError

    def max_query_len_served(self) -> int | None:
        raise NotImplementedError

    def tensors(self, operands: Operands) -> DenseTensors | MlaTensors:
        """The tensors of a layer as the kernel takes them, fit for tensor copies."""
        raise NotImplementedError

    @property
    def v_splits(self) -> int:
        """Of a value row, each with row tiles of its own; as the kernel's key has it."""
        return 1

    @property
    def head_blocks(self) -> int:
        """Row tiles of a token."""
        return self.spec.heads_q // self.pack_gqa * self.v_splits

    @property
    def columns(self) -> int:
        """Of a partial result."""
        return padded(self.spec.head_dim_v // self.v_splits)

    @property
    def max_splits(self) -> int:
        """Into how many shares of its own a request's key range is cut at most; 0: into equal shares of the batch."""
        if self.tiles_per_split or not (self.split and self.spec.batch_invariant):
            return 0
        held = MOST_SHARES_BYTES // (4 * self.pack_gqa * self.columns)
        return max(1, min(MOST_SHARES, held, self.num_ctas // self.head_blocks))

    @property
    def tiles_per_split(self) -> int:
        """Key tiles of a split that begins at fixed keys; 0 where splits depend on lengths."""
        return 0

    @property
    def folding(self) -> int:
        """float32s of what all blocks fold; 0 where splits do not begin at fixed keys."""
        return self.num_ctas * fold_workspace_size(self.tile_m, self.columns) if self.tiles_per_split else 0

    def fixed_scratch(self, batch: Batch, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Results that blocks fold, then partial results of splits; and each request's first of these."""
        splits = -(-batch.max_seq_len // (self.tiles_per_split * self.config.tile_n)) + 1
        row_tiles = max_row_tiles(batch.num_requests, batch.num_tokens, max(1, self.tile_m // self.pack_gqa))
        wanted = row_tiles * self.head_blocks * splits * partial_size(rows, self.columns)
        count = self.folding + min(wanted, MOST_PARTIALS_BYTES // 4)
        bases = self.workspace.integers(batch.num_requests)[: batch.num_requests]
        return self.workspace.partials(count)[:count], bases

    def scratch(self, batch: Batch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Partial results of so many rows, and the ledger of the blocks."""
        if not self.split:
            folding = self.workspace.partials(self.folding)[: self.folding] if self.folding else None
            return folding, self.workspace.flags(COUNTERS)[:COUNTERS] if self.claims else None
        if self.tiles_per_split:
            return self.fixed_scratch(batch, rows)
        columns = self.columns
        if self.max_splits:
            tokens = self.tile_m // self.pack_gqa if self.max_query_len_served() is None else None
            slots = max_row_tiles(batch.num_requests, batch.num_tokens, tokens) * self.head_blocks * self.max_splits
            return self.workspace.partials(slots * partial_size(rows, columns)), None
        split_ranges = self.workspace.integers(self.num_ctas * SPLIT_RANGE_FIELDS)[: self.num_ctas * SPLIT_RANGE_FIELDS]
        # Of whole row tiles: the same for every batch.
        partials = self.workspace.partials(2 * self.num_ctas * partial_size(self.tile_m, columns))
        return partials, split_ranges.view(self.num_ctas, SPLIT_RANGE_FIELDS)

    def grid(self, batch: Batch, min_seqlen_q: int) -> int:
        """Blocks to launch for the requests of so many queries or more."""
        return self.num_ctas

    def key(self, lse: bool, sinks: torch.dtype | None) -> Any:
        facts = facts_of(
            self.spec,
            lse=lse,
            sinks=sinks,
            pack_gqa=self.pack_gqa,
            split=self.split,
            max_splits=self.max_splits,
            tiles_per_split=self.tiles_per_split,
        )
        return self.key_type(config=self.config, **facts)

    def keys(self, lse: bool, sinks: torch.dtype | None) -> list[Any]:
        """Of all that launches may need which ask for lse or not, and have sinks of a dtype or none."""
        return [self.key(lse, sinks)]

    def function(self, lse: bool, sinks: torch.dtype | None) -> Function:
        """What serves such operands, compiled when it is first asked for."""
        facts = (lse, sinks, toolkit.libraries())
        if facts not in self._functions:
            self._functions[facts] = function_of(self.build, self.key(lse, sinks), self.target, facts[-1])
        return self._functions[facts]

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        self.function(lse, sinks)

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return nothing
        spec, tensors = self.spec, self.tensors
        # One at least: a grid has no dimension of 0.
        rows = max(1, min(self.tile_m, min(max_seqlen_q, batch.max_query_len) * self.pack_gqa))
        causal = None if spec.causality is not Causality.PER_REQUEST else batch.causal
        requests = Requests(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.kv_start_loc,
            None if causal is None else flags_of(causal),
            window(spec.window_left),
            window(spec.window_right),
            max(1, min_seqlen_q),
            max_seqlen_q,
            rows,
        )
        scratch, num_ctas = self.scratch(batch, rows), self.grid(batch, min_seqlen_q)

        def launch(operands: Operands) -> None:
            lse, sinks = operands.lse, operands.sinks
            function = self.function(lse is not None, None if sinks is None else sinks.dtype)
            scales = scales_of(spec, operands)
            scoring = ScoreModArgs(spec.scale, spec.softcap, sinks, operands.alibi_slopes, *scales)
            function(tensors(operands), operands.out, lse, *scratch, requests, scoring, num_ctas)

        return launch


class DenseKernel(LayerKernel):
    """Keys and values of their own.

    Attributes:
        other: serves some batches in this one's place; None where this kernel serves all.
    """

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        super().__init__(spec, target, workspace, config)
        # A configuration that was asked for, or measured to be the best, is for all batches.
        usual = config is None and self.config == self.default(spec)
        other = self.other_config() if usual else None
        self.other: DenseKernel | None = None if other is None else type(self)(spec, target, workspace, other)

    def other_config(self) -> Any:
        """Of the kernel for some batches; None where there is none."""
        return None

    def is_for_other(self, batch: Batch, max_seqlen_q: int) -> bool:
        """Whether the other kernel serves a batch; longest: of the queries that are asked of this one."""
        raise NotImplementedError

    def keys(self, lse: bool, sinks: torch.dtype | None) -> list[Any]:
        return super().keys(lse, sinks) + ([] if self.other is None else self.other.keys(lse, sinks))

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        super().prepare(lse, sinks)
        if self.other is not None:
            self.other.prepare(lse, sinks)

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        if self.other is not None and self.is_for_other(batch, min(max_seqlen_q, batch.max_query_len)):
            return self.other.bind(batch, min_seqlen_q, max_seqlen_q)
        return super().bind(batch, min_seqlen_q, max_seqlen_q)

    def sizes(self) -> tuple[int, int, int]:
        pack_gqa = packed_gqa_heads(self.spec.group) if self.split else 1
        return self.target.sm_count * self.config.ctas_per_sm, pack_gqa, self.config.tile_m

    @property
    def v_splits(self) -> int:
        return v_splits(self.spec.head_dim_v)

    def max_query_len_served(self) -> int | None:
        return min(16, self.tile_m // self.pack_gqa) if self.split else None

    def tensors(self, operands: Operands) -> DenseTensors:
        check_alignment(q=operands.q, keys=operands.keys, values=operands.values, out=operands.out)
        keys, values = stored(self.spec, operands.keys), stored(self.spec, operands.values)
        return DenseTensors(operands.q, keys, values)


class MlaKernel(LayerKernel):
    """Absorbed MLA: values are the first elements of keys."""

    key_type = MlaKey

    def sizes(self) -> tuple[int, int, int]:
        num_ctas = self.target.sm_count // self.config.cluster * self.config.cluster
        return num_ctas, packed_gqa_heads(self.spec.group), ROWS

    def max_query_len_served(self) -> int | None:
        return None

    def tensors(self, operands: Operands) -> MlaTensors:
        latent, q, q_rope = self.spec.head_dim_v, operands.q, operands.q_rope
        if q_rope is None:
            q, q_rope = q[..., :latent], q[..., latent:]
        check_alignment(q=q, q_rope=q_rope, keys=operands.keys)
        return MlaTensors(q, q_rope, stored(self.spec, operands.keys))
