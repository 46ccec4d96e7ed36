# SPDX-License-Identifier: Apache-2.0
"""Times configurations by the emulator's clock: `python -m benchmarks.linear.clocked --shapes 1792x4096 --rows 1,64`.

Needs no GPU, and says nothing that a GPU has confirmed. Each line has rows, n, k, microseconds, the estimate of
`configs.choose`, and the configuration; the fastest is first, and the configuration that dispatch chooses is marked.
`python -m benchmarks.linear.fit --arch sm_100a` reads the file of `--json`.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from typing import Any

from dsl_backend.gemm.configs import choose
from dsl_backend.gemm.tiles import SmallMTiles
from emulator.clock.chips import CHIPS
from emulator.clock.constants import ChipClock

from .. import sweep
from ..clock.__main__ import clocked, simulated
from ..clock.problems import CPU, product, target_of
from .problems import Problem
from .sweep import contest, likely, named

# Clusters that are simulated, of a grid whose CTAs have equal work.
SAMPLES = 2


def clocked_us(problem: Problem, config: Any, chip: ChipClock) -> float:
    """Microseconds of a launch. Stream-K's CTAs wait for each other, so that all of them are simulated."""
    target = target_of(chip)
    waits = isinstance(config, SmallMTiles) and config.stream_k
    recorded = simulated(
        lambda: product(problem, target, config), chip, target.sm_count if waits else SAMPLES, file=None
    )
    return sum(one.microseconds for one in clocked(recorded, chip))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear.clocked", description=__doc__)
    parser.add_argument("--chip", choices=tuple(CHIPS), default="B200", help="default: B200")
    parser.add_argument("--shapes", required=True, help="comma-separated names of models, or shapes NxK")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--plain", action="store_true", help="no activation")
    parser.add_argument(
        "--most", type=int, default=4, help="configurations of a layer, by their estimates (default: 4)"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all times, one JSON object on each line")
    given = parser.parse_args()
    try:
        problems = [dataclasses.replace(one, gated=not given.plain) for one in named(given.shapes, given.rows)]
    except ValueError as error:
        parser.error(str(error))
    chip = CHIPS[given.chip]
    target = target_of(chip)
    with given.json.open("w") if given.json else contextlib.nullcontext() as lines:
        for problem in problems:
            configs = likely(problem, target, given.most)
            times = [(clocked_us(problem, one, chip), one) for one in configs]
            # Of plain products too, which vLLM may keep.
            chosen = choose(problem.spec, problem.m, target)
            of_layer = dataclasses.replace(contest(problem, target, CPU, configs), chosen=chosen)
            sweep.say(of_layer, times, given.most, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
