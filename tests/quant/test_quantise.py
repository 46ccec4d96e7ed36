# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel that quantises to e4m3, on the emulator: the bits of its definition, of the right rows."""

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

import emulator
from dsl_backend.gemm.host import matrix, vector
from dsl_backend.quant.cute import kernel as quantise
from dsl_backend.quant.cute.kernel import QuantiseKey
from dsl_backend.quant.format import GROUP, GROUP_SCALED, ROW_SCALED
from dsl_backend.quant.reference import scales_of
from dsl_backend.runtime import toolkit
from tests.mistakes import Mistake, spoilt

SMS = 2
UNTOUCHED = 0x5A


class Quantising(NamedTuple):
    """A launch.

    Attributes:
        columns: of x; some of its last group may be missing.
        at_once: threads that have one row each.
        count: rows that count, read on the device; None is all.
        listed: rows of a list, in place of all.
    """

    id: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    by_group: bool = True
    at_once: int = quantise.AT_ONCE
    count: int | None = None
    listed: tuple[int, ...] | None = None


LIST = (3, -1, 0, 12, -1, 7, 10, 1, -1, 4, 5)
CASES = (
    Quantising("a row of a thread", 13, 400),
    Quantising("four rows", 13, 400, at_once=128),
    Quantising("two rows", 13, 400, at_once=512),
    Quantising("four rows in float16", 13, 400, torch.float16, at_once=128),
    Quantising("four rows in float32", 13, 400, torch.float32, at_once=128),
    Quantising("four rows where some count", 13, 656, at_once=128, count=9),
    Quantising("four rows where one counts", 13, 656, at_once=128, count=1),
    Quantising("no row counts", 13, 656, at_once=128, count=0),
    Quantising("a list", 13, 400, listed=LIST),
    Quantising("four rows of a list", 13, 400, at_once=128, listed=LIST),
    Quantising("scales of rows", 7, 400, by_group=False),
    Quantising("scales of rows that registers do not hold", 2, 20496, by_group=False, count=1),
    Quantising("scales of rows in float32", 3, 9232, torch.float32, by_group=False),
    Quantising("scales of rows of a list", 13, 272, by_group=False, listed=LIST),
)
BY_ID = {one.id: one for one in CASES}
QUICK = ("a row of a thread", "four rows", "scales of rows that registers do not hold")
MISTAKES = (
    ("four rows", Mistake("a row twice", quantise, "first + j * step, end", "first + step * (j % 2), end")),
    ("four rows", Mistake("another row's scale", quantise, "(thread & (WARP - self.lanes)) + j", "j")),
    ("four rows", Mistake("half of the lanes", quantise, "levels, lanes.bit_length() - 1", "levels, 3")),
    ("four rows", Mistake("half of an exchange", quantise, "high if upper else low, received", "low, received")),
    (
        "four rows",
        Mistake(
            "rows that are left out",
            quantise,
            "cute.ceil_div(rows, cutlass.min(",
            "cutlass.max(1, rows // cutlass.min(",
        ),
    ),
    (
        "four rows where some count",
        Mistake(
            "no maxima of later rows",
            quantise,
            "if j * step < rows:\n                maxima",
            "if j < 1:\n                maxima",
        ),
    ),
    ("four rows of a list", Mistake("factors out of place", quantise, "value_of(factors, lane)", "factors[0]")),
    ("a list", Mistake("a row that does not exist", quantise, "item, rRow, -1)", "item, rRow, 0)")),
)


def numbers(case: Quantising) -> torch.Tensor:
    """X: rows with space between, magnitudes of many groups, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    padded = torch.randn(case.rows, case.columns + 16, generator=generator)
    padded *= torch.logspace(-14, 4, case.rows)[torch.randperm(case.rows, generator=generator), None]
    padded[0, :GROUP] = torch.tensor([0.0, -0.0]).repeat(GROUP // 2)
    padded[1, 5::GROUP] = torch.nan
    padded[1, GROUP : 2 * GROUP] = torch.nan
    padded[-1, 77::GROUP], padded[-1, 14] = -torch.inf, torch.inf
    return padded.to(case.dtype)[:, : case.columns]


class Found(NamedTuple):
    out: torch.Tensor
    scale: torch.Tensor


def blank(case: Quantising) -> Found:
    kind = GROUP_SCALED if case.by_group else ROW_SCALED
    out = torch.full((case.rows, case.columns + 32), UNTOUCHED, dtype=torch.uint8)[:, : case.columns]
    return Found(out, torch.full(kind.scale_shape(case.rows, case.columns), -1.0))


def factors_of(listed: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, len(listed))


def expected(case: Quantising) -> Found:
    kind, x = GROUP_SCALED if case.by_group else ROW_SCALED, numbers(case).float()
    found, scale = blank(case), scales_of(x, kind)
    of_each = scale.repeat_interleave(GROUP, 1)[:, : case.columns] if case.by_group else scale[:, None]
    values = (x * (1.0 / of_each)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    rows = range(case.rows if case.count is None else case.count)
    pairs = [(row, 1.0) for row in rows]
    if case.listed is not None:
        pairs = [*zip(case.listed, factors_of(case.listed), strict=True)]
    for row, factor in pairs:
        if row >= 0:
            found.out[row], found.scale[row] = values[row], scale[row] * factor
    return found


def run(case: Quantising, schedule: str, module: ModuleType = quantise) -> Found:
    x, found, columns = numbers(case), blank(case), cute.sym_int(divisibility=16)
    rows = cute.sym_int()
    scale = make_fake_tensor(Float32, (rows, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
    if not case.by_group:
        scale = vector(Float32, rows)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    fakes = [matrix(case.dtype, rows, columns), matrix(torch.uint8, rows, columns), scale]
    one = module.Quantise(QuantiseKey(case.by_group, case.dtype))
    with emulator.device("sm_90a", sms=SMS, schedule=schedule, seed=1, strict=True):
        if case.listed is not None:
            listed = module.ListedRows(torch.tensor(case.listed, dtype=torch.int32), factors_of(case.listed))
            given = module.ListedRows(vector(Int32, cute.sym_int()), vector(Float32, cute.sym_int()))
            toolkit.compiled(one.launch_listed, (*fakes, given, stream), "sm_90a", "")(x, *found, listed)
        elif case.count is not None:
            count = torch.tensor([case.count], dtype=torch.int32)
            toolkit.compiled(one.launch, (*fakes, vector(Int32, cute.sym_int()), stream), "sm_90a", "")(
                x, *found, count
            )
        else:
            toolkit.compiled(one, (*fakes, stream), "sm_90a", "")(x, *found)
    return found


def check(case: Quantising, found: Found) -> None:
    """Raises AssertionError where a bit of a row is another, or a row is written that is not to be."""
    wanted = expected(case)
    assert torch.equal(found.scale, wanted.scale)
    # Signs of NaN are anything.
    same = (found.out == wanted.out) | ((found.out & 0x7F == 0x7F) & (wanted.out & 0x7F == 0x7F))
    assert same.all(), f"{int((~same).sum())} elements"


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one in CASES]
)
def test_bits(case: Quantising, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "AT_ONCE", case.at_once)
    check(case, run(case, "lazy"))


@pytest.mark.rest
@pytest.mark.parametrize(("of", "mistake"), [pytest.param(of, one, id=one.id) for of, one in MISTAKES])
def test_mistake_is_found(of: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, case = spoilt(mistake, tmp_path), BY_ID[of]
    monkeypatch.setattr(module, "AT_ONCE", case.at_once)
    with pytest.raises((emulator.EmulatorError, AssertionError)):
        check(case, run(case, "lazy", module))
