# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the SM90 kernels: `python -m benchmarks.attention.sweep decode --rows 'hd128.*'`.

What it finds is what `dsl_backend.attention.sm90.configs` should prefer. Each line: row, microseconds, TB/s or TFLOP/s,
the configuration; the fastest first, and the default marked.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.sm90 import latent_launch, launch
from dsl_backend.attention.sm90.configs import ForwardConfig, default_config, default_split_config
from dsl_backend.attention.sm90.latent_configs import LatentConfig, default_latent_config
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import Unit
from dsl_backend.runtime.target import Target

from .. import sweep, timing
from ..case import Case, select
from . import inputs, oracle, rows
from .problems import Problem

# Stages are the most that fit; where key ranges are split, one less as well.
PREFILL = {
    64: ((3, 128), (3, 96), (2, 128), (2, 160), (2, 192)),
    128: ((2, 128), (2, 96), (2, 112), (2, 144), (2, 160), (2, 176)),
    192: ((2, 128), (2, 112), (2, 96), (2, 80), (2, 144)),
    256: ((2, 64), (2, 80), (2, 48)),
}
SPLIT_TILES = (32, 64, 96, 128)
LATENT_TILES = ((64, 2), (32, 4))  # and stages

Config = ForwardConfig | LatentConfig
Kernel = launch.Prefill | latent_launch.Latent


def latent_candidates(spec: AttentionSpec, target: Target) -> Iterator[Config]:
    default = default_latent_config(spec)
    yield default
    shapes = itertools.product(LATENT_TILES, (False, True), (1, 2), (0, 1, 2))
    for (tile_n, stages), first, cluster, ahead in shapes:
        config = LatentConfig(tile_n=tile_n, stages=stages, scores_first=first, cluster=cluster, ahead=ahead)
        if config != default and not config.objections(spec, target.smem_bytes):
            yield config


def candidates(spec: AttentionSpec, split: bool, target: Target) -> Iterator[Config]:
    """Configurations worth a try that fit, the default first."""
    if spec.latent:
        yield from latent_candidates(spec, target)
        return
    seen = [default_split_config(spec) if split else default_config(spec)]
    widest = max(spec.head_dim, spec.head_dim_v)
    shapes = PREFILL[next(width for width in PREFILL if width >= widest)]
    tiles = [(1, n) for n in SPLIT_TILES] if split else shapes
    for (groups, tile_n), resident, query_stages, turns in itertools.product(tiles, (1, 2), (1, 2), (False, True)):
        if (split and query_stages > 1) or (turns and groups != 2) or (resident == 2 and not split):
            continue
        made = [
            ForwardConfig(
                groups=groups,
                tile_n=tile_n,
                stages=stages,
                query_stages=query_stages,
                resident=resident,
                take_turns=turns,
            )
            for stages in range(2, 13)
        ]
        fitting = [config for config in made if not config.objections(spec, target.smem_bytes)]
        seen += [config for config in fitting[-2 if split else -1 :] if config not in seen]
    yield from seen


def bound(spec: AttentionSpec, split: bool, config: Config, target: Target, workspace: Workspace) -> Kernel:
    if isinstance(config, LatentConfig):
        return latent_launch.LatentSplitKV(spec, target, workspace, config)
    return (launch.SplitKV if split else launch.Prefill)(spec, target, workspace, config)


def operands_of(layer: inputs.Layer) -> Operands:
    return Operands(layer.q, None, layer.keys, layer.values, layer.out, None, None, None, None, None)


def runner(kernel: Kernel, made: inputs.Inputs) -> Callable[[int], torch.Tensor]:
    """Launches a layer."""

    def run(index: int) -> torch.Tensor:
        layer = made.layers[index]
        kernel.launch(made.batch, operands_of(layer), 0, made.batch.max_query_len)
        return layer.out

    return run


def time_case(case: Case[Problem], configs: list[Config], split: bool, target: Target, lines: sweep.Lines) -> None:
    spec, workspace = case.problem.spec, Workspace(torch.device("cuda"))
    layers = timing.layers_needed(case.problem.traffic_bytes, timing.l2_bytes(workspace.device))
    made = inputs.build(case.problem, layers, workspace.device, 0)
    expected = oracle.reference(case.problem, made, layers - 1)
    outputs = [layer.out for layer in made.layers]

    def timer(config: Config) -> timing.Timer:
        run = runner(bound(spec, split, config, target, workspace), made)
        return sweep.timer_of(run, outputs, expected)

    def note(config: Config, time_us: float) -> str:
        return f"{(case.traffic_bytes if split else case.flops) / time_us / 1e6:7.2f}"

    lines.time(case.id, case.problem.parameters, configs, configs[0], timer, note)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.sweep", description=__doc__)
    parser.add_argument("operation", choices=("decode", "mla-decode", "prefill", "mla-prefill"))
    parser.add_argument("--rows", default=None, help="regular expression of row names; by default the table's")
    sweep.add_arguments(parser)
    given = parser.parse_args()
    split = given.operation in ("decode", "mla-decode")
    make = {
        "decode": rows.decode_cases,
        "mla-decode": rows.latent_cases,
        "prefill": rows.prefill_cases,
        "mla-prefill": rows.packed_cases,
    }
    cases = [case for case in select(make[given.operation](16), given.rows) if not case.problem.is_fp8_kv]
    target, device = targets.detect(), torch.device("cuda")
    workspace = Workspace(device)
    tried = {case.id: list(candidates(case.problem.spec, split, target)) for case in cases}
    units = {}
    for case in cases:
        for config in tried[case.id]:
            key = bound(case.problem.spec, split, config, target, workspace).key(False, None)
            build = latent_launch.build if case.problem.latent else launch.build
            units[key] = Unit("attention", build, key, target)
    sweep.compile_all(units.values())
    lines = sweep.Lines(given)
    with timing.alone():
        for case in cases:
            time_case(case, tried[case.id], split, target, lines)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
