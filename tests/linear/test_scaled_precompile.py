# SPDX-License-Identifier: Apache-2.0
"""What is compiled for linear layers in 8 bits before a server answers: all that they may launch."""

from collections.abc import Sequence

import pytest

from dsl_backend.gemm.scaled_host import key_of
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig
from dsl_backend.linear.scaled import tuned
from dsl_backend.linear.scaled.cute import host
from dsl_backend.linear.scaled.precompile import precompile_specs_of
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.cute import host as quantising
from dsl_backend.quant.format import ROW_SCALED
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target, from_arch
from tests.linear.test_scaled_choice import LAYERS, spec_of

pytestmark = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
SM90 = from_arch("sm_90a")
# Of every kind of tile, and numbers of rows that nobody looked at.
ROWS = (
    1,
    2,
    7,
    9,
    16,
    23,
    33,
    64,
    65,
    100,
    127,
    129,
    200,
    256,
    300,
    512,
    513,
    777,
    1100,
    2048,
    3000,
    4111,
    8192,
    16384,
)


def of(spec: ScaledLinearSpec, ranges: Sequence[tuple[int, int]] | None = None) -> list[PrecompileSpec]:
    return list(precompile_specs_of(spec, SM90, "cute-sm90", ranges))


def key(choice: host.Choice) -> object:
    return key_of(choice.spec, choice.config, choice.spec.column_major)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_whatever_is_launched_is_compiled_before(layer: str, blocks: bool, invariant: bool) -> None:
    spec = spec_of(layer, blocks=blocks, batch_invariant=invariant)
    found = of(spec)
    assert len(found) == len(set(found)) <= 24
    products = [one.key for one in found if one.build is host.build_products]
    for rows in ROWS:
        for spared in (0, 20):
            chosen = host.chosen(spec, rows, SM90.sparing(spared))
            assert key(chosen) in products, rows
            quantises = PrecompileSpec("linear", quantising.build, spec.out, SM90) in found
            assert quantises or not chosen.spec.wide
    assert not invariant or len(products) == 1


def test_ranges_leave_out_what_others_need() -> None:
    spec = spec_of("qkv", blocks=False)
    few = of(spec, [(1, 16)])
    assert {one.key for one in few} == {key(host.chosen(spec, rows, SM90)) for rows in (1, 8, 15, 16)}
    assert set(few) < set(of(spec))
    assert of(spec, []) == []


def test_what_is_recorded_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cost model says of it."""
    spec = spec_of("down", blocks=False)
    candidates = host.candidates(spec, SM90)
    others = (one for one in host.choices(spec, SM90) if one not in candidates)
    slow = next(one for one in others if isinstance(one.config, ScaledGemmConfig) and one.config.splits == 1)
    record = tuned.recorded(slow.config, wide=False)
    problem = tuned.problem_of(spec, SM90.sm_count).of_rows(33, 48)
    monkeypatch.setattr(tuned, "ranges", lambda spec, target: [(problem, record)])
    assert key(slow) not in [key(one) for one in candidates]
    for rows in (33, 40, 48):
        # Not what is cached for other tests.
        assert host.chosen.__wrapped__(spec, rows, SM90) == slow
    assert key(slow) in [one.key for one in of(spec)]


@pytest.mark.parametrize("target", [SM90, from_arch("sm_80")])
def test_tritons_kernels_are_not_compiled_here(target: Target) -> None:
    spec = ScaledLinearSpec(n=128, k=256, x=ROW_SCALED, weight=ROW_SCALED)
    assert list(precompile_specs_of(spec, target, "triton")) == []
