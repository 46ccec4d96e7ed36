# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels in processes of their own from the moment that a worker's model is made, while weights load.

The kernels of attention are known exactly when its layers are made. Other kernels are predicted from the model's
configuration then; linear layers that turn out to be others are added when they are fused. Whatever is not ready when
it is needed is waited for, or compiled by the worker itself: nothing depends on a prediction.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from dsl_backend import envs
from dsl_backend.attention.rope_spec import AnySpec
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.experts import precompile as experts_precompile
from dsl_backend.experts import tuned
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear import precompile as linear_precompile
from dsl_backend.linear.scaled import precompile as scaled_precompile
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.weight_only import precompile as weight_only_precompile
from dsl_backend.log import logger
from dsl_backend.norm import precompile as norm_precompile
from dsl_backend.norm.spec import NormSpec
from dsl_backend.runtime import family as families
from dsl_backend.runtime import model, precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.compile_process import one_line
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat, options
from dsl_backend.vllm_plugin.fused_mlp.find import reasons_against_engine
from dsl_backend.vllm_plugin.options import ServedBy
from dsl_backend.vllm_plugin.validation import kernel_for_keys

SpecT = TypeVar("SpecT")
# (id of the engine's configuration, what its layers need). A model has many layers, but few kinds of them.
_begun: set[tuple[Any, ...]] = set()


def compile_attention(
    vllm_config: Any, specs: Iterable[AttentionSpec], *, lse: bool = False, sinks: torch.dtype | None = None
) -> None:
    """Start compiling what a layer needs; with the first layer of a model, also what the rest of the model needs.

    Args:
        specs: of all batches that it will see.
        lse, sinks: as `attention.precompile.precompile_specs_of` has them.
    """
    wanted = tuple(specs)
    if vllm_config is None or vllm_config.model_config is None or not first_time(vllm_config, wanted, lse, sinks):
        return
    others = first_time(vllm_config)

    def precompile_specs(target: Target) -> Iterator[PrecompileSpec]:
        # Imports the planner.
        from dsl_backend.attention.precompile import precompile_specs_of

        kernel = options.of(vllm_config).attention_kernel
        for spec in wanted:
            named = kernel_for_keys(spec, kernel)
            yield from precompile_specs_of(spec, target, lse=lse, sinks=sinks, kernel=named)
        if others:
            yield from predicted(vllm_config, target)

    begin(vllm_config, precompile_specs, "while weights load")


def compile_linear(vllm_config: Any, specs: Iterable[LinearSpec], *, most_rows: int | None = None) -> None:
    """Start compiling what linear layers need and was not predicted, for any number of rows or up to so many."""
    compile_each(vllm_config, specs, partial(linear_precompile.precompile_specs_of, most_rows=most_rows))


def compile_scaled_linears(vllm_config: Any, layers: Iterable[tuple[Any, ...]]) -> None:
    """Start compiling what linear layers in 8 bits need: arguments of `scaled_precompile.precompile_specs_of` for each.

    They are known when the model is made; nothing is predicted.
    """
    compile_each(vllm_config, layers, scaled_units)


def scaled_units(layer: tuple[Any, ...], target: Target) -> Iterator[PrecompileSpec]:
    spec, kernel, ranges = layer
    return scaled_precompile.precompile_specs_of(spec, target, kernel, ranges)


def compile_weight_only_linears(vllm_config: Any, specs: Iterable[WeightOnlyGemmSpec]) -> None:
    """Start compiling what linear layers with packed weights need; nothing is predicted."""
    compile_each(vllm_config, specs, weight_only_precompile.precompile_specs_of)


def compile_experts(vllm_config: Any, layers: Iterable[tuple[ExpertsSpec, str | None]]) -> None:
    """Start compiling what routed experts need and was not predicted, each with the kernel that is named."""
    compile_each(vllm_config, layers, experts_units)


def experts_units(layer: tuple[ExpertsSpec, str | None], target: Target) -> Iterator[PrecompileSpec]:
    spec, kernel = layer
    return experts_precompile.precompile_specs_of(spec, target, kernel)


def compile_norms(vllm_config: Any, specs: Iterable[NormSpec]) -> None:
    """Start compiling what norms need, with the residual in front of them and without."""
    both = {replace(spec, residual=residual) for spec in specs for residual in (False, True)}
    compile_each(vllm_config, both, norm_precompile.precompile_specs_of)


def compile_rope(vllm_config: Any, specs: Iterable[AnySpec]) -> None:
    """Start compiling what rotates queries and keys and writes the cache, for the page size that is known so far."""
    compile_each(vllm_config, specs, rope_precompile_specs)


def rope_precompile_specs(spec: AnySpec, target: Target) -> Iterator[PrecompileSpec]:
    # Imports the planner.
    from dsl_backend.attention.precompile import rope_precompile_specs_of

    yield from rope_precompile_specs_of(spec, target)


def compile_each(
    vllm_config: Any, specs: Iterable[SpecT], precompile_specs_of: Callable[[SpecT, Target], Iterable[PrecompileSpec]]
) -> None:
    """Start compiling what layers of these specs need."""
    wanted = set(specs)
    begin(
        vllm_config,
        lambda target: (unit for spec in wanted for unit in precompile_specs_of(spec, target)),
        "while the engine starts",
    )


def first_time(vllm_config: Any, *facts: Any) -> bool:
    key = (id(vllm_config), *facts)
    if key in _begun:
        return False
    _begun.add(key)
    return True


def begin(vllm_config: Any, precompile_specs: Callable[[Target], Iterable[PrecompileSpec]], beside: str) -> None:
    """Have the first worker of a node compile for all of them; an error here does not end an engine."""
    try:
        target = targets.detect()
        if target.is_cpu or compat.local_rank() != 0:
            return
        ranks = vllm_config.parallel_config.tensor_parallel_size
        precompile.ahead.add(precompile_specs(target), spare=ranks, beside=beside)
    except Exception as error:  # the worker compiles what it needs, and says what is wrong
        logger.warning("kernels are not compiled ahead of their use: %s", one_line(error))


def predicted(vllm_config: Any, target: Target) -> Iterator[PrecompileSpec]:
    """What a model needs besides attention, predicted from its configuration."""
    settings = vllm_config.model_config
    shape = model.shape_of(
        settings.hf_text_config.to_dict(),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        dtype=str(settings.dtype),
    )
    if getattr(vllm_config, "quant_config", None) is None and not reasons_against_engine(vllm_config):
        for spec in linear_precompile.layer_specs(shape, batch_invariant=compat.is_batch_invariant()):
            yield from linear_precompile.precompile_specs_of(spec, target)
    ranks, named = expert_ranks(vllm_config.parallel_config), options.of(vllm_config).experts_kernel
    with_experts = replace(shape, expert_parallel=ranks, experts_kernel=named)
    experts = experts_precompile.spec_of(with_experts)
    if isinstance(experts, ExpertsSpec) and predicts_experts(vllm_config, experts, target):
        yield from experts_precompile.precompile_specs(with_experts, target)
    wanted = [one.name for one in families.load_all() if one.warm_up]
    if envs.SAMPLER.read() and vllm_config.speculative_config is None:
        wanted.append("sampling")
    if wanted:
        yield from families.precompile_specs(shape, target, wanted)


def expert_ranks(parallel: Any) -> int:
    """Ranks that share the routed experts of a model, whole ones; 1 where they share each expert."""
    shared = getattr(parallel, "enable_expert_parallel", False)
    return parallel.tensor_parallel_size * parallel.data_parallel_size if shared else 1


def predicts_experts(vllm_config: Any, spec: ExpertsSpec, target: Target) -> bool:
    """Whether a model's routed experts will probably be served as the configuration has them."""
    served_by = options.of(vllm_config).experts
    if served_by is ServedBy.VLLM or vllm_config.lora_config is not None:
        return False
    if getattr(vllm_config, "quant_config", None) is not None and spec.weight is None:
        return False
    return served_by is ServedBy.DSL or bool(tuned.faster(spec, target))
