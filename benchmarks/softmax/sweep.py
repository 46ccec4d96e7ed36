# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the CuTe DSL kernel: `python -m benchmarks.softmax.sweep --rows '64x128256'`.

The results show which configurations `dsl_backend.softmax.configs` should choose. Each line has the row, microseconds,
TB/s, and the configuration. The fastest is first; the default is marked.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator

import torch
from dsl_backend.rows import common_vector
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.softmax.candidates import named
from dsl_backend.softmax.configs import SoftmaxConfig, default_config, most_ctas, widest_vector
from dsl_backend.softmax.cute import host
from dsl_backend.softmax.spec import SoftmaxSpec

from .. import sweep, timing
from ..case import Case, select
from ..row_sweep import spreads
from ..sweep import Contest, Ready
from .problems import Problem, build, reference
from .rows import cases

FEWEST, MOST = 16, 128  # elements per thread
THREADS = (32, 64, 128, 256, 512, 1024)  # of a row in a CTA


def candidates(spec: SoftmaxSpec, smem_bytes: int) -> Iterator[SoftmaxConfig]:
    """The configurations that fit, the default first, each with as many CTAs per SM as the registers allow."""
    default = default_config(spec)
    yield from named(spec, smem_bytes).values()
    vector = widest_vector(spec)
    for vectors, threads, rows, cluster in spreads(spec.width, vector, THREADS, FEWEST, MOST):
        held = SoftmaxConfig(
            vector=vector,
            vectors_per_thread=vectors,
            threads_per_row=threads,
            rows_per_cta=rows,
            cluster=cluster,
        )
        again = dataclasses.replace(held, recompute=True)
        kept, most = (most_ctas(one, spec) for one in (held, again))
        found = [dataclasses.replace(held, ctas_per_sm=kept, use_pdl=use_pdl) for use_pdl in (True, False)]
        # Computing exponentials twice is useful only if more CTAs fit.
        found += [dataclasses.replace(again, ctas_per_sm=most, use_pdl=True)] if most > kept else []
        yield from (config for config in found if config != default and not config.objections(spec, smem_bytes))


def contest(case: Case[Problem], target: targets.Target, device: torch.device) -> Contest:
    spec = spec_of(case.problem)
    configs = sweep.unique(candidates(spec, target.smem_bytes))

    def prepare() -> Ready:
        layers = timing.layers_needed(case.problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(case.problem, layers, device, 0)
        outputs = [layer.out for layer in inputs.layers]

        def runner(config: SoftmaxConfig) -> Callable[[int], torch.Tensor]:
            function = host.build(host.key_of(spec, config), target)

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
        precompile_spec=lambda config: PrecompileSpec("softmax", host.build, host.key_of(spec, config), target),
        prepare=prepare,
        note=lambda config, time_us: f"{case.traffic_bytes / time_us / 1e6:7.3f}",
    )


def spec_of(problem: Problem) -> SoftmaxSpec:
    x = torch.empty(1, problem.width, dtype=problem.dtype)
    out = torch.empty(1, problem.width, dtype=problem.out_dtype)
    vector = common_vector(x, out)
    return SoftmaxSpec(
        width=problem.width, dtype=problem.dtype, out_dtype=problem.out_dtype, log=problem.log, vector=vector
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.softmax.sweep", description=__doc__)
    parser.add_argument("--rows", default=None, help="regular expression for row ids (default: the group table)")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    target, device = targets.detect(), torch.device("cuda")
    return sweep.run([contest(case, target, device) for case in select(cases(), given.rows)], given)


if __name__ == "__main__":
    sys.exit(main())
