# SPDX-License-Identifier: Apache-2.0
"""The rows' problems on the emulated chip: configurations that dispatch chooses for it, and tensors of zeros."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace

from ..case import Case

ARCH, SMS = "sm_90a", 132
CPU = torch.device("cpu")
# Compiles and launches.
Run = Callable[[], None]


class Zeroed(Workspace):
    """Scratch that says that nothing was split: of CTAs that do not run there is nothing to be combined."""

    def partials(self, count: int) -> torch.Tensor:
        fresh = self._partials.numel() < count
        found = super().partials(count)
        return found.zero_() if fresh else found

    def integers(self, count: int) -> torch.Tensor:
        fresh = self._integers.numel() < count
        found = super().integers(count)
        return found.zero_() if fresh else found


def chip() -> Target:
    return replace(from_arch(ARCH), sm_count=SMS)


def only(cases: Any, row: str) -> Any:
    """The problem of a row.

    Raises:
        KeyError: there is no such row.
    """
    by_name: dict[str, Case[Any]] = {case.id: case for case in cases}
    return by_name[row].problem


def softmax(row: str) -> Run:
    from dsl_backend.softmax.cute import host
    from dsl_backend.softmax.spec import SoftmaxSpec

    rows, width = map(int, row.split("x"))
    spec = SoftmaxSpec(width=width, dtype=torch.bfloat16, out_dtype=torch.bfloat16, vector=8)
    x, out = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(rows, width, dtype=torch.bfloat16)
    return lambda: host.build(host.key_of(spec), chip())(x, out)


def linear(row: str) -> Run:
    from dsl_backend.gemm import host
    from dsl_backend.gemm.args import GemmOperands
    from dsl_backend.gemm.cost import max_ctas
    from dsl_backend.linear.tuned import config_of

    from ..linear.rows import cases

    problem, target = only(cases(), row), chip()
    spec = problem.spec
    config = config_of(spec, problem.m, target)
    x, weight, out = (
        torch.zeros(shape, dtype=problem.dtype)
        for shape in ((problem.m, problem.k), (spec.weight_rows, problem.k), (problem.m, problem.n))
    )
    operands = GemmOperands(x, weight, None, None, out)
    workspace = Workspace(CPU)

    def run() -> None:
        function = host.build(host.key_of(spec, config), target)
        host.run(function, config, operands, max_ctas(config, problem.m, target), workspace)

    return run


def attention(operator: str, row: str) -> Run:
    from dsl_backend.attention import api
    from dsl_backend.attention.plan import Planner

    from ..attention import inputs, rows

    makers = {
        "decode": rows.decode_cases,
        "prefill": rows.prefill_cases,
        "mla-decode": rows.latent_cases,
        "mla-prefill": rows.packed_cases,
    }
    problem = only(makers[operator](), row)
    given = inputs.build(problem, 0, CPU)
    q, cache, out = (
        torch.zeros(shape, dtype=dtype)
        for shape, dtype in (
            ((problem.tokens, problem.heads_q, problem.head_dim), problem.dtype),
            (inputs.cache_shape(problem, pages(given.batch.block_table)), problem.kv_dtype),
            ((problem.tokens, problem.heads_q, problem.head_dim_v), problem.dtype),
        )
    )
    keys, values = inputs.split(problem, cache)

    def run() -> None:
        plan = Planner(problem.spec, chip(), Zeroed(CPU), "cute").plan(given.batch)
        api.run(plan, q, keys, values, out=out)

    return run


def pages(table: torch.Tensor | None) -> int:
    """Of a cache that a block table reaches; 0 without one."""
    return 0 if table is None else int(table.max()) + 1


def run_of(operator: str, row: str) -> Run:
    """What launches a row's kernels on the active emulated device."""
    if operator == "softmax":
        return softmax(row)
    return linear(row) if operator == "linear" else attention(operator, row)
