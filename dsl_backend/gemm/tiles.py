# SPDX-License-Identifier: Apache-2.0
"""What the tiles of all SMs' kernels have in common; needs no CuTe DSL.

A tile's weights are two boxes of rows: gate and up rows of the same output columns, or neighbouring rows.
"""

from dataclasses import dataclass

from dsl_backend.gemm.sizes import BLOCK_BYTES, BLOCK_K, WARPGROUP, ceil_div
from dsl_backend.gemm.spec import Dtypes, GemmSpec

BARRIER_BYTES = 16  # of a stage: a full and an empty mbarrier
ALIGNMENT_BYTES = 1024
# CTAs that may share a tile; clusters of more than 8 are not portable.
NUM_SPLITS = (1, 2, 3, 4, 6, 8)


def block_k(dtypes: Dtypes) -> int:
    """Elements of k in a stage: 128 bytes of the narrower operand."""
    return BLOCK_BYTES // min(dtypes.x.itemsize, dtypes.weight.itemsize)


@dataclass(frozen=True, kw_only=True)
class GemmTiles:
    """Tiles of the persistent GEMM.

    Attributes:
        box_n: rows of weights of a box.
        stages: of the pipeline of x and weights in shared memory.
        band: rows of tiles that the raster goes through column by column.
    """

    box_n: int = 128
    stages: int = 4
    band: int = 8

    @property
    def k_parts(self) -> int:
        """CTAs that each have a part of a tile's k."""
        return 1

    @property
    def tile_m(self) -> int:
        """Rows of x of a CTA's tile."""
        raise NotImplementedError

    @property
    def cluster(self) -> int:
        """CTAs of a cluster: their tiles lie one below the other and share the weights."""
        raise NotImplementedError

    @property
    def swaps_operands(self) -> bool:
        """Whether weights are the M of matrix products, and x their N."""
        return False

    @property
    def mma_rows(self) -> int:
        """Rows of a CTA's tile that are the M of matrix products."""
        return self.tile_m

    @property
    def tail_boxes(self) -> bool:
        """Whether x's last tile comes in boxes of TAIL_ROWS, of which all have rows that exist.

        Else it is one box, and TMA fills its rows beyond the end of x with zeros.
        """
        return True

    @property
    def overlaps_epilogue(self) -> bool:
        """Whether a tile's epilogue runs while the next tile's products do."""
        raise NotImplementedError

    @property
    def weight_rows(self) -> int:
        """Rows of weights in a CTA's stage."""
        return 2 * self.box_n

    def stage_bytes(self, dtypes: Dtypes) -> int:
        """Bytes of a CTA's stage."""
        row_bytes = self.tile_m * dtypes.x.itemsize + self.weight_rows * dtypes.weight.itemsize
        return row_bytes * block_k(dtypes)

    def columns(self, parts: int) -> int:
        """Columns of the output in a tile."""
        return 2 * self.box_n // parts

    def tiles_together(self, spec: GemmSpec) -> int:
        """Tiles side by side that one CTA finishes, one after the other."""
        return 1

    def epilogue_elements(self, parts: int) -> int:
        """Elements of the output that are staged in shared memory."""
        raise NotImplementedError

    def smem_bytes(self, spec: GemmSpec) -> int:
        """Stages, their barriers, the staged output, alignment."""
        staged = self.stages * (self.stage_bytes(spec.dtypes) + BARRIER_BYTES)
        return staged + self.epilogue_elements(spec.parts) * spec.dtypes.out.itemsize + ALIGNMENT_BYTES

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot run with this configuration; empty where it can.

        Args:
            smem_bytes: shared memory that a CTA may have.
        """
        reasons = []
        if self.band < 1:
            reasons.append(f"band {self.band} is not positive")
        return reasons + pipeline_objections(self.stages, self.smem_bytes(spec), smem_bytes)


@dataclass(frozen=True, kw_only=True)
class SmallMTiles:
    """Tiles of the swap-AB GEMM for few rows: two boxes of weights against some rows of x (tokens).

    Attributes:
        tokens: rows of x, as the configuration of an SM counts them.
        tile_k: columns of x and of the weights in a stage.
        stages: of the pipeline of x and weights in shared memory.
        num_splits: CTAs of a cluster, each with a part of k of one tile; they sum up through distributed shared memory
            (split-K). With 1, CTAs get equal shares of all tiles' iterations (stream-K).
    """

    tokens: int = 16
    tile_k: int = 64
    stages: int
    num_splits: int = 1

    @property
    def box(self) -> int:
        """Rows of weights of a box."""
        raise NotImplementedError

    @property
    def tile_tokens(self) -> int:
        """Rows of x of a CTA's tile."""
        raise NotImplementedError

    @property
    def groups(self) -> int:
        """Warpgroups that hold accumulators."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Float32 accumulators of one of their threads; as many partial sums it stores for another CTA."""
        raise NotImplementedError

    @property
    def finished(self) -> int:
        """With split-K, accumulators of each box that a CTA finishes, of a thread's."""
        return ceil_div(self.accumulators // 2, self.num_splits)

    def stage_bytes(self, dtypes: Dtypes) -> int:
        """Bytes of a stage."""
        return (2 * self.box * dtypes.weight.itemsize + self.tile_tokens * dtypes.x.itemsize) * self.tile_k

    def smem_bytes(self, spec: GemmSpec) -> int:
        """Stages, their barriers, other CTAs' partial sums with their barrier, alignment."""
        partials = 2 * self.finished * self.num_splits * WARPGROUP * self.groups
        received = partials * 4 + BARRIER_BYTES if self.num_splits > 1 else 0
        return self.stages * (self.stage_bytes(spec.dtypes) + BARRIER_BYTES) + received + ALIGNMENT_BYTES

    @property
    def stream_k(self) -> bool:
        """Whether CTAs hand each other partial sums through global memory."""
        return self.num_splits == 1

    @property
    def partials(self) -> int:
        """Float32 partial sums of a CTA."""
        return self.accumulators * WARPGROUP * self.groups

    def tiles(self, spec: GemmSpec, rows: int) -> int:
        """Tiles of the output."""
        return ceil_div(spec.weight_rows, 2 * self.box) * ceil_div(rows, self.tile_tokens)

    def objections(self, spec: GemmSpec, smem_bytes: int) -> list[str]:
        """Why a problem cannot run with this configuration; empty where it can.

        Args:
            smem_bytes: shared memory that a CTA may have.
        """
        reasons = []
        if self.tile_k < BLOCK_K or self.tile_k % BLOCK_K:
            reasons.append(f"tile_k {self.tile_k} is not a multiple of {BLOCK_K}")
        if self.num_splits not in NUM_SPLITS:
            reasons.append(f"{self.num_splits} splits: one of {', '.join(map(str, NUM_SPLITS))} is possible")
        elif ceil_div(spec.k, self.tile_k) < self.num_splits:
            reasons.append(f"{self.num_splits} splits of {spec.k} columns: each needs {self.tile_k} of its own")
        elif self.finished * (self.num_splits - 1) >= self.accumulators // 2:
            reasons.append(f"{self.accumulators} accumulators are too few for {self.num_splits} splits: one gets none")
        return reasons + pipeline_objections(self.stages, self.smem_bytes(spec), smem_bytes)


def pipeline_objections(stages: int, needed: int, smem_bytes: int) -> list[str]:
    """Why so many stages, which need so many bytes of shared memory, cannot be."""
    reasons = []
    if stages < 2:
        reasons.append(f"{stages} stages: 2 are the least")
    if needed > smem_bytes:
        reasons.append(f"{needed} bytes of shared memory: {smem_bytes} are the most")
    return reasons
