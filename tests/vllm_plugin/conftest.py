# SPDX-License-Identifier: Apache-2.0
"""Real vLLM objects for the plugin's tests: configs of small models, and steps over a cache."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the plugin needs vLLM")

from vllm import platforms

if platforms.current_platform.is_unspecified():
    # vLLM for CUDA on a machine without a GPU: these tests run all the same, against the classes of that version.
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata

from dsl_backend.runtime.target import of_device
from dsl_backend.vllm_plugin import registration

SHARED = {
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 2,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    registration.register()


@pytest.fixture(autouse=True)
def targets_are_looked_up() -> Iterator[None]:
    """A test may put another GPU there."""
    of_device.cache_clear()
    yield
    of_device.cache_clear()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """VLLM's layers ask for their rank when they are made."""
    place = tmp_path_factory.mktemp("ranks") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a config.json, by model name: enough for vLLM's configuration."""
    folders = {}
    for name, config in MODELS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps(SHARED | config))
    return folders


def engine_config(folder: Path, **arguments: Any) -> VllmConfig:
    """The config that `vllm serve FOLDER` would run with."""
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024, "gpu_memory_utilization": 0.1}
    return EngineArgs(model=str(folder), **(defaults | arguments)).create_engine_config()


@pytest.fixture
def plain_config() -> Iterator[VllmConfig]:
    """A config without a model, as the current one."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@dataclass
class Step:
    """A batch in vLLM's form.

    Attributes:
        common: what the runner hands to metadata builders.
        slots: [tokens] int64, of the new tokens.
        context_slots: for each request, int64 slots of the tokens before.
    """

    common: CommonAttentionMetadata
    slots: torch.Tensor
    context_slots: list[torch.Tensor]


def make_step(
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    page_size: int,
    *,
    padding: int = 0,
    causal: bool | torch.Tensor = True,
) -> Step:
    """Requests on shuffled pages; page 0 is vLLM's null page.

    Args:
        q_lens, kv_lens: new tokens and all tokens of each request; (0, 0) pads the requests.
        padding: rows of queries behind the last request's, without a slot.
    """
    generator = torch.Generator().manual_seed(7)
    pages = [-(-length // page_size) for length in kv_lens]
    order = torch.randperm(sum(pages), generator=generator) + 1
    table = torch.zeros(len(q_lens), max(pages) + 2, dtype=torch.int32)
    slots, context, used = [], [], 0
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        own = order[used : used + pages[request]]
        used += pages[request]
        table[request, : len(own)] = own
        positions = torch.arange(kv_len)
        all_slots = own[positions // page_size] * page_size + positions % page_size
        context.append(all_slots[: kv_len - q_len])
        slots.append(all_slots[kv_len - q_len :])
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    new = torch.cat([*slots, torch.full((padding,), -1)])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(q_lens),
        num_actual_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=max(kv_lens),
        block_table_tensor=table,
        slot_mapping=new,
        causal=causal,
        seq_lens_cpu_upper_bound=lengths,
    )
    return Step(common, new, context)


def cache_pages(kv_lens: tuple[int, ...], page_size: int) -> int:
    """Pages that make_step's requests need, the null page included."""
    return 1 + sum(-(-length // page_size) for length in kv_lens)
