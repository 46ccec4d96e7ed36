# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the CuTe DSL kernels: `python -m benchmarks.linear.sweep --shapes llama-8b --rows 1,64`.

Each line has rows, n, k, microseconds, the estimate of `configs.choose`, and the configuration. The fastest is first;
the configuration that dispatch chooses is marked. Each layer is also timed with cuBLAS, and the activation's kernel.
`--drawn SEED` has layers that are drawn as held-out rows are: what `fit` fits the cost model to.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.configs import choose, estimate_us, fitting, variants
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.linear.tuned import Unfused, config_of, replaces
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

from .. import sweep, timing
from ..held_out import random_rows
from ..sweep import Contest, Ready
from .problems import Inputs, Problem, build, reference
from .providers import cublas
from .rows import MAIN, PROJECTIONS, TOKENS

SHAPES = MAIN | PROJECTIONS


def runner(problem: Problem, inputs: Inputs, config: Any, target: Target, workspace: Workspace) -> Callable[[int], Any]:
    """Launches a layer."""
    # Imports CuTe DSL.
    from dsl_backend.gemm import host

    function = host.build(host.key_of(problem.spec, config), target)
    ctas = max_ctas(config, problem.m, target)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        host.run(function, config, GemmOperands(layer.x, layer.weight, None, None, layer.out), ctas, workspace)
        return layer.out

    return run


def likely(problem: Problem, target: Target, most: int) -> list[Any]:
    """The configurations with the least estimates of those that dispatch chooses among, at most `most`."""
    estimates = {
        config: estimate_us(config, problem.spec, problem.m, target) for config in fitting(problem.spec, target)
    }
    finite = [config for config, us in estimates.items() if us < float("inf")]
    return sorted(finite, key=lambda config: estimates[config])[:most]


def contest(problem: Problem, target: Target, device: torch.device, configs: Iterable[Any] | None = None) -> Contest:
    """Configurations, and the kernels that vLLM runs; with those, a product's own are compared.

    Args:
        configs: by default all that are worth a measurement.
    """
    tried = variants(problem.spec, problem.m, target) if configs is None else configs
    best = choose(problem.spec, problem.m, target)
    default: Any = best if problem.gated else Unfused()
    of_ours = problem.gated or replaces(problem.m, problem.n, problem.k, problem.dtype, target)

    def prepare() -> Ready:
        layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(problem, layers, device, 0)
        workspace = Workspace(device)

        def run_of(config: Any) -> Callable[[int], torch.Tensor]:
            if isinstance(config, Unfused):
                return cublas(problem, inputs)
            return runner(problem, inputs, config, target, workspace)

        outputs = [layer.out for layer in inputs.layers]
        return Ready(run_of, outputs, reference(problem, inputs, layers - 1))

    def precompile_spec(config: Any) -> PrecompileSpec | None:
        from dsl_backend.gemm import host

        if isinstance(config, Unfused):
            return None
        return PrecompileSpec("linear", host.build, host.key_of(problem.spec, config), target)

    def note(config: Any, time_us: float) -> str:
        if isinstance(config, Unfused):
            return " " * 19
        return f"{estimate_us(config, problem.spec, problem.m, target):9.2f} estimated"

    return Contest(
        name=f"{problem.m} {problem.n}x{problem.k}",
        parameters=problem.parameters,
        configs=sweep.unique((default, best, *tried, Unfused())),
        chosen=config_of(problem.spec, problem.m, target) if of_ours else default,
        precompile_spec=precompile_spec,
        prepare=prepare,
        note=note,
    )


def named(shapes: str, rows: str) -> Iterator[Problem]:
    """Problems of the options `--shapes` and `--rows`.

    Raises:
        ValueError: a shape is neither a name nor NxK, or a number of rows is none.
    """
    for name, m in itertools.product(shapes.split(","), rows.split(",")):
        if name not in SHAPES and not re.fullmatch(r"\d+x\d+", name):
            raise ValueError(f"--shapes has {name!r}: NxK and {', '.join(SHAPES)} are possible")
        if not m.isdecimal() or int(m) == 0:
            raise ValueError(f"--rows has {m!r}, which is not a number of rows")
        n, k = SHAPES[name] if name in SHAPES else tuple(map(int, name.split("x")))
        yield Problem(m=int(m), n=n, k=k)


def chosen_problems(given: argparse.Namespace) -> Iterator[Problem]:
    """Those of `--shapes` and `--rows`, or of `--drawn`."""
    if given.drawn is None:
        yield from named(given.shapes, given.rows)
    else:
        yield from (problem for _, problem in random_rows.problems("linear", 0, given.drawn))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear.sweep", description=__doc__)
    parser.add_argument("--shapes", default=",".join(MAIN), help="comma-separated names of models, or shapes NxK")
    parser.add_argument("--rows", default=",".join(map(str, TOKENS)))
    parser.add_argument("--drawn", type=int, metavar="SEED", help="layers and rows drawn from a seed instead")
    parser.add_argument("--plain", action="store_true", help="no activation")
    parser.add_argument("--most", type=int, help="time so many configurations that dispatch may choose (default: all)")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    try:
        problems = [dataclasses.replace(problem, gated=not given.plain) for problem in chosen_problems(given)]
    except ValueError as error:
        parser.error(str(error))
    target, device = targets.detect(), torch.device("cuda")

    def configs(problem: Problem) -> list[Any] | None:
        return None if given.most is None else likely(problem, target, given.most)

    return sweep.run([contest(problem, target, device, configs(problem)) for problem in problems], given)


if __name__ == "__main__":
    sys.exit(main())
