# SPDX-License-Identifier: Apache-2.0
"""The classes of routed experts that `dsl-backend tune` compares: this package's kernels with vLLM's Triton kernels.

Where this package wins, a server has it serve these numbers of tokens.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from dsl_backend.experts import dispatch, precompile, scaled_configs
from dsl_backend.experts.configs import choose
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.experts.tuned import TUNED_CONFIGS, WEIGHTS, Ours, Theirs, problem_of
from dsl_backend.quant.format import BLOCK_SCALED
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target

from .. import timing
from ..sweep import Class, Contest, Ready
from .problems import Problem, build, reference
from .providers import ours, vllm_objections, vllm_triton
from .rows import FP8_MODELS, MODELS

# The largest number of tokens of each class; a class starts after the previous one, and both its ends are timed.
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 16384)


def layers(model: ModelShape | None) -> list[dict[str, Any]]:
    """The experts of the benchmark's models, in 16 bits and in e4m3 blocks, or those of one model."""
    if model is None:
        return [*MODELS.values(), *(MODELS[name] | {"weight": BLOCK_SCALED} for name in FP8_MODELS)]
    spec = precompile.spec_of(model)
    if not isinstance(spec, ExpertsSpec) or spec.weight not in WEIGHTS:
        return []
    sizes = {"experts": spec.num_experts, "hidden": spec.hidden_size, "width": spec.intermediate_size}
    return [{**sizes, "topk": spec.topk, "dtype": spec.dtype, "weight": spec.weight}]


def contest(problem: Problem, target: Target, device: torch.device) -> Contest:
    """VLLM's kernels, then this package's."""

    def prepare() -> Ready:
        copies = timing.layers_needed(problem.traffic_bytes, timing.l2_bytes(device))
        inputs = build(problem, copies, device, 0)

        def run_of(config: Any) -> Callable[[int], torch.Tensor]:
            return ours(problem, inputs) if isinstance(config, Ours) else vllm_triton(problem, inputs)

        outputs = [layer.out for layer in inputs.layers]
        return Ready(run_of, outputs, reference(problem, inputs, copies - 1))

    def precompile_spec(config: Any) -> PrecompileSpec | None:
        if isinstance(config, Theirs):
            return None
        # Imports CuTe DSL.
        from dsl_backend.experts.cute import host, scaled_host

        spec = problem.spec
        if spec.weight is None:
            return PrecompileSpec("experts", host.build, host.key_of(spec, choose(spec, problem.m, target)), target)
        scaled = scaled_configs.choose(spec, problem.m, target)
        return PrecompileSpec("experts", scaled_host.build, scaled_host.key_of(spec, scaled), target)

    return Contest(
        name=f"{problem.m} {problem.experts}x{problem.hidden}x{problem.width}",
        parameters=problem.parameters,
        configs=(Theirs(), Ours()),
        chosen=Ours(),
        precompile_spec=precompile_spec,
        prepare=prepare,
        limits=problem.limits,
    )


def classes(target: Target, device: torch.device, model: ModelShape | None) -> list[Class]:
    """The classes that a CuTe DSL kernel serves, where vLLM is installed."""
    found = []
    for sizes, (before, most) in itertools.product(layers(model), itertools.pairwise((0, *TOKENS))):
        ends = [Problem(m=m, **sizes) for m in dict.fromkeys((before + 1, most))]
        spec = ends[0].spec
        objections = dispatch.cute if spec.weight is None else dispatch.cute_scaled
        if not vllm_objections(ends[0]) and not objections(spec, target):
            of_shape = problem_of(spec, target.sm_count).of_rows(before + 1, most)
            contests = tuple(contest(problem, target, device) for problem in ends)
            found.append(Class(TUNED_CONFIGS, of_shape, contests))
    return found
