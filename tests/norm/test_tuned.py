# SPDX-License-Identifier: Apache-2.0
"""Which configuration RMSNorm gets: a tuned one where one fits, whatever the number of rows, else the default."""

import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.norm import precompile
from dsl_backend.norm.configs import NormConfig, default_config
from dsl_backend.norm.spec import FP8, NormSpec, Scaling
from dsl_backend.norm.tuned import TUNED_CONFIGS, ProblemShape, config_of, configs_of, problem_of
from dsl_backend.runtime import registry, toolkit
from dsl_backend.runtime.target import from_arch

F32, BF16 = torch.float32, torch.bfloat16
H200, H100 = registry.named("sm_90a").chips
NO_GPU = from_arch("sm_90a")
TARGET = replace(NO_GPU, gpu="NVIDIA Test", chip=H200)
SPEC = NormSpec(width=7168, dtype=BF16, out_dtype=BF16, weight_dtype=BF16, vector=8)
BETTER = NormConfig(vector=8, vectors_per_thread=4, threads_per_row=224, rows_per_cta=1, use_pdl=True)
FACTS = {
    "gpu": "NVIDIA Test",
    "arch": "sm_90a",
    "chip": H200,
    "date": datetime.date(2026, 11, 27),
    "commit": "0123abc",
    "versions": {},
    "us": 1.0,
    "default_us": 2.0,
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a record of each configuration in the place of those in files."""

    def put(*configs: NormConfig) -> None:
        problem = problem_of(SPEC)
        assert problem is not None
        records = [TUNED_CONFIGS.record(problem, one, **FACTS) for one in configs]
        monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (records, []))

    return put


def spec_of(problem: ProblemShape) -> NormSpec:
    types = {
        name: getattr(torch, found)
        for name in ("dtype", "out_dtype", "weight_dtype")
        if (found := getattr(problem, name)) is not None
    }
    return NormSpec(width=problem.width, residual=problem.residual, vector=problem.vector, **types)


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    for record in found:
        assert record.config.objections(spec_of(record.problem), NO_GPU.smem_bytes) == []


def test_a_record_changes_the_config(measured: Callable[..., None]) -> None:
    assert config_of(SPEC, TARGET) == default_config(SPEC) != BETTER
    measured(BETTER)
    assert config_of(SPEC, TARGET) == BETTER
    assert configs_of(SPEC, TARGET) == [BETTER]
    assert configs_of(SPEC, NO_GPU) == [default_config(SPEC), BETTER]
    found = problem_of(SPEC)
    assert found is not None
    assert spec_of(found) == SPEC
    # What is added to a weight has no part in the choice.
    assert config_of(replace(SPEC, weight_offset=1.0), TARGET) == BETTER


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (replace(SPEC, width=7176), TARGET),
        (replace(SPEC, residual=True), TARGET),
        (replace(SPEC, out_dtype=F32), TARGET),
        (replace(SPEC, weight_dtype=None), TARGET),
        (replace(SPEC, out_dtype=FP8, scaling=Scaling.TOKEN), TARGET),
        (replace(SPEC, vector=4), TARGET),
        (SPEC, replace(TARGET, chip=H100)),
        (SPEC, NO_GPU),
    ],
    ids=["width", "residual", "dtype", "no-weight", "8-bits", "alignment", "another-chip", "no-gpu"],
)
def test_what_it_was_not_measured_on_has_the_default(
    measured: Callable[..., None], spec: NormSpec, target: Any
) -> None:
    measured(BETTER)
    assert config_of(spec, target) == default_config(spec) != BETTER


def test_the_first_that_serves(measured: Callable[..., None]) -> None:
    measured(replace(BETTER, vectors_per_thread=3), BETTER, replace(BETTER, use_pdl=False))
    assert config_of(SPEC, TARGET) == BETTER


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_the_kernel_that_is_compiled_has_it(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """At a launch, and before one."""
    from dsl_backend.norm.cute import host

    measured(BETTER)
    built: list[Any] = []
    monkeypatch.setattr(host, "build", lambda key, target: built.append(key))
    host.function_of.__wrapped__(SPEC, TARGET, "")
    assert built == [host.key_of(SPEC, BETTER)]
    for target in (TARGET, NO_GPU):
        units = precompile.precompile_specs_of(SPEC, target)
        assert [unit.key.config for unit in units] == configs_of(SPEC, target)


def test_names_of_classes() -> None:
    names = [
        found.name
        for spec in (SPEC, replace(SPEC, residual=True, weight_dtype=None, vector=4))
        if (found := problem_of(spec)) is not None
    ]
    assert names == ["norm-7168-bfloat16", "norm-7168-bfloat16-unweighted-residual-v4"]
