# SPDX-License-Identifier: Apache-2.0
"""Test cases of linear layers of quantised operands: their tensors, their error budget, random cases."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.gemm.reference import activate, halves
from dsl_backend.gemm.scaled import OUTPUTS, PAIRS
from dsl_backend.gemm.sm90.scaled_configs import MOST_PROMOTION
from dsl_backend.linear.scaled import api
from dsl_backend.linear.scaled.reference import products
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import GROUP, ScaledFormat, scaled_format
from dsl_backend.quant.reference import Quantized, quantized, scales_of, spread
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target
from dsl_backend.testing.linear import ACTIVATIONS, BF16, F16, strided
from dsl_backend.testing.norm import truncates
from dsl_backend.testing.numerics import assert_errors_fit, assert_same_non_finite

# Derivatives of the gated activations by their gates are at most this.
STEEPEST = 1.13
# Of float32: half a step of a number in [1, 2), and the smallest number.
ROUNDING, SMALLEST = 2.0**-24, 2.0**-149
# Columns that an 8-bit matrix instruction sums at once, and the bits that SM90's keeps of a sum.
MMA_K = 32
CUT_BITS = 14


@dataclass(frozen=True, kw_only=True)
class ScaledCase:
    """A layer, and the layout of its tensors.

    Attributes:
        x, weight, to: names of formats; `to` of the output, empty for one in `dtype`.
        row_major: x's scales of groups.
        pad_x, pad_weight: elements between rows.
        gain: scale of x, and roughly of the products.
        special: rows of x have NaN, zeros, and scales that are infinite, NaN, 0 and denormal.
        special_weights: the first and the last scale of the weight are NaN and denormal.
    """

    rows: int
    n: int
    k: int
    x: str = "e4m3-row"
    weight: str = "e4m3-row"
    to: str = ""
    dtype: torch.dtype = BF16
    activation: Activation | None = None
    interleaved: bool = False
    bias: bool = False
    row_major: bool = False
    pad_x: int = 0
    pad_weight: int = 0
    gain: float = 1.0
    special: bool = False
    special_weights: bool = False
    seed: int = 0

    @property
    def weight_rows(self) -> int:
        return self.n if self.activation is None else 2 * self.n

    @property
    def out_kind(self) -> ScaledFormat | None:
        return scaled_format(self.to) if self.to else None

    @property
    def spec(self) -> ScaledLinearSpec:
        x = scaled_format(self.x)
        return ScaledLinearSpec(
            n=self.n,
            k=self.k,
            x=x,
            weight=scaled_format(self.weight),
            dtype=self.dtype,
            out=self.out_kind,
            activation=self.activation,
            interleaved=self.interleaved,
            bias=self.bias,
            column_major=x.blocked and not x.swizzled and not self.row_major,
        )


class Tensors(NamedTuple):
    """The tensors of a case; out_scale is the given one."""

    x: Quantized
    weight: Quantized
    bias: torch.Tensor | None
    out_scale: torch.Tensor | None


class Outputs(NamedTuple):
    """What a kernel wrote; scale is None where the output is not quantised."""

    out: torch.Tensor
    scale: torch.Tensor | None


def tensors(case: ScaledCase, device: torch.device | str) -> Tensors:
    """The tensors of a case on a device. The gaps between rows hold sentinels."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * gain

    # Rows and blocks of different magnitudes, so that a scale of another one is wrong.
    x = normal(case.rows, case.k, gain=case.gain) * 2.0 ** (torch.arange(case.rows) % 5 - 2).unsqueeze(1)
    x *= 2.0 ** (torch.arange(case.k) // 128 % 3 - 1)
    weight = normal(case.weight_rows, case.k, gain=case.k**-0.5)
    weight *= 2.0 ** ((torch.arange(case.weight_rows) // 16 + torch.arange(case.k).view(-1, 1) // 128).t() % 4 - 1)
    # Each 128 rows have all of these magnitudes: without another one, blocks below one another have the same scale.
    weight *= 2.0 ** ((torch.arange(case.weight_rows) // 128 * 2 + torch.arange(case.k).view(-1, 1) // 128).t() % 5 - 3)
    quantized_x = quantized(x, scaled_format(case.x))
    quantized_weight = quantized(weight, scaled_format(case.weight))
    if case.special:
        plant(quantized_x)
    if case.special_weights:
        flat = quantized_weight.scale.view(-1)
        flat[-1] = 1e-40 if quantized_weight.kind.scales == torch.float32 else 2.0**-127
        flat[0] = torch.nan
    scale = quantized_x.scale.contiguous() if case.row_major else quantized_x.scale
    given = case.out_kind is not None and case.out_kind.scale_shape(2, 256) == (1,)
    return Tensors(
        Quantized(strided(quantized_x.values, case.pad_x, 0, str(device)), moved(scale, device), quantized_x.kind),
        Quantized(
            strided(quantized_weight.values, case.pad_weight, 0, str(device)),
            quantized_weight.scale.to(device),
            quantized_weight.kind,
        ),
        normal(case.weight_rows).to(case.dtype).to(device) if case.bias else None,
        torch.tensor([0.013 * case.gain], device=device) if given else None,
    )


def moved(scale: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same strides on a device."""
    if scale.dim() < 2 or scale.is_contiguous():
        return scale.to(device)
    found = torch.empty(scale.shape[1], scale.stride(1), dtype=scale.dtype, device=device).t()[: scale.shape[0]]
    return found.copy_(scale)


def plant(x: Quantized) -> None:
    """One kind of trouble a row, as often as there are rows; with one scale for all, values alone.

    A row whose scale is infinite has one value in each 128 columns: a longer sum may be cut to 0, and 0 times infinity
    is NaN where the exact product is infinite.
    """
    powers = x.kind.scales != torch.float32
    for row, values in enumerate(x.values):
        kind = row % 7
        if kind == 0:
            values[-1:] = torch.tensor([torch.nan]).to(values.dtype)
        elif kind == 1:
            values.view(torch.uint8).zero_()
        elif x.scale.shape[0] == len(x.values) and (len(x.values) > 1 or x.kind.blocked):
            numbers = (2.0**-127, 2.0**-120, torch.nan) if powers else (torch.inf, 1e-40, torch.nan, 0.0)
            if kind - 2 < len(numbers):
                x.scale[row] = numbers[kind - 2]
                if numbers[kind - 2] == torch.inf:
                    values.view(torch.uint8)[torch.arange(len(values)) % 128 != 0] = 0


class Budget(NamedTuple):
    """The output of a case in float64, and how far from it a result may be: both [rows, n] float64."""

    exact: torch.Tensor
    error: torch.Tensor


def sum_budget(given: Tensors, exact: torch.Tensor, accumulator_bits: int, promoted_every: int) -> torch.Tensor:
    """How wrong sums may be: [rows, weight rows].

    Rounding errors of a float32 sum of k terms are about sqrt(k) half steps of the sum of their magnitudes (Higham and
    Mary, 2019); twice that is allowed. A matrix unit keeps fewer bits for as many columns as are summed in it.
    """
    x, weight = (one._replace(values=one.values.float().abs()) for one in (given.x, given.weight))
    k = given.x.values.shape[1]
    magnitudes = products(x, weight)
    error = 2 * ROUNDING * math.sqrt(k + 4) * magnitudes + SMALLEST * (k + products(unscaled(x), unscaled(weight)))
    if accumulator_bits < 24:
        squares = torch.zeros_like(error)
        for first in range(0, k, promoted_every):
            columns = slice(first, first + promoted_every)
            part = torch.zeros_like(x.values)
            part[:, columns] = x.values[:, columns]
            squares += products(x._replace(values=part), weight) ** 2
        # Each step cuts the sum, half of the last bit on average and always to the same side.
        steps = promoted_every / MMA_K
        error += 2.0**-accumulator_bits * (steps / 2 + math.sqrt(steps)) * squares.sqrt()
    return torch.where(exact.isfinite(), error, 0.0)


def unscaled(matrix: Quantized) -> Quantized:
    return matrix._replace(scale=torch.ones_like(matrix.scale))


def budget_of(case: ScaledCase, given: Tensors, accumulator_bits: int = 24, promoted_every: int = 128) -> Budget:
    """The exact output before its rounding, and the error that the sums and float32 arithmetic may bring it.

    Args:
        accumulator_bits: that a matrix unit keeps of a sum; SM90's keeps about 14 of 8-bit products.
        promoted_every: columns after which such a sum is added to one in float32.
    """
    result = products(given.x, given.weight)
    error = sum_budget(given, result, accumulator_bits, promoted_every)
    if given.bias is not None:
        result = result + given.bias.double()
        error = error + 2 * ROUNDING * result.abs()
    if case.activation is None:
        return Budget(result, error)
    gate, up = (part.t() for part in halves(result.t(), case.interleaved))
    gate_error, up_error = (part.t() for part in halves(error.t(), case.interleaved))
    exact = activate(gate, up, case.activation)
    if isinstance(case.activation, Geglu):
        limit, beta = math.inf, 0.0
    else:
        limit = math.inf if case.activation.limit is None else case.activation.limit
        beta = case.activation.beta
    above = up.clamp(-limit, limit).abs() + abs(beta)
    activated = STEEPEST * gate.clamp(max=limit).abs()
    error = STEEPEST * gate_error * (above + up_error) + activated * up_error
    # The activation's own arithmetic: its exponential, or error function, is that of approximate units.
    return Budget(exact, error + 2.0**-18 * (activated * above))


def check_outputs(case: ScaledCase, found: Outputs, budget: Budget, *, truncated: bool = False) -> None:
    """Raises AssertionError where an output is wrong; tensors on the CPU.

    Args:
        truncated: results in bfloat16 are, as in Triton's interpreter.
    """
    exact, error = budget
    error = torch.where(error.isfinite(), error, 0.0)
    kind = case.out_kind
    if kind is None:
        exact = decided(found.out.double(), exact, error, case.dtype)
        assert_same_non_finite(found.out.double(), exact, str(case))
        step = torch.finfo(case.dtype).eps * (2 if truncated and case.dtype == BF16 else 1)
        # Triton's interpreter loses a bit of subnormal bfloat16.
        least = torch.finfo(case.dtype).smallest_normal * (1 if truncated else step)
        assert_errors_fit(found.out, exact, error + (exact.nan_to_num().abs() + error) * step / 2 + least, str(case))
        return
    assert found.scale is not None
    if not kind.one_scale:
        check_scales(case, kind, found.scale.float(), Budget(exact, error))
    scale = spread(found.scale.double(), kind, *exact.shape).expand_as(exact)
    check_stored(case, kind, found.out, Budget(exact, error), scale)


def decided(found: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The exact results, infinite where they overflow: by what was found where that is within the error."""

    def overflows(value: torch.Tensor) -> torch.Tensor:
        return value.float().to(dtype).isinf()

    size = exact.abs()
    either = overflows(size + error) & ~overflows((size - error).clamp(min=0)) & (found.sign() == exact.sign())
    overflown = torch.where(overflows(size), exact.sign() * torch.inf, exact)
    return torch.where(either, found, overflown)


def check_scales(case: ScaledCase, kind: ScaledFormat, scale: torch.Tensor, budget: Budget) -> None:
    """Raises AssertionError where a computed scale is not that of some result within the budget."""
    exact, error = budget
    magnitudes = exact.abs()
    # Sums past float32 are infinite on the way.
    magnitudes = torch.where(magnitudes > torch.finfo(torch.float32).max, torch.inf, magnitudes)
    low = scales_of(torch.where(magnitudes.isnan(), magnitudes, (magnitudes - error).clamp(min=0)), kind)
    high = scales_of(magnitudes + error, kind)
    tolerance = 4 * ROUNDING if kind.scales == torch.float32 else 0.0
    wanted = high.float().to(kind.scales).double()
    assert_same_non_finite(by_row(scale.double()), by_row(wanted), f"{case}: scale")
    fits = (scale >= low * (1 - tolerance)) & (scale <= high * (1 + tolerance))
    wrong = ~fits & high.isfinite()
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{case}: {int(wrong.sum())} of {wrong.numel()} scales are wrong; first at {where}: "
            f"{float(scale[where]):.6g} where {float(low[where]):.6g} to {float(high[where]):.6g} is right"
        )


def by_row(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dim() == 2 else scale.unsqueeze(1)


def check_stored(case: ScaledCase, kind: ScaledFormat, out: torch.Tensor, budget: Budget, scale: torch.Tensor) -> None:
    """Raises AssertionError where a quantised value is not the nearest to some result within the budget."""
    exact, error = budget[0] / scale, budget[1] / scale
    error = torch.where(error.isfinite(), error, 0.0)
    clamped = exact.clamp(-kind.largest, kind.largest)
    # A division by a scale in float32, or a product with its reciprocal.
    reached = clamped.nan_to_num().abs() * (1 + 4 * ROUNDING) + error
    half_step = torch.exp2(reached.clamp(min=2.0**-6).log2().floor()) * 2.0**-4
    assert_same_non_finite(out.double(), clamped, str(case))
    assert_errors_fit(out, clamped, error + half_step + 4 * ROUNDING * clamped.nan_to_num().abs(), str(case))


def on_cpu(found: Outputs) -> Outputs:
    return Outputs(found.out.cpu(), None if found.scale is None else found.scale.cpu())


def call(case: ScaledCase, given: Tensors, kernel: str | None) -> Outputs:
    """The layer by the API."""
    more = {
        "dtype": case.dtype,
        "activation": case.activation,
        "interleaved": case.interleaved,
        "kernel": kernel,
    }
    if case.out_kind is None:
        return Outputs(api.scaled_linear(given.x, given.weight, given.bias, **more), None)  # type: ignore[arg-type]
    found = api.scaled_linear_quantized(
        given.x,
        given.weight,
        given.bias,
        to=case.out_kind,
        out_scale=given.out_scale,
        **more,  # type: ignore[arg-type]
    )
    return Outputs(found.values, found.scale)


def accumulator_bits_of(target: Target, kernel: str | None) -> int:
    """Bits that a sum of 8-bit products keeps: SM90's and older matrix units, and SM120's, cut it."""
    cut = target.native_fp8 and not target.tcgen05 and kernel != "reference"
    return CUT_BITS if cut else 24


def promoted_every(case: ScaledCase, kernel: str | None) -> int:
    """Columns of k at most whose products a matrix unit sums before they are added in float32."""
    by_blocks = kernel in ("triton", "reference") or scaled_format(case.x).blocked
    return GROUP if by_blocks else MOST_PROMOTION * GROUP


def check_scaled(case: ScaledCase, kernel: str | None, device: str) -> None:
    """Raises AssertionError where the kernel's result is wrong."""
    bits = accumulator_bits_of(targets.detect(torch.device(device)), kernel)
    given = tensors(case, device)
    # In float64 on the device: layers of real sizes take minutes on a core of the host.
    budget = Budget(*(one.cpu() for one in budget_of(case, given, bits, promoted_every(case, kernel))))
    found = on_cpu(call(case, given, kernel))
    check_outputs(case, found, budget, truncated=truncates(kernel, device))


ROW, TENSOR, GROUPS, BLOCKS = "e4m3-row", "e4m3-tensor", "e4m3-1x128", "e4m3-128x128"
E8M0_GROUPS, E8M0_BLOCKS = "e4m3-1x128-e8m0", "e4m3-128x128-e8m0"


def blocked(rows: int, n: int, k: int, **more: Any) -> ScaledCase:
    return ScaledCase(rows=rows, n=n, k=k, x=GROUPS, weight=BLOCKS, **more)


CASES: Mapping[str, ScaledCase] = MappingProxyType(
    {
        "channels": ScaledCase(rows=5, n=48, k=272),
        "tensor": ScaledCase(rows=5, n=48, k=272, x=TENSOR, weight=TENSOR, bias=True, dtype=F16),
        "tensor-channels": ScaledCase(rows=3, n=48, k=80, x=TENSOR),
        "tokens-tensor": ScaledCase(rows=3, n=48, k=80, weight=TENSOR),
        "blocks": blocked(5, 48, 272),
        "blocks-rows": blocked(5, 144, 272, row_major=True),
        "powers": ScaledCase(rows=5, n=144, k=144, x=E8M0_GROUPS, weight=E8M0_BLOCKS, bias=True),
        "one": ScaledCase(rows=1, n=16, k=16),
        "one-blocks": blocked(1, 16, 16),
        "swiglu": ScaledCase(rows=5, n=48, k=272, activation=Swiglu()),
        "swiglu-blocks": blocked(5, 144, 272, activation=Swiglu()),
        "tiles": blocked(130, 144, 272, activation=Swiglu()),
        "oai": ScaledCase(rows=17, n=80, k=144, activation=SWIGLU_OAI, interleaved=True, bias=True, gain=9),
        "geglu": blocked(17, 80, 144, activation=Geglu(tanh=True), bias=True),
        "to-tensor": ScaledCase(rows=33, n=80, k=144, activation=Swiglu(), to=TENSOR),
        "to-tokens": ScaledCase(rows=33, n=144, k=144, activation=Swiglu(), to=ROW),
        "to-groups": blocked(33, 272, 144, activation=Swiglu(), to=GROUPS),
        "to-powers": ScaledCase(rows=9, n=144, k=144, to=E8M0_GROUPS),
        "saturates": ScaledCase(rows=9, n=48, k=144, to=TENSOR, gain=300, x=TENSOR),
        "strides": ScaledCase(rows=9, n=48, k=144, pad_x=16, pad_weight=32, activation=Geglu()),
        "special": ScaledCase(rows=14, n=48, k=272, special=True, bias=True),
        "special-blocks": blocked(14, 48, 272, special=True),
        "special-weights": ScaledCase(rows=7, n=48, k=272, special_weights=True),
        "special-block-weights": blocked(7, 144, 272, special_weights=True),
        "special-powers": ScaledCase(rows=7, n=144, k=144, special=True, x=E8M0_GROUPS, weight=E8M0_BLOCKS),
        **{
            f"special-{to}": ScaledCase(rows=14, n=144, k=144, special=True, activation=Swiglu(), to=to)
            for to in (TENSOR, ROW, GROUPS, E8M0_GROUPS)
        },
        "deep": ScaledCase(rows=2, n=16, k=16384, seed=3),
        "deep-blocks": blocked(2, 16, 16384),
    }
)
REAL: Mapping[str, ScaledCase] = MappingProxyType(
    {
        **{
            f"real-{rows}": ScaledCase(rows=rows, n=14336, k=4096, activation=Swiglu(), to=ROW)
            for rows in (1, 3, 16, 64, 200, 1000, 8192)
        },
        **{
            f"real-blocks-{rows}": blocked(rows, 2048, 7168, activation=Swiglu(), to=GROUPS)
            for rows in (1, 64, 300, 4096)
        },
        "real-down": ScaledCase(rows=300, n=4096, k=14336),
        "real-o": blocked(77, 7168, 16384),
    }
)


def random_case(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ScaledCase:
    """A random layer.

    Args:
        most: rows, n and k are up to about this number.
        facts: draws what kernels are compiled for, so that several cases can share a kernel; `draw` by default.
    """

    def size() -> int:
        value = int(2 ** draw.uniform(0, (most + 1).bit_length() - 1))
        if draw.random() < 0.3:
            value = max(1, round(value / 64) * 64 + draw.choice((-1, 0, 1)))
        return value

    def width() -> int:
        return -(-size() // 16) * 16

    facts = facts or draw
    activation = facts.choice((None, *ACTIVATIONS))
    x, weight = facts.choice(PAIRS)
    to = facts.choice((None, None, None, *OUTPUTS))
    return ScaledCase(
        rows=size(),
        n=width(),
        k=width(),
        x=x.name,
        weight=weight.name,
        to="" if to is None else to.name,
        dtype=facts.choice((F16, BF16)),
        activation=activation,
        interleaved=activation is not None and facts.random() < 0.2,
        bias=facts.random() < 0.3,
        row_major=x.blocked and facts.random() < 0.3,
        pad_x=draw.choice((0, 0, 16, 48)),
        pad_weight=draw.choice((0, 0, 16)),
        gain=draw.choice((1.0, 1.0, 0.1, 30.0)),
        special=draw.random() < 0.15,
        special_weights=draw.random() < 0.05,
        seed=draw.randrange(2**31),
    )
