# SPDX-License-Identifier: Apache-2.0
"""What makes a kernel slower on a GPU makes it slower on the clock."""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

import torch
from gemm_cases import SMEM_BYTES, spec_of

import emulator
from dsl_backend.gemm import host
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.sm90.configs import GemmConfig
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.linear import LinearCase
from emulator.clock.machine import ClockMachine

GOOD = GemmConfig(tile_m=128, box_n=64, stages=4)


def microseconds(config):
    """A GEMM with a tile for each of the chip's SMs, 2048 columns deep."""
    case = LinearCase(rows=128 * 11, n=128 * 12, k=2048)
    spec = spec_of(case)
    assert config.objections(spec, SMEM_BYTES) == []
    x, weight, out = (
        torch.zeros(shape, dtype=case.dtype) for shape in ((case.rows, case.k), (case.n, case.k), (case.rows, case.n))
    )
    clock = ClockMachine("sm_90a", 132, samples=1)
    with emulator.device("sm_90a", sms=132, schedule="clock", machine=clock):
        function = host.build(host.key_of(spec, config), from_arch("sm_90a"))
        host.run(function, config, GemmOperands(x, weight, None, None, out), 132, Workspace(torch.device("cpu")))
    return sum(time.microseconds for time in clock.times)


@pytest.mark.rest
def test_fewer_stages_are_slower():
    times = {stages: microseconds(replace(GOOD, stages=stages)) for stages in (2, 3, 4)}
    assert times[2] > 1.1 * times[4]
    assert times[2] > times[3] >= times[4]
