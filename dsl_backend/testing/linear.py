# SPDX-License-Identifier: Apache-2.0
"""Test cases of linear layers: their tensors, their reference, random cases."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.gemm.reference import halves
from dsl_backend.linear import api, reference
from dsl_backend.testing.numerics import assert_within_budget

F16, BF16 = torch.float16, torch.bfloat16
SENTINEL = 77.0
ACTIVATIONS: tuple[Activation | None, ...] = (None, Swiglu(), SWIGLU_OAI, Geglu(), Geglu(tanh=True), Swiglu(limit=1.0))


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """A layer, and the layout of its tensors.

    Attributes:
        pad_x, pad_weight, pad_out: elements between rows.
        offset: elements from an aligned address to x.
        gain: scale of x, and roughly of the products.
        special: rows of x get NaN, infinities and zeros.
        special_weights: rows of weights get them; with 25 columns or more in every combination of gate and up.
        in_place: the residual is the output.
    """

    rows: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    activation: Activation | None = None
    interleaved: bool = False
    bias: bool = False
    residual: bool = False
    in_place: bool = False
    pad_x: int = 0
    pad_weight: int = 0
    pad_out: int = 0
    offset: int = 0
    gain: float = 1.0
    special: bool = False
    special_weights: bool = False
    seed: int = 0

    @property
    def weight_rows(self) -> int:
        return self.n if self.activation is None else 2 * self.n


class Tensors(NamedTuple):
    """The tensors of a case on a device; shapes as in `api.linear`. The gaps between rows hold sentinels."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor


def strided(values: torch.Tensor, pad: int, offset: int, device: str) -> torch.Tensor:
    """A matrix in a buffer whose gaps between rows hold sentinels."""
    rows, width = values.shape
    buffer = torch.full((offset + rows * (width + pad),), SENTINEL, dtype=values.dtype, device=device)
    view = buffer[offset:].view(rows, width + pad)[:, :width]
    view.copy_(values)
    return view


def tensors(case: LinearCase, device: str) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * gain).to(case.dtype)

    x = normal(case.rows, case.k, gain=case.gain)
    if case.special:
        plant(x)
    weight = normal(case.weight_rows, case.k, gain=case.k**-0.5)
    if case.special_weights:
        for half, rows in enumerate(halves(weight, case.interleaved) if case.activation else (weight,)):
            plant(rows, each=len(KINDS) ** half)
    out = strided(torch.full((case.rows, case.n), SENTINEL, dtype=case.dtype), case.pad_out, 0, device)
    residual = None
    if case.residual:
        values = normal(case.rows, case.n)
        residual = out.copy_(values) if case.in_place else values.to(device)
    return Tensors(
        strided(x, case.pad_x, case.offset, device),
        strided(weight, case.pad_weight, 0, device),
        normal(case.weight_rows).to(device) if case.bias else None,
        residual,
        out,
    )


KINDS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda row: row[-1:].fill_(torch.nan),
    lambda row: None,
    lambda row: row[:1].fill_(torch.inf),
    lambda row: row.zero_(),
    lambda row: row[-1:].fill_(-torch.inf),
)


def plant(rows: torch.Tensor, each: int = 1) -> None:
    """Put special values into rows: `each` rows of one kind, then of the next; one kind changes nothing."""
    for index, row in enumerate(rows):
        KINDS[index // each % len(KINDS)](row)


class Expected(NamedTuple):
    """The output of a case in float64, and what torch computes in the dtype of the case."""

    exact: torch.Tensor
    naive: torch.Tensor


def expected(case: LinearCase, given: Tensors) -> Expected:
    """The expected output; compute it before the case runs, because the residual may be the output."""
    operands = (given.x, given.weight, given.bias, given.residual)
    how = {"activation": case.activation, "interleaved": case.interleaved}
    exact = reference.exact(*operands, **how)  # type: ignore[arg-type]
    naive = reference.exact(*operands, **how, dtype=case.dtype)  # type: ignore[arg-type]
    # Values that overflow the output's type become infinities.
    rounded = exact.to(torch.float32).to(case.dtype).double()
    return Expected(torch.where(rounded.isinf(), rounded, exact), naive)


def judge(case: LinearCase, given: Tensors, wanted: Expected) -> None:
    """Check that the error is within budget, and that nothing between rows was written."""
    out = given.out
    assert_within_budget(out, wanted.exact, wanted.naive, what=str(case))
    stride = case.n + case.pad_out
    whole = out.as_strided((case.rows, stride), (stride, 1))
    assert bool((whole[:, case.n :] == SENTINEL).all()), f"{case}: elements between rows were written"


def check_linear(case: LinearCase, kernel: str | None, device: str) -> None:
    """Raises AssertionError where the kernel's result is wrong."""
    given = tensors(case, device)
    wanted = expected(case, given)
    api.linear(*given, activation=case.activation, interleaved=case.interleaved, kernel=kernel)
    judge(case, given, wanted)


CASES: Mapping[str, LinearCase] = MappingProxyType(
    {
        "plain": LinearCase(rows=5, n=24, k=40),
        "swiglu": LinearCase(rows=5, n=24, k=40, activation=Swiglu()),
        "one": LinearCase(rows=1, n=8, k=8, activation=Swiglu(), dtype=F16),
        "smallest": LinearCase(rows=1, n=1, k=1, activation=Swiglu()),
        "tiles": LinearCase(rows=130, n=136, k=200, activation=Swiglu()),
        "tile-exactly": LinearCase(rows=128, n=128, k=128, activation=Swiglu(), dtype=F16),
        "odd": LinearCase(rows=33, n=67, k=71, activation=Geglu(), bias=True, pad_x=1, pad_out=3, offset=1),
        "all": LinearCase(
            rows=17, n=72, k=136, activation=SWIGLU_OAI, interleaved=True, bias=True, residual=True, gain=9
        ),
        "in-place": LinearCase(rows=17, n=72, k=72, residual=True, in_place=True, pad_out=8),
        "special": LinearCase(rows=12, n=24, k=40, special=True),
        **{
            f"special-{i}": LinearCase(rows=12, n=24, k=40, special=True, activation=activation, gain=4)
            for i, activation in enumerate(ACTIVATIONS)
        },
        "strides": LinearCase(rows=9, n=40, k=48, pad_x=8, pad_weight=16, pad_out=24, activation=Geglu(tanh=True)),
    }
)
REAL: Mapping[str, LinearCase] = MappingProxyType(
    {
        **{
            f"real-{rows}": LinearCase(rows=rows, n=14336, k=4096, activation=Swiglu())
            for rows in (1, 3, 16, 64, 200, 1000, 8192)
        },
        "real-gpt-oss": LinearCase(
            rows=77, n=2880, k=2880, activation=SWIGLU_OAI, interleaved=True, bias=True, dtype=BF16
        ),
        "real-down": LinearCase(rows=300, n=4096, k=14336, residual=True, in_place=True),
        "real-fp16": LinearCase(rows=40, n=8192, k=3072, activation=Geglu(tanh=True), dtype=F16),
    }
)


def random_case(
    draw: random.Random, most: int, *, aligned: bool = False, facts: random.Random | None = None
) -> LinearCase:
    """A random layer.

    Args:
        most: rows, n and k are up to about this number.
        facts: draws what kernels are compiled for, so that several cases can share a kernel; `draw` by default.
        aligned: rows start at multiples of 16 bytes, and n and k are multiples of 8.
    """

    def size() -> int:
        value = int(2 ** draw.uniform(0, (most + 1).bit_length() - 1))
        if draw.random() < 0.3:
            value = max(1, round(value / 64) * 64 + draw.choice((-1, 0, 1)))
        return value

    whole = aligned or draw.random() < 0.7

    def width() -> int:
        return -(-size() // 8) * 8 if whole else size()

    def pad() -> int:
        return draw.choice((0, 0, 0, 8, 40)) if whole else draw.choice((0, 0, 1, 3, 8))

    facts = facts or draw
    activation = facts.choice(ACTIVATIONS)
    residual = facts.random() < 0.25
    return LinearCase(
        rows=size(),
        n=width(),
        k=width(),
        dtype=facts.choice((F16, BF16)),
        activation=activation,
        interleaved=activation is not None and facts.random() < 0.3,
        bias=facts.random() < 0.25,
        residual=residual,
        in_place=residual and draw.random() < 0.5,
        pad_x=pad(),
        pad_weight=pad(),
        pad_out=pad(),
        offset=0 if whole else draw.choice((0, 0, 1, 4)),
        gain=draw.choice((1.0, 1.0, 0.1, 5.0)),
        special=draw.random() < 0.15,
        seed=draw.randrange(2**31),
    )
