# SPDX-License-Identifier: Apache-2.0
"""How vLLM arrives at our backends: the user's spellings, the selector, refusals, and nothing at all without DSL."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from dsl_backend.runtime import target as targets
from dsl_backend.runtime import toolkit
from dsl_backend.vllm_plugin import cpu_platform, validation
from dsl_backend.vllm_plugin.backend_selector import DSLBackendSelector
from dsl_backend.vllm_plugin.dense import DSLAttentionBackend
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.mla import DSLMLABackend
from dsl_backend.vllm_plugin.mla_prefill import DSLPrefillBackend
from tests.vllm_plugin.conftest import engine_config

HOPPER, BLACKWELL, AMPERE, TURING = (DeviceCapability(*version) for version in ((9, 0), (10, 0), (8, 0), (7, 5)))


def selection(**changes: Any) -> dict[str, Any]:
    """What vLLM's selection asks for, an ordinary bf16 layer by default."""
    ordinary = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    return AttentionSelectorConfig(**(ordinary | changes))._asdict()


def reasons(capability: DeviceCapability | None = HOPPER, **changes: Any) -> list[str]:
    return DSLBackendSelector.validate_configuration(device_capability=capability, **selection(**changes))


@pytest.mark.parametrize("spelling", ["dsl", "DSL", "Dsl"])
def test_any_case_is_the_member(model_folders: dict[str, Path], spelling: str) -> None:
    config = engine_config(model_folders["llama"], attention_backend=spelling)
    assert config.attention_config.backend is ensure_member()


def test_without_a_choice_nothing_is_chosen(model_folders: dict[str, Path]) -> None:
    assert engine_config(model_folders["llama"]).attention_config.backend is None


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, AMPERE, DeviceCapability(12, 0)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 64, "dtype": torch.float16},
        {"kv_cache_dtype": "bfloat16"},
        {"has_sink": True, "has_sliding_window": True},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
        {"block_size": 528},
        {"use_non_causal": True},
        {"use_kv_connector": True},
        {"head_size": 576, "use_mla": True},
        {"head_size": 576, "use_mla": True, "kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_served(plain_config: VllmConfig, capability: DeviceCapability, changes: dict[str, Any]) -> None:
    assert reasons(capability, **changes) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": 100}, ["head size 100", "64 to 256"]),
        ({"dtype": torch.float32}, ["float32", "float16, bfloat16"]),
        ({"kv_cache_dtype": "fp8_inc"}, ["fp8_inc", "fp8_e4m3", "fp8_e5m2"]),
        ({"kv_cache_dtype": "int8_per_token_head"}, ["int8_per_token_head", "fp8_e4m3", "nvfp4"]),
        ({"kv_cache_dtype": "nvfp4", "head_size": 72}, ["head size 72", "NVFP4"]),
        ({"kv_cache_dtype": "nvfp4", "head_size": 576, "use_mla": True}, ["has no NVFP4 cache"]),
        ({"kv_cache_dtype": "float16"}, ["keys of float16", "bfloat16"]),
        ({"block_size": 24}, ["page size 24", "multiple of 16"]),
        ({"use_mm_prefix": True}, ["prefix-LM", "TRITON_ATTN"]),
        ({"use_sparse": True, "use_mla": True, "head_size": 576}, ["sparse MLA", "FLASHMLA_SPARSE"]),
        (
            {"use_per_head_quant_scales": True, "use_mla": True, "head_size": 576},
            ["scale for each head", "--kv-cache-dtype auto"],
        ),
        ({"use_pcp": True}, ["--prefill-context-parallel-size 1"]),
        ({"use_pcp": True, "use_mla": True, "head_size": 576}, ["--prefill-context-parallel-size 1"]),
        ({"use_dcp": True}, ["--decode-context-parallel-size 1"]),
        ({"use_dcp": True, "use_mla": True, "head_size": 576}, ["--decode-context-parallel-size 1"]),
        ({"use_rswa": True}, ["R-SWA", "TRITON_ATTN"]),
        ({"use_mla": True, "head_size": 200}, ["200", "576/512"]),
    ],
    ids=str,
)
def test_refused_in_words_that_say_what_works(
    plain_config: VllmConfig, changes: dict[str, Any], words: list[str]
) -> None:
    unknown = set(changes) - set(AttentionSelectorConfig._fields)
    if unknown:
        pytest.skip(f"this vLLM's selection has no {', '.join(unknown)}")
    text = "\n".join(reasons(**changes))
    for word in words:
        assert word in text
    assert len(set(text.splitlines())) == len(text.splitlines()), "a reason is given twice"


def test_every_reason_is_given(plain_config: VllmConfig) -> None:
    text = "\n".join(
        reasons(
            head_size=100,
            dtype=torch.float32,
            kv_cache_dtype="fp8_inc",
            block_size=24,
            use_mm_prefix=True,
        )
    )
    for word in ("head size 100", "float32", "fp8_inc", "page size 24", "prefix-LM"):
        assert word in text


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_batch_invariance_is_for_the_kernels_that_have_it(plain_config: VllmConfig) -> None:
    for changes in ({}, {"use_mla": True, "head_size": 576}):
        for capability in (AMPERE, HOPPER, BLACKWELL):
            assert reasons(capability, use_batch_invariant=True, **changes) == []


def test_old_chips_are_told_about_bfloat16(plain_config: VllmConfig) -> None:
    assert "use float16" in "\n".join(reasons(TURING))
    assert reasons(TURING, dtype=torch.float16) == []


def test_selector_answers_with_the_class_that_it_validated(plain_config: VllmConfig) -> None:
    reasons(use_mla=True, head_size=576)
    assert DSLBackendSelector.full_cls_name() == DSLMLABackend.full_cls_name()
    reasons()
    assert DSLBackendSelector.full_cls_name() == DSLAttentionBackend.full_cls_name()
    for backend, mla in ((DSLAttentionBackend, False), (DSLMLABackend, True)):
        assert backend.get_name() == "DSL"
        assert backend.is_mla() is mla


def test_dcp_is_refused_where_selection_does_not_tell() -> None:
    from dsl_backend.vllm_plugin import compat

    config = VllmConfig()
    config.parallel_config.decode_context_parallel_size = 2
    with set_current_vllm_config(config):
        assert compat.uses_dcp({})
    assert compat.uses_dcp({"use_dcp": True})
    assert not compat.uses_dcp({"use_dcp": False})


def test_kernel_by_name_does_not_fall_back() -> None:
    config = VllmConfig(additional_config={"dsl": {"attention_kernel": "reference"}})
    with set_current_vllm_config(config):
        assert "is for CPUs" in "\n".join(reasons())
        assert reasons(None, dtype=torch.float32) == []
    config = VllmConfig(additional_config={"dsl": {"attention_kernel": "triton"}})
    with set_current_vllm_config(config):
        assert reasons() == []
        assert "float32" in "\n".join(reasons(None, dtype=torch.float32))


def test_unknown_option_is_refused_at_selection() -> None:
    with (
        set_current_vllm_config(VllmConfig(additional_config={"dsl": {"kernel": "triton"}})),
        pytest.raises(ValueError, match="accepted keys: attention_kernel"),
    ):
        reasons()


class TestCpuPlatform:
    """The one wrapped method."""

    def test_dsl_gets_our_classes(self, plain_config: VllmConfig) -> None:
        for changes, backend in (
            ({"dtype": torch.float32, "head_size": 48}, DSLAttentionBackend),
            ({"dtype": torch.float32, "head_size": 48, "use_mla": True}, DSLMLABackend),
        ):
            path = CpuPlatform.get_attn_backend_cls(
                ensure_member(), attn_selector_config=AttentionSelectorConfig(**selection(**changes))
            )
            assert path == ".".join(backend.full_cls_name())

    def test_refusal_lists_every_reason(self, plain_config: VllmConfig) -> None:
        config = AttentionSelectorConfig(**selection(kv_cache_dtype="fp8_inc", use_sparse=True, use_mla=True))
        with pytest.raises(ValueError) as error:
            CpuPlatform.get_attn_backend_cls(ensure_member(), attn_selector_config=config)
        for word in ("fp8_inc", "sparse MLA"):
            assert word in str(error.value)

    @pytest.mark.parametrize("use_mla", [False, True])
    @pytest.mark.parametrize("name", [None, "CPU_ATTN", "FLASH_ATTN"])
    def test_anything_else_gets_what_vllm_says(self, name: str | None, use_mla: bool) -> None:
        chosen = None if name is None else AttentionBackendEnum[name]
        config = AttentionSelectorConfig(**selection(use_mla=use_mla, head_size=576 if use_mla else 128))
        original = CpuPlatform.get_attn_backend_cls.__func__.__wrapped__
        assert CpuPlatform.get_attn_backend_cls(chosen, config, 4) == original(CpuPlatform, chosen, config, 4)
        assert "dsl_backend" not in CpuPlatform.get_attn_backend_cls(chosen, config)

    def test_the_original_gets_the_same_arguments(self) -> None:
        seen = []

        class Platform:
            @classmethod
            def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
                seen.append((cls, args, kwargs))
                return "theirs"

        cpu_platform.wrap_selection(Platform)
        cpu_platform.wrap_selection(Platform)
        other = SimpleNamespace(name="CPU_ATTN")
        assert Platform.get_attn_backend_cls(other, 1, num_heads=2) == "theirs"
        assert Platform.get_attn_backend_cls(None, attn_selector_config=1) == "theirs"
        assert seen == [(Platform, (other, 1), {"num_heads": 2}), (Platform, (None,), {"attn_selector_config": 1})]


@pytest.mark.parametrize("mla", [False, True], ids=["dense", "mla"])
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, AMPERE], ids=str)
def test_automatic_choice_on_a_gpu_never_considers_dsl(capability: DeviceCapability, mla: bool) -> None:
    cuda = pytest.importorskip("vllm.platforms.cuda", reason="a CPU build of vLLM has no CUDA platform")
    assert ensure_member() not in cuda._get_backend_priorities(mla, capability, 8)


def test_prefill_backend_judges_the_model(plain_config: VllmConfig) -> None:
    def judge(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> list[str]:
        dimensions = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128} | sizes
        config = MLAPrefillSelectorConfig(dtype=dtype)
        config = config._replace(mla_dimensions=type(config.mla_dimensions)(**dimensions))
        return DSLPrefillBackend.validate_configuration(HOPPER, config)

    assert judge() == []
    assert judge(qk_nope_head_dim=192, v_head_dim=256) == []
    assert "value head size 20" in "\n".join(judge(v_head_dim=20))
    assert "float32" in "\n".join(judge(torch.float32))


@pytest.mark.parametrize("backend", [DSLAttentionBackend, DSLMLABackend, DSLBackendSelector])
def test_questions_without_a_configuration(backend: Any) -> None:
    """On a CPU the reference takes anything."""
    questions: list[Callable[[], bool]] = [
        lambda: backend.supports_head_size(576),
        lambda: backend.supports_dtype(torch.float32),
        lambda: backend.supports_kv_cache_dtype("fp8"),
        lambda: backend.supports_kv_cache_dtype(None),
        lambda: backend.supports_kv_cache_dtype("fp8_e5m2"),
        lambda: not backend.supports_kv_cache_dtype("fp8_inc"),
        lambda: set(backend.supported_kv_cache_dtypes) > {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"},
        lambda: backend.supports_per_head_quant_scales() == (backend is not DSLMLABackend),
        lambda: backend.supports_block_size(128),
        lambda: backend.supports_non_causal(),
        lambda: backend.supports_batch_invariance(),
        lambda: not backend.supports_pcp(),
        lambda: not backend.is_sparse(),
        lambda: not backend.supports_mm_prefix(),
        lambda: backend.get_preferred_block_size(16) == 16,
    ]
    assert [index for index, ask in enumerate(questions) if not ask()] == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_pages_of_latent_keys_are_a_tile(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "current_target", lambda: targets.from_arch(arch))
    latent = 16 if arch == "sm_80" else 64
    assert [DSLMLABackend.get_preferred_block_size(usual) for usual in (16, 128)] == [latent, 128]
    assert DSLAttentionBackend.get_preferred_block_size(16) == 16


def test_default_attention_config_is_untouched() -> None:
    assert AttentionConfig().backend is None
    assert AttentionConfig().mla_prefill_backend is None
