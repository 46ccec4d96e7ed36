# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks engine`: measures every backend in turn in new processes, and writes results at once."""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import facts, report
from .children import Record, Settings, offline, served
from .models import SHAPES
from .scenarios import SCENARIOS, Scenario, choose

OURS = "dsl"


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
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--backends", help="comma-separated backends (default: dsl and its peers for the model)")
    parser.add_argument(
        "--scenarios", help=f"comma-separated list of {', '.join(s.id for s in SCENARIOS)} (default: all)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="measure `vllm serve` with concurrent streams instead of the engine"
    )
    parser.add_argument("--concurrent", type=int, default=64, help="concurrent requests with --serve (default: 64)")
    parser.add_argument("--json", type=Path, dest="json_path", help="write one JSON object on each line")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
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
    widths = [max(len(row[index]) for row in [head, *body]) for index in range(len(head))]

    def join(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)) + " |"

    return "\n".join([join(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(join, body)])


def events_of(backend: str, scenarios: list[Scenario], settings: Settings, serve: bool) -> Iterator[Record]:
    with tempfile.TemporaryDirectory(prefix="dsl-engine-") as name:
        if serve:
            yield from served(backend, settings, Path(name))
        else:
            yield from offline(backend, scenarios, settings, Path(name))


def run(options: argparse.Namespace) -> int:
    """Measures all backends; returns 0 if every backend has every result, else 1."""
    began = time.monotonic()
    shape = SHAPES[options.model]
    try:
        scenarios = choose(options.scenarios, shape.small)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    backends = [name.strip() for name in (options.backends or ",".join(shape.backends)).split(",") if name.strip()]
    ids = [f"serve-{options.concurrent}"] if options.serve else [scenario.id for scenario in scenarios]
    on_gpu = torch.cuda.is_available()
    gathered = facts.gather(torch.device("cuda" if on_gpu else "cpu"))
    gathered["commit"] = options.commit or gathered["commit"]
    lines = report.JsonLines(options.json_path)
    columns: list[Column] = []
    with tempfile.TemporaryDirectory(prefix="dsl-engine-cache-") as cache:
        settings = Settings(
            shape=shape,
            model=options.model,
            engine=options.engine,
            eager=options.eager or not on_gpu,
            start_s=options.start_seconds,
            scenario_s=options.scenario_seconds,
            cache=options.cache or Path(cache),
            seed=options.seed,
            concurrent=options.concurrent,
        )
        common = {"model": options.model, "engine": settings.arguments(), "seed": options.seed}
        lines.write({"kind": "environment", **gathered, **common})
        for backend in backends:
            column = Column(backend)
            columns.append(column)
            say(f"{backend}: starting", began)
            for event in events_of(backend, scenarios, settings, options.serve):
                say(f"{backend}: {describe(event)}", began)
                line = take(column, event)
                if line is not None:
                    lines.write({**line, "model": options.model, "backend": backend})
    for column in columns:
        for text in column.startup_lines:
            print(f"{column.backend}: {text}")
        for scenario, message in column.errors.items():
            print(f"{column.backend}: {scenario or 'engine'}: {message}")
    versions = ", ".join(f"{name} {version}" for name, version in gathered["versions"].items() if version)
    print(f"{options.model} on {gathered['device']}; commit {gathered['commit']}; {versions}; {gathered['date']}")
    print(f"In brackets: {OURS}'s rate divided by the peer's.")
    print(table(columns, ids))
    return 0 if all(set(column.values) == set(ids) for column in columns) else 1


def end(number: int, frame: object) -> None:
    """Handles a signal by raising, so that `finally` blocks stop the engines."""
    # `timeout` sends its signal twice; the second one must not interrupt the clean-up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, end)
    return run(options)
