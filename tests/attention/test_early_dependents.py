# SPDX-License-Identifier: Apache-2.0
"""A combine kernel that lets the next kernel start before it ends."""

from dataclasses import replace

import pytest

import emulator
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import SplitKV
from dsl_backend.attention.protocol import Operands
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case
from tests.attention.emulated import scratch

TILE = 16  # keys
USUAL = DenseConfig(groups=1, tile_n=TILE, stages=2, min_split_tiles=1)
EARLY = replace(USUAL, early_dependents=True)


@pytest.mark.rest
def test_layers_overlap() -> None:
    """Layers of a captured step share scratch, and each starts before the one in front of it has ended."""
    problem, memory = Case(q_lens=(1,), kv_lens=(12 * TILE,), heads=(2, 1), dim=16).problem(), scratch()
    kernel = SplitKV(problem.spec, replace(from_arch("sm_90a"), sm_count=3), memory, EARLY)
    bound, results = kernel.bind(problem.batch, 0, 1), [check.empty_result(problem) for _ in range(3)]
    with emulator.device(arch="sm_90a", sms=3, schedule="lazy", strict=True) as device, device.capture():
        for one in results:
            bound(Operands(problem.q, None, problem.keys, problem.values, one.out, one.lse, *[None] * 4))
    for one in results:
        check.judge(one, problem.expected(), problem.score_magnitude())


def test_batch_invariant_layers_are_refused() -> None:
    spec = replace(Case(q_lens=(1,), kv_lens=(1,)).spec, batch_invariant=True)
    assert any(reason.startswith("early_dependents") for reason in EARLY.objections(spec, 1 << 18))
    assert not any(reason.startswith("early_dependents") for reason in USUAL.objections(spec, 1 << 18))
