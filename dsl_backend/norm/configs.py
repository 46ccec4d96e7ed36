# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel, and the default for a problem."""

from dataclasses import dataclass, replace

from dsl_backend.norm.spec import NormSpec, Scaling
from dsl_backend.quant.format import GROUP
from dsl_backend.rows import ACCESS_BYTES, MAX_CLUSTER, WARP, RowConfig, ceil_div, ctas_per_sm, power_of_2

# The threads of a row load at least 128 adjacent bytes at a time, where the row is as long.
COALESCED_VECTORS = 8
# Elements of a thread, until a row has 16 CTAs of 512 threads.
DEFAULT_ELEMENTS = 32
# An SM reads while it writes only with several CTAs. 512 threads are one CTA by their registers (71 where ptxas may
# choose, rounded up to 72). Four CTAs of 256 have 64 KB of 16-bit input in flight: 90.2 us and not 102.7 for 4096 rows
# of 16384, 179.2 and not 220.9 for 4096 of 32768, 355.0 and not 486.6 for 4096 of 65536 (H100, bfloat16).
# With a residual, whose bytes are in flight too, rows of 16384 keep one CTA of 512: clusters took 3.26 us and not 3.03
# for 16 rows, 4.36 and not 3.96 for 64, and as long for 4096 (H200).
CTA_THREADS, USUAL_THREADS, MAX_THREADS = 128, 256, 512
# Rows of such widths, 16-bit elements without residual and scales, are loaded with evict_last: 126.3 us and not 129.3
# for 16384 rows of 8192, 499.3 and not 518.1 for 32768 of 16384. The widest of them have eight CTAs of 128 threads and
# not four of 256: 1010 us and not 1029 for 32768 rows, 17.6 and not 18.1 for 512 (H200, bfloat16).
KEPT_WIDTHS, EIGHT_THREADS = (8192, 16384, 32768), 128
# Rows of 4096 to 8192 columns that leave a part of at least 1 / IDLE of their tile idle, and that whole warps with so
# many 16-bit elements a thread fill exactly, have such warps: 2.30 us and not 2.52 for 64 rows of 7168, 59.9 and not
# 62.4 for 8192, 111.1 and not 112.5 with a residual, 21.8 and not 22.2 for 4096 of 5120 (H200, bfloat16). With 32
# elements large launches are faster, 56.0 us for 8192 of 7168, but 64 rows take 2.64.
EXACT_ELEMENTS, IDLE = 16, 8


@dataclass(frozen=True, kw_only=True)
class NormConfig(RowConfig):
    """Threads, CTAs and registers of a row, which is held in registers as a whole.

    Attributes:
        evict_last: caches evict the lines of x and the residual after all others.
    """

    evict_last: bool = False

    def registers(self, spec: NormSpec) -> int:
        """Registers of a thread without spills: for x, residual and weight as they are loaded, and 32 more."""
        element = spec.dtype.itemsize * (1 + spec.residual) + (spec.weight_dtype.itemsize if spec.weight_dtype else 0)
        return ceil_div(self.vector * self.vectors_per_thread * element, 4) + 32

    def objections(self, spec: NormSpec, smem_bytes: int) -> list[str]:
        """Why this configuration does not serve a problem where a CTA may have `smem_bytes`; empty if it does."""
        reasons = self.reasons_against(
            vector=spec.vector,
            widest=ACCESS_BYTES // max(dtype.itemsize for dtype in spec.dtypes),
            registers=self.registers(spec),
            smem_bytes=smem_bytes,
        )
        lanes = lanes_of_group(self.vector)
        if spec.scaling is Scaling.GROUP and (lanes > WARP or self.threads_per_row % lanes):
            reasons.append(
                f"{self.threads_per_row} threads of a row, {self.vector} elements each: {lanes} lanes of one warp have "
                f"the {GROUP} columns of a scale"
            )
        if self.tile_elements < spec.width:
            reasons.append(f"holds {self.tile_elements} elements of {spec.width}")
        if self.evict_last and self.vector * spec.dtype.itemsize != ACCESS_BYTES:
            size = self.vector * spec.dtype.itemsize
            reasons.append(f"priorities of loads of {size} bytes: {ACCESS_BYTES} are needed")
        return reasons


def lanes_of_group(vector: int) -> int:
    """Neighbouring threads whose vectors are the columns of one scale; more than a warp's where accesses are narrow."""
    return GROUP // vector


def widest_vector(spec: NormSpec) -> int:
    """Elements of a load or store: 16 bytes of the widest type, where rows are aligned to that."""
    return min(spec.vector, ACCESS_BYTES // max(dtype.itemsize for dtype in spec.dtypes))


def most_ctas(config: NormConfig, spec: NormSpec) -> int:
    """The CTAs on an SM that registers and threads allow. Rows that end within a tile take 8 registers more."""
    return ctas_per_sm(config.registers(spec) + (8 if config.tile_elements > spec.width else 0), config.threads)


def default_config(spec: NormSpec) -> NormConfig:
    """By the width alone: a thread, part of a warp, a warp, a CTA, or a cluster for each row.

    So a row's sums have one order whatever is beside it, and its output the same bits in every batch. Registers are
    reserved for as many CTAs on an SM as they suffice for, where accesses are whole: others take more registers.
    """
    vector = widest_vector(spec)
    count = spec.width // vector
    threads = max(power_of_2(min(count, COALESCED_VECTORS)), power_of_2(ceil_div(spec.width, DEFAULT_ELEMENTS)))
    alone = spec.residual and spec.width <= MAX_THREADS * DEFAULT_ELEMENTS
    if spec.scaling is Scaling.GROUP:
        threads = max(threads, lanes_of_group(vector))
    threads = min(threads, power_of_2(count), MAX_THREADS if alone else USUAL_THREADS)
    if is_exact(spec):
        threads = spec.width // EXACT_ELEMENTS
    if is_kept(spec) and spec.width == max(KEPT_WIDTHS):
        threads = EIGHT_THREADS
    cluster = 1
    while cluster < MAX_CLUSTER and spec.width > threads * cluster * DEFAULT_ELEMENTS:
        cluster *= 2
    if spec.width > threads * cluster * DEFAULT_ELEMENTS:
        threads = MAX_THREADS
    config = NormConfig(
        vector=vector,
        vectors_per_thread=ceil_div(count, threads * cluster),
        threads_per_row=threads,
        rows_per_cta=max(1, CTA_THREADS // threads),
        cluster=cluster,
        use_pdl=True,
    )
    whole = vector * max(dtype.itemsize for dtype in spec.dtypes) == ACCESS_BYTES
    return replace(config, ctas_per_sm=most_ctas(config, spec), evict_last=is_kept(spec)) if whole else config


def is_kept(spec: NormSpec) -> bool:
    """Whether a row is of those that are faster with evict_last. A residual that is written is read again soon."""
    return not spec.residual and has_whole_halves(spec) and spec.width in KEPT_WIDTHS


def is_exact(spec: NormSpec) -> bool:
    """Whether a row is one of those that have EXACT_ELEMENTS a thread. Narrower and wider ones were not timed so."""
    usual = USUAL_THREADS * widest_vector(spec)
    idle = -spec.width % usual
    between = USUAL_THREADS * EXACT_ELEMENTS < spec.width <= MAX_THREADS * EXACT_ELEMENTS
    whole = spec.width % (WARP * EXACT_ELEMENTS) == 0
    return has_whole_halves(spec) and between and whole and idle * IDLE >= spec.width + idle


def has_whole_halves(spec: NormSpec) -> bool:
    """Whether all elements have 16 bits, accesses are whole, and no output is quantized."""
    halves = {dtype.itemsize for dtype in spec.dtypes} == {2}
    return halves and widest_vector(spec) * spec.dtype.itemsize == ACCESS_BYTES
