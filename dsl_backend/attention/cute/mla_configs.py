# SPDX-License-Identifier: Apache-2.0
"""Tile shapes that the kernels of absorbed MLA share; needs no CuTe DSL."""

from dataclasses import dataclass

from dsl_backend.attention.cute.sizes import FP8_K_BLOCK, MBARRIER_BYTES, chunk, p_offset_objections, packed_gqa_heads
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.quant.format import E4M3

ROWS = 64  # query rows of a tile: tokens times packed heads
# A row of K is loaded, and its stage released, in three parts: the rope part, and the halves of the latent part.
PARTS = 3


def row_tiles(spec: AttentionSpec) -> int:
    """Row tiles that the heads of a token fill."""
    return spec.group // packed_gqa_heads(spec.group)


def without_fp8_products(spec: AttentionSpec) -> list[str]:
    """Why no kernel with products in 8 bits serves a spec."""
    reasons = []
    if spec.kv != E4M3:
        reasons.append(f"keys of {spec.kv.name}: its products are of {E4M3.name}")
    if spec.batch_invariant:
        reasons.append("batch invariance: its keys are split evenly over the batch")
    return reasons


def fp8_tile_objections(tile_n: int, p_offset: float) -> list[str]:
    """Why a kernel with products in 8 bits cannot have tiles of so many keys and such a P; empty where it can."""
    tiles = [f"tiles of {tile_n} keys: a multiple of {FP8_K_BLOCK} is possible"] if tile_n % FP8_K_BLOCK else []
    return tiles + p_offset_objections(p_offset)


@dataclass(frozen=True, kw_only=True)
class MlaTileConfig:
    """Tiles and stages of a kernel.

    Attributes:
        tile_n: keys of a tile.
        stages: of K.
        cluster: CTAs that share key tiles: each has other heads of the same tokens, and loads a part for all.
        dequant_stages: of fp8 K, which one more warpgroup dequantizes; 0 for a 16-bit cache.
        min_split_tiles: key tiles of a split, at least: with fewer, combining costs more than it saves.
        short_splits: fewer are enough for short requests, as in BalancedSplitKVTileScheduler.
        row_groups: neighbouring clusters process the row tiles of a request side by side, where row_groups.py finds
            that it pays; not with fixed splits.
        evict_first: L2 evicts keys before other data: those of a decode step are read once, and the partial results
            that CTAs fold many times.
    """

    tile_n: int = 64
    stages: int = 2
    cluster: int = 1
    dequant_stages: int = 0
    min_split_tiles: int = 2
    short_splits: bool = False
    row_groups: bool = False
    evict_first: bool = False

    @property
    def smem_fold_rows(self) -> int:
        """Rows of a work tile up to which fixed splits are folded in shared memory; 0: in global memory always."""
        return 0

    @property
    def least_stages(self) -> int:
        return 2

    @property
    def idle_eighths(self) -> int:
        """Of the clusters, eighths that may be idle rather than have key ranges split: none."""
        return 0

    @property
    def even_splits(self) -> bool:
        """Whether CTAs may be idle so that each of the others has a part of one output tile only."""
        return False

    @property
    def kept_chunks(self) -> int:
        """Of 32 requests, whose lengths the tile scheduler loads at once and keeps."""
        return 1

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a CTA."""
        raise NotImplementedError

    def key_bytes(self, spec: AttentionSpec) -> int:
        """Of it, the stages of K and their mbarriers."""
        row = self.stages * spec.dtype.itemsize + self.dequant_stages
        return self.tile_n * spec.head_dim * row + MBARRIER_BYTES * 2 * PARTS * (self.stages + self.dequant_stages)

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        """Those of one SM's kernel."""
        raise NotImplementedError

    def stage_objections(self, spec: AttentionSpec) -> list[str]:
        """Those to the number of stages."""
        reasons = []
        if self.stages < self.least_stages:
            reasons.append(f"{self.stages} stages of K: at least {self.least_stages} are needed")
        if spec.is_fp8_kv != (self.dequant_stages > 0) or self.dequant_stages == 1:
            reasons.append(f"{self.dequant_stages} fp8 stages: 2 or more for an fp8 cache, 0 for others, are possible")
        return reasons

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can.

        Args:
            smem_bytes: that a CTA may have.
        """
        reasons = []
        if self.tile_n % 16 or not 16 <= self.tile_n <= 128:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 16 up to 128 is possible")
        reasons += self.stage_objections(spec)
        wide = 2 * chunk(spec.head_dim)
        if spec.head_dim % 16 or spec.head_dim_v % wide or spec.head_dim_v >= spec.head_dim or spec.head_dim_v > 512:
            reasons.append(
                f"MLA head sizes {spec.head_dim}/{spec.head_dim_v}: values of a multiple of {wide} elements up to 512, "
                f"and a multiple of 16 more for keys, are possible"
            )
        if self.cluster not in (1, 2) or row_tiles(spec) % self.cluster:
            reasons.append(f"clusters of {self.cluster} CTAs: 1, or 2 where heads fill an even number of row tiles")
        if self.cluster > 1 and spec.page_size is None:
            reasons.append("CTAs of a cluster share key tiles of paged keys only")
        reasons += self.own_objections(spec)
        needed = self.smem_bytes(spec)
        if needed > smem_bytes:
            reasons.append(f"a CTA needs {needed} bytes of shared memory: there are {smem_bytes}")
        return reasons
