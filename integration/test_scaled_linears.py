# SPDX-License-Identifier: Apache-2.0
"""Serves fp8 checkpoints with dsl's linear layers and routed experts: errors are at most twice those of vLLM's own.

Errors are measured from a float32 run of the dequantised weights. vLLM 0.32.0 loads 128x128 blocks on a CPU only with
AMX; there its class says that it can, dsl's kernels replace it, and the error is compared with that of channels. Routed
experts in 8 bits are served on a GPU only.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, ROW_SCALED, ScaledFormat
from dsl_backend.quant.reference import dequantized, quantized
from dsl_backend.runtime.target import Target
from integration import offline
from integration.compare import prompt_errors, prompts, rms
from integration.conftest import parameters
from integration.environment import device
from integration.models import MODELS, write
from integration.offline import Job, Outcome
from integration.quantization import BLOCKS, CHANNELS, write_beside

pytestmark = pytest.mark.e2e

SERVED = re.compile(r"dsl serves (\d+) fp8 linear layers \((\w+)\), (\w+)")
EXPERTS = re.compile(r"dsl serves (\d+) layers of routed experts, (.*?), on ")
CHANNELS_INPUT, BLOCKS_INPUT = str(ROW_SCALED), str(GROUP_SCALED)
NORMED = ("channels, normed", "channels, normed, compiled")
MOE = ("experts of channels", "experts of blocks")


def loads_blocks() -> None:
    """Lets vLLM's CPU build make layers of blocks. Called in an engine's process."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))


def few_rows_are_measured() -> None:
    """Has records say that dsl's kernels are faster for up to 8 rows of any layer. Called in an engine's process."""
    from dsl_backend.linear.scaled import tuned
    from dsl_backend.vllm_plugin.scaled_linears import find

    def ranges(spec: ScaledLinearSpec, target: Target) -> list[tuple[tuned.ProblemShape, Any]]:
        return [(tuned.problem_of(spec, 132).of_rows(1, 8), tuned.Ours())]

    tuned.ranges = ranges
    find.is_recorded = lambda service, target: True


def quantize(folder: Path, kind: ScaledFormat, config: dict[str, Any]) -> tuple[Path, Path]:
    """(checkpoint in e4m3, the same weights dequantised in bfloat16), beside a bfloat16 checkpoint."""
    tensors, wide = load_file(folder / "model.safetensors"), {}
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = wide[name] = tensor
            continue
        found = quantized(tensor, kind)
        stored[name] = found.values
        scale = found.scale if kind.blocked else found.scale.view(-1, 1)
        stored[f"{name}_scale_inv" if kind.blocked else f"{name}_scale"] = scale.contiguous()
        wide[name] = dequantized(found, torch.float32)
    served = write_beside(folder, f"{kind}-e4m3", stored, {"quantization_config": config})
    return served, write_beside(folder, f"{kind}-wide", wide, {})


def without_routers(config: dict[str, Any]) -> dict[str, Any]:
    """The same quantization of a model of 3 layers whose routers stay in 16 bits."""
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]
    listed = "ignore" if "ignore" in config else "modules_to_not_convert"
    return config | {listed: [*config.get(listed, []), *routers]}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """By name, of the small Llama; on a GPU of a small Qwen3-MoE too."""
    folder = write(MODELS["llama"], tmp_path_factory.mktemp("fp8") / "llama")
    backend, dtype = device().dense_truth
    jobs: dict[str, Job] = {}

    def add(name: str, model: Path, backend: str = "dsl", dtype: str = "bfloat16", **facts: Any) -> None:
        jobs[name] = Job(model=str(model), backend=backend, dtype=dtype, prompts=prompts(), **facts)

    ours = {"additional_config": {"dsl": {"scaled_linears": "dsl"}}}
    for name, kind, config in (("channels", ROW_SCALED, CHANNELS), ("blocks", BLOCK_SCALED, BLOCKS)):
        stored, wide = quantize(folder, kind, config)
        patches = () if name == "channels" or device().cuda else ("integration.test_scaled_linears:loads_blocks",)
        add(f"{name}, exact", wide, backend, dtype)
        add(name, stored, engine=ours, patches=patches)
        if not patches:
            add(f"{name}, theirs", stored)
    if device().cuda:
        folder = write(MODELS["qwen3_moe"], tmp_path_factory.mktemp("fp8") / "moe")
        for name, kind, config in zip(MOE, (ROW_SCALED, BLOCK_SCALED), (CHANNELS, BLOCKS), strict=True):
            stored, wide = quantize(folder, kind, without_routers(config))
            add(f"{name}, exact", wide, backend, dtype)
            add(name, stored, engine={"additional_config": {"dsl": {"scaled_linears": "dsl", "experts": "dsl"}}})
            add(f"{name}, theirs", stored)
    # A separate cache, so that nothing compiled before is loaded.
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    if any(one.get("name") == "channels, compiled" for one in parameters(request)):
        model = Path(jobs["channels"].model)
        add("channels, compiled", model, engine=ours | {"enforce_eager": False}, environment=cache)
    normed = {"additional_config": {"dsl": {"scaled_linears": "dsl", "norms": "dsl"}}}
    for ending, engine in (("normed", normed), ("normed, compiled", normed | {"enforce_eager": False})):
        add(f"channels, {ending}", Path(jobs["channels"].model), engine=engine, environment=cache)
    # Prompts have more than 8 rows, decode steps fewer: of vLLM's kernel and dsl's, in one graph. torch's product on a
    # CPU would take minutes for as many rows as vLLM's warm-up has by default.
    measured = {"additional_config": {"dsl": {"scaled_linears": "measured"}}, "enforce_eager": False}
    measured |= {"max_num_batched_tokens": 64}
    patches = ("integration.test_scaled_linears:few_rows_are_measured",)
    model = Path(jobs["channels"].model)
    add("channels, measured", model, engine=measured, environment=cache, patches=patches)
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize("name", ["channels", "blocks", "channels, compiled", "channels, measured", *NORMED, *MOE])
def test_errors_are_at_most_twice_vllms(outcomes: dict[str, Outcome], name: str) -> None:
    if name not in outcomes:
        pytest.skip("routed experts in 8 bits need a GPU")
    scheme = name.split(",", maxsplit=1)[0]
    exact = outcomes[f"{scheme}, exact"].answers
    theirs = outcomes.get(f"{scheme}, theirs")
    compared = (
        prompt_errors(theirs.answers, exact)
        if theirs is not None
        else prompt_errors(outcomes["channels, theirs"].answers, outcomes["channels, exact"].answers)
    )
    assert rms(prompt_errors(outcomes[name].answers, exact)) <= 2 * rms(compared)


@pytest.mark.parametrize("name", ["channels", "blocks", "channels, compiled", "channels, measured", *NORMED])
def test_the_log_says_who_serves(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].given is not None, outcomes[name].log[-3000:]
    found = SERVED.findall(outcomes[name].log)
    assert ("3", "MergedColumnParallelLinear", "Swiglu") in found, found
    assert ("3", "QKVParallelLinear", "product") in found, found
    assert sum(int(count) for count, kind, _ in found if kind == "RowParallelLinear") == 6, found


@pytest.mark.parametrize("name", ["channels", "blocks", "channels, compiled", "channels, measured"])
def test_the_log_says_that_mlps_are_linked(outcomes: dict[str, Outcome], name: str) -> None:
    """Projection, activation and the quantisation of the next projection's input are one layer."""
    form = BLOCKS_INPUT if name == "blocks" else CHANNELS_INPUT
    lines = [line for line in outcomes[name].log.splitlines() if "(MergedColumnParallelLinear)" in line]
    assert lines
    assert all(f", x {form}, " in line and f", out {form}" in line for line in lines), lines
    assert "activations behind fp8 layers" not in outcomes[name].log


@pytest.mark.parametrize("name", NORMED)
def test_norms_quantise_for_the_projections_behind_them(outcomes: dict[str, Outcome], name: str) -> None:
    """Both of each layer; the last one of the model is followed by no layer in 8 bits."""
    log = outcomes[name].log
    assert re.search(
        r"dsl serves 6 norms, RMSNorm of \d+ bfloat16 to float8_e4m3fn, with residual, scale by token", log
    )
    assert re.search(r"vLLM serves 1 norms: the model is quantised", log)
    assert "norms, RMSNorm" not in outcomes["channels"].log


def test_the_log_says_for_which_rows(outcomes: dict[str, Outcome]) -> None:
    lines = [line for line in outcomes["channels, measured"].log.splitlines() if SERVED.search(line)]
    assert lines
    assert all(", for 1 to 8 rows, on " in line for line in lines), lines
    assert ", for 1 to 8 rows" not in outcomes["channels"].log


def test_by_default_they_are_vllms(outcomes: dict[str, Outcome]) -> None:
    assert "additional_config['dsl']['scaled_linears'] is vllm" in outcomes["channels, theirs"].log


@pytest.mark.parametrize("name", MOE)
def test_the_log_says_who_serves_experts(outcomes: dict[str, Outcome], name: str) -> None:
    if name not in outcomes:
        pytest.skip("routed experts in 8 bits need a GPU")
    assert outcomes[name].given is not None, outcomes[name].log[-3000:]
    assert [count for count, _ in EXPERTS.findall(outcomes[name].log)] == ["3"], outcomes[name].log[-3000:]
    assert not EXPERTS.search(outcomes[f"{name}, theirs"].log)
