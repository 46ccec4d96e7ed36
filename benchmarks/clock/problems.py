# SPDX-License-Identifier: Apache-2.0
"""The rows' problems on the emulated chip: configurations that dispatch chooses for it, and tensors of zeros.

Logits are normal, and so is what attention in 8 bits has: how often it rescales its output depends on scores.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from dsl_backend.attention.dispatch import FP8_PRODUCTS
from dsl_backend.attention.spec import AttentionSpec, Causality
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from emulator.clock.constants import ChipClock

from ..attention import problems, rows
from ..case import Case
from . import peers
from .peers import ATTENTION, DECODE, GEMM, MLA, PAGE, Run, sizes

CPU = torch.device("cpu")


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


def target_of(chip: ChipClock) -> Target:
    return replace(from_arch(f"{chip.arch}a"), sm_count=chip.sms)


def only(cases: Any, row: str) -> Any:
    """The problem of a row.

    Raises:
        KeyError: there is no such row.
    """
    by_name: dict[str, Case[Any]] = {case.id: case for case in cases}
    return by_name[row].problem


def softmax(row: str, target: Target) -> Run:
    from dsl_backend.softmax.cute import host
    from dsl_backend.softmax.spec import SoftmaxSpec
    from dsl_backend.softmax.tuned import config_of

    rows, width = map(int, row.split("x"))
    spec = SoftmaxSpec(width=width, dtype=torch.bfloat16, out_dtype=torch.bfloat16, vector=8)
    x, out = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(rows, width, dtype=torch.bfloat16)
    return lambda: host.build(host.key_of(spec, config_of(spec, target)), target)(x, out)


def linear(row: str, target: Target) -> Run:
    from ..linear.rows import cases

    return product(only(cases(), row), target)


def gemm(row: str, target: Target) -> Run:
    """The product of a row of quack's."""
    from ..linear.problems import Problem

    one = sizes(GEMM, row)
    return product(Problem(m=one["m"], n=one["n"], k=one["k"], gated=False), target)


def gated(row: str, target: Target) -> Run:
    """The gate and up projections of a row of quack's."""
    from ..linear.problems import Problem

    one = sizes(GEMM, row)
    return product(Problem(m=one["m"], n=one["n"], k=one["k"]), target)


def product(problem: Any, target: Target, config: Any = None) -> Run:
    """A layer's product, by default with the configuration that dispatch chooses."""
    from dsl_backend.gemm import host
    from dsl_backend.gemm.args import GemmOperands
    from dsl_backend.gemm.cost import max_ctas
    from dsl_backend.linear.tuned import config_of

    spec = problem.spec
    config = config_of(spec, problem.m, target) if config is None else config
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


def sampling(row: str, target: Target) -> Run:
    """The sampler of a row. A row of zeros would take other paths than logits do."""
    from dsl_backend.sampling.plan import SamplingPlan

    from ..sampling import problems as logits_of
    from ..sampling.rows import cases

    problem = only(cases(), row)
    (layer,) = logits_of.build(problem, 1, CPU, 0).layers

    def run() -> None:
        plan = SamplingPlan(problem.spec, target, problem.rows, CPU, "cute")
        plan.kernel.launch(layer.logits, layer.parameters, plan.results)

    return run


def attention(cases: Callable[[], Any], row: str, target: Target) -> Run:
    problem = only(cases(), row)
    return attended(problem, problem.spec, target)


def flash(row: str, target: Target) -> Run:
    """The attention of a row of FlashAttention's: keys and values are packed."""
    problem, spec = packed(row, torch.bfloat16)
    return attended(problem, spec, target)


def flash_fp8(row: str, target: Target) -> Run:
    """The same with queries, keys and values in e4m3 and products in 8 bits."""
    problem, spec = packed(row, torch.float8_e4m3fn)
    return attended(problem, replace(spec, q_dtype=torch.float8_e4m3fn), target, FP8_PRODUCTS, normal=True)


def packed(row: str, kv_dtype: torch.dtype) -> tuple[problems.Problem, AttentionSpec]:
    """The problem of a row of FlashAttention's and its attention."""
    one = sizes(ATTENTION, row)
    lengths = (one["length"],) * one["batch"]
    problem = problems.Problem(
        heads_q=one["heads"],
        heads_kv=one["heads_kv"],
        head_dim=one["dim"],
        head_dim_v=one["dim_v"],
        q_lens=lengths,
        kv_lens=lengths,
        page_size=None,
        scale=one["dim"] ** -0.5,
        kv_dtype=kv_dtype,
    )
    causality = Causality.CAUSAL if one["causal"] else Causality.FULL
    return problem, replace(problem.spec, causality=causality)


def flash_decode(row: str, target: Target) -> Run:
    """The decode of a row of FlashAttention's, with its pages."""
    one = sizes(DECODE, row)
    queries, lengths = [one["queries"]] * one["batch"], [one["length"]] * one["batch"]
    heads = one["dim"], one["heads"], one["heads_kv"]
    problem = problems.dense(*heads, queries, lengths, page_size=one["page"])
    return attended(problem, problem.spec, target)


def flash_mla(row: str, target: Target) -> Run:
    """The latent attention of a row of FlashAttention's, in pages."""
    one = sizes(MLA, row)
    lengths = [one["length"]] * one["batch"]
    problem = problems.latent(one["heads"], [1] * one["batch"], lengths, page_size=PAGE)
    return attended(problem, problem.spec, target)


def mla_fp8(row: str, target: Target) -> Run:
    """The same over an e4m3 cache, with products in 8 bits; queries and outputs are bfloat16."""
    one = sizes(MLA, row)
    lengths = [one["length"]] * one["batch"]
    problem = problems.latent(one["heads"], [1] * one["batch"], lengths, page_size=128, kv_dtype=torch.float8_e4m3fn)
    return attended(problem, problem.spec, target, FP8_PRODUCTS)


def attended(problem: Any, spec: AttentionSpec, target: Target, kernel: str = "cute", *, normal: bool = False) -> Run:
    """
    Args:
        normal: tensors are normal, not zeros.
    """
    from dsl_backend.attention import api
    from dsl_backend.attention.plan import Planner

    from ..attention import inputs

    given = inputs.build(problem, int(normal), CPU)
    if normal:
        (layer,) = given.layers
        q, keys, values, out = layer.q.to(spec.query_dtype), layer.keys, layer.values, layer.out
    else:
        q, cache, out = (
            torch.zeros(shape, dtype=dtype)
            for shape, dtype in (
                ((problem.tokens, problem.heads_q, problem.head_dim), problem.dtype),
                (inputs.cache_shape(problem, pages(given.batch.block_table)), problem.kv_dtype),
                ((problem.tokens, problem.heads_q, problem.head_dim_v), problem.dtype),
            )
        )
        keys, values = inputs.split(problem, cache)
    scale = torch.ones(1) if spec.is_fp8_kv else None

    def run() -> None:
        plan = Planner(spec, target, Zeroed(CPU), kernel).plan(given.batch)
        api.run(plan, q, keys, values, out=out, q_scale=scale if spec.is_fp8_q else None, k_scale=scale, v_scale=scale)

    return run


def pages(table: torch.Tensor | None) -> int:
    """Of a cache that a block table reaches; 0 without one."""
    return 0 if table is None else int(table.max()) + 1


OURS: Mapping[str, Callable[[str, Target], Run]] = MappingProxyType(
    {
        "softmax": softmax,
        "linear": linear,
        "sampling": sampling,
        "decode": partial(attention, rows.decode_cases),
        "prefill": partial(attention, rows.prefill_cases),
        "mla-decode": partial(attention, rows.latent_cases),
        "mla-prefill": partial(attention, rows.packed_cases),
    }
)
# This package's kernels for the shapes of others' rows.
BESIDE: Mapping[str, Callable[[str, Target], Run]] = MappingProxyType(
    {
        "flash": flash,
        "flash-fp8": flash_fp8,
        "flash-decode": flash_decode,
        "flash-mla": flash_mla,
        "cutlass-mla-fp8": mla_fp8,
        "quack-gemm": gemm,
        "quack-gated": gated,
    }
)


def run_of(operator: str, row: str, chip: ChipClock, *, ours: bool) -> Run:
    """What launches a row's kernels on the active emulated device.

    Args:
        ours: this package's kernels, for a row of others as well.
    """
    if not ours:
        return peers.RUNS[operator](row)
    return {**OURS, **BESIDE}[operator](row, target_of(chip))
