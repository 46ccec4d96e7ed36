# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMMs on SM100 whose matrix products apply the scale factors: MXFP8, NVFP4, and MXFP4 weights with MXFP8.

Work tiles, loads and stores are those of `experts/cute/sm100/grouped.py`, products and tensor memory those of
`gemm/sm100/block_scaled_gemm.py`. In the first product a gathering thread copies the scale factors of one row of x, 4
bytes for each 4 blocks, to where an atom of 128 rows has them. The epilogue quantises the activation's result; its
scale factors lie by work tile, so that both products' rows of a tile are the rows of the atoms.

TMA unpacks MXFP4 weights: 16 elements become the first 8 of 16 bytes, as kind::mxf8f6f4 takes them.
"""

from dataclasses import dataclass, fields, replace

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.experts.cute.grouped import GroupedParams, WorkTile
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.experts.cute.scaled_grouped import ScaledGroupedParams
from dsl_backend.experts.cute.sm100.grouped import VECTOR
from dsl_backend.experts.cute.sm100.scaled_grouped import ScaledGroupedGemm
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm100.block_scaled_gemm import BlockScaledGemm, factors_copy, load_factors
from dsl_backend.gemm.sm100.configs import BlockScaledConfig
from dsl_backend.gemm.views import expert_parts_view
from dsl_backend.primitives.copy import cp_async_word
from dsl_backend.primitives.math import in_pairs, mul_pair
from dsl_backend.primitives.narrow_mma import ATOM_ROWS, MXFP8_MXFP4, SCALE_ATOM_BYTES
from dsl_backend.quant.cute.blocks import block_scale, converted, words_at
from dsl_backend.quant.format import MXFP4, ScaledFormat

# Scale factors of a row and 4 blocks.
WORD_BYTES = 4
# Bytes of a row that TMA unpacks at once.
PACKED_ALIGNMENT = 64
# Words of a store.
MOST_WORDS = 4


@dataclass(frozen=True)
class BlockScaledGroupedParams(ScaledGroupedParams):
    """With copies of scale factors; those of x are missing where it is gathered. See `BlockScaledParams`.

    mXScale: bytes [tokens, blocks], or missing. mWeightScale: bytes [E, rows, blocks]. mOutScale: bytes [rows of work
    tiles, blocks], or missing.

    Attributes:
        mXGlobal, mOutGlobal: float32 [1], and mWeightGlobal: float32 [E]: NVFP4's scales of whole matrices, or missing.
    """

    tma_atom_x_factors: cute.CopyAtom
    mXFactors: cute.Tensor
    tma_atom_w_factors: cute.CopyAtom
    mWFactors: cute.Tensor
    mXGlobal: cute.Tensor
    mWeightGlobal: cute.Tensor
    mOutGlobal: cute.Tensor


class BlockScaledGroupedGemm(ScaledGroupedGemm, BlockScaledGemm):
    """See the module."""

    def __init__(self, key: ProductKey, scaled: ScaledKey[BlockScaledConfig], weight: ScaledFormat):
        BlockScaledGemm.__init__(self, scaled)
        self.prepare(key, False)
        if self.gathers:
            # With an equal share of 168 ptxas spilled 48 bytes (MXFP8, gpt-oss's activation, biases).
            self.trades_registers, self.threads = True, 3 * WARPGROUP
        self.unpacks = weight == MXFP4
        if self.unpacks:
            self.narrow_mma = replace(self.narrow_mma, kind=MXFP8_MXFP4)
        self.factor_bytes = self.atoms * SCALE_ATOM_BYTES  # of 128 rows of a stage
        self.weight_bytes += self.weight_atoms * self.factor_bytes

    def weights_copy(self, load, weight: cute.Tensor):
        """(atom, coordinates) of TMA copies of a box of weights, which unpack MXFP4."""
        if not self.unpacks:
            return super().weights_copy(load, weight)
        pointer = cute.make_ptr(
            cutlass.Float4E2M1FN, weight.iterator.toint(), cute.AddressSpace.gmem, assumed_align=PACKED_ALIGNMENT
        )
        experts, rows, row_bytes = weight.shape
        steps = [cute.assume(stride, divby=PACKED_ALIGNMENT) * 2 for stride in weight.stride[:2]]
        packed = cute.make_tensor(pointer, cute.make_layout((experts, rows, row_bytes * 2), stride=(*steps, 1)))
        weights = expert_parts_view(packed, self.parts, self.interleaved)
        tile = (self.box_n, self.block_k)
        return cpasync.make_tiled_tma_atom(
            load, weights, self.box_layout(self.box_n), tile, internal_type=cutlass.Uint8
        )

    def extended(self, params: GroupedParams, args) -> BlockScaledGroupedParams:
        """The parameters with scales and copies of scale factors."""
        base = super().extended(params, args)
        values = {field.name: getattr(base, field.name) for field in fields(base)}
        load, scales = cpasync.CopyBulkTensorTileG2SOp(), args.operands.scales
        experts, rows, columns = base.mWeightScale.shape
        flat = cute.make_layout((experts * rows, columns), stride=(columns, 1))
        of_weights = factors_copy(cute.make_tensor(base.mWeightScale.iterator, flat), load, self.atoms)
        of_x = (None, None) if self.gathers else factors_copy(base.mXScale, load, self.atoms)
        if self.gathers:
            whole = scales.x_global, scales.w13_global, scales.hidden_global
        else:
            whole = scales.hidden_global, scales.w2_global, None
        return BlockScaledGroupedParams(
            **values,
            tma_atom_x_factors=of_x[0],
            mXFactors=of_x[1],
            tma_atom_w_factors=of_weights[0],
            mWFactors=of_weights[1],
            mXGlobal=whole[0],
            mWeightGlobal=whole[1],
            mOutGlobal=whole[2],
        )

    def prefetch_descriptors(self, params):
        """Of all TMA copies."""
        super().prefetch_descriptors(params)
        cpasync.prefetch_descriptor(params.tma_atom_w_factors)
        if not self.gathers:
            cpasync.prefetch_descriptor(params.tma_atom_x_factors)

    # Loads

    def load_weights(self, params, tWgW, tWsW, work: WorkTile, k_tile, stage, mbar, sScales=None):
        """Both boxes of a tile's weights and their scale factors."""
        super().load_weights(params, tWgW, tWsW, work, k_tile, stage, mbar)
        of_expert = params.mWeightScale.shape[1] // ATOM_ROWS
        for i in range(self.weight_atoms):
            inside = work.n_tile + i * (of_expert // 2) if self.gated else self.weight_atoms * work.n_tile + i
            place = (work.expert * of_expert + inside, k_tile)
            load_factors(params.tma_atom_w_factors, params.mWFactors, sScales[None, None, 1 + i, stage], place, mbar)

    def factor_source(self, params, work: WorkTile, thread):
        """Where the scale factors of the x row of a gathering thread begin: of any row past the tile's last."""
        token = params.mPairs[work.first_row + cutlass.min(thread, work.rows - 1)] // self.pairs_per_row
        return params.mXScale.iterator.toint() + cutlass.Int64(token) * params.mXScale.stride[0]

    def gather_factors(self, params, sScales, source, k_tile, stage, thread):
        """Copy a row's scale factors of a stage, which lie 4 bytes in each 16 of an atom."""
        of_stage = self.factor_bytes * (1 + self.weight_atoms)
        target = sScales.iterator.toint() + stage * of_stage + thread % WARP * 16 + thread // WARP * WORD_BYTES
        words = params.mXScale.shape[1] // WORD_BYTES
        for atom in range(self.atoms):
            # Past the last column x is zero, whatever its factor is.
            word = cutlass.min(k_tile * self.atoms + atom, words - 1)
            cp_async_word(target + atom * SCALE_ATOM_BYTES, source + word * WORD_BYTES)

    def load_row_factors(self, params, sScales, work: WorkTile, k_tile, stage, mbar):
        """Copy a stage's scale factors of a work tile's rows."""
        target = sScales[None, None, 0, stage]
        load_factors(params.tma_atom_x_factors, params.mXFactors, target, (work.m_tile, k_tile), mbar)

    def bytes_of_stage(self, work: WorkTile):
        return super().bytes_of_stage(work) + self.factor_bytes

    # Epilogue

    def row_factor(self, params, row, work: WorkTile):
        """The product of the scales of whole matrices."""
        if params.mWeightGlobal is None:
            return cutlass.Float32(1.0)
        return params.mWeightGlobal[work.expert] * params.mXGlobal[0]

    def factored(self, params, values: list, work: WorkTile, factor, column) -> list:
        if params.mWeightGlobal is None:
            return values
        return [in_pairs(mul_pair, part, [factor] * VECTOR) for part in values]

    def store_values(self, params, acc: list, work: WorkTile, row, start, factor, place):
        """Neighbouring columns of a row; those of the first product as blocks with their scale factors."""
        if not self.quantises:
            super().store_values(params, acc, work, row, start, factor, place)
            return
        kind = self.x_format
        global_scale = None if params.mOutGlobal is None else params.mOutGlobal[0]
        for first in range(0, self.register_columns, self.out_group):
            column = work.n_tile * self.columns + start + first
            values: list = []
            for i in range(0, self.out_group, VECTOR):
                values += self.finished(params, acc, work, factor, column + i, first + i)
            code, inverse = block_scale(kind, values, global_scale)
            words = converted(kind, in_pairs(mul_pair, values, [inverse] * len(values)))
            self.store_words(params, words, row, column, place < work.rows)
            self.store_factor(params, code, work.m_tile, place, column)

    @cute.jit
    def store_words(self, params, words: list, row: cutlass.Int32, column: cutlass.Int32, exists: cutlass.Boolean):
        """A block of a row of the output, if there is such."""
        count = cutlass.const_expr(min(len(words), MOST_WORDS))
        if exists and column < self.width(params):
            offset = cutlass.Int64(row) * params.mOut.stride[0] + column // self.out_packed
            for first in cutlass.range_constexpr(0, len(words), count):
                vector = cute.make_rmem_tensor(count, cutlass.Int32)
                for i in cutlass.range_constexpr(count):
                    vector[i] = words[first + i]
                cute.autovec_copy(vector, words_at(params.mOut, offset + 4 * first, count))

    @cute.jit
    def store_factor(
        self, params, code: cutlass.Int32, m_tile: cutlass.Int32, place: cutlass.Int32, column: cutlass.Int32
    ):
        """A block's scale factor to the tile's atoms, 0 past the last column: the second product reads whole atoms."""
        blocks = params.mOutScale.shape[1]
        block = column // self.out_group
        if column >= self.width(params):
            code = cutlass.Int32(0)
        if block < blocks:
            within = place % WARP * 16 + place // WARP * WORD_BYTES + block % WORD_BYTES
            atom = cutlass.Int64(m_tile) * (blocks // WORD_BYTES) + block // WORD_BYTES
            scales = cute.make_tensor(params.mOutScale.iterator, cute.make_layout(cute.size(params.mOutScale)))
            scales[atom * SCALE_ATOM_BYTES + within] = cutlass.Uint8(code)
