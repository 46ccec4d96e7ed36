# SPDX-License-Identifier: Apache-2.0
"""Times configurations of SM90's kernels of e4m3 layers beside peers: `python -m benchmarks.scaled_linear.sweep`.

All of a row take turns, so that they have the same clock. Each launch has another layer's weights, as many layers as
L2 does not hold. Each row prints what dispatch chooses at present, the fastest configuration and the peers; the end
repeats the rows, those that lose most to a peer first. `--json` keeps every time.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from dsl_backend import providers
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm90 import scaled_configs as sm90
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.linear.scaled.cute import host
from dsl_backend.linear.scaled.cute.host import Choice, chosen, estimated_us, precompile_spec
from dsl_backend.linear.scaled.eager import How, outputs
from dsl_backend.providers import Launch
from dsl_backend.quant.reference import Quantized, dequantized
from dsl_backend.runtime import precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

from .. import check, timing
from ..runner import measure_in_turns, require_alive, short_message
from . import providers as peers  # noqa: F401 - registers them
from .problems import Inputs, Problem, build, reference
from .rows import LAYERS, ROWS

SECONDS = 0.06
# Configurations of a row besides the default.
MOST = 7


def tried(problem: Problem, target: Target, most: int) -> list[Choice]:
    """What dispatch chooses, then the best ones by the cost model, one of each kind of kernel first."""
    spec = problem.spec
    specs = [spec, spec.in_float32] if spec.out in sm90.QUANTISED_BESIDE else [spec]
    every = [Choice(one, config) for one in specs for config in sm90.fitting(one, target.smem_bytes)]
    ranked = sorted(
        (one for one in every if sm90.was_timed(one.spec, one.config, problem.m)),
        key=lambda one: estimated_us(one, problem.m, target),
    )
    of_kind = {kind_of(one): one for one in reversed(ranked)}
    first = sorted(of_kind.values(), key=ranked.index)
    return list(dict.fromkeys([chosen(spec, problem.m, target), *first, *ranked]))[: most + 1]


def kind_of(choice: Choice) -> tuple[Any, ...]:
    """What kernels differ in besides their tiles."""
    config: Any = choice.config
    if isinstance(config, SmallMTiles):
        return choice.spec.wide, config.stream_k
    return choice.spec.wide, config.turns, config.overlap, config.splits


def ours(problem: Problem, inputs: Inputs, choice: Choice, target: Target, workspace: Workspace) -> Launch:
    """Launches of a choice's kernels."""
    kind = problem.spec.out
    how = How(dtype=problem.spec.dtype, activation=problem.spec.activation, out_kind=kind)
    launch = host.launch_of(problem.spec, choice, problem.m, target, workspace)
    scales: dict[int, torch.Tensor | None] = {}

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        out, scale = outputs(layer.x.values, problem.n, how, layer.out_scale)
        launch(ScaledOperands(layer.x.values, layer.x.scale, layer.weight.values, layer.weight.scale, None, out, scale))
        scales[out.data_ptr()] = scale
        return out

    def view(out: torch.Tensor) -> torch.Tensor:
        if kind is None:
            return out.float()
        scale = scales[out.data_ptr()]
        assert scale is not None
        return dequantized(Quantized(out, scale, kind), torch.float32)

    return Launch(run, view)


def told(choice: Choice) -> str:
    """A configuration in a few words."""
    config: Any = choice.config
    wide = " f32" if choice.spec.wide else ""
    if isinstance(config, SmallMTiles):
        names = {name: getattr(config, name) for name in ("tokens", "tile_k", "groups", "num_splits")}
        return "few " + " ".join(f"{name[:6]}{int(value)}" for name, value in names.items()) + wide
    flags = f"p{config.promotion} t{config.turns} c{config.cluster}" + (" overlap" if config.overlap else "")
    flags += " halves" if config.splits > 1 else ""
    return f"128x{2 * config.box_n} {flags}{wide}"


@dataclasses.dataclass(frozen=True)
class Result:
    """A row's times in microseconds, by name; `default` names what dispatch chooses."""

    name: str
    default: str
    ours: dict[str, float]
    peers: dict[str, float]

    @property
    def ratio(self) -> float:
        """The fastest peer's time divided by the default's; infinite where there is no peer."""
        return min(self.peers.values(), default=float("inf")) / self.ours[self.default]

    def __str__(self) -> str:
        best = min(self.ours, key=lambda name: self.ours[name])
        text = f"{self.name:22} {self.ours[self.default]:8.1f} {self.default:34} best {self.ours[best]:8.1f} {best:34}"
        beside = ", ".join(f"{name} {us:.1f}" for name, us in sorted(self.peers.items(), key=lambda item: item[1]))
        return f"{text} {self.ratio:5.2f}x {min(self.peers.values(), default=0) / self.ours[best]:5.2f}x | {beside}"


def measure(
    name: str, problem: Problem, choices: Sequence[Choice], target: Target, device: torch.device, seconds: float
) -> Result:
    """Times a row; configurations that are wrong or fail are told and left out."""
    layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
    inputs = build(problem, layers, device, 0)
    expected = reference(problem, inputs, layers - 1)
    workspace = Workspace(device)
    timers: dict[str, timing.Timer] = {}

    def prepare(label: str, launch: Launch) -> None:
        results = [launch.run(layer) for layer in range(layers)]
        timing.synchronize(device)
        check.require_right(launch.view(results[-1]).float(), expected, problem.limits)
        timers[label] = timing.make_timer(launch, layers, device)

    for choice in choices:
        try:
            prepare(told(choice), ours(problem, inputs, choice, target, workspace))
        except Exception as error:  # noqa: PERF203 - each may fail alone
            require_alive(device, error)
            print(f"  {name} {told(choice)}: {short_message(error)}", flush=True)
    of_ours = list(timers)
    for one in providers.of("scaled-linear"):
        try:
            if not one.objections(problem):
                prepare(one.name, one.prepare(problem, inputs))
        except Exception as error:  # noqa: PERF203
            require_alive(device, error)
            print(f"  {name} {one.name}: {short_message(error)}", flush=True)
    found = measure_in_turns(timers, seconds)
    times = {label: one.median_us for label, one in found.items() if isinstance(one, timing.Summary)}
    default = told(choices[0])
    return Result(
        name,
        default if default in times else next(label for label in of_ours if label in times),
        {label: us for label, us in times.items() if label in of_ours},
        {label: us for label, us in times.items() if label not in of_ours},
    )


def problems(pattern: str) -> Iterator[tuple[str, Problem]]:
    """Rows whose name matches, by the number of rows, so that few of all layers come first."""
    for rows in ROWS:
        for layer, (n, k, gated) in LAYERS.items():
            for scheme in ("blocks", "channels"):
                name = f"{layer}-{scheme}-{rows}"
                if re.search(pattern, name):
                    yield name, Problem(m=rows, n=n, k=k, scheme=scheme, gated=gated)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaled_linear.sweep", description=__doc__)
    parser.add_argument("--rows", nargs="*", default=[""], help="regular expressions, the rows of the first one first")
    parser.add_argument("--most", type=int, default=MOST, help=f"configurations besides the default (default: {MOST})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of timing each (default: {SECONDS})")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no row after so many seconds")
    parser.add_argument("--json", type=pathlib.Path, help="write all times, one JSON object for each configuration")
    parser.add_argument("--only-compile", action="store_true", help="compile the kernels of all rows for sm_90a")
    given = parser.parse_args()
    began = time.perf_counter()
    target = targets.from_arch("sm_90a") if given.only_compile else targets.detect()
    rows = dict(row for pattern in given.rows for row in problems(pattern))
    choices = {name: tried(problem, target, given.most) for name, problem in rows.items()}
    specs = [precompile_spec(one, target) for found in choices.values() for one in found]
    for outcome in precompile.run(list({str(spec): spec for spec in specs}.values())):
        if outcome.error:
            print(f"not compiled: {outcome.spec}: {outcome.error}", flush=True)
    print(f"{len(rows)} rows, compiled after {time.perf_counter() - began:.0f} s", flush=True)
    if given.only_compile:
        return 0
    results = []
    lines = given.json.open("w") if given.json else None
    with timing.alone():
        for name, problem in rows.items():
            if time.perf_counter() - began > given.limit_seconds:
                print(f"{name}: no time left", flush=True)
                continue
            found = measure(name, problem, choices[name], target, torch.device("cuda"), given.seconds)
            torch.cuda.empty_cache()
            results.append(found)
            print(found, flush=True)
            if lines:
                configs = {told(one): one for one in choices[name]}
                for label, us in (found.ours | found.peers).items():
                    line = {
                        "row": name,
                        **problem.parameters,
                        "name": label,
                        "us": us,
                        "default": label == found.default,
                    }
                    if label in configs:
                        config = configs[label].config
                        line |= {"wide": configs[label].spec.wide, "kind": type(config).__name__}
                        line |= {"config": dataclasses.asdict(config)}
                    lines.write(json.dumps(line) + "\n")
                lines.flush()
    print("losses first: row, default, the fastest configuration, best peer / default, best peer / fastest | peers")
    for found in sorted(results, key=lambda one: one.ratio):
        print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
