# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform knows its own backends only: one wrapped class method lets it take DSL by name."""

import functools
from typing import Any

from dsl_backend.vllm_plugin.registration import NAME


def install(platform: type) -> None:
    """Wrap `get_attn_backend_cls` of a CPU platform class, once.

    Without DSL selected, the wrapper calls the original with what it was given.
    """
    original = platform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]
    if hasattr(original, "wrapped_by_dsl"):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(cls: type, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(selected_backend, "name", None) != NAME:
            return original(cls, selected_backend, *args, **kwargs)
        from dsl_backend.vllm_plugin.backend_selector import DSLRouter

        return DSLRouter.path_on_cpu(kwargs["attn_selector_config"] if "attn_selector_config" in kwargs else args[0])

    get_attn_backend_cls.wrapped_by_dsl = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)  # type: ignore[attr-defined]
