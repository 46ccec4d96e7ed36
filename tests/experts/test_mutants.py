# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernels of experts, each of which a case on the emulator finds."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cutlass.cute.runtime import make_fake_stream
from experts_cases import ADDING, EMULATED, MANY, SMS, TARGETS, Emulated

import emulator
from dsl_backend.experts.cute import combine, grouped, host, layer, routing
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.sm90 import grouped as sm90_grouped
from dsl_backend.experts.cute.sm100 import grouped as sm100_grouped
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import judge, tensors
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, spoil_methods, spoilt

KNOWN = {one.id: one for one in EMULATED}
# Three experts whose rows end within a tile, one k tile that is not whole, four that are.
RAGGED = Emulated(id="ragged", why="", case=replace(MANY, hidden=328, width=104, biases=True), config="split")
ORDER = Emulated(id="order", why="", case=replace(MANY, tokens=300, num_experts=2), config="pingpong")
TALL = Emulated(id="tall", why="", case=replace(MANY, tokens=250, num_experts=2, topk=1), config="tall")
# More than a warp's lanes: other warps than the one that scans have counted some of them.
MORE_EXPERTS = Emulated(id="more-experts", why="", case=replace(MANY, tokens=40, num_experts=40), config="split")
# Several tiles of each of two shared experts.
SHARED = KNOWN["shared"]
SPREAD = replace(RAGGED, routing_ctas=3)
ADDED = ADDING[0]
CLEARED_SM90 = "self.clear_output(params, cute.arch.thread_idx()[0], self.consumers * WARPGROUP)"
CLEARED_SM100 = "self.clear_output(params, cute.arch.thread_idx()[0], WARPGROUP)"
BARRIER = "cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)"
MISTAKES = [
    (RAGGED, Mistake("x is not fenced", grouped, "cp_async(WARPGROUP)", "type(cp_async(1))(WARPGROUP + 1)")),
    (RAGGED, Mistake("one arrival is missing", grouped, "cp_async(WARPGROUP)", "cp_async(WARPGROUP - 1)")),
    (
        RAGGED,
        Mistake(
            "stages are not cleared", grouped, "sX[None, None, stage], 0, self.tile_m", "sX[None, None, stage], 0, 0"
        ),
    ),
    (RAGGED, Mistake("no swizzle", grouped, "(vector ^ (row % 8))", "vector")),
    (
        RAGGED,
        # What is copied from there alone is not seen: the weights beyond their columns are zeros.
        Mistake(
            "x beyond its columns", grouped, "inside = k_tile * self.block_k + vector * elements <", "inside = 0 <"
        ),
    ),
    (RAGGED, Mistake("rows of pairs", grouped, "// self.pairs_per_row", "")),
    (
        RAGGED,
        Mistake(
            "rows of the first expert", grouped, "params.mPairs[work.first_row + place] //", "params.mPairs[place] //"
        ),
    ),
    (
        RAGGED,
        Mistake(
            "weights of the first expert", grouped, "None, None, None, None, expert]", "None, None, None, None, 0]"
        ),
    ),
    (
        RAGGED,
        Mistake("bias of the first expert", sm90_grouped, "params.mBias[work.expert, None]", "params.mBias[0, None]"),
    ),
    (RAGGED, Mistake("bias of the next column", sm90_grouped, "column + 8 * j + a, part", "column + 8 * j, part")),
    (
        RAGGED,
        Mistake("hidden rows of the first expert", grouped, "(work.first_row, 0), params.mX", "(0, 0), params.mX"),
    ),
    (
        RAGGED,
        Mistake("bytes of whole tiles", grouped, "ceil_div(work.rows, TAIL_ROWS) * (", "ceil_div(128, TAIL_ROWS) * ("),
    ),
    (RAGGED, Mistake("a row too many", sm90_grouped, "top + row < work.rows and", "top + row <= work.rows and")),
    (
        RAGGED,
        Mistake(
            "results in the order of rows",
            sm90_grouped,
            "target if self.gathers else self.target_row(params, target)",
            "target",
        ),
    ),
    (RAGGED, Mistake("a thread's first row alone", sm90_grouped, "crd2idx((i * step, 0)", "crd2idx((0, 0)")),
    (RAGGED, Mistake("columns beyond the end", sm90_grouped, " and column < params.mOut.shape[1]:", ":")),
    (ORDER, Mistake("consumers out of order", sm90_grouped, "self.await_order(tile, group)", "pass")),
    (
        ORDER,
        Mistake(
            "the tile before",
            grouped,
            "schedule.first + tile * schedule.stride",
            "schedule.first + (tile - 1) * schedule.stride",
        ),
    ),
    (
        TALL,
        Mistake(
            "staged rows are overwritten",
            sm90_grouped,
            f"# All threads have read what was staged last.\n                {BARRIER}",
            "",
        ),
    ),
    (
        TALL,
        Mistake(
            "staged rows are not awaited",
            sm90_grouped,
            f"{BARRIER}\n                column = ",
            "column = ",
        ),
    ),
    (
        KNOWN["input-weights"],
        Mistake(
            "scales of other rows",
            sm90_grouped,
            "[i // 2] for i, value in enumerate(values)",
            "[i % 2] for i, value in enumerate(values)",
        ),
    ),
    (
        KNOWN["overlap"],
        Mistake(
            "rows are not awaited",
            grouped,
            "        dependent_launch.wait()\n        return early",
            "        return early",
        ),
    ),
    (KNOWN["overlap"], Mistake("weights are requested twice", grouped, "if position >= early:", "if position >= 0:")),
    (
        KNOWN["overlap"],
        Mistake("a stage too few is requested", grouped, "if position >= early:", "if position > early:"),
    ),
    (KNOWN["overlap"], Mistake("stages are not passed", sm90_grouped, "range(first, k_tiles, unroll=1)", "range(0)")),
    (
        KNOWN["overlap"],
        Mistake(
            "stages are passed unseen",
            sm90_grouped,
            "            pipeline.consumer_wait(start + k_tile)\n            # No product",
            "            # No product",
        ),
    ),
    (
        KNOWN["overlap"],
        Mistake("rows are skipped", sm90_grouped, "rows = work.rows - row_tile", "rows = 1 - row_tile"),
    ),
    (
        KNOWN["overlap"],
        Mistake("a warp misses a stage that is passed", sm90_grouped, f"{BARRIER}\n            if k_tile", "if k_tile"),
    ),
    (KNOWN["blocks"], Mistake("a block is left out", sm90_grouped, "range_constexpr(blocks)", "range_constexpr(1)")),
    (
        KNOWN["blocks"],
        Mistake("more blocks than rows", sm90_grouped, "if rows > blocks * MMA_M:", "if rows > 0:"),
    ),
    (
        MORE_EXPERTS,
        Mistake("pairs after the last one", routing, "if pair >= end:", "if pair >= end + WARP:"),
    ),
    (
        KNOWN["input-weights"],
        Mistake(
            "scales of rows, not of pairs",
            sm90_grouped,
            "params.mScale[params.mPairs[work.first_row + place]]",
            "params.mScale[work.first_row + place]",
        ),
    ),
    (
        KNOWN["mapped"],
        Mistake("padding is an expert", routing, "inside = expert >= 0 and expert < known", "inside = expert < known"),
    ),
    (KNOWN["mapped"], Mistake("no map", routing, "local = rLocal[0]", "local = local % experts")),
    (SPREAD, Mistake("its own rows are before it", routing, "if other < cta:", "if other <= cta:")),
    (
        SPREAD,
        Mistake(
            "all CTAs' rows are its own", routing, "smem.sStarts[expert] + smem.sBefore[expert]", "smem.sStarts[expert]"
        ),
    ),
    (
        ORDER,
        Mistake(
            "ranks are not moved on",
            routing,
            "            cute.arch.sync_warp()\n        if expert >= 0 and rank == 0:",
            "        if expert >= 0 and rank == 0 and not place:",
        ),
    ),
    (
        MORE_EXPERTS,
        Mistake(
            "counts are not awaited",
            routing,
            "            smem.sTotals[expert], smem.sBefore[expert] = total, before\n        cta_barrier()",
            "            smem.sTotals[expert], smem.sBefore[expert] = total, before",
        ),
    ),
    (
        KNOWN["split"],
        Mistake("a tile too few", routing, "(rows + (self.tile_m - 1)) // self.tile_m", "(rows + 63) // self.tile_m"),
    ),
    (
        RAGGED,
        Mistake(
            "rows of the whole tile",
            routing,
            "cutlass.min(smem.sStarts[low + 1] - first, self.tile_m)",
            "cutlass.Int32(self.tile_m)",
        ),
    ),
    (
        KNOWN["padding"],
        Mistake(
            "pairs without an expert count",
            combine,
            "[local_of(expert, mMap, self.slots.experts) >= 0 for",
            "[cutlass.Boolean(True) for",
        ),
    ),
    (RAGGED, Mistake("weights of tokens", combine, "mWeights[token * topk + slot]", "mWeights[token]")),
    (
        KNOWN["strides"],
        Mistake("rows of out lie side by side", combine, "mOut.stride[0] + column", "mOut.shape[1] + column"),
    ),
    # Shared experts.
    (SHARED, Mistake("the first shared expert", grouped, "tWgW[1], work.expert - self.experts", "tWgW[1], 0")),
    (
        SHARED,
        Mistake(
            "shared experts by the routed ones' descriptor",
            grouped,
            "if work.expert < self.experts:",
            "if work.expert >= 0:",
        ),
    ),
    (SHARED, Mistake("a weight of 1", combine, "cutlass.Float32(self.shared_weight)", "cutlass.Float32(1.0)")),
    (SHARED, Mistake("weights of pairs", combine, "mWeights[token * topk", "mWeights[token * of_token")),
    (
        SHARED,
        Mistake(
            "numbers of pairs",
            routing,
            "token * slots.topk + cutlass.min(slot, slots.topk - 1)",
            "cutlass.min(pair, token * slots.of_token + 1)",
        ),
    ),
    (
        SHARED,
        Mistake(
            "one shared expert for all",
            routing,
            "cutlass.Int32(slots.experts - slots.topk) + slot",
            "cutlass.Int32(slots.experts)",
        ),
    ),
    # Sums by atomic operations.
    (ADDED, Mistake("sums are stored", grouped, "cutlass.const_expr(self.adds > 0)", "cutlass.const_expr(False)")),
    (ADDED, Mistake("rows of one CTA are cleared", grouped, "rows, cute.arch.grid_dim()[0]", "rows, rows")),
    (ADDED, Mistake("columns of a round are cleared", grouped, "range(thread, columns // elements", "range(thread, 1")),
    (ADDED, Mistake("sums of cleared rows side by side", grouped, "params.mCleared.stride[0] +", "columns +")),
    (ADDED, Mistake("sums of pairs", grouped, "params.mPairs[row] // self.adds if", "params.mPairs[row] if")),
    (ADDED, Mistake("the output is not cleared", sm90_grouped, CLEARED_SM90, "pass")),
    (
        ADDED,
        Mistake("half of the output is cleared", sm90_grouped, CLEARED_SM90, CLEARED_SM90.replace("[0]", "[0] * 2")),
    ),
    (ADDED, Mistake("weights are forgotten", sm90_grouped, "if cutlass.const_expr(self.weighted):", "if False:")),
    (ADDED, Mistake("the output is not cleared (SM100)", sm100_grouped, CLEARED_SM100, "pass")),
    (ADDED, Mistake("weights are forgotten (SM100)", sm100_grouped, "if self.weighted:", "if False:")),
    (
        ADDED,
        Mistake(
            "weights of rows (SM100)",
            sm100_grouped,
            "params.mScale[params.mPairs[row]]",
            "params.mScale[row]",
        ),
    ),
    (
        ADDED,
        Mistake("results in the order of rows (SM100)", sm100_grouped, "row = self.target_row(params, row)", "pass"),
    ),
]
CLASSES = {
    grouped: "GroupedProduct",
    sm90_grouped: "GroupedGemm",
    sm100_grouped: "GroupedGemm",
    routing: "Routing",
    combine: "Combine",
}

QUICK = "a warp misses a stage that is passed"


def build(key: ExpertsKey, arch: str) -> Function:
    """Compiled anew: kernels in the cache were compiled from other source."""
    args = host.fake_args(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    target = TARGETS[arch]
    kernel = layer.layer_of(key, target.kernel_arch or "")
    made: Function = toolkit.compiled(kernel, (args.operands.x, args, stream), target.arch, "")
    return made


def emulate(one: Emulated, arch: str = "sm_90a") -> None:
    """Compile, then run and judge under two orders of events."""
    spec, config = one.case.spec, one.tiles(arch)
    for schedule, seed in (("lazy", 1), ("random", 1)):
        given = tensors(one.case, "cpu")
        with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=seed, strict=True):
            function = build(host.key_of(spec, config), arch)
            host.run(function, spec, config, given, one.ctas(arch), Workspace(given.x.device))
        judge(one.case, given)


@pytest.mark.full
@pytest.mark.parametrize("one", {id(one): one for one, _ in MISTAKES}.values(), ids=lambda one: one.id)
def test_the_cases_pass(one: Emulated) -> None:
    emulate(one)


@pytest.mark.parametrize(
    ("one", "mistake"),
    [
        pytest.param(one, mistake, id=mistake.id, marks=() if mistake.id == QUICK else (pytest.mark.full,))
        for one, mistake in MISTAKES
    ],
)
def test_it_is_found(one: Emulated, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = spoilt(mistake, tmp_path), CLASSES[mistake.module]
    if mistake.module is grouped:
        spoil_methods(grouped.GroupedProduct, module, monkeypatch)
    else:
        owner = mistake.module if mistake.module in (sm90_grouped, sm100_grouped) else layer
        monkeypatch.setattr(owner, name, getattr(module, name))
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        emulate(one, "sm_100a" if mistake.module is sm100_grouped else "sm_90a")
    assert mistake.id != QUICK or "a wait for phase" in str(raised.value)
