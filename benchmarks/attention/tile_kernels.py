# SPDX-License-Identifier: Apache-2.0
"""Causal attention in other DSLs: short kernels, for the comparison of DSLs.

They serve what torch's attention serves: requests of one length without a context, whose keys are copied out of their
pages before the timing. Reference times, not replacements.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from dsl_backend.checks import short
from dsl_backend.providers import Run, provider

from ..columns import missing, missing_cutile, missing_tilelang
from ..fastest import fastest
from .cudnn_fp8 import side_by_side
from .inputs import Inputs
from .problems import Problem
from .torch_sdpa import torch_objections

# Tokens of a tile of queries, of which a request's tokens are a multiple: no kernel masks the end of a request.
QUERIES = 128
HEAD_DIMS = (64, 128)


def layout_objections(problem: Problem) -> list[str]:
    found = torch_objections(problem)
    if any(tokens % QUERIES for tokens in problem.q_lens):
        found.append(f"serves multiples of {QUERIES} tokens")
    if problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        found.append(f"serves heads of {' and '.join(map(str, HEAD_DIMS))}")
    return found


def operands_of(problem: Problem, inputs: Inputs) -> Sequence[tuple[torch.Tensor, ...]]:
    """Each layer's q, keys, values and output: contiguous [requests, tokens, heads, dim]."""
    rows = problem.requests, -1, problem.heads_q, problem.head_dim
    return [
        (
            layer.q.view(rows),
            *(side_by_side(problem, inputs, one).transpose(1, 2) for one in (layer.keys, layer.values)),
            layer.out.view(rows),
        )
        for layer in inputs.layers
    ]


def helion_objections(problem: Problem) -> list[str]:
    return missing("helion") + layout_objections(problem)


@provider(
    "prefill",
    name="Helion",
    objections=helion_objections,
    default=False,
    package="helion",
    code=["kernels/helion_kernel.py"],
)
def helion(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few configurations: the first launch times them."""
    from .kernels.helion_kernel import causal

    kernel, operands = causal(), operands_of(problem, inputs)

    def run(index: int) -> torch.Tensor:
        kernel(*operands[index], problem.scale)
        return inputs.layers[index].out

    return run


def tilelang_objections(problem: Problem) -> list[str]:
    return missing_tilelang() + layout_objections(problem)


@provider(
    "prefill",
    name="TileLang",
    objections=tilelang_objections,
    default=False,
    package="tilelang",
    code=["kernels/tilelang_kernel.py"],
)
def tilelang(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few tiles."""
    from .kernels import tilelang_kernel as kernel

    operands = operands_of(problem, inputs)
    sizes = problem.requests, problem.q_lens[0], problem.heads_q, problem.heads_kv, problem.head_dim, problem.scale
    compiled = cache(lambda tile: kernel.causal(*sizes, short(problem.dtype), tile))

    def bind(tile: kernel.Tile) -> Callable[[], object]:
        launch = compiled(tile)
        return lambda: launch(*operands[0])

    launch = compiled(fastest(kernel.TILES, bind))

    def run(index: int) -> torch.Tensor:
        launch(*operands[index])
        return inputs.layers[index].out

    return run


def cutile_objections(problem: Problem) -> list[str]:
    return missing_cutile() + layout_objections(problem)


@provider(
    "prefill",
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

    operands = operands_of(problem, inputs)
    numbers = problem.scale * kernels.LOG2_E, problem.heads_q // problem.heads_kv, problem.head_dim

    def bind(tile: kernels.Tile, layer: int) -> Callable[[], object]:
        grid = problem.q_lens[0] // tile.queries, problem.heads_q, problem.requests
        kernel, arguments = kernels.kernel(tile.warps), (*operands[layer], *numbers, tile.queries, tile.keys)
        return lambda: ct.launch(torch.cuda.current_stream(), grid, kernel, arguments)

    tile = fastest(kernels.TILES, lambda one: bind(one, 0))
    launches = [bind(tile, layer) for layer in range(len(operands))]

    def run(index: int) -> torch.Tensor:
        launches[index]()
        return inputs.layers[index].out

    return run
