# SPDX-License-Identifier: Apache-2.0
"""The member DSL of vLLM's two enums of attention backends.

Unpickling imports this module too, in a child process that has loaded nothing yet: neither torch nor a kernel is
imported here.
"""

import enum
from collections.abc import Callable
from typing import Any

NAME = "DSL"
SELECTOR = "dsl_backend.vllm_plugin.backend_selector.DSLBackendSelector"
MLA_PREFILL = "dsl_backend.vllm_plugin.mla_prefill.DSLPrefillBackend"


def add_member(members: type[enum.Enum], value: str, restore: Callable[[], enum.Enum]) -> enum.Enum:
    """The member NAME of an enum, made by hand where it is missing.

    `compat` has the two reasons: vLLM 0.26 has no way to add a member, and in no version do added members survive the
    pickling to a spawned child.

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
    # Last: a thread that finds the name in the map finds a finished member.
    members._member_map_[NAME] = member
    return member


def ensure_member() -> enum.Enum:
    """AttentionBackendEnum.DSL of vLLM, created where it is missing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return add_member(AttentionBackendEnum, SELECTOR, ensure_member)


def ensure_prefill_member() -> enum.Enum:
    """MLAPrefillBackendEnum.DSL of vLLM, created where it is missing."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    return add_member(MLAPrefillBackendEnum, MLA_PREFILL, ensure_prefill_member)
