# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM's worker that say what serves its layers and what was compiled; vLLM imports them by name."""

from collections import Counter
from typing import Any

from dsl_backend.runtime.compiles import compiles


class WorkerFacts:
    """Mixed into the worker's class (vLLM's option `worker_extension_cls`)."""

    vllm_config: Any

    def attention_facts(self) -> dict[str, Any]:
        """Backend -> attention layers that it serves, and the settings that vLLM came to; ready for JSON."""
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
        """CuTe DSL kernels of ours that this process compiled, in its warm-up and while it served."""
        return {"in_warmup": compiles.during_warmup, "while_serving": compiles.after_warmup}


def objection(backend: str, served_by: dict[str, int]) -> str | None:
    """Why figures of these layers are not the backend's; None where every layer is served by it."""
    if served_by and set(served_by) == {backend.upper()}:
        return None
    return f"asked for {backend}, but the attention layers are served by {served_by or 'nothing'}"
