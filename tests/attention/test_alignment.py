# SPDX-License-Identifier: Apache-2.0
"""Tensors that TMA cannot take are refused in every launch, although a layout's strides are looked at once."""

import pytest
import torch

pytest.importorskip("cutlass")

from dsl_backend.attention.cute import host
from dsl_backend.attention.cute.host import Alignment
from dsl_backend.attention.protocol import Misaligned

ROWS = torch.zeros(1 << 12, dtype=torch.bfloat16)
ROWS = ROWS[-ROWS.data_ptr() // 2 % 64 :]  # begins at a multiple of 128 bytes


def rows(offset: int, stride: int) -> torch.Tensor:
    return ROWS[offset:].as_strided((4, 8), (stride, 1))


def test_addresses_of_a_known_layout_are_looked_at() -> None:
    alignment = Alignment()
    for _ in range(2):
        alignment.check(("q", "keys"), (rows(0, 16), rows(8, 64)))
        with pytest.raises(Misaligned, match="keys begins at"):
            alignment.check(("q", "keys"), (rows(0, 16), rows(4, 64)))


@pytest.mark.parametrize(("stride", "taken"), [(8, True), (24, True), (12, False), (9, False)])
def test_strides(stride: int, taken: bool) -> None:
    alignment = Alignment()
    for _ in range(2):
        if taken:
            alignment.check(("q",), (rows(0, stride),))
        else:
            with pytest.raises(Misaligned, match=f"q begins at 0x.* strides of .{2 * stride}. bytes"):
                alignment.check(("q",), (rows(0, stride),))


def test_known_layouts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_LAYOUTS", 2)
    alignment = Alignment()
    for stride in (8, 16, 24, 8):
        alignment.check(("q",), (rows(0, stride),))
        assert len(alignment.layouts) <= 2
