# SPDX-License-Identifier: Apache-2.0
"""Kernels of quantised layers against float64: the reference, Triton's on a GPU or interpreted, CuTe DSL's on SM90."""

import random
from dataclasses import replace

import pytest
import torch

from dsl_backend.errors import Unsupported
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.linear.scaled import api, dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import ROW_SCALED
from dsl_backend.runtime import target as targets
from dsl_backend.testing import scaled
from dsl_backend.testing.scaled import CASES, Outputs, ScaledCase

ON_GPU = torch.cuda.is_available()
SM90 = "cute-sm90"
INTERPRETED = (
    pytest.param("reference", marks=pytest.mark.skipif(ON_GPU, reason="is for CPUs")),
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(
            not (ON_GPU or targets.triton_interpreted()), reason="no CUDA device, and TRITON_INTERPRET is off"
        ),
    ),
)
KERNELS = (*INTERPRETED, pytest.param(SM90, marks=pytest.mark.gpu))
# Problems of SM90's kernels: four of each layer, since every kernel takes seconds to compile.
FUZZED, LAYERS = 40, 10


def random_layer(seed: int) -> ScaledCase:
    return scaled.random_case(random.Random(seed), 700, facts=random.Random(seed % LAYERS))


def refused(case: ScaledCase, target: targets.Target) -> str:
    """Why SM90's kernels do not serve a case on a target; empty if they do."""
    try:
        dispatch.choose(case.spec, target, SM90)
    except Unsupported as error:
        return str(error)
    return ""


def check(case: ScaledCase, kernel: str, device: torch.device) -> None:
    """Skips where SM90's kernels refuse the case; how often they may is a test of its own."""
    if kernel == SM90 and (why := refused(case, targets.detect(device))):
        pytest.skip(why)
    scaled.check_scaled(case, kernel, device.type)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, kernel: str, device: torch.device) -> None:
    check(CASES[name], kernel, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", scaled.REAL)
def test_real(name: str) -> None:
    scaled.check_scaled(scaled.REAL[name], None, "cuda")


@pytest.mark.rest
@pytest.mark.parametrize("kernel", INTERPRETED)
def test_fuzz(kernel: str, device: torch.device) -> None:
    for seed in range(300):
        scaled.check_scaled(scaled.random_case(random.Random(seed), 150), kernel, device.type)


# More of them: `dsl-backend verify --families scaled_linear`.
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(FUZZED))
def test_fuzz_on_sm90(seed: int, device: torch.device) -> None:
    check(random_layer(seed), SM90, device)


def test_most_problems_are_served_on_sm90() -> None:
    """What they refuse: scales that are powers of two, and gated blocks of rows that are not a multiple of 128."""
    pytest.importorskip("cutlass")
    target = targets.from_arch("sm_90a")
    of_cases = {name: why for name, case in CASES.items() if (why := refused(case, target))}
    of_fuzz = [why for seed in range(FUZZED) if (why := refused(random_layer(seed), target))]
    assert len(of_cases) == 8
    assert FUZZED - len(of_fuzz) == 24
    for why in (*of_cases.values(), *of_fuzz):
        assert "scales in float32 are needed" in why or "with an activation" in why, why


def drifted(case: ScaledCase, bits: int, promoted_every: int) -> Outputs:
    """The layer with sums as a matrix unit keeps them: 32 columns at a time, the sum cut to so many bits."""
    given = scaled.tensors(case, "cpu")
    x, weight = given.x.values.float(), given.weight.values.float()
    whole, kept = torch.zeros(case.rows, case.n), torch.zeros(case.rows, case.n)
    for first in range(0, case.k, scaled.MMA_K):
        columns = slice(first, first + scaled.MMA_K)
        kept = kept + x[:, columns] @ weight[:, columns].T
        step = torch.exp2(kept.abs().clamp(min=1e-30).log2().floor() - (bits - 1))
        kept = (kept / step).trunc() * step
        if columns.stop % promoted_every == 0:
            whole, kept = whole + kept, torch.zeros_like(kept)
    out = (whole + kept) * given.weight.scale.view(1, -1) * given.x.scale.view(-1, 1)
    return Outputs(out.to(case.dtype), None)


def test_sums_of_an_8_bit_matrix_unit_drift_and_the_budget_sees_it() -> None:
    """16384 columns in a sum of 14 bits are wrong; promoted every 128 they are right, by that unit's own budget."""
    case = replace(CASES["deep"], rows=16, n=64)
    budget = scaled.budget_of(case, scaled.tensors(case, "cpu"), accumulator_bits=14)
    scaled.check_outputs(case, drifted(case, 14, 128), budget)
    with pytest.raises(AssertionError, match="further from the oracle"):
        scaled.check_outputs(case, drifted(case, 14, case.k), budget)


WRONG = {
    "a row's scale": lambda given: given._replace(x=given.x._replace(scale=given.x.scale.roll(1, 0))),
    "a channel's scale": lambda given: given._replace(
        weight=given.weight._replace(scale=given.weight.scale.roll(1, 0))
    ),
    "columns of k": lambda given: given._replace(x=given.x._replace(values=given.x.values.roll(1, 1))),
    "bias": lambda given: given._replace(bias=given.bias * 1.05),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("to", ["", scaled.TENSOR, scaled.ROW, scaled.GROUPS, scaled.E8M0_GROUPS])
@pytest.mark.parametrize("formats", [(scaled.ROW, scaled.ROW), (scaled.GROUPS, scaled.BLOCKS)])
def test_the_budget_sees_what_is_wrong(what: str, to: str, formats: tuple[str, str]) -> None:
    x, weight = formats
    case = ScaledCase(rows=9, n=272, k=272, x=x, weight=weight, to=to, bias=True, gain=0.3)
    given = scaled.tensors(case, "cpu")
    budget = scaled.budget_of(case, given)
    scaled.check_outputs(case, scaled.call(case, given, "reference"), budget)
    with pytest.raises(AssertionError):
        scaled.check_outputs(case, scaled.call(case, WRONG[what](given), "reference"), budget)


@pytest.mark.parametrize("kernel", KERNELS)
def test_batch_invariance(kernel: str, device: torch.device) -> None:
    case = ScaledCase(rows=70, n=48, k=272, activation=Swiglu())
    if kernel == SM90 and (why := refused(case, targets.detect(device))):
        pytest.skip(why)
    given = scaled.tensors(case, device)

    def layer(rows: int) -> torch.Tensor:
        x = given.x._replace(values=given.x.values[:rows], scale=given.x.scale[:rows])
        return api.scaled_linear(x, given.weight, activation=Swiglu(), batch_invariant=True, kernel=kernel)

    if kernel == "reference":
        with pytest.raises(Unsupported, match="is not batch invariant"):
            layer(1)
    else:
        assert layer(70)[:1].equal(layer(1))


@pytest.mark.parametrize(
    ("arch", "objection"),
    [("sm_70", "needs compute capability 7.5"), ("sm_75", "bfloat16 needs compute capability 8.0")],
)
def test_what_dispatch_says_of_a_target(arch: str, objection: str) -> None:
    spec = ScaledLinearSpec(n=64, k=128, x=ROW_SCALED, weight=ROW_SCALED)
    with pytest.raises(Unsupported, match=objection):
        dispatch.choose(spec, targets.from_arch(arch))


@pytest.mark.parametrize(("arch", "kernel"), [("sm_80", "triton"), ("sm_90a", "cute-sm90"), ("sm_100a", "triton")])
def test_which_kernel_dispatch_chooses(arch: str, kernel: str) -> None:
    spec = ScaledLinearSpec(n=64, k=128, x=ROW_SCALED, weight=ROW_SCALED)
    assert dispatch.choose(spec, targets.from_arch(arch)).name == kernel


def test_sums_of_four_blocks_have_a_budget_of_their_own() -> None:
    """SM90's kernels may add 512 columns at once where scales are those of rows."""
    case = ScaledCase(rows=78, n=224, k=1344)
    given = scaled.tensors(case, "cpu")
    narrow, wide = (scaled.budget_of(case, given, 14, every).error for every in (128, 512))
    assert (wide > 1.5 * narrow).all()
    assert [scaled.promoted_every(case, kernel) for kernel in (None, "cute-sm90", "triton")] == [512, 512, 128]
    assert scaled.promoted_every(replace(case, x=scaled.GROUPS, weight=scaled.BLOCKS), None) == 128


def test_results_at_the_largest_number_may_overflow_or_not() -> None:
    exact = torch.tensor([65510.0, -65530.0, 65510.0, 65000.0, 80000.0], dtype=torch.float64)
    error = torch.tensor([30.0, 30.0, 1.0, 30.0, 30.0], dtype=torch.float64)
    found = torch.tensor([torch.inf, -65504.0, torch.inf, torch.inf, 65504.0], dtype=torch.float64)
    settled = scaled.decided(found, exact, error, torch.float16)
    assert settled[:2].equal(found[:2])
    assert settled[2:].tolist() == [65510.0, 65000.0, torch.inf]


def test_a_row_with_an_infinite_scale_has_short_sums() -> None:
    case = ScaledCase(rows=14, n=48, k=272, special=True)
    x = scaled.tensors(case, "cpu").x
    (row, _) = x.scale.isinf().nonzero().flatten().tolist()
    assert set(x.values[row].float().nonzero().flatten().tolist()) <= {0, 128, 256}
