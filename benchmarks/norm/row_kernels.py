# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in Gluon, Helion, TileLang and cuTile: short kernels of contiguous rows, for the comparison of DSLs."""

import torch
from dsl_backend.checks import short
from dsl_backend.norm.spec import NormTensors
from dsl_backend.providers import Run, provider

from ..columns import missing, missing_cutile, missing_gluon, missing_tilelang
from ..row_tiles import block_of, part_of, too_wide, uneven, warps_of
from .problems import EPS, Inputs, Problem
from .providers import of_16_or_32_bits


def gluon_objections(problem: Problem) -> list[str]:
    return missing_gluon() + too_wide(problem.width) + of_16_or_32_bits(problem)


@provider(
    "norm", name="Gluon", objections=gluon_objections, default=False, package="triton", code=["kernels/gluon_kernel.py"]
)
def gluon(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.gluon_kernel import rms_norm

    launch, block, warps = rms_norm[(problem.rows,)], block_of(problem.width), warps_of(problem.width)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        tensors = layer.x, layer.residual, layer.weight, layer.out, layer.residual_out
        launch(*tensors, problem.width, EPS, BLOCK=block, num_warps=warps)
        return layer.out

    return run


def tensors_of(layer: NormTensors) -> tuple[torch.Tensor | None, ...]:
    """In the order of the kernels' parameters, whose kernels with a residual are of their own."""
    if layer.residual is None:
        return layer.x, layer.weight, layer.out
    return layer.x, layer.residual, layer.weight, layer.out, layer.residual_out


def helion_objections(problem: Problem) -> list[str]:
    return missing("helion") + of_16_or_32_bits(problem)


@provider(
    "norm",
    name="Helion",
    objections=helion_objections,
    default=False,
    package="helion",
    code=["kernels/helion_kernel.py"],
)
def helion(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.helion_kernel import rms_norm

    kernel = rms_norm(problem.residual, part_of(problem.width), warps_of(problem.width))

    def run(index: int) -> torch.Tensor:
        made: torch.Tensor = kernel(*tensors_of(inputs.layers[index]), EPS)
        return made

    return run


def tilelang_objections(problem: Problem) -> list[str]:
    return missing_tilelang() + uneven(problem.width) + of_16_or_32_bits(problem)


@provider(
    "norm",
    name="TileLang",
    objections=tilelang_objections,
    default=False,
    package="tilelang",
    code=["kernels/tilelang_kernel.py"],
)
def tilelang(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.tilelang_kernel import rms_norm, rms_norm_of_sum

    make = rms_norm_of_sum if problem.residual else rms_norm
    kernel = make(problem.rows, problem.width, short(problem.dtype), EPS, 32 * warps_of(problem.width))

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        kernel(*tensors_of(layer))
        return layer.out

    return run


def cutile_objections(problem: Problem) -> list[str]:
    return missing_cutile() + too_wide(problem.width) + of_16_or_32_bits(problem)


@provider(
    "norm",
    name="cuTile",
    objections=cutile_objections,
    default=False,
    package="cuda-tile",
    code=["kernels/cutile_kernel.py"],
)
def cutile(problem: Problem, inputs: Inputs) -> Run:
    import cuda.tile as ct

    from .kernels.cutile_kernel import rms_norm, rms_norm_of_sum

    kernel = rms_norm_of_sum if problem.residual else rms_norm
    grid, block = (problem.rows, 1, 1), block_of(problem.width)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        ct.launch(torch.cuda.current_stream(), grid, kernel, (*tensors_of(layer), EPS, block))
        return layer.out

    return run
