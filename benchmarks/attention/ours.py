# SPDX-License-Identifier: Apache-2.0
"""dsl_backend's own kernels as providers."""

import torch
from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import target as targets

from ..case import Launch, Limits
from ..check import BF16_LIMITS, EXACT
from .inputs import Inputs
from .problems import Problem, WriteProblem
from .writes import WriteInputs

NAME = "dsl"


def objections(operation: Operation, spec: AttentionSpec, kernel: str | None) -> list[str]:
    try:
        dispatch.choose(operation, spec, targets.detect(), kernel)
    except (InvalidInput, Unsupported) as error:
        return [" ".join(str(error).split())]
    return []


def column(kernel: str | None) -> str:
    return NAME if kernel is None else f"{NAME}:{kernel}"


class Attention:
    """`api.plan` once, `api.run` for each layer.

    Args:
        kernel: a name from the dispatch table; by default the kernel that dispatch chooses.
    """

    default = True

    def __init__(self, operation: Operation, kernel: str | None = None) -> None:
        self.operation, self.kernel, self.name = operation, kernel, column(kernel)

    def objections(self, problem: Problem) -> list[str]:
        return objections(self.operation, problem.spec, self.kernel)

    def limits(self, problem: Problem) -> Limits:
        return BF16_LIMITS

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        plan = api.plan(problem.spec, inputs.batch, kernel=self.kernel)
        scale = inputs.one if problem.is_fp8_kv else None

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            return api.run(plan, layer.q, layer.keys, layer.values, out=layer.out, k_scale=scale, v_scale=scale)

        return Launch(run)


class WriteKV:
    """`api.write_kv`."""

    default = True

    def __init__(self, kernel: str | None = None) -> None:
        self.kernel, self.name = kernel, column(kernel)

    def objections(self, problem: WriteProblem) -> list[str]:
        return objections(Operation.WRITE_KV, problem.spec, self.kernel)

    def limits(self, problem: WriteProblem) -> Limits:
        return EXACT

    def prepare(self, problem: WriteProblem, inputs: WriteInputs) -> Launch:
        spec, scale = problem.spec, inputs.one if problem.kv_dtype != problem.dtype else None

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            api.write_kv(
                spec,
                layer.key,
                layer.value,
                layer.key_cache,
                layer.value_cache,
                inputs.slots,
                k_scale=scale,
                v_scale=scale,
                kernel=self.kernel,
            )
            return layer.cache

        return Launch(run, inputs.written)
