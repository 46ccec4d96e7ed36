# SPDX-License-Identifier: Apache-2.0
"""The GEMM of quantised operands for few rows on SM100: e4m3 with scales of rows or tensors, MXFP8, NVFP4.

Scales of rows are applied in the epilogue; sums are float32 in tensor memory and need no promotion. Scale factors of
MXFP8 and NVFP4 come with a stage, as in `block_scaled_gemm`: of the 128 rows of each box of weights, and of the 128
rows of x that have the tile's tokens.
"""

from dataclasses import dataclass, fields

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from dsl_backend.gemm.args import ScaledArgs
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.scaled_small_m import ScaledSmallMBase, ScaledSmallMParams
from dsl_backend.gemm.sizes import BLOCK_BYTES, WARP
from dsl_backend.gemm.sm100.block_scaled_gemm import factor_stages, factors_copy, load_factors
from dsl_backend.gemm.sm100.configs import FACTOR_ROWS, MMA_M, ScaledSmallMConfig
from dsl_backend.gemm.sm100.small_m import SmallMGemm
from dsl_backend.gemm.small_m import StreamKWork
from dsl_backend.primitives import tmem
from dsl_backend.primitives.narrow_mma import (
    ATOM_COLUMNS,
    ATOM_ROWS,
    E4M3,
    MXFP8,
    NVFP4,
    SCALE_ATOM_BYTES,
    NarrowMma,
    ScaleStage,
)
from dsl_backend.primitives.pipeline import Pipeline


@dataclass(frozen=True)
class FactorParams(ScaledSmallMParams):
    """With copies of the scale factors as in `block_scaled_gemm.BlockScaledParams`, and alpha; all may be missing."""

    tma_atom_x_factors: cute.CopyAtom
    mXFactors: cute.Tensor
    tma_atom_w_factors: cute.CopyAtom
    mWFactors: cute.Tensor
    mAlpha: cute.Tensor


@dataclass(frozen=True)
class FactorWork(StreamKWork):
    """With the stages of scale factors; see `block_scaled_gemm.factor_stages`."""

    sScales: cute.Tensor


class ScaledSmallMGemm(ScaledSmallMBase, SmallMGemm):
    """See `gemm/small_m.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[ScaledSmallMConfig]):
        super().__init__(key)
        self.scaled_by(key)
        kind = E4M3
        if key.x.swizzled:
            kind = NVFP4 if key.x.packed > 1 else MXFP8
        self.narrow_mma = NarrowMma(kind=kind, m=MMA_M, n=self.tokens)
        self.atoms = kind.scale_atoms
        self.factor_column = key.config.factor_column
        self.tmem_columns = key.config.tmem_columns_of(2 * self.atoms * ATOM_COLUMNS)
        self.stage_bytes += 3 * self.atoms * SCALE_ATOM_BYTES

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledArgs, stream):
        """Launch; see `args.scaled_launch_args`. The CTAs need not run at the same time."""
        self.launch(self.params(args.operands, args.scratch), self.ctas(args), stream)

    def params(self, operands, scratch):
        """The kernel's, with TMA descriptors."""
        base = super().params(operands, scratch)
        factors = (None,) * 4
        if self.atoms:
            load = cpasync.CopyBulkTensorTileG2SOp()
            copies = [factors_copy(scale, load, self.atoms) for scale in (operands.x_scale, operands.weight_scale)]
            factors = (*copies[0], *copies[1])
        values = [getattr(base, field.name) for field in fields(base)]
        return FactorParams(*values, *factors, operands.alpha)

    def tiled_mma(self):
        """None: `mma` needs the addresses of stages alone."""

    def begin(self, params, smem):
        """The base's, with the stages of scale factors."""
        work = super().begin(params, smem)
        if not self.atoms:
            return work
        stages = factor_stages(smem, self.atoms, 3, self.stages)
        values = [getattr(work, field.name) for field in fields(work)]
        return FactorWork(*values, stages)

    @cute.jit
    def load_weights(
        self,
        params: FactorParams,
        tWsW: cute.Tensor,
        tWgW: cute.Tensor,
        pipeline: Pipeline,
        work: StreamKWork,
        position: cutlass.Int32,
    ):
        """The base's, and their scale factors."""
        SmallMGemm.load_weights(self, params, tWsW, tWgW, pipeline, work, position)
        if cutlass.const_expr(self.atoms > 0):
            iteration = work.start + position
            k_tile, n_tile = iteration % work.k_tiles, iteration // work.k_tiles % work.n_tiles
            stage = pipeline.stage(position)
            for i in cutlass.range_constexpr(2):
                rows = 2 * n_tile + i
                if cutlass.const_expr(self.gated):
                    rows = n_tile + i * (params.mOut.shape[1] // ATOM_ROWS)
                load_factors(
                    params.tma_atom_w_factors,
                    params.mWFactors,
                    work.sScales[None, None, 1 + i, stage],
                    (rows, k_tile),
                    pipeline.mbar_full + stage,
                )

    @cute.jit
    def load_x(
        self,
        params: FactorParams,
        tXsX: cute.Tensor,
        tXgX: cute.Tensor,
        pipeline: Pipeline,
        work: StreamKWork,
        position: cutlass.Int32,
    ):
        """The base's, and the scale factors of the 128 rows that have the tokens."""
        SmallMGemm.load_x(self, params, tXsX, tXgX, pipeline, work, position)
        if cutlass.const_expr(self.atoms > 0):
            iteration = work.start + position
            k_tile, m_tile = iteration % work.k_tiles, iteration // work.k_tiles // work.n_tiles
            stage = pipeline.stage(position)
            load_factors(
                params.tma_atom_x_factors,
                params.mXFactors,
                work.sScales[None, None, 0, stage],
                (m_tile * self.tokens // ATOM_ROWS, k_tile),
                pipeline.mbar_full + stage,
            )

    @cute.jit
    def mma(
        self,
        tiled_mma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        work: StreamKWork,
        tmem_ptr: cute.Pointer,
    ):
        """The MMA warp."""
        box_bytes = cutlass.const_expr(self.box * BLOCK_BYTES)
        w_address, x_address = sW.iterator.toint(), sX.iterator.toint()
        first_tile, tiles = self.tile_range(work)
        for tile in cutlass.range(tiles, unroll=1):
            _, _, start, end = self.iterations(work, first_tile + tile)
            acc_pipeline.producer_acquire(tile)
            tmem.after_sync()
            accumulator = tmem_ptr.toint() + acc_pipeline.stage(tile) * (2 * self.tokens)
            first_row = (first_tile + tile) // work.n_tiles * self.tokens
            for iteration in cutlass.range(start, end, unroll=1):
                position = iteration - work.start
                stage = pipeline.stage(position)
                pipeline.consumer_wait(position)
                for i in cutlass.range_constexpr(2):
                    self.narrow_mma.issue(
                        accumulator + i * self.tokens,
                        w_address + stage * (2 * box_bytes) + i * box_bytes,
                        x_address + stage * (self.tokens * BLOCK_BYTES),
                        iteration > start,
                        self.factors_of(work, stage, i, first_row, tmem_ptr),
                    )
                with cute.arch.elect_one():
                    tcgen05.commit(pipeline.mbar_empty + stage)
            with cute.arch.elect_one():
                tcgen05.commit(acc_pipeline.full(tile))

    def factors_of(self, work, stage, box: int, first_row, tmem_ptr: cute.Pointer) -> ScaleStage | None:
        """Where a box's and the tokens' scale factors are: those of both boxes come to the same columns one by one.

        The tensor pipe does in order what one thread issues. A column of tensor memory has the factors of 32 rows.
        """
        if not self.atoms:
            return None
        each = self.atoms * SCALE_ATOM_BYTES
        address = work.sScales.iterator.toint() + stage * (3 * each)
        columns = self.atoms * ATOM_COLUMNS
        first = tmem_ptr.toint() + self.factor_column
        return ScaleStage(
            address + (1 + box) * each,
            address,
            first,
            first + columns,
            1,
            first_row % ATOM_ROWS // FACTOR_ROWS,
        )

    @cute.jit
    def store_columns(
        self,
        params: FactorParams,
        work: StreamKWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """The base's, of scaled sums."""
        column = n_tile * self.columns + thread
        of_column = self.biases(params, column)
        # All before the first store: no load moves in front of a store, whose place it might read. By the emulator's
        # clock (a model of a B200) 64 rows of 4096 x 7168 take 31.7 us so, and 40.5 with a load before each store.
        lane_scales = [
            self.x_scale(params, first_token + lane_token + cute.arch.lane_idx())
            for lane_token in range(0, cute.size(acc_0), WARP)
        ]
        for j in cutlass.range_constexpr(cute.size(acc_0)):
            token = first_token + j if self.stream_k else self.finished_token(first_token + j, j)
            x_scale = lane_scales[j // WARP]
            if cutlass.const_expr(self.x_rows and x_scale is not None):
                x_scale = cute.arch.shuffle_sync(x_scale, j % WARP)
            sum_0, sum_1 = acc_0[j], acc_1[j]
            if cutlass.const_expr(params.mAlpha is not None):
                sum_0, sum_1 = sum_0 * params.mAlpha[0], sum_1 * params.mAlpha[0]
            value_0, value_1 = self.scaled_sums(params, of_column, sum_0, sum_1, x_scale)
            self.finish(params, value_0, value_1, token, column)
