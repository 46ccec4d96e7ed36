# SPDX-License-Identifier: Apache-2.0
"""What makes a kernel slower on a GPU makes it slower on the clock."""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

import torch
from cutlass import cute
from gemm_cases import SMEM_BYTES, spec_of

import emulator
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.sm90 import dense_mma
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill
from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward
from dsl_backend.attention.protocol import Operands
from dsl_backend.gemm import host
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M, GemmConfig
from dsl_backend.gemm.sm90.gemm import Gemm
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case
from dsl_backend.testing.linear import LinearCase
from emulator.clock.machine import ClockMachine

ARCH, SMS, CPU = "sm_90a", 132, torch.device("cpu")
GOOD = GemmConfig(tile_m=128, box_n=64, stages=4)


def compiled_again(kernel, arguments, *, key, target):
    """Without the cache, whose kernels have other source."""
    return toolkit.compiled(kernel, arguments, target.arch, "")


def microseconds(config, k=2048):
    """A GEMM with a tile for each of the chip's SMs."""
    case = LinearCase(rows=128 * 11, n=128 * 12, k=k)
    spec = spec_of(case)
    assert config.objections(spec, SMEM_BYTES) == []
    x, weight, out = (
        torch.zeros(shape, dtype=case.dtype) for shape in ((case.rows, case.k), (case.n, case.k), (case.rows, case.n))
    )
    clock = ClockMachine(ARCH, SMS, samples=1)
    with emulator.device(ARCH, sms=SMS, schedule="clock", machine=clock):
        function = host.build(host.key_of(spec, config), from_arch(ARCH))
        host.run(function, config, GemmOperands(x, weight, None, None, out), SMS, Workspace(CPU))
    return sum(time.microseconds for time in clock.times)


@pytest.mark.rest
def test_fewer_stages_are_slower():
    times = {stages: microseconds(replace(GOOD, stages=stages)) for stages in (2, 3, 4)}
    assert times[2] > 1.1 * times[4]
    assert times[2] > times[3] >= times[4]


def without_a_swizzle(self):
    """Rows of 256 bytes: what a warp stores at once lies in the same banks."""
    columns = self.epi_tile[1]
    plain = cute.make_layout((MMA_M, columns, CONSUMERS), stride=(columns, 1, MMA_M * columns))
    return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)


@pytest.mark.rest
def test_outputs_in_the_same_banks_are_slower(monkeypatch):
    """A warp stores 8 x 8 elements at once: 8 rows that lie in the same 4 banks take 8 times as long."""
    monkeypatch.setattr(host, "compile_kernel", compiled_again)
    swizzled = microseconds(GOOD, k=128)
    monkeypatch.setattr(Gemm, "sOut_layout", without_a_swizzle)
    conflicting = microseconds(GOOD, k=128)
    # A consumer's 64 x 128 outputs are 16 KB: 128 wavefronts of a stmatrix's, or 1024. Both have theirs at once.
    more = 2 * (1024 - 128) / 1755
    assert 0.5 * more < conflicting - swizzled < 1.5 * more


def prefill():
    """A class of its own for each call: compiled functions are kept by it."""

    class Fresh(Prefill):
        @staticmethod
        def build(key, target):
            return toolkit.compiled(DenseForward(key), fake_args(key, fake_dense_tensors(key)), target.arch, "")

    return Fresh


def attention_us(config):
    """A tile of queries with 8 tiles of keys, on one SM."""
    problem = Case(q_lens=(128,), kv_lens=(1024,), heads=(1, 1), dim=128, page=64).problem()
    target = replace(from_arch(ARCH), sm_count=1)
    assert not config.objections(problem.spec, target.smem_bytes)
    clock = ClockMachine(ARCH, 1)
    with emulator.device(ARCH, sms=1, schedule="clock", machine=clock):
        kernel = prefill()(problem.spec, target, Workspace(CPU), config)
        result = check.empty_result(problem)
        operands = Operands(problem.q, None, problem.keys, problem.values, result.out, result.lse, *[None] * 4)
        kernel.bind(problem.batch, 0, problem.batch.max_query_len)(operands)
    return sum(time.microseconds for time in clock.times)


@pytest.mark.rest
def test_a_softmax_behind_all_products_is_slower(monkeypatch):
    """The softmax of a tile runs beside the product of P and V of the tile before, unless it waits for that too."""
    config = DenseConfig(groups=2, tile_n=128, stages=2)
    overlapped = attention_us(config)
    wait = dense_mma.warpgroup.wait_group
    monkeypatch.setattr(dense_mma.warpgroup, "wait_group", lambda _: wait(0))
    serialised = attention_us(config)
    # Each of 7 tiles waits for 64 x 128 x 128 more of two groups: 512 cycles each, of which softmax hides some.
    assert 7 * 256 / 1755 < serialised - overlapped < 7 * 1500 / 1755
