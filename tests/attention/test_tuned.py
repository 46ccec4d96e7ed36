# SPDX-License-Identifier: Apache-2.0
"""Which configuration an attention kernel gets: a tuned one where one fits, else the heuristic's."""

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.attention import dispatch
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig, default_config, default_split_config
from dsl_backend.attention.cute.sm90.mla_configs import MlaConfig, default_mla_config
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig as Sm100Config
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.family import typical_layers
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.attention.tuned import TUNABLE, TUNED_CONFIGS, ProblemShape, config_of, problem_of
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace

GPU = "NVIDIA Test"
TARGET = replace(from_arch("sm_90a"), gpu=GPU)
FP8 = torch.float8_e4m3fn
SPEC = AttentionSpec(
    heads_q=32,
    heads_kv=8,
    head_dim=128,
    head_dim_v=128,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=16,
    scale=0.1,
)
LATENT = replace(SPEC, heads_q=16, heads_kv=1, head_dim=576, head_dim_v=512, page_size=64, mla=True)
BETTER = DenseConfig(groups=1, tile_n=96, stages=3)
BETTER_LATENT = MlaConfig(tile_n=32, stages=4)


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

    return put


def decode(spec: AttentionSpec = SPEC) -> ProblemShape:
    return problem_of(spec, "decode")


def test_the_packages_own_file_is_whole() -> None:
    found, problems = TUNED_CONFIGS.read(TUNED_CONFIGS.file)
    assert problems == []
    # Nobody else's records, and none that could not be built on the chip that it was measured on.
    assert len(found) == len(json.loads(TUNED_CONFIGS.file.read_text())["records"])


def test_a_record_changes_the_chosen_config(measured: Callable[..., None]) -> None:
    measured(record(decode(), BETTER))
    assert config_of(SPEC, TARGET, default_split_config) == BETTER != default_split_config(SPEC)
    assert config_of(SPEC, TARGET, default_config) == default_config(SPEC), "another operation"


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_a_planner_binds_the_tuned_config(measured: Callable[..., None]) -> None:
    measured(record(decode(), BETTER))
    planner = Planner(SPEC, TARGET, Workspace(torch.device("cpu")), "cute")
    short: Any = planner.short[2]
    assert short.config == BETTER
    assert short.key(False, None).config == BETTER


@pytest.mark.parametrize(
    ("name", "spec", "target"),
    [
        ("another-gpu", SPEC, replace(TARGET, gpu="NVIDIA Other")),
        ("no-gpu-at-hand", SPEC, from_arch("sm_90a")),
        ("head-size", replace(SPEC, head_dim=96, head_dim_v=96), TARGET),
        ("value-head-size", replace(SPEC, head_dim_v=64), TARGET),
        ("dtype", replace(SPEC, dtype=torch.float16, kv_dtype=torch.float16), TARGET),
        ("group", replace(SPEC, heads_kv=4), TARGET),
        ("packed", replace(SPEC, page_size=None), TARGET),
        ("sinks", replace(SPEC, sinks=True), TARGET),
        ("softcap", replace(SPEC, softcap=5.0), TARGET),
        ("alibi", replace(SPEC, alibi=True), TARGET),
        ("batch-invariant", replace(SPEC, batch_invariant=True), TARGET),
        ("too-little-memory", SPEC, replace(TARGET, smem_bytes=100_000)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_was_not_measured_on_has_the_heuristic(
    measured: Callable[..., None], name: str, spec: AttentionSpec, target: Any
) -> None:
    measured(record(decode(), BETTER))
    assert config_of(spec, target, default_split_config) == default_split_config(spec)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, scale=2.0),
        replace(SPEC, page_size=64),
        replace(SPEC, heads_q=8, heads_kv=2),
        replace(SPEC, window_left=100, window_right=0),
    ],
)
def test_what_makes_no_difference(measured: Callable[..., None], spec: AttentionSpec) -> None:
    measured(record(decode(), BETTER))
    assert config_of(spec, TARGET, default_split_config) == BETTER


def test_the_first_that_fits(measured: Callable[..., None]) -> None:
    """Of another SM, or one that objects to this very problem, is none."""
    broken = DenseConfig(groups=1, tile_n=100, stages=3)
    measured(*(record(decode(), config) for config in (Sm100Config(), broken, BETTER, replace(BETTER, tile_n=32))))
    assert config_of(SPEC, TARGET, default_split_config) == BETTER


def test_fp8_keys_are_a_class_of_their_own(measured: Callable[..., None]) -> None:
    fp8 = replace(SPEC, kv_dtype=FP8)
    staged = DenseConfig(groups=1, tile_n=64, stages=2, dequant_stages=3)
    measured(record(decode(), BETTER), record(decode(fp8), staged))
    assert config_of(fp8, TARGET, default_split_config) == staged
    assert config_of(SPEC, TARGET, default_split_config) == BETTER


def test_absorbed_mla(measured: Callable[..., None]) -> None:
    measured(record(problem_of(LATENT, "mla_decode"), BETTER_LATENT))
    assert config_of(LATENT, TARGET, default_mla_config) == BETTER_LATENT != default_mla_config(LATENT)


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_dispatch_judges_what_would_run(measured: Callable[..., None]) -> None:
    """Where the heuristic's tiles are too large and those of a tuned configuration are not, the kernel serves."""
    wide = replace(SPEC, head_dim=256, head_dim_v=256)
    small = replace(TARGET, smem_bytes=default_split_config(wide).smem_bytes(wide) - 1)
    assert dispatch.choose(Operation.DECODE, wide, small).name == "triton"
    measured(record(decode(wide), DenseConfig(groups=1, tile_n=32, stages=2)))
    assert dispatch.choose(Operation.DECODE, wide, small).name == "cute"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_candidates_fit_and_are_no_two_alike(arch: str) -> None:
    """Of every kind of layer and kernel; they can be written to a file and read again."""
    target = from_arch(arch)
    tried = 0
    for spec in typical_layers(target).values():
        if not isinstance(spec, AttentionSpec) or spec.dtype == torch.float32:
            continue
        for heuristic, choice in TUNABLE.items():
            if arch[:-1].replace("_", "") not in heuristic.__module__ or spec.mla != (choice.operation[0] == "m"):
                continue
            found = list(choice.variants(spec, target.smem_bytes))
            assert len(set(found)) == len(found)
            for config in found:
                assert config.objections(spec, target.smem_bytes) == []
                assert isinstance(config, choice.kind)
            for config in found[:1]:
                made = record(problem_of(spec, choice.operation), config, arch=arch)
                assert TUNED_CONFIGS.understood(made.measurement.model_dump(mode="json")) == made
            tried += len(found)
    assert tried > 100


def test_names_of_classes() -> None:
    assert decode().name == "decode-hd128-g4-bfloat16"
    assert problem_of(replace(SPEC, kv_dtype=FP8, sinks=True), "prefill").name == (
        "prefill-hd128-g4-bfloat16-float8_e4m3fn-sinks"
    )
    packed = replace(SPEC, heads_kv=32, head_dim=192, page_size=None)
    assert problem_of(packed, "prefill").name == "prefill-hd192x128-g1-bfloat16-packed"


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_every_kernel_of_the_table_can_be_tuned() -> None:
    # What writes the cache has nothing to choose.
    attends = set(dispatch.TABLE) - {dispatch.Operation.WRITE_KV}
    names = ("cute", dispatch.FP8_PRODUCTS)
    kernels = [entry.load() for name in attends for entry in dispatch.TABLE[name] if entry.name in names]
    # A function has no default: it chooses among kernels of other rows, and one that is not tuned.
    assert {kernel.default for kernel in kernels if isinstance(kernel, type)} == set(TUNABLE)
