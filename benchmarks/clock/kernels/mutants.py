# SPDX-License-Identifier: Apache-2.0
"""Kernels of SM90 with a change that costs time, and the same kernels without it.

The clock times them (tests/emulator/clock/test_kernels.py), and so does a GPU (`on_chip.py --mutants`). Rows run on
torch's default device: a GPU, or a CPU with the emulator. Nothing of a changed kernel is kept on disk, where it would
have the name of the unchanged one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill
from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm90.fp8_kernel import Fp8Key
from dsl_backend.attention.protocol import Operands
from dsl_backend.gemm import host
from dsl_backend.gemm.args import GemmOperands, launch_args
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M, GemmConfig
from dsl_backend.gemm.sm90.gemm import Gemm
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case

from ..peers import Run, given

ARCH, SMS = "sm_90a", 132
GOOD = GemmConfig(tile_m=128, box_n=64, stages=4)
# A tile for each SM.
ROWS, COLUMNS = 128 * 11, 128 * 12
# k, for a time that is of operands or of outputs.
DEEP, SHALLOW = 2048, 128
OVERLAPPING = DenseConfig(groups=2, tile_n=128, stages=2)
# A tile of queries with 8 tiles of keys, for one SM; and a batch of prompts for all.
ONE_TILE = Case(q_lens=(128,), kv_lens=(1024,), heads=(1, 1), dim=128, page=64)
PROMPTS = Case(q_lens=(1024,) * 16, kv_lens=(1024,) * 16, heads=(32, 8), dim=128, page=64)


@dataclass(frozen=True)
class Mutant:
    """A row that a change makes slower.

    Attributes:
        row: with the change.
        usual: the row without it.
        change: what it is.
    """

    row: str
    usual: str
    change: str


MUTANTS = (
    Mutant("stages-3", "stages-4", "a stage of operands less"),
    Mutant("stages-2", "stages-4", "two stages of operands less"),
    Mutant("outputs-in-the-same-banks", "outputs", "outputs in shared memory without a swizzle"),
    Mutant("serialised-softmax", "softmax", "the softmax waits for the product of P and V, one tile of queries"),
    Mutant("serialised-softmax-16x1k", "softmax-16x1k", "the same, 16 prompts of 1024 tokens"),
)


class InTheSameBanks(Gemm):
    """Rows of outputs have 256 bytes in shared memory: what a warp stores at once lies in the same banks."""

    def sOut_layout(self) -> cute.ComposedLayout:
        columns = self.epi_tile[1]
        plain = cute.make_layout((MMA_M, columns, CONSUMERS), stride=(columns, 1, MMA_M * columns))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)


def compiled(kernel: Any, arguments: Sequence[Any], target: Target) -> Function:
    """A function that no cache knows."""
    function: Function = toolkit.compiled(kernel, arguments, target.arch, "")
    if not toolkit.keeps_files():
        return function
    toolkit.made_portable(function)
    return toolkit.loaded_from(toolkit.exported(function))


@cache
def product_of(kernel: Callable[[Any], Any], config: GemmConfig) -> Function:
    """For any k: a kernel is compiled for any sizes."""
    key = host.key_of(spec_of(config, DEEP), config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compiled(kernel(key), (*launch_args(host.fake_args(key)), stream), from_arch(ARCH))


def spec_of(config: GemmConfig, k: int) -> LinearSpec:
    spec = LinearSpec(n=COLUMNS, k=k, dtypes=Dtypes.of(torch.bfloat16))
    if reasons := config.objections(spec, from_arch(ARCH).smem_bytes):
        raise ValueError("; ".join(reasons))
    return spec


def product(config: GemmConfig, k: int, kernel: Callable[[Any], Any] = Gemm) -> Run:
    """A product with a tile for each SM."""
    spec_of(config, k)
    operands = GemmOperands(given(ROWS, k), given(COLUMNS, k), None, None, given(ROWS, COLUMNS))
    workspace = Workspace(torch.get_default_device())
    return lambda: host.run(product_of(kernel, config), config, operands, SMS, workspace)


def built(key: DenseKey | Fp8Key, target: Target) -> Function:
    return compiled(DenseForward(key), fake_args(key, fake_dense_tensors(key)), target)


def built_serialised(key: DenseKey | Fp8Key, target: Target) -> Function:
    """Where the usual kernel lets one group of products run on, this one waits for all."""
    wait = warpgroup.wait_group
    with patch.object(warpgroup, "wait_group", lambda _: wait(0)):
        return built(key, target)


class Overlapped(Prefill):
    """The softmax of a tile runs beside the product of P and V of the tile before."""

    build = staticmethod(built)


class Serialised(Prefill):
    """It waits for that too."""

    build = staticmethod(built_serialised)


def attention(case: Case, sms: int, kind: type[Prefill]) -> Run:
    """Prompts on so many SMs."""
    device, target = torch.get_default_device(), replace(from_arch(ARCH), sm_count=sms)
    if reasons := OVERLAPPING.objections(case.spec, target.smem_bytes):
        raise ValueError("; ".join(reasons))
    with torch.device("cpu"):  # what a problem makes without a device is the host's
        problem = case.problem(device)
        result = check.empty_result(problem)
    kernel = kind(problem.spec, target, Workspace(device), OVERLAPPING)
    operands = Operands(problem.q, None, problem.keys, problem.values, result.out, result.lse, *[None] * 4)
    launch = kernel.bind(problem.batch, 0, problem.batch.max_query_len)
    return lambda: launch(operands)


RUNS: Mapping[str, Any] = MappingProxyType(
    {
        **{f"stages-{stages}": (product, replace(GOOD, stages=stages), DEEP) for stages in (4, 3, 2)},
        "outputs": (product, GOOD, SHALLOW),
        "outputs-in-the-same-banks": (product, GOOD, SHALLOW, InTheSameBanks),
        "softmax": (attention, ONE_TILE, 1, Overlapped),
        "serialised-softmax": (attention, ONE_TILE, 1, Serialised),
        "softmax-16x1k": (attention, PROMPTS, SMS, Overlapped),
        "serialised-softmax-16x1k": (attention, PROMPTS, SMS, Serialised),
    }
)


def run_of(row: str) -> Run:
    """What launches a row; the first launch compiles.

    Raises:
        KeyError: there is no such row.
    """
    make, *arguments = RUNS[row]
    run: Run = make(*arguments)
    return run
