# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels while vLLM warms up, and counts those that are compiled later.

vLLM asks registered providers what to compile, before it captures graphs; its references to them are weak.
"""

from collections.abc import Iterator
from typing import Any

from dsl_backend.errors import InvalidInput
from dsl_backend.experts import dispatch as experts_dispatch
from dsl_backend.experts import precompile as experts_precompile
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.linear import dispatch
from dsl_backend.linear.precompile import precompile_specs_of
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.weight_only import precompile as weight_only_precompile
from dsl_backend.log import logger
from dsl_backend.norm import precompile as norm_precompile
from dsl_backend.runtime import family as families
from dsl_backend.runtime import model
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.compiles import compiles
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.ahead import scaled_units
from dsl_backend.vllm_plugin.fused_mlp.fuse import fused_specs
from dsl_backend.vllm_plugin.norms.serve import served_specs as norm_specs
from dsl_backend.vllm_plugin.projections.serve import most_rows
from dsl_backend.vllm_plugin.projections.serve import served_specs as projection_specs
from dsl_backend.vllm_plugin.routed_experts.serve import served_layers as experts_layers
from dsl_backend.vllm_plugin.scaled_linears.serve import served_layers as scaled_layers
from dsl_backend.vllm_plugin.weight_only_linears.serve import served_layers as weight_only_specs


class Provider:
    """Tells vLLM which units to compile."""

    def __init__(self) -> None:
        # A draft model has one of its own.
        self.configs: list[Any] = []

    def get_cutedsl_warmup_compile_units(self) -> Iterator[Any]:
        """VLLM's name for it, and its type of units."""
        from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit

        for config in self.configs:
            for unit in precompile_specs(config):
                yield CuTeDSLCompileUnit(name=f"dsl.{unit.family}", key=str(unit), compile=unit.compile)


# vLLM's reference to it is weak.
_provider = Provider()


def precompile_specs(vllm_config: Any) -> list[PrecompileSpec]:
    """The kernels that the model needs on this GPU; none, and a line in the log, where its facts are not known.

    What is missed here is compiled by the first dummy run that needs it.
    """
    settings = vllm_config.model_config
    if settings is None:
        return []
    try:
        target = targets.detect()
        if target.is_cpu:
            return []
        layers = [unit for spec in fused_specs() for unit in linear_units(spec, target)]
        for spec in projection_specs():
            layers += linear_units(spec, target, most_rows(spec.batch_invariant))
        layers += [unit for spec in norm_specs() for unit in norm_precompile.precompile_specs_of(spec, target)]
        layers += [unit for one in experts_layers() for unit in experts_units(*one, target)]
        layers += [unit for one in scaled_layers() for unit in scaled_units(one, target)]
        layers += [
            unit for spec in weight_only_specs() for unit in weight_only_precompile.precompile_specs_of(spec, target)
        ]
        wanted = [one.name for one in families.load_all() if one.warm_up]
        if not wanted:
            return layers
        shape = model.shape_of(
            settings.hf_text_config.to_dict(),
            tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
            dtype=str(settings.dtype),
        )
        return layers + families.precompile_specs(shape, target, wanted)
    except InvalidInput as error:
        logger.warning("kernels are not compiled ahead of warm-up: %s", error)
        return []


def linear_units(spec: LinearSpec, target: Target, most_rows: int | None = None) -> Iterator[PrecompileSpec]:
    """The kernels of a linear layer, Triton's too: this process has the GPU that Triton compiles for."""
    if dispatch.choose(spec, target).name != "triton":
        yield from precompile_specs_of(spec, target, most_rows)
        return
    # Imports Triton.
    from dsl_backend.linear.triton import gemm

    yield PrecompileSpec("linear", gemm.prepare, spec, target)


def experts_units(spec: ExpertsSpec, kernel: str | None, target: Target) -> Iterator[PrecompileSpec]:
    """The kernels of routed experts, Triton's too; those of weights in 8 bits are compiled by the first dummy run."""
    if experts_dispatch.choose(spec, target, kernel).name != "triton" or spec.weight is not None:
        yield from experts_precompile.precompile_specs_of(spec, target, kernel)
        return
    # Imports Triton.
    from dsl_backend.experts.triton import kernels

    yield PrecompileSpec("experts", kernels.prepare, spec, target)


def install(vllm_config: Any) -> None:
    """Register the kernels of this model for the warm-up of this process's worker. A second call changes nothing."""
    compiles.watch(lambda: compat.warm_up_is_over(vllm_config))
    if any(config is vllm_config for config in _provider.configs):
        return
    _provider.configs.append(vllm_config)
    register = compat.warm_up_registry()
    if register is not None:
        register(_provider)
        return
    for unit in precompile_specs(vllm_config):
        unit.compile()
