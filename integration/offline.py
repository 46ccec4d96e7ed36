# SPDX-License-Identifier: Apache-2.0
"""Runs checkpoints with vLLM's offline engine. vLLM is imported only once, which takes longer than a small model.

    results = offline.run([Job(model=..., backend="dsl"), Job(model=..., backend="CPU_ATTN")])

Every engine runs in its own forked process, because vLLM keeps the chosen backend for the lifetime of a process.
"""

import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.processes import child_environment
from integration.environment import ROOT, device

# Two cores take 263 s for quantised models, side by side: torch has no fast product of 8 bits on a CPU.
JOB_S = 600
SIDE_BY_SIDE = min(8, os.cpu_count() or 1)
IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma2",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2",
)
TOP = 5  # log-probabilities kept for each generated token


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model, one configuration, one batch of prompts.

    Attributes:
        model: the checkpoint's folder.
        prompts: token ids.
        max_tokens: tokens to generate greedily for each prompt; the end of sequence does not stop it.
        engine: further arguments of vllm.LLM.
        sampling: further arguments of each prompt's vllm.SamplingParams; greedy by default. Those of
            `structured_outputs` are a dict.
        environment: further variables.
        before: prompts that are answered first, in a batch of their own, and not reported.
        sleep: whether the engine sleeps and wakes up before it answers `prompts`.
        patches: functions as `module:name` that are called in the engine's process before it starts.
    """

    model: str
    backend: str
    dtype: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int = 12
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: tuple[dict[str, Any], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    before: tuple[tuple[int, ...], ...] = ()
    sleep: bool = False
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        prompt_logprobs: the log-probability of each prompt token except the first.
        prompt_best: the log-probability of the likeliest token at the same positions.
        tokens: generated ids.
        logprobs: for each generated token, id -> log-probability of the likeliest few.
        cached_tokens: tokens of the prompt whose keys and values were cached.
    """

    prompt_logprobs: list[float]
    prompt_best: list[float]
    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        given: its answers, one for each prompt; None if the engine failed.
        log: the engine's whole output.
    """

    given: list[Answer] | None
    log: str

    @property
    def answers(self) -> list[Answer]:
        """The answers. Raises AssertionError with the end of the log if the engine failed."""
        assert self.given is not None, f"the engine failed:\n{self.log[-6000:]}"
        return self.given


def run(jobs: Sequence[Job], **variables: str) -> list[Outcome]:
    """The outcome of every job, in order.

    Args:
        variables: environment variables that vLLM's modules read when they are imported; see also Job.environment.

    Raises:
        RuntimeError: the process that runs them failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
        # Progress is printed here; the output of each engine is kept with its job.
        status = subprocess.run(
            [sys.executable, "-m", "integration.offline", name],
            env=child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **variables),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
        if status:
            raise RuntimeError(f"the engines' process ended with status {status}")
        return [outcome(folder / str(index)) for index in range(len(jobs))]


def outcome(stem: Path) -> Outcome:
    """Reads the outcome from the files of a job's process."""
    log = stem.with_suffix(".log").read_text(errors="replace")
    if not stem.with_suffix(".json").exists():
        return Outcome(None, log)
    answers = [
        Answer(
            prompt_logprobs=one["prompt_logprobs"],
            prompt_best=one["prompt_best"],
            tokens=one["tokens"],
            logprobs=[{int(token): value for token, value in step.items()} for step in one["logprobs"]],
            cached_tokens=one["cached_tokens"],
        )
        for one in json.loads(stem.with_suffix(".json").read_text())
    ]
    return Outcome(answers, log)


def answer(job: Job) -> list[Answer]:
    """Run one job in this process."""
    from vllm import LLM, SamplingParams

    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        # vLLM checks for this much free memory before it reads the line above, and engines run concurrently.
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(job.model, attention_backend=job.backend, dtype=job.dtype, **defaults | job.engine)
    usual: dict[str, Any] = {"max_tokens": job.max_tokens, "temperature": 0, "logprobs": TOP, "ignore_eos": True}
    params = [
        SamplingParams(**usual | {"prompt_logprobs": 1} | with_grammar(sampling))
        for sampling in job.sampling or [{} for _ in job.prompts]
    ]
    if job.before:
        filling = SamplingParams(max_tokens=1, temperature=0)
        llm.generate([{"prompt_token_ids": list(prompt)} for prompt in job.before], filling, use_tqdm=False)
    if job.sleep:
        llm.sleep(level=1)
        llm.wake_up()
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in job.prompts], params, use_tqdm=False)
    answers = []
    for prompt, output in zip(job.prompts, outputs, strict=True):
        completion = output.outputs[0]
        # The first token has no log-probability.
        asked = output.prompt_logprobs or [None] * len(prompt)
        steps = [(token, step) for token, step in zip(prompt, asked, strict=True) if step]
        answers.append(
            Answer(
                prompt_logprobs=[step[token].logprob for token, step in steps],
                prompt_best=[max(entry.logprob for entry in step.values()) for _, step in steps],
                tokens=list(completion.token_ids),
                logprobs=[{t: entry.logprob for t, entry in step.items()} for step in completion.logprobs or []],
                cached_tokens=output.num_cached_tokens or 0,
            )
        )
    return answers


def with_grammar(sampling: dict[str, Any]) -> dict[str, Any]:
    """A request's arguments; those of its structured output are vLLM's object."""
    from vllm.sampling_params import StructuredOutputsParams

    given = sampling.get("structured_outputs")
    return sampling if given is None else sampling | {"structured_outputs": StructuredOutputsParams(**given)}


def admit_interpreter() -> None:
    """Have vLLM take Triton's interpreter for a backend for CPUs: without one it refuses the V2 model runner.

    VLLM looks for the backend when it is imported.
    """
    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    # GPUs take integers for masks, the interpreter does not.
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return mask

    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *more: load(self, ptrs, as_bool(mask), *more)
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *more: store(
        self, ptrs, value, as_bool(mask), *more
    )


def fork_workers() -> None:
    """The workers of an engine with several are forks of its process: vLLM's CPU platform starts new interpreters.

    Those import vLLM again, which takes ten times as long as the engine. Servers (test_parallel.py) start theirs as
    vLLM does.
    """
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def in_fork(stem: Path, job: Job) -> None:
    """The forked process of one job: its output goes to a log, its answers to a file."""
    log = os.open(stem.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    if not device().cuda:
        # vLLM would compile helpers of its sampler, which takes longer than running these engines.
        torch._dynamo.config.disable = job.engine.get("enforce_eager", True)
        # Engines run concurrently.
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        torch.set_num_threads(1)
        fork_workers()
    os.environ |= job.environment
    for patch in job.patches:
        module, _, name = patch.partition(":")
        getattr(importlib.import_module(module), name)()
    stem.with_suffix(".json").write_text(json.dumps([asdict(one) for one in answer(job)]))


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = [Job(**job) for job in json.loads((folder / "jobs.json").read_text())]
    # The slow imports are done here once; every engine then runs in a fork. CUDA must not be initialised here, not even
    # to query the device, because it would be unusable in the forks.
    if os.environ.get("TRITON_INTERPRET") == "1":
        admit_interpreter()
    for module in IMPORTS:
        importlib.import_module(module)
    gc.freeze()
    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    waiting, ended = list(range(len(jobs))), 0
    running: dict[int, tuple[int, ForkProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            index = waiting.pop(0)
            process = context.Process(target=in_fork, args=(folder / str(index), jobs[index]))
            process.start()
            running[process.sentinel] = (index, process, time.monotonic())
        done = multiprocessing.connection.wait(list(running), timeout=5)
        for sentinel, (index, process, started) in list(running.items()):
            if sentinel not in done:
                if time.monotonic() - started > JOB_S:
                    process.kill()
                continue
            process.join()
            del running[sentinel]
            ended += 1
            job = jobs[index]
            state = "ok" if process.exitcode == 0 else f"status {process.exitcode}"
            setting = f" {json.dumps(job.engine)}" if job.engine else ""
            count = f"engine {ended}/{len(jobs)}, {time.monotonic() - began:.0f} s"
            print(f"{count}: {Path(job.model).name} with {job.backend} in {job.dtype}{setting}: {state}", flush=True)
    # Skip the interpreter's shutdown, in which Triton's bindings would report leaks.
    os._exit(0)


if __name__ == "__main__":
    main()
