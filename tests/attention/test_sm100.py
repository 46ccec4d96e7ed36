# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernels on the emulator: correct, and without findings, whatever surrounds their data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import pytest

from dsl_backend.attention.cute.host import nothing
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.two_cta import TwoCtaTileScheduler
from dsl_backend.attention.cute.sizes import packed_gqa_heads, padded
from dsl_backend.attention.cute.sm100 import dense_correction, dense_softmax
from dsl_backend.attention.cute.sm100.dense_configs import (
    SWAP_AB_HEAD_DIM_V,
    WARP,
    DenseConfig,
    default_config,
    default_split_config,
    few_rows_config,
    variants,
)
from dsl_backend.attention.cute.sm100.dense_host import Prefill, SplitKV
from dsl_backend.attention.cute.sm100.dense_mma import MmaWarp
from dsl_backend.attention.cute.sm100.idle_warps import arrive_count_of
from dsl_backend.attention.cute.sm100.shared_s import QkWarp, SharedSCorrectionWarps, SharedSSoftmaxWarps
from dsl_backend.attention.cute.sm100.two_cta_correction import TwoCtaCorrectionWarps
from dsl_backend.attention.cute.sm100.two_cta_kernel import TwoCtaForward
from dsl_backend.attention.cute.sm100.two_cta_mma import TwoCtaMmaWarp
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.cases import Case, by_id
from dsl_backend.testing.inputs import Layout, Surroundings
from emulator.errors import EmulatorError
from tests.attention.emulated import (
    FP8_CASES,
    PAIR_CASES,
    QUICK_PAIR,
    QUICK_SHARED_RING,
    QUICK_SWAPPED,
    QUICK_WIDE,
    SERVED,
    SERVED_FP8,
    SHARED_RING_CASES,
    WIDE_CASES,
    dequant_conflicts,
    emulate,
    numbered,
    scratch,
)

ALL = (*SERVED, *SERVED_FP8, *FP8_CASES)
# For every change: each warp role, pipeline, mask, score modification and layout once.
QUICK = ("mixed", "window-sinks", "softcap", "packed-192-128", "fp8-128")
REGISTERS = 1 << 16  # of an SM


def make(planner: Planner, short: bool, index: int) -> Kernel:
    spec, target = planner.spec, planner.target
    softmax_warpgroups = 1 if spec.head_dim_v > 128 else index % 2 + 1
    stages, query_stages, tile_n, dequant_stages = 2 + index % 2, 1 + index % 2, 64 if spec.head_dim <= 256 else 32, 0
    if spec.is_quantized_kv:
        stages, query_stages, dequant_stages = 2, 1, 2 + index % 2
        tile_n = 32 if spec.head_dim > 192 else 64
    config = DenseConfig(
        softmax_warpgroups=softmax_warpgroups,
        tile_n=tile_n,
        stages=stages,
        query_stages=query_stages,
        dequant_stages=dequant_stages,
        late_p_keys=tile_n // 64 * 32 * (1 - index // 2 % 2),
    )
    if short:
        config = replace(config, alternate=softmax_warpgroups == 2, query_stages=1, min_split_tiles=1)
    if config.objections(spec, target.smem_bytes):
        # Wide heads leave no room for more.
        config = replace(config, stages=2, query_stages=1, dequant_stages=min(2, dequant_stages))
    return (SplitKV if short else Prefill)(spec, target, scratch(), config)


@numbered(ALL, QUICK)
def test_case(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: make(planner, short, index), index)


# One, two, three or all four warps of a row tile have rows, and both SMs have several work tiles.
ACTIVE = Case(
    id="active",
    q_lens=(1, 16, 4, 12, 1, 5, 16, 2),
    kv_lens=(300, 100, 90, 150, 65, 130, 16, 70),
    heads=(8, 1),
    window=(90, None),
    page=32,
    q_gain=4.0,
    around=Surroundings(layout=Layout.SEPARATE),
    why="a warp is idle for a work tile, and active for the next one",
)


@pytest.mark.parametrize("index", [0, 1, *(pytest.param(i, marks=pytest.mark.full) for i in range(2, 6))])
def test_idle_warps(index: int) -> None:
    """On three schedules, with S stages that alternate and with one S stage."""
    emulate(ACTIVE, "sm_100a", lambda planner, short: make(planner, short, index), index, sms=2)


@pytest.mark.parametrize(
    "page", [128, pytest.param(64, marks=pytest.mark.full), pytest.param(192, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("index", [1, *(pytest.param(i, marks=pytest.mark.full) for i in (0, 2))])
def test_a_tile_lies_in_one_page(page: int, index: int) -> None:
    """A tile is all of a page, or a half or a third of it; K and V have three stages, or two."""
    case = replace(ACTIVE, page=page, kv_lens=(300, 200, 4, 450, 65, 130, 16, 64))
    emulate(case, "sm_100a", lambda planner, short: make(planner, short, index), index, sms=2)


CONTROLLED = (
    Case(
        id="ragged",
        q_lens=(70, 150, 2, 0, 33),
        kv_lens=(70, 260, 90, 0, 120),
        heads=(2, 1),
        page=32,
        around=Surroundings(layout=Layout.SEPARATE),
        why="work tiles of all lengths, and requests of another kernel in the same batch",
    ),
    Case(
        id="window",
        q_lens=(140, 40, 270),
        kv_lens=(300, 40, 290),
        heads=(2, 2),
        dim=80,
        window=(90, None),
        page=None,
        sinks=True,
        why="a request's last tile is shorter than the one before it; packed keys",
    ),
)


def controlled(planner: Planner, short: bool, index: int) -> Kernel:
    if short:
        return make(planner, short, index)
    config = DenseConfig(softmax_warpgroups=1 + index % 2, tile_n=64, query_stages=1 + index % 2, use_clc=True)
    assert config.objections(planner.spec, planner.target.smem_bytes) == []
    return Prefill(planner.spec, planner.target, scratch(), config)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("case", CONTROLLED, ids=lambda case: case.id)
def test_clc(case: Case, index: int) -> None:
    """Two CTAs run at a time, and cancel the launch of others."""
    profile = emulate(case, "sm_100a", lambda planner, short: controlled(planner, short, index), index, sms=2)
    assert sum(kernel.events["clusters cancelled"] for kernel in profile.kernels.values()) > 2


def bound(batch: Batch, min_seqlen_q: int = 0) -> int:
    """CTAs of a grid with 256 rows a tile."""
    spec, target = CONTROLLED[0].spec, from_arch("sm_100a")
    return Prefill(spec, target, scratch(), DenseConfig(use_clc=True)).grid(batch, min_seqlen_q)


@pytest.mark.parametrize("min_seqlen_q", [1, 3, 17])
@pytest.mark.parametrize("q_lens", [(1,), (256,), (257, 255), (2, 300, 0, 17, 512), (16,) * 9, (16, 18) * 9])
def test_a_grid_has_a_cta_for_each_work_tile(q_lens: tuple[int, ...], min_seqlen_q: int) -> None:
    batch = replace(CONTROLLED[0], q_lens=q_lens, kv_lens=q_lens).problem().batch
    work_tiles = 2 * sum(-(-length // 256) for length in q_lens if length >= min_seqlen_q)
    assert max(work_tiles, 1) <= bound(batch, min_seqlen_q) <= work_tiles + 2 * len(q_lens) + 2


def test_an_empty_batch_launches_nothing() -> None:
    spec, target = CONTROLLED[0].spec, from_arch("sm_100a")
    kernel = Prefill(spec, target, scratch(), DenseConfig(use_clc=True))
    batch = CONTROLLED[0].problem().batch
    assert kernel.bind(replace(batch, seq_lens=batch.seq_lens[:0]), 0, 1) is nothing
    assert kernel.bind(replace(batch, num_tokens=0), 0, 1) is nothing


def test_clc_needs_whole_key_ranges() -> None:
    spec, target = CONTROLLED[0].spec, from_arch("sm_100a")
    alternating = DenseConfig(alternate=True, use_clc=True)
    assert any("key ranges are split" in reason for reason in alternating.objections(spec, target.smem_bytes))
    with pytest.raises(InvalidInput, match="key ranges are split"):
        SplitKV(spec, target, scratch(), DenseConfig(use_clc=True))


def rounded_down(work: Any, thread: Any) -> Any:
    """A warp with only some rows is idle."""
    return arrive_count_of(work._replace(num_rows=work.num_rows - WARP + 1), thread)


def once(work: Any, thread: Any) -> Any:
    """No thread arrives for idle warps."""
    return cutlass.min(arrive_count_of(work, thread), 1)


def unwaited(*_: Any) -> None:
    """Does not wait."""


def released_at_once(warp: MmaWarp, q_stage: Any, last: Any) -> None:
    """Q is signalled as empty in the first step rather than the last one."""
    RELEASE_Q(warp, q_stage, cutlass.Boolean(True))


RELEASE_Q = MmaWarp.release_q
WORK_TILE = Mask.work_tile


def whole_to_the_end(*args: Any) -> Any:
    """The tile in which a row's keys end is not masked."""
    work = WORK_TILE(*args)
    return work._replace(n_block_full_max=work.n_block_max)


def whole_from_the_beginning(*args: Any) -> Any:
    """The tile in which a row's window begins is not masked."""
    work = WORK_TILE(*args)
    return work._replace(n_block_full_min=work.n_block_min)


@pytest.mark.full
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("modules", "name", "mistake"),
    [
        ((dense_softmax, dense_correction), "arrive_count_of", rounded_down),
        ((dense_softmax,), "arrive_count_of", once),
        ((dense_correction,), "arrive_count_of", once),
        ((Mask,), "work_tile", whole_to_the_end),
        ((Mask,), "work_tile", whole_from_the_beginning),
    ],
)
def test_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[Any, ...], name: str, mistake: Callable[..., Any]
) -> None:
    for module in modules:
        monkeypatch.setattr(module, name, mistake)
    with pytest.raises((EmulatorError, AssertionError)):
        emulate(ACTIVE, "sm_100a", lambda planner, short: make(planner, short, 1), 0, sms=2)


def test_quick_cases_exist() -> None:
    assert set(QUICK) <= {case.id for case in ALL}


def defaults(planner: Planner, short: bool) -> Kernel:
    return (SplitKV if short else Prefill)(planner.spec, planner.target, scratch())


@numbered(WIDE_CASES, QUICK_WIDE)
def test_wide_heads(index: int, case: Case) -> None:
    emulate(case, "sm_100a", defaults, index)


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
def test_wide_heads_on_every_schedule(index: int) -> None:
    emulate(WIDE_CASES[0], "sm_100a", defaults, index)


def sharing(planner: Planner, short: bool, index: int) -> Kernel:
    """K and V share their stages, with tiles so small that every stage is used again."""
    config = DenseConfig(
        shared_kv_stages=True,
        softmax_warpgroups=2 - (index + index // 2) % 2,
        tile_n=32 + 32 * (index % 3 // 2),
        query_stages=1 + index % 2,
        late_p_keys=32 * (index % 3 // 2),
        min_split_tiles=1,
    )
    assert config.objections(planner.spec, planner.target.smem_bytes) == []
    return (SplitKV if short else Prefill)(planner.spec, planner.target, scratch(), config)


@numbered(SHARED_RING_CASES, QUICK_SHARED_RING)
def test_shared_kv_stages(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: sharing(planner, short, index), index)


@pytest.mark.full
@pytest.mark.parametrize("index", range(1, 4))
@pytest.mark.parametrize("case", SHARED_RING_CASES, ids=lambda case: case.id)
def test_shared_kv_stages_on_every_schedule(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: sharing(planner, short, index + 1), index)


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
def test_shared_kv_stages_by_default_on_every_schedule(index: int) -> None:
    assert default_config(SHARED_RING_CASES[0].spec).shared_kv_stages
    emulate(replace(SHARED_RING_CASES[0], kv_lens=(700, 7, 290)), "sm_100a", defaults, index)


def paired(planner: Planner, short: bool, index: int) -> Kernel:
    """All numbers of stages; tiles so small that every stage is used again."""
    if short:
        return SplitKV(planner.spec, planner.target, scratch())
    tile_n, stages, query_stages = ((64, 3, 1), (128, 2, 1), (32, 4, 2), (96, 2, 1))[index % 4]
    config = DenseConfig(softmax_warpgroups=1, two_cta=True, tile_n=tile_n, stages=stages, query_stages=query_stages)
    assert config.objections(planner.spec, planner.target.smem_bytes) == []
    return Prefill(planner.spec, planner.target, scratch(), config)


@numbered(PAIR_CASES, QUICK_PAIR)
def test_two_cta(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: paired(planner, short, index), index)


@pytest.mark.full
@pytest.mark.parametrize("index", range(1, 4))
@pytest.mark.parametrize("case", PAIR_CASES, ids=lambda case: case.id)
def test_two_cta_on_every_schedule(index: int, case: Case) -> None:
    """Two CTAs have all work tiles, or share them with two others."""
    emulate(case, "sm_100a", lambda planner, short: paired(planner, short, index + 1), index, sms=2 + 2 * (index % 2))


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
def test_two_cta_by_default_on_every_schedule(index: int) -> None:
    assert default_config(PAIR_CASES[0].spec).two_cta
    emulate(PAIR_CASES[0], "sm_100a", defaults, index)


def swapped(planner: Planner, short: bool, index: int) -> Kernel:
    """Swapped operands for short queries; all numbers of stages."""
    spec, target = planner.spec, planner.target
    if not short:
        return Prefill(spec, target, scratch())
    rows = 32 if packed_gqa_heads(spec.group) > 16 or index % 4 == 3 else 16
    config = DenseConfig(
        alternate=True,
        swap_ab=rows,
        ex2_emulation=0,
        stages=2 + index % 2,
        query_stages=1 + index % 2,
        min_split_tiles=1,
    )
    if config.objections(spec, target.smem_bytes):
        config = replace(config, stages=2)
    assert config.objections(spec, target.smem_bytes) == []
    return SplitKV(spec, target, scratch(), config)


def may_swap(case: Case) -> bool:
    return padded(case.spec.head_dim_v) in SWAP_AB_HEAD_DIM_V


@numbered([case for case in SERVED if may_swap(case)], QUICK_SWAPPED)
def test_swap_ab(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: swapped(planner, short, index), index)


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 6))])
def test_swap_ab_on_every_schedule(index: int) -> None:
    """Work tiles of one key tile and of many; row_max that grows, and keys that some rows do not see."""
    case = replace(ACTIVE, heads=(4, 2), q_lens=(1, 8, 4, 3, 1, 5, 8, 2), kv_lens=(900, 100, 90, 150, 650, 130, 8, 70))
    emulate(case, "sm_100a", lambda planner, short: swapped(planner, short, index), index, sms=2)


@pytest.mark.full
@pytest.mark.parametrize("index", range(6))
def test_keys_that_few_rows_see(index: int) -> None:
    """A tile that one row sees nothing of, before others of which it does, and the reverse."""
    case = replace(
        ACTIVE,
        heads=(2, 1),
        q_lens=(8, 8, 3),
        kv_lens=(600, 400, 513),
        window=(100, None),
        page=16,
        alibi=index % 2 > 0,
    )
    emulate(case, "sm_100a", lambda planner, short: swapped(planner, short, index), index, sms=1 + index % 2)


@pytest.mark.parametrize("few", [True, False])
def test_few_rows_swap_ab_by_default(few: bool) -> None:
    made: list[SplitKV] = []

    def make(planner: Planner, short: bool) -> Kernel:
        made.append(defaults(planner, short))
        return made[-1]

    emulate(Case(q_lens=(4, 1, 2 if few else 5), kv_lens=(333, 90, 30), heads=(8, 2), dim=64), "sm_100a", make, 2)
    kernel = next(kernel for kernel in made if kernel.split)
    assert kernel.other is not None
    assert kernel.other.config.swap_ab == 16
    assert [bool(one._functions) for one in (kernel, kernel.other)] == [not few, few]


@pytest.mark.parametrize(
    ("facts", "rows", "stages"),
    [
        ({}, 16, 3),
        ({"dim": 64}, 16, 6),
        ({"heads": (32, 1)}, 32, 3),
        ({"dim": 192, "dim_v": 128}, 16, 2),
        ({"heads": (48, 1)}, 0, 0),
        ({"dim": 96}, 0, 0),
        ({"dim": 256}, 0, 0),
        ({"fp8": True}, 0, 0),
        ({"batch_invariant": True}, 0, 0),
    ],
)
def test_which_layers_swap_ab(facts: dict[str, Any], rows: int, stages: int) -> None:
    case = Case(q_lens=(1,), kv_lens=(1,), heads=(8, 2), dim=128)
    invariant = facts.get("batch_invariant", False)
    spec = replace(case, **{name: value for name, value in facts.items() if name != "batch_invariant"}).spec
    spec = replace(spec, batch_invariant=invariant)
    config = few_rows_config(spec, from_arch("sm_100a").smem_bytes)
    assert (config is not None) == (rows > 0)
    if config is not None:
        assert (config.swap_ab, config.stages) == (rows, stages)
        assert config.registers.softmax * 2 * 128 + config.registers.other * 128 <= REGISTERS


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({"swap_ab": 8}, {}, "8 query rows with swapped operands"),
        ({"alternate": False}, {}, "S stages that alternate, and tiles of 128 keys"),
        ({"tile_n": 64}, {}, "S stages that alternate, and tiles of 128 keys"),
        ({"ex2_emulation": 2}, {}, "exp2 emulation"),
        ({"dequant_stages": 2}, {"fp8": True}, "fp8 cache"),
        ({}, {"dim": 96}, "values of 96 elements"),
        ({"stages": 4}, {}, "shared memory"),
    ],
)
def test_swap_ab_objections(changes: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    spec = replace(Case(q_lens=(1,), kv_lens=(1,), heads=(8, 2), dim=128), **facts).spec
    config = replace(DenseConfig(alternate=True, swap_ab=16, ex2_emulation=0), **changes)
    assert any(reason in objection for objection in config.objections(spec, from_arch("sm_100a").smem_bytes))


# Two or three work tiles for each CTA, of one to seven key tiles; row_max grows.
SHARED_S = (
    Case(
        id="narrow",
        q_lens=(270, 20, 300, 40),
        kv_lens=(290, 150, 401, 40),
        heads=(2, 1),
        dim=64,
        page=32,
        q_gain=4.0,
        around=Surroundings(layout=Layout.SEPARATE),
        why="work tiles of all lengths, beside requests of another kernel",
    ),
    Case(
        id="windows",
        q_lens=(140, 300),
        kv_lens=(300, 430),
        heads=(2, 2),
        dim=96,
        window=(90, None),
        page=None,
        sinks=True,
        q_gain=4.0,
        why="values before windows are cleared while the next S is made; packed keys",
    ),
    Case(
        id="wider-keys",
        q_lens=(140, 300),
        kv_lens=(300, 430),
        heads=(1, 1),
        dim=96,
        dim_v=32,
        page=None,
        q_gain=4.0,
        why="values of another width",
    ),
)


def sharing_s(planner: Planner, short: bool, index: int) -> Kernel:
    """P in one piece or two, outputs through shared memory or not."""
    if short:
        return SplitKV(planner.spec, planner.target, scratch())
    config = DenseConfig(
        tile_n=(64, 96, 64, 32)[index % 4],
        stages=2 + index // 2 % 2,
        query_stages=2 - index // 3 % 2,
        shared_s=True,
        late_p_keys=32 * (index % 3 > 0) if index % 4 < 3 else 0,
        direct_output=index % 3 == 1,
        use_clc=index % 4 == 2,
    )
    assert config.objections(planner.spec, planner.target.smem_bytes) == []
    return Prefill(planner.spec, planner.target, scratch(), config)


@numbered(SHARED_S, ("narrow", "windows"))
def test_shared_s(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: sharing_s(planner, short, index), index, sms=2)


@pytest.mark.full
@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("case", SHARED_S, ids=lambda case: case.id)
def test_shared_s_on_every_schedule(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: sharing_s(planner, short, index + 1), index, sms=2)


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 6))])
def test_shared_s_by_default_on_every_schedule(index: int) -> None:
    case = SHARED_S[index // 3]
    assert default_config(case.spec).shared_s
    emulate(case, "sm_100a", defaults, index, sms=2)


# Keys and values share stages, so that Q has one; outputs leave from registers.
DIRECT = replace(SHARED_S[2], id="direct", dim=192, dim_v=128, why="Q of the next work tile replaces one that is read")


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 3))])
def test_direct_outputs_by_default_on_every_schedule(index: int) -> None:
    assert default_config(DIRECT.spec).direct_output
    emulate(DIRECT, "sm_100a", defaults, index, sms=2)


@pytest.mark.full
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("role", "name", "index"),
    [
        (QkWarp, "wait_s", 1),
        (SharedSSoftmaxWarps, "wait_p", 1),
        (SharedSSoftmaxWarps, "wait_final_stats_read", 1),
        (SharedSCorrectionWarps, "wait_pv", 1),
        (SharedSCorrectionWarps, "wait_others", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shared_s_mistakes_are_found(monkeypatch: pytest.MonkeyPatch, role: type, name: str, index: int) -> None:
    monkeypatch.setattr(role, name, unwaited)
    with pytest.raises((EmulatorError, AssertionError)):
        emulate(SHARED_S[0], "sm_100a", lambda planner, short: sharing_s(planner, short, index + 1), index, sms=2)


@pytest.mark.full
@pytest.mark.usefixtures("uncached")
def test_q_released_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of the last Q K^T."""
    monkeypatch.setattr(MmaWarp, "release_q", released_at_once)
    with pytest.raises((EmulatorError, AssertionError)):
        emulate(DIRECT, "sm_100a", defaults, 1, sms=2)


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({"alternate": True}, {}, "S is shared"),
        ({"softmax_warpgroups": 1}, {}, "S is shared"),
        ({"dequant_stages": 2}, {"fp8": True}, "S is shared"),
        ({}, {"dim": 144}, "columns of tensor memory"),
        ({"direct_output": True, "softmax_warpgroups": 1}, {}, "direct outputs"),
    ],
)
def test_shared_s_objections(changes: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    smem_bytes = from_arch("sm_100a").smem_bytes
    assert DenseConfig(shared_s=True).objections(SHARED_S[0].spec, smem_bytes) == []
    spec, config = replace(SHARED_S[0], **facts).spec, replace(DenseConfig(shared_s=True), **changes)
    assert any(reason in objection for objection in config.objections(spec, smem_bytes))


# Several work tiles for two CTAs, each of more key tiles than there are stages; row_max grows.
MANY = replace(PAIR_CASES[2], q_lens=(270, 20, 300), kv_lens=(290, 150, 401))


@pytest.mark.full
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("role", "name", "mistake", "index"),
    [
        (TwoCtaCorrectionWarps, "wait_pv", unwaited, 1),
        (TwoCtaCorrectionWarps, "clear_v_after_end", unwaited, 0),
        (TwoCtaMmaWarp, "wait_v", unwaited, 1),
        (TwoCtaTileScheduler, "wait_message_read", unwaited, 1),
        (TwoCtaForward, "cluster_sync", unwaited, 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_cta_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, role: type, name: str, mistake: Callable[..., Any], index: int
) -> None:
    monkeypatch.setattr(role, name, mistake)
    with pytest.raises((EmulatorError, AssertionError)):
        emulate(MANY, "sm_100a", lambda planner, short: paired(planner, short, 0), index, sms=2)


@pytest.mark.parametrize(
    ("dims", "facts", "two_cta", "tried"),
    [
        ((256, 256), {}, True, True),
        ((192, 256), {}, True, True),
        ((160, 160), {}, True, True),
        ((144, 144), {}, False, False),
        ((256, 256), {"fp8": True}, False, False),
        ((512, 512), {}, False, True),
        ((128, 128), {}, False, False),
    ],
)
def test_which_layers_use_two_cta(dims: tuple[int, int], facts: dict[str, Any], two_cta: bool, tried: bool) -> None:
    spec = replace(PAIR_CASES[0], dim=dims[0], dim_v=dims[1], **facts).spec
    smem_bytes = from_arch("sm_100a").smem_bytes
    assert default_config(spec).two_cta == two_cta
    assert not default_split_config(spec).two_cta
    assert default_config(spec).objections(spec, smem_bytes) == []
    assert any(config.two_cta for config in variants(spec, smem_bytes)) == tried


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({"softmax_warpgroups": 2}, {}, "2 softmax warpgroups of a CTA with a peer"),
        ({"use_clc": True}, {}, "cluster launch control"),
        ({"dequant_stages": 2}, {"fp8": True}, "fp8 cache"),
        ({}, {"dim": 144}, "values of 144 elements"),
        ({"stages": 3}, {}, "shared memory"),
        ({}, {"dim": 512}, "shared memory"),
    ],
)
def test_two_cta_objections(changes: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    spec = replace(PAIR_CASES[0], **facts).spec
    config = replace(DenseConfig(softmax_warpgroups=1, two_cta=True), **changes)
    assert any(reason in objection for objection in config.objections(spec, from_arch("sm_100a").smem_bytes))


def test_two_cta_needs_whole_key_ranges() -> None:
    spec, target = PAIR_CASES[0].spec, from_arch("sm_100a")
    with pytest.raises(InvalidInput, match="key ranges are split"):
        SplitKV(spec, target, scratch(), DenseConfig(softmax_warpgroups=1, two_cta=True))


def test_a_two_cta_grid_is_even() -> None:
    target = replace(from_arch("sm_100a"), sm_count=7)
    assert Prefill(PAIR_CASES[0].spec, target, scratch()).num_ctas == 6


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("case", [by_id("fp8-bf16"), FP8_CASES[0]], ids=lambda case: case.id)
def test_fp8_by_default_on_every_schedule(case: Case, index: int) -> None:
    emulate(case, "sm_100a", defaults, index)


@pytest.mark.full
@pytest.mark.parametrize("dim", [128, 64, 96, 48], ids="dim-{}".format)
def test_dequantization_hits_no_bank_twice(dim: int) -> None:
    case = Case(q_lens=(1,), kv_lens=(130,), heads=(1, 1), dim=dim, fp8=True)
    assert dequant_conflicts(emulate(case, "sm_100a", defaults, 0)) == []


@pytest.mark.parametrize("dim", [*range(16, 257, 16), 384])
@pytest.mark.parametrize("default", [default_config, default_split_config])
def test_default_config_fits_fp8(dim: int, default: Callable[[AttentionSpec], DenseConfig]) -> None:
    spec = replace(FP8_CASES[0], dim=dim).spec
    assert default(spec).objections(spec, from_arch("sm_100a").smem_bytes) == []


@pytest.mark.parametrize(
    "config",
    [
        *(
            DenseConfig(softmax_warpgroups=softmax_warpgroups, dequant_stages=dequant_stages)
            for softmax_warpgroups in (1, 2)
            for dequant_stages in (0, 2)
        ),
        DenseConfig(softmax_warpgroups=1, two_cta=True),
        DenseConfig(shared_s=True),
    ],
    ids=lambda config: f"{config.softmax_warpgroups}-{config.dequant_stages}-{config.two_cta}-{config.shared_s}",
)
def test_roles_share_the_registers_of_a_cta(config: DenseConfig) -> None:
    """A role would wait forever for registers that no other role releases."""
    softmax, correction, other, dequant = config.registers
    first = REGISTERS // config.threads // 8 * 8
    # With one softmax warpgroup, the warps of the second one are idle; a CTA with a peer does not have them.
    idle = 1 if config.two_cta else 3 - config.softmax_warpgroups
    assert (config.softmax_warpgroups * softmax + correction + idle * other + dequant) * 128 <= first * config.threads


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        (DenseConfig(), {}, "0 fp8 stages"),
        (DenseConfig(dequant_stages=1), {}, "1 fp8 stages"),
        (DenseConfig(dequant_stages=2), {"fp8": False}, "2 fp8 stages"),
        (DenseConfig(dequant_stages=2), {}, "shared memory"),
        (DenseConfig(softmax_warpgroups=1, tile_n=32, dequant_stages=2), {"dim": 512}, "shared memory"),
    ],
)
def test_objections_to_fp8(config: DenseConfig, facts: dict[str, Any], reason: str) -> None:
    spec = replace(FP8_CASES[0], **facts).spec
    assert any(reason in objection for objection in config.objections(spec, from_arch("sm_100a").smem_bytes))


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({}, {"dim": 96}, "keys are narrower"),
        ({"stages": 3}, {}, "3 stages"),
        ({"alternate": True}, {}, "S stages alternate"),
        ({"dequant_stages": 2}, {"fp8": True}, "cache is fp8"),
        ({}, {"dim": 256}, "shared memory"),
        ({"query_stages": 2}, {}, "shared memory"),
    ],
)
def test_shared_kv_objections(changes: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    spec = replace(SHARED_RING_CASES[0], **facts).spec
    config = replace(DenseConfig(shared_kv_stages=True), **changes)
    assert any(reason in objection for objection in config.objections(spec, from_arch("sm_100a").smem_bytes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"late_p_keys": 48}, "48 keys"),
        ({"late_p_keys": 64}, "64 keys"),
        ({"late_p_keys": -32}, "-32 keys"),
        ({"late_p_keys": 32, "softmax_warpgroups": 1, "two_cta": True}, "P in one piece"),
        ({"late_p_keys": 32, "swap_ab": 16, "alternate": True}, "P in one piece"),
    ],
)
def test_late_p_objections(changes: dict[str, Any], reason: str) -> None:
    target, spec = from_arch("sm_100a"), SERVED[0].spec
    assert DenseConfig(tile_n=64, late_p_keys=32).objections(spec, target.smem_bytes) == []
    config = replace(DenseConfig(tile_n=64), **changes)
    assert any(reason in objection for objection in config.objections(spec, target.smem_bytes))


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (192, 64), (176, 112), (144, 128), (224, 32), (208, 48)])
def test_default_config_fits_keys_wider_than_values(dim: int, dim_v: int) -> None:
    spec = replace(SHARED_RING_CASES[0], dim=dim, dim_v=dim_v).spec
    reasons = default_config(spec).objections(spec, from_arch("sm_100a").smem_bytes)
    assert not any("share" in reason for reason in reasons)
