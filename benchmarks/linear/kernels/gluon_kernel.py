# SPDX-License-Identifier: Apache-2.0
"""A linear layer in Gluon for SM90: a warp copies tiles by TMA, two warpgroups multiply them by wgmma and store by TMA.

CTAs stay for several tiles, so that the next tile's copies run beside a tile's stores. A gated layer has two
accumulators, of which each is half as wide.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Their names from Triton 3.9 on, and those before.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
Launch = Callable[[], Any]
# Tiles of rows that share their weights in the L2 cache.
GROUP = gl.constexpr(8)
MATH_WARPS = 8


class Tile(NamedTuple):
    """Rows and columns of each accumulator, and the steps of `DEPTH` that shared memory holds, beside one output."""

    rows: int
    columns: int
    stages: int


DEPTH = 64  # as wide as the pattern of 128 bytes
PLAIN = (Tile(128, 256, 3), Tile(256, 128, 3), Tile(128, 128, 6))
GATED = (Tile(128, 128, 4), Tile(256, 64, 4))


@gluon.jit
def place(tile, rows, columns):
    """The tile's row and column: groups of `GROUP` tiles of rows, along the columns."""
    group = tile // (GROUP * columns)
    height = gl.minimum(rows - group * GROUP, GROUP)
    inside = tile % (GROUP * columns)
    return group * GROUP + inside % height, inside // height


@gluon.jit
def load_tiles(operands, buffers, bars, sizes, GATED: gl.constexpr, STAGES: gl.constexpr):
    """The warp that copies."""
    x, gate, up = operands
    x_tiles, gate_tiles, up_tiles = buffers
    ready, free = bars
    rows, columns, steps = sizes
    count = 0
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = place(tile, rows, columns)
        for step in range(steps):
            slot, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(free.index(slot), phase ^ 1)
            bar = ready.index(slot)
            parts: gl.constexpr = 2 if GATED else 1
            mbarrier.expect(bar, x.block_type.nbytes + parts * gate.block_type.nbytes)
            first = step * x.block_type.shape[1]
            at = column * gate.block_type.shape[0]
            load(x, [row * x.block_type.shape[0], first], bar, x_tiles.index(slot))
            load(gate, [at, first], bar, gate_tiles.index(slot))
            if GATED:
                load(up, [at, first], bar, up_tiles.index(slot))
            count += 1


@gluon.jit
def multiply(out, staged, buffers, bars, sizes, GATED: gl.constexpr, STAGES: gl.constexpr):
    """The warps that multiply and store."""
    x_tiles, gate_tiles, up_tiles = buffers
    ready, free = bars
    rows, columns, steps = sizes
    height: gl.constexpr = staged.type.shape[0]
    width: gl.constexpr = staged.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], instr_shape=[16, width, 16])
    count = 0
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = place(tile, rows, columns)
        gates = gl.zeros((height, width), gl.float32, layout)
        ups = gates
        for step in range(steps):
            slot, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(ready.index(slot), phase)
            x = x_tiles.index(slot)
            gates = warpgroup_mma(x, gate_tiles.index(slot).permute((1, 0)), gates, is_async=True)
            if GATED:
                ups = warpgroup_mma(x, up_tiles.index(slot).permute((1, 0)), ups, is_async=True)
                gates, ups = warpgroup_mma_wait(2, deps=(gates, ups))
            else:
                gates = warpgroup_mma_wait(1, deps=(gates,))
            # The products of the step before have ended.
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        if GATED:
            gates, ups = warpgroup_mma_wait(0, deps=(gates, ups))
        else:
            gates = warpgroup_mma_wait(0, deps=(gates,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
        if GATED:
            gates = gates / (1 + gl.exp(-gates)) * ups
        tma.store_wait(0)
        staged.store(gates.to(out.dtype))
        fence_async_shared()
        store(out, [row * height, column * width], staged)
    tma.store_wait(0)


@gluon.jit
def linear(x, gate, up, out, rows, columns, steps, GATED: gl.constexpr, STAGES: gl.constexpr):
    """Of x [m, k], gate and up [n, k] (up is gate where the layer is not gated), out [m, n], as descriptors of tiles.

    Args:
        rows, columns, steps: tiles of m, n and k.
    """
    # Gluon does not unpack a list in a list.
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    gate_tiles = gl.allocate_shared_memory(x.dtype, [STAGES] + gate.block_type.shape, gate.layout)  # noqa: RUF005
    up_tiles = gate_tiles
    if GATED:
        up_tiles = gl.allocate_shared_memory(x.dtype, [STAGES] + up.block_type.shape, up.layout)  # noqa: RUF005
    staged = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    buffers, bars, sizes = (x_tiles, gate_tiles, up_tiles), (ready, free), (rows, columns, steps)
    gl.warp_specialize(
        [
            (multiply, (out, staged, buffers, bars, sizes, GATED, STAGES)),
            (load_tiles, ((x, gate, up), buffers, bars, sizes, GATED, STAGES)),
        ],
        [1],
        [24],
    )


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of tiles of a matrix of 16-bit numbers, with the pattern of 128 bytes, which wgmma reads."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


def bind(tile: Tile, x: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor, sms: int) -> Launch:
    """A launch for x [m, k], one weight or gate and up [n, k] each, and out [m, n]."""
    gate, up = weights[0], weights[-1]
    operands = (
        descriptor(x, tile.rows, DEPTH),
        *(descriptor(one, tile.columns, DEPTH) for one in (gate, up)),
        descriptor(out, tile.rows, tile.columns),
    )
    (m, k), (n, _) = x.shape, gate.shape
    sizes = (triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns), triton.cdiv(k, DEPTH))
    launch = linear[(min(sms, sizes[0] * sizes[1]),)]
    options = {"GATED": len(weights) == 2, "STAGES": tile.stages, "num_warps": MATH_WARPS}
    return lambda: launch(*operands, *sizes, **options)
