# SPDX-License-Identifier: Apache-2.0
"""Writes small random checkpoints in Hugging Face's format, for the checks and `make serve`.

    python -m integration.models demo FOLDER

The weights are chosen such that activations keep their scale from layer to layer, attention is neither uniform nor
one-hot, and logits differ by several units. Then every feature of attention changes the generated tokens.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROOT = Path(__file__).resolve().parent.parent

Config = dict[str, Any]


@dataclass(frozen=True)
class Normal:
    """A tensor of normal values, of which those at (i, i) are larger by `diagonal`."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    diagonal: float = 0.0


def linear(rows: int, columns: int, gain: float = 1.0) -> Normal:
    """A weight [out, in] that turns inputs of unit variance into outputs of deviation `gain`."""
    return Normal((rows, columns), gain / math.sqrt(columns))


def norm(width: int, mean: float = 1.0) -> Normal:
    return Normal((width,), 0.1, mean)


def bias(width: int, std: float = 0.1) -> Normal:
    return Normal((width,), std)


# Column 0 of the embedding, and of routers: so large that it is most of a router's logits, in any layer.
CLASS, ROUTED_BY_CLASS = 16.0, 2.0
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")


def route_by_class(tensors: Mapping[str, torch.Tensor]) -> None:
    """Sends tokens of even numbers to experts of even numbers, and odd ones to odd ones.

    A token's experts are then far from a tie. A near tie would make two correct backends choose different experts.
    """
    for name, values in tensors.items():
        signs = 1 - 2 * (torch.arange(len(values)) % 2)
        if name == "model.embed_tokens.weight":
            values[:, 0] = CLASS * signs
        elif name.endswith(ROUTERS):
            values[:, 0] = ROUTED_BY_CLASS * signs


QK_GAIN = 1.3  # scores of deviation 1.7
LOGIT_GAIN = 3.0


def qkvo(layer: str, config: Config, with_bias: bool = False) -> dict[str, Normal]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {
        f"{layer}.self_attn.q_proj": linear(heads * dim, hidden, QK_GAIN),
        f"{layer}.self_attn.k_proj": linear(heads_kv * dim, hidden, QK_GAIN),
        f"{layer}.self_attn.v_proj": linear(heads_kv * dim, hidden),
        f"{layer}.self_attn.o_proj": linear(hidden, heads * dim, 2.0),
    }
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    return named | ({f"{name}.bias": bias(weight.shape[0]) for name, weight in weights.items()} if with_bias else {})


def gated_mlp(layer: str, config: Config) -> dict[str, Normal]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{layer}.mlp.gate_proj.weight": linear(inner, hidden),
        f"{layer}.mlp.up_proj.weight": linear(inner, hidden),
        f"{layer}.mlp.down_proj.weight": linear(hidden, inner, 1.5),
    }


def expert_mlps(layer: str, config: Config) -> dict[str, Normal]:
    """The router and the routed experts of a layer; a token's outputs are as large as those of `gated_mlp`."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config.get("num_experts") or config["n_routed_experts"]
    weights = {f"{layer}.mlp.gate.weight": linear(experts, hidden)}
    for index in range(experts):
        expert = f"{layer}.mlp.experts.{index}"
        weights |= {
            f"{expert}.gate_proj.weight": linear(inner, hidden),
            f"{expert}.up_proj.weight": linear(inner, hidden),
            f"{expert}.down_proj.weight": linear(hidden, inner, 3.0),
        }
    return weights


def ends(config: Config) -> dict[str, Normal]:
    """Embedding, last norm and head of a model with an untied head."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    return {
        "model.embed_tokens.weight": Normal((vocabulary, hidden), 1.0),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": linear(vocabulary, hidden, LOGIT_GAIN),
    }


def layers(config: Config) -> list[str]:
    return [f"model.layers.{index}" for index in range(config["num_hidden_layers"])]


def llama(config: Config) -> dict[str, Normal]:
    weights = ends(config)
    for layer in layers(config):
        weights |= qkvo(layer, config) | gated_mlp(layer, config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = norm(config["hidden_size"])
    return weights


def qwen3_moe(config: Config) -> dict[str, Normal]:
    weights = ends(config)
    for layer in layers(config):
        weights |= qkvo(layer, config) | expert_mlps(layer, config)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{layer}.{name}.weight"] = norm(config["head_dim"], QK_GAIN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = norm(config["hidden_size"])
    return weights


def gemma2(config: Config) -> dict[str, Normal]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    # Gemma scales embeddings by sqrt(hidden), adds 1 to the weights of its norms, and ties embedding and head. The
    # layers' norms must outweigh the embedding; otherwise every token would predict itself.
    weights = {
        "model.embed_tokens.weight": Normal((vocabulary, hidden), 1 / math.sqrt(hidden)),
        "model.norm.weight": norm(hidden, LOGIT_GAIN - 1),
    }
    for layer in layers(config):
        weights |= qkvo(layer, config) | gated_mlp(layer, config)
        for name, mean in (
            ("input", 0.0),
            ("post_attention", 2.0),
            ("pre_feedforward", 0.0),
            ("post_feedforward", 1.0),
        ):
            weights[f"{layer}.{name}_layernorm.weight"] = norm(hidden, mean)
    return weights


def gpt_oss(config: Config) -> dict[str, Normal]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    weights = ends(config)
    for layer in layers(config):
        weights |= qkvo(layer, config, with_bias=True)
        weights |= {
            # Larger than most scores, so that the sinks have a visible effect.
            f"{layer}.self_attn.sinks": Normal((config["num_attention_heads"],), 1.0, 3.0),
            f"{layer}.mlp.router.weight": linear(experts, hidden),
            f"{layer}.mlp.router.bias": bias(experts),
            f"{layer}.mlp.experts.gate_up_proj": Normal((experts, hidden, 2 * inner), 1 / math.sqrt(hidden)),
            f"{layer}.mlp.experts.gate_up_proj_bias": Normal((experts, 2 * inner), 0.1),
            f"{layer}.mlp.experts.down_proj": Normal((experts, inner, hidden), 1 / math.sqrt(inner)),
            f"{layer}.mlp.experts.down_proj_bias": Normal((experts, hidden), 0.1),
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
        }
    return weights


def bloom(config: Config) -> dict[str, Normal]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    # vLLM ties Bloom's head to the embedding: as in gemma2, the layers must outweigh the embedding.
    weights = {"transformer.word_embeddings.weight": linear(vocabulary, hidden, LOGIT_GAIN)}
    norms = ["transformer.word_embeddings_layernorm", "transformer.ln_f"]
    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for name, weight in (
            (f"{layer}.self_attention.query_key_value", linear(3 * hidden, hidden, QK_GAIN)),
            (f"{layer}.self_attention.dense", linear(hidden, hidden, 4.0)),
            (f"{layer}.mlp.dense_h_to_4h", linear(4 * hidden, hidden)),
            (f"{layer}.mlp.dense_4h_to_h", linear(hidden, 4 * hidden, 3.0)),
        ):
            weights |= {f"{name}.weight": weight, f"{name}.bias": bias(weight.shape[0])}
    for name in norms:
        weights |= {f"{name}.weight": norm(hidden), f"{name}.bias": bias(hidden)}
    return weights


def deepseek_v2(config: Config) -> dict[str, Normal]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    weights = ends(config)
    for index, layer in enumerate(layers(config)):
        if index < config["first_k_dense_replace"]:
            weights |= gated_mlp(layer, config)
        else:
            shared = {"hidden_size": hidden, "intermediate_size": config["moe_intermediate_size"]}
            weights |= expert_mlps(layer, config)
            weights |= {
                name.replace(".mlp.", ".mlp.shared_experts."): weight
                for name, weight in gated_mlp(layer, shared).items()
            }
        if rank := config["q_lora_rank"]:
            weights |= {
                f"{layer}.self_attn.q_a_proj.weight": linear(rank, hidden),
                f"{layer}.self_attn.q_a_layernorm.weight": norm(rank),
                f"{layer}.self_attn.q_b_proj.weight": linear(heads * (nope + rope), rank, QK_GAIN),
            }
        else:
            weights[f"{layer}.self_attn.q_proj.weight"] = linear(heads * (nope + rope), hidden, QK_GAIN)
        weights |= {
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": linear(latent + rope, hidden, QK_GAIN),
            f"{layer}.self_attn.kv_a_layernorm.weight": norm(latent),
            f"{layer}.self_attn.kv_b_proj.weight": linear(heads * (nope + value), latent, QK_GAIN),
            f"{layer}.self_attn.o_proj.weight": linear(hidden, heads * value, 2.0),
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
        }
    return weights


def quiet(weights: dict[str, Normal]) -> dict[str, Normal]:
    """Layers that add little to the embedding: a token then depends mostly on the one before it, as a draft's does."""
    ends = ("o_proj.weight", "down_proj.weight")
    return {name: replace(one, std=one.std / 8) if name.endswith(ends) else one for name, one in weights.items()}


def quiet_llama(config: Config) -> dict[str, Normal]:
    return quiet(llama(config))


def inputs_of_drafts(hidden: int) -> Normal:
    """From a token's embedding and the hidden state before it to a draft's input, which is nearly the embedding."""
    return Normal((hidden, 2 * hidden), 0.1 / math.sqrt(hidden), diagonal=1.0)


def eagle_llama(config: Config) -> dict[str, Normal]:
    """An EAGLE head of one layer. Embedding and head are the target's."""
    layer, hidden = "layers.0", config["hidden_size"]
    weights = quiet(qkvo(layer, config) | gated_mlp(layer, config))
    return weights | {
        f"{layer}.post_attention_layernorm.weight": norm(hidden),
        "fc.weight": inputs_of_drafts(hidden),
    }


def deepseek_v3(config: Config) -> dict[str, Normal]:
    """Layers as deepseek_v2's, and one of multi-token prediction behind them."""
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    weights = quiet(deepseek_v2(config | {"num_hidden_layers": count + 1}))
    layer = f"model.layers.{count}"
    return weights | {
        **{f"{layer}.{name}.weight": norm(hidden) for name in ("enorm", "hnorm", "shared_head.norm")},
        f"{layer}.eh_proj.weight": inputs_of_drafts(hidden),
        # vLLM shares the target's in their place.
        f"{layer}.embed_tokens.weight": weights["model.embed_tokens.weight"],
        f"{layer}.shared_head.head.weight": weights["lm_head.weight"],
    }


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint to write.

    Attributes:
        config: the fields of config.json that not all models share.
        weights: config -> the distribution of every tensor, by its name in the checkpoint.
        fill: part of a tensor's name -> the value that all its elements get instead.
        plant: changes tensors, by their names, after they were filled.
    """

    config: Config
    weights: Callable[[Config], dict[str, Normal]]
    fill: Mapping[str, float] = field(default_factory=dict)
    plant: Callable[[Mapping[str, torch.Tensor]], None] = lambda tensors: None

    def changed(self, fill: Mapping[str, float] | None = None, **changes: Any) -> "Model":
        """The same model with other settings or with tensors of one value; the other weights stay the same.

        Args:
            changes: of the settings; `plant` is the model's own.
        """
        plant = changes.pop("plant", self.plant)
        return Model(config=self.config | changes, weights=self.weights, fill=dict(fill or {}), plant=plant)


SHARED: Config = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

LLAMA = Model(
    config=SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
    weights=llama,
)

MODELS: dict[str, Model] = {
    "llama": LLAMA,
    "demo": LLAMA.changed(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=128),
    # Window and softcap are small, so that they change prompts of a few dozen tokens.
    "gemma2": Model(
        config=LLAMA.config
        | {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        weights=gemma2,
    ),
    "gpt_oss": Model(
        config=LLAMA.config
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "swiglu_limit": 7.0,
        },
        weights=gpt_oss,
        plant=route_by_class,
    ),
    "bloom": Model(
        config=SHARED
        | {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "tie_word_embeddings": True,
            "hidden_size": 256,
            "n_layer": 3,
            "n_head": 4,
            "layer_norm_epsilon": 1e-5,
            "apply_residual_connection_post_layernorm": False,
        },
        weights=bloom,
    ),
    # Dense layers only.
    "deepseek_v2": Model(
        config=LLAMA.config
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "head_dim": 64,
            # As in the published models. vLLM's CPU kernel for the plain kind misplaces the strided rope part of MLA's
            # queries, so that a request's tokens depend on the batch that it is in.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        weights=deepseek_v2,
    ),
}


# Queries have a latent too, which one projection makes together with that of keys.
MODELS["deepseek_v2_queries"] = MODELS["deepseek_v2"].changed(q_lora_rank=192)
MODELS["deepseek_moe"] = MODELS["deepseek_v2"].changed(
    first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, plant=route_by_class
)
MODELS["qwen3_moe"] = Model(
    config=LLAMA.config
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    weights=qwen3_moe,
    plant=route_by_class,
)
# For drafts: targets whose tokens a small model can foresee. Of the first one an EAGLE head, and a draft model: its
# first layer, with its embedding and head.
MODELS["quiet_llama"] = Model(config=LLAMA.config, weights=quiet_llama)
MODELS["draft_llama"] = MODELS["quiet_llama"].changed(num_hidden_layers=1)
MODELS["eagle_llama"] = Model(config=LLAMA.config | {"num_hidden_layers": 1}, weights=eagle_llama)
MODELS["deepseek_v3"] = Model(
    config=MODELS["deepseek_v2"].config
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        # The layer of multi-token prediction is dense too.
        "first_k_dense_replace": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    weights=deepseek_v3,
)


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of VOCABULARY entries. It encodes any text, and every id decodes to text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The licence is a long English text that every checkout has and that does not change.
    tokenizer.train_from_iterator((ROOT / "LICENSE").read_text().splitlines(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCABULARY}")
    return tokenizer


def write(model: Model, folder: Path, seed: int = 0) -> Path:
    """Writes config, weights (bf16) and tokenizer into the folder; returns it. The same seed gives the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, normal in model.weights(model.config).items():
        # One generator for each tensor: a changed model has the same values in all other tensors.
        generator = torch.Generator().manual_seed(hash_of(name) + seed)
        values = torch.randn(normal.shape, generator=generator) * normal.std + normal.mean
        if normal.diagonal:
            values.diagonal().add_(normal.diagonal)
        for part, value in model.fill.items():
            if part in name:
                values.fill_(value)
        tensors[name] = values.to(torch.bfloat16)
    model.plant(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save(str(folder / "tokenizer.json"))
    tokens = {"pad_token": SPECIAL[PAD], "bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS]}
    files: dict[str, Config] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": model.config["max_position_embeddings"],
            **tokens,
        },
        "generation_config.json": {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS},
        # Written last: if this file exists, all others do.
        "config.json": model.config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return folder


def hash_of(name: str) -> int:
    """A number that depends only on the name, and is the same in every process."""
    return int.from_bytes(name.encode(), "big") % (2**61 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random checkpoint.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(write(MODELS[options.model], options.folder, options.seed))


if __name__ == "__main__":
    main()
