# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel, and the default for a width, dtypes and a chip."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.rows import ACCESS_BYTES, MAX_CLUSTER, WARP, RowConfig, ceil_div, ctas_per_sm, power_of_2
from dsl_backend.runtime.chip import Chip
from dsl_backend.softmax.spec import SoftmaxSpec

# The threads of a row load at least 128 adjacent bytes at a time, where the row is as long.
COALESCED_VECTORS = 8
# Elements of a thread: enough loads in flight with few registers; at most what two CTAs on an SM have registers for.
DEFAULT_ELEMENTS, MAX_ELEMENTS = 32, 64
CTA_THREADS, MAX_THREADS = 128, 512
MAX_PORTABLE_CLUSTER = 8
# Rows for at least eight CTAs of 512 threads get sixteen CTAs of 256 threads. An SM is idle less while they wait for
# each other. This is left where the estimate does not choose: accesses that are not whole.
WIDE_THREADS, WIDE_ELEMENTS = 256, 40
# Rows for two or four CTAs of 512 threads get as many CTAs of 256 threads. Three or four of these fit the registers of
# an SM: 96 KB of 16-bit input are in flight and not 64, which hides the time in which a cluster starts and merges.
PAIRED_THREADS = 256
# A row whose width is such a power of two has half as many elements a thread, in as many CTAs as registers allow: its
# threads take two vectors each, and none is outside. 3.62 us and not 4.02 for 512 rows of 4096, 131.95 and not 132.31
# for 16384 of 8192, 17.63 and not 18.05 for 1024 of 16384 (H200, bfloat16). Rows of 32768 are up to 5 %
# slower with 16 or 32 elements in CTAs of 512 threads than with 64 in two CTAs of 256.
FINE_WIDTHS, FINE_ELEMENTS = (4096, 8192, 16384), 16
# Rows of such widths are loaded with evict_last: 997 us and not 1033 for 32768 rows of 32768, 125.8 and not 128.8 for
# 16384 of 8192, 17.4 and not 17.2 for 1024 of 16384 (H200, bfloat16).
KEPT_WIDTHS = (8192, 16384, 32768)
# Of a load that a predicate may leave out: a register.
PREDICATED_BYTES = 4
# Of a spread: elements of a thread, and the fewest threads and bytes of a CTA. Clusters of CTAs of 4 to 5 KB start too
# often for the hardware: 24 us and not 17.6 for 2048 rows of 8192 (H200, bfloat16). Sixteen CTAs have 12 KB each: with
# 9.5 they took 133.8 us and not 126.2 for 1694 rows of 76296.
SPREAD_ELEMENTS, PART_THREADS, PART_BYTES, MANY_PART_BYTES = (8, 64), 4 * WARP, 8192, 12 * 1024
# Registers are given to threads by so many. Threads of more elements of float32 take more of them.
REGISTER_UNIT, MANY_ELEMENTS = 8, 48
# Fitted to 54 spreads of seven rows on an H200: nanoseconds of an SM's bandwidth that are in flight when half of its
# time goes into latencies; what exponentials cost that are computed twice, for each byte that an SM moves in a clock;
# what each doubling of a cluster gains; what 512 threads of a CTA cost; by which power a row that is short of its
# tile counts. The choice is at most 1.4 % slower than the best of them. On an H200 the first two are 12 KB and 2 %;
# other chips have theirs by bandwidth, clock and SMs, and nothing was fitted there.
LATENCY_NS, RECOMPUTED, DOUBLED, WAITING, SHORT = 330, 0.00106, 0.03, 0.02, 0.1
# Elements of an access where input and output have 16 bits and rows are aligned.
HALVES = ACCESS_BYTES // 2


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(RowConfig):
    """Threads, CTAs and registers of a row.

    Attributes:
        two_pass: rows do not fit the registers, and are read twice in a loop.
        recompute: registers hold the input, and exponentials are computed twice: fewer registers, so more CTAs.
        predicated: vectors past a row's end are not loaded; otherwise they load the row's start.
        late_dependents: the next kernel's CTAs may start once this one's have read their rows, not at once.
        evict_last: caches evict the lines of the input after all others.
    """

    two_pass: bool = False
    recompute: bool = False
    predicated: bool = False
    late_dependents: bool = False
    evict_last: bool = False

    def registers(self, spec: SoftmaxSpec) -> int:
        """Registers of a thread without spills: for float32 exponentials and 16 more, or for the input and 24 more."""
        elements = self.vector * self.vectors_per_thread
        return elements * spec.dtype.itemsize // 4 + 24 if self.recompute else elements + 16

    def objections(self, spec: SoftmaxSpec, smem_bytes: int) -> list[str]:
        """Why this configuration does not serve a problem where a CTA may have `smem_bytes`; empty if it does."""
        reasons = self.reasons_against(
            vector=spec.vector,
            widest=ACCESS_BYTES // max(spec.dtype.itemsize, spec.out_dtype.itemsize),
            registers=self.registers(spec),
            smem_bytes=smem_bytes,
        )
        if not self.two_pass and self.tile_elements < spec.width:
            reasons.append(f"holds {self.tile_elements} elements of {spec.width}")
        size = self.vector * spec.dtype.itemsize
        if self.evict_last and (size != ACCESS_BYTES or self.predicated):
            how = "predicated loads" if self.predicated else f"loads of {size} bytes"
            reasons.append(f"priorities of {how}: {ACCESS_BYTES} bytes without a predicate are needed")
        return reasons + self.unpredicated(spec)

    def unpredicated(self, spec: SoftmaxSpec) -> list[str]:
        """Why loads cannot be left out past a row's end, if they should be; empty otherwise."""
        size = self.vector * spec.dtype.itemsize
        if not self.predicated or size >= PREDICATED_BYTES:
            return []
        return [f"predicated loads of {size} bytes: {PREDICATED_BYTES} are the fewest"]


def widest_vector(spec: SoftmaxSpec) -> int:
    """Elements of a load or store: 16 bytes of the wider type, where rows are aligned to that."""
    return min(spec.vector, ACCESS_BYTES // max(spec.dtype.itemsize, spec.out_dtype.itemsize))


def default_config(spec: SoftmaxSpec, chip: Chip) -> SoftmaxConfig:
    """By the width: a thread, part of a warp, a warp, a CTA, or a cluster for each row; for the widest, a loop too.

    Rows of a cluster have the spread with the shortest estimate, unless they fill a tile of a power of two of 16-bit
    elements. CTAs of 128 threads let the next launch start late, so that its CTAs go to all SMs alike
    (docs/dependent-launch.md).
    All this follows from the width, the dtypes and the chip, so that a row's sums have one order whatever is beside it.
    """
    vector = widest_vector(spec)
    threads, cluster = spread(spec, vector)
    vectors_per_thread = ceil_div(spec.width // vector, threads * cluster)
    held = SoftmaxConfig(
        vector=vector,
        vectors_per_thread=vectors_per_thread,
        threads_per_row=threads,
        rows_per_cta=max(1, CTA_THREADS // threads),
        cluster=cluster,
        use_pdl=True,
    )
    if vector * vectors_per_thread > MAX_ELEMENTS:
        return replace(held, vectors_per_thread=DEFAULT_ELEMENTS // vector, two_pass=True)
    even = vector == HALVES and cluster < MAX_CLUSTER and held.tile_elements == spec.width
    if cluster > 1 and not even and vector * spec.dtype.itemsize == ACCESS_BYTES:
        return min(spreads(spec), key=lambda one: estimate(one, spec, chip), default=held)
    if is_fine(spec, vector) or (even and cluster > 1):
        kept = spec.width in KEPT_WIDTHS and not spec.log
        return replace(held, ctas_per_sm=most_ctas(held, spec), evict_last=kept)
    if held.threads == CTA_THREADS and vector * spec.dtype.itemsize == ACCESS_BYTES:
        return replace(held, late_dependents=True)
    return predicated(held, spec)


def spread(spec: SoftmaxSpec, vector: int) -> tuple[int, int]:
    """Threads of a CTA for each row, and CTAs for each row, as powers of two."""
    if is_fine(spec, vector):
        threads = spec.width // FINE_ELEMENTS
        return (threads, 1) if threads <= MAX_THREADS else (PAIRED_THREADS, threads // PAIRED_THREADS)
    count = spec.width // vector
    threads = max(power_of_2(min(count, COALESCED_VECTORS)), power_of_2(ceil_div(spec.width, DEFAULT_ELEMENTS)))
    threads = min(threads, power_of_2(count), MAX_THREADS)
    cluster = 1
    while cluster < MAX_PORTABLE_CLUSTER and spec.width > threads * cluster * DEFAULT_ELEMENTS:
        cluster *= 2
    if cluster == MAX_PORTABLE_CLUSTER:
        wide = vector * ceil_div(count, WIDE_THREADS * MAX_CLUSTER) <= WIDE_ELEMENTS
        return WIDE_THREADS if wide else threads, MAX_CLUSTER
    return PAIRED_THREADS if cluster > 1 and vector == HALVES else threads, cluster


def is_fine(spec: SoftmaxSpec, vector: int) -> bool:
    """Whether a row has FINE_ELEMENTS a thread. Not of logarithms, which were not timed with them."""
    return vector == HALVES and spec.width in FINE_WIDTHS and not spec.log


def most_ctas(config: SoftmaxConfig, spec: SoftmaxSpec) -> int:
    """The CTAs on an SM that registers and threads allow."""
    return ctas_per_sm(config.registers(spec), config.threads)


def predicated(config: SoftmaxConfig, spec: SoftmaxSpec) -> SoftmaxConfig:
    """The same with loads that are left out past a row's end, where there are such and the width of a load allows."""
    left_out = replace(config, predicated=True)
    return left_out if config.tile_elements != spec.width and not left_out.unpredicated(spec) else config


def spreads(spec: SoftmaxSpec, least_cluster: int = 2) -> Iterator[SoftmaxConfig]:
    """All ways to spread a row over whole warps of the CTAs of a cluster, each with as many CTAs on an SM as fit."""
    vector = widest_vector(spec)
    clusters = [1 << power for power in range(MAX_CLUSTER.bit_length()) if 1 << power >= least_cluster]
    least = {MAX_CLUSTER: MANY_PART_BYTES}
    clusters = [one for one in clusters if spec.width * spec.dtype.itemsize >= one * least.get(one, PART_BYTES)]
    for threads, cluster in itertools.product(range(PART_THREADS, MAX_THREADS + 1, WARP), clusters):
        vectors = ceil_div(spec.width // vector, threads * cluster)
        if not SPREAD_ELEMENTS[0] <= vector * vectors <= SPREAD_ELEMENTS[1]:
            continue
        held = SoftmaxConfig(
            vector=vector,
            vectors_per_thread=vectors,
            threads_per_row=threads,
            rows_per_cta=1,
            cluster=cluster,
            use_pdl=True,
            late_dependents=threads == CTA_THREADS,
        )
        held = predicated(held, spec)
        kept, again = whole_ctas(held, spec), whole_ctas(replace(held, recompute=True), spec)
        found = [replace(held, ctas_per_sm=kept)]
        # Exponentials are computed twice only if more CTAs fit.
        found += [replace(held, recompute=True, ctas_per_sm=again)] if again > kept else []
        yield from (config for config in found if not config.objections(spec, config.smem_bytes))


def whole_ctas(config: SoftmaxConfig, spec: SoftmaxSpec) -> int:
    """The CTAs on an SM that registers and threads allow. Threads get whole units of registers.

    Where exponentials are held, rows that end within a tile take a unit more. So do all rows of float32, and those with
    many elements a thread two: with 72 registers for 56 elements 265 rows of 136824 took 80.4 us and not 71.5 (H200).
    """
    more = 0
    if not config.recompute and spec.dtype.itemsize == 4:
        more = 1 + (config.vector * config.vectors_per_thread > MANY_ELEMENTS)
    elif not config.recompute:
        more = config.tile_elements > spec.width
    units = ceil_div(config.registers(spec), REGISTER_UNIT) + more
    return ctas_per_sm(REGISTER_UNIT * units, config.threads)


def estimate(config: SoftmaxConfig, spec: SoftmaxSpec, chip: Chip) -> float:
    """The time of a spread row, relative to that of others of its width: mostly by the bytes in flight on an SM.

    A chip with less bandwidth for each SM needs fewer of them, and has more time for arithmetic.
    """
    bytes_per_ns = chip.memory_gb_s / chip.sm_count
    fill = spec.width / config.tile_elements
    held = config.threads * config.vectors_per_thread * config.vector * spec.dtype.itemsize
    waiting = LATENCY_NS * bytes_per_ns / (config.ctas_per_sm * held * fill)
    again = RECOMPUTED * bytes_per_ns * 1000 / chip.clock_mhz if config.recompute else 0.0
    costs = (1 + again) * (1 + WAITING * config.threads / MAX_THREADS)
    return (1 + waiting) * costs * (1 - DOUBLED * math.log2(config.cluster)) / fill**SHORT
