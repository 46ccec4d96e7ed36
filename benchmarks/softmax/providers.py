# SPDX-License-Identifier: Apache-2.0
"""The providers of softmax: this package and its Triton kernel, quack, Liger, FlashInfer, torch, torch.compile."""

import torch
from dsl_backend.providers import Run, provider
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import api, dispatch
from dsl_backend.softmax.spec import SoftmaxSpec

from ..columns import missing, needs_gpu, own_triton, reasons
from .problems import Inputs, Problem


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    spec = SoftmaxSpec(width=problem.width, dtype=problem.dtype, out_dtype=problem.out_dtype, log=problem.log)
    return reasons(lambda: dispatch.choose(spec, targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """`api.softmax`, with a kernel from the dispatch table; by default the one that dispatch chooses."""

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.softmax(layer.x, layer.out, log=problem.log, kernel=kernel)

    return run


def quack_objections(problem: Problem) -> list[str]:
    return missing("quack", "quack-kernels") + (["has no log-softmax"] if problem.log else [])


@provider("softmax", name="quack", objections=quack_objections, package="quack-kernels")
def quack(problem: Problem, inputs: Inputs) -> Run:
    """Quack's CuTe DSL kernel, called without its autograd wrapper and with a preallocated output."""
    from quack.softmax import _softmax_fwd

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        _softmax_fwd(layer.x, layer.out)
        return layer.out

    return run


def equal_dtypes(problem: Problem) -> list[str]:
    return [] if problem.dtype == problem.out_dtype else ["supports only equal input and output dtypes"]


@provider("softmax", name="torch", objections=equal_dtypes, package="torch")
def eager(problem: Problem, inputs: Inputs) -> Run:
    """Eager torch."""
    function = torch.log_softmax if problem.log else torch.softmax

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        function(layer.x, -1, out=layer.out)
        return layer.out

    return run


@provider("softmax", name="torch.compile", objections=needs_gpu, package="torch")
def compiled(problem: Problem, inputs: Inputs) -> Run:
    """The kernel that torch.compile makes for the exact shape."""
    function = torch.log_softmax if problem.log else torch.softmax
    # After a few shapes torch.compile silently falls back to eager mode.
    torch.compiler.reset()

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return function(x, -1, dtype=torch.float32).to(problem.out_dtype)

    made = torch.compile(softmax, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda index: made(inputs.layers[index].x)


def liger_objections(problem: Problem) -> list[str]:
    found = missing("liger_kernel", "liger-kernel") + (["has no log-softmax"] if problem.log else [])
    return found + equal_dtypes(problem)


@provider("softmax", name="Liger", objections=liger_objections, package="liger-kernel")
def liger(problem: Problem, inputs: Inputs) -> Run:
    """Liger's Triton kernel, without its autograd function; it allocates the output."""
    from liger_kernel.ops.softmax import _softmax_forward

    def run(index: int) -> torch.Tensor:
        made: torch.Tensor = _softmax_forward(inputs.layers[index].x)[0]
        return made

    return run


def flashinfer_objections(problem: Problem) -> list[str]:
    return missing("flashinfer", "flashinfer-python") + (["has no log-softmax"] if problem.log else [])


@provider("softmax", name="FlashInfer", objections=flashinfer_objections, default=False, package="flashinfer-python")
def flashinfer(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's softmax of a sampler. It works in float32: other inputs are converted, and its result is float32.

    At first use it may compile kernels for minutes, so it runs only if named.
    """
    from flashinfer import sampling

    def run(index: int) -> torch.Tensor:
        made: torch.Tensor = sampling.softmax(inputs.layers[index].x)
        return made

    return run


own_triton("softmax", ours, objections, "softmax/triton/kernel.py")
