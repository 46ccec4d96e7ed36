# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the CuTe DSL kernel: `python -m benchmarks.norm.sweep --rows 'grid-4096x16384'`.

The results show which configurations `dsl_backend.norm.configs` should choose. Each line has the row, microseconds,
TB/s, and the configuration. The fastest is first; the default is marked. Rows with 8-bit outputs are left out: how good
they are is not compared.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from dsl_backend.norm import launch
from dsl_backend.norm.candidates import named
from dsl_backend.norm.configs import NormConfig, default_config, most_ctas, widest_vector
from dsl_backend.norm.cute import host
from dsl_backend.norm.spec import NormSpec, Scaling
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import PrecompileSpec

from .. import sweep, timing
from ..case import Case, select
from ..row_sweep import spreads
from ..sweep import Contest, Ready
from .problems import EPS, Problem, build, reference
from .rows import cases

FEWEST, MOST = 16, 64  # elements of a thread
THREADS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of a row in a CTA


def candidates(spec: NormSpec, smem_bytes: int) -> Iterator[NormConfig]:
    """The configurations that fit, the default first, each with registers for one CTA on an SM and for the most."""
    default = default_config(spec)
    yield from named(spec, smem_bytes).values()
    vector = widest_vector(spec)
    for vectors, threads, rows, cluster in spreads(spec.width, vector, THREADS, FEWEST, MOST):
        one = NormConfig(
            vector=vector,
            vectors_per_thread=vectors,
            threads_per_row=threads,
            rows_per_cta=rows,
            cluster=cluster,
            use_pdl=True,
        )
        found = [one, replace(one, ctas_per_sm=most_ctas(one, spec))]
        yield from (config for config in found if config != default and not config.objections(spec, smem_bytes))


def contest(case: Case[Problem], target: targets.Target, device: torch.device) -> Contest:
    spec = case.problem.spec()
    configs = sweep.unique(candidates(spec, target.smem_bytes))

    def prepare() -> Ready:
        layers = timing.layers_needed(case.problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(case.problem, layers, device, 0)
        outputs = [layer.out for layer in inputs.layers]

        def runner(config: NormConfig) -> Callable[[int], torch.Tensor]:
            function = host.build(host.key_of(spec, config), target)
            given = [host.arguments_of(launch.prepared(layer)) for layer in inputs.layers]

            def run(index: int) -> torch.Tensor:
                function(*given[index], EPS)
                return outputs[index]

            return run

        return Ready(runner, outputs, reference(case.problem, inputs, layers - 1))

    return Contest(
        name=case.id,
        parameters=case.parameters,
        configs=configs,
        chosen=configs[0],
        precompile_spec=lambda config: PrecompileSpec("norm", host.build, host.key_of(spec, config), target),
        prepare=prepare,
        note=lambda config, time_us: f"{case.traffic_bytes / time_us / 1e6:7.3f}",
        limits=case.problem.limits,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norm.sweep", description=__doc__)
    parser.add_argument("--rows", default=None, help="regular expression for row ids (default: the group table)")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    target, device = targets.detect(), torch.device("cuda")
    chosen = [case for case in select(cases(), given.rows) if case.problem.scaling is Scaling.NONE]
    return sweep.run([contest(case, target, device) for case in chosen], given)


if __name__ == "__main__":
    sys.exit(main())
