# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's CPU platform select DSL: by itself it returns its own backends only."""

import functools
from typing import Any

from dsl_backend.vllm_plugin.enum_members import NAME


def install() -> None:
    """Wrap the CPU platform's selection, once; on other platforms do nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        wrap_selection(type(current_platform))


def wrap_selection(platform: type) -> None:
    """Wrap `get_attn_backend_cls` of a CPU platform class, once.

    Where another backend is selected, the wrapper calls the original with its arguments.
    """
    original = platform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]
    if hasattr(original, "wrapped_by_dsl"):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(cls: type, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(selected_backend, "name", None) != NAME:
            return original(cls, selected_backend, *args, **kwargs)
        from dsl_backend.vllm_plugin.backend_selector import DSLBackendSelector

        config = kwargs["attn_selector_config"] if "attn_selector_config" in kwargs else args[0]
        return DSLBackendSelector.path_on_cpu(config)

    get_attn_backend_cls.wrapped_by_dsl = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)  # type: ignore[attr-defined]
