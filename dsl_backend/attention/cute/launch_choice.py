# SPDX-License-Identifier: Apache-2.0
"""Which launches serve a batch whose lengths the host knows: an estimate of each choice. Needs no CuTe DSL.

Query tiles are whole, or their keys are split. Short queries have a launch of their own, or that of the long ones
serves them. Where the host knows only the longest lengths, `extend.py` decides.
"""

from dataclasses import dataclass

import numpy as np

from dsl_backend.attention.cute.extend import COMBINE_US, SHORT_QUERIES_LOSS, Tiling, key_bytes
from dsl_backend.attention.cute.sizes import partial_size, section_keys
from dsl_backend.attention.spec import AttentionSpec, Causality, HostLengths
from dsl_backend.runtime.target import Target

# Of the rates in `extend.py`, what prefill reaches: 1.25, 1.55, 1.90 and 1.95 us a key tile with heads of 64, 96, 128
# and 256 (H100). Those of tcgen05 have it in them.
WGMMA_UTILISATION = 0.82
# Of their time, what tiles of 192 rows take for as many scores: three warpgroups hide more of each other's softmax.
# 0.86 to 0.95 of four batches (H200, heads of 64).
WIDE_TILE = 0.9
# Begin and end of a work tile: 1.5 to 4 us.
WORK_TILE_US = 2.0
# Of the memory's rate, what decode reaches.
MEMORY_UTILISATION = 0.88
# Other launches must be estimated to save as much. An estimate from bounds errs by more.
LEAST_GAIN = 0.05
# Whole query tiles of a CTA, of which more are even enough.
EVEN_TILES = 8


@dataclass(frozen=True)
class LaunchChoice:
    """What serves the long queries of a batch.

    Attributes:
        split: the kernel that splits keys.
        shortest: queries of a request that it serves; 0 where it serves short queries too.
        us: estimated time of all launches.
    """

    split: bool
    shortest: int
    us: float


@dataclass(frozen=True)
class Estimate:
    """Times of parts of a batch.

    Args:
        lengths: of the batch. min_query_len: of long queries.
    """

    spec: AttentionSpec
    lengths: HostLengths
    target: Target
    min_query_len: int

    def part(self, shortest: int) -> HostLengths:
        """The requests of so many queries or more, without those of none."""
        served = self.lengths.queries >= max(shortest, 1)
        return HostLengths(self.lengths.queries[served], self.lengths.keys[served])

    def tile_us(self, tiling: Tiling) -> float:
        found = tiling.tile_us(self.spec, self.target)
        if self.target.tcgen05:
            return found
        return found / WGMMA_UTILISATION * (WIDE_TILE if tiling.rows > 128 else 1)

    @property
    def bytes_per_us(self) -> float:
        return MEMORY_UTILISATION * self.target.chips[0].memory_gb_s * 1e3

    def key_bytes(self, lengths: HostLengths) -> np.ndarray:
        """Of the keys and values that each of these requests sees."""
        spec, keys = self.spec, lengths.keys
        seen = keys if spec.window_left is None else np.minimum(keys, lengths.queries + spec.window_left)
        return seen.astype(np.int64) * (spec.heads_kv * key_bytes(spec))

    def memory_us(self, lengths: HostLengths) -> float:
        """In which memory delivers the keys and queries of these requests, and takes their outputs."""
        spec = self.spec
        query_bytes = spec.heads_q * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
        return float(self.key_bytes(lengths).sum() + int(lengths.queries.sum()) * query_bytes) / self.bytes_per_us

    def reread_us(self, first: float, iters: int, in_process: float, tiling: Tiling) -> float:
        """In which memory delivers all key tiles that CTAs read, but for what L2 holds of the keys that it has read.

        Args:
            first: bytes of keys, each read once. iters: key tiles of all work tiles. in_process: bytes of keys that
                work tiles of one time may read.
        """
        again = max(iters * tiling.keys * key_bytes(self.spec) - first, 0.0)
        missed = max(1 - self.target.chips[0].l2_bytes / in_process, 0.0)
        return (first + missed * again) / self.bytes_per_us

    def whole_us(self, tiling: Tiling, shortest: int) -> float:
        """Whole query tiles, the longest first."""
        served = self.part(shortest)
        if not len(served.keys):
            return 0.0
        ctas, tiles = tiling.num_ctas, key_tiles(self.spec, served, tiling)
        iters, sections = int(tiles.sum()) * tiling.head_blocks, self.sections(served)
        # The requests of a section share L2; the last one may be larger than that.
        of_requests = self.key_bytes(served)
        largest = float(np.bincount(sections, of_requests).max())
        loss = SHORT_QUERIES_LOSS if served.has_queries_up_to(self.min_query_len - 1) else 0
        reread_us = self.reread_us(float(of_requests.sum()), iters, largest, tiling) * (1 + loss)
        tile_us = max(self.tile_us(tiling), reread_us * ctas / iters)
        each = np.repeat(-np.sort(-tiles), tiling.head_blocks) * tile_us + WORK_TILE_US
        found = max(
            float(each[0]),
            float(each.sum()) / ctas + self.last_section_tiles(served, sections, tiles, tiling) * tile_us,
        )
        if len(each) > ctas:
            second = float(each[ctas])
            if tiling.claims_ahead:
                # Every CTA has claimed its second tile when it begins the first one: whichever is next.
                second = float(np.median(each[ctas : 2 * ctas]))
                found = max(found, float(each[0]) + second)
            found = max(found, float(each[ctas - 1]) + second)
        return max(found, self.memory_us(served))

    def sections(self, served: HostLengths) -> np.ndarray:
        """Of each request, in the order in which requests are processed."""
        return (np.cumsum(served.keys) - served.keys) // section_keys(self.spec.heads_kv * key_bytes(self.spec))

    def last_section_tiles(self, served: HostLengths, sections: np.ndarray, tiles: np.ndarray, tiling: Tiling) -> float:
        """By how many key tiles some CTAs finish after the mean of all, where requests are processed in sections.

        The longest tiles of the last section begin when others are done; half of one remains at the mean.
        """
        if sections[-1] == 0:
            return 0.0
        row_tiles = -(-served.queries // tiling.tokens)
        return float(tiles[np.repeat(sections == sections[-1], row_tiles)].max()) / 2

    def split_us(self, tiling: Tiling, shortest: int) -> float:
        """Even shares of all key tiles, and combining partial results."""
        served = self.part(shortest)
        if not len(served.keys):
            return 0.0
        row_tiles = -(-served.queries // tiling.tokens)
        if tiling.pairs and self.spec.causality is Causality.CAUSAL and self.spec.window_left is None:
            iters = key_tiles(self.spec, served, tiling).sum()
            if not tiling.exact_pairs:
                # A row tile without a partner counts twice.
                alone = (row_tiles > 1) & (row_tiles % 2 > 0)
                iters += request_tiles(self.spec, served, tiling)[alone].sum()
        else:
            iters = (row_tiles * request_tiles(self.spec, served, tiling)).sum()
        iters = int(iters) * tiling.head_blocks
        # All requests are in process at a time. Keys that one row tile reads are not read again, and take their share
        # of L2 from those that are.
        read, of_requests = iters * tiling.keys * key_bytes(self.spec), self.key_bytes(served)
        once, again = float(of_requests[row_tiles == 1].sum()), float(of_requests[row_tiles > 1].sum())
        in_process = max(again, 1.0) * read / max(read - once, 1.0)
        reread_us = self.reread_us(once + again, iters, in_process, tiling)
        if request_tiles(self.spec, served, tiling).min() * tiling.num_ctas < iters:
            # The fixed cost of a work tile counts as one more.
            iters += int(row_tiles.sum()) * tiling.head_blocks
        share = -(-iters // tiling.num_ctas)
        partial_bytes = 4 * 2 * tiling.num_ctas * partial_size(tiling.rows, tiling.columns)
        combine_us = COMBINE_US + partial_bytes / (self.target.chips[0].memory_gb_s * 1e3)
        memory_us = self.memory_us(served) * (1 + SHORT_QUERIES_LOSS)
        return max(share * self.tile_us(tiling) + WORK_TILE_US, memory_us, reread_us) + combine_us

    def short_us(self) -> float:
        """The launch for short queries, with its combine: also where a batch has none."""
        lengths = self.lengths
        short = (lengths.queries > 0) & (lengths.queries < self.min_query_len)
        return self.memory_us(HostLengths(lengths.queries[short], lengths.keys[short])) + COMBINE_US


def request_tiles(spec: AttentionSpec, lengths: HostLengths, tiling: Tiling) -> np.ndarray:
    """Key tiles of each request, those before all windows left out."""
    first = np.zeros_like(lengths.keys)
    if spec.window_left is not None:
        first = np.maximum(lengths.keys - lengths.queries - spec.window_left, 0) // tiling.keys
    return np.maximum(-(-lengths.keys // tiling.keys) - first, 1)


def key_tiles(spec: AttentionSpec, lengths: HostLengths, tiling: Tiling) -> np.ndarray:
    """Key tiles that each row tile sees, for one head block: those of a request side by side."""
    count = -(-lengths.queries // tiling.tokens)
    request = np.repeat(np.arange(len(count)), count)
    index = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    queries, keys = lengths.queries[request], lengths.keys[request]
    begin, end = index * tiling.tokens, np.minimum((index + 1) * tiling.tokens, queries)
    right = 0 if spec.causality is Causality.CAUSAL else spec.window_right
    last = keys if right is None else np.minimum(keys, np.maximum(keys - queries + end + right, 0))
    first = np.zeros_like(last)
    if spec.window_left is not None:
        first = np.maximum(keys - queries + begin - spec.window_left, 0) // tiling.keys
    return np.maximum(-(-last // tiling.keys) - first, 1)


def fastest(
    spec: AttentionSpec,
    lengths: HostLengths,
    target: Target,
    whole: Tiling,
    split: Tiling,
    min_query_len: int,
    *,
    short_too: bool = True,
    whole_us: float | None = None,
) -> LaunchChoice:
    """The launches that are estimated to take least; whole query tiles unless others gain LEAST_GAIN.

    Args:
        whole, split: of the kernel with whole query tiles, and of the one that splits keys.
        min_query_len: of long queries; another kernel serves shorter ones where these do not.
        short_too: these kernels may serve short queries.
        whole_us: of long queries in whole query tiles, where it was estimated before.
    """
    estimate = Estimate(spec, lengths, target, min_query_len)
    long = lengths.queries >= min_query_len
    # Where no query is short, without a launch for these.
    shortest = min_query_len if lengths.has_queries_up_to(min_query_len - 1) else 0
    short_us = estimate.short_us() if shortest else 0.0
    if whole_us is None:
        whole_us = estimate.whole_us(whole, min_query_len)
    usual = LaunchChoice(False, shortest, whole_us + short_us)
    row_tiles, packed = (int((-(-lengths.queries[long] // one.tokens)).sum()) for one in (whole, split))
    even = row_tiles * whole.head_blocks > EVEN_TILES * whole.num_ctas
    if even and not split.saves_rows(packed, whole, row_tiles):
        return usual
    others = [LaunchChoice(True, shortest, estimate.split_us(split, shortest) + short_us)]
    if shortest and short_too:
        others += [
            LaunchChoice(True, 0, estimate.split_us(split, 0)),
            LaunchChoice(False, 0, estimate.whole_us(whole, 0)),
        ]
    best = min(others, key=lambda one: one.us)
    return best if best.us <= (1 - LEAST_GAIN) * usual.us else usual
