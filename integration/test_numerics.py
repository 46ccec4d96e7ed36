# SPDX-License-Identifier: Apache-2.0
"""Compares tokens and log-probabilities of `dsl` with vLLM's own backends, for every kind of attention.

Errors are measured from a float32 run of vLLM's own backend. In float32 `dsl` must agree with it to rounding and give
the same tokens; in a shorter dtype its error may be at most twice that of vLLM's own backend in that dtype.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from integration import offline
from integration.compare import ROUNDING, VISIBLE, generated_errors, prompt_errors, prompts, rms
from integration.conftest import Checkpoint, parameters
from integration.environment import device
from integration.models import MODELS, Model
from integration.offline import Job, Outcome

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with a feature, and the same model without it.

    Attributes:
        without: makes the model with the same weights and the feature switched off.
    """

    id: str
    without: Callable[[Model], Model]
    mla: bool = False
    why: str

    @property
    def model(self) -> Model:
        return MODELS[self.id.partition("-")[0]]

    @property
    def peer(self) -> str:
        """VLLM's own attention backend."""
        return device().alibi if self.id == "bloom" else device().mla if self.mla else device().dense


CASES = (
    Case(id="llama", without=lambda model: model.changed({"o_proj": 0.0}), why="grouped queries; without: attention"),
    Case(id="gemma2", without=lambda model: model.changed(sliding_window=4096), why="window"),
    Case(id="gemma2-softcap", without=lambda model: model.changed(attn_logit_softcapping=1000.0), why="softcap"),
    Case(id="gpt_oss", without=lambda model: model.changed({"sinks": -1e4}), why="sinks"),
    Case(id="bloom", without=lambda model: model.changed({"dense.weight": 0.0}), why="ALiBi; without: attention"),
    Case(id="deepseek_v2", without=lambda model: model.changed({"o_proj": 0.0}), mla=True, why="absorbed MLA"),
    Case(id="qwen3_moe", without=lambda model: model.changed({"mlp.experts": 0.0}), why="routed experts"),
    Case(
        id="deepseek_moe",
        without=lambda model: model.changed({"mlp.experts": 0.0}),
        mla=True,
        why="routed experts beside shared ones, behind MLA",
    ),
)
COMPARED = tuple(case for case in CASES if "-" not in case.id)  # the others share a model


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the engine that must not change the results.

    Attributes:
        ranks: workers; each has a GPU, where there are GPUs.
        also_theirs: run vLLM's own backend in this setting too, because the setting costs accuracy.
        sleep: the engine answers all prompts, sleeps and wakes up before it answers them again.
        peer: vLLM's own backend for this setting; None for the case's.
        says: parts of one line of the log about who serves attention: the layer, and the kernel's title.
    """

    id: str
    engine: dict[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = tuple(case.id for case in COMPARED)
    dtypes: tuple[str, ...] = device().dtypes
    also_theirs: bool = False
    cuda_only: bool = False
    ranks: int = 1
    sleep: bool = False
    peer: str | None = None
    says: tuple[str, ...] = ()
    why: str

    @property
    def fp8(self) -> bool:
        return self.engine.get("kv_cache_dtype") == "fp8"

    @property
    def has_peer(self) -> bool:
        """Whether vLLM's own backends support this setting on this machine."""
        return device().fp8 or not self.fp8


EXPERTS: dict[str, Any] = {"additional_config": {"dsl": {"experts": "dsl"}}}
FP8_PRODUCTS: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "additional_config": {"dsl": {"attention_kernel": "cute-fp8"}},
}
FP8_QUERIES = {"attention_kernel": "cute-fp8", "fp8_queries": True}
# Prompts attend to projected keys, as FLASHMLA's do: the cache is read by later pieces of a prompt, and by decode.
FP8_MLA_OPTIONS = {"mla_latent_queries": 8}
FP8_MLA: dict[str, Any] = {
    "kv_cache_dtype": "fp8",
    "block_size": 64,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "additional_config": {"dsl": FP8_MLA_OPTIONS},
}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = (
    Setting(id="plain", also_theirs=True, why="whole prompts, then one token a step"),
    Setting(
        id="experts",
        engine=EXPERTS,
        cases=("gpt_oss", "qwen3_moe", "deepseek_moe"),
        dtypes=("bfloat16",),
        why="routed experts by dsl too",
    ),
    Setting(
        id="experts-shared",
        engine={"additional_config": {"dsl": {"experts": "dsl", "shared_experts": "dsl"}}},
        cases=("deepseek_moe",),
        dtypes=("bfloat16",),
        why="shared experts by the kernels of the routed ones",
    ),
    Setting(
        id="experts-graphs",
        engine=EXPERTS | {"enforce_eager": False},
        cases=("gpt_oss", "qwen3_moe", "deepseek_moe"),
        dtypes=("bfloat16",),
        cuda_only=True,
        why="routed experts under CUDA graphs",
    ),
    Setting(
        id="experts-sleep",
        engine=EXPERTS | {"enforce_eager": False, "enable_sleep_mode": True},
        cases=("qwen3_moe",),
        dtypes=("bfloat16",),
        cuda_only=True,
        sleep=True,
        why="experts' weights are unmapped and mapped again, under graphs",
    ),
    Setting(
        id="experts-tensor",
        engine=EXPERTS | TWO_RANKS,
        cases=("qwen3_moe",),
        dtypes=("bfloat16",),
        ranks=2,
        why="each rank has a part of every expert",
    ),
    Setting(
        id="experts-parallel",
        engine=EXPERTS | TWO_RANKS | {"enable_expert_parallel": True},
        cases=("qwen3_moe",),
        dtypes=("bfloat16",),
        ranks=2,
        why="each rank has some of the experts",
    ),
    Setting(
        id="chunked",
        engine={
            "max_num_batched_tokens": 48,
            "enable_chunked_prefill": True,
            "block_size": 16,
            # Most pieces of MLA's prompts are longer: they attend to projected keys, and merge what came before.
            "additional_config": {"dsl": {"mla_latent_queries": 8}},
        },
        cases=("llama", "gpt_oss", "deepseek_v2"),
        dtypes=device().dtypes[:1],
        why="prompts in pieces that end inside pages, beside requests that decode",
    ),
    Setting(
        id="ngram",
        engine={"speculative_config": NGRAM},
        cases=("llama", "deepseek_v2"),
        dtypes=device().dtypes[:1],
        why="several query tokens a request in a step that decodes",
    ),
    Setting(
        id="fp8",
        engine={"kv_cache_dtype": "fp8"},
        cases=("llama",),
        dtypes=("bfloat16",),
        also_theirs=True,
        why="keys and values of 8 bits",
    ),
    Setting(
        id="fp8-products",
        engine=FP8_PRODUCTS,
        cases=("llama",),
        dtypes=("bfloat16",),
        also_theirs=True,
        cuda_only=True,
        says=("dense-prefill e4m3",),
        why="prompts multiplied in 8 bits, as FlashAttention does",
    ),
    Setting(
        id="fp8-mla",
        engine=FP8_MLA,
        cases=("deepseek_v2",),
        dtypes=("bfloat16",),
        also_theirs=True,
        cuda_only=True,
        peer="FLASHMLA",
        why="latent keys of 8 bits; what a piece of a prompt sees of the pieces before it is in the cache",
    ),
    Setting(
        id="fp8-products-mla",
        engine=FP8_MLA | {"additional_config": {"dsl": {"attention_kernel": "cute-fp8"} | FP8_MLA_OPTIONS}},
        cases=("deepseek_v2",),
        dtypes=("bfloat16",),
        also_theirs=True,
        cuda_only=True,
        peer="FLASHMLA",
        says=("mla-decode e4m3",),
        why="absorbed MLA multiplied in 8 bits, as FlashMLA does",
    ),
    Setting(
        id="fp8-queries",
        engine=FP8_PRODUCTS | {"additional_config": {"dsl": FP8_QUERIES}},
        cases=("llama",),
        dtypes=("bfloat16",),
        also_theirs=True,
        cuda_only=True,
        says=("float8_e4m3fn queries", "dense-prefill e4m3"),
        why="queries that vLLM quantises, of prompts and of decodes, which convert them to 16 bits",
    ),
    Setting(
        id="fp8-queries-mla",
        engine=FP8_MLA | {"additional_config": {"dsl": FP8_QUERIES | FP8_MLA_OPTIONS}},
        cases=("deepseek_v2",),
        dtypes=("bfloat16",),
        also_theirs=True,
        cuda_only=True,
        peer="FLASHMLA",
        says=("float8_e4m3fn queries", "mla-decode e4m3"),
        why="latent queries that vLLM quantises, as it does for FlashMLA",
    ),
    Setting(
        id="graphs",
        engine={"enforce_eager": False},
        cases=("llama", "gpt_oss", "deepseek_v2"),
        cuda_only=True,
        why="CUDA graphs",
    ),
    Setting(
        id="full-graphs",
        engine={"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL"}},
        cases=("llama", "gpt_oss"),
        cuda_only=True,
        why="graphs of whole steps, prompts among them",
    ),
    Setting(
        id="sleep",
        engine={"enforce_eager": False, "enable_sleep_mode": True},
        cases=("llama", "deepseek_v2"),
        cuda_only=True,
        sleep=True,
        why="weights, cache and the kernels' counters are unmapped and mapped again, under graphs",
    ),
)
PLAIN = SETTINGS[0]


def comparisons() -> list[tuple[Case, Setting, str]]:
    return [
        (case, setting, dtype)
        for case in COMPARED
        for setting in SETTINGS
        if case.id in setting.cases and (device().cuda or not setting.cuda_only)
        if not device().cuda or setting.ranks <= torch.cuda.device_count()
        for dtype in setting.dtypes
        if dtype in device().dtypes
    ]


Results = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def results(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Results:
    """The outcomes that the selected tests need.

    By (case, "truth" | "without") and (case, setting, dtype, "theirs" | "dsl").
    """
    here = device()
    jobs: dict[tuple[str, ...], Job] = {}

    def add(key: tuple[str, ...], folder: str, backend: str, dtype: str, setting: Setting = PLAIN) -> None:
        before = prompts() if setting.sleep else ()
        jobs[key] = Job(
            model=folder,
            backend=backend,
            dtype=dtype,
            prompts=prompts(),
            engine=setting.engine,
            before=before,
            sleep=setting.sleep,
        )

    for chosen in parameters(request):
        case = chosen["case"]
        folder = str(checkpoint(case.id, case.model))
        truth, truth_dtype = here.mla_truth if case.mla else here.dense_truth
        add((case.id, "truth"), folder, truth, truth_dtype)
        if "setting" not in chosen:
            without = str(checkpoint(f"{case.id}-without", case.without(case.model)))
            add((case.id, "without"), without, truth, truth_dtype)
            continue
        setting, dtype = chosen["setting"], chosen["dtype"]
        add((case.id, setting.id, dtype, "dsl"), folder, "dsl", dtype, setting)
        compared = setting if setting.also_theirs else PLAIN
        if dtype != "float32" and compared.has_peer:
            add((case.id, compared.id, dtype, "theirs"), folder, compared.peer or case.peer, dtype, compared)
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_feature_matters(results: Results, case: Case) -> None:
    """The comparisons below would detect a backend without the feature, in prompts and in generated tokens."""
    truth, without = results[case.id, "truth"].answers, results[case.id, "without"].answers
    assert max(prompt_errors(without, truth)) > VISIBLE
    assert [answer.tokens for answer in without] != [answer.tokens for answer in truth]


@pytest.mark.parametrize(
    ("case", "setting", "dtype"), comparisons(), ids=lambda value: value if isinstance(value, str) else value.id
)
def test_matches(results: Results, case: Case, setting: Setting, dtype: str) -> None:
    outcome = results[case.id, setting.id, dtype, "dsl"]
    truth, ours = results[case.id, "truth"].answers, outcome.answers
    served = [line for line in outcome.log.splitlines() if "dsl serves attention" in line]
    assert served, "the log does not say that dsl serves"
    assert all(device().serves(line) for line in served)
    assert any(all(part in line for part in setting.says) for line in served)
    if setting.id.startswith("experts"):
        by_dsl = re.findall(r"dsl serves \d+ layers of routed experts.*", outcome.log)
        assert len(by_dsl) == setting.ranks, "the log does not say that dsl serves experts"
        assert all("1 shared" in line for line in by_dsl) == setting.id.endswith("shared")
        assert all("an expert map" in line for line in by_dsl) == bool(setting.engine.get("enable_expert_parallel"))
    if dtype == "float32":
        assert max(prompt_errors(ours, truth)) <= ROUNDING
        assert max(generated_errors(ours, truth, ROUNDING)) <= ROUNDING
        assert [answer.tokens for answer in ours] == [answer.tokens for answer in truth]
        return
    if not setting.has_peer:
        pytest.skip(f"vLLM's {device().dense} cannot run with {setting.engine} on this machine")
    theirs = results[case.id, setting.id if setting.also_theirs else PLAIN.id, dtype, "theirs"].answers
    their_errors, our_errors = prompt_errors(theirs, truth), prompt_errors(ours, truth)
    assert rms(our_errors) <= 2 * rms(their_errors)
    tolerance = 2 * max(their_errors)
    assert max(our_errors) <= tolerance
    assert max(generated_errors(ours, truth, tolerance)) <= tolerance
