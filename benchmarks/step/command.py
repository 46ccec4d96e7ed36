# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks step`: profiles a step of each backend, of decode or of prompts, in a process of its own."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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
from ..processes import child_environment, exit_on_sigterm, stop_group
from . import worker
from .host import Host, Span, rows_of
from .parts import Part, compared, parts
from .trace import Launch, Step, layer, summarized
from .worker import WARM_STEPS, Job

CACHE_TOKENS = 16384
# What a record of a run has of its options.
ASKED = ("model", "layers", "batch", "prompt", "prefill", "host", "steps", "engine", "seed")


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
    parser.add_argument(
        "--host", action="store_true", help="profile the host's functions, and no kernels; also without a GPU"
    )
    parser.add_argument("--prompt", type=at_least(int, 1), default=512, help="tokens of each prompt (default: 512)")
    parser.add_argument("--steps", type=at_least(int, 1), default=32, help="steps to time and to profile (default: 32)")
    parser.add_argument("--kernels", type=at_least(int, 1), default=24, help="kernels to list (default: 24)")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    parser.add_argument("--traces", type=Path, help="folder for the Chrome traces, BACKEND.json")
    parser.add_argument("--json", type=Path, dest="json_path", help="write one JSON object on each line")
    parser.add_argument(
        "--seconds", type=at_least(float, 1), default=600, help="time limit for each backend (default: 600)"
    )
    parser.add_argument(
        "--limit-seconds",
        type=at_least(float, 1),
        default=math.inf,
        help="time limit for all backends, of which each gets an equal part of what is left",
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


def executed(backend: str, shape: Shape, options: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """What a backend's worker says of its steps.

    Args:
        seconds: the worker's time limit.

    Raises:
        RuntimeError: the worker failed or took too long.
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
        host=options.host,
    )
    (folder / "job.json").write_text(job.to_json())
    log = folder / "log"
    # The profiler sees the kernels of its own process.
    environment = child_environment(VLLM_CACHE_ROOT=str(folder / "cache"), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    process = start([sys.executable, "-m", worker.__name__, str(folder)], log, environment)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        stop_group(process)
    result = folder / "result.json"
    if not result.exists():
        raise RuntimeError(f"the process {cause(log.read_text(errors='replace'), status)}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def profiled(
    backend: str, shape: Shape, options: argparse.Namespace, folder: Path, seconds: float
) -> tuple[Step, list[Launch], dict[str, Any]]:
    """The step of a backend, one of its layers, and what the worker says of it.

    Args:
        seconds: the worker's time limit.

    Raises:
        RuntimeError: the worker failed or took too long.
        ValueError: it recorded no kernel.
    """
    result = executed(backend, shape, options, folder, seconds)
    trace = folder / "trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    step = summarized(events, options.steps)
    sequence = layer(events, options.steps, shape.config["num_hidden_layers"])
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        trace.replace(options.traces / f"{backend}.json")
    return step, sequence, result


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


def report_host(
    lines: report.JsonLines, backend: str, result: dict[str, Any], shape: Shape, options: argparse.Namespace
) -> None:
    """Print and record what the host does in a backend's step."""
    found = result["host"]
    host = Host(**found | {"spans": tuple(Span(**span) for span in found["spans"])})
    lines.write({"kind": "host", "backend": backend, **found})
    rows = rows_of(host, shape.config["num_hidden_layers"], options.kernels)
    print(
        f"{backend}: {options.model}, {options.layers or 'all'} layers, batch {options.batch}: a step takes "
        f"{host.step_us:.0f} us on the host; us are shares of it, by a profile of its functions\n{join_rows(rows)}",
        flush=True,
    )


def key_bytes(shape: Shape, options: argparse.Namespace) -> float:
    """Bytes of keys and values that a layer's attention reads in a decode step, in the middle of those profiled."""
    context = options.prompt + WARM_STEPS + 1.5 * options.steps
    return options.batch * context * shape.token_bytes / shape.config["num_hidden_layers"]


def whole_step(
    step: Step, sequence: Sequence[Launch], products: Mapping[str, int], layers: int
) -> tuple[list[Part], list[Part]]:
    """The parts of a layer; then of the step: its layers together, and what is launched outside of them.

    Raises:
        ValueError: as of `parts`, or there is no sequence or no products.
    """
    if not sequence or not products:
        raise ValueError("its layers are not those of a dense decoder" if sequence else "no kernel is once in a layer")
    found = parts(sequence, list(products))
    count, us = sum(part.launches for part in found), sum(part.us for part in found)
    launches = round(sum(kernel.launches for kernel in step.kernels))
    return found, [
        Part("a layer", count, us),
        Part(f"{layers} layers", layers * count, layers * us),
        Part("outside of layers", launches - layers * count, step.busy_us - layers * us),
        Part("a step", launches, step.busy_us),
    ]


def floors(products: Mapping[str, int], keys: float, read: int, layers: int, gb_s: float) -> dict[str, float]:
    """The time to read what each part has to read, in us, by its name.

    Args:
        products: bytes of each product's weights.
        keys: bytes of a layer's keys and values.
        read: bytes of all weights that a step reads.
    """
    layer = sum(products.values()) + keys
    weights = sum(products.values())
    sizes = {
        **products,
        "attention": keys,
        "a layer": layer,
        f"{layers} layers": layers * layer,
        "outside of layers": read - layers * weights,
        "a step": read + layers * keys,
    }
    return {name: size / gb_s / 1e3 for name, size in sizes.items()}


def report_parts(
    found: Mapping[str, tuple[Step, list[Launch], dict[str, Any]]], shape: Shape, options: argparse.Namespace
) -> list[list[str]]:
    """The table of parts beside their floors, for all engines whose layers are a dense decoder's; says why one is not.

    Args:
        found: of each backend the step, a layer's launches and what the worker says.
    """
    layers = shape.config["num_hidden_layers"]
    engines = {}
    for backend, (step, sequence, result) in found.items():
        try:
            inside, whole = whole_step(step, sequence, result["layer_products"], layers)
        except ValueError as error:
            print(f"{backend}: no parts of a layer: {error}", flush=True)
            continue
        engines[backend] = [*inside, *whole]
    if not engines:
        return []
    result = found[next(iter(engines))][2]
    chip = targets.detect(torch.device("cuda")).chip
    below = (
        {}
        if chip is None
        else floors(result["layer_products"], key_bytes(shape, options), result["bytes_read"], layers, chip.memory_gb_s)
    )
    return compared(engines, below)


def run(options: argparse.Namespace) -> int:
    """Profiles all backends; returns 0 if every backend has a profile, else 1."""
    shape = SHAPES[options.model]
    if options.layers is not None:
        shape = replace(shape, config=dict(shape.config) | {"num_hidden_layers": options.layers})
    backends = [name.strip() for name in (options.backends or ",".join(shape.backends[:2])).split(",") if name.strip()]
    lines = report.JsonLines(options.json_path)
    gathered = facts.gather(torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.commit)
    asked = {name: getattr(options, name) for name in ASKED}
    lines.write({"kind": "environment", **gathered, **asked})
    done: dict[str, tuple[Step, list[Launch], dict[str, Any]]] = {}
    failed, until = False, time.monotonic() + options.limit_seconds
    for index, backend in enumerate(backends):
        seconds = min(options.seconds, (until - time.monotonic()) / (len(backends) - index))
        with tempfile.TemporaryDirectory(prefix="dsl-step-") as name:
            try:
                if options.host:
                    report_host(lines, backend, executed(backend, shape, options, Path(name), seconds), shape, options)
                    continue
                step, sequence, result = profiled(backend, shape, options, Path(name), seconds)
            except (RuntimeError, ValueError) as error:
                print(f"{backend}: {error}", flush=True)
                failed = True
                continue
        done[backend] = step, sequence, result
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
    # Prompts are bound by arithmetic: what they read is no floor.
    if not options.prefill and (rows := report_parts(done, shape, options)):
        lines.write({"kind": "parts", "rows": rows})
        print(f"\n{join_rows(rows)}", flush=True)
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    if not (options.host or torch.cuda.is_available()):
        print(
            "python -m benchmarks step needs a CUDA device, a profile of a CPU says nothing of kernels: --host "
            "profiles the host's functions on any machine",
            file=sys.stderr,
        )
        return 2
    exit_on_sigterm()
    return run(options)
