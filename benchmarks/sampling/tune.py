# SPDX-License-Identifier: Apache-2.0
"""The classes of sampling that `dsl-backend tune` tunes: vocabularies of the benchmark, or a model's.

A class is a range of rows that have the same candidates; both its ends are timed with each filter.
"""

from collections.abc import Callable, Iterator

import torch
from dsl_backend.checks import short
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch, precompile
from dsl_backend.sampling.candidates import named
from dsl_backend.sampling.configs import ClusterConfig, widest_vector
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.spec import SamplingSpec
from dsl_backend.sampling.tuned import TUNED_CONFIGS, config_of, problem_of

from .. import timing
from ..check import EXACT
from ..sweep import Class, Contest, Ready, compiled_by
from .problems import FILTERS, Layer, Problem, build, only_exact, reference, verdict
from .rows import VOCABULARIES, WHOLE_VOCAB

# With so many rows there is a CTA for each, or two: a range ends at each of these.
LARGE = (128, 256, 512, precompile.MAX_ROWS)
ALONE = "p"


def ranges(spec: SamplingSpec, target: Target, top_p_alone: bool) -> Iterator[tuple[int, int]]:
    """(first, last) of the ranges of up to MAX_ROWS rows that have the same candidates."""

    def defaults(rows: int) -> list[ClusterConfig]:
        """What candidates are made of."""
        kinds = (True, False) if top_p_alone else (False,)
        return [ClusterConfig.default(spec, target, rows, widest_vector(spec), alone) for alone in kinds]

    first = 1
    for rows in range(1, precompile.MAX_ROWS + 1):
        if rows in LARGE or defaults(rows) != defaults(rows + 1):
            yield first, rows
            first = rows + 1


def contest(problem: Problem, target: Target, device: torch.device) -> Contest:
    """The default and its candidates."""
    spec, alone = problem.spec, problem.filters == ALONE
    vector = widest_vector(spec)

    def prepare() -> Ready:
        from dsl_backend.sampling.cute import host

        layers = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(problem, layers, device, 0)
        outputs = [layer.tokens for layer in inputs.layers]

        def runner(config: ClusterConfig) -> Callable[[int], torch.Tensor]:
            function = host.build(host.key_of(spec, config), target)
            taken = [host.with_scratch(args_of(problem, layer), spec, config).tensors for layer in inputs.layers]

            def run(index: int) -> torch.Tensor:
                function(*taken[index])
                return inputs.layers[index].tokens

            return run

        def view(tokens: torch.Tensor) -> torch.Tensor:
            return verdict(inputs, layers - 1, only_exact(inputs, tokens))

        return Ready(runner, outputs, reference(problem, inputs, layers - 1), view)

    return Contest(
        name=f"{problem.filters}-{problem.rows}x{problem.vocab}",
        parameters=problem.parameters,
        configs=tuple(named(spec, target, problem.rows, vector, alone).values()),
        chosen=config_of(spec, target, problem.rows, vector, alone),
        precompile_spec=compiled_by("sampling", spec, target),
        prepare=prepare,
        limits=EXACT,
    )


def args_of(problem: Problem, layer: Layer) -> SampleArgs:
    """What a launch of a configuration without a second launch takes."""
    rows, device = problem.rows, layer.logits.device
    given = {name: value for name, value in vars(layer.parameters).items() if value is not None}
    off = {
        "top_k": torch.zeros(rows, dtype=torch.int32, device=device),
        "top_p": torch.ones(rows, device=device),
        "min_p": torch.zeros(rows, device=device),
    }
    return SampleArgs(logits=layer.logits, tokens=layer.tokens, **{**off, **given})


def specs(model: ModelShape | None) -> list[SamplingSpec]:
    if model is not None:
        return list(precompile.layer_specs(model))
    return [SamplingSpec(vocab=vocab) for vocab in (*VOCABULARIES, WHOLE_VOCAB)] + [
        SamplingSpec(vocab=WHOLE_VOCAB, dtype=torch.bfloat16)
    ]


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves."""
    found = []
    for spec in specs(model):
        if dispatch.cute(spec, target):
            continue
        for alone in (False, True):
            filters = [ALONE] if alone else [name for name in FILTERS if name != ALONE]
            for first, last in ranges(spec, target, alone):
                problems = [
                    Problem(rows=rows, vocab=spec.vocab, filters=name, dtype=short(spec.dtype))
                    for rows in dict.fromkeys((first, last))
                    for name in filters
                ]
                contests = tuple(contest(problem, target, device) for problem in problems)
                of_range = problem_of(spec, alone, target.sm_count).of_rows(first, last)
                found.append(Class(TUNED_CONFIGS, of_range, contests))
    return found
