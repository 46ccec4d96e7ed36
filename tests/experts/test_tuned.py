# SPDX-License-Identifier: Apache-2.0
"""For which numbers of tokens a layer of experts is known to be faster than vLLM's."""

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.experts.tuned import TUNED_CONFIGS, Ours, Theirs, faster, is_faster, problem_of
from dsl_backend.quant.format import BLOCK_SCALED, ROW_SCALED
from dsl_backend.runtime.target import from_arch

GPU = "NVIDIA Test"
TARGET = replace(from_arch("sm_90a"), gpu=GPU)
SPEC = ExpertsSpec(num_experts=128, hidden_size=2048, intermediate_size=768, topk=8, dtype=torch.bfloat16)


def record(least: int, most: int, spec: ExpertsSpec = SPEC) -> Any:
    return TUNED_CONFIGS.record(
        problem_of(spec, TARGET.sm_count).of_rows(least, most),
        Ours(),
        gpu=GPU,
        arch="sm_90a",
        date=datetime.date(2026, 11, 25),
        commit="0123abc",
        versions={},
        us=1.0,
        default_us=2.0,
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts records in the place of those in files."""

    def put(*records: Any) -> None:
        monkeypatch.setitem(TUNED_CONFIGS.__dict__, "found", (list(records), []))
        is_faster.cache_clear()

    put()
    yield put
    is_faster.cache_clear()


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    assert len(found) == len(json.loads(TUNED_CONFIGS.file.read_text())["records"])


def test_the_packages_records_of_an_h200() -> None:
    """By docs/performance/experts.md: gpt-oss-20b's sizes are faster from 129 tokens on, and not clearly with 32."""
    h200 = replace(from_arch("sm_90a"), gpu="NVIDIA H200", chip=from_arch("sm_90a").chips[0])
    sizes = {"num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880, "topk": 4}
    layer = replace(SPEC, **sizes)
    tokens = (1, 8, 9, 32, 128, 129, 512, 2048, 8192, 1 << 17)
    assert [n for n in tokens if is_faster(n, layer, h200)] == [1, 8, 129, 512, 2048, 8192, 1 << 17]
    assert not faster(replace(layer, global_experts=32), h200)
    # Qwen3-30B-A3B in e4m3 blocks: with two tokens vLLM's kernels are as fast.
    scaled = replace(SPEC, weight=BLOCK_SCALED)
    tokens = (1, 2, 8, 9, 32, 128, 512, 2048, 8192, 16384)
    assert [n for n in tokens if is_faster(n, scaled, h200)] == [1, 9, 32, 128, 512, 2048, 8192, 16384]


def test_ranges(measured: Callable[..., None]) -> None:
    measured(record(1, 1), record(513, 2048))
    assert [(one.least_rows, one.most_rows) for one in faster(SPEC, TARGET)] == [(1, 1), (513, 2048)]
    assert [tokens for tokens in (1, 2, 512, 513, 2048, 2049) if is_faster(tokens, SPEC, TARGET)] == [1, 513, 2048]


def ours_without_a_record(spec: ExpertsSpec, target: Any) -> list[int]:
    return [tokens for tokens in (1, 8, 9, 2047, 2048, 1 << 17) if is_faster(tokens, spec, target)]


def test_few_and_many_tokens_are_ours_on_sm90_without_a_record(measured: Callable[..., None]) -> None:
    assert ours_without_a_record(SPEC, TARGET) == [1, 8, 2048, 1 << 17]
    for other in (replace(TARGET, gpu=None), replace(TARGET, capability=(10, 0))):
        assert ours_without_a_record(SPEC, other) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 64},
        {"hidden_size": 4096},
        {"intermediate_size": 384},
        {"topk": 6},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_a_record_says_nothing_of_other_layers(changes: dict[str, Any], measured: Callable[..., None]) -> None:
    measured(record(9, 9))
    assert ours_without_a_record(SPEC, TARGET) == [9]
    assert ours_without_a_record(replace(SPEC, **changes), TARGET) == [1, 8, 2048, 1 << 17]


@pytest.mark.parametrize("weight", [BLOCK_SCALED, ROW_SCALED], ids=str)
def test_weights_in_8_bits_have_records_of_their_own(weight: Any, measured: Callable[..., None]) -> None:
    """Those of 16 bits say nothing of them, and without a record nothing is known; vLLM has other kernels for rows."""
    scaled = replace(SPEC, weight=weight)
    measured(record(1, 1 << 17))
    assert ours_without_a_record(scaled, TARGET) == []
    measured(record(9, 9, scaled))
    assert ours_without_a_record(SPEC, TARGET) == [1, 8, 2048, 1 << 17]
    assert ours_without_a_record(scaled, TARGET) == ([9] if weight == BLOCK_SCALED else [])


def test_a_record_of_8_bits_survives_its_file() -> None:
    made = record(33, 128, replace(SPEC, weight=BLOCK_SCALED))
    raw = json.loads(made.measurement.model_dump_json())
    assert TUNED_CONFIGS.understood(raw) == made
    assert made.problem.name == "experts-128x2048x768-top8-bfloat16-e4m3-128x128-m33-128"
    raw["problem"]["weight"] = "e4m3-64x64"
    with pytest.raises(InvalidInput, match="e4m3-64x64"):
        TUNED_CONFIGS.understood(raw)


def test_distributed_experts_are_not_measured(measured: Callable[..., None]) -> None:
    measured(record(1, 1 << 17))
    assert faster(replace(SPEC, global_experts=256), TARGET) == []


@pytest.mark.parametrize("changes", [{"gpu": None}, {"gpu": "Another"}, {"sm_count": 66}], ids=str)
def test_other_gpus_are_not_measured(changes: dict[str, Any], measured: Callable[..., None]) -> None:
    measured(record(1, 1 << 17))
    assert is_faster(9, SPEC, TARGET)
    assert not is_faster(9, SPEC, replace(TARGET, **changes))


def test_a_record_survives_its_file() -> None:
    made = record(33, 128)
    assert TUNED_CONFIGS.understood(json.loads(made.measurement.model_dump_json())) == made
    assert made.problem.name == "experts-128x2048x768-top8-bfloat16-m33-128"


def test_theirs_is_no_record() -> None:
    raw = json.loads(record(1, 8).measurement.model_dump_json()) | {"kernel": "vllm"}
    with pytest.raises(InvalidInput, match="kernel 'vllm' is not one of dsl"):
        TUNED_CONFIGS.understood(raw)
    with pytest.raises(StopIteration):
        TUNED_CONFIGS.kernel_name(Theirs())
