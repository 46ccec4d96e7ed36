# SPDX-License-Identifier: Apache-2.0
"""Test cases of weights of 4 and 8 bits with 16-bit activations: their tensors, their reference, random cases."""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
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


def random_kind(choose: random.Random) -> WeightOnlyFormat:
    bits = choose.choice((4, 4, 8))
    return WeightOnlyFormat(
        bits=bits, group=choose.choice((128, 128, 256, None)), zero_points=bits == 4 and choose.random() < 0.5
    )


def random_case(seed: int, most_n: int = 600, most_k: int = 1500, most_rows: int = 64) -> WeightOnlyCase:
    """Any problem of these sizes."""
    choose = random.Random(seed)
    n, k = 8 * choose.randint(1, most_n // 8), 8 * choose.randint(1, most_k // 8)
    return WeightOnlyCase(
        rows=choose.randint(1, most_rows),
        n=n,
        k=k,
        kind=random_kind(choose),
        dtype=choose.choice((torch.float16, torch.bfloat16)),
        bias=choose.random() < 0.3,
        pad_x=8 * choose.randint(0, 2),
        pad_out=8 * choose.randint(0, 2),
        special=n >= 8 and k >= 8 and choose.random() < 0.1,
        seed=seed,
    )
