# SPDX-License-Identifier: Apache-2.0
"""The facts of models, in the words of published configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.model import read, shape_of

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def test_dense() -> None:
    shape = shape_of(LLAMA)
    assert (shape.heads_q, shape.heads_kv, shape.head_dim) == (32, 8, 128)
    assert (shape.gated_sizes, shape.vocab_size, shape.hidden_size) == ((14336,), 128256, 4096)
    assert (shape.dtype, shape.is_mla) == ("bfloat16", False)
    assert shape_of(LLAMA | {"head_dim": 96}).head_dim == 96
    assert shape_of({**LLAMA, "num_key_value_heads": None}).heads_kv == 32


def test_mla() -> None:
    shape = shape_of(DEEPSEEK, tensor_parallel=8)
    assert (shape.heads_q, shape.heads_kv, shape.head_dim) == (16, 1, 192)
    assert (shape.latent_rank, shape.rope_dim, shape.is_mla) == (512, 64, True)


@pytest.mark.parametrize(("ranks", "heads"), [(2, (16, 4, 7168)), (8, (4, 1, 1792)), (16, (2, 1, 896))])
def test_ranks(ranks: int, heads: tuple[int, int, int]) -> None:
    shape = shape_of(LLAMA, tensor_parallel=ranks)
    assert (shape.heads_q, shape.heads_kv, *shape.gated_sizes) == heads


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({"n_shared_experts": 2, "moe_intermediate_size": 1408}, (7168, 1408)),
        ({"n_shared_experts": None, "moe_intermediate_size": 1408}, (7168,)),
        ({"intermediate_size": None, "shared_expert_intermediate_size": 5632}, (2816,)),
        ({"shared_expert_intermediate_size": 14336}, (7168,)),
    ],
)
def test_layers_of_all_tokens(more: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert shape_of(LLAMA | more, tensor_parallel=2).gated_sizes == sizes


def test_language_model_of_a_larger_one() -> None:
    assert shape_of({"text_config": LLAMA, "vision_config": {}, "hidden_size": 1}) == shape_of(LLAMA)
    inner = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert shape_of({"text_config": inner, "torch_dtype": "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({"torch_dtype": "float16"}, None, "float16"),
        ({"torch_dtype": None, "dtype": "float32"}, None, "float32"),
        ({"torch_dtype": None}, None, "bfloat16"),
        ({"torch_dtype": "float32"}, "torch.float16", "float16"),
    ],
)
def test_dtypes(config: dict[str, Any], asked: str | None, dtype: str) -> None:
    assert shape_of(LLAMA | config, dtype=asked).dtype == dtype


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"hidden_size": None}, {}, "the model's hidden_size is missing: a positive whole number is needed"),
        ({"vocab_size": 0}, {}, "the model's vocab_size is 0"),
        ({"vocab_size": True}, {}, "the model's vocab_size is True"),
        ({"num_attention_heads": "32"}, {}, "the model's num_attention_heads is '32'"),
        ({"kv_lora_rank": 512}, {}, "the model's qk_rope_head_dim is missing"),
        ({}, {"tensor_parallel": 3}, "32 heads cannot be shared by 3 ranks"),
        ({}, {"tensor_parallel": 0}, "tensor_parallel is 0: at least 1 is needed"),
        ({"torch_dtype": "int4"}, {}, "dtype 'int4' is not one of float32, float16, bfloat16"),
    ],
)
def test_refusals(change: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        shape_of(LLAMA | change, **arguments)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read(file) == read(tmp_path) == shape_of(LLAMA)
    for text, message in (("{", "is not JSON"), ("[1]", "holds list: a JSON object is needed")):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            read(file)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"No such file or directory: give a config\.json"):
        read(tmp_path)
