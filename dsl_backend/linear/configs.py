# SPDX-License-Identifier: Apache-2.0
"""Tiles, stages and clusters of the CuTe DSL kernels."""

from dataclasses import dataclass

from dsl_backend.linear.spec import LinearSpec

WARPGROUP = 128
GROUPS = 2  # consumer warp groups of the GEMM kernel
BLOCK_K = 64  # 128 bytes, the widest swizzle
MMA_M = 64  # rows of wgmma
ELEMENT_BYTES = 2
REGISTERS_PER_SM = 64 * 1024
# setmaxnreg: what consumers take, of which some are addresses and the epilogue's.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
SPARE_REGISTERS = 40


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """The kernel for many rows: persistent blocks with a producer and two consumer warp groups.

    Weights of a tile are two boxes of `box_n` rows: gate and up rows of the same columns, or neighbours.

    Attributes:
        tile_m: rows of x; 64 or a multiple.
        pingpong: consumers take turns at whole tiles, one's epilogue under the other's products; else they share tiles.
        cluster: blocks above each other that share the weights: 1 or 2, each of two loads a box for both.
        band: tiles of a band of the raster.
    """

    tile_m: int = 128
    box_n: int = 128
    stages: int = 4
    pingpong: bool = False
    cluster: int = 1
    band: int = 8

    @property
    def rows(self) -> int:
        """Of a consumer's accumulators."""
        return self.tile_m if self.pingpong else self.tile_m // GROUPS

    @property
    def repeats(self) -> int:
        """Blocks of wgmma's rows among them."""
        return self.rows // MMA_M

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread."""
        return self.rows * 2 * self.box_n // WARPGROUP

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + 2 * self.box_n) * BLOCK_K * ELEMENT_BYTES

    def columns(self, parts: int) -> int:
        """Of the output, in a tile."""
        return 2 * self.box_n // parts

    def smem_bytes(self, parts: int) -> int:
        """Stages, an output buffer of 64 rows for each consumer, barriers, alignment."""
        out = GROUPS * MMA_M * self.columns(parts) * ELEMENT_BYTES
        return self.stages * (self.stage_bytes + 16) + out + 1024

    def objections(self, spec: LinearSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot be run so; empty where it can.

        Args:
            smem_bytes: that a block may have.
        """
        reasons = []
        if self.tile_m < MMA_M or self.tile_m % MMA_M or self.rows % MMA_M:
            reasons.append(f"tile_m {self.tile_m}: each consumer needs a multiple of {MMA_M} rows")
        if not 16 <= self.box_n <= 128 or self.box_n % 16:
            reasons.append(f"box_n {self.box_n} is not a multiple of 16 from 16 to 128")
        if self.stages < 2:
            reasons.append(f"{self.stages} stages: 2 are the least")
        if self.cluster not in (1, 2):
            reasons.append(f"clusters of {self.cluster} blocks: 1 or 2 are possible")
        if self.band < 1:
            reasons.append(f"band {self.band} is not positive")
        if self.accumulators + SPARE_REGISTERS > CONSUMER_REGISTERS:
            reasons.append(
                f"{self.accumulators} accumulators a thread: {CONSUMER_REGISTERS - SPARE_REGISTERS} are the most"
            )
        if self.smem_bytes(spec.parts) > smem_bytes:
            reasons.append(f"{self.smem_bytes(spec.parts)} bytes of shared memory: {smem_bytes} are the most")
        return reasons
