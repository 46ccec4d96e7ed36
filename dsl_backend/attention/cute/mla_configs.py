# SPDX-License-Identifier: Apache-2.0
"""Tile shapes that the kernels of absorbed MLA share."""

from dataclasses import dataclass

from dsl_backend.attention.cute.sizes import MBARRIER_BYTES, chunk, packed_gqa_heads
from dsl_backend.attention.spec import AttentionSpec

ROWS = 64  # query rows of a tile: tokens times the heads that share it
# A row of the cache is loaded, and its room freed, in three parts: what is only key, and the halves of the value.
PARTS = 3


def row_tiles(spec: AttentionSpec) -> int:
    """That the heads of a token fill."""
    return spec.group // packed_gqa_heads(spec.group)


@dataclass(frozen=True, kw_only=True)
class MlaTileConfig:
    """Tiles and buffers of a kernel.

    Attributes:
        tile_n: keys of a tile.
        stages: key tiles in flight.
        cluster: blocks that share key tiles: each has other heads of the same tokens, and loads a part for all.
        staging: fp8 key tiles in flight; one more warpgroup turns them into tiles of 16 bits. 0 where keys have these.
        least_share: key tiles that a block takes at least where ranges are split: below it, merging costs more.
    """

    tile_n: int = 64
    stages: int = 2
    cluster: int = 1
    dequant_stages: int = 0
    min_split_tiles: int = 2

    @property
    def least_stages(self) -> int:
        return 2

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a block."""
        raise NotImplementedError

    def key_bytes(self, spec: AttentionSpec) -> int:
        """Of it, key tiles and their barriers."""
        row = self.stages * spec.dtype.itemsize + self.dequant_stages
        return self.tile_n * spec.head_dim * row + MBARRIER_BYTES * 2 * PARTS * (self.stages + self.dequant_stages)

    def own_objections(self, spec: AttentionSpec) -> list[str]:
        """Those of one kernel alone."""
        raise NotImplementedError

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if self.tile_n % 16 or not 16 <= self.tile_n <= 128:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 16 up to 128 is possible")
        if self.stages < self.least_stages:
            reasons.append(f"{self.stages} key tiles in flight: at least {self.least_stages} are needed")
        if spec.is_fp8_kv != (self.dequant_stages > 0) or self.dequant_stages == 1:
            reasons.append(
                f"{self.dequant_stages} fp8 tiles in flight: 2 or more for fp8 keys, 0 for others, are possible"
            )
        wide = 2 * chunk(spec.head_dim)
        if spec.head_dim % 16 or spec.head_dim_v % wide or spec.head_dim_v >= spec.head_dim or spec.head_dim_v > 512:
            reasons.append(
                f"latent sizes {spec.head_dim}/{spec.head_dim_v}: values of a multiple of {wide} elements up to 512, "
                f"and a multiple of 16 more for keys, are possible"
            )
        if self.cluster not in (1, 2) or row_tiles(spec) % self.cluster:
            reasons.append(f"clusters of {self.cluster} blocks: 1, or 2 where heads fill an even number of row tiles")
        if self.cluster > 1 and spec.page_size is None:
            reasons.append("blocks share key tiles of paged keys only")
        reasons += self.own_objections(spec)
        needed = self.smem_bytes(spec)
        if needed > smem_bytes:
            reasons.append(f"a block needs {needed} bytes of shared memory: there are {smem_bytes}")
        return reasons
