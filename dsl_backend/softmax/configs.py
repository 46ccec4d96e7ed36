# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel, and the default for a width and dtypes."""

from dataclasses import dataclass, replace

from dsl_backend.softmax.spec import SoftmaxSpec

WARP = 32
REGISTERS_PER_SM = 64 * 1024
MAX_REGISTERS = 255
ACCESS_BYTES = 16
# The threads of a row load at least 128 adjacent bytes at a time, where the row is as long.
COALESCED_VECTORS = 8
# Elements of a thread: enough loads in flight with few registers; at most what two CTAs on an SM have registers for.
DEFAULT_ELEMENTS, MAX_ELEMENTS = 32, 64
CTA_THREADS, MAX_THREADS = 128, 512
MAX_PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
# Rows for at least eight CTAs of 512 threads get sixteen CTAs of 256 threads. An SM is idle less while they wait for
# each other: 12.2 us and not 12.6 for 64 rows of 128256, 51 us and not 67 for 256 rows of 151936 (H200, bfloat16).
WIDE_THREADS, WIDE_ELEMENTS = 256, 40
# Rows for two or four CTAs of 512 threads get as many CTAs of 256 threads. Three of these fit the registers of an SM:
# 96 KB of 16-bit input are in flight and not 64, which hides the time in which a cluster starts and merges.
PAIRED_THREADS, PAIRED_CTAS_PER_SM = 256, 3


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """Threads, CTAs and registers of a row. Thread t of CTA c loads vectors (i * cluster + c) * threads_per_row + t.

    Attributes:
        vector: adjacent elements of one load or store.
        vectors_per_thread: that a thread holds in registers at a time.
        threads_per_row: of a CTA; a power of two.
        rows_per_cta: rows that a CTA processes at the same time.
        cluster: CTAs that share a row and merge through distributed shared memory.
        two_pass: rows do not fit the registers, and are read twice in a loop.
        recompute: registers hold the input, and exponentials are computed twice: fewer registers, so more CTAs.
        ctas_per_sm: CTAs on an SM that registers are reserved for.
        use_pdl: programmatic dependent launch: the next kernel's CTAs may start while the last ones of this one run.
    """

    vector: int
    vectors_per_thread: int
    threads_per_row: int
    rows_per_cta: int
    cluster: int = 1
    two_pass: bool = False
    recompute: bool = False
    ctas_per_sm: int = 1
    use_pdl: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def warps_per_row(self) -> int:
        """Warps of a CTA that share a row; 1 where a warp has several rows."""
        return max(1, self.threads_per_row // WARP)

    @property
    def tile_elements(self) -> int:
        """Elements of a row that its threads hold at a time."""
        return self.vector * self.vectors_per_thread * self.threads_per_row * self.cluster

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: a (maximum, sum) for each warp of the row, and an mbarrier."""
        if self.warps_per_row == 1 and self.cluster == 1:
            return 0
        return 8 * self.warps_per_row * self.cluster * self.rows_per_cta + (8 if self.cluster > 1 else 0)

    def registers(self, spec: SoftmaxSpec) -> int:
        """Registers of a thread without spills: for float32 exponentials and 16 more, or for the input and 32 more."""
        elements = self.vector * self.vectors_per_thread
        return elements * spec.dtype.itemsize // 4 + 32 if self.recompute else elements + 16

    def objections(self, spec: SoftmaxSpec, smem_bytes: int) -> list[str]:
        """Why this configuration does not serve a problem where a CTA may have `smem_bytes`; empty if it does."""
        reasons = []
        widest = ACCESS_BYTES // max(spec.dtype.itemsize, spec.out_dtype.itemsize)
        if spec.vector % self.vector or self.vector > widest:
            reasons.append(
                f"vectors of {self.vector} elements: rows are aligned to {spec.vector}, and {widest} are "
                f"{ACCESS_BYTES} bytes"
            )
        counts = {name: getattr(self, name) for name in ("threads_per_row", "rows_per_cta", "cluster", "vector")}
        reasons += [f"{name} {n} is not a power of two" for name, n in counts.items() if n < 1 or n & (n - 1)]
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            reasons.append(f"{self.threads} threads for each CTA are not a multiple of {WARP} up to 1024")
        if self.vectors_per_thread < 1:
            reasons.append(f"{self.vectors_per_thread} vectors for each thread: one is needed")
        if self.cluster > MAX_CLUSTER:
            reasons.append(f"clusters of {self.cluster} CTAs: {MAX_CLUSTER} are the most")
        if self.cluster > 1 and (self.rows_per_cta > 1 or self.threads_per_row < WARP):
            reasons.append(f"a cluster shares one row, with whole warps: not {self.rows_per_cta} rows for each CTA")
        if not self.two_pass and self.tile_elements < spec.width:
            reasons.append(f"holds {self.tile_elements} elements of {spec.width}")
        registers = self.registers(spec)
        if registers > MAX_REGISTERS or registers * self.threads * self.ctas_per_sm > REGISTERS_PER_SM:
            reasons.append(
                f"{registers} registers for each of {self.threads} threads, {self.ctas_per_sm} CTAs on an SM: "
                f"{MAX_REGISTERS} for a thread and {REGISTERS_PER_SM} for an SM are the most"
            )
        if self.smem_bytes > smem_bytes:
            reasons.append(f"{self.smem_bytes} bytes of shared memory: {smem_bytes} are the most")
        return reasons


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def widest_vector(spec: SoftmaxSpec) -> int:
    """Elements of a load or store: 16 bytes of the wider type, where rows are aligned to that."""
    return min(spec.vector, ACCESS_BYTES // max(spec.dtype.itemsize, spec.out_dtype.itemsize))


def default_config(spec: SoftmaxSpec) -> RowConfig:
    """By the width: a thread, part of a warp, a warp, a CTA, or a cluster for each row; for the widest, a loop too.

    The limits follow from the bytes in flight: an H200 needs at least 33 KB for each SM.
    """
    vector = widest_vector(spec)
    count = spec.width // vector
    threads = max(power_of_2(min(count, COALESCED_VECTORS)), power_of_2(ceil_div(spec.width, DEFAULT_ELEMENTS)))
    threads = min(threads, power_of_2(count), MAX_THREADS)
    cluster = 1
    while cluster < MAX_PORTABLE_CLUSTER and spec.width > threads * cluster * DEFAULT_ELEMENTS:
        cluster *= 2
    if cluster == MAX_PORTABLE_CLUSTER:
        cluster = MAX_CLUSTER
        if vector * ceil_div(count, WIDE_THREADS * cluster) <= WIDE_ELEMENTS:
            threads = WIDE_THREADS
    ctas_per_sm = 1
    if 1 < cluster < MAX_PORTABLE_CLUSTER and vector == ACCESS_BYTES // 2:
        threads, ctas_per_sm = PAIRED_THREADS, PAIRED_CTAS_PER_SM
    vectors_per_thread = ceil_div(count, threads * cluster)
    held = RowConfig(
        vector=vector,
        vectors_per_thread=vectors_per_thread,
        threads_per_row=threads,
        rows_per_cta=max(1, CTA_THREADS // threads),
        cluster=cluster,
        ctas_per_sm=ctas_per_sm,
        use_pdl=True,
    )
    if vector * vectors_per_thread <= MAX_ELEMENTS:
        return held
    return replace(held, vectors_per_thread=DEFAULT_ELEMENTS // vector, two_pass=True)
