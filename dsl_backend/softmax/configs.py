# SPDX-License-Identifier: Apache-2.0
"""How a row is spread over threads and blocks: by its width and dtypes alone."""

from dataclasses import dataclass, replace

from dsl_backend.softmax.spec import SoftmaxSpec

WARP = 32
REGISTERS_PER_SM = 64 * 1024
MOST_REGISTERS = 255
ACCESS_BYTES = 16
# A row's threads take 128 neighbouring bytes at a time at least, where the row is that long.
COALESCED_VECTORS = 8
# Elements of a thread: enough loads in flight at few registers, then as many as two blocks an SM leave room for.
FEW_ELEMENTS, MOST_ELEMENTS = 32, 64
BLOCK_THREADS, MOST_THREADS = 128, 512
PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
# Rows for eight blocks of 512 threads or more get sixteen of 256, which leave an SM less idle while they wait for each
# other: 12.2 us and not 12.6 for 64 rows of 128256, 51 us and not 67 for 256 rows of 151936 (H200, bfloat16).
WIDE_THREADS, WIDE_ELEMENTS = 256, 40
# Rows for two or four blocks of 512 threads get as many of 256, whose registers leave room for three on an SM: 96 KB of
# 16-bit input in flight and not 64, which hide that a cluster starts and merges together.
PAIRED_THREADS, PAIRED_RESIDENT = 256, 3


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """Threads, blocks and registers of a row. Thread t of block b takes vector (i * cluster + b) * threads_per_row + t.

    Attributes:
        vector: neighbouring elements of one access.
        vectors: that a thread holds in registers at a time.
        threads_per_row: of a block; a power of two.
        rows_per_block: rows that a block works on side by side.
        cluster: blocks that share a row and merge through distributed shared memory.
        streamed: rows are longer than what is held: read twice, in a loop.
        recompute: what is held is the input, and exponentials are computed twice: fewer registers, so more blocks.
        resident: blocks on an SM that registers are kept for.
        overlap: the next launch's blocks may start beside the last ones of this (programmatic dependent launch).
    """

    vector: int
    vectors: int
    threads_per_row: int
    rows_per_block: int
    cluster: int = 1
    streamed: bool = False
    recompute: bool = False
    resident: int = 1
    overlap: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.threads_per_row * self.rows_per_block

    @property
    def warps_per_row(self) -> int:
        """Warps of a block that share a row; 1 where a warp has several rows."""
        return max(1, self.threads_per_row // WARP)

    @property
    def tile(self) -> int:
        """Elements of a row that are held at a time."""
        return self.vector * self.vectors * self.threads_per_row * self.cluster

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: a (maximum, sum) for each warp of the row, and an mbarrier."""
        if self.warps_per_row == 1 and self.cluster == 1:
            return 0
        return 8 * self.warps_per_row * self.cluster * self.rows_per_block + (8 if self.cluster > 1 else 0)

    def registers(self, spec: SoftmaxSpec) -> int:
        """Of a thread, so that ptxas need not spill: float32 exponentials and 16 more, or the input and 32 more."""
        elements = self.vector * self.vectors
        return elements * spec.dtype.itemsize // 4 + 32 if self.recompute else elements + 16

    def objections(self, spec: SoftmaxSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot be run so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        widest = ACCESS_BYTES // max(spec.dtype.itemsize, spec.out_dtype.itemsize)
        if spec.vector % self.vector or self.vector > widest:
            reasons.append(
                f"vectors of {self.vector} elements: rows are aligned to {spec.vector}, and {widest} are "
                f"{ACCESS_BYTES} bytes"
            )
        counts = {name: getattr(self, name) for name in ("threads_per_row", "rows_per_block", "cluster", "vector")}
        reasons += [f"{name} {n} is not a power of two" for name, n in counts.items() if n < 1 or n & (n - 1)]
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            reasons.append(f"{self.threads} threads a block are not a multiple of {WARP} up to 1024")
        if self.vectors < 1:
            reasons.append(f"{self.vectors} vectors a thread: one is needed")
        if self.cluster > MOST_CLUSTER:
            reasons.append(f"clusters of {self.cluster} blocks: {MOST_CLUSTER} are the most")
        if self.cluster > 1 and (self.rows_per_block > 1 or self.threads_per_row < WARP):
            reasons.append(f"a cluster shares one row, with whole warps: not {self.rows_per_block} rows a block")
        if not self.streamed and self.tile < spec.width:
            reasons.append(f"holds {self.tile} elements of {spec.width}")
        registers = self.registers(spec)
        if registers > MOST_REGISTERS or registers * self.threads * self.resident > REGISTERS_PER_SM:
            reasons.append(
                f"{registers} registers for each of {self.threads} threads, {self.resident} blocks on an SM: "
                f"{MOST_REGISTERS} a thread and {REGISTERS_PER_SM} an SM are the most"
            )
        if self.smem_bytes > smem_bytes:
            reasons.append(f"{self.smem_bytes} bytes of shared memory: {smem_bytes} are the most")
        return reasons


def power_of_2(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def widest_vector(spec: SoftmaxSpec) -> int:
    """Elements of an access: 16 bytes of the wider type, where rows are aligned to that."""
    return min(spec.vector, ACCESS_BYTES // max(spec.dtype.itemsize, spec.out_dtype.itemsize))


def default_config(spec: SoftmaxSpec) -> RowConfig:
    """The level that a row needs: a thread, part of a warp, a warp, a block, a cluster; last, a loop.

    The limits are arithmetic on bytes in flight: 33 KB an SM at least on an H200.
    """
    vector = widest_vector(spec)
    count = spec.width // vector
    threads = max(power_of_2(min(count, COALESCED_VECTORS)), power_of_2(ceil_div(spec.width, FEW_ELEMENTS)))
    threads = min(threads, power_of_2(count), MOST_THREADS)
    cluster = 1
    while cluster < PORTABLE_CLUSTER and spec.width > threads * cluster * FEW_ELEMENTS:
        cluster *= 2
    if cluster == PORTABLE_CLUSTER:
        cluster = MOST_CLUSTER
        if vector * ceil_div(count, WIDE_THREADS * cluster) <= WIDE_ELEMENTS:
            threads = WIDE_THREADS
    resident = 1
    if 1 < cluster < PORTABLE_CLUSTER and vector == ACCESS_BYTES // 2:
        threads, resident = PAIRED_THREADS, PAIRED_RESIDENT
    vectors = ceil_div(count, threads * cluster)
    held = RowConfig(
        vector=vector,
        vectors=vectors,
        threads_per_row=threads,
        rows_per_block=max(1, BLOCK_THREADS // threads),
        cluster=cluster,
        resident=resident,
        overlap=True,
    )
    if vector * vectors <= MOST_ELEMENTS:
        return held
    return replace(held, vectors=FEW_ELEMENTS // vector, streamed=True)
