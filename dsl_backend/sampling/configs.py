# SPDX-License-Identifier: Apache-2.0
"""Configurations of the kernels, and their defaults."""

import math
from dataclasses import dataclass, replace

from dsl_backend.rows import ceil_div
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.fixed_point import BLOCK
from dsl_backend.sampling.spec import SamplingSpec

WARP = 32
ACCESS_BYTES = 16
MAX_PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
THREADS = 512
# Logits that a CTA reads at once: each of its warps a block.
LOGITS_AT_ONCE = THREADS // WARP * BLOCK
# Of a CTA whose row it reads at once: more threads only wait, and take room of other rows. By the emulator's clock 512
# rows of 300 take 0.55 to 0.7 of the time of 512 threads, and one row 0.9 to 1.1. Each is a group.
FEW_THREADS = 256
REGISTERS_PER_SM = 64 * 1024
REGISTERS = 64
# Shared memory of an SM of SM90 or SM100, and the part of it that the system reserves for each CTA.
SM_BYTES = 228 * 1024
RESERVED_BYTES = 1024
MAX_GROUPS = 256
HISTOGRAM_BINS = 256
# Blocks with bounds are a multiple of it, so that vocabularies of about one size share a kernel.
BOUNDED_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class TritonConfig:
    """Configuration of the Triton kernel, which has one program for each row.

    Attributes:
        block: logits that a program loads at a time; at least 256, the number of histogram bins.
        num_warps: warps of a program.
    """

    block: int
    num_warps: int

    @classmethod
    def default(cls, spec: SamplingSpec, target: Target) -> "TritonConfig":
        block = min(4096, max(256, 1 << (spec.vocab - 1).bit_length()))
        return cls(block=block, num_warps=4 if block < 2048 else 16)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Configuration of the CuTe DSL kernel, which has one cluster for each row. A warp reads a block of it at a time.

    Attributes:
        cluster: CTAs that share a row. Clusters above 8 are non-portable; SM90 and SM100 have 16.
        threads: of a CTA.
        vector: adjacent logits of one load.
        blocks_ahead: 1: a warp loads its next block before the arithmetic of a block; 0: after it.
        reread_blocks: blocks of a warp that are in flight where a row is read again, 1 or 2.
        reread_backward: they are read from the last one, which is the likeliest to be in the L2 cache still.
        max_candidates: that fit in shared memory. A row with more is read again as a whole.
        max_blocks: blocks of fixed_point.BLOCK logits of a CTA, whose sums are in shared memory.
        lane_bound_blocks: blocks of a CTA of which each lane's maximum and mass are bounded in shared memory; 0: none.
            With them top-p accepts more tokens without another look at the row.
        finish_cluster: CTAs that share a row in a second launch, which reads again the rows whose token top-p may
            remove; 0: the launch that draws does so itself. For launches in which no row has top-k or min-p.
    """

    cluster: int
    threads: int
    vector: int
    blocks_ahead: int = 1
    reread_blocks: int = 1
    reread_backward: bool = False
    max_candidates: int = 512
    max_blocks: int = 512
    lane_bound_blocks: int = 0
    finish_cluster: int = 0

    @classmethod
    def default(
        cls, spec: SamplingSpec, target: Target, rows: int, vector: int, top_p_alone: bool = False
    ) -> "ClusterConfig":
        """As many CTAs for each row as there are SMs for the batch, and blocks for the CTAs.

        All but the number of SMs follows from the kernel. On an H200 this was measured to be the fastest with 16, 64,
        256 and 512 rows of 151936 logits.

        Args:
            vector: adjacent logits that one load may take in every row.
            top_p_alone: rows have top-p without top-k and min-p. Some are read again, alone, so that as many CTAs for
                each row as SMs hold are faster; or a second launch, where there are many rows.
        """
        if top_p_alone and 2 * rows >= target.sm_count and (config := cls.finished(spec, target, rows, vector)):
            return config
        places = ctas_per_sm(THREADS) * target.sm_count if top_p_alone else target.sm_count
        cluster = 2 if top_p_alone and spec.vocab > LOGITS_AT_ONCE else 1
        while (
            2 * cluster <= MAX_CLUSTER
            and cluster * LOGITS_AT_ONCE < spec.vocab
            and 2 * cluster * rows <= (target.sm_count if 2 * cluster > MAX_PORTABLE_CLUSTER else places)
        ):
            cluster *= 2
        return cls(
            cluster=cluster,
            threads=FEW_THREADS if spec.vocab <= FEW_THREADS // WARP * BLOCK else THREADS,
            vector=vector,
            # Measured with likeliest tokens only, whose ranks read most rows again. With top-p alone two blocks are
            # 2 % slower (H200).
            reread_blocks=1 if spec.logprobs_mode is None else 2,
            reread_backward=spec.logprobs_mode is not None,
            max_blocks=most_blocks(spec.vocab, cluster),
        )

    @classmethod
    def finished(cls, spec: SamplingSpec, target: Target, rows: int, vector: int) -> "ClusterConfig | None":
        """For top-p alone: the CTAs of rows without filters, and a second launch for the rows that are left.

        About one row of eight is left, and those share the SMs: 8 CTAs for each up to one row an SM, 4 above. Bounds of
        lanes are faster where a row has one CTA. 0.90 of the time of more CTAs for 66 rows of 151936 float32, 0.88 for
        129, 0.86 for 256; 0.86, 0.81 and 0.85 for 128, 257 and 512 rows of 201088; as long with 34 rows, 1.07 to 1.19
        with 9 and 16 (H200, 2026-11-28).

        Returns:
            None where nothing is left to a second launch: rows that a CTA reads at once, and those with
            log-probabilities or of which what top-p keeps is returned.
        """
        if spec.vocab <= LOGITS_AT_ONCE or spec.logprobs_mode is not None or spec.kept:
            return None
        few = replace(cls.default(spec, target, rows, vector), finish_cluster=8 if rows <= target.sm_count else 4)
        bounded = few.with_lane_bounds(spec) if few.cluster == 1 else few
        return few if bounded.objections(spec, target) else bounded

    def with_lane_bounds(self, spec: SamplingSpec) -> "ClusterConfig":
        """The same with bounds of the lanes of all blocks."""
        blocks = blocks_of(spec.vocab, self.cluster)
        return replace(self, lane_bound_blocks=ceil_div(blocks, BOUNDED_BLOCKS) * BOUNDED_BLOCKS)

    def sharing(self, cluster: int, spec: SamplingSpec) -> "ClusterConfig":
        """The same with so many CTAs for each row."""
        return replace(self, cluster=cluster, max_blocks=most_blocks(spec.vocab, cluster))

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.threads // WARP

    @property
    def packed_words(self) -> int:
        """Words of shared memory for packed logits, or for bounds of lanes before."""
        return max(BLOCK * self.warps, WARP * self.lane_bound_blocks)

    @property
    def finishing(self) -> "ClusterConfig":
        """Of the second launch."""
        return replace(self, cluster=self.finish_cluster, lane_bound_blocks=0, finish_cluster=0)

    @property
    def groups(self) -> int:
        """Parts of a row. The k-th largest of their maxima bounds the row's k-th largest logit from below."""
        return min(MAX_GROUPS, self.cluster * self.threads)

    @property
    def lanes_per_group(self) -> int:
        return self.cluster * self.threads // self.groups

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA.

        Group maxima, histogram, candidates (16 bytes), blocks (12), lists, packed logits, sums, scalars.
        """
        arrays = 4 * MAX_GROUPS + 4 * HISTOGRAM_BINS + 16 * self.max_candidates + 12 * self.max_blocks
        return arrays + 4 * self.packed_words + 8 * self.threads + 24 * MAX_CLUSTER + 5 * 8 * WARP + 4 * WARP + 256

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers are reserved for."""
        return max(1, min(ctas_per_sm(self.threads), SM_BYTES // (self.smem_bytes + RESERVED_BYTES)))

    @property
    def smem_percent(self) -> int:
        """The shared memory carveout. The rest is L1 cache, from which later passes over a row are read."""
        return -(-100 * self.ctas_per_sm * (self.smem_bytes + RESERVED_BYTES) // SM_BYTES)

    def objections(self, spec: SamplingSpec, target: Target) -> list[str]:
        """Why this configuration does not serve a problem; empty if it does."""
        reasons = []
        widest = ACCESS_BYTES // spec.dtype.itemsize
        if self.vector > widest or spec.vocab % self.vector:
            reasons.append(f"vectors of {self.vector} logits: a divisor of {spec.vocab} up to {widest} is needed")
        counts = {name: getattr(self, name) for name in ("cluster", "threads", "vector")}
        reasons += [f"{name} {n} is not a power of two" for name, n in counts.items() if n < 1 or n & (n - 1)]
        if self.blocks_ahead not in (0, 1):
            reasons.append(f"blocks_ahead is {self.blocks_ahead}: 0 or 1 is needed")
        if self.reread_blocks not in (1, 2):
            reasons.append(f"reread_blocks is {self.reread_blocks}: 1 or 2 is needed")
        if not WARP <= self.threads <= 1024:
            reasons.append(f"{self.threads} threads for each CTA are not from {WARP} to 1024")
        if self.cluster > MAX_CLUSTER:
            reasons.append(f"clusters of {self.cluster} CTAs: {MAX_CLUSTER} are the most")
        if self.lanes_per_group > WARP:
            reasons.append(f"{self.cluster * self.threads} threads for each row: {WARP * MAX_GROUPS} are the most")
        if blocks_of(spec.vocab, self.cluster) > self.max_blocks:
            reasons.append(f"{self.max_blocks} blocks for each CTA do not hold {spec.vocab} logits")
        if self.lane_bound_blocks and blocks_of(spec.vocab, self.cluster) > self.lane_bound_blocks:
            reasons.append(f"bounds of {self.lane_bound_blocks} blocks for each CTA do not cover {spec.vocab} logits")
        if self.finish_cluster and spec.logprobs_mode is not None:
            reasons.append("a second launch returns no log-probabilities")
        if self.finish_cluster and spec.kept:
            reasons.append("a second launch does not return what top-p keeps")
        if self.finish_cluster:
            reasons += [f"second launch: {reason}" for reason in self.finishing.objections(spec, target)]
        if self.smem_bytes > target.smem_bytes:
            reasons.append(f"{self.smem_bytes} bytes of shared memory: {target.smem_bytes} are the most")
        return reasons


def blocks_of(vocab: int, cluster: int) -> int:
    """Blocks of a CTA, if so many share a row."""
    return -(-vocab // (BLOCK * cluster))


def most_blocks(vocab: int, cluster: int) -> int:
    """Blocks of a CTA that its shared memory has room for: a power of two, so that vocabularies share a kernel."""
    return 1 << (max(ClusterConfig.max_blocks, blocks_of(vocab, cluster)) - 1).bit_length()


def ctas_per_sm(threads: int) -> int:
    """CTAs of so many threads on an SM: two hide each other's barriers, and 64 registers for a thread are enough."""
    return max(1, REGISTERS_PER_SM // (REGISTERS * threads))


def widest_vector(spec: SamplingSpec) -> int:
    """Logits of one load where rows are contiguous and aligned."""
    return math.gcd(ACCESS_BYTES // spec.dtype.itemsize, spec.vocab)


def cluster_configs(spec: SamplingSpec, target: Target, max_rows: int, vector: int) -> list[ClusterConfig]:
    """The default configurations of batches of up to max_rows rows."""
    # With so many rows each has as few CTAs as it may have.
    most = min(max_rows, ctas_per_sm(THREADS) * target.sm_count)
    configs = (
        ClusterConfig.default(spec, target, rows, vector, top_p_alone)
        for top_p_alone in (False, True)
        for rows in range(1, most + 1)
    )
    return list(dict.fromkeys(configs))
