# SPDX-License-Identifier: Apache-2.0
"""Which configuration the sampler gets: a tuned one for its range of rows where one fits, else the default."""

import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.runtime import registry, toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling.configs import ClusterConfig, cluster_configs
from dsl_backend.sampling.spec import LogprobsMode, SamplingSpec
from dsl_backend.sampling.tuned import TUNED_CONFIGS, config_of, configs_of, problem_of

H200, H100 = registry.named("sm_90a").chips
NO_GPU = from_arch("sm_90a")
TARGET = replace(NO_GPU, gpu="NVIDIA Test", chip=H200)
SPEC = SamplingSpec(vocab=151936)
BETTER = ClusterConfig(cluster=4, threads=512, vector=4, blocks_ahead=0)
FINISHED = ClusterConfig(cluster=1, threads=512, vector=4, finish_cluster=8)
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
    """Puts records for 34 to 66 rows in the place of those in files."""

    def put(*configs: ClusterConfig, top_p_alone: bool = False) -> None:
        problem = problem_of(SPEC, top_p_alone, TARGET.sm_count).of_rows(34, 66)
        records = [TUNED_CONFIGS.record(problem, one, **FACTS) for one in configs]
        monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (records, []))

    return put


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    for record in found:
        spec = SamplingSpec(vocab=record.problem.vocab, dtype=getattr(torch, record.problem.dtype))
        assert record.config.objections(spec, NO_GPU) == []


def test_a_record_changes_the_config_of_its_rows(measured: Callable[..., None]) -> None:
    measured(BETTER)
    for rows in (33, 34, 66, 67):
        expected = BETTER if 34 <= rows <= 66 else ClusterConfig.default(SPEC, TARGET, rows, 4)
        assert config_of(SPEC, TARGET, rows, 4, False) == expected
    assert ClusterConfig.default(SPEC, TARGET, 34, 4) != BETTER


@pytest.mark.parametrize(
    ("spec", "target", "vector", "top_p_alone"),
    [
        (replace(SPEC, vocab=151944), TARGET, 4, False),
        (replace(SPEC, dtype=torch.bfloat16), TARGET, 8, False),
        (replace(SPEC, logprobs_mode=LogprobsMode.RAW_LOGPROBS), TARGET, 4, False),
        (SPEC, TARGET, 1, False),
        (SPEC, TARGET, 4, True),
        (SPEC, replace(TARGET, chip=H100), 4, False),
        (SPEC, replace(TARGET, sm_count=66), 4, False),
        (SPEC, NO_GPU, 4, False),
    ],
    ids=["vocab", "dtype", "likeliest", "rows-apart", "top-p-alone", "another-chip", "a-partition", "no-gpu"],
)
def test_what_it_was_not_measured_on_has_the_default(
    measured: Callable[..., None], spec: SamplingSpec, target: Any, vector: int, top_p_alone: bool
) -> None:
    measured(BETTER)
    assert config_of(spec, target, 40, vector, top_p_alone) == ClusterConfig.default(
        spec, target, 40, vector, top_p_alone
    )


def test_a_second_launch_is_for_top_p_alone(measured: Callable[..., None]) -> None:
    """A file may say otherwise: it would leave tokens that top-k or min-p removes."""
    measured(FINISHED)
    assert config_of(SPEC, TARGET, 40, 4, False) == ClusterConfig.default(SPEC, TARGET, 40, 4)
    measured(FINISHED, top_p_alone=True)
    assert config_of(SPEC, TARGET, 40, 4, True) == FINISHED


def test_the_first_that_serves(measured: Callable[..., None]) -> None:
    measured(replace(BETTER, max_blocks=8), replace(BETTER, vector=2), BETTER, replace(BETTER, cluster=1))
    assert config_of(SPEC, TARGET, 40, 4, False) == BETTER


def test_what_is_compiled_before_serving(measured: Callable[..., None]) -> None:
    """Records of all GPUs where none is at hand; none of rows that a plan does not have."""
    measured(BETTER)
    for target in (TARGET, NO_GPU):
        defaults = cluster_configs(SPEC, target, 1024, 4)
        assert configs_of(SPEC, target, 1024, 4) == [*defaults, BETTER]
        assert BETTER not in configs_of(SPEC, target, 33, 4)


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_a_plan_has_it_and_its_scratch(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsl_backend.sampling.cute import host

    monkeypatch.setattr(host, "build", lambda key, target: key)
    measured(FINISHED, top_p_alone=True)
    kernel = host.CuteSampler(replace(SPEC, kept=True), TARGET, 64, torch.device("cpu"))
    assert kernel.scratch is not None
    compiled = set(kernel.functions)
    assert kernel.chosen(40, 4, True, torch.int32, False) == (host.key_of(SPEC, FINISHED), True)
    assert kernel.chosen(40, 4, False, torch.int32, False)[1] is False
    assert set(kernel.functions) == compiled
    # Steps that ask for what the filters keep have none.
    assert kernel.chosen(40, 4, True, torch.int32, True)[1] is False
    # Rows at a stride that records are not of have no second launch, whose scratch a plan may lack.
    assert kernel.chosen(40, 1, True, torch.int32, False)[1] is False


def test_names_of_classes() -> None:
    problem = problem_of(SPEC, True, 132).of_rows(67, 128)
    assert problem.name == "sampling-151936-float32-top-p-m67-128"
    assert problem_of(replace(SPEC, dtype=torch.bfloat16), False, 132).name == "sampling-151936-bfloat16-m1-1"
