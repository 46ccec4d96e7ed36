# SPDX-License-Identifier: Apache-2.0
"""A combine kernel that lets the next kernel start before it ends."""

from dataclasses import replace
from typing import Any

import pytest

import emulator
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import SplitKV
from dsl_backend.attention.cute.sm90.mla_configs import MlaConfig
from dsl_backend.attention.cute.sm90.mla_fp8_configs import default_fp8_mla_config
from dsl_backend.attention.cute.sm90.mla_host import MlaSplitKV
from dsl_backend.attention.cute.sm100 import dense_configs as sm100_dense
from dsl_backend.attention.cute.sm100 import dense_host as sm100_host
from dsl_backend.attention.cute.sm100 import mla_configs as sm100_mla
from dsl_backend.attention.cute.sm100 import mla_host as sm100_mla_host
from dsl_backend.attention.protocol import Operands
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case, mla
from tests.attention.emulated import scratch

TILE = 16  # keys
SM100 = sm100_dense.DenseConfig(alternate=True, tile_n=32, query_stages=2, min_split_tiles=1)
USUAL = DenseConfig(groups=1, tile_n=TILE, stages=2, min_split_tiles=1)
EARLY = replace(USUAL, early_dependents=True)


MLA = MlaConfig(tile_n=32, stages=3, min_split_tiles=1, early_dependents=True)
DENSE_CASE = Case(q_lens=(1,), kv_lens=(12 * TILE,), heads=(2, 1), dim=16)
MLA_CASE = mla(16, q_lens=(1,), kv_lens=(160,), page=16)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("arch", "case", "kernel_type", "config"),
    [
        ("sm_90a", DENSE_CASE, SplitKV, EARLY),
        ("sm_90a", MLA_CASE, MlaSplitKV, MLA),
        ("sm_100a", replace(DENSE_CASE, dim=64), sm100_host.SplitKV, SM100),
        ("sm_100a", MLA_CASE, sm100_mla_host.MlaSplitKV, sm100_mla.MlaConfig(tile_n=32, stages=3, min_split_tiles=1)),
    ],
    ids=["dense", "mla", "dense-sm100", "mla-sm100"],
)
def test_layers_overlap(arch: str, case: Case, kernel_type: Any, config: Any) -> None:
    """Layers of a captured step share scratch, and each starts before the one in front of it has ended."""
    problem, memory = case.problem(), scratch()
    kernel = kernel_type(problem.spec, replace(from_arch(arch), sm_count=3), memory, config)
    bound, results = kernel.bind(problem.batch, 0, 1), [check.empty_result(problem) for _ in range(3)]
    with emulator.device(arch=arch, sms=3, schedule="lazy", strict=True) as device, device.capture():
        for one in results:
            bound(Operands(problem.q, None, problem.keys, problem.values, one.out, one.lse, *[None] * 4))
    for one in results:
        check.judge(one, problem.expected(), problem.score_magnitude())


@pytest.mark.parametrize("config", [EARLY, MLA, replace(default_fp8_mla_config(MLA_CASE.spec), early_dependents=True)])
def test_batch_invariant_layers_are_refused(config: Any) -> None:
    case = DENSE_CASE if isinstance(config, DenseConfig) else MLA_CASE
    refused, usual = (
        [reason for reason in one.objections(spec, 1 << 18) if reason.startswith("early_dependents")]
        for one, spec in (
            (config, replace(case.spec, batch_invariant=True)),
            (replace(config, early_dependents=False), replace(case.spec, batch_invariant=True)),
        )
    )
    assert refused
    assert not usual
    assert not any(reason.startswith("early_dependents") for reason in config.objections(case.spec, 1 << 18))
