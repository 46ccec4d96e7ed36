# SPDX-License-Identifier: Apache-2.0
"""How a row is spread over threads and blocks: frozen configurations, each with a pure default."""

import math
from dataclasses import dataclass

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.spec import SamplingSpec

WARP = 32
ACCESS_BYTES = 16
PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
THREADS = 512
# Of the 256 KB that SM90 and SM100 have for cache and shared memory together, what is left for each of two blocks.
L1_BYTES = 96 * 1024
REGISTERS_PER_SM = 64 * 1024
REGISTERS = 64
# Shared memory that an SM of SM90 or SM100 has, and what every block takes of it for itself.
SM_BYTES = 228 * 1024
RESERVED_BYTES = 1024
MOST_GROUPS = 256
BINS = 1024


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """Of the Triton kernel: one program for a row.

    Attributes:
        block: logits that a program looks at in one go; at least 256, as many as it has histogram bins.
        num_warps: warps of a program.
    """

    block: int
    num_warps: int

    @classmethod
    def default(cls, spec: SamplingSpec, target: Target) -> "RowConfig":
        wide = min(4096, max(256, 1 << (spec.vocab - 1).bit_length()))
        return cls(block=wide, num_warps=4 if wide < 2048 else 16)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Of the CuTe DSL kernel: a cluster for a row. Every warp has a run of neighbouring logits of its own.

    Attributes:
        cluster: blocks that share a row; above 8 a launch is non-portable, and SM90 and SM100 have it.
        threads: of a block.
        vector: neighbouring logits of one access.
        loads: accesses that a thread has in flight.
        room: candidates that are sampled from without looking at the row again.
    """

    cluster: int
    threads: int
    vector: int
    loads: int = 8
    room: int = 512

    @classmethod
    def default(
        cls, spec: SamplingSpec, target: Target, rows: int, vector: int, bounded: bool = True
    ) -> "ClusterConfig":
        """As many blocks a row as the batch leaves SMs for, and as the row has logits for.

        The limits are arithmetic on caches and SMs, and not yet measured.

        Args:
            vector: neighbours that may be accessed at once in every row.
            bounded: rows have top-k or min-p. Others are read several times: their blocks' parts fit the L1 cache.
        """
        fits = 1 if bounded else min(PORTABLE_CLUSTER, -(-spec.vocab * spec.dtype.itemsize // L1_BYTES))
        cluster = 1
        while (
            2 * cluster <= MOST_CLUSTER
            and cluster * THREADS * vector < spec.vocab
            and (
                cluster < fits
                or 2 * cluster * rows <= (target.sm_count if 2 * cluster > PORTABLE_CLUSTER else 2 * target.sm_count)
            )
        ):
            cluster *= 2
        return cls(cluster=cluster, threads=THREADS, vector=vector)

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.threads // WARP

    @property
    def groups(self) -> int:
        """Parts of a row, each with a largest logit: the k-th largest of these bounds the row's from below."""
        return min(MOST_GROUPS, self.cluster * self.threads)

    @property
    def lanes_per_group(self) -> int:
        return self.cluster * self.threads // self.groups

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: groups, histograms, candidates (28 bytes each), sums of warps, and scalars."""
        return 4 * MOST_GROUPS + 8 * BINS + 28 * self.room + 12 * self.warps + 4 * 8 * WARP + 256

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that registers are shared by: 64 a thread are enough, and two blocks hide each other's barriers."""
        return max(1, min(2, REGISTERS_PER_SM // (REGISTERS * self.threads)))

    @property
    def smem_percent(self) -> int:
        """Of an SM's memory, what its blocks share; the rest is the L1 cache, which a row's later passes read from."""
        return -(-100 * self.blocks_per_sm * (self.smem_bytes + RESERVED_BYTES) // SM_BYTES)

    def objections(self, spec: SamplingSpec, target: Target) -> list[str]:
        """Why a problem cannot be run so; empty where it can."""
        reasons = []
        widest = ACCESS_BYTES // spec.dtype.itemsize
        if self.vector > widest or spec.vocab % self.vector:
            reasons.append(f"vectors of {self.vector} logits: a divisor of {spec.vocab} up to {widest} is needed")
        counts = {name: getattr(self, name) for name in ("cluster", "threads", "vector", "loads")}
        reasons += [f"{name} {n} is not a power of two" for name, n in counts.items() if n < 1 or n & (n - 1)]
        if not WARP <= self.threads <= 1024:
            reasons.append(f"{self.threads} threads a block are not from {WARP} to 1024")
        if self.cluster > MOST_CLUSTER:
            reasons.append(f"clusters of {self.cluster} blocks: {MOST_CLUSTER} are the most")
        if self.lanes_per_group > WARP:
            reasons.append(f"{self.cluster * self.threads} threads a row: {WARP * MOST_GROUPS} are the most")
        if self.smem_bytes > target.smem_bytes:
            reasons.append(f"{self.smem_bytes} bytes of shared memory: {target.smem_bytes} are the most")
        return reasons


def widest_vector(spec: SamplingSpec) -> int:
    """Logits of an access where rows are packed and aligned."""
    return math.gcd(ACCESS_BYTES // spec.dtype.itemsize, spec.vocab)


def cluster_configs(spec: SamplingSpec, target: Target, max_rows: int, vector: int) -> list[ClusterConfig]:
    """All that batches of up to so many rows get."""
    found = (
        ClusterConfig.default(spec, target, rows, vector, bounded)
        for bounded in (True, False)
        for rows in range(1, max_rows + 1)
    )
    return list(dict.fromkeys(found))
