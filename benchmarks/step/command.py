# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks step`: profiles a step of each backend, of decode or of prompts, in a process of its own."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from dsl_backend.runtime import target as targets

from .. import facts, report
from ..engine.children import cause, start
from ..engine.command import GRAPH_SIZES, join_rows
from ..engine.models import SHAPES, Shape, write
from ..entry import at_least
from ..processes import child_environment, stop_group
from . import worker
from .trace import Launch, Step, layer, summarized
from .worker import Job

CACHE_TOKENS = 16384
# What a record of a run has of its options.
ASKED = ("model", "layers", "batch", "prompt", "prefill", "steps", "engine", "seed")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks step",
        description="Profile a step of whole vLLM engines with dummy weights, kernel by kernel.",
    )
    parser.add_argument("--model", required=True, choices=sorted(SHAPES), help="the model's shape")
    parser.add_argument("--layers", type=at_least(int, 1), help="layers of the model (default: all)")
    parser.add_argument("--backends", help="comma-separated backends (default: dsl and its best peer)")
    parser.add_argument("--batch", type=at_least(int, 1), default=1, help="requests of a step (default: 1)")
    parser.add_argument("--prefill", action="store_true", help="steps that compute the prompts, and not decode steps")
    parser.add_argument("--prompt", type=at_least(int, 1), default=512, help="tokens of each prompt (default: 512)")
    parser.add_argument("--steps", type=at_least(int, 1), default=32, help="steps to time and to profile (default: 32)")
    parser.add_argument("--kernels", type=at_least(int, 1), default=24, help="kernels to list (default: 24)")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    parser.add_argument("--traces", type=Path, help="folder for the Chrome traces, BACKEND.json")
    parser.add_argument("--json", type=Path, dest="json_path", help="write one JSON object on each line")
    parser.add_argument(
        "--seconds", type=at_least(float, 1), default=600, help="time limit for each backend (default: 600)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument("--commit", help="commit of the code, if it is not in a git checkout")
    return parser.parse_args(arguments)


def engine_arguments(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """The engine's arguments, without the model and the backend."""
    longest = options.prompt + 4 * options.steps + 64
    seqs = max(GRAPH_SIZES[-1], options.batch)
    tokens = max(CACHE_TOKENS, 2 * options.batch * longest)
    # All prompts in one step.
    together = {"max_num_batched_tokens": max(seqs, options.batch * options.prompt)} if options.prefill else {}
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": min(shape.max_model_len, longest),
        "max_num_seqs": seqs,
        "kv_cache_memory_bytes": tokens * shape.token_bytes,
        "gpu_memory_utilization": 0.1,  # vLLM demands this share of free memory before it reads the line above
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": sorted({*GRAPH_SIZES, options.batch})},
        **together,
    } | options.engine


def profiled(
    backend: str, shape: Shape, options: argparse.Namespace, folder: Path
) -> tuple[Step, list[Launch], dict[str, Any]]:
    """The step of a backend, one of its layers, and what the worker says of it.

    Raises:
        RuntimeError: the worker failed or took too long.
        ValueError: it recorded no kernel.
    """
    model = write(shape, folder / "model")
    job = Job(
        backend=backend,
        engine={"model": str(model)} | engine_arguments(shape, options),
        vocabulary=shape.vocabulary,
        batch=options.batch,
        prompt=options.prompt,
        steps=options.steps,
        seed=options.seed,
        prefill=options.prefill,
    )
    (folder / "job.json").write_text(job.to_json())
    log = folder / "log"
    # The profiler sees the kernels of its own process.
    environment = child_environment(VLLM_CACHE_ROOT=str(folder / "cache"), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    process = start([sys.executable, "-m", worker.__name__, str(folder)], log, environment)
    try:
        status = process.wait(options.seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        stop_group(process)
    result = folder / "result.json"
    if not result.exists():
        raise RuntimeError(f"the process {cause(log.read_text(errors='replace'), status)}")
    trace = folder / "trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    step = summarized(events, options.steps)
    sequence = layer(events, options.steps, shape.config["num_hidden_layers"])
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        trace.replace(options.traces / f"{backend}.json")
    return step, sequence, json.loads(result.read_text())


def table(step: Step, most: int) -> str:
    """A Markdown table of the longest kernels, and of all others together."""
    head = ["kernel", "launches", "us each", "us a step"]
    listed, others = step.kernels[:most], step.kernels[most:]
    rows = [[one.name, f"{one.launches:g}", f"{one.each_us:.2f}", f"{one.us:.1f}"] for one in listed]
    if others:
        launches, us = sum(one.launches for one in others), sum(one.us for one in others)
        rows.append([f"{len(others)} others", f"{launches:g}", f"{us / launches:.2f}", f"{us:.1f}"])
    return join_rows([head, *rows])


def layer_table(sequence: list[Launch]) -> str:
    """A Markdown table of a layer's launches in their order."""
    head = ["a layer's launches", "us", "adds us"]
    rows = [[one.name, f"{one.us:.2f}", f"{one.adds_us:.2f}"] for one in sequence]
    return join_rows([head, *rows, ["all", "", f"{sum(one.adds_us for one in sequence):.2f}"]])


def floor_us(read: int) -> float | None:
    """The time to read so many bytes at the device's stated memory rate."""
    chip = targets.detect(torch.device("cuda")).chip
    return None if chip is None else read / chip.memory_gb_s / 1e3


def run(options: argparse.Namespace) -> int:
    """Profiles all backends; returns 0 if every backend has a profile, else 1."""
    shape = SHAPES[options.model]
    if options.layers is not None:
        shape = replace(shape, config=dict(shape.config) | {"num_hidden_layers": options.layers})
    backends = [name.strip() for name in (options.backends or ",".join(shape.backends[:2])).split(",") if name.strip()]
    lines = report.JsonLines(options.json_path)
    gathered = facts.gather(torch.device("cuda"), options.commit)
    asked = {name: getattr(options, name) for name in ASKED}
    lines.write({"kind": "environment", **gathered, **asked})
    failed = False
    for backend in backends:
        with tempfile.TemporaryDirectory(prefix="dsl-step-") as name:
            try:
                step, sequence, result = profiled(backend, shape, options, Path(name))
            except (RuntimeError, ValueError) as error:
                print(f"{backend}: {error}", flush=True)
                failed = True
                continue
        floor = floor_us(result["bytes_read"])
        kernels = [{"name": one.name, "launches": one.launches, "us": one.us} for one in step.kernels]
        found = {"sum_us": step.sum_us, "busy_us": step.busy_us, "floor_us": floor, **result}
        launches = [asdict(one) for one in sequence]
        lines.write({"kind": "step", "backend": backend, **found, "kernels": kernels, "layer": launches})
        beside = "" if floor is None else f"; its weights are read in {floor:.0f} us at the stated memory rate"
        what = f"{options.batch} prompts of {options.prompt}" if options.prefill else f"batch {options.batch}"
        print(
            f"{backend}: {options.model}, {options.layers or 'all'} layers, {what}: a step takes "
            f"{result['step_us']:.0f} us, kernels run for {step.busy_us:.0f} of them (their sum is {step.sum_us:.0f})"
            f"{beside}\n{table(step, options.kernels)}",
            flush=True,
        )
        if sequence:
            print(f"\n{layer_table(sequence)}", flush=True)
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(
            "python -m benchmarks step needs a CUDA device: a profile of a CPU says nothing of kernels", file=sys.stderr
        )
        return 2
    return run(options)
