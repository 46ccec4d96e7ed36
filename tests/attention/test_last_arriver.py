# SPDX-License-Identifier: Apache-2.0
"""Split output tiles that the last of their CTAs merges: results, the combine kernel's bits, counters, and mistakes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention.cute import combine, last_arriver
from dsl_backend.attention.cute.combine import MAX_SPLITS_PER_WARP, SPLITS_AT_ONCE
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.partial_word import MAX_CTAS, pack, unpack
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import SplitKV
from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Operands
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case
from dsl_backend.testing.check import Result
from dsl_backend.testing.inputs import Problem
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, scratch
from tests.attention.mistakes import Mistake, spoil_methods, spoilt

TILE = 16  # keys
KERNEL = DenseConfig(groups=1, tile_n=TILE, stages=2, min_split_tiles=1)
INSIDE = replace(KERNEL, merge="inside")


class Spoiled(Workspace):
    """Scratch that never holds the partial results of an earlier run."""

    def partials(self, count: int) -> torch.Tensor:
        return super().partials(count).fill_(torch.nan)


def outputs_of(
    case: Case,
    config: DenseConfig,
    sms: int,
    schedule: str,
    workspace: Workspace | None = None,
    runs: int = 1,
    anew: bool = False,
    problem: Problem | None = None,
) -> list[Result]:
    """The results of a case, each of them judged; the counters are 0 behind each run.

    Args:
        problem: of the case, with other numbers: its results are not judged.
        anew: compile the kernel anew, since one that is found was compiled from other source.
    """

    class Fresh(SplitKV):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(DenseForward(key), fake_args(key, fake_dense_tensors(key)), target.arch, "")

    judged, problem, memory = problem is None, problem or case.problem(), workspace or scratch()
    expected, magnitude = problem.expected(), problem.score_magnitude()
    target, found = replace(from_arch("sm_90a"), sm_count=sms), []
    kernel = (Fresh if anew else SplitKV)(problem.spec, target, memory, config)

    def adjust(planner: Planner) -> None:
        planner.short = planner.long = (*planner.long[:2], kernel)

    for seed in range(runs):
        with emulator.device(arch="sm_90a", sms=sms, schedule=schedule, seed=seed, strict=True):
            found.append(check.run(problem, "cute", adjust=adjust, target=target))
        if judged:
            check.judge(found[-1], expected, magnitude)
        assert not memory.flags(0).any()
    return found


def compare(splits: int, dim: int, schedule: str, workspace: Workspace, runs: int = 1, anew: bool = False) -> None:
    """Rows of several tokens and heads, with sinks: the bits of the combine kernel, in each run."""
    case = Case(q_lens=(2,), kv_lens=(4 * splits * TILE - 3,), heads=(3, 1), dim=dim, sinks=True)
    (expected,) = outputs_of(case, KERNEL, splits, schedule)
    for found in outputs_of(case, INSIDE, splits, schedule, workspace, runs, anew):
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize(
    ("schedule", "splits", "dim"),
    [
        pytest.param("eager", 2, 48, marks=pytest.mark.rest),
        pytest.param("lazy", MAX_SPLITS_PER_WARP, 128, marks=pytest.mark.rest),
        ("random", MAX_SPLITS_PER_WARP + 1, 128),
        pytest.param("lazy", 19, 64, marks=pytest.mark.full),
        pytest.param("eager", 27, 256, marks=pytest.mark.full),
    ],
)
def test_bits_of_the_combine_kernel(schedule: str, splits: int, dim: int) -> None:
    """As many splits as one warp sums in turn, and more."""
    compare(splits, dim, schedule, scratch())


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_workspace_is_used_again(schedule: str) -> None:
    """The order in which CTAs arrive differs from run to run; neither bits nor counters do."""
    compare(4, 16, schedule, Spoiled(torch.device("cpu")), runs=3)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(INSIDE, id="inside", marks=pytest.mark.rest),
        pytest.param(replace(KERNEL, early_dependents=True), id="early", marks=pytest.mark.rest),
    ],
)
def test_layers_overlap(config: DenseConfig) -> None:
    """Layers of a captured step share scratch, and each starts before the one in front of it has ended."""
    problem, memory = Case(q_lens=(1,), kv_lens=(12 * TILE,), heads=(2, 1), dim=16).problem(), scratch()
    target = replace(from_arch("sm_90a"), sm_count=3)
    kernel = SplitKV(problem.spec, target, memory, config)
    bound, results = kernel.bind(problem.batch, 0, 1), [check.empty_result(problem) for _ in range(3)]
    with emulator.device(arch="sm_90a", sms=3, schedule="lazy", strict=True) as device, device.capture():
        for one in results:
            bound(Operands(problem.q, None, problem.keys, problem.values, one.out, one.lse, *[None] * 4))
    for one in results:
        check.judge(one, problem.expected(), problem.score_magnitude())
    assert not memory.flags(0).any()


@pytest.mark.full
def test_more_splits_than_scales() -> None:
    """More splits than a warp has scales for at once: the rounding of the combine kernel, not its bits."""
    splits = SPLITS_AT_ONCE + 6
    case = Case(q_lens=(1,), kv_lens=(splits * TILE,), heads=(1, 1), dim=64)
    outputs_of(case, INSIDE, splits, "random")


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_and_many_splits_at_once(schedule: str) -> None:
    """Output tiles of some requests are split, into few or many; a CTA has parts of several."""
    lengths = (5 * TILE, 3, 30 * TILE, 40, 10 * TILE + 1)
    case = Case(q_lens=(1, 1, 2, 1, 1), kv_lens=lengths, heads=(3, 1), dim=80)
    outputs_of(case, INSIDE, 22, schedule)


def test_batch_invariant_layers_are_refused() -> None:
    spec = replace(Case(q_lens=(1,), kv_lens=(1,)).spec, batch_invariant=True)
    for config in (INSIDE, replace(KERNEL, early_dependents=True)):
        assert any("begin at fixed keys" in reason for reason in config.objections(spec, 1 << 18))
    assert not any("begin at fixed keys" in reason for reason in KERNEL.objections(spec, 1 << 18))


@pytest.mark.parametrize("num_ctas", [4, MAX_CTAS + 1])
def test_a_grid_fits_a_word(num_ctas: int) -> None:
    """The last partial result of the largest grid, of an output tile that all CTAs have a part of."""
    spec, target = Case(q_lens=(1,), kv_lens=(1,)).spec, replace(from_arch("sm_90a"), sm_count=num_ctas)
    if num_ctas > MAX_CTAS:
        with pytest.raises(InvalidInput, match=f"{num_ctas} CTAs"):
            SplitKV(spec, target, scratch(), INSIDE)
    facts = (2 * MAX_CTAS - 1, MAX_CTAS - 1, MAX_CTAS)
    assert unpack(pack(*facts)) == facts
    assert 0 <= pack(*facts) < 1 << 31


MISTAKES = (
    Mistake("no fence ahead", last_arriver, "cute.arch.fence_acq_rel_gpu()\n            arrived", "arrived"),
    Mistake("no fence behind", last_arriver, "cute.arch.fence_acq_rel_gpu()\n            is_last", "is_last"),
    Mistake("counter not cleared", last_arriver, "counters[source] = cutlass.Int32(0)", "counters[source] = arrived"),
    Mistake("the first one merges", last_arriver, "arrived == num_splits - 1", "arrived == 0"),
    Mistake(
        "no barrier ahead",
        last_arriver,
        "        self.sync()\n        if self.thread == 0:",
        "        if self.thread == 0:",
    ),
    Mistake("no barrier behind", last_arriver, "        self.sync()\n        if sIsLast", "        if sIsLast"),
    Mistake(
        "another tile's counter", last_arriver, "counters.iterator + source", "counters.iterator + work.head_block"
    ),
)


def mistaken(rows: int) -> None:
    """Two requests of as many query rows, each split, twice on the same workspace."""
    case = Case(q_lens=(1, 1), kv_lens=(9 * TILE, 9 * TILE), heads=(rows, 1), dim=16)
    for schedule in ("lazy", "random"):
        outputs_of(case, INSIDE, 6, schedule, Spoiled(torch.device("cpu")), runs=2, anew=True)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one, id=one.id, marks=pytest.mark.rest if one.id == "no fence ahead" else pytest.mark.full)
        for one in MISTAKES
    ],
)
def test_mistakes_are_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_methods(last_arriver.LastArriver, spoilt(mistake, tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        # The barrier ahead is for rows of several warps, of 16 rows each.
        mistaken(17 if mistake.id == "no barrier ahead" else 2)


def sums_of_far_apart_terms(config: DenseConfig, anew: bool = False) -> torch.Tensor:
    """One row of splits whose sums depend on their order: every eighth one has the same of four values."""
    terms = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])
    splits, keys = 8 * len(terms), 4 * TILE
    case = Case(q_lens=(1,), kv_lens=(splits * keys,), heads=(1, 1), dim=16, page=None)
    problem = case.problem()
    problem.q.zero_()
    rows = terms.repeat_interleave(8 * keys)[:, None, None]
    problem.values[: len(rows)] = rows.to(problem.values.dtype)
    return outputs_of(case, config, splits, "eager", anew=anew, problem=problem)[0].out


@pytest.mark.full
def test_the_order_of_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the combine kernel; another one has another result."""
    expected = sums_of_far_apart_terms(KERNEL)
    assert torch.equal(sums_of_far_apart_terms(INSIDE), expected)
    said = "for i in cutlass.range_constexpr(ROUNDS_IN_FLIGHT):\n            for warp"
    wrong = said.replace("(ROUNDS_IN_FLIGHT)", "(ROUNDS_IN_FLIGHT - 1, -1, -1)")
    spoil_methods(combine.CombineThread, spoilt(Mistake("order", combine, said, wrong), tmp_path), monkeypatch)
    assert not torch.equal(sums_of_far_apart_terms(INSIDE, anew=True), expected)
