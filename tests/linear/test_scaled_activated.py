# SPDX-License-Identifier: Apache-2.0
"""An activation and the next quantisation behind somebody else's product, against float64."""

from typing import Any

import pytest
import torch

from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.gemm.reference import activate, halves
from dsl_backend.linear.scaled.activated import activated
from dsl_backend.linear.scaled.eager import How, is_column_major
from dsl_backend.quant.format import GROUP_SCALED, GROUP_SCALED_E8M0, ROW_SCALED, TENSOR_SCALED, ScaledFormat
from dsl_backend.quant.reference import Quantized, dequantized, scales_of
from dsl_backend.runtime import target as targets

ON_GPU = torch.cuda.is_available()
KINDS = (None, TENSOR_SCALED, ROW_SCALED, GROUP_SCALED, GROUP_SCALED_E8M0)
KERNELS = (
    pytest.param("torch", marks=pytest.mark.skipif(ON_GPU, reason="is for CPUs")),
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(
            not (ON_GPU or targets.triton_interpreted()), reason="no CUDA device, and TRITON_INTERPRET is off"
        ),
    ),
)


@pytest.fixture(params=KERNELS)
def kernel(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(targets, "triton_interpreted", lambda: False)
    return str(request.param)


def both_of(rows: int, n: int, device: torch.device) -> torch.Tensor:
    """Rows and groups of different magnitudes, so that a scale of another one is wrong."""
    both = torch.randn(rows, 2 * n, generator=torch.Generator().manual_seed(rows + n))
    both *= 2.0 ** (torch.arange(rows) % 5 - 2).unsqueeze(1) * 2.0 ** (torch.arange(2 * n) // 128 % 3 - 1)
    return both.to(torch.bfloat16).to(device)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "activation", "interleaved"),
    [
        (1, 16, Swiglu(), False),
        (5, 1408, Geglu(tanh=True), False),
        (3, 2064, SWIGLU_OAI, True),
        (2, 128, Geglu(), False),
    ],
    ids=str,
)
def test_results(
    kernel: str,
    rows: int,
    n: int,
    activation: Activation,
    interleaved: bool,
    kind: ScaledFormat | None,
    device: torch.device,
) -> None:
    both = both_of(rows, n, device)
    gate, up = halves(both.double().cpu().t(), interleaved)
    exact = activate(gate.t(), up.t(), activation)
    given = torch.full((1,), 0.05, device=device) if kind == TENSOR_SCALED else None
    out, scale = activated(both, How(torch.bfloat16, activation, interleaved, kind), given)
    if kind is None:
        assert (out.dtype, scale) == (torch.bfloat16, None)
        torch.testing.assert_close(out.cpu().double(), exact, rtol=2**-7, atol=1e-6)
        return
    assert scale is not None
    assert (out.dtype, scale.dtype) == (kind.values, kind.scales)
    if kind != TENSOR_SCALED:
        torch.testing.assert_close(scale.cpu().double(), scales_of(exact, kind), rtol=1e-5, atol=0)
        assert scale.shape == kind.scale_shape(rows, n)
        assert not kind.blocked or is_column_major(scale)
    found = dequantized(Quantized(out.cpu(), scale.cpu(), kind))
    # Half a step of e4m3, whose smallest numbers are subnormal; saturated where the scale is given.
    unit = dequantized(Quantized(torch.ones_like(out.cpu(), dtype=torch.float32).to(kind.values), scale.cpu(), kind))
    exact = torch.minimum(torch.maximum(exact, -kind.largest * unit), kind.largest * unit)
    assert bool(((found - exact).abs() <= exact.abs() * (2**-4 + 1e-5) + unit * 2**-10 * 1.01).all())


def test_no_rows(kernel: str, device: torch.device) -> None:
    out, scale = activated(both_of(0, 128, device), How(activation=Swiglu(), out_kind=ROW_SCALED), None)
    assert out.shape == (0, 128)
    assert scale is not None
    assert scale.shape == (0,)


def test_nan_stays_and_leaves_its_rows_scale(kernel: str, device: torch.device) -> None:
    both = both_of(4, 256, device)
    both[1, 3] = torch.nan
    both[2] = 0
    out, scale = activated(both, How(activation=Swiglu(), out_kind=ROW_SCALED), None)
    assert scale is not None
    assert out.float().isnan().nonzero().tolist() == [[1, 3]]
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())
