# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM90 kernel of absorbed MLA."""

from dataclasses import dataclass

from dsl_backend.attention.parts.sizes import MAILBOX_BYTES, MBARRIER_BYTES, WARPGROUP, chunk, packed_heads
from dsl_backend.attention.sm90.configs import ROWS
from dsl_backend.attention.spec import AttentionSpec

GROUPS = 2  # warpgroups that multiply, each for one half of a value's columns
MATH_REGISTERS, OTHER_REGISTERS = 232, 40
# Of a math thread, for addresses and a row's running state.
OTHER_USES = 32
# A row of the cache is loaded, and its room freed, in three parts: what is only key, and the halves of the value.
PARTS = 3


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Tiles and buffers of the latent kernel.

    Attributes:
        tile_n: keys of a tile.
        stages: key tiles in flight.
        scores_first: the second warpgroup issues its tile's scores before it sums the first one's tile, so that the
            sums run beside its softmax. Otherwise after it, and the first tile's room is free sooner.
        cluster: blocks that share key tiles: each has other heads of the same tokens, and loads a part for all.
        least_share: key tiles that a block takes at least where ranges are split: below it, merging costs more.
    """

    tile_n: int = ROWS
    stages: int = 2
    scores_first: bool = False
    cluster: int = 1
    least_share: int = 2

    @property
    def threads(self) -> int:
        return (GROUPS + 1) * WARPGROUP

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a block."""
        rows = (ROWS + self.stages * self.tile_n) * spec.head_dim + ROWS * self.tile_n
        barriers = MBARRIER_BYTES * 2 * (1 + PARTS * self.stages)
        # Of each row, in float32: the largest score, what to shrink by, the groups' totals of this item and the last.
        state = 4 * ROWS * (2 + 2 * GROUPS)
        return spec.dtype.itemsize * rows + barriers + state + MAILBOX_BYTES

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if self.tile_n % 16 or not 16 <= self.tile_n <= 128:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 16 up to 128 is possible")
        if self.stages < 2:
            reasons.append(f"{self.stages} key tiles in flight: at least 2 are needed")
        wide = 2 * chunk(spec.head_dim)
        if spec.head_dim % 16 or spec.head_dim_v % wide or spec.head_dim_v >= spec.head_dim or spec.head_dim_v > 512:
            reasons.append(
                f"latent sizes {spec.head_dim}/{spec.head_dim_v}: values of a multiple of {wide} elements up to 512, "
                f"and a multiple of 16 more for keys, are possible"
            )
        units = spec.group // packed_heads(spec.group)
        if self.cluster not in (1, 2) or units % self.cluster:
            reasons.append(f"clusters of {self.cluster} blocks: 1, or 2 where heads fill an even number of row tiles")
        if self.cluster > 1 and spec.page_size is None:
            reasons.append("blocks share key tiles of paged keys only")
        held = spec.head_dim_v // 4 + 3 * self.tile_n // 4
        if held > MATH_REGISTERS - OTHER_USES:
            most = MATH_REGISTERS - OTHER_USES
            reasons.append(f"sums, scores and weights take {held} registers of a thread: it has {most} for them")
        needed = self.smem_bytes(spec)
        if needed > smem_bytes:
            reasons.append(f"a block needs {needed} bytes of shared memory: there are {smem_bytes}")
        return reasons


def default_latent_config(spec: AttentionSpec) -> LatentConfig:
    """Two tiles of 576, three or four of smaller latents; by whether one or several blocks use a key tile."""
    units = spec.group // packed_heads(spec.group)
    stages = 2 if spec.head_dim > 320 else 4
    cluster = 2 if units % 2 == 0 and spec.page_size is not None else 1
    return LatentConfig(stages=stages, scores_first=units > 1, cluster=cluster)
