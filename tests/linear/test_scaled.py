# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands: formats, checks, the reference, and what torch.compile sees."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.scaled import OUTPUTS, PAIRS
from dsl_backend.linear.scaled import api, eager
from dsl_backend.linear.scaled.api import (
    BLOCK_SCALED,
    GROUP_SCALED,
    GROUP_SCALED_E8M0,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    TENSOR_SCALED,
    Quantized,
    Swiglu,
    in_mxfp8,
    quantized,
)
from dsl_backend.linear.scaled.reference import exact
from dsl_backend.quant.format import ScaledFormat, scaled_format
from dsl_backend.quant.reference import column_major, dequantized, mma_dequantized, mma_quantized, scales_of

FORMATS = tuple(dict.fromkeys(kind for pair in PAIRS for kind in pair))


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_a_quantized_matrix_is_within_half_a_step_of_the_matrix(kind: ScaledFormat) -> None:
    x = torch.randn(130, 272, generator=torch.Generator().manual_seed(1)) * 3
    found = quantized(x, kind)
    assert found.scale.shape == kind.scale_shape(130, 272)
    wide = dequantized(found)
    # e4m3 has three bits behind the first one; below 2^-6 its steps are 2^-9.
    step = dequantized(found._replace(values=torch.ones_like(found.values))) * 2.0**-9
    assert ((wide - x).abs() <= torch.maximum(x.abs() / 16, step / 2) * 1.001).all()
    assert wide.abs().max() >= x.abs().max() * 0.9


def test_scales_of_special_rows() -> None:
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200], x[3, 0] = torch.nan, torch.inf, 1e-30
    assert scales_of(x, ROW_SCALED)[[0, 1, 3]].eq(1 / 512 / 448).all()
    assert scales_of(x, ROW_SCALED)[2] == torch.inf
    groups = scales_of(x, GROUP_SCALED)
    assert torch.allclose(groups[[0, 1, 3]], torch.tensor(1e-10 / 448))
    assert groups[2, 0] < 1
    assert groups[2, 1].isinf()
    found = quantized(x, GROUP_SCALED)
    assert (found.scale.stride(), dequantized(found)[1].isnan().nonzero().tolist()) == ((1, 4), [[3]])
    assert dequantized(found)[2, 128:].isnan().all()
    assert not dequantized(found)[2, :128].any()
    assert scales_of(torch.full((1, 128), 449.0), GROUP_SCALED_E8M0) == 2  # rounded up: 449 / 448 is above 1


def operands(rows: int = 5, n: int = 48, k: int = 272, pair: int = 4, parts: int = 1) -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(2)
    x, weight = PAIRS[pair]
    return (
        quantized(torch.randn(rows, k, generator=generator), x),
        quantized(torch.randn(parts * n, k, generator=generator) * k**-0.5, weight),
    )


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_the_reference_is_the_product_of_dequantized_operands(pair: int) -> None:
    x, weight = operands(pair=pair, parts=2)
    wide = dequantized(x) @ dequantized(weight).T
    gate, up = wide.chunk(2, 1)
    wanted = gate * torch.sigmoid(gate) * up
    assert torch.allclose(exact(x, weight, activation=Swiglu()), wanted)
    assert torch.allclose(api.scaled_linear(x, weight, activation=Swiglu()).double(), wanted, atol=0.05, rtol=0.01)
    for to in OUTPUTS:
        scale = torch.tensor([0.02]) if to is TENSOR_SCALED else None
        found = api.scaled_linear_quantized(x, weight, activation=Swiglu(), to=to, out_scale=scale)
        assert torch.allclose(dequantized(found), wanted, atol=0.01, rtol=0.07), to


def test_no_rows() -> None:
    x, weight = operands(rows=0)
    assert api.scaled_linear(x, weight).shape == (0, 48)
    found = api.scaled_linear_quantized(x, weight, to=GROUP_SCALED)
    assert (found.values.shape, found.scale.shape) == ((0, 48), (0, 1))


@pytest.mark.parametrize("to", [None, TENSOR_SCALED, ROW_SCALED, GROUP_SCALED, MXFP8, NVFP4])
def test_a_node_of_torch_compile_has_the_shapes_of_the_function(to: ScaledFormat | None) -> None:
    x, weight = operands(parts=2)
    scale = torch.tensor([0.02]) if to in (TENSOR_SCALED, NVFP4) else None

    def layer(x: torch.Tensor, x_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = Quantized(x, x_scale, GROUP_SCALED)
        if to is None:
            return (api.scaled_linear(given, weight, activation=Swiglu()),)
        found = api.scaled_linear_quantized(given, weight, activation=Swiglu(), to=to, out_scale=scale)
        return found.values, found.scale

    plain = layer(x.values, x.scale)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x.values, x.scale)
    for one, other in zip(plain, compiled, strict=True):
        assert one.float().equal(other.float())
        assert one.stride() == other.stride()


@pytest.mark.parametrize("of", [GROUP_SCALED, MXFP8, NVFP4], ids=str)
@pytest.mark.parametrize("to", [MXFP8, NVFP4], ids=str)
def test_outputs_in_formats_of_sm100(of: ScaledFormat, to: ScaledFormat) -> None:
    """They are the result of the layer in these formats."""
    x, weight = operands(k=288, parts=2)
    alpha = None
    if of.swizzled:
        # Of MXFP8 there is no scale of the whole matrix.
        x, weight = (mma_quantized(dequantized(one), of, 0.01 if of == NVFP4 else 1.0) for one in (x, weight))
        alpha = torch.tensor([1e-4]) if of == NVFP4 else None
    wide = exact(x, weight, activation=Swiglu(), alpha=alpha, dtype=torch.float32)
    whole = torch.tensor([0.003]) if to == NVFP4 else None
    found = api.scaled_linear_quantized(x, weight, activation=Swiglu(), to=to, out_scale=whole, alpha=alpha)
    wanted = mma_quantized(wide, to, 1.0 if whole is None else whole)
    assert found.values.equal(wanted.values)
    assert found.scale.view(torch.uint8).equal(wanted.scale.view(torch.uint8))
    by = 0.003 if to == NVFP4 else 1.0
    near = mma_dequantized(found, by)
    assert (near - wide).norm() < 0.12 * wide.norm()
    none = x._replace(values=x.values[:0], scale=x.scale[:0])
    found = api.scaled_linear_quantized(none, weight, activation=Swiglu(), to=to, out_scale=whole, alpha=alpha)
    assert found.values.shape == (0, 48 // to.packed)


@pytest.mark.parametrize("kind", [MXFP8, NVFP4], ids=str)
def test_swizzled_scales_need_a_beginning_that_is_aligned(kind: ScaledFormat) -> None:
    """A row of them has no place of its own: of 96 columns it would have 4 or 8 bytes."""
    x, weight = (mma_quantized(torch.ones(rows, 96), kind) for rows in (5, 48))
    assert eager.check(x, weight, None, None, eager.How()).aligned
    odd = torch.zeros(x.scale.numel() + 1, dtype=torch.uint8)[1:].view(x.scale.shape).view(kind.scales)
    assert not eager.check(x._replace(scale=odd), weight, None, None, eager.How()).aligned


def test_special_values_in_formats_of_sm100() -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 40], x[2] = torch.nan, torch.inf, 0.0
    mx, nv = (mma_dequantized(mma_quantized(x, kind)) for kind in (MXFP8, NVFP4))
    assert mx.isnan().nonzero().tolist() == [[0, 5], *([1, column] for column in range(32, 64))]
    # e2m1 has neither.
    assert nv.isnan().nonzero().tolist() == [[0, column] for column in range(16)]
    assert nv[1, 40] == 6 * 448
    assert not nv[2].any()
    assert not mx[2].any()


X, WEIGHT = operands()
WRONG = {
    "x is a Tensor": lambda: api.scaled_linear(X.values, WEIGHT),  # type: ignore[arg-type]
    r"x.scale has shape \(5, 2\): \[5, 3\] is needed": lambda: api.scaled_linear(
        X._replace(scale=X.scale[:, :2]), WEIGHT
    ),
    "x.scale is float16": lambda: api.scaled_linear(X._replace(scale=X.scale.half()), WEIGHT),
    r"weight.scale has strides \(6, 2\)": lambda: api.scaled_linear(X, WEIGHT._replace(scale=torch.ones(1, 6)[:, ::2])),
    "weight.values is bfloat16": lambda: api.scaled_linear(X, WEIGHT._replace(values=WEIGHT.values.bfloat16())),
    r"weight.values has shape \(48, 256\)": lambda: api.scaled_linear(X, operands(k=256)[1]),
    "weight has 33 rows": lambda: api.scaled_linear(X, operands(n=33)[1], activation=Swiglu()),
    "n 24 is not a multiple of 16": lambda: api.scaled_linear(X, operands(n=24)[1]),
    "k 280 is not a multiple of 16": lambda: api.scaled_linear(*operands(k=280)),
    "bias has shape": lambda: api.scaled_linear(X, WEIGHT, torch.zeros(7).bfloat16()),
    "bias is float32": lambda: api.scaled_linear(X, WEIGHT, torch.zeros(48)),
    "out_scale is None": lambda: api.scaled_linear_quantized(X, WEIGHT, to=TENSOR_SCALED),
    "out_scale is float32": lambda: api.scaled_linear_quantized(X, WEIGHT, to=ROW_SCALED, out_scale=torch.ones(1)),
    "out_scale has shape": lambda: api.scaled_linear_quantized(X, WEIGHT, to=TENSOR_SCALED, out_scale=torch.ones(2)),
    "out is e4m3-128x128": lambda: api.scaled_linear_quantized(X, WEIGHT, to=BLOCK_SCALED),
    "x is e4m3-row and the weight e4m3-128x128": lambda: api.scaled_linear(
        quantized(torch.ones(5, 272), ROW_SCALED), WEIGHT
    ),
    "to is None: a ScaledFormat is needed": lambda: api.scaled_linear_quantized(X, WEIGHT, to=None),  # type: ignore[arg-type]
    "to is 'nvfp4': a ScaledFormat is needed": lambda: api.scaled_linear_quantized(X, WEIGHT, to="nvfp4"),  # type: ignore[arg-type]
    "dtype is float32": lambda: api.scaled_linear(X, WEIGHT, dtype=torch.float32),
    "activation is 'silu'": lambda: api.scaled_linear(X, WEIGHT, activation="silu"),  # type: ignore[arg-type]
    "scaled_linear has no kernel 'fastest'": lambda: api.scaled_linear(X, WEIGHT, kernel="fastest"),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        WRONG[message]()


ONES = torch.ones(4, 64)
TILED = scaled_format("mxfp4-tiled")
Given = tuple[Callable[..., Quantized], tuple[Any, ...]]
NOT_QUANTIZED: dict[str, Given] = {
    "kind is nvfp4: e4m3 with scales in order is needed here, use mma_quantized for nvfp4": (quantized, (ONES, NVFP4)),
    "kind is mxfp8: e4m3 with scales in order is needed here, use mma_quantized for mxfp8": (quantized, (ONES, MXFP8)),
    "kind is mxfp4-tiled: e4m3 with scales in order is needed here, use pack_experts": (quantized, (ONES, TILED)),
    "kind is 'row': a ScaledFormat is needed": (quantized, (ONES, "row")),
    "x is a list: a tensor is needed": (quantized, ([1.0], ROW_SCALED)),
    "x is float32 (64,): floats [rows, columns] are needed": (quantized, (ONES[0], ROW_SCALED)),
    "x is int32 (4, 64): floats [rows, columns] are needed": (quantized, (ONES.int(), ROW_SCALED)),
    "scale is a float: a tensor is needed": (quantized, (ONES, TENSOR_SCALED, 1.0)),
    "scale is float32 (3,): float32 [4] is needed for e4m3-row of (4, 64)": (
        quantized,
        (ONES, ROW_SCALED, torch.ones(3)),
    ),
    "scale is float16 (4,): float32 [4]": (quantized, (ONES, ROW_SCALED, torch.ones(4).half())),
    "kind is e4m3-row: one of mxfp8, mxfp4, nvfp4 is needed, use quantized for others": (
        mma_quantized,
        (ONES, ROW_SCALED),
    ),
    "kind is None: a ScaledFormat is needed": (mma_quantized, (ONES, None)),
    "x has 33 columns: a multiple of 2 is needed, nvfp4 packs them": (mma_quantized, (ONES[:, :33], NVFP4)),
    "x is float32 (64,): floats": (mma_quantized, (ONES[0], NVFP4)),
    "global_scale is None: a finite number is needed": (mma_quantized, (ONES, NVFP4, None)),
    "global_scale has shape (2,): one number is needed": (mma_quantized, (ONES, NVFP4, torch.ones(2))),
    "matrix is a Tensor: a Quantized is needed": (in_mxfp8, (ONES,)),
    "matrix.kind is e4m3-row: one of e4m3-1x128-e8m0, e4m3-128x128-e8m0 is needed": (
        in_mxfp8,
        (quantized(ONES, ROW_SCALED),),
    ),
    "matrix.values is None: a tensor is needed": (
        in_mxfp8,
        (quantized(ONES, GROUP_SCALED_E8M0)._replace(values=None),),  # type: ignore[arg-type]
    ),
    "matrix.scale is float8_e8m0fnu (3, 1): float8_e8m0fnu [4, 1] is needed": (
        in_mxfp8,
        (quantized(ONES, GROUP_SCALED_E8M0)._replace(scale=quantized(ONES[:3], GROUP_SCALED_E8M0).scale),),
    ),
}


@pytest.mark.parametrize("message", NOT_QUANTIZED)
def test_what_cannot_be_quantized_is_named(message: str) -> None:
    function, given = NOT_QUANTIZED[message]
    with pytest.raises(InvalidInput, match=re.escape(message)):
        function(*given)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_matrices_without_elements(kind: ScaledFormat) -> None:
    """One scale of all of a batch is that of zeros, as is one of a row without columns."""
    for shape in ((0, 64), (4, 0), (0, 0)):
        found = quantized(torch.ones(shape), kind)
        assert found.values.shape == shape
        assert found.scale.shape == kind.scale_shape(*shape)
        if not kind.blocked:
            assert found.scale.equal(torch.full_like(found.scale, 1 / 512 / 448))


def test_scales_by_columns_are_recognised() -> None:
    by_columns = column_major(5, 3, torch.float32, torch.device("cpu")).copy_(X.scale)
    assert by_columns.stride() == (1, 8)
    apart = torch.ones(5, 6)[:, ::2].copy_(X.scale)
    wanted = api.scaled_linear(X._replace(scale=X.scale.contiguous()), WEIGHT)
    for scale in (by_columns, apart):
        assert api.scaled_linear(X._replace(scale=scale), WEIGHT).equal(wanted)
