# SPDX-License-Identifier: Apache-2.0
"""Softmax in Gluon, Helion, TileLang and cuTile: short kernels of contiguous rows, for the comparison of DSLs."""

import torch
from dsl_backend.checks import short
from dsl_backend.providers import Run, provider

from ..columns import missing, missing_cutile, missing_gluon, missing_tilelang
from ..row_tiles import block_of, part_of, too_wide, uneven, warps_of
from .problems import Inputs, Problem


def gluon_objections(problem: Problem) -> list[str]:
    return missing_gluon() + too_wide(problem.width)


@provider(
    "softmax",
    name="Gluon",
    objections=gluon_objections,
    default=False,
    package="triton",
    code=["kernels/gluon_kernel.py"],
)
def gluon(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.gluon_kernel import softmax

    launch, block, warps = softmax[(problem.rows,)], block_of(problem.width), warps_of(problem.width)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        launch(layer.x, layer.out, problem.width, LOG=problem.log, BLOCK=block, num_warps=warps)
        return layer.out

    return run


def helion_objections(problem: Problem) -> list[str]:
    return missing("helion")


@provider(
    "softmax",
    name="Helion",
    objections=helion_objections,
    default=False,
    package="helion",
    code=["kernels/helion_kernel.py"],
)
def helion(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.helion_kernel import softmax

    kernel = softmax(problem.log, part_of(problem.width), warps_of(problem.width))

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        made: torch.Tensor = kernel(layer.x, layer.out)
        return made

    return run


def tilelang_objections(problem: Problem) -> list[str]:
    return missing_tilelang() + uneven(problem.width)


@provider(
    "softmax",
    name="TileLang",
    objections=tilelang_objections,
    default=False,
    package="tilelang",
    code=["kernels/tilelang_kernel.py"],
)
def tilelang(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.tilelang_kernel import softmax

    dtypes = short(problem.dtype), short(problem.out_dtype)
    kernel = softmax(problem.rows, problem.width, *dtypes, problem.log, 32 * warps_of(problem.width))

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        kernel(layer.x, layer.out)
        return layer.out

    return run


def cutile_objections(problem: Problem) -> list[str]:
    return missing_cutile() + too_wide(problem.width)


@provider(
    "softmax",
    name="cuTile",
    objections=cutile_objections,
    default=False,
    package="cuda-tile",
    code=["kernels/cutile_kernel.py"],
)
def cutile(problem: Problem, inputs: Inputs) -> Run:
    import cuda.tile as ct

    from .kernels.cutile_kernel import softmax

    grid, block = (problem.rows, 1, 1), block_of(problem.width)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        ct.launch(torch.cuda.current_stream(), grid, softmax, (layer.x, layer.out, problem.log, block))
        return layer.out

    return run
