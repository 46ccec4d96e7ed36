# SPDX-License-Identifier: Apache-2.0
"""Which configuration a linear layer gets for so many rows, and for which rows it is no kernel of ours."""

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.gemm import configs
from dsl_backend.gemm.activation import Geglu, Swiglu
from dsl_backend.gemm.configs import Config, candidates, variants
from dsl_backend.gemm.sm90.configs import GemmConfig, SmallMConfig
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import precompile
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import (
    TUNED_CONFIGS,
    ProblemShape,
    Unfused,
    config_of,
    configs_of,
    fused_is_faster,
    problem_of,
    unfused,
)
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch

GPU = "NVIDIA Test"
TARGET = replace(from_arch("sm_90a"), gpu=GPU)
SPEC = LinearSpec(n=14336, k=4096, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
BETTER = GemmConfig(tile_m=128, box_n=96, stages=3)
BETTER_FEW = SmallMConfig(tokens=16, tile_k=64, stages=5)


def rows(least: int, most: int) -> ProblemShape:
    return problem_of(SPEC.n, SPEC.k, True, SPEC.dtypes.x, TARGET.sm_count).of_rows(least, most)


def record(problem: ProblemShape, config: Any, **changes: Any) -> Any:
    facts = {
        "gpu": GPU,
        "arch": "sm_90a",
        "date": datetime.date(2026, 11, 23),
        "commit": "0123abc",
        "versions": {},
        "us": 1.0,
        "default_us": 2.0,
    }
    return TUNED_CONFIGS.record(problem, config, **(facts | changes))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts records in the place of those in files."""

    def put(*records: Any) -> None:
        monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (list(records), []))
        fused_is_faster.cache_clear()

    put()
    return put


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    assert len(found) == len(json.loads(TUNED_CONFIGS.file.read_text())["records"])


def test_a_record_changes_the_chosen_config(measured: Callable[..., None]) -> None:
    measured(record(rows(129, 256), BETTER), record(rows(1, 16), BETTER_FEW))
    for count in (1, 16):
        assert config_of(SPEC, count, TARGET) == BETTER_FEW != configs.choose(SPEC, count, TARGET)
    for count in (129, 200, 256):
        assert config_of(SPEC, count, TARGET) == BETTER != configs.choose(SPEC, count, TARGET)
    for count in (17, 128, 257, 8192):
        assert config_of(SPEC, count, TARGET) == configs.choose(SPEC, count, TARGET)


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (SPEC, replace(TARGET, gpu="NVIDIA Other")),
        (SPEC, replace(TARGET, gpu=None)),
        (SPEC, replace(TARGET, sm_count=114)),
        (SPEC, replace(TARGET, smem_bytes=100_000)),
        (replace(SPEC, n=14336 + 8), TARGET),
        (replace(SPEC, k=4096 + 8), TARGET),
        (replace(SPEC, dtypes=Dtypes.of(torch.float16)), TARGET),
        (replace(SPEC, activation=None), TARGET),
        (replace(SPEC, batch_invariant=True), TARGET),
    ],
)
def test_what_it_was_not_measured_on_has_the_heuristic(
    measured: Callable[..., None], spec: LinearSpec, target: Any
) -> None:
    measured(record(rows(1, 8192), BETTER))
    assert config_of(spec, 200, target) == configs.choose(spec, 200, target) != BETTER
    assert config_of(SPEC, 200, TARGET) == BETTER


def test_activations_are_one_class(measured: Callable[..., None]) -> None:
    measured(record(rows(1, 8192), BETTER))
    assert config_of(replace(SPEC, activation=Geglu(tanh=True), bias=True), 200, TARGET) == BETTER


def test_what_objects_is_passed_over(measured: Callable[..., None]) -> None:
    wide = GemmConfig(tile_m=256, box_n=96, stages=2)
    assert wide.objections(SPEC, TARGET.smem_bytes) == []
    biased = replace(SPEC, bias=True)
    assert wide.objections(biased, TARGET.smem_bytes), "with a bias it has too few registers"
    measured(record(rows(1, 8192), wide))
    assert config_of(SPEC, 200, TARGET) == wide
    assert config_of(biased, 200, TARGET) == configs.choose(biased, 200, TARGET)


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_a_launch_takes_the_tuned_config(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsl_backend.linear.cute import host as launch

    measured(record(rows(129, 256), BETTER))
    monkeypatch.setattr(launch, "build", lambda key, target: key)
    launch.chosen.cache_clear()
    config, key = launch.chosen(SPEC, 200, TARGET, "of a test")
    launch.chosen.cache_clear()
    assert config == BETTER == key.config  # type: ignore[attr-defined]


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_tuned_configs_are_compiled_before_serving(measured: Callable[..., None]) -> None:
    """Also for an architecture by its name alone: for any GPU of it."""
    measured(
        record(rows(129, 256), BETTER),
        record(rows(257, 512), BETTER),
        record(rows(1, 16), BETTER_FEW, gpu="NVIDIA Other"),
        record(rows(17, 128), Unfused()),
    )

    def compiled(target: Any) -> set[Any]:
        return {one.key.config for one in precompile.precompile_specs_of(SPEC, target)}

    usual = set(candidates(SPEC, TARGET))
    assert compiled(TARGET) == usual | {BETTER}
    assert compiled(from_arch("sm_90a")) == usual | {BETTER, BETTER_FEW}
    assert set(configs_of(replace(SPEC, batch_invariant=True), TARGET)) < usual


def test_rows_that_are_worth_a_kernel(measured: Callable[..., None]) -> None:
    measured(record(rows(65, 700), Unfused()), record(rows(193, 256), BETTER))

    def fused(count: int, **changes: Any) -> bool:
        facts = {"n": SPEC.n, "k": SPEC.k, "dtype": SPEC.dtypes.x, "target": TARGET}
        return fused_is_faster(count, **(facts | changes))

    assert [fused(count) for count in (0, 1, 64, 65, 256, 700, 701, 8192)] == [True] * 3 + [False] * 3 + [True] * 2
    assert fused(256, n=1024)
    assert fused(256, dtype=torch.float16)
    assert fused(256, target=replace(TARGET, gpu=None))
    assert fused(256, target=replace(TARGET, gpu="NVIDIA Other"))
    assert fused(256, target=replace(TARGET, sm_count=114))
    # Whoever calls the kernel all the same gets the best of ours.
    assert config_of(SPEC, 256, TARGET) == BETTER
    assert config_of(SPEC, 300, TARGET) == configs.choose(SPEC, 300, TARGET)
    assert unfused(SPEC.n, SPEC.k, SPEC.dtypes.x, TARGET) == [rows(65, 700)]


@pytest.mark.parametrize(
    ("again", "left"),
    [
        ((65, 700), []),
        ((1, 8192), []),
        ((65, 128), [(129, 700)]),
        ((513, 768), [(65, 512)]),
        ((129, 256), [(65, 128), (257, 700)]),
        ((1, 64), [(65, 700)]),
        ((701, 900), [(65, 700)]),
        ((700, 700), [(65, 699)]),
    ],
)
def test_a_range_without_what_was_measured_again(again: tuple[int, int], left: list[tuple[int, int]]) -> None:
    assert rows(65, 700).without(rows(*again)) == tuple(rows(*one) for one in left)
    other = rows(*again).model_copy(update={"n": 8})
    assert rows(65, 700).without(other) == (rows(65, 700),)


def test_a_merge_cuts_ranges() -> None:
    old = [record(rows(65, 700), Unfused())]
    found = TUNED_CONFIGS.merged(old, TARGET, [rows(129, 256)], [record(rows(129, 256), BETTER)])
    assert [(one.problem, one.config) for one in found] == [
        (rows(65, 128), Unfused()),
        (rows(257, 700), Unfused()),
        (rows(129, 256), BETTER),
    ]
    for one in found:
        assert TUNED_CONFIGS.understood(one.measurement.model_dump(mode="json")) == one


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="least_rows 8 is more than most_rows 7"):
        rows(1, 1).model_validate(rows(1, 1).model_dump() | {"least_rows": 8, "most_rows": 7})


@pytest.mark.parametrize("count", [1, 16, 64, 200, 8192])
def test_candidates_fit_and_are_no_two_alike(count: int) -> None:
    found = list(variants(SPEC, count, TARGET))
    assert len(set(found)) == len(found) > 5
    assert configs.choose(SPEC, count, TARGET) in found
    for config in found:
        assert config.objections(SPEC, TARGET.smem_bytes) == []
    assert any(isinstance(config, GemmConfig) for config in found) == (count >= 64)
    assert any(isinstance(config, SmallMConfig) for config in found) == (count <= 200)


@pytest.mark.parametrize(("count", "kind"), [(16, sm100.SmallMConfig), (600, sm100.GemmConfig)])
def test_sm100_has_candidates_and_tuned_configs_of_its_own(
    measured: Callable[..., None], count: int, kind: type[Config]
) -> None:
    target = replace(from_arch("sm_100a"), gpu=GPU)
    found = list(variants(SPEC, count, target))
    assert {type(config) for config in found} == {kind}
    assert configs.choose(SPEC, count, target) in found
    for config in found:
        assert config.objections(SPEC, target.smem_bytes) == []
    better = next(config for config in found if config != configs.choose(SPEC, count, target))
    problem = problem_of(SPEC.n, SPEC.k, True, SPEC.dtypes.x, target.sm_count).of_rows(count, count)
    measured(record(rows(1, 8192), BETTER), record(problem, better, arch="sm_100a"))
    assert config_of(SPEC, count, target) == better
    assert better in configs_of(SPEC, target)
    assert BETTER not in configs_of(SPEC, target)
