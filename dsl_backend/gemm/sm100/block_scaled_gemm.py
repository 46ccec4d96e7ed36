# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM on SM100 whose matrix products apply the scale factors: MXFP8 and NVFP4.

Scale factors arrive with a stage's operands, 512 bytes for each 128 rows and 4 blocks of k, and tcgen05.cp copies them
to tensor memory ahead of the products that use them; the tensor pipe does what one thread issues in order. With two_cta
each CTA has the factors of its rows of x and of all weights.

Two accumulators of 256 columns and scale factors do not fit tensor memory. They overlap: a tile's first stored columns
are those that the next tile's products overwrite, which begin once they are read. All else is `scaled_gemm.ScaledGemm`.
"""

from dataclasses import dataclass, fields

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import BLOCK_BYTES, WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import MMA_M, BlockScaledConfig
from dsl_backend.gemm.sm100.scaled_gemm import VECTOR, ScaledGemm, ScaledParams
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import in_pairs, mul_pair
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.narrow_mma import ATOM_ROWS, MXFP8, NVFP4, SCALE_ATOM_BYTES, NarrowMma, ScaleStage
from dsl_backend.primitives.pipeline import UMMA, Edge, Pipeline, warps

ATOM_WORDS = SCALE_ATOM_BYTES // 8  # of 64 bits, in which TMA copies scale factors


@dataclass(frozen=True)
class BlockScaledParams(ScaledParams):
    """With copies of the scale factors of 128 rows and a stage's k, and mAlpha [1], which may be missing.

    mXFactors, mWFactors: coordinates [128s of rows, words of 64 bits].
    """

    tma_atom_x_factors: cute.CopyAtom
    mXFactors: cute.Tensor
    tma_atom_w_factors: cute.CopyAtom
    mWFactors: cute.Tensor
    mAlpha: cute.Tensor


def factors_copy(scale: cute.Tensor, op, atoms: int):
    """The copy of a stage's scale factors of 128 rows, and their coordinates [128s of rows, words of 64 bits].

    Args:
        atoms: of a stage, for each 128 rows; see `narrow_mma.NarrowKind`.
    """
    rows, columns = scale.shape
    pointer = cute.make_ptr(cutlass.Int64, scale.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16)
    words = columns * (ATOM_ROWS // 8)
    view = cute.make_tensor(pointer, cute.make_layout((rows // ATOM_ROWS, words), stride=(words, 1)))
    box = (1, atoms * ATOM_WORDS)
    return cpasync.make_tiled_tma_atom(op, view, cute.make_layout(box, stride=(box[1], 1)), box)


def factor_stages(smem: SmemAllocator, atoms: int, rows: int, stages: int) -> cute.Tensor:
    """Shared memory [1, words of 128 rows, x's and then the weights' 128s of rows, stage]."""
    words = atoms * ATOM_WORDS
    layout = cute.make_layout((1, words, rows, stages), stride=(words, 1, words, words * rows))
    return smem.allocate_tensor(cutlass.Int64, layout, byte_alignment=128)


def load_factors(atom: cute.CopyAtom, factors: cute.Tensor, target: cute.Tensor, place: tuple, mbar) -> None:
    """Copy a box of scale factors, of 128 rows and a stage's k, to shared memory [1, words]."""
    gF = cute.local_tile(factors, target.shape, (None, None))
    tFsF, tFgF = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(gF, 0, 2)
    )
    cute.copy(atom, tFgF[None, place[0], place[1]], tFsF, tma_bar_ptr=mbar)


class BlockScaledGemm(ScaledGemm):
    """See `gemm/tiled.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[BlockScaledConfig]):
        super().__init__(key)
        config = key.config
        kind = NVFP4 if key.x.packed > 1 else MXFP8
        self.narrow_mma = NarrowMma(
            kind=kind, m=MMA_M * self.cluster, n=2 * self.box_n, cta_group=2 if self.two_cta else 1
        )
        self.atoms, self.weight_atoms = kind.scale_atoms, config.weight_atoms
        self.acc_stride, self.releases_early = config.acc_stride, config.overlaps_accumulators
        self.factor_columns = config.factor_columns(kind.scale_atoms)
        if self.releases_early:
            self.acc_edge = Edge("accumulators", UMMA, warps(WARPGROUP // WARP, self.cluster), 1)

    def params(self, operands, x_op, weight_op, sOut_tile, epi_tile):
        """The kernel's, with TMA descriptors; arguments as the base's."""
        base = super().params(operands, x_op, weight_op, sOut_tile, epi_tile)
        values = [getattr(base, field.name) for field in fields(base)]
        factors = [factors_copy(scale, x_op, self.atoms) for scale in (operands.x_scale, operands.weight_scale)]
        return BlockScaledParams(*values, *factors[0], *factors[1], operands.alpha)

    def scale_stages(self, smem: SmemAllocator):
        """See `factor_stages`."""
        return factor_stages(smem, self.atoms, 1 + self.weight_atoms, self.stages)

    def tx_bytes(self, params, m_tile, cta_rank):
        """With the scale factors of all CTAs."""
        factors = self.atoms * SCALE_ATOM_BYTES * (1 + self.weight_atoms) * self.cluster
        return super().tx_bytes(params, m_tile, cta_rank) + factors

    def load_scales(self, params, sScales, m_tile, n_tile, k_tile, stage, mbar):
        """X's scale factors and the weights'."""
        target = sScales[None, None, 0, stage]
        load_factors(params.tma_atom_x_factors, params.mXFactors, target, (m_tile, k_tile), mbar)
        for i in range(self.weight_atoms):
            place = (self.weight_factors(params, n_tile, i), k_tile)
            load_factors(params.tma_atom_w_factors, params.mWFactors, sScales[None, None, 1 + i, stage], place, mbar)

    def weight_factors(self, params: BlockScaledParams, n_tile, i: int):
        """Which 128 rows of the weights' factors are a tile's i-th."""
        if self.gated:
            return n_tile + i * (self.width(params) // ATOM_ROWS)
        return self.weight_atoms * n_tile + i

    def acc_column(self, acc_pipeline: Pipeline, tile):
        """The first column of a tile's accumulators in tensor memory."""
        return tile % 2 * self.acc_stride

    def epi_tile(self, tile, i, epi_tiles: int):
        """Columns that the next tile's products overwrite come first: the last of even tiles, the first of odd ones."""
        if not self.releases_early:
            return i
        return i + (1 - tile % 2) * (epi_tiles - 1 - 2 * i)

    @cute.jit
    def issue(
        self,
        tiled_mma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        tmem_ptr: cute.Pointer,
        tiles: cutlass.Int32,
        k_tiles: cutlass.Int32,
        sScales: cute.Tensor,
    ):
        """Issue the products of so many tiles."""
        x_address, w_address = sX.iterator.toint(), sW.iterator.toint()
        rows_bytes = cutlass.const_expr(self.atoms * SCALE_ATOM_BYTES)
        factors = tmem_ptr.toint() + self.factor_columns[0]
        for tile in cutlass.range(tiles, unroll=1):
            acc_pipeline.producer_acquire(tile)
            tmem.after_sync()
            accumulator = tmem_ptr.toint() + self.acc_column(acc_pipeline, tile)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + k_tile
                stage = pipeline.stage(position)
                pipeline.consumer_wait(position)
                scale_address = sScales.iterator.toint() + stage * (rows_bytes * (1 + self.weight_atoms))
                self.narrow_mma.issue(
                    accumulator,
                    x_address + stage * (self.tile_m * BLOCK_BYTES),
                    w_address + stage * (self.weight_rows * BLOCK_BYTES),
                    k_tile > 0,
                    ScaleStage(
                        scale_address,
                        scale_address + rows_bytes,
                        factors,
                        tmem_ptr.toint() + self.factor_columns[1],
                        self.weight_atoms,
                    ),
                )
                self.commit(pipeline.mbar_empty + stage)
            self.commit(acc_pipeline.full(tile))

    @cute.jit
    def row_scale(self, params: BlockScaledParams, row: cutlass.Int32):
        """The scale of all sums, where there is one."""
        if cutlass.const_expr(params.mAlpha is not None):
            return params.mAlpha[0]
        return cutlass.Float32(1.0)

    def with_scales(self, params, values, row_scale, column):
        """8 accumulators of neighbouring columns of each part times alpha."""
        if params.mAlpha is None:
            return values
        return [in_pairs(mul_pair, part, [row_scale] * VECTOR) for part in values]
