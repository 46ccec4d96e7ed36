# SPDX-License-Identifier: Apache-2.0
"""Packed weights of 4 and 8 bits: the layout that is documented, and what is refused."""

import itertools

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.quant.weight_only import WeightOnlyFormat, base, by_tile, dequantized, pack, unpack
from dsl_backend.testing.weight_only import WeightOnlyCase, tensors

KINDS = [
    *(WeightOnlyFormat(group=group, zero_points=zeros) for group in (128, 256, None) for zeros in (False, True)),
    WeightOnlyFormat(bits=8),
    WeightOnlyFormat(bits=8, group=None),
]
DTYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unpack_gives_back(kind: WeightOnlyFormat, dtype: torch.dtype) -> None:
    case = WeightOnlyCase(rows=1, n=104, k=456, kind=kind, dtype=dtype)
    given = tensors(case, "cpu")
    assert given.packed.shape == kind.packed_shape(case.n, case.k) == (2, 4, kind.tile_words)
    values, scale, *zero_points = unpack(given.packed, dtype, kind)
    assert torch.equal(values[: case.n, : case.k], given.values)
    assert not values[case.n :].any()
    assert not values[:, case.k :].any()
    assert torch.equal(scale[: case.n], by_tile(given.scale, kind, 4))
    assert not scale[case.n :].any()
    if kind.zero_points:
        assert torch.equal(zero_points[0][: case.n], by_tile(given.zero_points, kind, 4))


def test_one_tile() -> None:
    kind = WeightOnlyFormat()
    given = tensors(WeightOnlyCase(rows=1, n=8, k=8, kind=kind), "cpu")
    assert torch.equal(unpack(given.packed, torch.bfloat16, kind)[0][:8, :8], given.values)


@pytest.mark.parametrize("bits", [4, 8])
def test_layout_is_the_documented_one(bits: int) -> None:
    """Every value lies where the module's text says."""
    kind = WeightOnlyFormat(bits=bits)
    given = tensors(WeightOnlyCase(rows=1, n=128, k=256, kind=kind), "cpu")
    packed = given.packed.tolist()
    for i, g, b, s, h, c, e in itertools.product(*map(range, (4, 8, 2, 8, 2, 4, 2))):
        row, column, thread = 16 * i + g + 8 * b, 16 * s + 8 * h + 2 * c + e, 32 * i + 4 * g + c
        word, number = (s, b + 2 * h + 4 * e) if bits == 4 else (2 * s + h, b + 2 * e)
        at = (word // 4 * 128 + thread) * 4 + word % 4
        found = packed[1][1][at] >> (bits * number) & ((1 << bits) - 1)
        assert found == given.values[64 + row, 128 + column]


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_counts_in_ones(dtype: torch.dtype) -> None:
    """The next number is one larger, and the last bits count."""
    low = torch.tensor(float(base(dtype)), dtype=dtype).view(torch.int16)
    assert [(low + i).view(dtype).item() - base(dtype) for i in range(16)] == list(range(16))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dequantized(kind: WeightOnlyFormat) -> None:
    given = tensors(WeightOnlyCase(rows=1, n=8, k=384, kind=kind), "cpu")
    found = dequantized(given.values, given.scale, given.zero_points, kind)
    group = 0 if kind.group is None else 300 // kind.group
    zero = kind.middle if given.zero_points is None else int(given.zero_points[3, group])
    assert found[3, 300] == (int(given.values[3, 300]) - zero) * given.scale[3, group].double()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"bits": 3}, "bits is 3: one of 4, 8"),
        ({"bits": 4.0}, "bits is 4.0: one of 4, 8"),
        ({"bits": "4"}, "bits is '4': one of 4, 8"),
        ({"group": 64}, "group is 64: a multiple of 128"),
        ({"group": -1}, "group is -1"),
        ({"bits": 8, "zero_points": True}, "zero_points is True with 8 bits"),
    ],
)
def test_refused_formats(facts: dict, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        WeightOnlyFormat(**facts)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"values": torch.zeros(8, 384)}, "dtype of values is float32"),
        ({"values": torch.full((8, 384), 16, dtype=torch.uint8)}, "values has 16: 4 bits hold 0 to 15"),
        ({"values": torch.zeros(8, dtype=torch.uint8)}, r"values has shape \(8,\)"),
        ({"scale": torch.zeros(8, 2, dtype=torch.float16)}, r"scale has shape \(8, 2\): \(8, 3\) is needed"),
        ({"scale": torch.zeros(8, 3)}, "dtype of scale is float32"),
        ({"values": [[1]]}, "values is a list: a tensor is needed"),
        ({"scale": [1.0]}, "scale is a list: a tensor is needed"),
        ({"scale": None}, "scale is None: a tensor is needed"),
        ({"scale": torch.zeros(8, 3, dtype=torch.float16, device="meta")}, "scale is on meta, values on cpu"),
        ({"zero_points": [1]}, "zero_points is a list: a tensor is needed"),
        ({"kind": "int4"}, "kind is 'int4': a WeightOnlyFormat is needed"),
        ({"values": torch.zeros(60, 384, dtype=torch.uint8)}, "values has 60 rows: a multiple of 8 is needed"),
        ({"values": torch.zeros(8, 380, dtype=torch.uint8)}, "values has 380 columns: a multiple of 8 is needed"),
        ({"zero_points": None}, "zero_points is missing"),
        ({"zero_points": torch.zeros(3, 8, dtype=torch.uint8)}, r"zero_points has shape \(3, 8\)"),
    ],
)
def test_refused_weights(changed: dict, words: str) -> None:
    kind = WeightOnlyFormat(zero_points=True)
    parts = tensors(WeightOnlyCase(rows=1, n=8, k=384, kind=kind), "cpu")._asdict()
    parts = {name: parts[name] for name in ("values", "scale", "zero_points")}
    with pytest.raises(InvalidInput, match=words):
        pack(**{**parts, "kind": kind, **changed})
