# SPDX-License-Identifier: Apache-2.0
"""Number formats against torch's and numpy's, and against the tables of their specifications."""

import numpy as np
import pytest
import torch

from emulator.machine.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    FORMATS,
    UE4M3,
    UE8M0,
    Format,
    Rounding,
    decode_tf32,
    encode_tf32,
)

TORCH = {F16: torch.float16, BF16: torch.bfloat16, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def samples() -> np.ndarray:  # type: ignore[type-arg]
    draw = np.random.default_rng(0)
    wide = draw.standard_normal(4000) * 2.0 ** draw.integers(-30, 20, 4000)
    edges = [0.0, -0.0, 448.0, 464.0, 465.0, 57344.0, 61439.0, 61440.0, 65504.0, 65519.0, 65520.0, 2**-9, 2**-10, 3e38]
    return np.concatenate([wide, edges, np.negative(edges)]).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("one", TORCH, ids=lambda one: one.name)
def test_every_code_decodes_as_in_torch(one: Format) -> None:
    codes = np.arange(1 << one.bits, dtype=np.uint16)
    raw = torch.from_numpy(codes.astype(np.uint8 if one.bits == 8 else np.uint16))
    expected = raw.view(TORCH[one]).double().numpy()
    np.testing.assert_array_equal(one.decode(codes), expected)


@pytest.mark.parametrize("one", [F16, BF16, E5M2], ids=lambda one: one.name)
def test_nearest_is_torch_rounding(one: Format) -> None:
    values = samples()
    expected = torch.from_numpy(values).float().to(TORCH[one]).double().numpy()
    np.testing.assert_array_equal(one.decode(one.encode(values, saturate=False)), expected)


def test_e4m3_saturates() -> None:
    values = samples()
    clamped = torch.from_numpy(values).float().clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(E4M3.decode(E4M3.encode(values, saturate=True)), clamped)
    assert np.isnan(E4M3.decode(E4M3.encode(np.array([465.0, 464.0]), saturate=False))).tolist() == [True, False]


@pytest.mark.parametrize("one", FORMATS.values(), ids=lambda one: one.name)
def test_every_finite_value_encodes_to_its_code(one: Format) -> None:
    codes = np.arange(1 << one.bits, dtype=np.uint16)
    finite = codes[np.isfinite(one.decode(codes))]
    for rounding in Rounding:
        np.testing.assert_array_equal(one.encode(one.decode(finite), rounding, saturate=True), finite)


def test_tables_of_the_small_formats() -> None:
    assert E2M1.finite.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (E2M3.largest, float(E2M3.finite[1])) == (7.5, 0.125)
    assert (E3M2.largest, float(E3M2.finite[1])) == (28.0, 0.0625)
    assert UE8M0.decode(np.array([0, 127, 128, 254])).tolist() == [2.0**-127, 1, 2, 2.0**127]
    assert np.isnan(UE8M0.decode(np.array([255])))
    assert UE4M3.largest == 448


def test_directed_roundings() -> None:
    values = np.array([2.4, 2.5, 2.6, -2.6, 5.1, 100.0])
    assert E2M1.decode(E2M1.encode(values, Rounding.ZERO, saturate=True)).tolist() == [2, 2, 2, -2, 4, 6]
    assert E2M1.decode(E2M1.encode(values, Rounding.NEAREST, saturate=True)).tolist() == [2, 2, 3, -3, 6, 6]
    assert UE8M0.decode(UE8M0.encode(np.array([1.0, 1.1, 3.0]), Rounding.UP, saturate=True)).tolist() == [1, 2, 4]
    assert UE8M0.decode(UE8M0.encode(np.array([1.0, 1.1, 3.0]), Rounding.ZERO, saturate=True)).tolist() == [1, 1, 2]


def test_nan_and_relu() -> None:
    values = np.array([np.nan, -3.0, 3.0])
    assert BF16.encode(values, saturate=False).tolist() == [0x7FFF, 0xC040, 0x4040]
    assert BF16.encode(values, saturate=False, relu=True).tolist() == [0x7FFF, 0, 0x4040]
    assert E4M3.encode(values, saturate=True).tolist()[0] == 0x7F
    assert E2M1.encode(values, saturate=True).tolist()[0] == 7, "no NaN: the largest value"


def test_tf32() -> None:
    one, half = np.float32(1), np.float32(1 + 2**-11)
    values = np.array([one, half, 1 + 2**-10 + 2**-11, np.inf, np.nan], dtype=np.float32)
    nearest = encode_tf32(values, Rounding.NEAREST).view(np.float32)
    assert nearest[:4].tolist() == [1, 1, 1 + 2**-9, np.inf]
    away = encode_tf32(values, Rounding.AWAY).view(np.float32)
    assert away[:4].tolist() == [1, 1 + 2**-10, 1 + 2**-9, np.inf]
    assert encode_tf32(values, Rounding.ZERO)[4] == 0x7FFFFFFF
    assert decode_tf32(np.array([half]).view(np.uint32)).tolist() == [1]
