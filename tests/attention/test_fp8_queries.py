# SPDX-License-Identifier: Apache-2.0
"""Queries that arrive in e4m3: what is refused, which kernels take them how, and mistakes in the kernels' source.

That results are right is tested with the other cases, whose ids begin with `fp8-queries`.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.plan import Planner
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import Case, by_id, mla
from dsl_backend.testing.check import check_case

CASE = by_id("fp8-queries")


def run(case: Case = CASE, **changed: Any) -> torch.Tensor:
    problem = case.problem()
    plan = api.plan(problem.spec, problem.batch, kernel="reference")
    given = {"q": problem.q} | problem.extras | changed
    return api.run(plan, given.pop("q"), problem.keys, problem.values, **given)


@pytest.mark.parametrize("name", ["fp8-queries", "fp8-queries-by-request", "nvfp4-queries", "mla-fp8-queries"])
def test_the_reference(name: str) -> None:
    check_case(by_id(name), "reference", "cpu")


def test_outputs_have_16_bits() -> None:
    assert run().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_scale": None}, "fp8 queries need q_scale"),
        ({"q_scale": torch.ones(6)}, "q_scale is float32 (6,) on cpu: one float32, or [heads_kv = 3] of them, on cpu"),
        ({"q_scale": torch.ones(1).half()}, "q_scale is float16 (1,) on cpu: one float32"),
        ({"q": torch.zeros(26, 6, 64, dtype=torch.bfloat16)}, "q is bfloat16: float8_e4m3fn is needed"),
    ],
)
def test_other_tensors_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(**changed)


def test_a_scale_of_other_queries_is_refused() -> None:
    with pytest.raises(InvalidInput, match="q_scale was given, and queries are bfloat16"):
        run(by_id("fp8-bf16"), q_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"q_dtype": torch.float8_e5m2}, "q_dtype is float8_e5m2 with keys of float8_e4m3fn: None, or float8_e4m3fn"),
        ({"kv_dtype": torch.bfloat16}, "q_dtype is float8_e4m3fn with keys of bfloat16: None, or float8_e4m3fn with"),
        ({"q_dtype": "e4m3"}, "q_dtype is 'e4m3'"),
    ],
)
def test_layers_that_have_none(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        replace(CASE.spec, **facts)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_latent_queries_of_8_bits_have_the_same_kernels(arch: str) -> None:
    spec = mla(16, fp8=True, fp8_q=True).spec
    for name in ("cute", dispatch.FP8_PRODUCTS):
        assert dispatch.choose(Operation.MLA_DECODE, spec, from_arch(arch), name).name == name


# Of SM90's kernel and of SM100's: (id, class, what its source says once, what it would say).
MISTAKES = (
    (
        "sm_90a",
        "rows of the other half",
        "sm90.fp8_mma.QuantizedQueryMmaConsumer",
        "i % 2 * 2 + row] = cute.recast",
        "i % 2 * 2 + 1 - row] = cute.recast",
    ),
    (
        "sm_90a",
        "columns of the neighbour",
        "sm90.fp8_mma.QuantizedQueryMmaConsumer",
        "self.column // 2 + 4 * i))\n                cute.autovec_copy(cute.group_modes(block, 0, 2), quad)",
        "(self.column // 2 + 1) % 4 + 4 * i))\n                cute.autovec_copy(cute.group_modes(block, 0, 2), quad)",
    ),
    (
        "sm_90a",
        "a scale left out",
        "score_mod.SoftmaxScale",
        "for other in (self.scoring.k_scale, self.scoring.q_scale):",
        "for other in (self.scoring.k_scale,):",
    ),
    (
        "sm_100a",
        "a scale left out on SM100",
        "score_mod.SoftmaxScale",
        "for other in (self.scoring.k_scale, self.scoring.q_scale):",
        "for other in (self.scoring.k_scale,):",
    ),
    (
        "sm_100a",
        "boxes of Q as if of 16 bits",
        "fp8_smem.Fp8Tiles",
        "return 1 if self.key.fp8_q else super().q_itemsize",
        "return 2",
    ),
)
SMALL = Case(
    q_lens=(40, 3), kv_lens=(133, 90), heads=(2, 1), dim=64, page=32, fp8=True, fp8_q=True, scales_by_request=True
)


def emulate(arch: str, index: int = 1, fresh: bool = False) -> None:
    """A small case on one of the schedules.

    Args:
        fresh: compile its kernel anew, since cached ones were compiled from other source.
    """
    import emulator
    from dsl_backend.testing import check, fp8_attention
    from tests.attention import test_sm90_fp8, test_sm100_fp8
    from tests.attention.emulated import SCHEDULES, compiled_anew, scratch

    if arch == "sm_90a":
        from dsl_backend.attention.cute.sm90.dense_host import Fp8Prefill
        from dsl_backend.attention.cute.sm90.fp8_configs import Fp8Config
        from dsl_backend.attention.cute.sm90.fp8_kernel import Fp8Forward

        config: Any = Fp8Config(groups=1, tile_n=64, stages=2, accumulate_period=2)
        forward, arithmetic = Fp8Forward, test_sm90_fp8.arithmetic_of(config)
    else:
        from dsl_backend.attention.cute.sm100.dense_host import Fp8Prefill
        from dsl_backend.attention.cute.sm100.fp8_configs import Fp8DenseConfig
        from dsl_backend.attention.cute.sm100.fp8_kernel import Fp8DenseForward

        config = Fp8DenseConfig(tile_n=64, stages=2, query_stages=1, late_p_keys=32, ex2_emulation=0)
        forward, arithmetic = Fp8DenseForward, test_sm100_fp8.arithmetic_of(config)

    fresh_class = compiled_anew(Fp8Prefill, forward)

    def adjust(planner: Planner) -> None:
        kernel = (fresh_class if fresh else Fp8Prefill)(planner.spec, planner.target, scratch(), config)
        planner.short = planner.long = (*planner.long[:2], kernel)

    problem, target = SMALL.problem(), replace(from_arch(arch), sm_count=1)
    with emulator.device(arch=arch, sms=1, schedule=SCHEDULES[index], seed=index, strict=True):
        result = check.run(problem, dispatch.FP8_PRODUCTS, adjust=adjust, target=target)
    fp8_attention.judge(result, problem, arithmetic)


@pytest.mark.rest
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_schedule(arch: str, index: int) -> None:
    pytest.importorskip("cutlass")
    emulate(arch, index)


@pytest.mark.rest
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_mistakes_are_found(mistake: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    import importlib

    from emulator.errors import EmulatorError
    from tests.mistakes import Mistake, spoil_methods, spoilt

    arch, name, where, said, wrong = mistake
    module, _, right = f"dsl_backend.attention.cute.{where}".rpartition(".")
    spoiled = getattr(importlib.import_module(module), right)
    spoil_methods(spoiled, spoilt(Mistake(name, sys.modules[module], said, wrong), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        emulate(arch, fresh=True)
