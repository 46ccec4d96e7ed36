# SPDX-License-Identifier: Apache-2.0
"""Test cases of weights of 4 and 8 bits with 16-bit activations: their tensors, their reference, random cases."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear.weight_only import api
from dsl_backend.quant.weight_only import WeightOnlyFormat, dequantized, pack
from dsl_backend.testing.numerics import assert_same_non_finite

# A wgmma's sums are float32, and lose what lies below 2^-22 of the largest (two bits of those that follow one another).
SUM_BITS = 22
STEP_COLUMNS = 16


@dataclass(frozen=True, kw_only=True)
class WeightOnlyCase:
    """A product.

    Attributes:
        pad_x, pad_out: elements between rows.
        special: rows of x get NaN, infinities and zeros; scales get NaN and zero.
    """

    rows: int
    n: int
    k: int
    kind: WeightOnlyFormat
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    pad_x: int = 0
    pad_out: int = 0
    special: bool = False
    seed: int = 0

    @property
    def spec(self) -> WeightOnlyGemmSpec:
        return WeightOnlyGemmSpec(n=self.n, k=self.k, dtype=self.dtype, kind=self.kind, bias=self.bias)


class WeightOnlyTensors(NamedTuple):
    """The tensors of a case; `packed` has the weights of the three before it."""

    x: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor
    zero_points: torch.Tensor | None
    packed: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor


def tensors(case: WeightOnlyCase, device: torch.device | str) -> WeightOnlyTensors:
    """Random ones; the output is NaN."""
    made = torch.Generator().manual_seed(case.seed)
    kind, shape = case.kind, (case.n, case.kind.groups(case.k))
    values = torch.randint(0, 1 << kind.bits, (case.n, case.k), dtype=torch.uint8, generator=made)
    scale = (torch.rand(shape, generator=made) / 16 + 1 / 64).to(case.dtype)
    zero_points = torch.randint(0, 16, shape, dtype=torch.uint8, generator=made) if kind.zero_points else None
    x = torch.randn(case.rows, case.k + case.pad_x, generator=made).to(case.dtype)[:, : case.k]
    if case.special:
        for i, number in enumerate((torch.nan, torch.inf, -torch.inf, 0.0)):
            x[i % case.rows, i] = number
        # An infinite scale is no part of it: sums of 128 columns are multiplied, and not weights of zero.
        scale[0], scale[1] = torch.nan, 0.0
    bias = torch.randn(case.n, generator=made).to(case.dtype) if case.bias else None
    out = torch.full((case.rows, case.n + case.pad_out), torch.nan, dtype=case.dtype)
    return WeightOnlyTensors(
        x=on(device, x),
        values=values.to(device),
        scale=scale.to(device),
        zero_points=None if zero_points is None else zero_points.to(device),
        packed=pack(values, scale, zero_points, kind).to(device),
        bias=None if bias is None else bias.to(device),
        out=out.to(device)[:, : case.n],
    )


def on(device: torch.device | str, rows: torch.Tensor) -> torch.Tensor:
    """Rows on a device, as far apart as they are."""
    return torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=device).copy_(rows)


def expected(given: WeightOnlyTensors, kind: WeightOnlyFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product in float64, the sums of its terms' magnitudes)."""
    x = given.x.double()
    weight = dequantized(given.values, given.scale, given.zero_points, kind)
    exact, magnitudes = x @ weight.T, x.abs() @ weight.abs().T
    if given.bias is not None:
        exact, magnitudes = exact + given.bias.double(), magnitudes + given.bias.double().abs()
    return exact, magnitudes


def judge(case: WeightOnlyCase, given: WeightOnlyTensors) -> float:
    """The output's largest error as a share of its budget: one rounding, and sums in float32 in any order.

    Raises:
        AssertionError: an error is beyond the budget, or NaN and infinities differ.
    """
    exact, magnitudes = (one.cpu() for one in expected(given, case.kind))
    out = given.out.cpu()
    assert_same_non_finite(out, exact.to(case.dtype), "out")
    finite = exact.isfinite()
    steps = -(-case.k // STEP_COLUMNS) + case.kind.groups(case.k)
    of_sums = magnitudes * steps * 2.0**-SUM_BITS
    budget = (exact.abs() + of_sums) * torch.finfo(case.dtype).eps / 2 + of_sums + torch.finfo(case.dtype).tiny
    share = torch.where(finite, (out.double() - exact).abs() / budget, 0.0)
    worst = float(share.max())
    where = tuple((share == worst).nonzero()[0].tolist())
    assert worst <= 1, (
        f"{int((share > 1).sum())} of {share.numel()} outputs are beyond the budget, the worst {worst:.3g} times at "
        f"{where}: {float(out[where])} where {float(exact[where])} is right"
    )
    return worst


def check_weight_only(case: WeightOnlyCase, kernel: str | None, device: str) -> None:
    """Raises AssertionError where the kernel's result is wrong. The API allocates the output, without padding."""
    given = tensors(case, device)
    out = api.weight_only_linear(given.x, given.packed, given.bias, n=case.n, kind=case.kind, kernel=kernel)
    judge(case, given._replace(out=out))


W4, W8 = WeightOnlyFormat(), WeightOnlyFormat(bits=8)
ZERO_POINTS = WeightOnlyFormat(zero_points=True)
F16 = torch.float16
# Rows of a layer of 4 or 8 bits: SM90 has a kernel for up to 64, and one for any number.
CASES: Mapping[str, WeightOnlyCase] = MappingProxyType(
    {
        "w4": WeightOnlyCase(rows=5, n=136, k=456, kind=W4),
        "w4-zero-points": WeightOnlyCase(rows=13, n=328, k=712, kind=ZERO_POINTS, dtype=F16, bias=True, pad_x=8),
        "w4-group-256": WeightOnlyCase(rows=9, n=136, k=712, kind=WeightOnlyFormat(group=256, zero_points=True)),
        "w4-row": WeightOnlyCase(rows=8, n=384, k=320, kind=WeightOnlyFormat(group=None)),
        "w8": WeightOnlyCase(rows=33, n=136, k=456, kind=W8, bias=True),
        "w8-row": WeightOnlyCase(rows=64, n=72, k=320, kind=WeightOnlyFormat(bits=8, group=None), dtype=F16),
        "one": WeightOnlyCase(rows=1, n=8, k=8, kind=W4),
        "copied": WeightOnlyCase(rows=3, n=136, k=456, kind=W4, pad_x=3),
        "special": WeightOnlyCase(rows=6, n=136, k=456, kind=W4, special=True),
        "w4-rows": WeightOnlyCase(rows=130, n=200, k=584, kind=ZERO_POINTS, bias=True, pad_x=8),
        "w8-rows": WeightOnlyCase(rows=200, n=264, k=328, kind=W8, dtype=F16),
        "special-rows": WeightOnlyCase(rows=70, n=136, k=456, kind=W8, special=True),
    }
)
LAYERS = {"gate-up": (28672, 4096), "qkv": (6144, 4096), "down": (4096, 14336)}
REAL: Mapping[str, WeightOnlyCase] = MappingProxyType(
    {
        f"real-{layer}-w{kind.bits}{'-zero-points' if kind.zero_points else ''}-{rows}": WeightOnlyCase(
            rows=rows, n=LAYERS[layer][0], k=LAYERS[layer][1], kind=kind
        )
        for layer, kind, every in (
            ("gate-up", W4, (1, 64, 300, 2048)),
            ("gate-up", W8, (8, 256)),
            ("qkv", W4, (1, 16, 64, 512)),
            ("qkv", W8, (1, 64, 512)),
            ("down", ZERO_POINTS, (1, 48, 1000)),
            ("down", W8, (16, 2048)),
        )
        for rows in every
    }
)


def random_kind(choose: random.Random) -> WeightOnlyFormat:
    bits = choose.choice((4, 4, 8))
    return WeightOnlyFormat(
        bits=bits, group=choose.choice((128, 128, 256, None)), zero_points=bits == 4 and choose.random() < 0.5
    )


def random_case(
    seed: int, most_n: int = 600, most_k: int = 1500, most_rows: int = 64, *, facts: random.Random | None = None
) -> WeightOnlyCase:
    """Any problem of these sizes.

    Args:
        facts: draws what kernels are compiled for, so that several cases can share a kernel; `seed` by default.
    """
    choose = random.Random(seed)
    facts = facts or choose
    n, k = 8 * choose.randint(1, most_n // 8), 8 * choose.randint(1, most_k // 8)
    return WeightOnlyCase(
        rows=choose.randint(1, most_rows),
        n=n,
        k=k,
        kind=random_kind(facts),
        dtype=facts.choice((torch.float16, torch.bfloat16)),
        bias=facts.random() < 0.3,
        pad_x=8 * choose.randint(0, 2),
        pad_out=8 * choose.randint(0, 2),
        special=n >= 8 and k >= 8 and choose.random() < 0.1,
        seed=seed,
    )
