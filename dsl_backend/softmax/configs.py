# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel, and the default for a width and dtypes."""

from dataclasses import dataclass, replace

from dsl_backend.rows import ACCESS_BYTES, MAX_CLUSTER, RowConfig, ceil_div, ctas_per_sm, power_of_2
from dsl_backend.softmax.spec import SoftmaxSpec

# The threads of a row load at least 128 adjacent bytes at a time, where the row is as long.
COALESCED_VECTORS = 8
# Elements of a thread: enough loads in flight with few registers; at most what two CTAs on an SM have registers for.
DEFAULT_ELEMENTS, MAX_ELEMENTS = 32, 64
CTA_THREADS, MAX_THREADS = 128, 512
MAX_PORTABLE_CLUSTER = 8
# Rows for at least eight CTAs of 512 threads get sixteen CTAs of 256 threads. An SM is idle less while they wait for
# each other: 12.2 us and not 12.6 for 64 rows of 128256, 51 us and not 67 for 256 rows of 151936 (H200, bfloat16).
WIDE_THREADS, WIDE_ELEMENTS = 256, 40
# Rows for two or four CTAs of 512 threads get as many CTAs of 256 threads. Three or four of these fit the registers of
# an SM: 96 KB of 16-bit input are in flight and not 64, which hides the time in which a cluster starts and merges. As
# many as fit: 69.0 us and not 78.7 with three for 2445 rows of 20552, of which an SM holds four CTAs (H100, bfloat16).
PAIRED_THREADS = 256
# A row whose width is such a power of two has half as many elements a thread, in as many CTAs as registers allow: its
# threads take two vectors each, and none is outside. 3.62 us and not 4.02 for 512 rows of 4096, 131.95 and not 132.31
# for 16384 of 8192, 17.63 and not 18.05 for 1024 of 16384 (H200, bfloat16). Rows of 32768 are up to 5 %
# slower with 16 or 32 elements in CTAs of 512 threads than with 64 in two CTAs of 256.
FINE_WIDTHS, FINE_ELEMENTS = (4096, 8192, 16384), 16
# Of a load that a predicate may leave out: a register.
PREDICATED_BYTES = 4
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
    """

    two_pass: bool = False
    recompute: bool = False
    predicated: bool = False
    late_dependents: bool = False

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


def default_config(spec: SoftmaxSpec) -> SoftmaxConfig:
    """By the width: a thread, part of a warp, a warp, a CTA, or a cluster for each row; for the widest, a loop too.

    The limits follow from the bytes in flight: an H200 needs at least 33 KB for each SM.
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
    if is_fine(spec, vector) or (vector == HALVES and 1 < cluster < MAX_CLUSTER):
        return replace(held, ctas_per_sm=most_ctas(held, spec))
    return densest(held, spec) if vector == HALVES and cluster == MAX_CLUSTER and threads == MAX_THREADS else held


def spread(spec: SoftmaxSpec, vector: int) -> tuple[int, int]:
    """Threads of a CTA for each row, and CTAs for each row."""
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


def densest(held: SoftmaxConfig, spec: SoftmaxSpec) -> SoftmaxConfig:
    """The same with exponentials that are computed twice, if so more CTAs fit an SM.

    Rows of 16 CTAs are few on a GPU at a time, and the rest of them wait: 20.97 us and not 23.86 for 64 rows of 201088,
    of which 24 and not 16 are on an H100's SMs (bfloat16).
    """
    again = replace(held, recompute=True)
    most = most_ctas(again, spec)
    return replace(again, ctas_per_sm=most) if most > most_ctas(held, spec) else held
