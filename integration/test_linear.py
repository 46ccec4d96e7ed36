# SPDX-License-Identifier: Apache-2.0
"""Compares models whose projections and activations `dsl` fuses with the same models with vLLM's own layers.

Errors are measured from a float32 run of vLLM's own backend. The errors of fused layers may be at most twice those of
vLLM's own layers in the same dtype. Float32 layers are not fused.
"""

import re
from typing import Any

import pytest
import torch

from integration import offline
from integration.compare import VISIBLE, generated_errors, prompt_errors, prompts, rms
from integration.conftest import Checkpoint, parameters
from integration.environment import device
from integration.models import MODELS
from integration.offline import Job, Outcome

pytestmark = pytest.mark.e2e

OFF = {"DSL_BACKEND_LINEAR": "0"}
SERVES = re.compile(r"dsl serves (\d+) gated linear layers, (\w+)\(.*?\) of (\d+) to (\d+) bfloat16")
THEIRS = "vLLM serves 3 gated linear layers"
LINKED = {  # what the log says of each model's 3 layers, on each of its ranks
    "llama": ("3", "Swiglu", "256", "512"),
    "gemma2": ("3", "Geglu", "256", "512"),
    "deepseek_v2": ("3", "Swiglu", "256", "512"),
    "compiled": ("3", "Swiglu", "256", "512"),
    "tensor parallel": ("3", "Swiglu", "256", "256"),
    # The other projections and the norms are dsl's too.
    "projections": ("3", "Swiglu", "256", "512"),
    "projections, compiled": ("3", "Swiglu", "256", "512"),
    "projections, tensor parallel": ("3", "Swiglu", "256", "256"),
    "projections, MLA": ("3", "Swiglu", "256", "512"),
}
MLA = "deepseek_v2_queries"
MODEL_OF = {"projections, MLA": MLA}  # of names that are no model's; the others' is llama
PROJECTIONS: dict[str, Any] = {"additional_config": {"dsl": {"projections": "dsl", "norms": "dsl"}}}
BY_VLLM: dict[str, Any] = {"additional_config": {"dsl": {"projections": "vllm", "norms": "vllm", "rope": "vllm"}}}
# Asked for where LoRA is, which leaves them to vLLM.
ASKED: dict[str, Any] = {"additional_config": {"dsl": {"projections": "dsl"}}}
NORMS = re.compile(r"dsl serves (\d+) norms, RMSNorm of \d+ bfloat16, with residual")
PROJECTED = re.compile(r"dsl serves (\d+) projections \((\w+)\), product of (\d+) to (\d+) bfloat16, for 1 to 64 rows")
# What the log says of the layers that are served: (class, how many), and of norms how many of a kind.
SERVED = (
    {("QKVParallelLinear", "3"), ("RowParallelLinear", "3"), ("ParallelLMHead", "1")},
    {"7"},  # two in each layer, and the last one
)
SERVED_OF = {
    "projections, MLA": (
        {
            ("DeepSeekV2FusedQkvAProjLinear", "3"),
            ("ColumnParallelLinear", "3"),
            ("RowParallelLinear", "6"),  # of attention and of the MLP, whose sizes are the same
            ("ParallelLMHead", "1"),
        },
        {"7"},
    ),
}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# vLLM 0.32.0 has no prompts' log-probabilities with LoRA on a CPU, where these prompts have none to give.
SHORT = tuple((token,) for token in range(7, 13))
Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def outcomes(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Outcomes:
    """By name; of a model in float32 as "MODEL, exact", without fused layers as "MODEL, off"."""
    here = device()
    names = {one.get("name") for one in parameters(request)}
    jobs: dict[str, Job] = {}

    def add(name: str, model: str, backend: str = "dsl", dtype: str = "bfloat16", **facts: Any) -> None:
        folder = str(checkpoint(model, MODELS[model]))
        jobs[name] = Job(model=folder, backend=backend, dtype=dtype, **{"prompts": prompts()} | facts)

    for model in ("llama", "gemma2", "deepseek_v2"):
        backend, dtype = here.mla_truth if model == "deepseek_v2" else here.dense_truth
        add(f"{model}, exact", model, backend, dtype)
        add(model, model)
        add(f"{model}, off", model, environment=OFF, engine=BY_VLLM)
    # With CUDA graphs if there is a GPU. A separate cache, so that nothing compiled before is loaded.
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    add("compiled", "llama", engine={"enforce_eager": False}, environment=cache)
    if not here.cuda or torch.cuda.device_count() > 1:
        add("tensor parallel", "llama", engine=RANKS, environment=here.environment)
        add("projections, tensor parallel", "llama", engine=RANKS | PROJECTIONS, environment=here.environment)
    add("projections", "llama", engine=PROJECTIONS)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    add("projections, compiled", "llama", engine=PROJECTIONS | {"enforce_eager": False}, environment=cache)
    if "projections, MLA" in names:
        add(f"{MLA}, exact", MLA, *here.mla_truth)
        add("projections, MLA", MLA, engine=PROJECTIONS)
        add(f"{MLA}, off", MLA, environment=OFF, engine=BY_VLLM)
    add("LoRA", "llama", engine={"enable_lora": True} | ASKED, prompts=SHORT)
    add("LoRA, off", "llama", environment=OFF, prompts=SHORT)
    add("another backend", "llama", here.dense, prompts=SHORT)
    if not here.cuda:
        add("float32", "llama", dtype="float32", prompts=SHORT)
    # The first layer's gates are 0, which changes only the output of that MLP.
    changed = str(checkpoint("llama-gates", MODELS["llama"].changed({"layers.0.mlp.gate_proj": 0.0})))
    backend, dtype = here.dense_truth
    jobs["without"] = Job(model=changed, backend=backend, dtype=dtype, prompts=prompts())
    # Of the compared ones only those of selected tests.
    jobs = {name: job for name, job in jobs.items() if name not in LINKED or name in names}
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


def test_the_layers_matter(outcomes: Outcomes) -> None:
    """The comparison below would detect a single wrong MLP."""
    assert max(prompt_errors(outcomes["without"].answers, outcomes["llama, exact"].answers)) > VISIBLE


@pytest.mark.parametrize("name", LINKED)
def test_matches(outcomes: Outcomes, name: str) -> None:
    if name not in outcomes:
        pytest.skip("one GPU, 2 are needed")
    model = name if name in MODELS else MODEL_OF.get(name, "llama")
    exact = outcomes[f"{model}, exact"].answers
    errors = prompt_errors(outcomes[name].answers, exact)
    theirs = prompt_errors(outcomes[f"{model}, off"].answers, exact)
    assert rms(errors) <= 2 * rms(theirs)
    assert max(errors) <= 2 * max(theirs)
    tolerance = 2 * max(theirs)
    assert max(generated_errors(outcomes[name].answers, exact, tolerance)) <= tolerance


@pytest.mark.parametrize("name", LINKED)
def test_log_says_what_is_fused(outcomes: Outcomes, name: str) -> None:
    if name not in outcomes:
        pytest.skip("one GPU, 2 are needed")
    log = outcomes[name].log
    ranks = 2 if "tensor parallel" in name else 1
    assert SERVES.findall(log) == [LINKED[name]] * ranks, log[-4000:]
    assert not re.search(r"vLLM serves \d+ gated linear layers", log)


@pytest.mark.parametrize("name", [name for name in LINKED if name.startswith("projections")])
def test_log_says_which_projections_are_served(outcomes: Outcomes, name: str) -> None:
    if name not in outcomes:
        pytest.skip("one GPU, 2 are needed")
    found = PROJECTED.findall(outcomes[name].log)
    projections, norms = SERVED_OF.get(name, SERVED)
    assert {(kind, count) for count, kind, _, _ in found} == projections, outcomes[name].log[-4000:]
    assert set(NORMS.findall(outcomes[name].log)) == norms
    assert not re.search(r"vLLM serves \d+ (projections|norms):", outcomes[name].log)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama, off", "DSL_BACKEND_LINEAR is off"),
        ("LoRA", "LoRA (lora_config) adds to what a projection returns"),
        ("float32", "dtype of x is float32: one of float16, bfloat16 is needed"),
    ],
)
def test_log_says_what_is_not(outcomes: Outcomes, name: str, says: str) -> None:
    if name not in outcomes:
        pytest.skip("no attention of these in float32 on a GPU")
    log = outcomes[name].log
    assert log.count(f"{THEIRS}: {says}") == 1, log[-4000:]
    assert not SERVES.search(log)
    assert not PROJECTED.search(log)


def test_lora_is_served(outcomes: Outcomes) -> None:
    """The results of vLLM's own layers equal those without fusion."""
    found, expected = (outcomes[name].answers for name in ("LoRA", "LoRA, off"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_another_backend_is_left_alone(outcomes: Outcomes) -> None:
    outcome = outcomes["another backend"]
    assert outcome.answers
    assert "gated linear layers" not in outcome.log
