# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of experts in MXFP4 under bfloat16 on SM100, for any number of tokens.

Work tiles, gathered rows, products and epilogue are those of `experts/cute/sm100/grouped.py`. Packed tiles are those
that SM90's kernels read (`quant/mxfp4_tiles.py`); they arrive by bulk copies, half of their columns in a stage. Two
warpgroups unpack them in registers, and write bfloat16 to stages of their own, as TMA would have written it there.

Weights stay the N of products, which tcgen05 takes from shared memory alone. A step of 256 rows of weights and 128
tokens has 512 cycles of products, and 900 of shared memory at 128 bytes each: 256 to write what was unpacked, 384 to
multiply, the rest for packed weights and x. In tensor memory, as the M of products, unpacked weights would take 512.
"""

import cutlass
from cutlass import cute
from cutlass.utils import hopper_helpers

from dsl_backend.experts.cute.grouped import GroupedParams, WorkTile
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.experts.cute.sm100.grouped import GroupedGemm
from dsl_backend.experts.cute.sm100.unpacking import UnpackingWarps, WeightStages
from dsl_backend.experts.weight_only_sm100_configs import (
    GROUPED_REGISTERS,
    UNPACKED_STAGES,
    UNPACKING_WARPGROUPS,
    UnpackedTiles,
)
from dsl_backend.gemm.mxfp4_unpacking import PIECE_COLUMNS, STEP_COLUMNS
from dsl_backend.gemm.sizes import BLOCK_BYTES, WARP
from dsl_backend.gemm.sm100.configs import LOAD_WARP
from dsl_backend.primitives.copy import bulk_load, store_matrices
from dsl_backend.primitives.moved import LayoutEnum, SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.mxfp4_tiles import BLOCK_COLUMNS, LOWERED, TILES
from dsl_backend.quant.weight_only import TILE_COLUMNS, TILE_ROWS

# Stages that a packed tile's columns come in.
HALVES = TILE_COLUMNS // PIECE_COLUMNS
VALUE_WORDS = TILES.value_words // HALVES
# Bits of a word that the scales of a stage's columns have.
HALF_BITS = PIECE_COLUMNS // BLOCK_COLUMNS * 8
# 16 bytes of a row in shared memory.
VECTOR_BYTES, VECTOR_COLUMNS = 16, 8


class WeightOnlyGroupedGemm(UnpackingWarps, GroupedGemm):
    """One of the two products; see the module, and `experts/cute/grouped.py`."""

    trades_registers = True
    registers = GROUPED_REGISTERS

    def __init__(self, key: ProductKey):
        config = key.config
        assert isinstance(config, UnpackedTiles)
        GroupedGemm.__init__(self, key)
        self.threads = config.unpacking_threads(self.gathers)
        self.row_tiles, self.half_words = config.row_tiles, config.half_words

    def smem_layouts(self, weight_rows: int):
        """(sX_layout, sW_layout): stages of x, and those of unpacked weights."""
        sX_layout, _ = super().smem_layouts(weight_rows)
        tile = (self.tile_m, weight_rows, self.block_k)
        sW_layout = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.weight_dtype, UNPACKED_STAGES)
        return sX_layout, sW_layout

    def scale_stages(self, smem: SmemAllocator) -> WeightStages:
        """Stages of packed weights, and the barriers of unpacked ones."""
        return self.weight_stages(smem, self.half_words, UNPACKED_STAGES)

    def loads(self, role):
        """Four warps gather; of those of the second product one loads."""
        return role >= LOAD_WARP if self.gathers else role == LOAD_WARP

    # Loads

    def weights_copy(self, load, weight: cute.Tensor):
        """(None, packed weights [E, parts * row tiles, column tiles, words]): bulk copies have no descriptor."""
        return None, weight

    def partition_weights(self, params: GroupedParams, sW: cute.Tensor):
        """(None, mW): bulk copies need no partition."""
        return None, params.mW

    def load_weights(
        self, params: GroupedParams, tWgW: cute.Tensor, tWsW, work: WorkTile, k_tile, stage, mbar, sScales=None
    ):
        """Half of each packed tile of a work tile, and its scales."""
        value_bytes, tile_bytes = 4 * VALUE_WORDS, 4 * TILES.tile_words
        of_tile = tWgW.iterator.toint() + cutlass.Int64(work.expert) * (4 * tWgW.stride[0])
        of_tile += k_tile // HALVES * tile_bytes
        of_part, sPacked = tWgW.shape[1] // self.parts, sScales.sPacked
        with cute.arch.elect_one():
            for i in range(self.row_tiles):
                row_tile = self.packed_row(of_part, work.n_tile, i)
                source = of_tile + cutlass.Int64(row_tile) * (4 * tWgW.stride[1])
                target = sPacked.iterator + sPacked.layout((0, i, stage))
                bulk_load(source + k_tile % HALVES * value_bytes, target, value_bytes, mbar)
                bulk_load(source + HALVES * value_bytes, target + VALUE_WORDS, 4 * TILE_ROWS, mbar)

    # From packed weights to operands

    @cute.jit
    def unpack(self, params: GroupedParams, sW: cute.Tensor, pipeline: Pipeline, beside: WeightStages):
        """The warps that unpack: of each stage every second packed tile for a warpgroup, 16 of its rows for a warp."""
        schedule, k_tiles = self.tiles_of_cta(params), self.k_tiles(params)
        group, thread = self.unpacker()
        for tile in cutlass.range(schedule.count, unroll=1):
            for k_tile in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + k_tile
                beside.unpacked.producer_acquire(position)
                pipeline.consumer_wait(position)
                for i in cutlass.range_constexpr(self.row_tiles // UNPACKING_WARPGROUPS):
                    row_tile = i * UNPACKING_WARPGROUPS + group
                    packed = beside.sPacked[None, row_tile, pipeline.stage(position)].iterator
                    exponents = self.exponents_of(packed + VALUE_WORDS, thread)
                    shift = k_tile % HALVES * HALF_BITS
                    steps = self.unpack_piece(packed, [word >> shift for word in exponents], thread)
                    self.store_operand(sW, steps, row_tile, beside.unpacked.stage(position), thread)
                # Products read by the async proxy.
                cute.arch.fence_proxy("async.shared", space="cta")
                self.hand_over(beside.unpacked, position)

    def store_operand(self, sW: cute.Tensor, steps: list, row_tile, stage, thread):
        """A thread's pairs of a packed tile to its rows of a stage, 16 columns of 16 rows at a time.

        A lane has the address of a row and of 8 of these columns. Vectors of a row of 128 bytes are permuted by the
        row's place among 8, which is the lane's.
        """
        lane = thread % WARP
        row = stage * self.weight_rows + row_tile * TILE_ROWS + thread // WARP * 16 + lane % 16
        first = cutlass.Int32(sW.iterator.toint()) + row * BLOCK_BYTES
        for i, words in enumerate(steps):
            vector = i * (STEP_COLUMNS // VECTOR_COLUMNS) + lane // 16
            store_matrices(first + (vector ^ (lane % 8)) * VECTOR_BYTES, words)

    # Products

    def await_weights(self, beside: WeightStages, position, stage):
        """The stage of a position's unpacked weights, once they are there."""
        beside.unpacked.consumer_wait(position)
        return beside.unpacked.stage(position)

    def give_weights_back(self, beside: WeightStages, position):
        """Products that are done have read them: they were unpacked from what is given back with x."""
        self.commit(beside.unpacked.empty(position))

    # Epilogue

    def row_factor(self, params: GroupedParams, row, work: WorkTile):
        """What sums are too small by, and the router's weight where it is multiplied with the input."""
        return super().row_factor(params, row, work) * 2.0**LOWERED

    def factored(self, params: GroupedParams, values: list, work: WorkTile, factor, column) -> list:
        return [[value * factor for value in of_part] for of_part in values]
