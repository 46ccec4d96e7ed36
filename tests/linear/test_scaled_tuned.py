# SPDX-License-Identifier: Apache-2.0
"""For which numbers of rows a layer in e4m3 is known to be faster than vLLM's, and with which configuration."""

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.activation import Geglu, Swiglu
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig, ScaledSmallMConfig
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.linear.scaled.tuned import (
    TUNED_CONFIGS,
    Ours,
    Theirs,
    config_of,
    faster,
    plain,
    problem_of,
    recorded,
)
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, ROW_SCALED, TENSOR_SCALED
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch

GPU = "NVIDIA Test"
TARGET = replace(from_arch("sm_90a"), gpu=GPU)
SPEC = ScaledLinearSpec(
    n=14336,
    k=4096,
    x=GROUP_SCALED,
    weight=BLOCK_SCALED,
    out=GROUP_SCALED,
    activation=Swiglu(),
    column_major=True,
)
OURS = Ours()
TILES = ScaledGemmConfig(box_n=64, stages=4)
FEW = ScaledSmallMConfig(tokens=16, stages=5)


def record(least: int, most: int, config: Any = OURS, spec: ScaledLinearSpec = SPEC, **changes: Any) -> Any:
    facts = {
        "gpu": GPU,
        "arch": "sm_90a",
        "date": datetime.date(2026, 11, 26),
        "commit": "0123abc",
        "versions": {},
        "us": 1.0,
        "default_us": 2.0,
    }
    return TUNED_CONFIGS.record(problem_of(spec, TARGET.sm_count).of_rows(least, most), config, **(facts | changes))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts records in the place of those in files."""

    def put(*records: Any) -> None:
        monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (list(records), []))

    put()
    return put


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    assert len(found) == len(json.loads(TUNED_CONFIGS.file.read_text())["records"])


def test_the_packages_own_records_can_run_and_do_not_overlap() -> None:
    """And each range's ends were timed."""
    found, _ = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    taken = set()
    for one in found:
        problem, tests = one.problem, one.measurement.rows
        timed = {int(row.partition(" ")[0]) for row in tests}
        assert {problem.least_rows, problem.most_rows} <= timed, problem.name
        assert all(problem.holds(rows) for rows in timed), problem.name
        for rows in (problem.least_rows, problem.most_rows):
            assert (one.measurement.gpu, problem.of_rows(1, 1), rows) not in taken, problem.name
        taken |= {(one.measurement.gpu, problem.of_rows(1, 1), rows) for rows in timed}


def is_faster(rows: int, spec: ScaledLinearSpec, target: Target) -> bool:
    return any(problem.holds(rows) for problem in faster(spec, target))


def test_ranges(measured: Callable[..., None]) -> None:
    measured(record(1, 16), record(64, 64), record(257, 2048, recorded(TILES, wide=False)))
    assert [(one.least_rows, one.most_rows) for one in faster(SPEC, TARGET)] == [(1, 16), (64, 64), (257, 2048)]
    assert [rows for rows in (1, 16, 17, 63, 64, 65, 256, 257, 2048, 2049) if is_faster(rows, SPEC, TARGET)] == [
        *(1, 16, 64),
        *(257, 2048),
    ]


def test_without_a_record_nothing_is_known(measured: Callable[..., None]) -> None:
    assert faster(SPEC, TARGET) == []
    assert not any(is_faster(rows, SPEC, TARGET) for rows in (1, 64, 8192))


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 14336 + 128},
        {"k": 4096 + 128},
        {"activation": None, "out": None},
        {"out": None},
        {"dtype": torch.float16},
        {"x": ROW_SCALED, "weight": ROW_SCALED, "out": ROW_SCALED, "column_major": False},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_a_record_says_nothing_of_other_layers(changes: dict[str, Any], measured: Callable[..., None]) -> None:
    measured(record(1, 8192, recorded(TILES, wide=False)))
    other = replace(SPEC, **changes)
    assert is_faster(300, SPEC, TARGET)
    assert not is_faster(300, other, TARGET)
    assert config_of(other, 300, TARGET) is None


@pytest.mark.parametrize("changes", [{"gpu": None}, {"gpu": "Another"}, {"sm_count": 66}], ids=str)
def test_other_gpus_are_not_measured(changes: dict[str, Any], measured: Callable[..., None]) -> None:
    measured(record(1, 8192))
    assert is_faster(9, SPEC, TARGET)
    assert not is_faster(9, SPEC, replace(TARGET, **changes))


def test_activation_and_bias_are_one_class(measured: Callable[..., None]) -> None:
    measured(record(1, 8192, recorded(TILES, wide=False)))
    other = replace(SPEC, activation=Geglu(tanh=True), bias=True)
    assert is_faster(300, other, TARGET)
    assert config_of(other, 300, TARGET) == (other, TILES)


def test_which_configuration_runs(measured: Callable[..., None]) -> None:
    measured(
        record(1, 16, recorded(FEW, wide=True)), record(17, 300, recorded(TILES, wide=False)), record(301, 400, Ours())
    )
    assert config_of(SPEC, 16, TARGET) == (SPEC.in_float32, FEW)
    assert config_of(SPEC, 17, TARGET) == (SPEC, TILES)
    assert config_of(SPEC, 301, TARGET) is None
    assert config_of(SPEC, 401, TARGET) is None


def test_what_objects_is_passed_over(measured: Callable[..., None]) -> None:
    """A kernel that cannot write the output, and one that writes it wide where nothing quantises it."""
    measured(record(1, 16, recorded(FEW, wide=False)))
    assert config_of(SPEC, 16, TARGET) is None
    product = replace(SPEC, activation=None, out=None)
    measured(record(1, 16, recorded(FEW, wide=True), product))
    assert config_of(product, 16, TARGET) is None
    static = replace(SPEC, x=TENSOR_SCALED, weight=TENSOR_SCALED, out=TENSOR_SCALED, column_major=False)
    measured(record(1, 16, recorded(FEW, wide=True), static))
    assert config_of(static, 16, TARGET) is None


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_a_launch_takes_the_tuned_config(measured: Callable[..., None]) -> None:
    from dsl_backend.linear.scaled.cute import host

    measured(record(17, 300, recorded(TILES, wide=False)))
    host.chosen.cache_clear()
    assert host.chosen(SPEC, 300, TARGET) == (SPEC, TILES) != host.estimated_best(SPEC, 300, TARGET)
    assert host.chosen(SPEC, 301, TARGET) == host.estimated_best(SPEC, 301, TARGET)
    host.chosen.cache_clear()


@pytest.mark.parametrize(
    "config", [Ours(), recorded(TILES, wide=False), recorded(FEW, wide=True), recorded(FEW, wide=False)], ids=str
)
def test_a_record_survives_its_file(config: Any) -> None:
    made = record(33, 128, config)
    assert TUNED_CONFIGS.understood(json.loads(made.measurement.model_dump_json())) == made
    assert made.problem.name == "scaled-linear-14336x4096-gated-e4m3-128x128-e4m3-1x128-m33-128"
    if not isinstance(config, Ours):
        assert recorded(plain(config), wide=config.wide) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "vllm"}, "kernel 'vllm' is not one of dsl, sm90.ScaledGemmConfig, sm90.ScaledSmallMConfig"),
        ({"config": {"box_n": 64}}, "config has box_n: dsl has no fields"),
        ({"kernel": "sm90.ScaledGemmConfig", "config": {"box": 64}}, "config has box: sm90.ScaledGemmConfig has"),
        ({"kernel": "sm90.ScaledGemmConfig", "config": {"wide": 1}}, "config: wide: "),
        ({"problem": {"weight": "e4m3"}}, "weight: format 'e4m3' is not one of e4m3-tensor"),
        ({"problem": {"out": "e5m2"}}, "out: format 'e5m2' is not one of"),
        ({"problem": {"dtype": "float32"}}, "dtype: "),
        ({"problem": {"least_rows": 17}}, "least_rows 17 is more than most_rows 16"),
        ({"us": 3.0}, "us 3.0 is not less than default_us 2.0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    """As `dsl-backend doctor` has it."""
    raw = json.loads(record(1, 16).measurement.model_dump_json())
    if "problem" in changes:
        changes = {"problem": raw["problem"] | changes["problem"]}
    with pytest.raises(InvalidInput) as error:
        TUNED_CONFIGS.understood(raw | changes)
    assert message in str(error.value)


def test_theirs_is_no_record() -> None:
    with pytest.raises(StopIteration):
        TUNED_CONFIGS.kernel_name(Theirs())
