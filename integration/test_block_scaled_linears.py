# SPDX-License-Identifier: Apache-2.0
"""Serves NVFP4 and MXFP8 checkpoints with dsl's linear layers: errors are at most twice those of vLLM's own kernel.

Checkpoints are ModelOpt's, and one of compressed-tensors. On a CPU vLLM's own is its emulation of these formats, of
MXFP8 behind vLLM's quantisation of inputs, as on a GPU. dsl's is the reference, and SM100's kernel on this project's
emulator, where the plugin sees an SM100. MLPs are linked: the first kernel quantises for the down projection. Errors
are measured from a float32 run of the dequantised weights.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from integration.quantization import COMPRESSED_NVFP4, MXFP8, NVFP4, write_beside

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(device().cuda, reason="vLLM emulates these formats on a CPU here")]

SERVED = re.compile(r"dsl serves (\d+) (\w+) linear layers \((\w+)\), (.*?), on (\w+): by (scaled-linear \w+)")
# Inputs of layers have deviations of about one: the largest of them is 6 times the largest block scale.
INPUT_SCALE = 8 / (6 * 448)


def loads() -> None:
    """Lets vLLM's CPU build make layers of NVFP4 and MXFP8. Called in an engine's process."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils
    from vllm.platforms.interface import PlatformEnum

    class Quantising(EmulationMxfp8LinearKernel):
        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            quantised = mxfp8_utils._mxfp8_e4m3_quantize_torch(x.reshape(-1, x.shape[-1]))
            return super().apply_weights(layer, mxfp8_utils.dequant_mxfp8_to_bf16(*quantised).view(x.shape), bias)

    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [EmulationNvFp4LinearKernel]
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [Quantising]


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


class Checkpoint(NamedTuple):
    """A quantised checkpoint.

    Attributes:
        layers: the name of the format in the log.
        stored: (matrix, its scale, of NVFP4 the scale of the whole) of a name -> the tensors of the checkpoint.
        kernels: that serve it here.
    """

    layers: str
    kind: formats.ScaledFormat
    config: dict[str, Any]
    stored: Callable[[str, torch.Tensor, torch.Tensor, float], dict[str, torch.Tensor]]
    kernels: tuple[str, ...] = ("reference",)


def modelopt_nvfp4(name: str, values: torch.Tensor, scale: torch.Tensor, whole: float) -> dict[str, torch.Tensor]:
    made = {name: values, f"{name}_scale": scale, f"{name}_scale_2": torch.tensor(whole)}
    return made | {name.removesuffix("weight") + "input_scale": torch.tensor(INPUT_SCALE)}


def compressed_nvfp4(name: str, values: torch.Tensor, scale: torch.Tensor, whole: float) -> dict[str, torch.Tensor]:
    """It stores the inverses of both scales of whole matrices."""
    made = {f"{name}_packed": values, f"{name}_scale": scale, f"{name}_global_scale": torch.tensor([1 / whole])}
    return made | {name.removesuffix("weight") + "input_global_scale": torch.tensor([1 / INPUT_SCALE])}


def modelopt_mxfp8(name: str, values: torch.Tensor, scale: torch.Tensor, whole: float) -> dict[str, torch.Tensor]:
    return {name: values, f"{name}_scale": scale.view(torch.uint8)}


BOTH = ("reference", "sm100")
CHECKPOINTS = {
    "nvfp4": Checkpoint("NVFP4", formats.NVFP4, NVFP4, modelopt_nvfp4, BOTH),
    "nvfp4-compressed": Checkpoint("NVFP4", formats.NVFP4, COMPRESSED_NVFP4, compressed_nvfp4),
    "mxfp8": Checkpoint("MXFP8", formats.MXFP8, MXFP8, modelopt_mxfp8, BOTH),
}


def quantize(folder: Path, of: Checkpoint) -> tuple[Path, Path]:
    """(quantised checkpoint, the same weights dequantised in bfloat16), beside a bfloat16 checkpoint."""
    stored: dict[str, torch.Tensor] = {}
    wide: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = wide[name] = tensor
            continue
        rows, columns = tensor.shape
        # Layers that vLLM merges have one scale of whole matrices.
        whole = 6 / columns**0.5 / (6 * 448) if of.kind == formats.NVFP4 else 1.0
        matrix = mma_quantized(tensor, of.kind, whole)
        assert of.kind.block_columns is not None
        scale = unswizzled(matrix.scale, rows, columns // of.kind.block_columns)
        stored |= of.stored(name, matrix.values, scale, whole)
        wide[name] = mma_dequantized(matrix, whole).bfloat16()
    served = write_beside(folder, "quantised", stored, {"quantization_config": of.config})
    return served, write_beside(folder, "wide", wide, {})


ASKED = {"reference": {"scaled_linears": "dsl"}}
ASKED["sm100"] = ASKED["reference"] | {"scaled_linears_kernel": "cute-sm100"}


class Found(NamedTuple):
    """A checkpoint, and what came of each way to serve it."""

    checkpoint: Checkpoint
    outcomes: dict[str, Outcome]


# ModelOpt's NVFP4 has all that the others have.
NAMES = [pytest.param(name, marks=() if name == "nvfp4" else pytest.mark.rest) for name in CHECKPOINTS]


@pytest.fixture(scope="module", params=NAMES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    backend, dtype = device().dense_truth
    facts: dict[str, Any] = {"prompts": prompts(), "max_tokens": 2}
    here, checkpoint = "integration.test_block_scaled_linears", CHECKPOINTS[request.param]
    stored, wide = quantize(write(MODELS["llama"], tmp_path_factory.mktemp(request.param) / "llama"), checkpoint)

    def job(options: dict[str, str], *more: str) -> Job:
        engine = {"additional_config": {"dsl": options}}
        patches = (f"{here}:loads", *more)
        return Job(model=str(stored), backend="dsl", dtype="bfloat16", engine=engine, patches=patches, **facts)

    jobs = {"exact": Job(model=str(wide), backend=backend, dtype=dtype, **facts), "theirs": job({})}
    for kernel in checkpoint.kernels:
        more = (f"{here}:on_an_emulated_sm100",) if kernel == "sm100" else ()
        jobs[kernel] = job(ASKED[kernel], *more)
    return Found(checkpoint, dict(zip(jobs, offline.run(list(jobs.values())), strict=True)))


KERNELS = {"reference": ("cpu", "scaled-linear reference"), "sm100": ("sm_100a", "scaled-linear sm100")}


def test_errors_are_at_most_twice_vllms(found: Found) -> None:
    exact = found.outcomes["exact"].answers
    compared = rms(prompt_errors(found.outcomes["theirs"].answers, exact))
    for kernel in found.checkpoint.kernels:
        assert 0 < rms(prompt_errors(found.outcomes[kernel].answers, exact)) <= 2 * compared, kernel


def test_the_log_says_who_serves(found: Found) -> None:
    for kernel in found.checkpoint.kernels:
        outcome = found.outcomes[kernel]
        assert outcome.given is not None, outcome.log[-3000:]
        lines = SERVED.findall(outcome.log)
        assert sum(int(count) for count, *_ in lines) == 12, outcome.log[-3000:]
        assert {(form, arch, by) for _, form, _, _, arch, by in lines} == {(found.checkpoint.layers, *KERNELS[kernel])}
        swiglus = [what for _, _, _, what, _, _ in lines if what.startswith("Swiglu(")]
        assert [what.endswith(f", out {found.checkpoint.kind}") for what in swiglus] == [True]
    assert not SERVED.search(found.outcomes["theirs"].log)
