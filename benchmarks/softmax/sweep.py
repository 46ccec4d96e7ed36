# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the CuTe DSL kernel: `python -m benchmarks.softmax.sweep --rows '64x128256'`.

What it finds is what `dsl_backend.softmax.configs` should prefer. Each line: row, microseconds, TB/s, the
configuration; the fastest first, and the default marked.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import Unit
from dsl_backend.softmax import api
from dsl_backend.softmax.configs import REGISTERS_PER_SM, RowConfig, ceil_div, default_config, widest_vector
from dsl_backend.softmax.sm90 import launch
from dsl_backend.softmax.spec import SoftmaxSpec

from .. import sweep, timing
from ..case import Case, select
from ..sweep import Contest, Ready
from .problems import Problem, build, reference
from .rows import cases

FEWEST, MOST = 8, 96  # elements of a thread


def candidates(spec: SoftmaxSpec, smem_bytes: int) -> Iterator[RowConfig]:
    """Configurations worth a try that fit, the default first."""
    default = default_config(spec)
    yield default
    vector = widest_vector(spec)
    count = spec.width // vector
    clusters = (1, 2, 4, 8, 16) if spec.width > 8192 else (1,)
    for threads, cluster, recompute in itertools.product((32, 64, 128, 256, 512, 1024), clusters, (False, True)):
        vectors = ceil_div(count, threads * cluster)
        if not FEWEST <= vector * vectors <= MOST or threads > count:
            continue
        one = RowConfig(
            vector=vector,
            vectors=vectors,
            threads_per_row=threads,
            rows_per_block=max(1, 128 // threads) if cluster == 1 else 1,
            cluster=cluster,
            recompute=recompute,
        )
        # As many blocks as the registers are worth, and half of them.
        most = min(REGISTERS_PER_SM // (one.registers * one.threads), 2048 // one.threads)
        for resident in sorted({1, most // 2, most}):
            config = dataclasses.replace(one, resident=resident)
            if resident and config != default and not config.objections(spec, smem_bytes):
                yield config


def contest(case: Case[Problem], target: targets.Target, device: torch.device) -> Contest:
    spec = spec_of(case.problem)
    configs = list(candidates(spec, target.smem_bytes))

    def prepare() -> Ready:
        layers = timing.layers_needed(case.problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(case.problem, layers, device, 0)
        outputs = [layer.out for layer in inputs.layers]

        def runner(config: RowConfig) -> Callable[[int], torch.Tensor]:
            function = launch.build(launch.key_of(spec, config), target)

            def run(index: int) -> torch.Tensor:
                function(inputs.layers[index].x, outputs[index])
                return outputs[index]

            return run

        return Ready(runner, outputs, reference(case.problem, inputs, layers - 1))

    return Contest(
        name=case.id,
        parameters=case.parameters,
        configs=configs,
        chosen=configs[0],
        unit=lambda config: Unit("softmax", launch.build, launch.key_of(spec, config), target),
        prepare=prepare,
        note=lambda config, time_us: f"{case.traffic_bytes / time_us / 1e6:7.3f}",
    )


def spec_of(problem: Problem) -> SoftmaxSpec:
    x = torch.empty(1, problem.width, dtype=problem.dtype)
    out = torch.empty(1, problem.width, dtype=problem.out_dtype)
    vector = api.common_vector(x, out)
    return SoftmaxSpec(
        width=problem.width, dtype=problem.dtype, out_dtype=problem.out_dtype, log=problem.log, vector=vector
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.softmax.sweep", description=__doc__)
    parser.add_argument("--rows", default=None, help="regular expression of row names; by default the table's")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    target, device = targets.detect(), torch.device("cuda")
    return sweep.run([contest(case, target, device) for case in select(cases(), given.rows)], given)


if __name__ == "__main__":
    sys.exit(main())
