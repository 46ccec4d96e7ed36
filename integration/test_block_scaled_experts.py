# SPDX-License-Identifier: Apache-2.0
"""Serves checkpoints whose experts are in MXFP4 (as gpt-oss has them) and in NVFP4 (ModelOpt) by dsl's experts.

Errors of log-probabilities are at most twice those of vLLM's arithmetic. They are measured from a float32 run of the
dequantised weights. Of MXFP4, tokens are quantised too, or stay in bfloat16.

On a CPU dsl's kernel is the reference, and vLLM has functions of its arithmetic but no kernels. On an SM90, the kernels
of MXFP4 under tokens in bfloat16 serve beside vLLM's own; dsl has none of the other formats there.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from dsl_backend.quant import format as formats
from dsl_backend.quant.reference import mma_scales_of, mma_stored, unpacked_e2m1
from integration import offline
from integration.compare import prompt_errors, prompts, rms
from integration.environment import device
from integration.models import MODELS, write
from integration.offline import Job, Outcome
from integration.quantization import MXFP4, NVFP4, write_beside

SM90 = device().kernels == "sm90"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(device().cuda and not SM90, reason="on a GPU these are tests of SM90's kernels"),
]

SERVED = re.compile(r"dsl serves (\d+) layers of routed experts, .*? in ([\w-]+) of .*?, on (\w+): by experts (\w+)")
# Inputs of layers, and what the activation returns, have deviations of about one.
INPUT_SCALE = 16 / (6 * 448)
Tensors = dict[str, torch.Tensor]


def stored(matrix: torch.Tensor, kind: formats.ScaledFormat, whole: float) -> tuple[torch.Tensor, ...]:
    """A matrix in 4 bits: elements, scales, and what they are worth in bfloat16."""
    scale = mma_scales_of(matrix, kind, whole)
    values = mma_stored(matrix, scale, kind, whole)
    factor = scale.float().repeat_interleave(kind.block_columns or 1, 1) * whole
    return values, scale, (unpacked_e2m1(values, torch.float32) * factor).bfloat16()


def in_mxfp4(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors]:
    """What a checkpoint of gpt-oss has in the place of experts [E, k, n], and [E, k, n] dequantised."""
    rows = [stored(one.T.contiguous(), formats.MXFP4, 1.0) for one in tensor]
    values, scales, wide = (torch.stack([row[i] for row in rows]) for i in range(3))
    blocks = values.view(*scales.shape, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales.view(torch.uint8)}, {name: wide.mT.contiguous()}


def in_nvfp4(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors]:
    """As ModelOpt has an expert's matrix [n, k]. Gate and up projection have one scale of whole matrices."""
    whole = 6 / tensor.shape[1] ** 0.5 / (6 * 448)
    values, scales, wide = stored(tensor, formats.NVFP4, whole)
    made = {name: values, f"{name}_scale": scales, f"{name}_scale_2": torch.tensor(whole)}
    return made | {name.removesuffix("weight") + "input_scale": torch.tensor(INPUT_SCALE)}, {name: wide}


class Kind(NamedTuple):
    """A checkpoint.

    Attributes:
        experts: the end of the names of experts' weights.
        quantise: name and weights -> tensors in their place, and what these are worth.
    """

    model: str
    format: str
    config: dict[str, Any]
    experts: str
    quantise: Callable[[str, torch.Tensor], tuple[Tensors, Tensors]]


# What dsl is asked for: the best kernel, or that of MXFP4 under tokens in bfloat16.
ASKED = {"ours": {"experts": "dsl"}, "bfloat16": {"experts": "dsl", "experts_kernel": "cute-weight-only"}}
OTHERS = {"ignore": ["lm_head", "*self_attn*", "*mlp.gate"]}
KINDS = {
    "gpt-oss": Kind("gpt_oss", "mxfp4", MXFP4, r"experts\.(gate_up|down)_proj$", in_mxfp4),
    "qwen3-moe": Kind("qwen3_moe", "nvfp4", NVFP4 | OTHERS, r"experts\.\d+\.\w+\.weight$", in_nvfp4),
}


# Model and what is asked for -> format, target, and the first word of the kernel's title, as the log has them.
SERVED_AS = (
    {("gpt-oss", "bfloat16"): ("mxfp4-tiled", "sm_90a", "mxfp4")}
    if SM90
    else {
        ("gpt-oss", "ours"): ("mxfp4", "cpu", "reference"),
        ("gpt-oss", "bfloat16"): ("mxfp4-tiled", "cpu", "reference"),
        ("qwen3-moe", "ours"): ("nvfp4", "cpu", "reference"),
    }
)
# vLLM's CPU build makes such layers by these alone.
PATCHES = () if SM90 else ("integration.emulated_experts:loads_experts",)


def quantize(folder: Path, kind: Kind) -> tuple[Path, Path]:
    """(quantised checkpoint, the same weights dequantised in bfloat16), beside a bfloat16 checkpoint."""
    found: tuple[Tensors, Tensors] = ({}, {})
    for name, tensor in load_file(folder / "model.safetensors").items():
        made = kind.quantise(name, tensor) if re.search(kind.experts, name) else ({name: tensor}, {name: tensor})
        for all_of, some in zip(found, made, strict=True):
            all_of.update(some)
    served = write_beside(folder, kind.format, found[0], {"quantization_config": kind.config})
    return served, write_beside(folder, "wide", found[1], {})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    backend, dtype = device().dense_truth
    facts: dict[str, Any] = {"prompts": prompts(), "max_tokens": 2}
    jobs = {}
    for name in dict.fromkeys(name for name, _ in SERVED_AS):
        kind = KINDS[name]
        stored_in, wide = quantize(write(MODELS[kind.model], tmp_path_factory.mktemp(name) / "model"), kind)
        given: dict[str, Any] = {"model": str(stored_in), "backend": "dsl", "dtype": "bfloat16", "patches": PATCHES}
        jobs[name, "exact"] = Job(model=str(wide), backend=backend, dtype=dtype, **facts)
        jobs[name, "theirs"] = Job(**given, **facts)
        for which, asked in ASKED.items():
            if (name, which) in SERVED_AS:
                jobs[name, which] = Job(**given, engine={"additional_config": {"dsl": asked}}, **facts)
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize(("name", "which"), SERVED_AS)
def test_errors_are_at_most_twice_vllms(outcomes: dict[tuple[str, str], Outcome], name: str, which: str) -> None:
    exact, theirs, ours = (outcomes[name, one].answers for one in ("exact", "theirs", which))
    assert 0 < rms(prompt_errors(ours, exact)) <= 2 * rms(prompt_errors(theirs, exact))


@pytest.mark.skipif(SM90, reason="SM90 has no kernels of tokens that are quantised")
def test_tokens_in_bfloat16_are_more_exact(outcomes: dict[tuple[str, str], Outcome]) -> None:
    exact, quantised, wide = (outcomes["gpt-oss", one].answers for one in ("exact", "ours", "bfloat16"))
    assert rms(prompt_errors(wide, exact)) < rms(prompt_errors(quantised, exact))


@pytest.mark.parametrize(("name", "which"), SERVED_AS)
def test_the_log_says_who_serves(outcomes: dict[tuple[str, str], Outcome], name: str, which: str) -> None:
    log = outcomes[name, which].log
    assert SERVED.findall(log) == [("3", *SERVED_AS[name, which])], log[-3000:]
    assert not SERVED.search(outcomes[name, "theirs"].log)
