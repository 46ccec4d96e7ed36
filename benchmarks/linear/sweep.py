# SPDX-License-Identifier: Apache-2.0
"""Times every configuration of the CuTe DSL kernels: `python -m benchmarks.linear.sweep --shapes llama-8b --rows 1,64`.

What it finds is what `dsl_backend.linear.configs` should prefer. Each line: rows, n, k, microseconds, the estimate that
`configs.choose` goes by, the configuration; the fastest first, and the one that is chosen marked.
"""

import argparse
import dataclasses
import itertools
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
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import Unit
from dsl_backend.runtime.target import Target

from .. import sweep, timing
from .problems import Problem, build, reference
from .rows import MAIN, TOKENS


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


def time_problem(problem: Problem, configs: list[Config], target: Target, lines: sweep.Lines) -> None:
    device = torch.device("cuda")
    inputs = build(problem, timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device)), device, 0)
    outputs = [layer.out for layer in inputs.layers]
    expected = reference(problem, inputs, len(outputs) - 1)
    workspace = Workspace(device)

    def timer(config: Config) -> timing.Timer:
        function = launch.build(launch.key_of(problem.spec, config), target)
        blocks = blocks_of(config, target)

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            operands = Operands(layer.x, layer.weight, None, None, layer.out)
            launch.run(function, config, operands, blocks, workspace)
            return layer.out

        return sweep.timer_of(run, outputs, expected)

    def note(config: Config, time_us: float) -> str:
        return f"{estimate_us(config, problem.spec, problem.m, target):9.2f} estimated"

    chosen = choose(problem.spec, problem.m, target)
    lines.time(f"{problem.m} {problem.n}x{problem.k}", problem.parameters, configs, chosen, timer, note)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear.sweep", description=__doc__)
    parser.add_argument("--shapes", default=",".join(MAIN), help="comma-separated names of models, or NxK")
    parser.add_argument("--rows", default=",".join(map(str, TOKENS)))
    parser.add_argument("--plain", action="store_true", help="no activation")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    target = targets.detect()
    problems = []
    for name, rows in itertools.product(given.shapes.split(","), map(int, given.rows.split(","))):
        n, k = MAIN[name] if name in MAIN else tuple(map(int, name.split("x")))
        problems.append(Problem(m=rows, n=n, k=k, gated=not given.plain))
    tried = {problem: list(wide(problem.spec, problem.m, target)) for problem in problems}
    keys = {launch.key_of(problem.spec, config) for problem, configs in tried.items() for config in configs}
    sweep.compile_all(Unit("linear", launch.build, key, target) for key in keys)
    lines = sweep.Lines(given)
    with timing.alone():
        for problem, configs in tried.items():
            time_problem(problem, configs, target, lines)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
