# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM's workers that report the attention backends and compiled kernels. vLLM imports them by name."""

from collections import Counter
from typing import Any

from dsl_backend.runtime.compiles import compiles


class WorkerFacts:
    """A mixin for the worker's class (vLLM's option `worker_extension_cls`)."""

    vllm_config: Any

    def attention_facts(self) -> dict[str, Any]:
        """Backend -> number of attention layers that it serves, and the settings that vLLM chose; ready for JSON."""
        config = self.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        names = [layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")]
        mode = config.compilation_config.cudagraph_mode
        return {
            "served_by": dict(Counter(names)),
            "graphs": getattr(mode, "name", str(mode)),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "page_size": config.cache_config.block_size,
            "kv_dtype": str(config.cache_config.cache_dtype),
            "devices": config.parallel_config.world_size_across_dp,
        }

    def compile_facts(self) -> dict[str, int]:
        """The number of CuTe DSL kernels that this process compiled during warm-up and while serving."""
        return {"in_warmup": compiles.during_warmup, "while_serving": compiles.after_warmup}


def objection(backend: str, served_by: dict[str, int]) -> str | None:
    """Why results of these layers are not the backend's; None if it serves every layer."""
    if served_by and set(served_by) == {backend.upper()}:
        return None
    return f"asked for {backend}, but the attention layers are served by {served_by or 'nothing'}"
