# SPDX-License-Identifier: Apache-2.0
"""Shapes of published models. The weights are vLLM's dummy weights, which run as fast as real ones."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model to measure.

    Attributes:
        config: the content of config.json.
        max_model_len: tokens of the longest request.
        backends: the default backends to measure: dsl and its peers, the best peer first.
        weight_bytes: the size of its weights in bf16.
        token_bytes: the size of a token's keys and values in bf16.
        small: whether the model is for tests of the benchmark itself, on a CPU.
    """

    config: Mapping[str, Any]
    max_model_len: int
    backends: tuple[str, ...]
    weight_bytes: float
    token_bytes: int
    small: bool = False

    @property
    def vocabulary(self) -> int:
        size: int = self.config["vocab_size"]
        return size


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

# Qwen3-0.6B's.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

QWEN_4B: dict[str, Any] = QWEN | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}

# Qwen3-30B-A3B's.
QWEN_MOE: dict[str, Any] = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}

# compressed-tensors: a scale for each output channel and each token.
CHANNELS: dict[str, Any] = {
    "format": "float-quantized",
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
# DeepSeek's and Qwen's: of 128x128 weights, and of 128 columns of a token.
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

# As the published checkpoint: the router stays in 16 bits.
QWEN_MOE_BLOCKS: dict[str, Any] = BLOCKS | {
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{layer}.mlp.gate" for layer in range(QWEN_MOE["num_hidden_layers"])),
    ]
}

TINY_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 2048,
}

SHAPES = {
    "llama-8b": Shape(
        config=LLAMA,
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=16.1e9,
        token_bytes=32 * 2 * 8 * 128 * 2,
    ),
    # Weights in e4m3, but for the embedding and the logits.
    **{
        f"llama-8b-fp8-{name}": Shape(
            config=LLAMA | {"quantization_config": quantization},
            max_model_len=40960,
            backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
            weight_bytes=9.1e9,
            token_bytes=32 * 2 * 8 * 128 * 2,
        )
        for name, quantization in (("channels", CHANNELS), ("blocks", BLOCKS))
    },
    # A draft model for Llama's tokens. Dummy weights: greedy drafts repeat themselves as the model does.
    "llama-draft": Shape(
        config=LLAMA
        | {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
        },
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=0.7e9,
        token_bytes=4 * 2 * 8 * 128 * 2,
    ),
    "qwen3-0.6b": Shape(
        config=QWEN,
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=1.2e9,
        token_bytes=28 * 2 * 8 * 128 * 2,
    ),
    "qwen3-4b": Shape(
        config=QWEN_4B,
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=8.0e9,
        token_bytes=36 * 2 * 8 * 128 * 2,
    ),
    # In 80 GB there is room for one engine at a time.
    "qwen3-30b-a3b": Shape(
        config=QWEN_MOE,
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=61.1e9,
        token_bytes=48 * 2 * 4 * 128 * 2,
    ),
    # Weights in e4m3, but for the embedding, the router and the logits. Two engines fit into an H200's memory.
    "qwen3-30b-a3b-fp8-blocks": Shape(
        config=QWEN_MOE | {"quantization_config": QWEN_MOE_BLOCKS},
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=31.2e9,
        token_bytes=48 * 2 * 4 * 128 * 2,
    ),
    # A quarter of its layers: in 80 GB two engines take turns.
    "qwen3-30b-a3b-12": Shape(
        config=QWEN_MOE | {"num_hidden_layers": 12},
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=16.2e9,
        token_bytes=12 * 2 * 4 * 128 * 2,
    ),
    "qwen3-30b-a3b-12-fp8-blocks": Shape(
        config=QWEN_MOE | {"num_hidden_layers": 12, "quantization_config": QWEN_MOE_BLOCKS},
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN", "TRITON_ATTN"),
        weight_bytes=8.7e9,
        token_bytes=12 * 2 * 4 * 128 * 2,
    ),
    "deepseek-v2-lite": Shape(
        config=DEEPSEEK,
        max_model_len=40960,
        backends=("dsl", "FLASH_ATTN_MLA", "TRITON_MLA"),
        weight_bytes=31.4e9,
        token_bytes=27 * 576 * 2,
    ),
    "tiny": Shape(
        config=LLAMA | TINY_SIZES | {"num_key_value_heads": 2, "head_dim": 64},
        max_model_len=1024,
        backends=("dsl", "CPU_ATTN"),
        weight_bytes=5e6,
        token_bytes=2 * 2 * 2 * 64 * 2,
        small=True,
    ),
    "tiny-mla": Shape(
        config=DEEPSEEK | TINY_SIZES | {"num_key_value_heads": 4, "first_k_dense_replace": 2},
        max_model_len=1024,
        backends=("dsl", "CPU_MLA"),
        weight_bytes=7e6,
        token_bytes=2 * 576 * 2,
        small=True,
    ),
}


def write(shape: Shape, folder: Path) -> Path:
    """Writes config.json, which is all that an engine with dummy weights needs; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    return folder
