# SPDX-License-Identifier: Apache-2.0
"""What the tiles of the kernels for few rows have in common on all SMs; needs no CuTe DSL."""

from dataclasses import dataclass

from dsl_backend.gemm.sizes import BLOCK_K, ELEMENT_BYTES, WARPGROUP, ceil_div
from dsl_backend.linear.spec import LinearSpec


@dataclass(frozen=True, kw_only=True)
class StreamTiles:
    """Tiles of two boxes of weights against some rows of x.

    Attributes:
        tokens: rows of x, as the configuration of an SM counts them.
        tile_k: columns of x and the weights of a stage.
    """

    tokens: int = 16
    tile_k: int = 64
    stages: int

    @property
    def box(self) -> int:
        """Rows of weights of a box."""
        raise NotImplementedError

    @property
    def tile_tokens(self) -> int:
        """Rows of x of a block's tile."""
        raise NotImplementedError

    @property
    def groups(self) -> int:
        """Warpgroups that hold sums."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Sums of one of their threads; also float32 partial sums that it hands over."""
        raise NotImplementedError

    @property
    def stage_bytes(self) -> int:
        return (2 * self.box + self.tile_tokens) * self.tile_k * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """Stages, barriers, alignment."""
        return self.stages * (self.stage_bytes + 16) + 1024

    @property
    def partials(self) -> int:
        """Float32 partial sums of a block."""
        return self.accumulators * WARPGROUP * self.groups

    def tiles(self, spec: LinearSpec, rows: int) -> int:
        """Tiles of the output."""
        return ceil_div(spec.n * spec.parts, 2 * self.box) * ceil_div(rows, self.tile_tokens)

    def stage_objections(self, smem_bytes: int) -> list[str]:
        """Why stages of this size cannot be; smem_bytes: that a block may have."""
        reasons = []
        if self.tile_k < BLOCK_K or self.tile_k % BLOCK_K:
            reasons.append(f"tile_k {self.tile_k} is not a multiple of {BLOCK_K}")
        if self.stages < 2:
            reasons.append(f"{self.stages} stages: 2 are the least")
        if self.smem_bytes > smem_bytes:
            reasons.append(f"{self.smem_bytes} bytes of shared memory: {smem_bytes} are the most")
        return reasons
