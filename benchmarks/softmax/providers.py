# SPDX-License-Identifier: Apache-2.0
"""The providers of softmax: this package, quack, torch, and torch.compile."""

import importlib.util

import torch
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import api, dispatch
from dsl_backend.softmax.spec import SoftmaxSpec

from ..case import Launch, Limits
from ..check import BF16_LIMITS
from .problems import Inputs, Problem

# Two approximate instructions (2^-22 each) and a sum of a quarter million terms.
F32_LIMITS = Limits(total=1e-5, row=3e-5)


class Column:
    """The common part of all providers."""

    default = True

    def limits(self, problem: Problem) -> Limits:
        return F32_LIMITS if problem.out_dtype == torch.float32 else BF16_LIMITS


class Ours(Column):
    """`api.softmax`.

    Args:
        kernel: a name from the dispatch table; by default the kernel that dispatch chooses.
        name: the column's name.
    """

    def __init__(self, kernel: str | None = None, name: str | None = None) -> None:
        self.kernel = kernel
        self.name = name or ("dsl" if kernel is None else f"dsl:{kernel}")

    def objections(self, problem: Problem) -> list[str]:
        spec = SoftmaxSpec(width=problem.width, dtype=problem.dtype, out_dtype=problem.out_dtype, log=problem.log)
        try:
            dispatch.choose(spec, targets.detect(), self.kernel)
        except (InvalidInput, Unsupported) as error:
            return [" ".join(str(error).split())]
        return []

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            return api.softmax(layer.x, layer.out, log=problem.log, kernel=self.kernel)

        return Launch(run)


class Quack(Column):
    """quack's CuTe DSL kernel, called without its autograd wrapper and with a preallocated output."""

    name = "quack"

    def objections(self, problem: Problem) -> list[str]:
        reasons = [] if torch.cuda.is_available() else ["needs a CUDA device"]
        if importlib.util.find_spec("quack") is None:
            reasons.append("quack-kernels is not installed")
        if problem.log:
            reasons.append("has no log-softmax")
        return reasons

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        from quack.softmax import _softmax_fwd

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            _softmax_fwd(layer.x, layer.out)
            return layer.out

        return Launch(run)


class Torch(Column):
    """Eager torch."""

    name = "torch"

    def objections(self, problem: Problem) -> list[str]:
        return [] if problem.dtype == problem.out_dtype else ["supports only equal input and output dtypes"]

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        function = torch.log_softmax if problem.log else torch.softmax

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            function(layer.x, -1, out=layer.out)
            return layer.out

        return Launch(run)


class Compiled(Column):
    """The kernel that torch.compile makes for the exact shape."""

    name = "torch.compile"

    def objections(self, problem: Problem) -> list[str]:
        return [] if torch.cuda.is_available() else ["needs a CUDA device"]

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        function = torch.log_softmax if problem.log else torch.softmax
        # After a few shapes torch.compile silently falls back to eager mode.
        torch.compiler.reset()

        def softmax(x: torch.Tensor) -> torch.Tensor:
            return function(x, -1, dtype=torch.float32).to(problem.out_dtype)

        compiled = torch.compile(softmax, dynamic=False, mode="max-autotune-no-cudagraphs")
        return Launch(lambda index: compiled(inputs.layers[index].x))
