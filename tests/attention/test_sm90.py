# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels on the emulator: correct, and without findings, whatever memory around their data holds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dsl_backend.attention.cute.sm90 import dense_configs
from dsl_backend.attention.cute.sm90.dense_configs import (
    DEQUANT_REGISTERS,
    REGISTERS,
    DenseConfig,
    default_config,
    default_split_config,
)
from dsl_backend.attention.cute.sm90.dense_host import Prefill, SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import FP16, FULL, Case, by_id
from tests.attention.emulated import (
    FP8_CASES,
    QUICK_WIDE,
    SERVED,
    SERVED_FP8,
    WIDE_CASES,
    dequant_conflicts,
    emulate,
    numbered,
    scratch,
)

ALL = (*SERVED, *SERVED_FP8, *FP8_CASES)

# The quick selection: each role, pipeline, mask, score modification and layout once.
QUICK = ("window-sinks", "dim-80", "gqa-7", "packed-causal", "page-48", "fp8-128", "stale-decode", "stale-prefill")


def make(planner: Planner, short: bool, index: int) -> Kernel:
    spec, target = planner.spec, planner.target
    widest = max(spec.head_dim, spec.head_dim_v)
    tile_n = 64 if widest <= 128 else 32
    dequant_stages = 2 + index % 2 if spec.is_fp8_kv else 0
    if short:
        config = DenseConfig(groups=1, tile_n=tile_n, stages=2, min_split_tiles=1, dequant_stages=dequant_stages)
        return SplitKV(spec, target, scratch(), config)
    groups = 1 if spec.is_fp8_kv and spec.head_dim_v > 192 else index % 2 + 1
    config = DenseConfig(
        groups=groups,
        tile_n=tile_n,
        stages=2,
        query_stages=groups if widest <= 256 else 1,
        ping_pong=groups == 2,
        speculative_max=index // 2 % 2 == 0,
        dequant_stages=dequant_stages,
    )
    return Prefill(spec, target, scratch(), config)


@numbered(ALL, QUICK)
def test_case(index: int, case: Case) -> None:
    emulate(case, "sm_90a", lambda planner, short: make(planner, short, index), index)


def test_quick_cases_exist() -> None:
    assert set(QUICK) <= {case.id for case in ALL}


def defaults(planner: Planner, short: bool) -> Kernel:
    return (SplitKV if short else Prefill)(planner.spec, planner.target, scratch())


WIDE = (*WIDE_CASES, replace(WIDE_CASES[-1], id="fp8-512", dim=512))


@numbered(WIDE, QUICK_WIDE)
def test_wide_heads(index: int, case: Case) -> None:
    emulate(case, "sm_90a", defaults, index)


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
def test_wide_heads_on_every_schedule(index: int) -> None:
    emulate(WIDE_CASES[0], "sm_90a", defaults, index)


@pytest.mark.parametrize("speculative_max", [True, False])
@pytest.mark.parametrize("name", ["large-scores", "negative-scale", "window-sinks", "fp16-growing", "no-number"])
def test_speculative_max(name: str, speculative_max: bool) -> None:
    """Scores far above those before them, a row's first scores, and NaN."""
    growing = Case(q_lens=(40,), kv_lens=(200,), heads=(1, 1), dim=64, dtype=FP16, scale=4.0)
    more = {"fp16-growing": growing, "no-number": Case(q_lens=(70, 3), kv_lens=(200, 70), nan_request=0)}
    config = DenseConfig(groups=2, tile_n=32, stages=2, ping_pong=True, speculative_max=speculative_max)
    make = lambda planner, short: Prefill(planner.spec, planner.target, scratch(), config)  # noqa: E731
    emulate(more.get(name) or by_id(name), "sm_90a", make, 1)


@pytest.mark.parametrize("is_long", [True, False])
def test_config_of_long_queries(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with a query of LONG_QUERY tokens runs the kernel of three warpgroups, any other the default."""
    monkeypatch.setattr(dense_configs, "LONG_QUERY", 200 if is_long else 201)
    made: list[Prefill] = []

    def make(planner: Planner, short: bool) -> Kernel:
        if short:
            return SplitKV(planner.spec, planner.target, scratch())
        made.append(Prefill(planner.spec, planner.target, scratch()))
        return made[-1]

    emulate(Case(q_lens=(200, 3, 30), kv_lens=(333, 90, 30), heads=(4, 2), dim=64), "sm_90a", make, 2)
    assert made[0].other is not None
    assert made[0].other.config.groups == 3
    assert [bool(kernel._functions) for kernel in (made[0], made[0].other)] == [not is_long, is_long]


LONG = Case(id="causal", q_lens=(200, 3, 230), kv_lens=(333, 90, 230), heads=(2, 1), dim=64, page=32)
LONG_CASES = (
    LONG,
    replace(LONG, id="window-softcap", window=(70, None), softcap=3.0),
    replace(LONG, id="not-causal", causality=FULL, dim=48),
)


@pytest.mark.parametrize(
    ("case", "index"),
    [
        pytest.param(case, index, marks=() if index == number else pytest.mark.full, id=f"{case.id}-{schedule}")
        for number, case in enumerate(LONG_CASES)
        for index, schedule in enumerate(("eager", "lazy", "random"))
    ],
)
def test_long_queries(case: Case, index: int) -> None:
    """Tiles of 192 rows, as they are launched: with and without LSE."""

    def make(planner: Planner, short: bool) -> Kernel:
        if short:
            return SplitKV(planner.spec, planner.target, scratch())
        config = dense_configs.long_query_config(planner.spec)
        assert config is not None
        assert config.tile_m == 192
        return Prefill(planner.spec, planner.target, scratch(), config)

    emulate(case, "sm_90a", make, index, sms=2, with_lse=index == 0)


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
def test_fp8_on_every_schedule(index: int) -> None:
    case = by_id("fp8-bf16")
    emulate(case, "sm_90a", lambda planner, short: make(planner, short, index), index)


@pytest.mark.parametrize(
    "dim", [128, *(pytest.param(dim, marks=pytest.mark.full) for dim in (64, 96, 48))], ids="dim-{}".format
)
def test_dequantization_has_no_bank_conflicts(dim: int) -> None:
    case = Case(q_lens=(1,), kv_lens=(130,), heads=(1, 1), dim=dim, fp8=True)
    profile = emulate(case, "sm_90a", lambda planner, short: make(planner, short, 0), 0)
    assert dequant_conflicts(profile) == []


@pytest.mark.parametrize("dim", [*range(16, 257, 16), 384, 512])
@pytest.mark.parametrize("default", [default_config, default_split_config])
def test_default_config_fits_fp8(dim: int, default: Callable[[AttentionSpec], DenseConfig]) -> None:
    spec = replace(FP8_CASES[0], dim=dim).spec
    assert default(spec).objections(spec, from_arch("sm_90a").smem_bytes) == []


@pytest.mark.parametrize(
    "config",
    [
        *(DenseConfig(groups=groups, tile_n=64, stages=2) for groups in REGISTERS),
        *(
            DenseConfig(groups=groups, tile_n=64, stages=2, dequant_stages=2, ctas_per_sm=ctas_per_sm)
            for groups, ctas_per_sm in DEQUANT_REGISTERS
        ),
    ],
    ids=lambda config: f"{config.groups}-{config.ctas_per_sm}-{config.dequant_stages}",
)
def test_roles_share_the_registers_at_launch(config: DenseConfig) -> None:
    """A role that raises its register count waits forever unless others have lowered theirs."""
    mma, load, dequant = config.registers
    assert (config.groups * mma + load + dequant) * 128 <= config.launch_registers * config.threads


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        (DenseConfig(groups=1, tile_n=64, stages=2), {}, "0 fp8 stages"),
        (DenseConfig(groups=1, tile_n=64, stages=2, dequant_stages=1), {}, "1 fp8 stages"),
        (DenseConfig(groups=1, tile_n=64, stages=2, dequant_stages=2), {"fp8": False}, "2 fp8 stages"),
        (DenseConfig(groups=3, tile_n=64, stages=2, dequant_stages=2), {}, "3 warpgroups, 1 CTAs per SM"),
        (DenseConfig(groups=2, tile_n=48, stages=2, dequant_stages=2), {"dim": 256}, "do not fit the 128 of a thread"),
        (DenseConfig(groups=1, tile_n=128, stages=3, dequant_stages=2), {}, "shared memory"),
    ],
)
def test_objections_to_fp8(config: DenseConfig, facts: dict[str, Any], reason: str) -> None:
    spec = replace(FP8_CASES[0], **facts).spec
    assert any(reason in objection for objection in config.objections(spec, from_arch("sm_90a").smem_bytes))


def test_outputs_narrower_than_queries_in_flight() -> None:
    """TMA loads the next queries while a tile's outputs are stored."""
    case = Case(q_lens=(130, 70), kv_lens=(130, 70), heads=(2, 2), dim=192, dim_v=128, page=None)
    config = DenseConfig(groups=1, tile_n=32, stages=2, query_stages=2)
    emulate(case, "sm_90a", lambda planner, short: Prefill(planner.spec, planner.target, scratch(), config), 1)
