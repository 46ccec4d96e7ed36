# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernels are compiled while vLLM warms up, and whoever compiles one later is counted.

vLLM asks providers for what they have to compile, before it captures graphs; it holds them weakly. That warm-up is over
is seen and not told: nothing of vLLM is replaced.
"""

from collections.abc import Iterator
from typing import Any

from dsl_backend import families
from dsl_backend.errors import InvalidInput
from dsl_backend.linear.precompile import units_of
from dsl_backend.log import logger
from dsl_backend.runtime import model, precompile
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.compiles import compiles
from dsl_backend.runtime.precompile import Unit
from dsl_backend.vllm_plugin import compat, linking

# Attention's are compiled by metadata builders, which know the cache, the sampler's with its plans where it is taken
# over, and vLLM calls no softmax of ours. Of linear layers those are asked for that were linked, and not those that a
# model of this shape may have.
ELSEWHERE = ("attention", "sampling", "softmax", "linear")


class Provider:
    """What vLLM asks for units to compile."""

    def __init__(self) -> None:
        # A draft model has one of its own.
        self.configs: list[Any] = []

    def get_cutedsl_warmup_compile_units(self) -> Iterator[Any]:
        """VLLM's name for it, and its type of units."""
        from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit

        for config in self.configs:
            for unit in units(config):
                yield CuTeDSLCompileUnit(name=f"dsl.{unit.family}", key=str(unit), compile=unit.compile)


# vLLM's reference to it is weak.
_provider = Provider()


def units(vllm_config: Any) -> list[Unit]:
    """The kernels that the model needs on the GPU at hand; none, and a line in the log, where its facts are not known.

    What is missed here is compiled by the first dummy run that needs it.
    """
    families.load_units()
    settings = vllm_config.model_config
    if settings is None:
        return []
    try:
        target = targets.detect()
        if target.is_cpu:
            return []
        linked = [unit for spec in linking.linked_specs() for unit in units_of(spec, target)]
        wanted = [name for name in precompile.families() if name not in ELSEWHERE]
        if not wanted:
            return linked
        shape = model.shape_of(
            settings.hf_text_config.to_dict(),
            tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
            dtype=str(settings.dtype),
        )
        return linked + precompile.units(shape, target, wanted)
    except InvalidInput as error:
        logger.warning("kernels are not compiled ahead of warm-up: %s", error)
        return []


def install(vllm_config: Any) -> None:
    """Take part in the warm-up of this process's worker, with the kernels of this model; again is no different."""
    compiles.watch(lambda: compat.warm_up_is_over(vllm_config))
    if any(config is vllm_config for config in _provider.configs):
        return
    _provider.configs.append(vllm_config)
    register = compat.warm_up_registry()
    if register is not None:
        register(_provider)
        return
    for unit in units(vllm_config):
        unit.compile()
