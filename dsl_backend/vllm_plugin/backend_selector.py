# SPDX-License-Identifier: Apache-2.0
"""The class behind the name DSL: it selects the dense or the MLA backend for each layer."""

from contextvars import ContextVar
from typing import Any

from vllm.v1.attention.backend import AttentionBackend

from dsl_backend.vllm_plugin import compat, validation
from dsl_backend.vllm_plugin.dense import DSLAttentionBackend

# vLLM asks validate_configuration and then full_cls_name of the same class, in one thread, layer after layer.
_chosen: ContextVar[type[AttentionBackend]] = ContextVar("dsl_backend_chosen", default=DSLAttentionBackend)


def backend_for(use_mla: bool) -> type[AttentionBackend]:
    if not use_mla:
        return DSLAttentionBackend
    # Here, because it imports vLLM's MLA layer and with it that layer's kernels.
    from dsl_backend.vllm_plugin.mla import DSLMLABackend

    return DSLMLABackend


class DSLBackendSelector(DSLAttentionBackend):
    """vLLM has one class for each backend name; this one answers for two, the dense and the MLA backend."""

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        backend = backend_for(selection["use_mla"])
        _chosen.set(backend)
        return backend.validate_configuration(**selection)

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return _chosen.get().full_cls_name()

    @classmethod
    def path_on_cpu(cls, selector_config: Any) -> str:
        """Import path of the backend's class, validated as the CUDA platform does it.

        Args:
            selector_config: vLLM's AttentionSelectorConfig.

        Raises:
            ValueError: with every reason against the configuration.
        """
        reasons = cls.reasons_against(device_capability=None, **selector_config._asdict())
        validation.refuse("this configuration on a CPU", reasons)
        return ".".join(cls.full_cls_name())

    @classmethod
    def reasons_against(cls, *, device_capability: Any, **selection: Any) -> list[str]:
        """The reasons of validate_configuration, and what vLLM lacks on a CPU."""
        reasons = cls.validate_configuration(device_capability=device_capability, **selection)
        if device_capability is None and selection["use_mla"] and not compat.cpu_has_mla():
            reasons.append("this vLLM has no MLA for a CPU: use one that has the backend CPU_MLA")
        return reasons
