# SPDX-License-Identifier: Apache-2.0
"""Serves a ModelOpt NVFP4 checkpoint with dsl's linear layers: errors are at most twice those of vLLM's own kernel.

On a CPU vLLM's own is its emulation of NVFP4. dsl's is the reference, and SM100's kernel on this project's emulator,
where the plugin sees an SM100. Errors are measured from a float32 run of the dequantised weights.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsl_backend.quant import format as formats
from dsl_backend.quant.reference import mma_dequantized, mma_quantized, unswizzled
from integration import offline
from integration.compare import prompt_errors, prompts, rms
from integration.environment import device
from integration.models import MODELS, write
from integration.offline import Job, Outcome
from integration.quantization import NVFP4, write_beside

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(device().cuda, reason="vLLM emulates NVFP4 on a CPU here")]

SERVED = re.compile(r"dsl serves (\d+) NVFP4 linear layers \((\w+)\), product .*?, on (\w+): by (scaled-linear \w+)")
# Inputs of layers have deviations of about one: the largest of them is 6 times the largest block scale.
INPUT_SCALE = 8 / (6 * 448)


def loads_nvfp4() -> None:
    """Lets vLLM's CPU build make layers of NVFP4. Called in an engine's process."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms.interface import PlatformEnum

    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [EmulationNvFp4LinearKernel]


def on_an_emulated_sm100() -> None:
    """Has quantised linear layers see an SM100, whose kernels the emulator runs. Called in an engine's process."""
    import emulator
    from dsl_backend.linear.scaled import eager
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.vllm_plugin.scaled_linears import serve

    target = from_arch("sm_100a")
    faked: Any = SimpleNamespace(detect=lambda device=None: target)
    for module in (eager, serve):
        setattr(module, "targets", faked)  # noqa: B010  the module's own import, which mypy holds to be private
    by_gpu = eager.linear

    # A device for all of the engine: compiled kernels belong to one. A finding of it raises.
    held = emulator.device(arch="sm_100a", sms=4, schedule="lazy", strict=True)
    found: list[Any] = []

    def linear(*operands: Any) -> Any:
        if not found:
            found.append(held.__enter__())
        return by_gpu(*operands)

    eager.linear = linear  # type: ignore[assignment]


def quantize(folder: Path) -> tuple[Path, Path]:
    """(checkpoint in NVFP4, the same weights dequantised in bfloat16), beside a bfloat16 checkpoint."""
    stored, wide = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = wide[name] = tensor
            continue
        whole = float(tensor.float().abs().max()) / (6 * 448)
        found = mma_quantized(tensor, formats.NVFP4, whole)
        rows, columns = tensor.shape
        stored[name] = found.values
        stored[f"{name}_scale"] = unswizzled(found.scale, rows, columns // 16)
        stored[f"{name}_scale_2"] = torch.tensor(whole)
        stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(INPUT_SCALE)
        wide[name] = mma_dequantized(found, whole).bfloat16()
    served = write_beside(folder, "nvfp4", stored, {"quantization_config": NVFP4})
    return served, write_beside(folder, "wide", wide, {})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    stored, wide = quantize(write(MODELS["llama"], tmp_path_factory.mktemp("nvfp4") / "llama"))
    backend, dtype = device().dense_truth
    facts: dict[str, Any] = {"prompts": prompts(), "max_tokens": 2}
    ours = {"scaled_linears": "dsl"}
    patches = ("integration.test_nvfp4:loads_nvfp4",)

    def job(options: dict[str, str], *more: str) -> Job:
        engine = {"additional_config": {"dsl": options}}
        return Job(
            model=str(stored), backend="dsl", dtype="bfloat16", engine=engine, patches=(*patches, *more), **facts
        )

    jobs = {
        "exact": Job(model=str(wide), backend=backend, dtype=dtype, **facts),
        "theirs": job({}),
        "reference": job(ours),
        "sm100": job(ours | {"scaled_linears_kernel": "cute-sm100"}, "integration.test_nvfp4:on_an_emulated_sm100"),
    }
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


KERNELS = {"reference": ("cpu", "scaled-linear reference"), "sm100": ("sm_100a", "scaled-linear sm100")}


@pytest.mark.parametrize("name", KERNELS)
def test_errors_are_at_most_twice_vllms(outcomes: dict[str, Outcome], name: str) -> None:
    exact = outcomes["exact"].answers
    compared = rms(prompt_errors(outcomes["theirs"].answers, exact))
    assert 0 < rms(prompt_errors(outcomes[name].answers, exact)) <= 2 * compared


@pytest.mark.parametrize("name", KERNELS)
def test_the_log_says_who_serves(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].given is not None, outcomes[name].log[-3000:]
    found = SERVED.findall(outcomes[name].log)
    assert sum(int(count) for count, *_ in found) == 12, outcomes[name].log[-3000:]
    assert {(arch, kernel) for _, _, arch, kernel in found} == {KERNELS[name]}
    assert not SERVED.search(outcomes["theirs"].log)
