# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks engine`: measures every backend in new processes, and writes results at once."""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import facts, report
from ..processes import exit_on_sigterm
from .children import Record, Settings, offline, served, side_by_side
from .models import SHAPES, Shape
from .scenarios import QUICK, QUICK_TOKENS, SCENARIOS, Scenario, choose, sampled

OURS = "dsl"
# Of the quick form. Prompts and outputs of a run fit into this many tokens of cache.
CACHE_TOKENS = QUICK_TOKENS * 5 // 4
# Bytes of an engine besides weights and cache: CUDA context, activations of 16384 tokens, graphs.
ENGINE_BYTES = 6e9
# Each size is captured twice, for prefill and decode; vLLM's default is 51 sizes.
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MOST_GRAPH_ROWS = 512  # by vLLM's default


@dataclass
class Column:
    """The results of one backend.

    Attributes:
        ready_s: seconds from the process's start until the engine was ready.
        values, units: scenario -> its result and unit.
        errors: scenario -> error; the key `` is the engine itself.
    """

    backend: str
    ready_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    startup_lines: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks engine",
        description="Measure tokens per second of whole vLLM engines with dummy weights, with each attention backend.",
    )
    parser.add_argument("--model", required=True, help=f"comma-separated list of {', '.join(sorted(SHAPES))}")
    parser.add_argument("--backends", help="comma-separated backends (default: dsl and its peers for the model)")
    parser.add_argument(
        "--scenarios",
        help=f"comma-separated list of {', '.join(s.id for s in SCENARIOS)} (default: all of these), and of "
        f"{', '.join(s.id for s in sampled(SCENARIOS))}",
    )
    parser.add_argument(
        "--serve", action="store_true", help="measure `vllm serve` with concurrent streams instead of the engine"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short form: dsl and one peer start at the same time and take turns, if the GPU has memory for both; "
        f"three runs of scenarios with at most {QUICK_TOKENS} prompt tokens and 128 output tokens a request "
        f"(default: {', '.join(s.id for s in QUICK)})",
    )
    parser.add_argument("--in-turn", action="store_true", help="start one engine after the other with --quick too")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=math.inf,
        help="with engines that take turns: begin no round of runs that would end later, for each model",
    )
    parser.add_argument("--concurrent", type=int, default=64, help="concurrent requests with --serve (default: 64)")
    parser.add_argument("--json", type=Path, dest="json_path", help="write one JSON object on each line")
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help="further arguments of the engine, as JSON; the model of a speculative_config may be one of --model's",
    )
    parser.add_argument(
        "--eager", action="store_true", help="run without torch.compile and CUDA graphs (always so on a CPU)"
    )
    parser.add_argument("--cache", type=Path, help="folder of vLLM's compile cache (default: a temporary one)")
    parser.add_argument(
        "--start-seconds", type=float, default=400, help="time limit for an engine to start (default: 400)"
    )
    parser.add_argument(
        "--scenario-seconds", type=float, default=200, help="longest time without an event (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument("--commit", help="commit of the code, if it is not in a git checkout")
    return parser.parse_args(arguments)


def say(text: str, began: float) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def describe(event: Record) -> str:
    """An event as a line of progress."""
    name = event["event"]
    if name == "ready":
        graphs = f"graphs {event['facts']['graphs']}, page {event['facts']['page_size']}"
        return f"ready after {event['at_s']:.0f} s; layers served by {event['facts']['served_by']}; {graphs}"
    if name == "run":
        return f"{event['scenario']}: {event['kind']} run {event['seconds']:.2f} s"
    if name == "result":
        return f"{event['scenario']}: {statistics.median(event['rates']):.1f} {event['unit']}"
    if name == "compiled":
        return f"kernels compiled: {event['in_warmup']} in warm-up, {event['while_serving']} while serving"
    if name in ("failed", "error"):
        where = f"{event['scenario']}: " if event.get("scenario") else ""
        return f"{where}ERROR {event['message']}"
    at = f" after {event['at_s']:.0f} s" if "at_s" in event else ""
    return f"{name}{at} {event.get('message', '')}".strip()


def take(column: Column, event: Record) -> Record | None:
    """Adds an event to a column; returns the JSON line to write for it, or None."""
    name, scenario = event["event"], event.get("scenario") or ""
    if name == "ready":
        column.ready_s, column.facts, column.startup_lines = event["at_s"], event["facts"], event["startup_lines"]
        return {"kind": "engine", "ready_s": event["at_s"], **event["facts"], "startup_lines": event["startup_lines"]}
    if name == "result":
        column.values[scenario] = statistics.median(event["rates"])
        column.units[scenario] = event["unit"]
        rest = {key: value for key, value in event.items() if key not in ("event", "at_s", "scenario")}
        return {"kind": "result", "scenario": scenario, "value": column.values[scenario], **rest}
    if name == "compiled":
        return {"kind": "compiled", "in_warmup": event["in_warmup"], "while_serving": event["while_serving"]}
    if name in ("failed", "error"):
        column.errors.setdefault(scenario, event["message"])
        return {"kind": "error", **{key: value for key, value in event.items() if key not in ("event", "at_s")}}
    return None


def number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def cell(column: Column, scenario: str, ours: Column | None) -> str:
    """A result and, in a peer's column, this package's result divided by it."""
    if scenario not in column.values:
        return "error" if scenario in column.errors or "" in column.errors else "-"
    value = column.values[scenario]
    if ours is None or ours is column or scenario not in ours.values:
        return number(value)
    return f"{number(value)} ({ours.values[scenario] / value:.2f}x)"


def table(columns: Sequence[Column], scenarios: Sequence[str]) -> str:
    """A Markdown table: a row for each scenario and for the start time, a column for each backend."""
    ours = next((column for column in columns if column.backend.lower() == OURS), None)
    head = ["scenario", "unit", *(column.backend for column in columns)]
    body = []
    for scenario in scenarios:
        unit = next((column.units[scenario] for column in columns if scenario in column.units), "")
        body.append([scenario, unit, *(cell(column, scenario, ours) for column in columns)])
    ready = [f"{column.ready_s:.0f}" if column.ready_s is not None else "error" for column in columns]
    body.append(["start", "s", *ready])
    return join_rows([head, *body])


def ratios(columns: Mapping[str, Sequence[Column]]) -> str:
    """The rates of this package divided by those of the peers, the smallest first.

    Args:
        columns: model -> its columns.
    """
    found = []
    for model, of_model in columns.items():
        ours = next((column for column in of_model if column.backend.lower() == OURS), Column(OURS))
        for peer in of_model:
            for scenario in ours.values.keys() & peer.values.keys() if peer is not ours else ():
                own, other = ours.values[scenario], peer.values[scenario]
                found.append((own / other, model, scenario, number(own), number(other), peer.backend))
    head = ["ratio", "model", "scenario", OURS, "peer's rate", "peer"]
    return join_rows([head, *([f"{ratio:.3f}x", *rest] for ratio, *rest in sorted(found))])


def join_rows(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def join(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)) + " |"

    return "\n".join([join(rows[0]), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(join, rows[1:])])


def events_of(
    backends: Sequence[str], scenarios: list[Scenario], settings: Settings, options: argparse.Namespace
) -> Iterator[tuple[str, Record]]:
    """Yields backends and events."""
    if takes_turns(backends, settings.shape, options):
        with tempfile.TemporaryDirectory(prefix="dsl-engine-") as name:
            yield from side_by_side(backends, scenarios, settings, Path(name), options.limit_seconds)
        return
    for backend in backends:
        yield backend, {"event": "starting"}
        with tempfile.TemporaryDirectory(prefix="dsl-engine-") as name:
            if options.serve:
                events = served(backend, settings, Path(name))
            else:
                events = offline(backend, scenarios, settings, Path(name))
            yield from ((backend, event) for event in events)


def takes_turns(backends: Sequence[str], shape: Shape, options: argparse.Namespace) -> bool:
    """Whether all engines are started at the same time: in the quick form, if they fit into the device's memory."""
    if not options.quick or options.in_turn or options.serve:
        return False
    each = shape.weight_bytes + CACHE_TOKENS * shape.token_bytes + ENGINE_BYTES
    return not torch.cuda.is_available() or len(backends) * each <= torch.cuda.mem_get_info()[1]


def engine_arguments(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """The engine's further arguments, those of the quick form among them."""
    quick = {
        "kv_cache_memory_bytes": CACHE_TOKENS * shape.token_bytes,
        # vLLM demands this share of free memory before it reads the line above, and engines start side by side.
        "gpu_memory_utilization": 0.1,
        "compilation_config": {"cudagraph_capture_sizes": graph_sizes(options.engine)},
    }
    return (quick if options.quick else {}) | options.engine


def graph_sizes(engine: Mapping[str, Any]) -> list[int]:
    """Rows of steps that the quick form captures. With drafts each request has a row for each of them and one more."""
    drafts = (engine.get("speculative_config") or {}).get("num_speculative_tokens", 0)
    verified = {rows for size in GRAPH_SIZES if (rows := size * (1 + drafts)) <= MOST_GRAPH_ROWS}
    return sorted({*GRAPH_SIZES, *verified})


def measured(
    model: str, options: argparse.Namespace, lines: report.JsonLines, cache: Path, began: float
) -> tuple[list[Column], list[str]]:
    """Measures all backends with one model; returns their columns and the names of the scenarios."""
    shape = SHAPES[model]
    scenarios = choose(options.scenarios, shape.small, options.quick)
    default = ",".join(shape.backends[:2] if options.quick else shape.backends)
    backends = [name.strip() for name in (options.backends or default).split(",") if name.strip()]
    on_gpu = torch.cuda.is_available()
    settings = Settings(
        shape=shape,
        model=model,
        engine=engine_arguments(shape, options),
        eager=options.eager or not on_gpu,
        start_s=options.start_seconds,
        scenario_s=options.scenario_seconds,
        cache=cache,
        seed=options.seed,
        concurrent=options.concurrent,
    )
    gathered = facts.gather(torch.device("cuda" if on_gpu else "cpu"), options.commit)
    common = {"model": model, "engine": settings.arguments(), "seed": options.seed, "quick": options.quick}
    sizes = [{"id": s.id, "requests": s.requests, "prompt": s.prompt, "output": s.output} for s in scenarios]
    together = takes_turns(backends, shape, options)
    lines.write({"kind": "environment", **gathered, **common, "scenarios": sizes, "started_together": together})
    columns = {backend: Column(backend) for backend in backends}
    for backend, event in events_of(backends, scenarios, settings, options):
        say(f"{backend}: {describe(event)}", began)
        line = take(columns[backend], event)
        if line is not None:
            lines.write({**line, "model": model, "backend": backend})
    return list(columns.values()), [f"serve-{options.concurrent}"] if options.serve else [s.id for s in scenarios]


def run(options: argparse.Namespace) -> int:
    """Measures all backends; returns 0 if every backend has every result, else 1."""
    began = time.monotonic()
    models = [name.strip() for name in options.model.split(",") if name.strip()]
    if unknown := [name for name in models if name not in SHAPES]:
        print(f"no model {', '.join(unknown)}: choose from {', '.join(sorted(SHAPES))}", file=sys.stderr)
        return 2
    try:
        choose(options.scenarios, small=False, quick=options.quick)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    lines = report.JsonLines(options.json_path)
    columns: dict[str, list[Column]] = {}
    complete = True
    for model in models:
        with tempfile.TemporaryDirectory(prefix="dsl-engine-cache-") as cache:
            columns[model], ids = measured(model, options, lines, options.cache or Path(cache), began)
        complete &= all(set(column.values) == set(ids) for column in columns[model])
        show(model, columns[model], ids, next(line for line in lines.entries[::-1] if line["kind"] == "environment"))
    print(f"{OURS}'s rate divided by the peer's, the smallest first:")
    print(ratios(columns))
    return 0 if complete else 1


def show(model: str, columns: Sequence[Column], ids: Sequence[str], gathered: Record) -> None:
    """Prints what the engines said, the machine and the table."""
    for column in columns:
        for text in column.startup_lines:
            print(f"{column.backend}: {text}")
        for scenario, message in column.errors.items():
            print(f"{column.backend}: {scenario or 'engine'}: {message}")
    versions = ", ".join(f"{name} {version}" for name, version in gathered["versions"].items() if version)
    print(f"{model} on {gathered['device']}; commit {gathered['commit']}; {versions}; {gathered['date']}")
    together = " All engines started at the same time." if gathered["started_together"] else ""
    print(f"In brackets: {OURS}'s rate divided by the peer's.{together}")
    print(table(columns, ids))


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    exit_on_sigterm()
    return run(options)
