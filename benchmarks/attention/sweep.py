# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the CuTe DSL kernels: `python -m benchmarks.attention.sweep decode --rows 'hd128.*'`.

Each line has the row, microseconds, TB/s or TFLOP/s, and the configuration. The fastest is first; the configuration
that dispatch chooses is marked.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from dsl_backend.attention import dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.tuned import TUNABLE, config_of
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

from .. import sweep, timing
from ..case import Case
from ..check import BF16_LIMITS, FP8_LIMITS
from ..sweep import Contest, Ready
from . import inputs, oracle, rows
from .problems import Problem

KINDS = {
    "decode": (Operation.DECODE, rows.decode_cases),
    "mla-decode": (Operation.MLA_DECODE, rows.latent_cases),
    "prefill": (Operation.PREFILL, rows.prefill_cases),
    "mla-prefill": (Operation.PREFILL, rows.packed_cases),
}


def runner(kernel: Any, made: inputs.Inputs, fp8: bool) -> Callable[[int], torch.Tensor]:
    """Launches a layer."""
    scale = made.one if fp8 else None
    launch = kernel.bind(made.batch, 0, made.batch.max_query_len)

    def run(index: int) -> torch.Tensor:
        layer = made.layers[index]
        launch(Operands(layer.q, None, layer.keys, layer.values, layer.out, None, None, None, scale, scale))
        return layer.out

    return run


def contest(
    operation: Operation, case: Case[Problem], target: Target, device: torch.device, kernel: str = "cute"
) -> Contest:
    """All configurations of the CuTe DSL kernel that serves a case.

    Args:
        kernel: its name in the dispatch table.

    Raises:
        Unsupported: no CuTe DSL kernel serves the case.
    """
    problem, spec = case.problem, case.problem.spec
    kind = dispatch.choose(operation, spec, target, kernel).load()
    variants = TUNABLE[kind.default].variants(spec, target.smem_bytes)

    def precompile_spec(config: Any) -> PrecompileSpec:
        key = kind(spec, target, Workspace(torch.device("cpu")), config).key(False, None)
        return PrecompileSpec("attention", kind.build, key, target)

    def prepare() -> Ready:
        layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        made = inputs.build(problem, layers, device, 0)
        expected = oracle.reference(problem, made, layers - 1)
        workspace = Workspace(device)
        return Ready(
            lambda config: runner(kind(spec, target, workspace, config), made, problem.is_fp8_kv),
            [layer.out for layer in made.layers],
            expected,
        )

    def note(config: Any, time_us: float) -> str:
        return f"{(case.flops if operation is Operation.PREFILL else case.traffic_bytes) / time_us / 1e6:7.2f}"

    return Contest(
        name=case.id,
        parameters=problem.parameters,
        configs=sweep.unique((kind.default(spec), *variants)),
        chosen=config_of(spec, target, kind.default),
        precompile_spec=precompile_spec,
        prepare=prepare,
        note=note,
        limits=FP8_LIMITS if kernel == dispatch.FP8_PRODUCTS else BF16_LIMITS,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.sweep", description=__doc__)
    parser.add_argument("operation", choices=tuple(KINDS))
    parser.add_argument("--rows", default=None, help="regular expression for row ids (default: the group table)")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    operation, cases = KINDS[given.operation]
    chosen = sweep.rows_of(cases(16), given.rows, parser)
    target, device = targets.detect(), torch.device("cuda")
    return sweep.run([contest(operation, case, target, device) for case in chosen], given)


if __name__ == "__main__":
    sys.exit(main())
