# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in the source of stream-K's fixup, split-K's sums, swapped operands and the epilogue."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass.cute.nvgpu import warpgroup as wgmma
from gemm_cases import CASES, Emulated, emulate

from dsl_backend.gemm import epilogue, host, small_m
from dsl_backend.gemm.sm90 import gemm, swap_ab
from dsl_backend.primitives.accumulators import fence_operand
from emulator.errors import EmulatorError, FindingsError, HostError
from tests.mistakes import Mistake, compile_again, spoilt

# A tile of several shares, with SwiGLU.
(CASE,) = (one for one in CASES if one.id == "small-m")
# A tile of two CTAs.
(SPLIT_K,) = (one for one in CASES if one.id == "split-k")
# A tile of three, of which the last finishes less.
UNEVEN = next(one for one in CASES if one.id == "split-k-uneven")
# A tile that is stored in two pieces, with a bias.
(SWAP_AB,) = (one for one in CASES if one.id == "swap-ab-wide")
# Consumers that take turns, with several tiles each.
(PINGPONG,) = (one for one in CASES if one.id == "pingpong-turns")
BARRIER = "        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)\n"
THREAD_0 = "        if thread == 0"
RESET = 'cute.arch.store(flag, cutlass.Int32({}), sem="relaxed"'
MISTAKES = (
    Mistake("a flag before all partial sums are stored", small_m, BARRIER + THREAD_0, THREAD_0),
    Mistake("a flag without release", small_m, 'Int32(1), sem="release"', 'Int32(1), sem="relaxed"'),
    Mistake("partial sums before their flag", small_m, "while stored == 0", "while stored != 0"),
    Mistake("a flag that stays set", small_m, RESET.format(0), RESET.format(1)),
    Mistake("the sigmoid of ups", epilogue, "using.sigmoids(gates, self.alpha)", "using.sigmoids(ups, self.alpha)"),
)
SPLIT_K_MISTAKES = (
    Mistake("partial sums are not awaited", small_m, "        cute.arch.mbarrier_wait(received.mbar, 0)\n", ""),
    Mistake("a CTA's own partial sums are sent twice", small_m, "received.mbar, split)", "received.mbar, own)"),
    Mistake("the other CTA's half is finished", small_m, "first_finished(split) +", "first_finished(split ^ 1) +"),
    Mistake("CTAs send before they have met", small_m, "            cute.arch.cluster_wait()\n", "            pass\n"),
    Mistake(
        "a part of k is left out", small_m, "first + share(k_tiles, self.num_splits, split + 1)", "first + k_tiles // 2"
    ),
)
FENCE = '            cute.arch.fence_proxy("async.shared", space="cta")\n'
READ = ":\n                cute.arch.cp_async_bulk_wait_group"
SWAP_AB_MISTAKES = (
    Mistake("a store without a fence", swap_ab, FENCE, ""),
    Mistake("a buffer that is still stored", swap_ab, "thread < 32" + READ, "thread < 0" + READ),
    Mistake("vectors out of place", swap_ab, "lane // 2 % 4", "lane % 4"),
    Mistake("ups as gates", swap_ab, "acc[(a, part, j), mma_tile, 0] for", "acc[(a, 1 - part, j), mma_tile, 0] for"),
    Mistake("the first box twice", swap_ab, "2 * n_tile + index", "2 * n_tile"),
    Mistake("the bias of the first 64 rows", swap_ab, "column + mma_tile * MMA_OUT", "column"),
    Mistake("gate and up halves of another order", swap_ab, "stride=(row, part,", "stride=(part, row,"),
)
QUICK = ("a flag without release", "partial sums are not awaited", "a store without a fence")


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, host)


def run(one: Emulated = CASE) -> None:
    for schedule in ("lazy", "random"):
        emulate(one, schedule, seed=1)


@pytest.mark.rest
@pytest.mark.parametrize("one", [CASE, SPLIT_K, SWAP_AB], ids=lambda one: one.id)
def test_right_without_a_mistake(one: Emulated) -> None:
    run(one)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one in MISTAKES]
)
def test_mistake_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module is small_m:
        for name in ("store_partials", "add_partials"):
            monkeypatch.setattr(small_m.SmallMGemmBase, name, getattr(module.SmallMGemmBase, name))
    else:
        monkeypatch.setattr(small_m, "epilogue_of", module.epilogue_of)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run()
    assert not isinstance(raised.value, HostError), "it ran"


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one in SPLIT_K_MISTAKES],
)
def test_mistake_in_split_k_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    for name in ("sum_splits", "meet_end", "work"):
        monkeypatch.setattr(small_m.SmallMGemmBase, name, getattr(module.SmallMGemmBase, name))
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(SPLIT_K)
    assert not isinstance(raised.value, HostError), "it ran"


@pytest.mark.rest
def test_what_two_ctas_sum_up_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_m.SmallMGemmBase, "finished_token", lambda self, token, i: token)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(UNEVEN)
    assert not isinstance(raised.value, HostError), "it ran"


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one in SWAP_AB_MISTAKES],
)
def test_mistake_in_swapped_operands_is_found(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = spoilt(mistake, tmp_path)
    for name in ("init_acc", "epilogue", "convert", "stage_out", "box", "weight_copy"):
        monkeypatch.setattr(swap_ab.SwapABGemm, name, getattr(module.SwapABGemm, name))
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(SWAP_AB)
    assert not isinstance(raised.value, HostError), "it ran"


def test_consumers_that_take_no_turns_may_confuse_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage comes round in the other consumer's tile, whose end a consumer has no other way to know."""

    def finish_mainloop(
        self: gemm.Gemm, pipeline: Any, acc: Any, tile: Any, tiles: Any, k_tiles: Any, group: Any, thread: Any
    ) -> None:
        wgmma.wait_group(0)
        fence_operand(acc)
        pipeline.warpgroup_release(tile * k_tiles + k_tiles - 1, thread)

    monkeypatch.setattr(gemm.Gemm, "await_order", lambda *given: None)
    monkeypatch.setattr(gemm.Gemm, "finish_mainloop", finish_mainloop)
    with pytest.raises(FindingsError, match="a wait for phase"):
        emulate(PINGPONG, "eager")
