# SPDX-License-Identifier: Apache-2.0
"""Batch invariance: a row's bits depend neither on the other rows nor on which kernel serves, if sums over k are whole.

Where they do not depend on the kernel, one could be chosen by the number of rows.
"""

from dataclasses import replace

import pytest
import torch
from gemm_cases import SMALL, SWAP_AB, SWIGLU, TALL

import emulator
from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.configs import Config, fitting
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import Workspace


class Recorder:
    """A machine that runs nothing."""

    def __init__(self) -> None:
        self.launches: list[emulator.Launch] = []

    def launch(self, launch: emulator.Launch) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("activation", [SWIGLU, Geglu(tanh=True)], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("config", [SMALL, TALL, SWAP_AB], ids=["gemm", "pingpong", "swap-ab"])
def test_no_reciprocal_is_shared(config: Config, activation: Activation) -> None:
    """A thread's four values belong to rows that are eight apart, or neighbours. That they share a reciprocal, which is
    faster, once made 22 of 9104 tokens of a served model depend on the chunks of their prompt.
    """
    # Imports CuTe DSL.
    from dsl_backend.gemm import host

    spec = LinearSpec(n=64, k=64, dtypes=Dtypes.of(torch.bfloat16), activation=activation)

    def values_of_a_reciprocal(batch_invariant: bool) -> float:
        machine, (x, weight, out) = Recorder(), (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (64, 128, 64))
        with emulator.device(arch="sm_90a", sms=4, machine=machine):
            function = host.build(
                host.key_of(replace(spec, batch_invariant=batch_invariant), config), targets.from_arch("sm_90a")
            )
            host.run(function, config, GemmOperands(x, weight, None, None, out), 4, Workspace(x.device))
        (launch,) = machine.launches
        return launch.ptx.count("ex2.approx") / launch.ptx.count("rcp.approx")

    assert values_of_a_reciprocal(batch_invariant=False) == 4
    assert values_of_a_reciprocal(batch_invariant=True) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, Swiglu()], ids=["plain", "gated"])
@pytest.mark.parametrize("k", [256, 4096])
def test_whole_sums(activation: Swiglu | None, k: int) -> None:
    target = targets.detect(torch.device("cuda"))
    if target.arch_objections("sm90"):
        pytest.skip("SM90's kernels alone were compared")
    # Imports CuTe DSL.
    from dsl_backend.gemm import host

    spec = LinearSpec(n=512, k=k, dtypes=Dtypes.of(torch.bfloat16), activation=activation, batch_invariant=True)
    generator = torch.Generator("cuda").manual_seed(1)
    x, weight = (
        torch.randn(rows, k, generator=generator, device="cuda").to(torch.bfloat16) for rows in (300, spec.weight_rows)
    )
    workspace, others = Workspace(x.device), []
    first: torch.Tensor | None = None
    for config in fitting(spec, target, gemms_alone=True):
        function = host.build(host.key_of(spec, config), target)
        for rows in (300, 70, 3):
            out = torch.full((rows, spec.n), float("nan"), dtype=torch.bfloat16, device="cuda")
            operands = GemmOperands(x[:rows], weight, None, None, out)
            host.run(function, config, operands, max_ctas(config, rows, target), workspace)
            first = out if first is None else first
            if not torch.equal(out, first[:rows]):
                others.append((rows, config, (out != first[:rows]).sum().item()))
    assert not others
