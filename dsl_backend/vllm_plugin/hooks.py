# SPDX-License-Identifier: Apache-2.0
"""Everything that the plugin changes in vLLM: one list, and the one function that installs it.

The list is data: it can be read without vLLM, torch or a kernel. `compat` has the differences between versions.
"""

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsl_backend.log import logger


class Stage(enum.Enum):
    """When hooks are installed, and why not earlier."""

    REGISTRATION = "when vLLM loads its plugins, in each of its processes"
    # The worker has then imported its runner and its model loader; no other process is changed.
    FIRST_LAYER = "when the first attention layer that dsl serves is made"
    # Needs the engine's configuration (vllm_config); a draft model has one of its own.
    METADATA_BUILDER = "when a metadata builder of dsl is made"


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One change to vLLM.

    Attributes:
        changes: what is different in vLLM once the hook is installed.
        why: what vLLM does that makes the hook needed.
        versions: of vLLM that need it, as text.
        remove_when: what must have happened for the hook to go.
        stage: when it is installed.
        install: `module:function` below `dsl_backend.vllm_plugin`. Takes the arguments that its stage gives to
            `install_hooks`. A second call changes nothing.
        needed: `module:function` that says whether the installed vLLM needs the hook.
    """

    name: str
    changes: str
    why: str
    versions: str
    remove_when: str
    stage: Stage
    install: str
    needed: str


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="attention_member",
        changes="AttentionBackendEnum has a member DSL; its value is the import path of DSLBackendSelector",
        why="--attention-backend takes the names of that enum's members",
        versions="all",
        remove_when="vLLM takes attention backends from entry points",
        stage=Stage.REGISTRATION,
        install="enum_members:ensure_member",
        needed="compat:backends_are_enum_members",
    ),
    Hook(
        name="mla_prefill_member",
        changes="MLAPrefillBackendEnum has a member DSL; its value is the import path of DSLPrefillBackend",
        why="attention_config.mla_prefill_backend takes members of that enum",
        versions="all",
        remove_when="vLLM takes MLA prefill backends from entry points",
        stage=Stage.REGISTRATION,
        install="enum_members:ensure_prefill_member",
        needed="compat:backends_are_enum_members",
    ),
    Hook(
        name="cpu_selection",
        changes="CpuPlatform.get_attn_backend_cls is wrapped: it returns dsl's backend when DSL is selected",
        why="the CPU platform returns its own backends whatever is selected, and validates nothing",
        versions="all",
        remove_when="the CPU platform asks the selected backend's class as the CUDA platform does",
        stage=Stage.REGISTRATION,
        install="cpu_platform:install",
        needed="compat:cpu_platform_ignores_the_choice",
    ),
    Hook(
        name="engine_config",
        changes="EngineArgs.create_engine_config is wrapped: it refuses what is asked of DSL and cannot be served",
        why="vLLM asks a plugin about a configuration only when a worker loads the model; a refusal there ends in "
        "several tracebacks, of which the first has the reason",
        versions="all",
        remove_when="vLLM asks the selected backend when it makes the engine's configuration",
        stage=Stage.REGISTRATION,
        install="startup:install",
        needed="compat:configurations_are_not_validated",
    ),
    Hook(
        name="samplers",
        changes="two methods of each GPUModelRunner class are wrapped: the first call replaces the class of the "
        "runner's sampler. On the V1 runner a compat.Seed replaces each request's torch.Generator",
        why="a runner makes its sampler itself, of a class that it imports by name, before or after there is a model",
        versions="all",
        remove_when="a plugin can give a runner its sampler",
        stage=Stage.FIRST_LAYER,
        install="sampler.replace:install",
        needed="compat:runners_choose_their_sampler",
    ),
    Hook(
        name="loaded_models",
        changes="process_weights_after_loading is wrapped in the modules that load models: it first fuses gate/up "
        "projections and their activations, by replacing a quant_method and a module of the model, replaces the "
        "quant_method of other projections, the kernels of fp8 layers' methods (fp8_linear), what norms call "
        "(_forward_method) and the forward of attention modules, and sets the class of routed experts' kernels "
        "(quant_method.experts_cls)",
        why="a projection and its activation are two modules, which a plugin can replace one by one and not as a pair; "
        "vLLM's oracles choose experts' kernels from fixed lists; that function is the first that is given a whole "
        "model, before weights are packed and kernels are made",
        versions="all",
        remove_when="vLLM hands models to plugins when they are made, or fuses such pairs itself and takes experts' "
        "kernels from plugins",
        stage=Stage.FIRST_LAYER,
        install="loaded_models:install",
        needed="compat:loaders_process_by_name",
    ),
    Hook(
        name="compilation_keys",
        changes="vllm.envs.environment_variables has one more entry: the changed layers of this process",
        why="the keys of cached compiled graphs hold vLLM's configuration and environment variables, and not what a "
        "plugin did to a model",
        versions="all",
        remove_when="vLLM takes factors of these keys from plugins",
        stage=Stage.FIRST_LAYER,
        install="loaded_models:extend_compilation_keys",
        needed="compat:compilations_are_keyed_by_environment",
    ),
    Hook(
        name="sleep",
        changes="CuMemAllocator.wake_up is wrapped: calls are counted",
        why="metadata builders are made while the allocator's pool of KV caches is open, so their scratch lies in it. "
        "Sleep frees the pool; counters that kernels leave at 0 then hold arbitrary values",
        versions="all that have sleep mode",
        remove_when="vLLM tells plugins of sleep, or makes builders outside the pool",
        stage=Stage.FIRST_LAYER,
        install="compat:watch_sleep",
        needed="compat:sleep_frees_what_it_does_not_keep",
    ),
    Hook(
        name="warm_up",
        changes="vLLM's registry of CuTe DSL warm-ups has one more provider; nothing is replaced",
        why="vLLM compiles the kernels of registered providers before it captures graphs",
        versions="those with cutedsl_warmup; 0.26 has no registry, and the hook compiles at once",
        remove_when="the oldest supported vLLM has VllmCuTeDSLJitKernel, or the registry is gone",
        stage=Stage.METADATA_BUILDER,
        install="warm_up:install",
        needed="compat:providers_are_asked",
    ),
)

# Hooks of the registration that could not be installed: name -> error.
failures: dict[str, str] = {}


def install_hooks(stage: Stage, *arguments: Any) -> None:
    """Install the hooks of a stage; a second call changes nothing.

    At REGISTRATION a hook that fails is logged and kept in `failures`, and no exception leaves: it would end vLLM
    processes that do not use DSL. At later stages exceptions leave.

    Args:
        arguments: of the hooks; `vllm_config` at METADATA_BUILDER, else none.
    """
    for hook in HOOKS:
        if hook.stage is not stage:
            continue
        if stage is Stage.REGISTRATION:
            attempt(hook)
        else:
            resolve(hook.install)(*arguments)


def attempt(hook: Hook) -> None:
    """Install a hook; a failure is one line in the log, is kept, and raises nothing."""
    try:
        resolve(hook.install)()
        failures.pop(hook.name, None)
    except Exception as error:
        failures[hook.name] = f"{type(error).__name__}: {error}"
        logger.warning("hook %s failed, --attention-backend dsl will not be served: %s", hook.name, error)


def resolve(reference: str) -> Callable[..., Any]:
    """The function of a `module:function` below `dsl_backend.vllm_plugin`."""
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"dsl_backend.vllm_plugin.{module}"), name)
    return function


def lines() -> list[str]:
    """The list as text, without vLLM."""
    return [
        line
        for hook in HOOKS
        for line in (
            f"{hook.name}: {hook.changes}",
            f"  why          {hook.why}",
            f"  installed    {hook.stage.value}",
            f"  vLLM         {hook.versions}",
            f"  remove when  {hook.remove_when}",
        )
    ]
