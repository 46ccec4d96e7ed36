# SPDX-License-Identifier: Apache-2.0
"""Which configuration softmax gets: a tuned one where one fits, whatever the number of rows, else the default."""

import datetime
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.runtime import model, registry, toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.softmax import dispatch, precompile, tuned
from dsl_backend.softmax.configs import SoftmaxConfig, default_config
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import TUNED_CONFIGS, config_of, configs_of, problem_of

F32, BF16 = torch.float32, torch.bfloat16
H200, H100 = registry.named("sm_90a").chips
NO_GPU = from_arch("sm_90a")
TARGET = replace(NO_GPU, gpu="NVIDIA Test", chip=H200)
SPEC = SoftmaxSpec(width=20552, dtype=F32, out_dtype=F32, vector=8)
BETTER = SoftmaxConfig(vector=4, vectors_per_thread=6, threads_per_row=224, rows_per_cta=1, cluster=4)
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

    def put(*configs: SoftmaxConfig, problem: Any = None) -> None:
        records = [TUNED_CONFIGS.record(problem or problem_of(SPEC), one, **FACTS) for one in configs]
        monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (records, []))

    return put


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    for record in found:
        assert record.config.objections(spec_of(record.problem), NO_GPU.smem_bytes) == []


def spec_of(problem: tuned.ProblemShape) -> SoftmaxSpec:
    types = {name: getattr(torch, getattr(problem, name)) for name in ("dtype", "out_dtype")}
    return SoftmaxSpec(width=problem.width, log=problem.log, vector=problem.vector, **types)


def test_a_record_changes_the_config(measured: Callable[..., None]) -> None:
    assert config_of(SPEC, TARGET) == default_config(SPEC, H200) != BETTER
    measured(BETTER)
    assert config_of(SPEC, TARGET) == BETTER
    assert configs_of(SPEC, TARGET) == [BETTER]
    assert spec_of(problem_of(SPEC)) == SPEC


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (replace(SPEC, width=20560), TARGET),
        (replace(SPEC, log=True), TARGET),
        (replace(SPEC, out_dtype=BF16), TARGET),
        (replace(SPEC, vector=4), TARGET),
        (SPEC, replace(TARGET, chip=H100)),
        (SPEC, NO_GPU),
    ],
    ids=["width", "log", "dtype", "alignment", "another-chip", "no-gpu"],
)
def test_what_it_was_not_measured_on_has_the_default(
    measured: Callable[..., None], spec: SoftmaxSpec, target: Any
) -> None:
    measured(BETTER)
    assert config_of(spec, target) == default_config(spec, target.chips[0]) != BETTER


def test_the_first_that_serves(measured: Callable[..., None]) -> None:
    small, wide = replace(BETTER, vectors_per_thread=1), replace(BETTER, vector=8)
    measured(small, wide, BETTER, replace(BETTER, use_pdl=True))
    assert config_of(SPEC, TARGET) == BETTER


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_the_kernel_that_is_compiled_has_it(measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """At a launch; and before one, for the GPU at hand, or for all GPUs of an architecture."""
    from dsl_backend.softmax.cute import host

    measured(BETTER)
    built: list[Any] = []
    monkeypatch.setattr(host, "build", lambda key, target: built.append(key))
    host.function_of.__wrapped__(SPEC, TARGET, "")
    assert built == [host.key_of(SPEC, BETTER)]
    config = {"num_attention_heads": 8, "hidden_size": 1024, "dtype": "float32", "vocab_size": SPEC.width}
    for target, expected in (
        (TARGET, {BETTER}),
        (NO_GPU, {BETTER, default_config(SPEC, H200), default_config(SPEC, H100)}),
    ):
        units = precompile.precompile_specs(model.shape_of(config), target)
        assert {unit.key.config for unit in units if not unit.key.log} == expected
    assert default_config(SPEC, H200) != default_config(SPEC, H100)


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_dispatch_judges_what_would_run(measured: Callable[..., None]) -> None:
    """A record may read rows twice: another entry of the table, and the same kernel."""
    looped = replace(BETTER, vectors_per_thread=2, two_pass=True)
    assert dispatch.choose(SPEC, TARGET).title == "softmax one-pass sm90/sm100"
    measured(looped)
    assert dispatch.choose(SPEC, TARGET).title == "softmax two-pass sm90/sm100"


def test_names_of_classes() -> None:
    assert problem_of(SPEC).name == "softmax-20552-float32"
    odd = replace(SPEC, width=4099, log=True, out_dtype=BF16, vector=math.gcd(8, 4099))
    assert problem_of(odd).name == "log-softmax-4099-float32-bfloat16-v1"
