# SPDX-License-Identifier: Apache-2.0
"""Outputs in NVFP4: what is refused, SM100's kernels on every schedule, and mistakes in the kernels' source.

Results are also tested with the other cases, whose ids begin with `nvfp4-out`.
"""

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel, Misaligned
from dsl_backend.errors import InvalidInput
from dsl_backend.quant.format import NVFP4
from dsl_backend.quant.reference import mma_quantized, swizzled, swizzled_places
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.testing.cases import Case, by_id, mla
from dsl_backend.testing.check import check_case, empty_result
from dsl_backend.testing.numerics import block_before_rounding
from tests.mistakes import Mistake, spoilt

CASE = by_id("nvfp4-out")
ROWS = sum(CASE.q_lens) + 5


def run(case: Case = CASE, **changed: Any) -> torch.Tensor:
    problem = case.problem()
    if case.nvfp4_out:
        changed = {"out": empty_result(problem).stored} | changed
    plan = api.plan(problem.spec, problem.batch, kernel="reference")
    return api.run(plan, problem.q, problem.keys, problem.values, **problem.extras | changed)


@pytest.mark.parametrize("name", ["nvfp4-out", "nvfp4-out-splits", "nvfp4-out-splits-128", "nvfp4-out-invariant"])
def test_the_reference(name: str) -> None:
    check_case(by_id(name), "reference", "cpu")


def test_outputs_are_those_of_a_quantised_matrix() -> None:
    """The layout that SM100's matrix products take, as the package quantises what comes to them in 16 bits."""
    case = Case(q_lens=(130,), kv_lens=(130,), heads=(2, 1), nvfp4_out=True)
    problem, plain = case.problem(), replace(case, nvfp4_out=False, dtype=torch.float32).problem()
    scale = problem.out_scale
    assert scale is not None
    stored = empty_result(problem).stored
    assert isinstance(stored, tuple)
    kept = run(case, out=stored)
    for name in ("q", "keys", "values"):
        setattr(plain, name, getattr(problem, name).float())
    spec = plain.spec
    exact = api.run(api.plan(spec, plain.batch, kernel="reference"), plain.q, plain.keys, plain.values)[:130]
    want = mma_quantized(exact.flatten(1), NVFP4, 1 / scale)
    assert kept.dtype == torch.uint8
    assert (kept[:130].flatten(1) != want.values).float().mean() < 0.001
    places = swizzled_places(torch.arange(130), 8)
    own, found = (one.view(torch.uint8).view(-1)[places] for one in (want.scale, stored[1]))
    assert torch.equal(found, own)


def test_places_of_scales() -> None:
    codes = torch.arange(300 * 12).view(300, 12).to(torch.uint8)
    found = swizzled(codes).view(-1)[swizzled_places(torch.arange(300), 12)]
    assert torch.equal(found, codes)


ELEMENTS, SCALES = torch.zeros(ROWS, 2, 32, dtype=torch.uint8), torch.zeros(256, 8).to(NVFP4.scales)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out_scale": None}, "outputs in nvfp4 need out_scale"),
        ({"out": None}, "outputs in nvfp4 need out in two parts: elements, and scales of blocks"),
        ({"out": ELEMENTS}, "outputs in nvfp4 need out in two parts: elements, and scales of blocks"),
        ({"out": (ELEMENTS, SCALES, SCALES)}, "out has 3 parts: one tensor is needed, or of nvfp4 two"),
        ({"out": (ELEMENTS, SCALES[:128])}, "out[1] is float8_e4m3fn (128, 8)"),
        ({"out": (ELEMENTS, SCALES[:, :4])}, "float8_e4m3fn (256, 8) on cpu is needed"),
        ({"out": (ELEMENTS, SCALES.view(8, 256).t())}, "with strides (1, 256)"),
        ({"out": (ELEMENTS, torch.zeros(256, 8))}, "out[1] is float32 (256, 8)"),
        ({"out": (ELEMENTS, 1.0)}, "out[1] is a float: a tensor is needed"),
        (
            {"out": (torch.zeros(ROWS, 2, 64, dtype=torch.uint8), SCALES)},
            f"out has shape ({ROWS}, 2, 64): ({ROWS - 2}, 2, 32)",
        ),
        ({"out": (ELEMENTS.float(), SCALES)}, "out is float32: uint8 is needed"),
    ],
)
def test_other_tensors_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(**changed)


@pytest.mark.parametrize(("name", "kind"), [("fp8-out", "in e4m3-tensor"), ("mha", "unquantised")])
def test_two_parts_of_other_outputs_are_refused(name: str, kind: str) -> None:
    out = empty_result(by_id(name).problem()).out
    with pytest.raises(InvalidInput, match=f"out was given in two parts, and outputs are {kind}: one tensor"):
        run(by_id(name), out=(out, SCALES))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (mla(16), "out_format is nvfp4 with the latent values of MLA: None, or"),
        (Case(dim=72), "self.head_dim_v=72 columns: head_dim_v must be a multiple of 16"),
        (Case(dim=80, heads=(2, 1)), "self.heads_q=2 times self.head_dim_v=80 columns"),
    ],
    ids=["mla", "72", "160 columns"],
)
def test_layers_that_have_none(case: Case, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        replace(case.spec, out_format=NVFP4)


@pytest.mark.parametrize("operation", [Operation.DECODE, Operation.PREFILL])
def test_which_kernels_store_it(operation: Operation) -> None:
    """SM90 has no instruction for e2m1; a lane of SM100's stores 16 bytes."""

    def served(arch: str, dim: int) -> tuple[str, list[str]]:
        target, spec = from_arch(arch), Case(dim=dim, heads=(4, 1), nvfp4_out=True).spec
        title = f"dense-{operation.value.removeprefix('attention.')} {target.kernel_arch}"
        judged = dispatch.judge(operation, spec, target)
        (reasons,) = (why for entry, why in judged if (entry.title, entry.name) == (title, "cute"))
        return dispatch.choose(operation, spec, target).name, reasons

    pytest.importorskip("cutlass")
    assert served("sm_100a", 128) == ("cute", [])
    name, reasons = served("sm_100a", 80)
    assert name == "triton"
    assert "value head size 80 is not a multiple of 32 from 16 to 256, 384 or 512" in reasons
    assert served("sm_90a", 128) == ("triton", ["outputs in nvfp4 are those of SM100, which has instructions for e2m1"])


def test_the_numbers_that_stored_ones_may_have_been() -> None:
    """Rounded numbers are found to be themselves; others, in elements or in a scale, are not."""
    random = torch.Generator().manual_seed(1)
    exact = torch.randn(64, 8, 16, generator=random) * torch.logspace(-3.5, 3.5, 64)[:, None, None]
    exact = exact.flatten(1).double()
    found = mma_quantized(exact, NVFP4)
    codes = found.scale.view(torch.uint8).view(-1)[swizzled_places(torch.arange(64), 8)]

    def off(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        near = block_before_rounding(elements, scales.view(NVFP4.scales), exact)
        return (near - exact).abs() / exact.abs().unflatten(1, (8, 16)).amax(2).repeat_interleave(16, 1)

    # The inverse of a scale is rounded, and so is a product with it.
    assert off(found.values, codes).max() < 1e-6
    other = off(found.values ^ 0x10, codes)[8:-8]
    assert (other > 1e-3).float().mean() > 0.3
    other = off(found.values, codes + 1)[8:-8].unflatten(1, (8, 16)).amax(2)
    assert (other > 1e-3).float().mean() > 0.9


def test_a_block_with_a_nan() -> None:
    exact = torch.ones(1, 32).double()
    scales = torch.tensor([[1 / 6, torch.nan]]).to(NVFP4.scales)
    near = block_before_rounding(torch.full((1, 16), 0x77, dtype=torch.uint8), scales, exact)
    assert near[0, :16].isfinite().all()
    assert near[0, 16:].isnan().all()


# SM100's kernels on the emulator


@dataclass(frozen=True)
class Emulated:
    """A case, and the facts of the configuration that serves it.

    Attributes:
        short: its queries are short, and keys are split.
        combined: an output is that of the combine kernel.
        products: in 8 bits.
    """

    case: Case
    short: bool = True
    combined: bool = False
    products: bool = False
    config: tuple[tuple[str, Any], ...] = ()


FEW: dict[str, Any] = {"q_lens": (2, 0, 1), "kv_lens": (300, 0, 70), "page": 32, "nvfp4_out": True}
MANY: dict[str, Any] = {"q_lens": (140, 20), "kv_lens": (200, 60), "page": 32, "nvfp4_out": True}
ONE_GROUP = ("softmax_warpgroups", 1)
LAYERS = {
    # Four columns a lane of the combine kernel; two; and a scale of the values too.
    "splits": Emulated(Case(heads=(4, 2), dim=96, fp8=True, scales_by_head=True, **FEW), combined=True),
    "splits narrow": Emulated(
        Case(heads=(2, 1), dim=64, nan_request=2, **FEW | {"q_lens": (1, 0, 1), "kv_lens": (40, 0, 400)}),
        combined=True,
        config=(("alternate", True), ("tile_n", 64), ("ex2_emulation", 0)),
    ),
    "invariant": Emulated(
        Case(heads=(2, 1), dim=64, batch_invariant=True, **FEW | {"kv_lens": (1300, 0, 70)}), combined=True
    ),
    "swapped": Emulated(
        Case(heads=(4, 1), dim=64, sinks=True, **FEW),
        config=(("alternate", True), ("swap_ab", 16), ("ex2_emulation", 0)),
    ),
    "swapped wide": Emulated(
        Case(heads=(4, 1), dim=128, nan_request=0, **FEW),
        config=(("alternate", True), ("swap_ab", 16), ("ex2_emulation", 0)),
    ),
    "from registers": Emulated(
        Case(heads=(2, 1), window=(90, None), **MANY),
        False,
        config=(("tile_n", 64), ("query_stages", 2), ("shared_s", True), ("direct_output", True)),
    ),
    "ahead": Emulated(Case(heads=(2, 1), nan_request=1, **MANY), False, config=(("tile_n", 64), ("query_stages", 2))),
    "pair": Emulated(
        Case(heads=(1, 1), dim=256, **MANY), False, config=(ONE_GROUP, ("two_cta", True), ("tile_n", 64), ("stages", 3))
    ),
    "slices": Emulated(Case(heads=(1, 1), dim=512, **MANY | {"q_lens": (40,), "kv_lens": (60,)}), False),
    "NVFP4 caches": Emulated(Case(heads=(2, 1), nvfp4=True, **MANY | {"q_lens": (20,), "kv_lens": (90,)}), False),
    "products in 8 bits": Emulated(
        Case(heads=(2, 1), fp8=True, **MANY | {"q_lens": (40, 3), "kv_lens": (133, 90)}),
        False,
        products=True,
        config=(("tile_n", 64), ("stages", 2), ("query_stages", 1), ("late_p_keys", 32), ("ex2_emulation", 0)),
    ),
}
QUICK = [("from registers", 1), ("swapped wide", 0)]


def emulate(layer: Emulated, index: int, fresh: bool = False) -> None:
    """A layer's case on one of the schedules.

    Args:
        fresh: compile its kernel anew, since cached ones were compiled from other source.
    """
    pytest.importorskip("cutlass")
    import emulator
    from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
    from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS
    from dsl_backend.attention.cute.scheduler.split_kv import FIXED_SPLIT_RANGE_FIELDS
    from dsl_backend.attention.cute.sm100 import dense_configs, dense_host, fp8_configs
    from dsl_backend.runtime import toolkit
    from dsl_backend.testing import check, fp8_attention
    from tests.attention import test_sm100_fp8
    from tests.attention.emulated import SCHEDULES, scratch
    from tests.attention.unseen import expected_of

    case, spec = layer.case, layer.case.spec
    if layer.products:
        base: Any = dense_host.Fp8Prefill
        config: Any = fp8_configs.Fp8DenseConfig(**dict(layer.config))
    else:
        base = dense_host.SplitKV if layer.short else dense_host.Prefill
        usual = dense_configs.default_split_config(spec) if layer.short else dense_configs.default_config(spec)
        config = dense_configs.DenseConfig(**dict(layer.config)) if layer.config else usual
        config = replace(config, min_split_tiles=1)

    class Fresh(base):  # type: ignore[misc]
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            tensors = dense_host.fake_nvfp4_tensors(key) if key.kv.nvfp4 else fake_dense_tensors(key)
            return toolkit.compiled(dense_host.kind_of(key)(key), fake_args(key, tensors), target.arch, "")

    def adjust(planner: Planner) -> None:
        kernel: Kernel = (Fresh if fresh else base)(planner.spec, planner.target, workspace, config)
        planner.short = planner.long = (*planner.long[:2], kernel)

    workspace = scratch()
    problem, target = case.problem(), replace(from_arch("sm_100a"), sm_count=2)
    expected, magnitude = expected_of(problem, False)
    name = dispatch.FP8_PRODUCTS if layer.products else "cute"
    with emulator.device(arch="sm_100a", sms=2, schedule=SCHEDULES[index], seed=index, strict=True):
        result = check.run(problem, name, adjust=adjust, target=target, workspace=workspace)
    # Each CTA's split range begins with the number of its splits.
    fields = FIXED_SPLIT_RANGE_FIELDS if case.batch_invariant else SPLIT_RANGE_FIELDS
    assert not layer.combined or (workspace.integers(2 * fields)[: 2 * fields].view(2, fields)[:, 0] > 0).any()
    if layer.products:
        fp8_attention.judge(result, problem, test_sm100_fp8.arithmetic_of(config))
    else:
        check.judge(result, expected, magnitude)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(name, index, marks=() if (name, index) in QUICK else pytest.mark.rest)
        for name in LAYERS
        for index in range(3)
    ],
)
def test_every_schedule(name: str, index: int) -> None:
    emulate(LAYERS[name], index)


def test_scales_that_are_not_aligned() -> None:
    pytest.importorskip("cutlass")
    from dsl_backend.attention.cute.host import bytes_of

    stored = torch.zeros(128 * 8 + 4, dtype=torch.uint8)
    assert bytes_of(stored[4:].view(128, 8)) is not None
    with pytest.raises(Misaligned, match=r"out\[1\] begins at 0x\w+: a multiple of 4 is needed"):
        bytes_of(stored[1:-3].view(128, 8))


OUT, FACTOR = "attention.cute.nvfp4_out", "attention.cute.score_mod"
# What is taken from the module with the mistake.
PLACES = {
    OUT: (f"{OUT}.store_pair", f"{OUT}.store_by_lanes"),
    FACTOR: ("attention.cute.sm100.dense_correction.out_factor_of",),
}
# (id, module, what its source says once, what it would say, layer).
MISTAKES = (
    ("rows of 32 together", OUT, "token % 32 * 16", "token % 16 * 32", "from registers"),
    ("tiles of 128 rows lost", OUT, "token // SWIZZLED_ROWS * atoms", "token // SWIZZLED_ROWS", "from registers"),
    ("the second block's scale first", OUT, "codes[i] =", "codes[1 - i] =", "from registers"),
    ("the largest number with its sign", OUT, "cute.math.absf(value)", "value", "from registers"),
    (
        "a block of few columns",
        OUT,
        "(BLOCK // count).bit_length() - 1",
        "(BLOCK // count).bit_length() - 2",
        "swapped",
    ),
    ("lanes in the place of others", OUT, "lane % sharing * (4", "(lane ^ 1) % sharing * (4", "splits"),
    ("scales of the first block alone", OUT, "lane % (BLOCK // count) == 0", "lane == 0", "splits narrow"),
    ("divided by the scale", FACTOR, "scoring.out_scale[0] if key.nvfp4_out else cutlass", "cutlass", "from registers"),
)


@pytest.mark.rest
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_mistakes_are_found(mistake: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from emulator.errors import EmulatorError

    name, source, said, wrong, layer = mistake
    found = spoilt(Mistake(name, importlib.import_module(f"dsl_backend.{source}"), said, wrong), tmp_path)
    for place in PLACES[source]:
        module, _, attribute = f"dsl_backend.{place}".rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), attribute, getattr(found, attribute))
    with pytest.raises((AssertionError, EmulatorError)):
        emulate(LAYERS[layer], 1, fresh=True)
