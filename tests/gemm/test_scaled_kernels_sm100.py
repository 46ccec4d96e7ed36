# SPDX-License-Identifier: Apache-2.0
"""SM100's kernels of quantised operands on the emulator: right, and without a finding."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from scaled_cases_sm100 import (
    CASES,
    GATED,
    PROMOTED,
    SCALED_64,
    SCALED_128,
    SMEM_BYTES,
    Emulated,
    emulate,
    random_emulated,
    random_few,
)

import emulator
from dsl_backend.errors import Unsupported
from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm100 import scaled_configs
from dsl_backend.gemm.sm100.configs import PromotedSmallMConfig, ScaledSmallMConfig
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.scaled import api, dispatch, eager
from dsl_backend.linear.scaled.cute import host
from dsl_backend.quant.format import MXFP8, NVFP4, ScaledFormat
from dsl_backend.quant.reference import dequantized, in_mxfp8, mma_dequantized, mma_quantized
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.scaled import Outputs, budget_of, check_outputs, tensors

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_REST, FUZZED_IN_FULL = 1, 5, 45
# One of each kernel, and what shares its pipelines with a second CTA.
QUICK = ("two-cta", "mxfp8-gated", "nvfp4-two-cta", "blocks-gated", "nvfp4-to-nvfp4")
# Of the kernel for few rows with scales of blocks, whose other cases take 2 to 8 s each.
LONG = tuple(one.id for one in CASES if one.id.startswith("few-blocks") and one.id != "few-blocks-gated")


def marks_of(one: Emulated, place: int) -> tuple[pytest.MarkDecorator, ...]:
    """Each case under one schedule; under the others where there is time."""
    if place % len(SCHEDULES) or one.id in LONG:
        return (pytest.mark.full,)
    return () if one.id in QUICK else (pytest.mark.rest,)


IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=marks_of(one, i + j))
    for i, one in enumerate(CASES)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("one", "schedule"), IN_TURN)
def test_case(one: Emulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


def marks(seed: int) -> tuple[pytest.MarkDecorator, ...]:
    if seed < FUZZED:
        return ()
    return (pytest.mark.rest,) if seed < FUZZED + FUZZED_IN_REST else (pytest.mark.full,)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=marks(seed)) for seed in range(FUZZED + FUZZED_IN_REST + FUZZED_IN_FULL)]
)
def test_fuzz(seed: int) -> None:
    emulate(random_emulated(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=marks(seed)) for seed in range(FUZZED + FUZZED_IN_REST + FUZZED_IN_FULL)]
)
def test_fuzz_of_few_rows(seed: int) -> None:
    emulate(random_few(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.parametrize("place", [pytest.param(0), pytest.param(1, marks=pytest.mark.rest)])
def test_blocks_of_powers_of_two_through_mxfp8(place: int) -> None:
    """The tensor cores apply scales of 1x128 groups and 128x128 blocks, each as four scale factors."""
    name, config = (("mxfp8", SCALED_64), ("mxfp8-gated", SCALED_128))[place]
    (like,) = (one.case for one in CASES if one.id == name)
    case = replace(like, x="e4m3-1x128-e8m0", weight="e4m3-128x128-e8m0")
    given = tensors(case, "cpu")
    x, weight = in_mxfp8(given.x), in_mxfp8(given.weight)
    for stored, meant in ((x, given.x), (weight, given.weight)):
        assert mma_dequantized(stored).equal(dequantized(meant))
    spec, out = replace(case.spec, x=MXFP8, weight=MXFP8, column_major=False), torch.zeros(case.rows, case.n)
    out = out.to(case.dtype)
    with emulator.device(arch="sm_100a", sms=2, schedule=SCHEDULES[place], strict=True):
        key = scaled_host.key_of(spec, config, False)
        function = scaled_host.build(scaled_configs.kernel(key), key, from_arch("sm_100a"))
        operands = ScaledOperands(x.values, x.scale, weight.values, weight.scale, given.bias, out)
        scaled_host.run(function, config, operands, 2, Workspace(torch.device("cpu")))
    check_outputs(case, Outputs(out, None), budget_of(case, given))


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "one", [one for one in CASES if one.id in ("rows", "mxfp8", "nvfp4", "blocks")], ids=lambda one: one.id
)
def test_had_by_name_alone(one: Emulated) -> None:
    target, spec = from_arch("sm_100a"), one.case.spec
    assert dispatch.choose(spec, target, "cute-sm100").name == "cute-sm100"
    assert all(entry.name != "cute-sm100" for entry, _ in dispatch.judge(spec, target))


@pytest.mark.rest
def test_bound_by_the_table() -> None:
    (one,) = (one for one in CASES if one.id == "rows")
    spec, given = one.case.spec, tensors(one.case, "cpu")
    out = torch.zeros(one.case.rows, one.case.n, dtype=torch.bfloat16)
    with emulator.device(arch="sm_100a", sms=4, schedule="eager", strict=True):
        bind = dispatch.choose(spec, from_arch("sm_100a"), "cute-sm100").load()
        launch = bind(spec, Rows(one.case.rows), from_arch("sm_100a"), Workspace(torch.device("cpu")))
        launch(ScaledOperands(given.x.values, given.x.scale, given.weight.values, given.weight.scale, None, out))
    check_outputs(one.case, Outputs(out, None), budget_of(one.case, given))


@pytest.mark.rest
@pytest.mark.parametrize("kind", [MXFP8, NVFP4], ids=str)
def test_a_gated_layer_quantises_for_the_next_one(monkeypatch: pytest.MonkeyPatch, kind: ScaledFormat) -> None:
    """By the API, as linked layers of a model: SM100's kernels and the reference agree."""
    generator = torch.Generator().manual_seed(6)
    x, gate_up, down = (
        mma_quantized(torch.randn(rows, k, generator=generator) * k**-0.25, kind, 0.002 if kind == NVFP4 else 1.0)
        for rows, k in ((5, 64), (256, 64), (48, 128))
    )
    whole = torch.tensor([0.002]) if kind == NVFP4 else None
    alpha = None if whole is None else whole * whole

    def layers(arch: str, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(eager, "targets", SimpleNamespace(detect=lambda device: from_arch(arch)))
        monkeypatch.setattr(eager, "_known", {})
        hidden = api.scaled_linear_quantized(
            x, gate_up, activation=Swiglu(), to=kind, out_scale=whole, alpha=alpha, kernel=kernel
        )
        out = api.scaled_linear(hidden, down, alpha=alpha, kernel=kernel)
        return mma_dequantized(hidden, 1.0 if whole is None else 0.002), out.double()

    with emulator.device(arch="sm_100a", sms=2, schedule="lazy", strict=True):
        found = layers("sm_100a", "cute-sm100")
    for ours, wanted in zip(found, layers("cpu", "reference"), strict=True):
        # A value in the middle of two may be rounded to either.
        assert (ours - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize(("like", "kind"), [("rows", ScaledSmallMConfig), ("blocks", PromotedSmallMConfig)])
def test_few_rows_have_tiles_of_their_own(like: str, kind: type[ScaledSmallMConfig]) -> None:
    """But not where a row's bits must not depend on the others: stream-K splits sums by the number of tiles."""
    target = from_arch("sm_100a")
    (case,) = (one.case for one in CASES if one.id == like)
    spec = replace(case, n=4096, k=8192).spec
    assert type(host.chosen(spec, 1, target).config) is kind
    assert type(host.chosen(spec, 64, target).config) is kind
    assert not isinstance(host.chosen(spec, 300, target).config, ScaledSmallMConfig)
    invariant = replace(spec, batch_invariant=True)
    assert not any(isinstance(one.config, ScaledSmallMConfig) for one in host.choices(invariant, target))


@pytest.mark.parametrize(("x", "weight"), [("e4m3-row", "e4m3-row"), ("e4m3-1x128", "e4m3-128x128")])
def test_scales_of_rows_and_groups_take_two_launches(x: str, weight: str) -> None:
    target = from_arch("sm_100a")
    spec = replace(GATED, n=256, x=x, weight=weight, to=x).spec
    assert dispatch.choose(spec, target, "cute-sm100").name == "cute-sm100"
    found = host.choices(spec, target)
    assert found
    assert all(one.spec.wide for one in found)
    assert len(list(host.precompile_specs(spec, host.chosen(spec, 64, target), target))) == 2


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scales_of_blocks_take_one_launch(kind: str) -> None:
    target = from_arch("sm_100a")
    case = replace(GATED, n=256, k=544, x=kind, weight=kind, to=kind)
    found = host.choices(case.spec, target)
    assert found
    assert not any(one.spec.wide for one in found)
    with pytest.raises(Unsupported, match="out is e4m3-row: float16, bfloat16, e4m3-tensor, mxfp8, nvfp4 are possible"):
        dispatch.choose(replace(case, to="e4m3-row").spec, target, "cute-sm100")


def test_objections() -> None:
    target = from_arch("sm_100a")
    spec = replace(CASES[0].case, x="nvfp4", weight="nvfp4", k=656).spec
    with pytest.raises(Unsupported, match="k 656 is not a multiple of 32"):
        dispatch.choose(spec, target, "cute-sm100")
    with pytest.raises(Unsupported, match="no kernel but SM100's multiplies it"):
        dispatch.choose(replace(CASES[0].case, x="mxfp8", weight="mxfp8").spec, from_arch("sm_90a"))
    gated = replace(CASES[0].case, activation=Swiglu(), x="mxfp8", weight="mxfp8").spec
    assert any("n 80 is not a multiple of 128" in reason for reason in SCALED_128.objections(gated, SMEM_BYTES))
    assert any("several scales" in reason for reason in PROMOTED.objections(gated, SMEM_BYTES))
    # What has no tiles for many rows has none for few.
    blocks = replace(CASES[0].case, activation=Swiglu(), x="e4m3-1x128", weight="e4m3-128x128")
    with pytest.raises(Unsupported, match="n 80 is not a multiple of 64: a box of up rows would have several scales"):
        dispatch.choose(blocks.spec, target, "cute-sm100")
    few = {"rows": ScaledSmallMConfig(tokens=16, stages=2), "blocks": PromotedSmallMConfig(tokens=16, stages=2)}
    products = {"rows": CASES[0].case.spec, "blocks": replace(blocks, activation=None).spec}
    for name, spec in products.items():
        for other, config in few.items():
            against = config.objections(spec, SMEM_BYTES)
            assert bool(against) == (name != other)
            assert all("a kernel of their own promotes products" in one for one in against)
    assert PromotedSmallMConfig(tokens=96, stages=2).objections(products["blocks"], SMEM_BYTES) == [
        "96 tokens are neither a multiple of 16 up to 32 nor of 32 up to 64"
    ]
