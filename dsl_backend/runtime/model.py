# SPDX-License-Identifier: Apache-2.0
"""The facts of a model that its kernels depend on, read from the `config.json` beside its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsl_backend.errors import InvalidInput

DTYPES = ("float32", "float16", "bfloat16")
# A multimodal model has the configuration of its language model under one of these names.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


# vLLM's names of a cache's dtype -> torch's.
KV_CACHE_DTYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "nvfp4": "float4_e2m1fn_x2",
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as one of its tensor-parallel ranks sees it.

    Attributes:
        heads_q, heads_kv: of this rank.
        head_dim: of queries and keys; with MLA, of the parts with and without positions together.
        gated_sizes: columns of the gate projection on this rank: of the dense MLP and of the shared experts, if any.
        vocab_size: of the logits of all ranks together.
        latent_rank, rope_dim: of MLA; None elsewhere.
        tensor_parallel: ranks that share heads and columns.
        expert_parallel: ranks that share routed experts, whole ones; with 1, the others share each expert's columns.
        kv_cache_dtype: of its cache, one of KV_CACHE_DTYPES; auto is dtype.
        experts_kernel: the kernel of routed experts that is asked for by name; None is the best one that serves.
        config: the model's whole configuration, for facts that are no field here.
    """

    dtype: str
    hidden_size: int
    heads_q: int
    heads_kv: int
    head_dim: int
    vocab_size: int
    gated_sizes: tuple[int, ...] = ()
    latent_rank: int | None = None
    rope_dim: int | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    kv_cache_dtype: str = "auto"
    experts_kernel: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)

    @property
    def is_mla(self) -> bool:
        return self.latent_rank is not None


def read(path: Path, *, tensor_parallel: int = 1, dtype: str | None = None) -> ModelShape:
    """The model of a `config.json`, or of the folder that holds it.

    Raises:
        InvalidInput: the file cannot be read, or lacks what is needed; the message names it.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise InvalidInput(f"model {str(file)!r}: {error.strerror}: give a config.json or a folder with one") from None
    except ValueError as error:
        raise InvalidInput(f"model {str(path)!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"model {str(path)!r} holds {type(config).__name__}: a JSON object is needed")
    return shape_of(config, tensor_parallel=tensor_parallel, dtype=dtype)


def shape_of(config: Mapping[str, Any], *, tensor_parallel: int = 1, dtype: str | None = None) -> ModelShape:
    """The model of a configuration as Hugging Face's transformers writes it.

    Args:
        tensor_parallel: ranks that share the heads.
        dtype: to serve in; by default the one that the configuration names.

    Raises:
        InvalidInput: a fact is missing or is no positive whole number, the heads cannot be shared, or the dtype is none
            that kernels serve.
    """
    text = text_of(config)
    if tensor_parallel < 1:
        raise InvalidInput(f"tensor_parallel is {tensor_parallel}: at least 1 is needed")

    def number(name: str, default: int | None = None) -> int:
        value = text.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "missing" if value is None else repr(value)
            raise InvalidInput(f"the model's {name} is {found}: a positive whole number is needed")
        return value

    heads = number("num_attention_heads")
    if heads % tensor_parallel:
        raise InvalidInput(f"{heads} heads cannot be shared by {tensor_parallel} ranks")
    heads_kv = number("num_key_value_heads", heads)
    hidden = number("hidden_size")
    gated = [number("intermediate_size")] if text.get("intermediate_size") is not None else []
    if text.get("n_shared_experts") is not None:  # DeepSeek, GLM, Kimi: as many as one wide one
        gated.append(number("n_shared_experts") * number("moe_intermediate_size"))
    if text.get("shared_expert_intermediate_size") is not None:  # Qwen2-MoE
        gated.append(number("shared_expert_intermediate_size"))
    latent = number("kv_lora_rank") if text.get("kv_lora_rank") is not None else None
    rope = number("qk_rope_head_dim") if latent is not None else None
    head_dim = number("qk_nope_head_dim") + rope if rope is not None else number("head_dim", hidden // heads)
    return ModelShape(
        dtype=dtype_of(config, text, dtype),
        hidden_size=hidden,
        heads_q=heads // tensor_parallel,
        # With more ranks than heads, each rank has a copy of one. All ranks share MLA's one latent head.
        heads_kv=1 if latent is not None else max(1, heads_kv // tensor_parallel),
        head_dim=head_dim,
        vocab_size=number("vocab_size"),
        gated_sizes=tuple(dict.fromkeys(-(-size // tensor_parallel) for size in gated)),
        latent_rank=latent,
        rope_dim=rope,
        tensor_parallel=tensor_parallel,
        config=config,
    )


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model."""
    return next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), config)


def dtype_of(config: Mapping[str, Any], text: Mapping[str, Any], asked: str | None) -> str:
    names = ("dtype", "torch_dtype")
    found = asked or next((part[name] for part in (text, config) for name in names if part.get(name)), "bfloat16")
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidInput(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return name
