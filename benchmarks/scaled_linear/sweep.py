# SPDX-License-Identifier: Apache-2.0
"""Times configurations of SM90's kernels of e4m3 layers beside vLLM's own: `python -m benchmarks.scaled_linear.sweep`.

All of a row take turns, so that they have the same clock. Each launch has another layer's weights, as many layers as
L2 does not hold. The fastest is first; what dispatch chooses at present is marked. `--json` keeps every time.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm90 import scaled_configs as sm90
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.linear.scaled import tuned
from dsl_backend.linear.scaled.activated import activated
from dsl_backend.linear.scaled.eager import How, outputs
from dsl_backend.linear.scaled.tuned import Ours, Theirs
from dsl_backend.quant.reference import Quantized, dequantized
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

from .. import sweep, timing
from ..sweep import Contest, Ready
from .problems import Inputs, Problem, build, reference
from .providers import Product, cutlass_objections, cutlass_product, deep_gemm_objections, deep_gemm_product
from .rows import LAYERS, ROWS

# Configurations of a row besides what the cost model chooses.
MOST = 7


def candidates(problems: Sequence[Problem], target: Target, most: int = MOST) -> list[Any]:
    """The best ones by the cost model for any of some rows of a layer, one of each kind of kernel first; as records.

    None that would be chosen for none of the rows: its kernel is another one there by intention.
    """
    # Imports CuTe DSL, as functions below do.
    from dsl_backend.linear.scaled.cute.host import Choice, estimated_us

    found: list[Any] = []
    for problem in problems:
        spec = problem.spec
        specs = [spec, spec.in_float32] if spec.may_be_quantised_beside else [spec]
        every = [Choice(one, config) for one in specs for config in sm90.fitting(one, target.smem_bytes)]
        timed = [one for one in every if sm90.was_timed(one.spec, one.config, problem.m)]
        ranked = sorted(timed, key=lambda one: estimated_us(one, problem.m, target))
        of_kind = {kind_of(one): one for one in reversed(ranked)}
        first = sorted(of_kind.values(), key=ranked.index)
        found.append([tuned.recorded(one.config, wide=one.spec.wide) for one in dict.fromkeys([*first, *ranked])])
    # In turns, so that no row's are left out.
    longest = max(len(one) for one in found)
    merged = sweep.unique(one[place] for place in range(longest) for one in found if place < len(one))
    return [config for config in merged if all(runs(config, problem, target) for problem in problems)][:most]


def runs(config: Any, problem: Problem, target: Target) -> bool:
    """Whether a configuration can run a row: split-K cannot have a cluster for each of too many tiles."""
    from dsl_backend.linear.scaled.cute.host import estimated_us

    return estimated_us(choice_of(config, problem, target), problem.m, target) < float("inf")


def kind_of(choice: Any) -> tuple[Any, ...]:
    """What kernels differ in besides their tiles."""
    config: Any = choice.config
    if isinstance(config, SmallMTiles):
        return choice.spec.wide, config.stream_k
    return choice.spec.wide, config.turns, config.overlap, config.splits


def choice_of(config: Any, problem: Problem, target: Target) -> Any:
    """The kernel of a record's configuration."""
    from dsl_backend.linear.scaled.cute.host import Choice, estimated_best

    if isinstance(config, Ours):
        return estimated_best(problem.spec, problem.m, target)
    return Choice(problem.spec.in_float32 if config.wide else problem.spec, tuned.plain(config))


def ours(problem: Problem, inputs: Inputs, choice: Any, target: Target, workspace: Workspace) -> Callable[[int], Any]:
    """Launches of a choice's kernels."""
    from dsl_backend.linear.scaled.cute import host

    how = how_of(problem)
    launch = host.launch_of(problem.spec, choice, problem.m, target, workspace)

    def run(index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = inputs.layers[index]
        out, scale = outputs(layer.x.values, problem.n, how, layer.out_scale)
        launch(ScaledOperands(layer.x.values, layer.x.scale, layer.weight.values, layer.weight.scale, None, out, scale))
        return out, scale

    return run


def how_of(problem: Problem) -> How:
    return How(dtype=problem.spec.dtype, activation=problem.spec.activation, out_kind=problem.spec.out)


def theirs_product(problem: Problem) -> Callable[[Problem, Inputs], Product] | None:
    """The product that vLLM has for a layer; None where it has none here."""
    if problem.spec.weight.blocked and not deep_gemm_objections(problem):
        return deep_gemm_product
    return cutlass_product if not cutlass_objections(problem) else None


def theirs(problem: Problem, inputs: Inputs) -> Callable[[int], Any]:
    """VLLM's product; with an activation one launch behind it, as in vLLM's compiled graphs."""
    made = theirs_product(problem)
    assert made is not None
    product, how = made(problem, inputs), how_of(problem)

    def run(index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = inputs.layers[index]
        out = product(layer)
        return (out, None) if how.activation is None else activated(out, how, layer.out_scale)

    return run


def contest(problem: Problem, target: Target, device: torch.device, configs: Sequence[Any] | None = None) -> Contest:
    """VLLM's own, where there is one, then what the cost model chooses, then other configurations.

    Args:
        configs: others; by default the best by the cost model.
    """
    known = candidates([problem], target) if configs is None else configs
    first: list[Any] = [Ours()] if theirs_product(problem) is None else [Theirs(), Ours()]

    def prepare() -> Ready:
        layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(problem, layers, device, 0)
        workspace = Workspace(device)

        def run_of(config: Any) -> Callable[[int], Any]:
            if isinstance(config, Theirs):
                return theirs(problem, inputs)
            return ours(problem, inputs, choice_of(config, problem, target), target, workspace)

        def view(result: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
            out, scale = result
            kind = problem.spec.out
            if kind is None:
                return out
            assert scale is not None
            return dequantized(Quantized(out, scale, kind), torch.float32)

        # Every launch makes its own outputs.
        places = [torch.empty(1, device=device) for _ in range(layers)]
        return Ready(run_of, places, reference(problem, inputs, layers - 1), view)

    def precompile_spec(config: Any) -> PrecompileSpec | None:
        from dsl_backend.linear.scaled.cute import host

        return None if isinstance(config, Theirs) else host.precompile_spec(choice_of(config, problem, target), target)

    def note(config: Any, time_us: float) -> str:
        from dsl_backend.linear.scaled.cute.host import estimated_us

        if isinstance(config, Theirs):
            return " " * 19
        return f"{estimated_us(choice_of(config, problem, target), problem.m, target):9.2f} estimated"

    return Contest(
        name=f"{problem.m} {problem.n}x{problem.k}",
        parameters=problem.parameters,
        configs=sweep.unique((*first, *known)),
        chosen=Ours(),
        precompile_spec=precompile_spec,
        prepare=prepare,
        note=note,
        limits=problem.limits,
    )


def problems(pattern: str) -> Iterator[Problem]:
    """Rows whose name matches, by the number of rows, so that few of all layers come first."""
    for rows in ROWS:
        for layer, (n, k, gated) in LAYERS.items():
            for scheme in ("blocks", "channels"):
                if re.search(pattern, f"{layer}-{scheme}-{rows}"):
                    yield Problem(m=rows, n=n, k=k, scheme=scheme, gated=gated)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaled_linear.sweep", description=__doc__)
    parser.add_argument("--rows", nargs="*", default=[""], help="regular expressions, the rows of the first one first")
    parser.add_argument("--most", type=int, default=MOST, help=f"configurations besides the default (default: {MOST})")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    for pattern in given.rows:
        if not list(problems(pattern)):
            names = (
                f"{layer}-{scheme}-{rows}" for layer in LAYERS for scheme in ("blocks", "channels") for rows in ROWS
            )
            parser.error(f"no row matches {pattern!r}: choose from {', '.join(names)}")
    rows = sweep.unique(row for pattern in given.rows for row in problems(pattern))
    target, device = targets.detect(), torch.device("cuda")
    return sweep.run([contest(row, target, device, candidates([row], target, given.most)) for row in rows], given)


if __name__ == "__main__":
    sys.exit(main())
