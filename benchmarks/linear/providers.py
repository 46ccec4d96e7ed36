# SPDX-License-Identifier: Apache-2.0
"""The providers of a linear layer: this package, cuBLAS with an activation kernel, torch.compile, and quack."""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from dsl_backend.linear import api, dispatch
from dsl_backend.providers import Run, provider
from dsl_backend.runtime import target as targets
from torch.nn import functional

from ..columns import missing, needs_gpu, own_triton, reasons
from .problems import Inputs, Problem


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec, targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """`api.linear`, with a kernel from the dispatch table; by default the one that dispatch chooses."""
    activation = problem.spec.activation

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.linear(layer.x, layer.weight, out=layer.out, activation=activation, kernel=kernel)

    return run


def silu_and_mul() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function of (out [m, n], gate and up [m, 2 n]): vLLM's kernel, or torch.compile's without vLLM."""
    if importlib.util.find_spec("vllm") is not None and torch.cuda.is_available():
        import vllm._custom_ops  # noqa: F401 - registers torch.ops._C

        found: Callable[[torch.Tensor, torch.Tensor], None] = torch.ops._C.silu_and_mul
        return found

    def activate(out: torch.Tensor, both: torch.Tensor) -> None:
        gate, up = both.chunk(2, -1)
        out.copy_(functional.silu(gate.float()) * up.float())

    made: Callable[[torch.Tensor, torch.Tensor], None] = (
        torch.compile(activate, dynamic=False) if torch.cuda.is_available() else activate
    )
    return made


@provider("linear", name="cuBLAS + silu_and_mul", package="torch")
def cublas(problem: Problem, inputs: Inputs) -> Run:
    """The kernels that vLLM runs: cuBLAS through torch.mm, then `silu_and_mul`."""
    if not problem.gated:

        def plain(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            return torch.mm(layer.x, layer.weight.t(), out=layer.out)

        return plain
    activate = silu_and_mul()
    both = inputs.layers[0].x.new_empty((problem.m, 2 * problem.n))

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        torch.mm(layer.x, layer.weight.t(), out=both)
        activate(layer.out, both)
        return layer.out

    return run


def quack_objections(problem: Problem) -> list[str]:
    return missing("quack", "quack-kernels")


def quack(problem: Problem, inputs: Inputs, tuned: bool = False) -> Run:
    """Quack's GEMM. Its gated epilogue needs alternating gate and up rows: the weights are repacked before the timing.

    Args:
        tuned: use the best configuration of quack's autotuner, which compiles all of them; otherwise the default.
    """
    from quack import gemm_interface

    if not problem.gated:

        def plain(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            gemm_interface.gemm(layer.x, layer.weight.t(), out=layer.out, tuned=tuned)
            return layer.out

        return plain
    turned = [torch.stack(layer.weight.chunk(2), 1).flatten(0, 1) for layer in inputs.layers]

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        gemm_interface.gemm_act(
            layer.x,
            turned[index].t(),
            activation="swiglu",
            postact_out=layer.out,
            store_preact=False,
            tuned=tuned,
        )
        return layer.out

    return run


provider("linear", name="quack", objections=quack_objections, package="quack-kernels")(quack)
provider("linear", name="quack tuned", objections=quack_objections, default=False, package="quack-kernels")(
    partial(quack, tuned=True)
)


@provider("linear", name="torch.compile", objections=needs_gpu, package="torch")
def compiled(problem: Problem, inputs: Inputs) -> Run:
    """The code that torch.compile makes for the exact shape, with a matrix product from cuBLAS or a template."""
    # After a few shapes torch.compile silently falls back to eager mode.
    torch.compiler.reset()

    def layer_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = functional.linear(x, weight)
        if not problem.gated:
            return made
        gate, up = made.chunk(2, -1)
        return functional.silu(gate) * up

    made = torch.compile(layer_of, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda index: made(inputs.layers[index].x, inputs.layers[index].weight)


own_triton("linear", ours, objections, "linear/triton/gemm.py")
