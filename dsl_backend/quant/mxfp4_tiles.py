# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights under bfloat16 activations: the layout that kernels stream.

Tiles have 64 rows and 128 columns, [row tile, column tile, 32-bit word], threads' elements as in
`quant/weight_only.py`. A tile holds all that its products need, so that one copy brings it:

1. Its elements. A half of a word has four of them: e2m1 is a sign s, two bits of an exponent and one of a mantissa.
   As a bfloat16, s is its highest bit, and the other three lie at bits 8 to 6: the number times 2^-126. The first three
   elements lie so that a shift to the left by 0, 3 and 6 bits brings them there, the fourth one has what bits are left.
2. Scales: a word of each row, the exponents of its four blocks of 32 columns, from the lowest bits on. They are
   `EXPONENT` larger than e8m0's: what an element is multiplied with, to be the weight times 2^-`LOWERED`. Every step is
   exact for scales from 2^`LEAST_SCALE` to 2^`MOST_SCALE`; no normal bfloat16 holds the factors of others.

Rows and columns that are missing at the edges are zero.
"""

import torch

from dsl_backend import checks
from dsl_backend.checks import require
from dsl_backend.quant.format import MXFP4_TILED
from dsl_backend.quant.weight_only import TILE_COLUMNS, TILE_ROWS, WeightOnlyFormat, in_thread_order, padded

BLOCK_COLUMNS = 32
# Weights in registers are so many powers of two too small, and sums are multiplied in the end: the factors of elements,
# which are 2^126 too small as they are, have an exponent that bfloat16 has.
LOWERED = 32
EXPONENT = 126 - LOWERED
E8M0_BIAS = 127
LEAST_SCALE, MOST_SCALE = LOWERED - 126 + 1, LOWERED + 1
# Of a block without an element that is not zero.
ZEROS = E8M0_BIAS
# Where bits of an element, from the mantissa to the sign, lie in half a word.
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 13, 14, 11))


class Mxfp4Tiles:
    """Words of a tile."""

    value_words = TILE_ROWS * TILE_COLUMNS // 8
    tile_words = value_words + TILE_ROWS


TILES = Mxfp4Tiles()


def packed_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Of packed weights of a matrix."""
    return -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILES.tile_words


def check_parts(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises InvalidInput: these are not MXFP4 weights of a checkpoint, or have a scale that no kernel has."""
    checks.tensor("weight", weight)
    checks.tensor("scale", scale)
    checks.dtype("dtype of weight", weight.dtype, (torch.uint8,))
    checks.dtype("dtype of scale", scale.dtype, (torch.uint8, MXFP4_TILED.scales))
    require(
        weight.dim() == 2 and weight.numel() > 0 and weight.shape[1] * 2 % BLOCK_COLUMNS == 0,
        f"weight has shape {tuple(weight.shape)}: [rows, columns / 2] is needed, columns a multiple of {BLOCK_COLUMNS}",
    )
    wanted = (weight.shape[0], weight.shape[1] * 2 // BLOCK_COLUMNS)
    require(tuple(scale.shape) == wanted, f"scale has shape {tuple(scale.shape)}: {wanted} is needed")


def exponents_of(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E8m0 of each block, int32 [rows, columns / 32]; 1 of blocks of zeros.

    Args:
        weight, scale: as `pack` takes them.

    Raises:
        InvalidInput: a scale is too large or too small.
    """
    # All but the signs of both elements.
    used = (weight & 0x77).unflatten(1, (-1, BLOCK_COLUMNS // 2)).amax(-1) > 0
    exponents = torch.where(used, scale.view(torch.uint8).to(torch.int32), ZEROS)
    for name, found in (("smallest", int(exponents.min())), ("largest", int(exponents.max()))):
        require(
            LEAST_SCALE <= found - E8M0_BIAS <= MOST_SCALE,
            f"the {name} scale is 2^{found - E8M0_BIAS}{' (NaN)' if found == 255 else ''}: 2^{LEAST_SCALE} to "
            f"2^{MOST_SCALE} are possible",
        )
    return exponents


def pack(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed weights, int32 `packed_shape(rows, columns)`.

    Args:
        weight: uint8 [rows, columns / 2], two elements in a byte, the first in its low bits. scale: e8m0 [rows,
            columns / 32], or its bytes. As a checkpoint has them.

    Raises:
        InvalidInput: these are not MXFP4 weights, or a scale is too large or too small.
    """
    check_parts(weight, scale)
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1)
    exponents = exponents_of(weight, scale)
    row_tiles, column_tiles, _ = packed_shape(*codes.shape)
    rows, columns = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    sizes, order = in_thread_order(WeightOnlyFormat())
    wide = padded(codes, rows, columns).view(*sizes[:4], column_tiles, *sizes[5:]).permute(order)
    # Of each word the elements of both halves.
    elements = wide.reshape(row_tiles, column_tiles, TILES.value_words, 2, len(PLACES)).to(torch.int32)
    words = torch.zeros(elements.shape[:3], dtype=torch.int32, device=weight.device)
    for i, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            of_halves = elements[..., i] >> bit & 1
            words |= of_halves[..., 0] << place | of_halves[..., 1] << (16 + place)
    factors = padded(exponents + EXPONENT, rows, columns // BLOCK_COLUMNS, fill=E8M0_BIAS).to(torch.uint8)
    by_tile = factors.view(row_tiles, TILE_ROWS, column_tiles, 4).transpose(1, 2).reshape(row_tiles, column_tiles, -1)
    return torch.cat((words, by_tile.view(torch.int32)), 2)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weights of whole tiles, float64 [rows, columns]."""
    row_tiles, column_tiles, _ = packed.shape
    words = packed[..., : TILES.value_words]
    halves = torch.stack((words, words >> 16), -1)
    codes = torch.zeros(*halves.shape, len(PLACES), dtype=torch.int32, device=packed.device)
    for i, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            codes[..., i] |= (halves >> place & 1) << bit
    sizes, order = in_thread_order(WeightOnlyFormat())
    full = (row_tiles, *sizes[1:4], column_tiles, *sizes[5:])
    back = sorted(range(len(order)), key=lambda axis: order[axis])
    elements = codes.reshape([full[axis] for axis in order]).permute(back)
    elements = elements.reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=packed.device)
    values = e2m1[elements & 7] * (1 - 2 * (elements >> 3))
    factors = packed[..., TILES.value_words :].contiguous().view(torch.uint8).view(row_tiles, column_tiles, -1, 4)
    exponents = factors.transpose(1, 2).reshape(row_tiles * TILE_ROWS, -1).double() - EXPONENT - E8M0_BIAS
    return values * exponents.exp2().repeat_interleave(BLOCK_COLUMNS, 1)


def pack_experts(
    weight: torch.Tensor, scale: torch.Tensor, *, parts: int = 1, interleaved: bool = False
) -> torch.Tensor:
    """Packed weights of experts, int32 [E, parts * row tiles, column tiles, words]: all tiles of gate rows come first.

    Args:
        weight: uint8 [E, rows, columns / 2]. scale: [E, rows, columns / 32].
        parts: 2 of w13, whose gate and up rows are apart, or alternate with `interleaved`.

    Raises:
        InvalidInput: as `pack`; or weights are not of experts, or have no gate and up rows.
    """
    checks.tensor("weight", weight)
    checks.tensor("scale", scale)
    checks.integer("parts", parts, 1, 2)
    checks.flag("interleaved", interleaved)
    require(
        weight.dim() == 3 and weight.shape[0] > 0,
        f"weight has shape {tuple(weight.shape)}: [experts, rows, columns / 2] is needed",
    )
    require(
        scale.dim() == 3 and scale.shape[0] == weight.shape[0],
        f"scale has shape {tuple(scale.shape)}: [{weight.shape[0]}, rows, columns / {BLOCK_COLUMNS}] is needed",
    )
    require(
        parts == 1 or weight.shape[1] % 2 == 0, f"weight has {weight.shape[1]} rows: gate and up rows are equally many"
    )

    def of_parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if parts == 1:
            return (rows,)
        return (rows[::2], rows[1::2]) if interleaved else tuple(rows.chunk(2))

    return torch.stack(
        [
            torch.cat([pack(*part) for part in zip(of_parts(rows), of_parts(exponents), strict=True)])
            for rows, exponents in zip(weight, scale, strict=True)
        ]
    )


def unpack_expert(
    packed: torch.Tensor, rows: int, columns: int, *, parts: int = 1, interleaved: bool = False
) -> torch.Tensor:
    """The inverse for one expert: float64 [rows, columns] of `pack_experts(...)[expert]`."""
    found = [unpack(part)[: rows // parts, :columns] for part in packed.chunk(parts)]
    return torch.stack(found, 1).flatten(0, 1) if interleaved and parts == 2 else torch.cat(found)
