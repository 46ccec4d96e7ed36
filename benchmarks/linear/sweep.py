# SPDX-License-Identifier: Apache-2.0
"""Times every configuration of the CuTe DSL kernels: `python -m benchmarks.linear.sweep --shapes llama-8b --rows 1,64`.

What it finds is what `dsl_backend.linear.configs` should prefer. Each line: rows, n, k, microseconds, the estimate that
`configs.choose` goes by, the configuration; the fastest first, and the one that is chosen marked.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator

import torch
from dsl_backend.linear.configs import (
    GEMMS,
    STREAMS,
    Config,
    GemmConfig,
    StreamConfig,
    blocks_of,
    choose,
    deepest,
    estimate_us,
)
from dsl_backend.linear.kernel import Operands, Workspace
from dsl_backend.linear.sm90 import launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import Unit
from dsl_backend.runtime.target import Target

from .. import check, timing
from ..case import Launch
from ..check import BF16_LIMITS
from .problems import Inputs, Problem, build, reference
from .rows import MAIN, TOKENS

SECONDS = 0.1


def wide(spec: LinearSpec, rows: int, target: Target) -> Iterator[Config]:
    """Configurations worth a try, as many stages each as shared memory has room for, down to half of them."""
    tiles: list[Config] = [*STREAMS, *GEMMS]
    for tile_m, box_n, pingpong in (
        (128, 128, 0),
        (256, 64, 0),
        (256, 96, 0),
        (128, 64, 1),
        (128, 96, 1),
        (192, 64, 1),
    ):
        for cluster, band in itertools.product((1, 2), (4, 8, 16)):
            tiles.append(GemmConfig(tile_m=tile_m, box_n=box_n, pingpong=bool(pingpong), cluster=cluster, band=band))
    for tokens, groups, split, tile_k in itertools.product((8, 16, 32, 64, 128), (1, 2), (False, True), (64, 128, 256)):
        tiles.append(StreamConfig(tokens=tokens, groups=groups, split_tokens=split, tile_k=tile_k))
    seen = set()
    for tile in tiles:
        # Rows of other sizes have no use for it.
        if isinstance(tile, StreamConfig) and not rows <= tile.tile_tokens < max(16, 4 * rows):
            continue
        if isinstance(tile, GemmConfig) and rows <= 64:
            continue
        most = deepest(tile, spec, target.smem_bytes)
        for stages in () if most is None else (most.stages, max(2, most.stages // 2)):
            config = dataclasses.replace(tile, stages=stages)
            if config not in seen:
                seen.add(config)
                yield config


def microseconds(config: Config, problem: Problem, inputs: Inputs, target: Target) -> float:
    """Median of a launch, once its result is right."""
    device = inputs.layers[0].x.device
    function = launch.build(launch.key_of(problem.spec, config), target)
    workspace, blocks = Workspace(device), blocks_of(config, target)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        operands = Operands(layer.x, layer.weight, None, None, layer.out)
        launch.run(function, config, operands, blocks, workspace)
        return layer.out

    last = len(inputs.layers) - 1
    for index in range(last + 1):
        inputs.layers[index].out.fill_(torch.nan)
        run(index)
    timing.synchronize(device)
    check.require_right(inputs.layers[last].out, reference(problem, inputs, last), BF16_LIMITS)
    timer = timing.make_timer(Launch(run), last + 1, device)
    began, samples = 0.0, []
    while began < 1e6 * SECONDS:
        samples.append(timer.sample())
        began += samples[-1] * max(1, last + 1)
    return timing.summarize(samples).median_us


def time_all(tried: dict[Problem, list[Config]], target: Target, given: argparse.Namespace) -> None:
    """Print the candidates of every problem, the fastest first."""
    device = torch.device("cuda")
    lines = given.json.open("w") if given.json else None
    for problem, configs in tried.items():
        inputs = build(problem, timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device)), device, 0)
        found: list[tuple[float, Config]] = []
        for config in configs:
            try:
                found.append((microseconds(config, problem, inputs, target), config))
            except (check.WrongResultError, RuntimeError) as error:  # noqa: PERF203 - each may fail alone
                print(f"{problem.m} {config}: {error}", flush=True)
        chosen = choose(problem.spec, problem.m, target)
        for place, (time_us, config) in enumerate(sorted(found, key=lambda one: one[0])):
            estimate = estimate_us(config, problem.spec, problem.m, target)
            mark = "*" if config == chosen else " "
            if place < given.best or config == chosen:
                where = f"{problem.m:6} {problem.n}x{problem.k}"
                print(f"{where} {time_us:9.2f} us, {estimate:9.2f} estimated {mark} {config}", flush=True)
            if lines:
                facts = {"name": type(config).__name__, **dataclasses.asdict(config)}
                lines.write(json.dumps({**problem.parameters, "us": time_us, "estimate": estimate, **facts}) + "\n")
        del inputs
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear.sweep", description=__doc__)
    parser.add_argument("--shapes", default=",".join(MAIN), help="comma-separated names of models, or NxK")
    parser.add_argument("--rows", default=",".join(map(str, TOKENS)))
    parser.add_argument("--plain", action="store_true", help="no activation")
    parser.add_argument("--best", type=int, default=8, help="lines for each problem")
    parser.add_argument("--json", type=pathlib.Path, help="write one JSON object a line, of everything")
    given = parser.parse_args()
    target = targets.detect()
    problems = []
    for name, rows in itertools.product(given.shapes.split(","), map(int, given.rows.split(","))):
        n, k = MAIN[name] if name in MAIN else tuple(map(int, name.split("x")))
        problems.append(Problem(m=rows, n=n, k=k, gated=not given.plain))
    tried = {problem: list(wide(problem.spec, problem.m, target)) for problem in problems}
    keys = {launch.key_of(problem.spec, config) for problem, configs in tried.items() for config in configs}
    for outcome in precompile.run([Unit("linear", launch.build, key, target) for key in keys]):
        if outcome.error:
            print(f"not compiled: {outcome.unit}: {outcome.error}", flush=True)
    with timing.alone():
        time_all(tried, target, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
