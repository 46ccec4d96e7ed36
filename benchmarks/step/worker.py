# SPDX-License-Identifier: Apache-2.0
"""The process of one backend: `python -m PACKAGE.step.worker FOLDER` profiles steps of FOLDER/job.json.

The engine's core runs in this process, where the profiler sees it. It writes FOLDER/trace.json, a Chrome trace of the
steps, and then FOLDER/result.json.
"""

import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.scenarios import prompts
from . import host

WARM_STEPS = 8
WARM_PROMPTS = 2  # steps of prompts
DENSE = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """An engine and the steps to profile.

    Attributes:
        engine: arguments of vllm.LLM.
        vocabulary: the size of the vocabulary that prompts are drawn from.
        batch, prompt: the number of requests, and of tokens in each prompt.
        steps: steps to time, and as many to profile.
        prefill: the steps compute the prompts, and decode nothing.
        host: profile what the host does, and no kernels.
    """

    backend: str
    engine: dict[str, Any]
    vocabulary: int
    batch: int
    prompt: int
    steps: int
    seed: int = 0
    prefill: bool = False
    host: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def bytes_read(model: Any, batch: int) -> int:
    """Bytes of weights that a step of so many tokens reads: all but embeddings, and the experts they can choose."""
    config = model.config
    count = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    share = min(1.0, batch * config.num_experts_per_tok / count) if count else 1.0
    tied = getattr(config, "tie_word_embeddings", False)
    total = 0.0
    for name, weight in model.named_parameters():
        size = weight.numel() * weight.element_size()
        total += 0 if "embed_tokens" in name and not tied else size * (share if ".experts." in name else 1.0)
    return int(total)


def layer_products(model: Any) -> dict[str, int]:
    """Bytes of the matrices that the first layer multiplies by, by the name of the module in their order.

    Empty where a layer's are not those of a dense decoder: qkv, o, gate and up, down.
    """
    found: dict[str, int] = {}
    for name, weight in model.named_parameters():
        inside = re.search(r"\.layers\.0\.(?:self_attn|mlp)\.(\w+)\.\w+$", name)
        if inside and weight.dim() == 2:
            found[inside[1]] = found.get(inside[1], 0) + weight.numel() * weight.element_size()
        elif ".layers.0." in name and weight.dim() > 1:
            return {}
    return found if list(found) == DENSE else {}


class Requests:
    """Requests that decode together.

    Args:
        engine: vLLM's LLMEngine.
    """

    def __init__(self, engine: Any, job: Job) -> None:
        from vllm import SamplingParams

        self.engine, self.tokens = engine, {f"{number}": 0 for number in range(job.batch)}
        # One step more than is asked for: no request ends in a step that is measured.
        sampling = SamplingParams(
            max_tokens=2 * WARM_STEPS + 3 * job.steps, ignore_eos=True, detokenize=False, temperature=0
        )
        asked = prompts(job.batch, job.prompt, job.vocabulary, f"step {job.seed}")
        for number, prompt in enumerate(asked):
            engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)

    def decode(self, steps: int) -> None:
        """Runs until every request has so many tokens more than the one that has fewest now."""
        goal = min(self.tokens.values()) + steps
        while min(self.tokens.values()) < goal:
            for request in self.engine.step():
                self.tokens[request.request_id] = len(request.outputs[0].token_ids)


class Prompts:
    """Prompts that are computed together, all of a job's in each step.

    Args:
        engine: vLLM's LLMEngine.
    """

    def __init__(self, engine: Any, job: Job) -> None:
        from vllm import SamplingParams

        self.engine, self.made = engine, 0
        self.sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, temperature=0)
        self.prompts = prompts(job.batch, job.prompt, job.vocabulary, f"step {job.seed}")

    def compute(self, steps: int) -> None:
        """Runs so many steps. Without a prefix cache the same prompts are computed again."""
        for _ in range(steps):
            for prompt in self.prompts:
                self.engine.add_request(f"{self.made}", {"prompt_token_ids": prompt}, self.sampling)
                self.made += 1
            while self.engine.has_unfinished_requests():
                self.engine.step()


def measure(llm: Any, job: Job, folder: Path) -> dict[str, Any]:
    """Times and profiles steps; writes the trace, if kernels are profiled."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run = Prompts(llm.llm_engine, job).compute if job.prefill else Requests(llm.llm_engine, job).decode
    run(WARM_PROMPTS if job.prefill else WARM_STEPS)
    synchronize()
    began = time.perf_counter()
    run(job.steps)
    synchronize()
    step_us = (time.perf_counter() - began) / job.steps * 1e6
    if job.host:
        return {"step_us": step_us, "host": host.profiled(run, job.steps, step_us).to_dict()}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(job.steps)
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    tokens = job.batch * (job.prompt if job.prefill else 1)
    (read,) = llm.apply_model(lambda model: bytes_read(model, tokens))
    (products,) = llm.apply_model(layer_products)
    return {"step_us": step_us, "bytes_read": read, "layer_products": products}


def main() -> None:
    folder = Path(sys.argv[1])
    job = Job(**json.loads((folder / "job.json").read_text()))
    from vllm import LLM

    llm = LLM(attention_backend=job.backend, **job.engine)
    result = measure(llm, job, folder)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
