# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to CuTe DSL kernels: their keys, functions and launches."""

import math
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch

from dsl_backend.attention.cute.args import DenseTensors, MlaTensors
from dsl_backend.attention.cute.extend import Tiling, shortest_of_split
from dsl_backend.attention.cute.fake_args import ALIGNMENT
from dsl_backend.attention.cute.fixed_splits import tiles_per_split
from dsl_backend.attention.cute.launch_choice import Estimate, fastest
from dsl_backend.attention.cute.mla import MlaKey
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.row_groups import row_group
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import FIXED_SPLIT_RANGE_FIELDS
from dsl_backend.attention.cute.score_mod import ScoreModArgs, ScoreModKey
from dsl_backend.attention.cute.sizes import (
    MOST_PACKED_HEADS,
    SHORT_QUERY,
    fold_workspace_size,
    packed_gqa_heads,
    padded,
    partial_size,
    v_splits,
)
from dsl_backend.attention.cute.tiles import LayerKey
from dsl_backend.attention.protocol import COUNTERS, Kernel, Launch, Misaligned, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.attention.tuned import config_of
from dsl_backend.attention.variants import Variants
from dsl_backend.checks import short
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Scratch of a batch-invariant layer: partial results, and the fold workspace of each CTA (up to 18 MB on 132 SMs). All
# layers and batches have the same, so that it never grows. If a batch may leave more partial results, no key range is
# split: with 16 heads of MLA, from 60 requests of 64k keys on.
FIXED_SPLIT_SCRATCH_BYTES = 192 << 20
MOST_LAYOUTS = 256  # that a kernel remembers as aligned


def window(width: int | None) -> int:
    """A window as kernels take it. It is clamped, so that its sum with a position stays in int32."""
    return 0 if width is None else min(width, 1 << 30)


def facts_of(
    spec: AttentionSpec,
    *,
    lse: bool,
    sinks: torch.dtype | None,
    pack_gqa: int,
    split: bool,
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
        "tiles_per_split": tiles_per_split,
        "scales_by_request": spec.scales_by_request,
        "fp8_q": spec.is_fp8_q,
        "out_format": spec.out_format,
        "scores": ScoreModKey(
            softcap=spec.softcap > 0, alibi=spec.alibi, sinks=short(sinks) if sinks else None, signed=spec.scale <= 0
        ),
    }


Build = Callable[[Any, Target], Function]


@cache
def function_of(build: Build, key: LayerKey, target: Target, libraries: str) -> Function:
    """The compiled function of a key, for the libraries that its host code is linked with."""
    return build(key, target)


class Alignment:
    """Checks that TMA can take the tensors of a kernel, whose dtypes do not change.

    Addresses are looked at in every launch, strides once for each layout: 1 us less of a launch's 20.

    Args:
        head_steps: pages of keys and values must begin at multiples of the step from a head to the next one.
    """

    def __init__(self, *, head_steps: bool = False) -> None:
        self.head_steps = head_steps
        self.layouts: set[tuple[tuple[int, ...], ...]] = set()

    def check(self, names: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> None:
        """Raises Misaligned if TMA cannot take a tensor."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        layout = tuple([tensor.stride() for tensor in tensors])
        if addresses % ALIGNMENT == 0 and layout in self.layouts:
            return
        for name, tensor in zip(names, tensors, strict=True):
            check_alignment(name, tensor)
            if self.head_steps and name in ("keys", "values"):
                check_head_steps(name, tensor)
        if len(self.layouts) >= MOST_LAYOUTS:
            self.layouts.clear()
        self.layouts.add(layout)


def check_alignment(name: str, tensor: torch.Tensor) -> None:
    elements = 0
    for stride in tensor.stride()[:-1]:
        elements |= stride
    if (tensor.data_ptr() | elements * tensor.itemsize) % ALIGNMENT:
        strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
        raise Misaligned(
            f"{name} begins at {tensor.data_ptr():#x} and has strides of {strides} bytes: multiples of {ALIGNMENT} "
            f"are needed"
        )


def check_head_steps(name: str, cache: torch.Tensor) -> None:
    page_stride, _, head_stride, _ = cache.stride()
    if cache.shape[2] > 1 and (head_stride == 0 or page_stride % head_stride):
        raise Misaligned(
            f"{name} has pages that begin {page_stride} elements apart, and heads {head_stride}: a multiple of that is "
            f"needed"
        )


def bytes_of(block_scale: torch.Tensor | None) -> torch.Tensor | None:
    """The scales of NVFP4 outputs as bytes. Raises Misaligned where those of four blocks are no word."""
    if block_scale is None:
        return None
    if block_scale.data_ptr() % 4:
        raise Misaligned(f"out[1] begins at {block_scale.data_ptr():#x}: a multiple of 4 is needed")
    return block_scale.view(torch.uint8)


def scales_of(spec: AttentionSpec, operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """The scales of quantized keys, values and queries, each (heads_kv,), or by request; None for what has 16 bits."""
    if not spec.is_quantized_kv:
        return None, None, None
    scales = operands.k_scale, operands.v_scale, operands.q_scale
    if spec.scales_by_request:
        return scales
    return tuple(None if scale is None else by_head(scale, spec.heads_kv) for scale in scales)


def by_head(scale: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """A scale as kernels take it, (heads_kv,). A scale that all heads share gets a stride of 0."""
    if scale.dim() == 1 and scale.shape[0] == heads_kv:
        return scale
    return scale.as_strided((heads_kv,), (1 if heads_kv == 1 else 0,))


def stored(spec: AttentionSpec, rows: torch.Tensor) -> torch.Tensor:
    """Keys or values as kernels take them: fp8 ones as bytes."""
    return rows.view(torch.uint8) if spec.is_fp8_kv else rows


def flags_of(causal: torch.Tensor) -> torch.Tensor:
    """One byte for each request, 0 or 1; of an int32 its lowest. A view, so that a captured graph reads it again."""
    return causal.view(torch.uint8)[:: causal.itemsize]


def nothing(operands: Operands) -> None:
    """The launch of an empty batch."""


class LayerKernel(Kernel):
    """Launches one attention kernel for layers of one spec. A subclass names the kernel.

    Attributes:
        build: compiles the kernel of a key.
        key_type: the class of the kernel's key.
        default: chooses the configuration for a spec, unless a tuned one is on record.
        split: whether key ranges are split among CTAs.
        dynamic_scheduler: whether CTAs take query tiles by a counter in the workspace.
        has_fold_workspace: whether CTAs keep the splits that they have combined in global memory.
    """

    build: Build
    key_type: Any
    default: Callable[[AttentionSpec], Any]
    split = False

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self.config = config or config_of(spec, target, self.default)
        self.num_ctas, self.pack_gqa, self.tile_m = self.sizes()
        key = self.key(lse=False, sinks=None)
        self.dynamic_scheduler, self.has_fold_workspace = key.dynamic_scheduler, key.has_fold_workspace
        if self.dynamic_scheduler:
            # Now, and not while a graph is captured.
            workspace.flags(COUNTERS)
        self.alignment = Alignment()
        self._functions: dict[tuple[bool, torch.dtype | None, str], Function] = {}

    def sizes(self) -> tuple[int, int, int]:
        """CTAs of the grid, query heads packed into a tile, rows of a tile."""
        raise NotImplementedError

    def max_query_len_served(self) -> int | None:
        raise NotImplementedError

    def tensors(self, operands: Operands) -> DenseTensors | MlaTensors:
        """The tensors of a layer as the kernel takes them. Raises Misaligned if TMA cannot take one."""
        raise NotImplementedError

    def queries(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries as the kernel takes them, in parts of their columns.

        Quantised ones become bytes, or numbers of the layer's dtype, which has all of e4m3, without their scale.
        """
        if not self.spec.is_fp8_q:
            return parts
        if self.key_type.reads_fp8_q:
            return tuple(part.view(torch.uint8) for part in parts)
        widths = [part.shape[-1] for part in parts]
        shape = (*parts[0].shape[:-1], sum(widths))
        size = math.prod(shape) * self.spec.dtype.itemsize
        made = self.workspace.operand(size)[:size].view(self.spec.dtype).view(shape).split(widths, -1)
        return tuple(whole.copy_(part) for whole, part in zip(made, parts, strict=True))

    @property
    def v_splits(self) -> int:
        """Parts of head_dim_v, each computed by row tiles of its own."""
        return 1

    @property
    def head_blocks(self) -> int:
        """Row tiles of one token: packed heads times parts of head_dim_v."""
        return self.spec.heads_q // self.pack_gqa * self.v_splits

    @property
    def columns(self) -> int:
        """Columns of a partial result."""
        return padded(self.spec.head_dim_v // self.v_splits)

    @property
    def tiles_per_split(self) -> int:
        """Key tiles of a split, where splits begin at fixed keys; 0 where they are balanced over the batch."""
        return tiles_per_split(self.spec, self.config.tile_n)

    def scratch(self, batch: Batch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`partials` of so many rows, and `scheduler_workspace`; see `args.py`."""
        if not self.split:
            fold = self.num_ctas * fold_workspace_size(self.tile_m, self.columns) if self.has_fold_workspace else 0
            folded = self.workspace.partials(fold)[:fold] if fold else None
            return folded, self.workspace.flags(COUNTERS)[:COUNTERS] if self.dynamic_scheduler else None
        # Whole row tiles, so that the size is the same for every batch.
        count, fields = 2 * self.num_ctas * partial_size(self.tile_m, self.columns), SPLIT_RANGE_FIELDS
        if self.tiles_per_split:
            count, fields = FIXED_SPLIT_SCRATCH_BYTES // 4, FIXED_SPLIT_RANGE_FIELDS
        split_ranges = self.workspace.integers(self.num_ctas * fields)[: self.num_ctas * fields]
        return self.workspace.partials(count)[:count], split_ranges.view(self.num_ctas, fields)

    def grid(self, batch: Batch, min_seqlen_q: int) -> int:
        """CTAs to launch for the requests of min_seqlen_q queries or more."""
        return self.num_ctas

    def row_group(self, batch: Batch, max_seqlen_q: int) -> tuple[int, int]:
        """`Requests.row_group` and `row_group_iters` for the requests of up to max_seqlen_q queries."""
        return 1, 100

    def key(self, lse: bool, sinks: torch.dtype | None) -> Any:
        facts = facts_of(
            self.spec,
            lse=lse,
            sinks=sinks,
            pack_gqa=self.pack_gqa,
            split=self.split,
            tiles_per_split=self.tiles_per_split,
        )
        return self.key_type(config=self.config, **facts)

    def keys(self, lse: bool, sinks: torch.dtype | None) -> list[Any]:
        """The keys of all kernels that launches may need, with or without LSE, with sinks of a dtype or none."""
        return [self.key(lse, sinks)]

    def function(self, lse: bool, sinks: torch.dtype | None) -> Function:
        """The compiled function for such operands. The first call compiles it."""
        facts = (lse, sinks, toolkit.libraries())
        if facts not in self._functions:
            self._functions[facts] = function_of(self.build, self.key(lse, sinks), self.target, facts[-1])
        return self._functions[facts]

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        self.function(lse, sinks)

    @cached_property
    def plain_scoring(self) -> Any:
        """The ScoreModArgs of layers without tensors for their scores."""
        return toolkit.converted(ScoreModArgs(self.spec.scale, self.spec.softcap, None, None, None, None))

    def scoring(self, operands: Operands) -> Any:
        """The ScoreModArgs of a launch."""
        sinks, slopes = operands.sinks, operands.alibi_slopes
        spec, out_scale = self.spec, operands.out_scale
        if sinks is None and slopes is None and out_scale is None and not spec.is_quantized_kv:
            return self.plain_scoring
        made = ScoreModArgs(spec.scale, spec.softcap, sinks, slopes, *scales_of(spec, operands))
        if out_scale is None:
            return made
        # One number of any shape.
        return made._replace(out_scale=out_scale.view(1), out_block_scale=bytes_of(operands.out_block_scale))

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return nothing
        spec, tensors = self.spec, self.tensors
        # At least one: a grid cannot have a dimension of 0.
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
            *self.row_group(batch, max_seqlen_q),
        )
        scratch, num_ctas = self.scratch(batch, rows), self.grid(batch, min_seqlen_q)
        # What all layers of the batch pass; converted in the first launch, as a replayed graph has none.
        shared: Any = None

        def launch(operands: Operands) -> None:
            nonlocal shared
            if shared is None:
                shared = toolkit.converted(requests)
            lse, sinks, out = operands.lse, operands.sinks, operands.out
            if spec.is_quantized_out:
                out = out.view(torch.uint8)
            function = self.function(lse is not None, None if sinks is None else sinks.dtype)
            function(tensors(operands), out, lse, *scratch, shared, self.scoring(operands), num_ctas)

        return launch


class DenseKernel(LayerKernel):
    """Attention over keys and values, as opposed to MLA's latent rows.

    Attributes:
        variants: the configurations of the kernel, and the batches that each serves; at most two by query length, and
            one for few query tiles.
        extend_type: the class of the kernel for few query tiles.
        other_type: the class of `other`; None: the same.
        most_packed_heads: of a tile, where keys are split.
        other: the kernel of the second one; None where one serves all query lengths.
        estimates_other: where the host knows all lengths, an estimate chooses `other` for queries of any length that
            do not fit a tile.
        extend: the kernel for few query tiles; None where keys of long queries are not split.
        takes_short_queries: these kernels may serve short queries beside long ones, whose products are as exact.
        exact_pairs, late_claims: the kernel's, as `TiledKernel` has them.
    """

    variants: Variants
    extend_type: "type[DenseKernel]"
    other_type: "type[DenseKernel] | None" = None
    most_packed_heads = 64
    exact_pairs = late_claims = False
    estimates_other = False
    takes_short_queries = True

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        # A configuration that was asked for serves all batches.
        found = self.variants(spec, target) if config is None else []
        super().__init__(spec, target, workspace, found[0].config if found else config)
        self.others_batches = next((one for one in found[1:] if not one.few_tiles), None)
        few_tiles = next((one for one in found if one.few_tiles), None)
        self.other = self.extend = None
        if self.others_batches is not None:
            self.other = (self.other_type or type(self))(spec, target, workspace, self.others_batches.config)
        if few_tiles is not None:
            self.extend = self.extend_type(spec, target, workspace, few_tiles.config)

    @property
    def others(self) -> "list[DenseKernel]":
        return [kernel for kernel in (self.other, self.extend) if kernel is not None]

    def keys(self, lse: bool, sinks: torch.dtype | None) -> list[Any]:
        return super().keys(lse, sinks) + [key for kernel in self.others for key in kernel.keys(lse, sinks)]

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        super().prepare(lse, sinks)
        for kernel in self.others:
            kernel.prepare(lse, sinks)

    @cached_property
    def alone(self) -> "DenseKernel":
        """This kernel without the others: it serves batches of `other` too."""
        return type(self)(self.spec, self.target, self.workspace, self.config)

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling(
            rows=self.tile_m,
            keys=self.config.tile_n,
            pack_gqa=self.pack_gqa,
            head_blocks=self.head_blocks,
            columns=self.columns,
            num_ctas=self.num_ctas,
            pairs=getattr(self.config, "pair_row_tiles", False),
            exact_pairs=self.exact_pairs,
            claims_ahead=not self.late_claims,
        )

    def split_of(self, batch: Batch, min_seqlen_q: int) -> tuple[Kernel, int] | None:
        if self.extend is None:
            return None
        if batch.host_lengths is not None:
            whole: DenseKernel = self
            whole_us: float | None = None
            is_estimated = self.estimates_other and batch.max_query_len > self.tile_m
            if self.other is not None and (is_estimated or self.is_for_other(batch.max_query_len)):
                # Larger query tiles may leave CTAs idle, or a larger part of a tile beyond its prompt.
                estimate = Estimate(self.spec, batch.host_lengths, self.target, min_seqlen_q)
                estimates = {one: estimate.whole_us(one.tiling, min_seqlen_q) for one in (self.other, self.alone)}
                whole = min(estimates, key=estimates.__getitem__)
                whole_us = estimates[whole]
            chosen = fastest(
                self.spec,
                batch.host_lengths,
                self.target,
                whole.tiling,
                self.extend.tiling,
                min_seqlen_q,
                short_too=self.takes_short_queries,
                whole_us=whole_us,
            )
            return self.extend if chosen.split else whole, chosen.shortest
        shortest = shortest_of_split(self.spec, batch, self.target, self.tiling, self.extend.tiling, min_seqlen_q)
        if shortest is None:
            return None
        return self.extend, shortest if self.takes_short_queries else min_seqlen_q

    def is_for_other(self, query_len: int) -> bool:
        """Whether `other` serves a batch whose longest query, of those given to this kernel, has `query_len` tokens."""
        return self.others_batches is not None and self.others_batches.serves(query_len)

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        if self.other is not None and self.is_for_other(self.longest(batch, max_seqlen_q)):
            return self.other.bind(batch, min_seqlen_q, max_seqlen_q)
        return super().bind(batch, min_seqlen_q, max_seqlen_q)

    def longest(self, batch: Batch, max_seqlen_q: int) -> int:
        """Tokens of the longest query of a batch that has up to max_seqlen_q: a bound."""
        return min(max_seqlen_q, batch.max_query_len)

    def sizes(self) -> tuple[int, int, int]:
        pack_gqa = packed_gqa_heads(self.spec.group, self.most_packed_heads) if self.split else 1
        return self.target.sm_count * self.config.ctas_per_sm, pack_gqa, self.config.tile_m

    @property
    def v_splits(self) -> int:
        return v_splits(self.spec.head_dim_v)

    def max_query_len_served(self) -> int | None:
        return min(SHORT_QUERY, self.tile_m // self.pack_gqa) if self.split else None

    def tensors(self, operands: Operands) -> DenseTensors:
        (q,) = self.queries(operands.q)
        given = q, operands.keys, operands.values, operands.out
        self.alignment.check(("q", "keys", "values", "out"), given)
        keys, values = stored(self.spec, operands.keys), stored(self.spec, operands.values)
        return DenseTensors(q, keys, values)


class ManyRows(DenseKernel):
    """Short queries of many rows, with products in 8 bits; see `sizes.WIDENED_ROWS`. Keys are split."""

    split = True
    most_packed_heads = MOST_PACKED_HEADS

    def max_query_len_served(self) -> int | None:
        return SHORT_QUERY


class FewOrManyRows(DenseKernel):
    """Short queries, whose products are in 16 bits where rows are few. `other` is the kernel for many rows."""

    def max_query_len_served(self) -> int | None:
        return super().max_query_len_served() if self.other is None else SHORT_QUERY

    def longest(self, batch: Batch, max_seqlen_q: int) -> int:
        """Where longer queries belong to other launches, and the host knows no lengths: as if rows were few."""
        if batch.max_query_len <= max_seqlen_q:
            return batch.max_query_len
        if batch.host_lengths is None:
            return 0
        queries = batch.host_lengths.queries
        return int(queries[queries <= max_seqlen_q].max(initial=0))


class MlaKernel(LayerKernel):
    """Absorbed MLA: a value is the latent part of a key."""

    key_type = MlaKey

    def sizes(self) -> tuple[int, int, int]:
        num_ctas = self.target.sm_count // self.config.cluster * self.config.cluster
        return num_ctas, packed_gqa_heads(self.spec.group), ROWS

    def max_query_len_served(self) -> int | None:
        return None

    def row_group(self, batch: Batch, max_seqlen_q: int) -> tuple[int, int]:
        config = self.config
        if not (config.row_groups and self.split):
            return super().row_group(batch, max_seqlen_q)
        tokens = self.tile_m // self.pack_gqa
        row_tiles = -(-min(max_seqlen_q, batch.max_query_len) // tokens) * (self.head_blocks // config.cluster)
        num_clusters = self.num_ctas // config.cluster
        found = row_group(self.spec, config.tile_n, self.target.chips[0], num_clusters, row_tiles)
        return found.clusters, found.iters

    def tensors(self, operands: Operands) -> MlaTensors:
        latent, q, q_rope = self.spec.head_dim_v, operands.q, operands.q_rope
        if q_rope is None:
            # Half the time of two slices on the host.
            (q,) = self.queries(q)
            q, q_rope = torch.split_with_sizes(q, (latent, q.shape[-1] - latent), -1)
        else:
            q, q_rope = self.queries(q, q_rope)
        self.alignment.check(("q", "q_rope", "keys"), (q, q_rope, operands.keys))
        return MlaTensors(q, q_rope, stored(self.spec, operands.keys))
