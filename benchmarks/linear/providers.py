# SPDX-License-Identifier: Apache-2.0
"""The providers of a linear layer: this package, cuBLAS with an activation kernel, torch.compile, and quack."""

import importlib.util
from collections.abc import Callable

import torch
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear import api, dispatch
from dsl_backend.runtime import target as targets
from torch.nn import functional

from ..case import Launch, Limits
from ..check import BF16_LIMITS
from .problems import Inputs, Problem


class Column:
    """The common part of all providers."""

    default = True

    def limits(self, problem: Problem) -> Limits:
        return BF16_LIMITS


class Ours(Column):
    """`api.linear`.

    Args:
        kernel: a name from the dispatch table; by default the kernel that dispatch chooses.
        name: the column's name.
    """

    def __init__(self, kernel: str | None = None, name: str | None = None) -> None:
        self.kernel = kernel
        self.name = name or ("dsl" if kernel is None else f"dsl:{kernel}")

    def objections(self, problem: Problem) -> list[str]:
        try:
            dispatch.choose(problem.spec, targets.detect(), self.kernel)
        except (InvalidInput, Unsupported) as error:
            return [" ".join(str(error).split())]
        return []

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        activation = problem.spec.activation

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            return api.linear(layer.x, layer.weight, out=layer.out, activation=activation, kernel=self.kernel)

        return Launch(run)


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


class Cublas(Column):
    """The kernels that vLLM runs: cuBLAS through torch.mm, then `silu_and_mul`."""

    name = "cuBLAS + silu_and_mul"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        if not problem.gated:

            def plain(index: int) -> torch.Tensor:
                layer = inputs.layers[index]
                return torch.mm(layer.x, layer.weight.t(), out=layer.out)

            return Launch(plain)
        activate = silu_and_mul()
        both = inputs.layers[0].x.new_empty((problem.m, 2 * problem.n))

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            torch.mm(layer.x, layer.weight.t(), out=both)
            activate(layer.out, both)
            return layer.out

        return Launch(run)


class Quack(Column):
    """quack's GEMM. Its gated epilogue needs alternating gate and up rows: the weights are repacked before the timing.

    Args:
        tuned: use the best configuration of quack's autotuner, which compiles all of them; otherwise the default.
    """

    def __init__(self, tuned: bool = False) -> None:
        self.tuned = tuned
        self.name = "quack tuned" if tuned else "quack"
        self.default = not tuned

    def objections(self, problem: Problem) -> list[str]:
        reasons = [] if torch.cuda.is_available() else ["needs a CUDA device"]
        if importlib.util.find_spec("quack") is None:
            reasons.append("quack-kernels is not installed")
        return reasons

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        from quack import gemm_interface

        if not problem.gated:

            def plain(index: int) -> torch.Tensor:
                layer = inputs.layers[index]
                gemm_interface.gemm(layer.x, layer.weight.t(), out=layer.out, tuned=self.tuned)
                return layer.out

            return Launch(plain)
        turned = [torch.stack(layer.weight.chunk(2), 1).flatten(0, 1) for layer in inputs.layers]

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            gemm_interface.gemm_act(
                layer.x,
                turned[index].t(),
                activation="swiglu",
                postact_out=layer.out,
                store_preact=False,
                tuned=self.tuned,
            )
            return layer.out

        return Launch(run)


class Compiled(Column):
    """The code that torch.compile makes for the exact shape, with a matrix product from cuBLAS or a template."""

    name = "torch.compile"

    def objections(self, problem: Problem) -> list[str]:
        return [] if torch.cuda.is_available() else ["needs a CUDA device"]

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        # After a few shapes torch.compile silently falls back to eager mode.
        torch.compiler.reset()

        def layer_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            made = functional.linear(x, weight)
            if not problem.gated:
                return made
            gate, up = made.chunk(2, -1)
            return functional.silu(gate) * up

        compiled = torch.compile(layer_of, dynamic=False, mode="max-autotune-no-cudagraphs")
        return Launch(lambda index: compiled(inputs.layers[index].x, inputs.layers[index].weight))
