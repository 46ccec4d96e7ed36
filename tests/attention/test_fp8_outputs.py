# SPDX-License-Identifier: Apache-2.0
"""Outputs in e4m3 with one scale: what is refused, kernels on every schedule, and mistakes in the kernels' source.

Results are also tested with the other cases, whose ids begin with `fp8-out`.
"""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.errors import InvalidInput
from dsl_backend.quant.format import MXFP8, TENSOR_SCALED
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import Case, by_id, mla
from dsl_backend.testing.check import check_case
from dsl_backend.testing.numerics import before_rounding

CASE = by_id("fp8-out")


def run(case: Case = CASE, **changed: Any) -> torch.Tensor:
    problem = case.problem()
    plan = api.plan(problem.spec, problem.batch, kernel="reference")
    return api.run(plan, problem.q, problem.keys, problem.values, **problem.extras | changed)


@pytest.mark.parametrize("name", ["fp8-out", "fp8-out-splits", "fp8-out-invariant"])
def test_the_reference(name: str) -> None:
    check_case(by_id(name), "reference", "cpu")


def test_outputs_have_8_bits() -> None:
    assert run().dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_has_any_shape_of_one_number(shape: tuple[int, ...]) -> None:
    scale = CASE.problem().out_scale
    assert scale is not None
    assert torch.equal(run(out_scale=scale.view(shape)).view(torch.uint8), run().view(torch.uint8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out_scale": None}, "outputs in e4m3-tensor need out_scale"),
        ({"out_scale": torch.ones(6)}, "out_scale is float32 (6,) on cpu: one float32 on cpu is needed"),
        ({"out_scale": torch.ones(1).half()}, "out_scale is float16 (1,) on cpu: one float32"),
        ({"out_scale": 1.0}, "out_scale is a float: a tensor is needed"),
        ({"out": torch.zeros(28, 6, 64, dtype=torch.bfloat16)}, "out is bfloat16: float8_e4m3fn is needed"),
    ],
)
def test_other_tensors_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(**changed)


def test_a_scale_of_other_outputs_is_refused() -> None:
    with pytest.raises(InvalidInput, match="out_scale was given, and outputs are bfloat16"):
        run(replace(CASE, fp8_out=False), out_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        (CASE.spec, MXFP8, "out_format is mxfp8: None, or e4m3-tensor or nvfp4 with"),
        (mla(16).spec, TENSOR_SCALED, "out_format is e4m3-tensor with the latent values of MLA: None, or"),
        (CASE.spec, "e4m3", "out_format is 'e4m3': a ScaledFormat"),
    ],
    ids=["mxfp8", "mla", "text"],
)
def test_layers_that_have_none(spec: Any, kind: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        replace(spec, out_format=kind)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows_that_are_no_vectors_are_tritons(arch: str) -> None:
    target, layer = from_arch(arch), replace(CASE, dim=72)
    assert dispatch.choose(Operation.DECODE, replace(layer, fp8_out=False).spec, target).name == "cute"
    assert dispatch.choose(Operation.DECODE, layer.spec, target).name == "triton"
    title = f"dense-decode {target.kernel_arch}"
    judged = dispatch.judge(Operation.DECODE, layer.spec, target)
    (reasons,) = (why for entry, why in judged if (entry.title, entry.name) == (title, "cute"))
    assert reasons == ["value head size 72 is not a multiple of 16 from 16 to 256, 384 or 512"]


def test_the_numbers_that_a_stored_one_may_have_been() -> None:
    """Found by rounding numbers between all neighbours; saturated and subnormal ones too, and NaN."""
    exact = torch.cat([torch.linspace(-500, 500, 4001), torch.linspace(-0.02, 0.02, 801)]).double()
    stored = exact.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(before_rounding(stored, exact), exact)
    off = before_rounding(stored, exact * 1.5)
    assert ((off - exact * 1.5).abs() > 0)[exact.abs() > 0.01].float().mean() > 0.7
    one, nan = (torch.tensor([number]) for number in (1.0, torch.nan))
    assert before_rounding(one.to(torch.float8_e4m3fn), nan.double()).item() == 1.0
    assert before_rounding(nan.to(torch.float8_e4m3fn), one.double()).isnan().all()


# Rows that are split and such that are not; heads whose columns no quad of lanes divides; a scale of the values too.
SMALL = Case(
    q_lens=(2, 1, 3), kv_lens=(300, 40, 70), heads=(4, 2), dim=80, page=32, fp8=True, fp8_out=True, scales_by_head=True
)
NARROW = replace(SMALL, dim=64)
# Whole key ranges, and rows of two work tiles.
LONG = Case(q_lens=(140, 20), kv_lens=(200, 60), heads=(2, 1), page=32, window=(90, None), fp8_out=True)


def emulate(arch: str, index: int, case: Case = SMALL, fresh: bool = False) -> None:
    """A case on one of the schedules. SM100's outputs go through shared memory, those of LONG do not.

    Args:
        fresh: compile its kernel anew, since cached ones were compiled from other source.
    """
    from tests.attention import emulated

    folder = f"dsl_backend.attention.cute.{from_arch(arch).kernel_arch}"
    host, configs, kernel = (
        importlib.import_module(f"{folder}.dense_{name}") for name in ("host", "configs", "kernel")
    )
    base = host.Prefill if case is LONG else host.SplitKV
    if arch == "sm_90a":
        dequant_stages = 2 if case.fp8 else 0
        config = configs.DenseConfig(
            groups=1, tile_n=64, stages=2, query_stages=1, min_split_tiles=1, dequant_stages=dequant_stages
        )
    elif case is LONG:
        config = configs.DenseConfig(tile_n=64, stages=2, query_stages=2, shared_s=True, direct_output=True)
    else:
        config = replace(configs.default_split_config(case.spec), min_split_tiles=1)

    fresh_class = emulated.compiled_anew(base, kernel.DenseForward)

    def make(planner: Planner, short: bool) -> Kernel:
        found: Kernel = (fresh_class if fresh else base)(planner.spec, planner.target, emulated.scratch(), config)
        return found

    emulated.emulate(case, arch, make, index, sms=2)


rest = pytest.mark.rest
on_both = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])


@pytest.mark.parametrize("index", [pytest.param(0, marks=rest), 1, pytest.param(2, marks=rest)])
@on_both
def test_every_schedule(arch: str, index: int) -> None:
    pytest.importorskip("cutlass")
    emulate(arch, index)


@rest
@pytest.mark.parametrize("index", range(3))
@on_both
def test_long_queries(arch: str, index: int) -> None:
    pytest.importorskip("cutlass")
    emulate(arch, index, LONG)


@rest
@on_both
def test_kernels_with_products_in_8_bits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from tests.attention import test_fp8_queries

    monkeypatch.setattr(test_fp8_queries, "SMALL", replace(test_fp8_queries.SMALL, fp8_out=True))
    test_fp8_queries.emulate(arch)


# (SM, id, module, what its source says once, what it would say, case, where: names of modules, or a class).
MISTAKES = (
    (
        "sm_90a",
        "the scale left out",
        "attention.cute.score_mod",
        "cutlass.Float32(1.0) / scoring.out_scale[0]",
        "cutlass.Float32(1.0)",
        SMALL,
        ("attention.cute.combine.out_factor_of", "attention.cute.rows.out_factor_of"),
    ),
    (
        "sm_90a",
        "pairs of lanes swapped",
        "attention.cute.rows",
        "of_even, of_odd = (received if odd else kept), (kept if odd else received)",
        "of_odd, of_even = (received if odd else kept), (kept if odd else received)",
        SMALL,
        ("attention.cute.rows.store_acc_row_e4m3",),
    ),
    (
        "sm_90a",
        "the last groups of columns lost",
        "attention.cute.rows",
        "if cutlass.const_expr(j + 4 < count):",
        "if cutlass.const_expr(j + 8 < count):",
        NARROW,
        ("attention.cute.rows.store_acc_row_e4m3",),
    ),
    (
        "sm_90a",
        "one number for both columns of a lane",
        "primitives.accumulators",
        "result[i] = quad[i]",
        "result[i] = quad[0]",
        NARROW,
        ("attention.cute.combine.round_to",),
    ),
    (
        "sm_100a",
        "vectors as far apart as those of 16 bits",
        "attention.cute.tiles",
        "offset + column * vector)",
        "offset + column * VECTOR)",
        SMALL,
        ("attention.cute.tiles.store_chunk",),
    ),
    (
        "sm_100a",
        "a group of columns in the place of another",
        "attention.cute.sm100.dense_correction",
        "column, rO = group * O_COLUMNS, self.rounded(",
        "column, rO = group // 2 * O_COLUMNS, self.rounded(",
        LONG,
        ("attention.cute.sm100.dense_correction.CorrectionWarps",),
    ),
)


@rest
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_mistakes_are_found(mistake: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from emulator.errors import EmulatorError
    from tests.mistakes import Mistake, spoil_methods, spoilt

    arch, name, source, said, wrong, case, places = mistake
    found = spoilt(Mistake(name, importlib.import_module(f"dsl_backend.{source}"), said, wrong), tmp_path)
    for place in places:
        module, _, attribute = f"dsl_backend.{place}".rpartition(".")
        right = getattr(importlib.import_module(module), attribute)
        if isinstance(right, type):
            spoil_methods(right, found, monkeypatch)
        else:
            monkeypatch.setattr(importlib.import_module(module), attribute, getattr(found, attribute))
    with pytest.raises((AssertionError, EmulatorError)):
        emulate(arch, 1, case, fresh=True)
