# SPDX-License-Identifier: Apache-2.0
"""The steps of a campaign, and plans: steps that fit into a time on some GPUs."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Of a step's program and arguments: the Python interpreter that runs the campaign.
PYTHON = "{python}"
SANITIZER = "compute-sanitizer"
# FlashInfer's sampler would compile while the peer starts.
VLLMS_SAMPLER = (("VLLM_USE_FLASHINFER_SAMPLER", "0"),)

# Both engines would compile 800 of its products for linear layers before they start, for more than five minutes.
WITHOUT_DEEP_GEMM = (("VLLM_USE_DEEP_GEMM", "0"),)


@dataclass(frozen=True)
class Step:
    """A measurement or test.

    Attributes:
        arguments: of the program. `{seconds}` becomes the step's time in seconds, `{json}` its JSON file, `{python}`
            the interpreter.
        least_s: it is not started with fewer seconds left.
        most_s: it gets at most so many seconds.
        shows: what the result answers.
        program: by default the interpreter.
        gpus: that it sees.
        variables: further environment variables, as pairs.
    """

    name: str
    arguments: tuple[str, ...]
    least_s: float
    most_s: float
    shows: str
    program: str = PYTHON
    gpus: int = 1
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def is_pytest(self) -> bool:
        return "pytest" in self.arguments

    @property
    def json_is_written(self) -> bool:
        return "{json}" in self.arguments


def filled(word: str, values: Mapping[str, str]) -> str:
    """An argument with the names in braces replaced; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def module(name: str, arguments: str, least_s: float, most_s: float, shows: str, **more: Any) -> Step:
    """A Python module with arguments as a shell has them."""
    return Step(name, ("-m", *shlex.split(arguments)), least_s, most_s, shows, **more)


def bench(name: str, arguments: str, least_s: float, most_s: float, shows: str, **more: Any) -> Step:
    words = f"benchmarks {arguments} --limit-seconds {{seconds}} --json {{json}}"
    return module(name, words, least_s, most_s, shows, **more)


def tests(name: str, arguments: str, least_s: float, most_s: float, shows: str, **more: Any) -> Step:
    words = f"pytest {arguments} -q --tb=short -p no:cacheprovider -p benchmarks.campaign.failures"
    return module(name, words, least_s, most_s, shows, **more)


def engine(
    name: str,
    model: str,
    shows: str,
    scenarios: str = "",
    served: Sequence[str] = (),
    most_s: float = 330,
    **more: Any,
) -> Step:
    """Engines of dsl and its best peer, which sample by vLLM's own sampler unless `variables` are given.

    Args:
        served: options of the plugin, set to `dsl`: kernels that are off by default.
        more: of `Step`, and arguments of the engine.
    """
    of_step = {"variables": VLLMS_SAMPLER} | {key: more.pop(key) for key in ("gpus", "variables") if key in more}
    options = more | ({"additional_config": {"dsl": dict.fromkeys(served, "dsl")}} if served else {})
    words = f"engine --quick --model {model}"
    words += f" --scenarios {scenarios}" if scenarios else ""
    words += f" --engine {shlex.quote(json.dumps(options, separators=(',', ':')))}" if options else ""
    return bench(name, words, 110, most_s, shows, **of_step)


def tune(name: str, arguments: str, shows: str, least_s: float = 60, most_s: float = 200) -> Step:
    """The JSON file has the times of all configurations; what is faster is in a file beside it, with its chip."""
    words = f"dsl_backend.cli tune {arguments} --times {{json}} --json {{json}}.tuned"
    return module(name, words, least_s, most_s, shows)


def sanitized(tool: str, options: str, shows: str) -> Step:
    """Tests of small problems under one of compute-sanitizer's tools, which has them take a hundred times as long.

    API calls are not reported: cuda-python asks for entry points that a driver may lack.
    """
    words = f"--tool {tool} {options} --target-processes all --error-exitcode 9 {PYTHON} -m pytest -q --tb=line"
    ids = " ".join(shlex.quote(one) for one in SANITIZED)
    return Step(tool, (*shlex.split(f"{words} -p no:cacheprovider {ids}"),), 60, 400, shows, program=SANITIZER)


# Node ids: cases of each family, and the e4m3 kernels of attention, one of which takes memcheck five minutes.
SANITIZED = (
    "tests/linear/test_api.py::test_case[swiglu-cute]",
    "tests/linear/test_scaled_kernels.py::test_real[real-16]",
    "tests/experts/test_api.py::test_case[plain-cute-decode]",
    "tests/experts/test_api.py::test_case[padding-cute-grouped]",
    "tests/experts/test_scaled.py::test_case_on_a_gpu[blocks-padding-cute-scaled]",
    "tests/experts/test_weight_only.py::test_case_on_a_gpu[mxfp4-tiled-many]",
    "tests/norm/test_api.py::test_case[thread-vector-cute]",
    "tests/softmax/test_api.py::test_case[two-cute]",
    "tests/sampling/test_sampling_kernels.py::test_kernel_is_the_definition[dtype0-300-cute]",
    "tests/attention/test_attention_kernels.py::test_attention[cute-mixed]",
    "tests/attention/test_attention_kernels.py::test_attention[cute-mla-16]",
    "tests/attention/test_fp8_on_gpu.py::test_random_problems_of_a_layer[prefill-0]",
    "tests/attention/test_fp8_on_gpu.py::test_random_problems_of_a_layer[mla-0]",
    "tests/attention/test_fp8_on_gpu.py::test_random_problems_of_a_layer[many-rows-0]",
)

# Without FlashInfer, whose module of softmax compiles for a minute in front of each row.
SOFTMAX_PEERS = "torch,torch.compile,Triton,Liger,quack"
CELL_PEERS = "torch,torch.compile,Triton,Liger,FlashInfer,quack,vLLM"
NORM_PEERS = "quack,vLLM,FlashInfer,Triton"
# FlashInfer would compile for minutes.
FP8_PEERS = "e4m3,FA3,TRITON_ATTN,TRITON_MLA,FLASH_ATTN_MLA,FLASHMLA"
FLASHINFER_LATENT = "FLASHINFER_MLA,FlashInfer CuTe DSL,trtllm-gen,XQA,FA4"
INVARIANT_PEERS = "ordinary,FA3,TRITON_ATTN,FLASH_ATTN_MLA"
# A seed of held-out rows that nothing was chosen by.
NEW_SEED = 43
ONE_TO_256 = "b1,b16,b64,b256"
DRAFTED = "b1,b16,b64,b1-sampled,b16-sampled,b64-sampled"
LONG = "b64,prefill,prompt-16k,long-b1"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFT_MODEL = {"method": "draft_model", "model": "llama-draft", "num_speculative_tokens": 4}
# vLLM's fusion of the all-reduce needs FlashInfer's kernels.
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}

# The most important first: a campaign that ends early has those.
STEPS = (
    # A decode step.
    engine(
        "tensor-parallel", "llama-8b", "Llama-8B on two GPUs", "b1,b64,b256,prefill", gpus=2, most_s=260, **TWO_RANKS
    ),
    engine(
        "tensor-parallel-default",
        "llama-8b",
        "the same by vLLM's defaults: the all-reduce and the norm behind it are one kernel where FlashInfer has it",
        "b1,b64,b256,prefill",
        gpus=2,
        most_s=500,  # FlashInfer may compile
        variables=(),
        tensor_parallel_size=2,
    ),
    bench(
        "profile",
        "step --model llama-8b",
        110,
        260,
        "a step kernel by kernel beside FLASH_ATTN's, and the floor of each part",
    ),
    bench(
        "host",
        "step --host --model deepseek-v2-lite --kernels 16",
        220,  # for two cold starts, one after the other: 180 s did not suffice
        300,
        "what the host does in a step with one request: this package's part, and FLASH_ATTN_MLA's whole step",
        variables=VLLMS_SAMPLER,
    ),
    # b8 and 16k-b1 take both engines 16 s, by the rates of b1 and prompt-16k on an H200.
    engine("llama", "llama-8b", "tokens/s beside FLASH_ATTN, and the cold start", most_s=345),
    engine("deepseek", "deepseek-v2-lite", "tokens/s beside FLASH_ATTN_MLA", most_s=345),
    engine("qwen3-4b", "qwen3-4b", "a small model beside FLASH_ATTN", f"{ONE_TO_256},prefill", most_s=220),
    engine("qwen3-0.6b", "qwen3-0.6b", "a smaller model beside FLASH_ATTN", f"{ONE_TO_256},prefill", most_s=220),
    engine(
        "drafts-ngram",
        "llama-8b",
        "n-gram drafts beside vLLM's own sampler",
        DRAFTED,
        most_s=260,
        speculative_config=NGRAM,
    ),
    engine(
        "drafts-model",
        "llama-8b",
        "a draft model beside vLLM's own sampler",
        DRAFTED,
        most_s=280,
        speculative_config=DRAFT_MODEL,
    ),
    engine("fp8-cache", "llama-8b", "an fp8 cache beside FLASH_ATTN's", LONG, most_s=240, kv_cache_dtype="fp8"),
    engine(
        "fp8-cache-products",
        "llama-8b",
        "the same with products in 8 bits",
        LONG,
        most_s=240,
        kv_cache_dtype="fp8",
        additional_config={"dsl": {"attention_kernel": "cute-fp8"}},
    ),
    *(
        engine(
            f"fp8-{kind}-engine",
            f"llama-8b-fp8-{kind}",
            f"our 8-bit linear layers beside vLLM's, with {scales}",
            f"{ONE_TO_256},prefill",
            served=("scaled_linears",),
        )
        for kind, scales in (("channels", "scales of channels"), ("blocks", "blocks of 128x128"))
    ),
    engine(
        "fp8-channels-norms",
        "llama-8b-fp8-channels",
        "the same with norms that quantise for our projections",
        f"{ONE_TO_256},prefill",
        served=("scaled_linears", "norms"),
    ),
    engine("experts-engine", "qwen3-30b-a3b-12", "tokens/s with our experts", served=("experts",)),
    engine(
        "experts-fp8-engine",
        "qwen3-30b-a3b-12-fp8-blocks",
        "tokens/s with our experts of e4m3 blocks, beside vLLM's choice",
        f"{ONE_TO_256},prefill",
        served=("experts",),
        variables=(*VLLMS_SAMPLER, *WITHOUT_DEEP_GEMM),
    ),
    # Operators.
    bench(
        "experts-fp8-blocks",
        "experts --rows ^fp8-blocks --peers 'vLLM Triton,vLLM DeepGEMM' --seconds 0.1",
        40,
        150,
        "e4m3 experts beside DeepGEMM",
    ),
    bench(
        "experts-fp8-few",
        "experts --rows '^fp8.*-(1|8|32|64)$' --kernels cute-scaled,cute-scaled-decode --peers 'vLLM Triton'",
        60,
        200,
        "e4m3 experts for few tokens: grouped GEMMs beside the kernels of their own, which have to be named",
    ),
    bench("experts", "experts --peers 'vLLM Triton'", 40, 150, "experts beside vLLM's Triton"),
    bench(
        "experts-flashinfer",
        "experts --rows '^(fp8-blocks|qwen3|mixtral)' --peers 'FlashInfer CUTLASS' --prepare-seconds 400",
        200,
        600,
        "experts beside FlashInfer's CUTLASS kernels, which are compiled for minutes",
    ),
    bench(
        "experts-mxfp4",
        "experts --rows ^mxfp4 --kernels cute-weight-only --seconds 0.05",
        30,
        100,
        "MXFP4 weights under bfloat16, for any number of tokens",
    ),
    bench(
        "experts-skewed",
        "experts --rows '^(skewed|without-tokens)' --peers 'vLLM Triton' --seconds 0.05",
        30,
        200,
        "experts with an uneven routing, and those without a token",
    ),
    bench(
        "w4a16",
        "weight-only-linear --rows '^(llama|others-w4)' --seconds 0.05",
        40,
        150,
        "layers of 4-bit weights beside Marlin and Machete",
    ),
    bench("w8a16", "weight-only-linear --rows w8 --seconds 0.05", 40, 150, "the same of 8-bit weights"),
    bench(
        "scaled-linear", "scaled-linear --kernels cute-sm90", 40, 150, "fp8 layers beside CUTLASS, DeepGEMM and torch"
    ),
    bench(
        "cells-softmax",
        f"dsls softmax ahead=45 --peers '{SOFTMAX_PEERS}' --seconds 0.05",
        60,
        160,
        "28 cells of softmax, all columns but FlashInfer and other DSLs",
    ),
    bench(
        "cells-norm",
        f"dsls norm ahead=45 --peers '{CELL_PEERS}' --seconds 0.05",
        60,
        200,
        "28 cells of RMSNorm, all columns but other DSLs",
    ),
    bench(
        "cells-dsls",
        "dsls softmax norm ahead=60 --peers Gluon,Helion,TileLang,cuTile --seconds 0.05",
        60,
        240,
        "28 cells of softmax and RMSNorm in other DSLs",
    ),
    bench(
        "rows",
        "mla-decode prefill linear softmax --held-out --rows ^lost --seconds 0.05",
        40,
        130,
        "rows in which a peer was faster once",
    ),
    bench(
        "sampling-flashinfer",
        "sampling --rows '^(none|k|p|k[+]p|min-p)-[0-9]+x151936$|^(whole|small)' --peers FlashInfer,vLLM "
        "--prepare-seconds 400 --seconds 0.05",
        200,
        500,
        "every filter, and a vocabulary of 300, beside FlashInfer, which compiles for minutes",
    ),
    bench("held-out-attention", "mla-decode prefill --held-out", 60, 200, "shapes that nothing is tuned for"),
    bench(
        "held-out-flashinfer",
        "mla-decode --held-out --peers FLASHINFER_MLA,FLASH_ATTN_MLA,FLASHMLA --prepare-seconds 300",
        200,
        500,
        "MLA that nothing is tuned for beside FlashInfer's, which compiles for minutes",
    ),
    bench("held-out-others", "linear softmax norm --held-out", 60, 200, "shapes that nothing is tuned for"),
    bench(
        "held-out-fp8",
        "scaled-linear --held-out --kernels cute-sm90 --seconds 0.05",
        60,
        240,
        "fp8 layers that nothing is tuned for",
    ),
    bench(
        "held-out-new",
        f"mla-decode prefill linear softmax norm --held-out --held-out-seed {NEW_SEED} --seconds 0.03",
        60,
        240,
        "shapes of a seed that nothing was chosen by",
    ),
    bench(
        "norm", f"norm --rows grid|fp8|wide|narrow --peers {NORM_PEERS}", 30, 150, "RMSNorm of every width and output"
    ),
    bench("norm-fp8", "norm --rows ^fp8 --peers vLLM,torch", 25, 100, "RMSNorm with 8-bit outputs"),
    tune(
        "norm-exact",
        "norm --classes '^norm-(4608|5120|6656|7168)-' --seconds 0.05",
        "rows of 4608 to 7168 columns spread exactly, and by powers of two as before",
        least_s=40,
        most_s=150,
    ),
    bench(
        "short-queries",
        "prefill --rows short-queries --peers FA3,e4m3 --seconds 0.05",
        30,
        110,
        "9 to 100 tokens behind many keys",
    ),
    bench(
        "many-rows",
        "prefill --rows ^e4m3-rows --peers FA3,e4m3 --seconds 0.05",
        30,
        110,
        "short queries of many rows over fp8 caches",
    ),
    bench(
        "e4m3-heads",
        "prefill --rows '^(e4m3-heads|fp8-hd128)' --peers FA3,e4m3,cuDNN --seconds 0.1",
        30,
        110,
        "fp8 caches with every size of head, products in 16 and in 8 bits",
    ),
    bench(
        "e4m3-decode",
        "decode --rows '^(hd64|hd128-h8x1|q[1-8]|e4m3)' --peers FA3 --seconds 0.05",
        40,
        110,
        "decode over fp8 caches and over 16-bit ones in one run: every size of head, 1 to 8 tokens",
    ),
    bench(
        "e4m3-mla",
        "mla-decode --rows 'drafts-' --peers e4m3,FLASHMLA --seconds 0.05",
        60,
        150,
        "MLA of 16, 64 and 128 heads and 1 to 8 tokens over fp8 caches and over 16-bit ones in one run",
    ),
    bench(
        "fp8",
        f"decode prefill mla-decode --rows '^fp8' --peers {FP8_PEERS}",
        40,
        150,
        "fp8 caches beside vLLM's, and products in 8 bits",
    ),
    bench(
        "invariant",
        f"decode prefill mla-decode --rows invariant --peers {INVARIANT_PEERS}",
        40,
        120,
        "batch-invariant mode, its peers in the same mode, and our kernels without it",
    ),
    bench("decode", "decode --rows '^(hd|q|ragged|window|hd512)' --peers FA3", 30, 150, "decode beside FA3"),
    bench("prefill", "prefill --rows '^(hd|ragged|context8k|mixed|window)' --peers FA3,cuDNN", 30, 150, "prefill"),
    bench("mla", "mla-decode mla-prefill --peers FLASH_ATTN_MLA,FLASHMLA,FA3,cuDNN", 30, 150, "MLA, the tables"),
    bench(
        "mla-rows",
        "mla-decode --rows '^(ragged|q4|q8|short|prompt)' --peers FLASH_ATTN_MLA,FLASHMLA",
        30,
        150,
        "MLA of ragged, short and several queries, prompts beside decodes",
    ),
    bench(
        "mla-flashinfer",
        f"mla-decode --rows '^(h16|h128|ragged|q4|short)' --peers '{FLASHINFER_LATENT}' --prepare-seconds 300",
        200,
        500,
        "MLA decode beside FlashInfer's, which compiles for minutes, and FA4's",
    ),
    bench(
        "decode-peers",
        "decode --rows '^(hd|q|ragged|window)' --peers FA4,FLASHINFER,XQA --prepare-seconds 300",
        200,
        500,
        "decode beside FA4, FlashInfer and XQA, which compile for minutes",
    ),
    bench("linear", "linear --peers 'cuBLAS + silu_and_mul,quack'", 30, 150, "gate and up projections"),
    bench("projections", "linear --rows '^(projections|plain)'", 30, 150, "products without an activation"),
    bench("rope", "rope-write-kv write-kv", 30, 120, "norms, rotation and cache write beside vLLM's kernels"),
    bench("rope-mla", "rope-write-mla", 30, 120, "MLA's norm, rotation and cache write beside vLLM's kernels"),
    bench("sampling", "sampling verification --peers vLLM,plain", 30, 150, "every filter, and drafts"),
    bench(
        "verification-ratio",
        "verification --rows ^ratio --peers vLLM,plain --seconds 0.05",
        30,
        110,
        "drafts that are accepted by the ratio of probabilities",
    ),
    bench(
        "sampling-rows",
        "sampling --rows '^(whole|logprobs|vocab)' --peers vLLM --seconds 0.05",
        30,
        150,
        "rows that are read as a whole, and the likeliest tokens",
    ),
    tune(
        "top-p",
        "sampling --classes '(151936-float32-top-p-.*-(16|66|256)|201088-float32-top-p-.*-(128|512))$' --seconds 0.05",
        "top-p alone: bounds of lanes, and a second launch for the rows that are left",
        least_s=40,
        most_s=150,
    ),
    # Right on the chip.
    # On eight of a host's cores a third of attention's tests took 220 s (an H200, 2026-11-28).
    *(
        tests(
            f"attention-tests-{part}",
            f"tests/attention -m gpu -n 8 --part {part}/3",
            60,
            330,
            f"attention against the reference, part {part} of 3",
        )
        for part in (1, 2, 3)
    ),
    *(
        tests(
            f"other-tests-{part}",
            f"tests --ignore tests/attention -m gpu -n 8 --part {part}/2",
            60,
            280,
            f"other families against the reference, part {part} of 2",
        )
        for part in (1, 2)
    ),
    tests("replays", "tests/primitives/test_replayed_steps.py -m gpu", 40, 150, "chains of launches, 10,000 replays"),
    sanitized("racecheck", "--racecheck-report analysis", "hazards in shared memory: e4m3 kernels, one of each other"),
    sanitized("memcheck", "--report-api-errors no", "accesses beyond bounds: e4m3 kernels, one of each other"),
    module(
        "experts-problems",
        "dsl_backend.cli verify --families experts --no-times --json {json}",
        60,
        200,
        "random layers of experts against the reference",
    ),
    module(
        "scaled-problems",
        "dsl_backend.cli verify --families scaled_linear --kernels cute-sm90 --problems 500 --no-times --json {json}",
        60,
        500,
        "random 8-bit linear layers against the reference",
    ),
    module(
        "experts-formats",
        "dsl_backend.cli verify --families scaled_experts,weight_only_experts --problems 20 --no-times --json {json}",
        60,
        200,
        "the same of weights in e4m3 and in MXFP4 under 16 bits",
    ),
    tests(
        "served",
        "integration/test_numerics.py integration/test_linear.py",
        60,
        240,
        "log-probabilities of engines",
        variables=VLLMS_SAMPLER,
    ),
    module(
        "invariance",
        "integration.invariance --graphs",
        60,
        240,
        "served log-probabilities, bit by bit",
        variables=VLLMS_SAMPLER,
    ),
    tests("host-tests", "tests -n 4 -k triton", 60, 300, "Triton's tests on a GPU and beside it"),
    # Configurations, constants, comparisons.
    tune("tune-mla", "attention --classes mla_decode", "configurations of MLA, row groups and combine among them"),
    tune("tune-experts", "experts", "tiles of experts, and from how many tokens on"),
    tune("tune-linear", "linear", "tiles of gate and up projections, and of projections"),
    tune("tune-softmax", "softmax --seconds 0.03", "how softmax spreads each width, for few and many rows", most_s=400),
    tune("tune-norm", "norm --seconds 0.03", "how RMSNorm spreads each width, for few and many rows", most_s=400),
    tune(
        "tune-sampling",
        "sampling --classes ^sampling-151936- --seconds 0.03",
        "CTAs of a row, loads and launches of the sampler, for each range of rows",
        most_s=400,
    ),
    module("scaled-sweep", "benchmarks.scaled_linear.sweep --json {json}", 120, 400, "configurations of fp8 layers"),
    module("linear-sweep", "benchmarks.linear.sweep --json {json}", 120, 400, "configurations of gate and up"),
    module(
        "fp8-errors",
        "benchmarks.attention.fp8_errors",
        20,
        120,
        "errors of e4m3 products beside FA3's, over random, outlier-heavy and long inputs",
    ),
    module("clock", "emulator.clock.measure", 20, 60, "constants of the emulator's clock, on this chip"),
    module(
        "clock-mutants",
        "benchmarks.clock.on_chip --mutants --json {json}",
        20,
        100,
        "kernels with a stage less, a serialised softmax, bank conflicts: what each costs here, and by the clock",
    ),
    bench("dsls", "dsls --seconds 0.1", 120, 330, "DSLs compared: operators, launches, compile times"),
    bench(
        "dsls-linear",
        "dsls linear ahead=90 --rows 'x12288$|^swiglu' --seconds 0.1",
        120,
        330,
        "DSLs compared: products 12288 deep, and layers with SwiGLU",
    ),
    # FlashInfer compiles for 76 s on two cores, and longer beside others.
    bench("dsls-lengths", "dsls prefill ahead=130 --seconds 0.1", 120, 330, "DSLs compared: attention over lengths"),
    bench(
        "dsls-others",
        "dsls linear prefill ahead=90 --peers Gluon,Helion,TileLang,cuTile --seconds 0.1",
        120,
        330,
        "products and attention over lengths in other DSLs",
    ),
    bench(
        "dsls-compile",
        "dsls compile --seconds 0.1",
        120,
        400,
        "DSLs compared: compile times, cold and warm",
    ),
    bench(
        "qwen3-30b",
        f"engine --quick --in-turn --model qwen3-30b-a3b --backends dsl,FLASH_ATTN --scenarios {ONE_TO_256},prefill",
        300,
        500,
        "all layers of Qwen3-30B-A3B, one engine after the other",
    ),
)

# Steps with their seconds, in their order. All plans are for four GPUs and 560 s, and have a step once; except for
# `one-gpu`, of 500 s, and `tuning`, which is for one GPU of each chip that records are wanted of.
PLANS = {
    "four-gpus": (
        "tensor-parallel=300 profile=270 cells-softmax=125 cells-norm=125 qwen3-0.6b=150 drafts-model=210 "
        "e4m3-heads=150 verification-ratio=70 e4m3-mla=130 short-queries=70"
    ),
    "second": (
        "experts-flashinfer=530 sampling-flashinfer=430 held-out-new=220 held-out-attention=160 held-out-others=150 "
        "rows=110 experts=100 sampling=100 scaled-linear=80 experts-mxfp4=60 many-rows=55 "
        "experts-skewed=55"
    ),
    "third": (
        "qwen3-30b=500 llama=345 deepseek=345 experts-engine=330 dsls=205 decode=80 prefill=80 mla=90 w8a16=60 norm=60"
    ),
    "fourth": (
        "tune-experts=200 tune-mla=200 tune-linear=200 linear-sweep=300 scaled-sweep=300 clock=60 clock-mutants=60 "
        "fp8=110 invariant=110 mla-rows=100 linear=100 projections=90 rope=65 rope-mla=65 sampling-rows=80"
    ),
    "fifth": (
        "tensor-parallel-default=330 fp8-channels-engine=330 fp8-blocks-engine=330 experts-fp8-few=110 "
        "held-out-fp8=120 e4m3-decode=80 dsls-linear=220"
    ),
    "sixth": "mla-flashinfer=400 decode-peers=400 held-out-flashinfer=400 dsls-compile=300 dsls-lengths=250",
    "one-gpu": (
        "cells-softmax=62 cells-norm=64 rows=65 held-out-new=105 experts-fp8-blocks=75 short-queries=45 e4m3-heads=35 "
        "norm-fp8=25"
    ),
    "tuning": (
        "tune-softmax=400 tune-norm=400 tune-sampling=400 top-p=150 tune-mla=200 tune-experts=200 tune-linear=400"
    ),
    "right": (
        "attention-tests-1=330 attention-tests-2=330 attention-tests-3=330 other-tests-1=280 other-tests-2=220 "
        "served=215 replays=150 experts-problems=200 experts-formats=60"
    ),
    "checked": ("racecheck=400 memcheck=400 invariance=300 host-tests=200 cells-dsls=150 host=240 dsls-others=150"),
    "seventh": (
        "scaled-problems=340 fp8-channels-norms=330 experts-fp8-engine=300 drafts-ngram=195 fp8-cache=160 qwen3-4b=150 "
        "fp8-cache-products=160 fp8-errors=100 w4a16=70 norm-exact=45 norm-fp8=35 top-p=50"
    ),
}


def chosen(text: str | None) -> list[Step]:
    """The steps that a text names, in its order: NAME or NAME=SECONDS, divided by commas or spaces; by default all.

    SECONDS are what the step gets at most, and also at least where it would wait for more.

    Raises:
        ValueError: a name is none of a step, occurs twice, or its seconds are no number above 0.
    """
    if text is None:
        return list(STEPS)
    known = {step.name: step for step in STEPS}
    asked = [part.partition("=") for part in text.replace(",", " ").split()]
    names = [name for name, _, _ in asked]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no step {', '.join(unknown)}: choose from {', '.join(known)}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: a step runs once")
    if not names:
        raise ValueError(f"no step in {text!r}: choose from {', '.join(known)}")
    return [with_seconds(known[name], seconds) if equals else known[name] for name, equals, seconds in asked]


def with_seconds(step: Step, text: str) -> Step:
    """The step with another time limit. Raises ValueError: the text is no number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{step.name}={text}: a time limit is NAME=SECONDS with a number above 0")
    return replace(step, most_s=seconds, least_s=min(step.least_s, seconds))
