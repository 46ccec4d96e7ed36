# SPDX-License-Identifier: Apache-2.0
"""Whether the kernels that sum over k whole give a row the same bits, whatever their tiles are.

Where they do, batch invariance could choose among them by the number of rows.
"""

import pytest
import torch

from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.configs import fitting
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import Workspace


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, Swiglu()], ids=["plain", "gated"])
@pytest.mark.parametrize("k", [256, 4096])
def test_whole_sums(activation: Swiglu | None, k: int) -> None:
    target = targets.detect(torch.device("cuda"))
    if target.arch_objections("sm90"):
        pytest.skip("SM90's kernels alone were compared")
    # Imports CuTe DSL.
    from dsl_backend.gemm import host

    spec = LinearSpec(n=512, k=k, dtypes=Dtypes.of(torch.bfloat16), activation=activation)
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
