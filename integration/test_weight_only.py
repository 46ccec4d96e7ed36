# SPDX-License-Identifier: Apache-2.0
"""Serves a checkpoint with weights of 4 bits with dsl's linear layers: errors are at most twice those of vLLM's own.

Errors are measured from a float32 run of the dequantised weights. On a CPU dsl's kernel is the reference; without
AVX-512 vLLM 0.32.0 has no kernel of its own there, and its run has the dequantised weights in bfloat16.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsl_backend.quant.weight_only import WeightOnlyFormat, dequantized
from integration import offline
from integration.compare import prompt_errors, prompts, rms
from integration.environment import device
from integration.models import MODELS, write
from integration.offline import Job, Outcome
from integration.quantization import compressed_weights, in_words, write_beside

pytestmark = [pytest.mark.e2e, pytest.mark.rest]

SERVED = re.compile(
    r"dsl serves (\d+) W4A16 linear layers \((\w+)\), product .*?, on (\w+): by weight-only-linear (\w+)"
)
KIND = WeightOnlyFormat()


def quantize(folder: Path) -> tuple[Path, Path]:
    """(checkpoint of compressed-tensors in 4 bits, the same weights dequantised), beside a bfloat16 checkpoint."""
    stored, wide = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = wide[name] = tensor
            continue
        n, k = tensor.shape
        grouped = tensor.float().view(n, -1, KIND.group or k)
        scale = (grouped.abs().amax(2) / (KIND.middle - 0.5)).bfloat16()
        values = (grouped / scale.float().unsqueeze(2)).round().clamp(-KIND.middle, KIND.middle - 1) + KIND.middle
        values = values.to(torch.uint8).view(n, k)
        stored[f"{name}_packed"] = in_words(values, KIND.bits)
        stored[f"{name}_scale"] = scale
        stored[f"{name}_shape"] = torch.tensor([n, k])
        wide[name] = dequantized(values, scale, None, KIND).float()
    served = write_beside(folder, "w4a16", stored, {"quantization_config": compressed_weights()})
    return served, write_beside(folder, "wide", wide, {})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    stored, wide = quantize(write(MODELS["llama"], tmp_path_factory.mktemp("w4a16") / "llama"))
    backend, dtype = device().dense_truth
    facts: dict[str, Any] = {"prompts": prompts(), "max_tokens": 2}

    def job(model: Path, options: dict[str, str]) -> Job:
        engine = {"additional_config": {"dsl": options}}
        return Job(model=str(model), backend="dsl", dtype="bfloat16", engine=engine, **facts)

    has_kernel = device().cuda or torch.backends.cpu.get_cpu_capability() == "AVX512"
    jobs = {
        "exact": Job(model=str(wide), backend=backend, dtype=dtype, **facts),
        "theirs": job(stored if has_kernel else wide, {}),
        "ours": job(stored, {"weight_only_linears": "dsl"}),
    }
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


def test_errors_are_at_most_twice_vllms(outcomes: dict[str, Outcome]) -> None:
    exact = outcomes["exact"].answers
    compared = rms(prompt_errors(outcomes["theirs"].answers, exact))
    assert 0 < rms(prompt_errors(outcomes["ours"].answers, exact)) <= 2 * compared


def test_the_log_says_who_serves(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["ours"].given is not None, outcomes["ours"].log[-3000:]
    found = SERVED.findall(outcomes["ours"].log)
    assert sum(int(count) for count, *_ in found) == 12, outcomes["ours"].log[-3000:]
    assert {kernel for *_, kernel in found} == {"sm90" if device().cuda else "reference"}
    assert not SERVED.search(outcomes["theirs"].log)
