# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernels of experts for few tokens, each of which a case on the emulator finds."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cutlass.cute.runtime import make_fake_stream
from experts_cases import DECODED, LONG, Emulated, after_router, emulate

from dsl_backend.experts.cute import decode, host, layer
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.sm90 import decode as sm90_decode
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, spoil_methods, spoilt

KNOWN = {one.id: one for one in DECODED}
# Two tiles of an expert's columns for a CTA, tokens without an expert, biases.
BIASED = Emulated(
    id="biased",
    why="",
    case=replace(LONG, hidden=136, width=328, tokens=21, num_experts=4, padding=0.3, biases=True),
    config="rows",
    decodes=True,
)
# Experts with other weights than 1, more than the lanes of a warp.
MANY = replace(
    BIASED, id="many", case=replace(LONG, tokens=30, num_experts=70, topk=3, hidden=72, width=40, biases=False)
)
BARRIER = "cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)"
SHARED = KNOWN["shared-long"]
ROUTER = replace(MANY, id="behind a router", case=LONG)
MISTAKES = [
    (MANY, Mistake("w13 of the first expert", decode, "listed = n_tile // work.of_expert if", "listed = 0 if")),
    (
        MANY,
        Mistake("w2 of the first expert", decode, "(self.gated) else k_tile // work.of_expert", "(self.gated) else 0"),
    ),
    (
        MANY,
        Mistake(
            "hidden of the first expert", decode, "k_tile % work.of_expert, k_tile // work.of_expert]", "k_tile, 0]"
        ),
    ),
    (MANY, Mistake("a list with what was there", decode, "sListed[expert] = cutlass.Int32(0)", "pass")),
    (
        MANY,
        Mistake(
            "listed before it is cleared",
            decode,
            "        cta_barrier()\n        for pair in",
            "        for pair in",
        ),
    ),
    (
        MANY,
        Mistake("read before it is listed", decode, "cta_barrier()\n        if thread < WARP:", "if thread < WARP:"),
    ),
    (
        MANY,
        Mistake(
            "a list that is not awaited",
            decode,
            "sCount[0] = cutlass.max(count, 1)\n        cta_barrier()",
            "sCount[0] = cutlass.max(count, 1)",
        ),
    ),
    (MANY, Mistake("ranks of a warp", decode, "place = count + cute.arch.popc", "place = cute.arch.popc")),
    (KNOWN["all-padding"], Mistake("no zeros", decode, "cutlass.max(count, 1)", "count")),
    (
        MANY,
        Mistake(
            "weights of tokens",
            decode,
            "scale += self.weight_of(params, token, slot)",
            "scale += self.weight_of(params, 0, slot)",
        ),
    ),
    (
        MANY,
        Mistake(
            "the slot before",
            decode,
            "if work.sIds[token * self.slots.of_token + slot] == expert:",
            "if work.sIds[token * self.slots.of_token] == expert:",
        ),
    ),
    (
        KNOWN["special"],
        Mistake("zero times NaN", decode, "if work.sHits[group, token] == 0:", "if work.sHits[group, token] < 0:"),
    ),
    (
        BIASED,
        Mistake(
            "scales are overwritten", decode, f"# All threads have read those of the last tile.\n        {BARRIER}", ""
        ),
    ),
    (
        BIASED,
        Mistake(
            "scales are not awaited",
            decode,
            f"work.sHits[group, token] = hits\n        {BARRIER}",
            "work.sHits[group, token] = hits",
        ),
    ),
    (
        BIASED,
        Mistake(
            "tokens beyond the last one",
            decode,
            "if token < tokens:\n                for",
            "if token >= 0:\n                for",
        ),
    ),
    (
        BIASED,
        Mistake(
            "biases of no expert",
            decode,
            "if expert >= 0:\n                        bias",
            "if expert < 99:\n                        bias",
        ),
    ),
    (
        BIASED,
        Mistake(
            "biases without weights",
            decode,
            "if cutlass.const_expr(self.router_weights is RouterWeights.OUTPUT):",
            "if cutlass.const_expr(False):",
        ),
    ),
    (
        BIASED,
        Mistake(
            "biases of the first expert", decode, "params.mBias[expert, None], params", "params.mBias[0, None], params"
        ),
    ),
    (BIASED, Mistake("hidden in the first expert's place", decode, "cutlass.Int64(listed) *", "cutlass.Int64(0) *")),
    (
        BIASED,
        Mistake(
            "columns beyond the end",
            decode,
            "if column < n:\n                scale",
            "if column >= 0:\n                scale",
        ),
    ),
    (
        KNOWN["input-weights"],
        Mistake(
            "weights on the output",
            decode,
            "if cutlass.const_expr(self.router_weights is RouterWeights.INPUT):",
            "if cutlass.const_expr(False):",
        ),
    ),
    (
        KNOWN["one"],
        Mistake(
            "a range before the beginning",
            decode,
            "share(total, workers, cutlass.max(worker, 0))",
            "share(total, workers, worker)",
        ),
    ),
    # Shared experts.
    (SHARED, Mistake("the first shared expert", decode, "expert = expert - self.slots.experts", "expert = expert * 0")),
    (
        SHARED,
        Mistake(
            "shared experts by the routed ones' descriptor",
            decode,
            "if expert < self.slots.experts:",
            "if expert >= 0:",
        ),
    ),
    (
        SHARED,
        Mistake(
            "a weight of 1", decode, "weight = cutlass.Float32(self.shared_weight)", "weight = cutlass.Float32(1.0)"
        ),
    ),
    (
        SHARED,
        Mistake(
            "weights of the router's slots",
            decode,
            "if slot >= self.slots.topk:",
            "if slot > self.slots.topk:",
        ),
    ),
    (
        SHARED,
        Mistake(
            "fewer pairs than there are",
            decode,
            "// self.slots.topk * self.slots.of_token\n",
            "// self.slots.topk * self.slots.topk\n",
        ),
    ),
    (
        ROUTER,
        Mistake(
            "nobody waits for the router", decode, "if cutlass.const_expr(self.waits):", "if cutlass.const_expr(False):"
        ),
    ),
    (
        ROUTER,
        Mistake(
            "the second product starts before the first one has waited",
            decode,
            "        if cutlass.const_expr(self.waits):",
            "        dependent_launch.launch_dependents()\n        if cutlass.const_expr(self.waits):",
        ),
    ),
    (
        BIASED,
        Mistake(
            "columns of the other half",
            sm90_decode,
            "self.thread_column(row_tile, thread) + 8 * b",
            "self.thread_column(row_tile, thread)",
        ),
    ),
    (BIASED, Mistake("one box", sm90_decode, "column + self.box", "column")),
    (BIASED, Mistake("columns of all experts", sm90_decode, "tile * self.columns +", "n_tile * self.columns +")),
    (
        BIASED,
        Mistake("one warpgroup's scales", sm90_decode, "token, column, listed, group", "token, column, listed, 0"),
    ),
]


def build(key: ExpertsKey, target: Target) -> Function:
    """Compiled anew: kernels in the cache were compiled from other source."""
    args = host.fake_args(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    made: Function = toolkit.compiled(layer.layer_of(key, "sm90"), (args.operands.x, args, stream), target.arch, "")
    return made


def run(one: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge under two orders of events."""
    monkeypatch.setattr(host, "build", build)
    for schedule in ("lazy", "random"):
        if one is ROUTER:
            after_router(one.case, schedule, "sm_90a", build)
        else:
            emulate(one, schedule, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("one", {one.id: one for one, _ in MISTAKES}.values(), ids=lambda one: one.id)
def test_the_cases_pass(one: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    run(one, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(("one", "mistake"), MISTAKES, ids=[mistake.id for _, mistake in MISTAKES])
def test_it_is_found(one: Emulated, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module is decode:
        spoil_methods(decode.DecodeProduct, module, monkeypatch)
    else:
        monkeypatch.setattr(sm90_decode, "DecodeGemm", module.DecodeGemm)
    with pytest.raises((EmulatorError, AssertionError)):
        run(one, monkeypatch)
