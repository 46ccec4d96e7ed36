# SPDX-License-Identifier: Apache-2.0
"""Times configurations of the SM90 kernels: `python -m benchmarks.attention.sweep decode --rows 'hd128.*'`.

What it finds is what `dsl_backend.attention.sm90.configs` should prefer. Each line: row, microseconds, TB/s or TFLOP/s,
the configuration; the fastest first, and the default marked.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator

import torch
from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.sm90 import latent_launch, launch
from dsl_backend.attention.sm90.configs import ForwardConfig, default_config, default_split_config
from dsl_backend.attention.sm90.latent_configs import LatentConfig, default_latent_config
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime import precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import Unit
from dsl_backend.runtime.target import Target

from .. import check, timing
from ..case import Case, Launch, Reference, select
from ..check import BF16_LIMITS
from . import inputs, oracle, rows
from .problems import Problem

SECONDS = 0.1
# Stages are the most that fit, and one less.
PREFILL = {
    64: ((3, 128), (3, 96), (2, 128), (2, 160), (2, 192), (2, 96)),
    128: ((2, 128), (2, 96), (2, 112), (2, 144), (2, 160), (2, 176), (3, 64), (3, 80)),
    192: ((2, 128), (2, 112), (2, 96), (2, 80), (2, 144)),
    256: ((2, 64), (2, 80), (2, 48)),
}
SPLIT_TILES = (32, 64, 96, 128, 160, 192)
LATENT_TILES = ((64, 2), (48, 2), (32, 3), (32, 4))  # and stages

Config = ForwardConfig | LatentConfig
Kernel = launch.Prefill | latent_launch.Latent


def latent_candidates(spec: AttentionSpec, target: Target) -> Iterator[Config]:
    default = default_latent_config(spec)
    yield default
    for (tile_n, stages), first, cluster, least in itertools.product(LATENT_TILES, (False, True), (1, 2), (1, 2, 4)):
        config = LatentConfig(tile_n=tile_n, stages=stages, scores_first=first, cluster=cluster, least_share=least)
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
        seen += [config for config in fitting[-2:] if config not in seen]
    yield from seen


def bound(spec: AttentionSpec, split: bool, config: Config, target: Target, workspace: Workspace) -> Kernel:
    if isinstance(config, LatentConfig):
        return latent_launch.LatentSplitKV(spec, target, workspace, config)
    return (launch.SplitKV if split else launch.Prefill)(spec, target, workspace, config)


def operands_of(layer: inputs.Layer) -> Operands:
    return Operands(layer.q, None, layer.keys, layer.values, layer.out, None, None, None, None, None)


def microseconds(kernel: Kernel, made: inputs.Inputs, expected: Reference) -> float:
    """Median of a launch, once its result in the last layer is as expected."""
    device, batch = made.batch.device, made.batch

    def run(index: int) -> torch.Tensor:
        layer = made.layers[index]
        kernel.launch(batch, operands_of(layer), 0, batch.max_query_len)
        return layer.out

    last = len(made.layers) - 1
    for index in range(last + 1):
        made.layers[index].out.fill_(torch.nan)
        run(index)
    timing.synchronize(device)
    check.require_right(made.layers[last].out, expected, BF16_LIMITS)
    timer = timing.make_timer(Launch(run), last + 1, device)
    began, samples = 0.0, []
    while began < 1e6 * SECONDS:
        samples.append(timer.sample())
        began += samples[-1] * max(1, last + 1)
    return timing.summarize(samples).median_us


def time_all(
    cases: list[Case[Problem]],
    tried: dict[str, list[Config]],
    split: bool,
    target: Target,
    workspace: Workspace,
    given: argparse.Namespace,
) -> None:
    """Print the candidates of every case, the fastest first."""
    device = workspace.device
    lines = given.json.open("w") if given.json else None
    for case in cases:
        layers = timing.layers_needed(case.problem.traffic_bytes, timing.l2_bytes(device))
        made = inputs.build(case.problem, layers, device, 0)
        expected = oracle.reference(case.problem, made, layers - 1)
        found: list[tuple[float, Config]] = []
        for config in tried[case.id]:
            try:
                kernel = bound(case.problem.spec, split, config, target, workspace)
                found.append((microseconds(kernel, made, expected), config))
            except (check.WrongResultError, RuntimeError) as error:  # noqa: PERF203 - each may fail alone
                print(f"{case.id} {config}: {error}", flush=True)
        for place, (time_us, config) in enumerate(sorted(found, key=lambda one: one[0])):
            default = config == tried[case.id][0]
            rate = case.traffic_bytes / time_us / 1e6 if split else case.flops / time_us / 1e6
            if place < given.best or default:
                print(f"{case.id:28} {time_us:9.2f} us {rate:7.2f} {'*' if default else ' '} {config}", flush=True)
            if lines:
                facts = {"us": time_us, "rate": rate, "default": default, **dataclasses.asdict(config)}
                lines.write(json.dumps({"row": case.id, **case.problem.parameters, **facts}) + "\n")
        del made, expected
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.sweep", description=__doc__)
    parser.add_argument("operation", choices=("decode", "mla-decode", "prefill", "mla-prefill"))
    parser.add_argument("--rows", default=None, help="regular expression of row names; by default the table's")
    parser.add_argument("--best", type=int, default=6, help="lines for each row")
    parser.add_argument("--json", type=pathlib.Path, help="write one JSON object a line, of everything")
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
        made = inputs.build(case.problem, 1, device, 0)
        for config in tried[case.id]:
            key = bound(case.problem.spec, split, config, target, workspace).key(operands_of(made.layers[0]))
            build = latent_launch.build if case.problem.latent else launch.build
            units[key] = Unit("attention", build, key, target)
    for outcome in precompile.run(list(units.values())):
        if outcome.error:
            print(f"not compiled: {outcome.unit}: {outcome.error}", flush=True)
    with timing.alone():
        time_all(cases, tried, split, target, workspace, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
