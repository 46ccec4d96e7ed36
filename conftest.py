# SPDX-License-Identifier: Apache-2.0
"""Which tests `make test` leaves to `make test-rest`.

`make test` is for whoever changes something and waits for it: it touches every operator, both SMs on the emulator and a
real server. What it leaves is marked `rest` here, by file and by name, and counted at the end of a run. All of that
takes an hour and a half on two cores: CI runs one part of it, another one each day.
"""

import argparse
import fnmatch
import functools
import gc
import os
import re
import zlib
from collections.abc import Generator, Sequence
from typing import Any

import pytest

# Patterns of node ids. A test that matches one of `REST` and none of `KEPT` is left to `make test-rest`. On 2 cores the
# files of `REST` take nine tenths of the time of all tests (2026-11-25).
REST: tuple[str, ...] = (
    "integration/*",
    "tests/attention/test_attention_kernels.py::*",
    "tests/attention/test_batch_invariance*.py::*",
    "tests/attention/test_combine.py::*",
    "tests/attention/test_compile.py::*",
    "tests/attention/test_extend.py::*",
    "tests/attention/test_fuzz_*.py::*",
    "tests/attention/test_machine_code.py::*",
    "tests/attention/test_mla_*.py::*",
    "tests/attention/test_mutants.py::*",
    "tests/attention/test_schedule.py::*",
    "tests/attention/test_shared_ring_mutants.py::*",
    "tests/attention/test_sm100*.py::*",
    "tests/attention/test_sm90.py::*",
    "tests/attention/test_two_cta_mla_mistakes.py::*",
    "tests/attention/test_dequant_mistakes.py::*",
    "tests/benchmarks/test_bench_report.py::*",
    "tests/benchmarks/test_bench_verification.py::*",
    "tests/emulator/mutants/*",
    "tests/emulator/thirdparty/*",
    "tests/gemm/test_machine_code.py::*",
    "tests/loadtests/test_client.py::*",
    "tests/loadtests/test_compare.py::*",
    "tests/loadtests/test_page.py::*",
    "tests/loadtests/test_remote.py::*",
    "tests/norm/test_kernel.py::*",
    "tests/norm/test_machine_code.py::*",
    "tests/runtime/test_precompile.py::Test*",
    "tests/runtime/test_precompile.py::test_processes_end_*",
    "tests/runtime/test_precompile.py::test_what_a_full_disk_*",
    "tests/sampling/test_compile.py::*",
    "tests/sampling/test_kernel.py::test_case*",
    "tests/sampling/test_machine_code.py::*",
)
KEPT: tuple[str, ...] = (
    "integration/test_serving.py::*",
    "tests/attention/test_attention_kernels.py::test_attention*triton-mixed*",
    "tests/attention/test_attention_kernels.py::test_attention*triton-short*",
    "tests/attention/test_attention_kernels.py::test_attention*triton-nvfp4-out-splits*",
    "tests/attention/test_attention_kernels.py::test_attention*triton-mla*",
    "tests/attention/test_batch_invariance_chunks.py::test_division*sm90-short*",
    "tests/attention/test_batch_invariance_chunks.py::test_division*mla-short*",
    "tests/attention/test_batch_invariance_chunks.py::test_scratch*",
    "tests/attention/test_combine.py::test_splits_of_one_output_tile*",
    "tests/attention/test_extend.py::test_[bcfpr]*",
    "tests/attention/test_extend.py::test_the_estimate*",
    "tests/attention/test_extend.py::test_sm90*per-request*",
    "tests/attention/test_mla_*.py::test_run*ragged*",
    "tests/attention/test_mla_*.py::test_one_row_and_one_key*",
    "tests/attention/test_mla_*.py::test_run*fp8*",
    "tests/attention/test_schedule.py::test_balanced*",
    "tests/attention/test_schedule.py::test_each_once*ragged-3*",
    "tests/attention/test_schedule.py::test_each_once*window-1*",
    "tests/attention/test_sm100.py::test_case*",
    # Several key tiles, windows that begin within one, S stages that alternate; and no LSE. The cases above have one
    # or two key tiles: four of twelve mistakes in softmax and correction warps passed them. These two find the four
    # (2026-11-26).
    "tests/attention/test_sm100.py::test_idle_warps*1*",
    "tests/attention/test_sm100_nvfp4.py::test_case*nvfp4-128*",
    "tests/attention/test_sm100_nvfp4.py::test_[ps]*",
    "tests/attention/test_sm100_without_lse.py::test_without_lse*window-softcap-sinks*",
    "tests/attention/test_sm100.py::test_swap_ab*window-sinks*",
    "tests/attention/test_sm100.py::test_swap_ab*mqa-20*",
    "tests/attention/test_sm100.py::test_swap_ab*splits-large-scores*",
    "tests/attention/test_sm100.py::test_swap_ab_on*",
    "tests/attention/test_sm100.py::test_two_cta*ragged*",
    "tests/attention/test_sm90.py::test_case*fp8*",
    "tests/attention/test_sm90.py::test_case*packed*",
    "tests/attention/test_sm90.py::test_case*window-sinks*",
    "tests/attention/test_sm90.py::test_case*gqa*",
    "tests/attention/test_sm90.py::test_speculative_max*window-sinks*",
    "tests/attention/test_sm90.py::test_speculative_max*large-scores-True*",
    "tests/attention/test_shared_ring_mutants.py::*",
    "tests/norm/test_kernel.py::test_case*sm_90a-head*",
    "tests/norm/test_kernel.py::test_case*sm_90a-cluster-4*",
    "tests/norm/test_kernel.py::test_case*sm_100a-special-cluster*",
    "tests/norm/test_kernel.py::test_ids*",
    "tests/sampling/test_kernel.py::test_case*filters-4-sm_100a*",
    "tests/sampling/test_kernel.py::test_case*filters-16-sm_90a*",
    "tests/sampling/test_kernel.py::test_case*likeliest-2-sm_90a*",
    "tests/runtime/test_precompile.py::TestAhead::test_cold_then_warm",
    "tests/runtime/test_precompile.py::TestCommands::test_compile_then_look",
    "tests/runtime/test_precompile.py::test_processes_end_*sys.exit*",
)
# A test that matches one of these is marked `full`: each is like others that `make test-rest` runs. (`?` stands for the
# bracket, which is a pattern's.) By estimate they would take a third of its time.
FULL: tuple[str, ...] = (
    "integration/test_load.py::test_misuse?prefix-ngram-eager-abort in mid-stream?",
    "tests/attention/test_batch_invariance_triton.py::test_company_and_schedule_do_not_matter?gqa?",
    "tests/attention/test_fuzz_emulated.py::test_random_problems_of_a_layer?sm_100a-prefill-2?",
    "integration/test_engine_benchmark.py::test_engine",
    "integration/test_refusals.py::test_server_does_not_start?options?",
    "integration/test_refusals.py::test_server_does_not_start?kernel by name?",
    "tests/attention/test_extend.py::test_sm90?prompts-mixed?",
    "tests/emulator/thirdparty/test_thirdparty.py::test_values_and_findings?flash-dense-sm_100a?",
    "integration/test_numerics.py::test_matches?deepseek_v2-chunked-float32?",
    "integration/test_numerics.py::test_matches?deepseek_moe-plain-float32?",
    "integration/test_numerics.py::test_matches?gemma2-plain-float32?",
    "integration/test_numerics.py::test_matches?bloom-plain-float32?",
    "tests/attention/test_batch_invariance_chunks.py::test_division_into_steps_does_not_matter?sm100-mla-128-chunks?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm90-mla-128?",
    "tests/attention/test_fuzz_emulated.py::test_random_problems_of_a_layer?sm_100a-decode-1?",
    "tests/attention/test_fuzz_emulated.py::test_random_problems_of_a_layer?sm_100a-mla-1?",
    "tests/attention/test_batch_invariance_triton.py::test_company_and_schedule_do_not_matter?window?",
    "tests/attention/test_batch_invariance_triton.py::test_chunks_and_cached_prefixes_do_not_matter?gqa?",
    "tests/emulator/thirdparty/test_thirdparty.py::test_values_and_findings?flash-paged-sm_100a?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm90?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm90-window?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm90-mla-fp8?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm100?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm100-mla?",
    "tests/attention/test_batch_invariance_chunks.py::test_the_prompt_is_right?sm100-mla-128?",
    "tests/attention/test_schedule.py::test_paired_row_tiles?*-[23]-*-2?",
    "tests/experts/test_decode.py::test_case?activation-[13]-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?activation-[024]-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?all-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?int64-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?mapped-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?no-weights-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?one-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?padding-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?short-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?special-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?strides-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?tokens-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?wide-*-sm_90a?",
    "tests/experts/test_*.py::test_fuzz?[345]*",
    "tests/experts/test_kernels_sm90.py::test_case?activation-[024]-*",
    "tests/experts/test_kernels_sm90.py::test_case?no-weights-*",
    "tests/experts/test_kernels_sm90.py::test_case?padding-*",
    "tests/experts/test_kernels_sm90.py::test_case?one-*",
    "tests/experts/test_kernels_sm100.py::test_case?activation-[13]-*",
    "tests/experts/test_kernels_sm100.py::test_case?mapped-*",
    "tests/experts/test_kernels_sm100.py::test_case?strides-*",
    "tests/experts/test_kernels_sm100.py::test_case?without-*",
    "tests/primitives/test_dependent_launch.py::test_chain?decode-sm_100a?",
    "tests/primitives/test_dependent_launch.py::test_chain?latent-sm_90a?",
    "tests/primitives/test_dependent_launch.py::test_chain?split_k-sm_90a?",
    "tests/primitives/test_dependent_launch.py::test_chain?tall_mlp-sm_90a?",
    "tests/primitives/test_dependent_launch.py::test_chain?verification-sm_90a?",
    # A chain of launches is alike on both SMs: each is left on one of them.
    "tests/primitives/test_dependent_launch.py::test_chain?rotation-sm_100a?",
    "tests/primitives/test_dependent_launch.py::test_chain?latent_rotation-sm_90a?",
    # Decode steps of both SMs are one class but for how columns are stored: cases of where tokens go are left on one SM
    # each, those with several tiles of a CTA (`long`) and with biases and limits (`gpt-oss`) on both.
    "tests/experts/test_decode.py::test_case?input-weights-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?many-experts-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?without-tokens-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?shared-all-padding-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?shared-long-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?shared-mapped-*-sm_100a?",
    "tests/experts/test_decode.py::test_case?shared-one-*-sm_90a?",
    "tests/experts/test_decode.py::test_case?shared-special-*-sm_100a?",
    # Routes are read by the same code on both SMs; cases of one SM's own tiles and buffers are left on both.
    "tests/experts/test_kernels_sm90.py::test_case?all-padding-*",
    "tests/experts/test_kernels_sm90.py::test_case?all-to-one-*",
    "tests/experts/test_kernels_sm90.py::test_case?many-experts-*",
    "tests/experts/test_kernels_sm90.py::test_case?shared-one-*",
    "tests/experts/test_kernels_sm90.py::test_case?shared-all-padding-*",
    "tests/experts/test_kernels_sm100.py::test_case?input-weights-*",
    "tests/experts/test_kernels_sm100.py::test_case?many-tokens-*",
    "tests/experts/test_kernels_sm100.py::test_case?shared-mapped-*",
    "tests/experts/test_kernels_sm100.py::test_case?shared-rows-*",
    "tests/experts/test_scaled.py::test_sm90?all-padding-*",
    "tests/experts/test_scaled.py::test_sm100?blocks-no-weights-*",
    "tests/experts/test_scaled.py::test_sm100?blocks-one-*",
    # Random problems: the first ones of each kernel are left.
    "tests/experts/test_*.py::test_fuzz?2-*",
    "tests/experts/test_kernels_sm*.py::test_fuzz?2?",
    "tests/gemm/test_scaled_*.py::test_fuzz?[4-9]?",
    "tests/gemm/test_scaled_*.py::test_fuzz?10?",
    "tests/gemm/test_scaled_*.py::test_fuzz_of_few_rows?[4-9]?",
    "tests/gemm/test_weight_only_sm90.py::test_fuzz?[4-9]?",
    "tests/norm/test_kernel.py::test_fuzz?[5-9]?",
    "tests/attention/test_sm100_fp8.py::test_random_problem?[23]?",
    "tests/attention/test_rope*.py::test_fuzz?[23]?",
    "tests/attention/test_fuzz_triton.py::test_problem?*-[6-9]?",
    # Groups of 24 heads with products in 8 bits are left with one dtype of queries on each SM.
    "tests/attention/test_fp8_many_rows.py::test_case?sm_90a-group-24?",
    "tests/attention/test_fp8_many_rows.py::test_case?sm_100a-group-24-fp8-queries?",
    # Engines. On a CPU without AMX vLLM neither caches nor chunks MLA's prompts: these start engines to be skipped.
    "integration/test_invariance.py::test_same_bits?deepseek_v2-eager-*cached?",
    "integration/test_invariance.py::test_same_bits?deepseek_v2-eager-chunks of 64?",
    "integration/test_invariance.py::test_same_bits?deepseek_v2-eager-chunks of 512?",
    # Compiled engines and those of two ranks are left with projections and norms of dsl; to compile one takes 90 CPU
    # seconds.
    "integration/test_linear.py::test_matches?compiled?",
    "integration/test_linear.py::test_matches?tensor parallel?",
    "integration/test_linear.py::test_log_says_what_is_fused?compiled?",
    "integration/test_linear.py::test_log_says_what_is_fused?tensor parallel?",
    "integration/test_scaled_linears.py::test_*?channels, compiled?",
    # Bad requests are refused before the engine hears of them, in whichever setting it is; an engine with drafts sees
    # a client that disconnects as it does an abort.
    "integration/test_load.py::test_misuse?prefix-ngram-eager-bad requests?",
    "integration/test_load.py::test_misuse?draft-model-eager-bad requests?",
    "integration/test_load.py::test_misuse?draft-model-eager-client disconnects?",
    "integration/test_numerics.py::test_matches?qwen3_moe-plain-float32?",
)
LEFT = pytest.StashKey[int]()
# Processes that share a machine's cores wait for each other's threads. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# New containers before a garbage collection, and how many of them before one of the next generation. By Python's own
# numbers collections take 7.6 of the 38 CPU seconds in which a process collects the 20,000 tests, and find next to
# nothing; in tests that compile 1.2 of 20 (2026-11-27), and 0.4 with these, at the same memory.
COLLECTIONS = (20_000, 20, 20)
gc.set_threshold(*COLLECTIONS)


@functools.cache
def any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all of them: to ask each of them for each of 20,000 tests takes ten times as long."""
    return re.compile("|".join(map(fnmatch.translate, patterns)))


def matches(nodeid: str, patterns: tuple[str, ...]) -> bool:
    return any_of(patterns).match(nodeid) is not None


def is_rest(nodeid: str) -> bool:
    return matches(nodeid, REST) and not matches(nodeid, KEPT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=part_of, metavar="I/N", help="run only part I of N of the tests, from 1 on")


def part_of(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text!r} is no part I/N with I from 1 to N, such as 2/4")
    return part, parts


def part_with(nodeid: str, parts: int) -> int:
    """Which part of the tests has this one, from 1 on.

    The cases of a test share kernels that a process has compiled, and files of integration/ share their engines: each
    of these is in one part.
    """
    shared = nodeid.partition("::" if nodeid.startswith("integration/") else "[")[0]
    return zlib.crc32(shared.encode()) % parts + 1


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT] = 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before pytest itself selects by markers."""
    for item in items:
        if is_rest(item.nodeid):
            item.add_marker(pytest.mark.rest)
        if matches(item.nodeid, FULL):
            item.add_marker(pytest.mark.full)
    chosen = config.getoption("--part")
    if chosen is not None:
        part, parts = chosen
        items[:] = [item for item in items if part_with(item.nodeid, parts) == part]


def pytest_collection_finish() -> None:
    """What was imported and collected lives as long as the process: garbage collections need not look at it again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else Triton's bindings call what is left at the end of the process a leak."""
    gc.unfreeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("rest") and not item.get_closest_marker("full"):
            item.config.stash[LEFT] += 1


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """A worker tells the process that started it; all workers collect the same tests."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left"] = session.config.stash[LEFT]
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash[LEFT]
    if count:
        terminalreporter.write_line(f"{count} {'test was' if count == 1 else 'tests were'} left to `make test-rest`")
