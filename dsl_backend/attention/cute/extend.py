# SPDX-License-Identifier: Apache-2.0
"""When the keys of long queries are split among CTAs: an estimate from what a plan knows. Needs no CuTe DSL.

The kernel for long queries gives a query tile with all of its keys to one CTA. Where a batch has fewer query tiles than
there are CTAs, the longest of them decides the time, and the other CTAs are idle. Split-KV gives all CTAs an even share
of the key tiles, and costs partial results and the combine kernel. Its tiles hold the query heads of a key head side by
side: where queries are a few tokens behind many keys, they are full, and those of one head are not.
"""

from dataclasses import dataclass

from dsl_backend.attention.cute.sizes import partial_size
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.runtime.target import Target

# FLOPs of an SM in a clock, of dense products of 16-bit operands, with and without tcgen05; exponentials in a clock.
TCGEN05_FLOPS, WGMMA_FLOPS, EXPONENTIALS = 8192, 4096, 16
# Of the faster of both, what kernels reach where products and exponentials overlap (FlashAttention-4: 71 % on a B200).
TCGEN05_UTILISATION = 0.7
# The combine kernel, besides reading partial results: 3 to 4 us on an H200. A launch with a combine of its own for
# short queries costs as much.
COMBINE_US = 4.0
# Splitting must be estimated to save as much, since the estimate errs by so much.
LEAST_GAIN = 0.1
# What short queries lose in tiles of 128 rows, one CTA per SM: two CTAs take 5 to 10 % less time (H200).
SHORT_QUERIES_LOSS = 0.1
# Of the rows of whole query tiles, each of one head: tiles of packed heads must have no more, or whole tiles stay where
# they are many. Queries of a few tokens fill a tile of packed heads, and a part of one of a head.
PACKED_ROWS = 0.75


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a kernel cuts a batch into work.

    Attributes:
        rows, keys: of a tile.
        pack_gqa: query heads packed into a tile.
        head_blocks: row tiles of a token.
        columns: of a partial result.
        num_ctas: of the grid.
        pairs: row tiles of causal prompts are scheduled in pairs: a share has only key tiles that are seen.
        exact_pairs: a row tile without a partner does not count as a pair.
        claims_ahead: a CTA claims a query tile when it begins the one before, so that a long one keeps the next.
    """

    rows: int
    keys: int
    pack_gqa: int
    head_blocks: int
    columns: int
    num_ctas: int
    pairs: bool = False
    exact_pairs: bool = False
    claims_ahead: bool = True

    @property
    def tokens(self) -> int:
        """Of a row tile."""
        return self.rows // self.pack_gqa

    def row_tiles(self, batch: Batch) -> int:
        """Row tiles of long queries: an upper bound where each prompt fills a row tile, and no request is empty.

        One request has max_query_len queries and every other one at least one; the tokens left belong to prompts.
        """
        others = max(batch.num_requests - 1, 0)
        left = max(batch.num_tokens - batch.max_query_len - others, 0)
        if batch.max_query_len <= self.tokens:
            return 1 + min(others, -(-left // max(batch.max_query_len - 1, 1)))
        prompts = min(others, -(-left // self.tokens))
        return -(-batch.max_query_len // self.tokens) + prompts + (left + prompts) // self.tokens

    def tiles(self, batch: Batch) -> int:
        """The same of query tiles."""
        return self.row_tiles(batch) * self.head_blocks

    def saves_rows(self, row_tiles: int, other: "Tiling", other_row_tiles: int) -> bool:
        """Whether so many row tiles have by far fewer rows than the other tiling's."""
        rows, others = row_tiles * self.head_blocks * self.rows, other_row_tiles * other.head_blocks * other.rows
        return rows <= PACKED_ROWS * others

    def tile_us(self, spec: AttentionSpec, target: Target) -> float:
        """Time of a key tile, at the highest clock.

        On SM90 products and exponentials take as long as one after the other: 1.55 us with heads of 128, where a long
        prompt takes 1.75 (H200, whose clock is lower under load).
        """
        scores = self.rows * self.keys
        flops = 2 * scores * (spec.head_dim + self.columns)
        exponentials = scores / (EXPONENTIALS * (2 if target.fast_exponentials else 1))
        clocks = flops / WGMMA_FLOPS + exponentials
        if target.tcgen05:
            clocks = max(flops / TCGEN05_FLOPS, exponentials) / TCGEN05_UTILISATION
        return clocks / target.chips[0].clock_mhz


def keys_seen(spec: AttentionSpec, batch: Batch, queries: int) -> int:
    """A bound of the keys that so many neighbouring queries of a request see."""
    if spec.window_left is None:
        return batch.max_seq_len
    right = 0 if spec.causality is Causality.CAUSAL else spec.window_right
    return batch.max_seq_len if right is None else min(batch.max_seq_len, spec.window_left + queries + right)


def shortest_of_split(
    spec: AttentionSpec, batch: Batch, target: Target, whole: Tiling, split: Tiling, min_query_len: int
) -> int | None:
    """The shortest queries that a split-KV launch is to serve, in place of the kernel with whole query tiles.

    Args:
        whole, split: of the two kernels.
        min_query_len: of long queries; the kernel for short ones serves the rest.

    Returns:
        None where whole query tiles are as fast; min_query_len; or 0 where the launch had better serve the short
        queries too.
    """
    tiles_of_cta = whole.tiles(batch) / max(whole.num_ctas, 1)
    if tiles_of_cta >= 1 and not (
        # Longer queries fill tiles, and their number is but a bound.
        batch.max_query_len < whole.tokens and split.saves_rows(split.row_tiles(batch), whole, whole.row_tiles(batch))
    ):
        return None
    longest = -(-keys_seen(spec, batch, whole.tokens) // whole.keys)
    keys = keys_seen(spec, batch, batch.max_query_len)
    if split.pairs and spec.causality is Causality.CAUSAL and spec.window_left is None:
        keys -= max(batch.max_query_len - split.tokens, 0) // 2
    key_tiles = split.tiles(batch) * -(-keys // split.keys)
    partial_bytes = 4 * 2 * split.num_ctas * partial_size(split.rows, split.columns)
    bytes_per_us = target.chips[0].memory_gb_s * 1e3
    combine_us = COMBINE_US + partial_bytes / bytes_per_us
    split_us = -(-key_tiles // split.num_ctas) * split.tile_us(spec, target) + combine_us
    if split_us > (1 - LEAST_GAIN) * max(tiles_of_cta, 1) * longest * whole.tile_us(spec, target):
        return None
    short_bytes = max(batch.num_requests - 1, 0) * keys_seen(spec, batch, 1) * spec.heads_kv * key_bytes(spec)
    return 0 if SHORT_QUERIES_LOSS * short_bytes / bytes_per_us <= COMBINE_US else min_query_len


def key_bytes(spec: AttentionSpec) -> int:
    """Bytes of a key and its value."""
    return spec.kv.row_bytes(spec.head_dim) + spec.kv.row_bytes(spec.head_dim_v)
