# SPDX-License-Identifier: Apache-2.0
"""Refuses wrong options, and configurations that no kernel serves, before vLLM starts a process.

The checks run where vLLM makes the engine's configuration, in the process that the user started. Where another backend
is asked for, nothing is refused.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.log import logger, warning_once
from dsl_backend.vllm_plugin import hooks
from dsl_backend.vllm_plugin.enum_members import NAME

ENGINE_ARGUMENTS = "vllm.engine.arg_utils"
OLDEST, NEWEST = (0, 26), (0, 33)
ORDINARY_HEAD = 128


def install() -> None:
    """Wrap `EngineArgs.create_engine_config`, once.

    Only where its module is loaded: vLLM's workers load plugins too, and make no configuration.
    """
    module = sys.modules.get(ENGINE_ARGUMENTS)
    arguments = getattr(module, "EngineArgs", None)
    if arguments is not None and not hasattr(arguments.create_engine_config, "wrapped_by_dsl"):
        arguments.create_engine_config = checked(arguments.create_engine_config)


def checked(create: Callable[..., Any]) -> Callable[..., Any]:
    """`create_engine_config` that refuses what DSL is asked for and cannot do."""

    @functools.wraps(create)
    def create_engine_config(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not asked_for(self):
            warn()
            return create(self, *arguments, **keywords)
        refuse("this vLLM", unsupported_vllm())
        warn_of_untested_vllm()
        refuse("these options", wrong_options(self))
        config = create(self, *arguments, **keywords)
        refuse("this configuration", unserved(config))
        return config

    create_engine_config.wrapped_by_dsl = True  # type: ignore[attr-defined]
    return create_engine_config


def asked_for(arguments: Any) -> bool:
    """Whether vLLM's EngineArgs ask for DSL, for all layers or for some kind of them."""
    settings = getattr(arguments, "attention_config", None)
    if isinstance(settings, dict):
        backend, kinds = settings.get("backend"), settings.get("backend_per_kind")
    else:
        backend, kinds = getattr(settings, "backend", None), getattr(settings, "backend_per_kind", None)
    chosen = [getattr(arguments, "attention_backend", None), backend, *(kinds or {}).values()]
    return any(str(getattr(one, "name", one)).upper() == NAME for one in chosen)


def warn() -> None:
    """Log what would be refused if DSL were asked for."""
    problems = envs.problems()
    if problems:
        logger.warning("ignored, since --attention-backend dsl is not asked for: %s", "; ".join(problems))


def unsupported_vllm() -> list[str]:
    """Why DSL cannot work with this vLLM."""
    import vllm

    version = str(vllm.__version__)
    reasons = [] if (old := too_old(version)) is None else [old]
    return reasons + [f"vLLM {version}: hook {name} failed: {why}" for name, why in hooks.failures.items()]


def too_old(version: str) -> str | None:
    """Why a version of vLLM is not supported; None where it is, or is that of a checkout."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or ".dev" in version or (int(numbers[1]), int(numbers[2])) >= OLDEST:
        return None
    return f"vLLM {version} is older than {'.'.join(map(str, OLDEST))}, the oldest that is supported"


def warn_of_untested_vllm() -> None:
    """One line for a vLLM that is newer than what the package was tested with; it is served all the same."""
    import vllm

    if (newer := too_new(str(vllm.__version__))) is not None:
        warning_once(newer)


def too_new(version: str) -> str | None:
    """What to say of a version of vLLM that is newer than any that was tested; None of others."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"vLLM {version} is newer than {newest}: dsl was tested with {oldest} to {newest}"


def wrong_options(arguments: Any) -> list[str]:
    """What is wrong with the environment variables and with `--additional-config`."""
    from dsl_backend.runtime import target as targets
    from dsl_backend.vllm_plugin import options, validation

    problems = envs.problems()
    if not problems:
        try:
            target = validation.current_target()
            if not target.is_cpu:
                targets.overridden(target)
        except InvalidInput as error:
            problems.append(str(error))
    try:
        options.of(arguments)
    except ValueError as error:
        problems.append(str(error))
    return problems


def unserved(config: Any) -> list[str]:
    """Why no kernel serves a VllmConfig, as far as it can be told before there is a model.

    A layer may ask for more, such as attention sinks: that is refused when the model is loaded.
    """
    if getattr(config.attention_config.backend, "name", None) != NAME or config.model_config is None:
        return []
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    from dsl_backend.vllm_plugin.backend_selector import DSLBackendSelector

    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    try:
        with set_current_vllm_config(config):
            return DSLBackendSelector.reasons_against(device_capability=capability, **selection(config))
    except Exception as error:  # the configuration of an unusual model: its layers are judged by workers
        logger.debug("what is asked of dsl is not known before there is a model: %r", error)
        return []


def selection(config: Any) -> dict[str, Any]:
    """What vLLM's selection would ask about an ordinary layer of a VllmConfig."""
    from vllm import envs as vllm_envs
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    facts = {
        "head_size": model.get_head_size() or ORDINARY_HEAD,
        "dtype": model.dtype,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size if getattr(cache, "user_specified_block_size", False) else None,
        "use_mla": model.use_mla,
        "use_batch_invariant": bool(getattr(vllm_envs, "VLLM_BATCH_INVARIANT", False)),
        "use_pcp": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "use_dcp": getattr(parallel, "decode_context_parallel_size", 1) > 1,
    }
    known = {name: value for name, value in facts.items() if name in AttentionSelectorConfig._fields}
    return AttentionSelectorConfig(**known)._asdict()


def refuse(what: str, reasons: list[str]) -> None:
    """Raises ValueError with every reason, if there is any."""
    from dsl_backend.vllm_plugin import validation

    validation.refuse(what, reasons)
