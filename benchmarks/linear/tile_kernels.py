# SPDX-License-Identifier: Apache-2.0
"""A linear layer in other DSLs: short kernels, for the comparison of DSLs."""

from collections.abc import Callable
from functools import cache

import torch
from dsl_backend.checks import short
from dsl_backend.providers import Run, provider
from dsl_backend.runtime import target as targets

from ..columns import missing, missing_cutile, missing_gluon, missing_tilelang
from ..fastest import fastest
from .problems import Inputs, Layer, Problem

ALIGNED = 8  # elements of 16 bytes


def operands_of(problem: Problem, layer: Layer) -> tuple[torch.Tensor, ...]:
    """x, then the weights: gate and up apart where the layer is gated."""
    return (layer.x, *layer.weight.chunk(2)) if problem.gated else (layer.x, layer.weight)


def uneven(problem: Problem) -> list[str]:
    """Why TMA does not copy a layer's rows."""
    found = [name for name, size in (("n", problem.n), ("k", problem.k)) if size % ALIGNED]
    return [f"serves multiples of {ALIGNED} for {' and '.join(found)}"] if found else []


def gluon_objections(problem: Problem) -> list[str]:
    return missing_gluon() + targets.detect().arch_objections("sm90") + uneven(problem)


@provider(
    "linear",
    name="Gluon",
    objections=gluon_objections,
    default=False,
    package="triton",
    code=["kernels/gluon_kernel.py"],
)
def gluon(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few tiles."""
    from .kernels import gluon_kernel as kernel

    sms = targets.detect().sm_count

    def bind(tile: kernel.Tile, layer: Layer) -> kernel.Launch:
        x, *weights = operands_of(problem, layer)
        return kernel.bind(tile, x, weights, layer.out, sms)

    tile = fastest(kernel.GATED if problem.gated else kernel.PLAIN, lambda one: bind(one, inputs.layers[0]))
    launches = [bind(tile, layer) for layer in inputs.layers]

    def run(index: int) -> torch.Tensor:
        launches[index]()
        return inputs.layers[index].out

    return run


def helion_objections(problem: Problem) -> list[str]:
    return missing("helion")


@provider(
    "linear",
    name="Helion",
    objections=helion_objections,
    default=False,
    package="helion",
    code=["kernels/helion_kernel.py"],
)
def helion(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few configurations: the first launch times them."""
    from .kernels.helion_kernel import linear

    kernel = linear(problem.gated, targets.detect().tma)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        made: torch.Tensor = kernel(*operands_of(problem, layer), layer.out)
        return made

    return run


def tilelang_objections(problem: Problem) -> list[str]:
    return missing_tilelang() + uneven(problem)


@provider(
    "linear",
    name="TileLang",
    objections=tilelang_objections,
    default=False,
    package="tilelang",
    code=["kernels/tilelang_kernel.py"],
)
def tilelang(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few tiles."""
    from .kernels import tilelang_kernel as kernel

    make, tiles = (kernel.swiglu, kernel.GATED) if problem.gated else (kernel.product, kernel.PLAIN)
    compiled = cache(lambda tile: make(problem.m, problem.n, problem.k, short(problem.dtype), tile))

    def bind(tile: kernel.Tile) -> Callable[[], object]:
        layer, launch = inputs.layers[0], compiled(tile)
        return lambda: launch(layer.x, layer.weight, layer.out)

    launch = compiled(fastest(tiles, bind))

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        launch(layer.x, layer.weight, layer.out)
        return layer.out

    return run


def cutile_objections(problem: Problem) -> list[str]:
    return missing_cutile()


@provider(
    "linear",
    name="cuTile",
    objections=cutile_objections,
    default=False,
    package="cuda-tile",
    code=["kernels/cutile_kernel.py"],
)
def cutile(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few tiles."""
    import cuda.tile as ct

    from .kernels import cutile_kernel as kernels

    def bind(tile: kernels.Tile, layer: Layer) -> Callable[[], object]:
        grid = (ct.cdiv(problem.m, tile.rows) * ct.cdiv(problem.n, tile.columns), 1, 1)
        kernel = kernels.kernel(problem.gated, tile.warps)
        arguments = (*operands_of(problem, layer), layer.out, tile.rows, tile.columns, tile.depth)
        return lambda: ct.launch(torch.cuda.current_stream(), grid, kernel, arguments)

    tile = fastest(kernels.GATED if problem.gated else kernels.PLAIN, lambda one: bind(one, inputs.layers[0]))
    launches = [bind(tile, layer) for layer in inputs.layers]

    def run(index: int) -> torch.Tensor:
        launches[index]()
        return inputs.layers[index].out

    return run
