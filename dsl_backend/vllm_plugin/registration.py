# SPDX-License-Identifier: Apache-2.0
"""What vLLM runs in each of its processes: the name `DSL` in its two enums of attention backends.

This module is imported by unpickling too, in a child process that has loaded nothing yet. It imports neither torch nor
any kernel.
"""

import enum
from collections.abc import Callable
from typing import Any

from dsl_backend.log import logger

NAME = "DSL"
ROUTER = "dsl_backend.vllm_plugin.backend_selector.DSLRouter"
MLA_PREFILL = "dsl_backend.vllm_plugin.mla_prefill.DSLPrefillBackend"


def add_member(members: type[enum.Enum], value: str, restore: Callable[[], enum.Enum]) -> enum.Enum:
    """The enum's member NAME, made by hand where it is missing.

    `compat` has the reasons for both halves: 0.26 has no way to add a member, and no version's members survive a
    spawned child.

    Args:
        value: import path of the backend's class.
        restore: a top-level function that returns the member; unpickling calls it.
    """
    existing = members._member_map_.get(NAME)
    if existing is not None:
        return existing
    member: Any = object.__new__(members)
    member._name_ = NAME
    member._value_ = value
    member.__objclass__ = members
    member._sort_order_ = len(members._member_names_)
    member.__reduce_ex__ = lambda protocol: (restore, ())
    type.__setattr__(members, NAME, member)
    members._member_names_.append(NAME)
    members._value2member_map_[value] = member
    # Last: whoever finds the name in the map finds a finished member.
    members._member_map_[NAME] = member
    return member


def ensure_member() -> enum.Enum:
    """AttentionBackendEnum.DSL of vLLM, created where it is missing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return add_member(AttentionBackendEnum, ROUTER, ensure_member)


def ensure_prefill_member() -> enum.Enum:
    """MLAPrefillBackendEnum.DSL of vLLM, created where it is missing."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    return add_member(MLAPrefillBackendEnum, MLA_PREFILL, ensure_prefill_member)


def hook_cpu_platform() -> None:
    """Let the CPU platform choose DSL when it is asked for; nothing on other platforms."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from dsl_backend.vllm_plugin import cpu_platform

        cpu_platform.install(type(current_platform))


def hook_engine_config() -> None:
    """Have what is asked of DSL checked before vLLM starts a process for it."""
    from dsl_backend.vllm_plugin import startup

    startup.install()


def register() -> None:
    """Entry point of `vllm.general_plugins`. May run any number of times, and never raises.

    An exception here would end every vLLM process of the environment, those without DSL included. What is wrong is said
    when an engine's configuration is made (`startup`): refused where DSL is asked for, else a line in the log.
    """
    attempt(ensure_member)
    attempt(ensure_prefill_member)
    attempt(hook_cpu_platform)
    attempt(hook_engine_config)


# Steps of the registration that this vLLM does not take, with what it said.
failures: dict[str, str] = {}


def attempt(step: Callable[[], object]) -> None:
    """Run a step of the registration; a failure is one line in the log, is kept, and goes no further."""
    try:
        step()
        failures.pop(step.__name__, None)
    except Exception as error:
        failures[step.__name__] = f"{type(error).__name__}: {error}"
        logger.warning("%s failed, --attention-backend dsl will not be served: %s", step.__name__, error)
