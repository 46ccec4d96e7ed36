# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernels of experts in MXFP8, MXFP4 and NVFP4, each of which a case on the emulator finds."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cutlass.cute.runtime import make_fake_stream
from experts_cases import SMS
from test_block_scaled import NARROW, TARGET, WIDE

import emulator
from dsl_backend.experts.configs import ExpertsConfig
from dsl_backend.experts.cute import block_scaled_host as host
from dsl_backend.experts.cute import block_scaled_layer as layer
from dsl_backend.experts.cute.block_scaled_layer import BlockScaledExpertsKey, BlockScaledExpertsLayer
from dsl_backend.experts.cute.sm100 import block_scaled_grouped, grouped
from dsl_backend.quant.format import MXFP4, NVFP4
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import MX, ExpertsCase, judge, tensors
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, spoil_methods, spoilt

Problem = tuple[ExpertsCase, ExpertsConfig]
# Ragged work tiles of three experts, k tiles and tiles of columns that are not whole.
ROWS: Problem = replace(MX, num_experts=3), NARROW
# Accumulators of neighbouring tiles overlap: a CTA has several.
OVERLAP: Problem = replace(MX, num_experts=3, hidden=544, width=416), WIDE
UNPACKED: Problem = replace(MX, weight=MXFP4, hidden=288, width=96, interleaved=True), NARROW
WHOLES: Problem = replace(MX, weight=NVFP4, hidden=288), NARROW
MISTAKES = [
    (
        ROWS,
        Mistake(
            "factors of the first rows",
            block_scaled_grouped,
            "work.first_row + cutlass.min(thread",
            "cutlass.min(thread",
        ),
    ),
    (
        ROWS,
        Mistake(
            "factors of pairs, not of tokens",
            block_scaled_grouped,
            "work.rows - 1)] // self.pairs_per_row",
            "work.rows - 1)]",
        ),
    ),
    (
        ROWS,
        Mistake(
            "rows of factors side by side",
            block_scaled_grouped,
            "thread % WARP * 16 + thread // WARP * WORD_BYTES",
            "thread * WORD_BYTES",
        ),
    ),
    (
        ROWS,
        Mistake(
            "factors of the first stage",
            block_scaled_grouped,
            "k_tile * self.atoms + atom, words - 1",
            "cutlass.Int32(atom), words - 1",
        ),
    ),
    (
        ROWS,
        Mistake(
            "weights' factors of the first expert", block_scaled_grouped, "work.expert * of_expert + inside", "inside"
        ),
    ),
    (ROWS, Mistake("up rows with gate rows' factors", block_scaled_grouped, "i * (of_expert // 2)", "0")),
    (
        ROWS,
        Mistake(
            "hidden factors of the first work tile",
            block_scaled_grouped,
            "(work.m_tile, k_tile), mbar)",
            "(0, k_tile), mbar)",
        ),
    ),
    (
        ROWS,
        Mistake(
            "bytes of hidden factors are not awaited",
            block_scaled_grouped,
            "super().bytes_of_stage(work) + self.factor_bytes",
            "super().bytes_of_stage(work)",
        ),
    ),
    (
        ROWS,
        Mistake(
            "bytes of weights' factors are not awaited",
            block_scaled_grouped,
            "self.weight_bytes += self.weight_atoms * self.factor_bytes",
            "pass",
        ),
    ),
    (
        ROWS,
        Mistake(
            "blocks of hidden are inverted", block_scaled_grouped, "block % WORD_BYTES\n", "3 - block % WORD_BYTES\n"
        ),
    ),
    (
        ROWS,
        Mistake(
            "hidden factors of rows, not of work tiles",
            block_scaled_grouped,
            "self.store_factor(params, code, work.m_tile, place, column)",
            "self.store_factor(params, code, row // 128, row % 128, column)",
        ),
    ),
    (
        ROWS,
        Mistake(
            "hidden rows of other experts",
            block_scaled_grouped,
            "row, column, place < work.rows)",
            "row + 1, column, place < work.rows)",
        ),
    ),
    (
        ROWS,
        Mistake(
            "columns past the last", block_scaled_grouped, "if exists and column < self.width(params):", "if exists:"
        ),
    ),
    (OVERLAP, Mistake("accumulators are released early", grouped, "if i == early - 1:", "if i == 0:")),
    (OVERLAP, Mistake("order of columns", grouped, "self.epi_tile(tile, i, steps)", "i")),
    (
        UNPACKED,
        Mistake("weights are e4m3", block_scaled_grouped, "kind=MXFP8_MXFP4", "kind=replace(MXFP8_MXFP4, element_b=0)"),
    ),
    (
        UNPACKED,
        Mistake(
            "rows of packed weights", block_scaled_grouped, "divby=PACKED_ALIGNMENT) * 2", "divby=PACKED_ALIGNMENT)"
        ),
    ),
    (
        WHOLES,
        Mistake(
            "scale of the first expert",
            block_scaled_grouped,
            "params.mWeightGlobal[work.expert]",
            "params.mWeightGlobal[0]",
        ),
    ),
    (WHOLES, Mistake("no scale of x", block_scaled_grouped, " * params.mXGlobal[0]", "")),
    (
        WHOLES,
        Mistake(
            "no scale of hidden",
            block_scaled_grouped,
            "whole = scales.x_global, scales.w13_global, scales.hidden_global",
            "whole = scales.x_global, scales.w13_global, scales.x_global",
        ),
    ),
]


def build(key: BlockScaledExpertsKey) -> Function:
    """Compiled anew: kernels in the cache were compiled from other source."""
    args = host.fake_args(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    made: Function = toolkit.compiled(BlockScaledExpertsLayer(key), (args.operands.x, args, stream), TARGET.arch, "")
    return made


def emulate(problem: Problem) -> None:
    """Compile, then run and judge under two orders of events."""
    case, config = problem
    spec = case.spec
    built: list[Function] = []
    for schedule in ("lazy", "random"):
        given = tensors(case, "cpu")
        with emulator.device(arch="sm_100a", sms=SMS, schedule=schedule, seed=1, strict=True):
            if not built:
                built.append(build(host.key_of(spec, config)))
            ctas = config.ctas(spec, case.tokens, TARGET)
            host.run(built[0], spec, config, given, ctas, Workspace(given.x.device))
        judge(case, given)


@pytest.mark.full
@pytest.mark.parametrize("problem", [ROWS, OVERLAP, UNPACKED, WHOLES], ids=("rows", "overlap", "unpacked", "wholes"))
def test_the_problems_pass(problem: Problem) -> None:
    emulate(problem)


@pytest.mark.full
@pytest.mark.parametrize(("problem", "mistake"), MISTAKES, ids=[mistake.id for _, mistake in MISTAKES])
def test_it_is_found(problem: Problem, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module is grouped:
        spoil_methods(grouped.GroupedGemm, module, monkeypatch)
    else:
        name = "BlockScaledGroupedGemm"
        monkeypatch.setattr(layer, name, getattr(module, name))
    with pytest.raises((EmulatorError, AssertionError)):
        emulate(problem)
