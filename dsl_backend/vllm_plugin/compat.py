# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's versions differ, and what we do about it: a list, and the few functions that hide a difference.

Features are detected, never version numbers. vllm is imported inside the functions: the list can be read without it.
"""

import dataclasses
import enum
import functools
import gc
import importlib.util
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One difference.

    Attributes:
        what: we do, and where.
        why: what vLLM does that makes it needed.
        remove_when: what must have happened for it to go.
        needed: whether the installed vLLM still needs it.
    """

    name: str
    what: str
    why: str
    remove_when: str
    needed: Callable[[], bool]


def backends_are_enum_members() -> bool:
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.mla.prefill import registry as prefill_registry

    members = (registry.AttentionBackendEnum, prefill_registry.MLAPrefillBackendEnum)
    return all(issubclass(one, enum.Enum) for one in members)


def _members_pickle_by_value() -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return "__reduce_ex__" not in vars(AttentionBackendEnum)


def _enum_cannot_grow() -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return not hasattr(AttentionBackendEnum, "register")


def cpu_platform_ignores_the_choice() -> bool:
    from vllm.platforms.cpu import CpuPlatform

    function = CpuPlatform.get_attn_backend_cls.__func__
    source = inspect.getsource(inspect.unwrap(function))
    return "validate_configuration" not in source


def _cpu_fixes_the_mla_prefill_backend() -> bool:
    from vllm.v1.attention.backends.mla.prefill import selector

    return "is_cpu()" in inspect.getsource(selector.get_mla_prefill_backend)


def _cpu_has_no_mla() -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return "CPU_MLA" not in AttentionBackendEnum.__members__


def configurations_are_not_validated() -> bool:
    from vllm.engine.arg_utils import EngineArgs

    source = inspect.getsource(inspect.unwrap(EngineArgs.create_engine_config))
    return "validate_configuration" not in source


def _cache_shape_belongs_to_the_backend() -> bool:
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "get_kv_cache_shape")


def pages_can_be_packed() -> bool:
    """Whether a backend says what a page of a layer's cache is."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "customize_spec")


def _pages_cannot_be_packed() -> bool:
    return not pages_can_be_packed()


def _block_sizes_take_no_spec() -> bool:
    from vllm.v1.attention.backend import AttentionBackend

    return not inspect.signature(AttentionBackend.get_supported_kernel_block_sizes).parameters


def _context_chunks_are_indices() -> bool:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

    return not hasattr(MLACommonPrefillMetadata, "ContextChunk")


def _decode_is_built_without_query_bound() -> bool:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    return "max_query_len" not in inspect.signature(MLACommonMetadataBuilder._build_decode).parameters


def _mla_is_always_causal() -> bool:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    return "causal" not in {field.name for field in dataclasses.fields(MLACommonMetadata)}


def _mla_head_sizes_are_fixed() -> bool:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    return hasattr(MLACommonMetadata, "__post_init__")


def _selection_does_not_see_dcp() -> bool:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return "use_dcp" not in AttentionSelectorConfig._fields


def _no_ragged_decode_graphs() -> bool:
    from vllm.v1.attention import backend

    return not hasattr(backend, "max_decode_query_len")


def _only_leading_prefills_are_merged() -> bool:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

    context = getattr(MLACommonPrefillMetadata, "ChunkedContextMetadata", None)
    return context is not None and any(
        field.name == "prefill_tokens_with_context" for field in dataclasses.fields(context)
    )


def runners_choose_their_sampler() -> bool:
    spec = importlib.util.find_spec("vllm.v1.worker.gpu_model_runner")
    return spec is not None and spec.origin is not None and "self.sampler = Sampler(" in Path(spec.origin).read_text()


def loaders_process_by_name() -> bool:
    spec = importlib.util.find_spec("vllm.model_executor.model_loader.base_loader")
    call = "process_weights_after_loading(model, model_config, target_device)"
    return spec is not None and spec.origin is not None and call in Path(spec.origin).read_text()


def compilations_are_keyed_by_environment() -> bool:
    from vllm import envs

    return "environment_variables" in inspect.getsource(envs.compile_factors)


def _discarded_draws_are_taken_back() -> bool:
    spec = importlib.util.find_spec("vllm.v1.worker.gpu_model_runner")
    return spec is not None and spec.origin is not None and "gen.set_offset(" in Path(spec.origin).read_text()


def _eager_is_not_monitored() -> bool:
    from vllm.config.kernel import KernelConfig

    return hasattr(KernelConfig, "enable_jit_warmup")


def _captures_understate_queries() -> bool:
    spec = importlib.util.find_spec("vllm.v1.worker.gpu.cudagraph_utils")
    if spec is None or spec.origin is None:
        return False
    return "max_query_len = num_tokens" not in Path(spec.origin).read_text()


def sleep_frees_what_it_does_not_keep() -> bool:
    return importlib.util.find_spec("vllm.device_allocator.cumem") is not None


def _weights_are_never_shared() -> bool:
    from vllm.model_executor import utils

    return not hasattr(utils, "is_weights_pre_processed")


@functools.cache
def _filters_come_alone() -> bool:
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    return "vocab_size" not in inspect.signature(SamplingStates.get_top_k_top_p).parameters


@functools.cache
def verification_is_a_method() -> bool:
    """Whether the V2 model runner's rejection sampler has a method for what this package does in its place."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    return hasattr(RejectionSampler, "_verify")


def providers_are_asked() -> bool:
    return importlib.util.find_spec("vllm.model_executor.warmup.cutedsl_warmup") is not None


DIFFERENCES: tuple[Entry, ...] = (
    Entry(
        name="pickled_members",
        what="enum_members.add_member gives the member its own __reduce_ex__",
        why="vLLM hands its config to spawned children, which unpickle it before any plugin is loaded; enum members "
        "pickle by value, and the child's enum has no such value",
        remove_when="vLLM pickles these enums by name after loading plugins, or loads plugins before unpickling",
        needed=_members_pickle_by_value,
    ),
    Entry(
        name="members_by_hand",
        what="enum_members.add_member builds the member out of Enum's internals",
        why="0.26 has no AttentionBackendEnum.register, and the one of later versions logs in every process",
        remove_when="the oldest supported vLLM has AttentionBackendEnum.register and MLAPrefillBackendEnum.register",
        needed=_enum_cannot_grow,
    ),
    Entry(
        name="cpu_mla_prefill",
        what="mla.DSLMLAMetadataBuilder makes its own prefill backend where the layer holds another one",
        why="on a CPU the setting mla_prefill_backend is ignored in favour of vLLM's own",
        remove_when="get_mla_prefill_backend honours the setting on a CPU",
        needed=_cpu_fixes_the_mla_prefill_backend,
    ),
    Entry(
        name="cpu_mla",
        what="backend_selector.path_on_cpu refuses MLA",
        why="0.26's MLA layer has no prefill for a CPU: it chooses FlashAttention and fails to import it",
        remove_when="the oldest supported vLLM has CPU_MLA",
        needed=_cpu_has_no_mla,
    ),
    Entry(
        name="kv_cache_shape",
        what="dense and MLA backends define get_kv_cache_shape and get_kv_cache_stride_order",
        why="in 0.26 the backend owns the cache's shape; later the KV cache spec does, and the methods are not called",
        remove_when="the oldest supported vLLM has KVCacheLayout",
        needed=_cache_shape_belongs_to_the_backend,
    ),
    Entry(
        name="packed_pages",
        what="validation.torch_kv_dtype refuses --kv-cache-dtype nvfp4",
        why="0.26 has no AttentionBackend.customize_spec, by which a backend says what an NVFP4 page is",
        remove_when="the oldest supported vLLM has AttentionBackend.customize_spec",
        needed=_pages_cannot_be_packed,
    ),
    Entry(
        name="kernel_block_sizes",
        what="get_supported_kernel_block_sizes takes an optional spec",
        why="0.26 calls it without arguments, later versions with the cache's spec",
        remove_when="the oldest supported vLLM passes a spec",
        needed=_block_sizes_take_no_spec,
    ),
    Entry(
        name="context_chunks",
        what="compat.context_chunk",
        why="0.26 passes a chunk's index and all prefills' queries, later versions an object and its own queries",
        remove_when="the oldest supported vLLM has MLACommonPrefillMetadata.ContextChunk",
        needed=_context_chunks_are_indices,
    ),
    Entry(
        name="context_first",
        what="compat.merge_all_prefills, called by mla.DSLMLAMetadataBuilder.build",
        why="0.26 merges cached context into the first prefills of a step, as many as have any; its second model "
        "runner sorts them by length, so that one without context in front of one with it makes the latter wrong",
        remove_when="the oldest supported vLLM has no prefill_tokens_with_context",
        needed=_only_leading_prefills_are_merged,
    ),
    Entry(
        name="decode_query_bound",
        what="compat.decode_query_bound",
        why="0.26's _build_decode is not told the longest query; it is found from where queries start",
        remove_when="the oldest supported vLLM passes max_query_len",
        needed=_decode_is_built_without_query_bound,
    ),
    Entry(
        name="mla_causal",
        what="compat.is_causal",
        why="0.26's MLA metadata has no `causal`: all its batches are",
        remove_when="the oldest supported vLLM has MLACommonMetadata.causal",
        needed=_mla_is_always_causal,
    ),
    Entry(
        name="mla_head_sizes",
        what="mla.DSLMLAMetadata skips the base class's check of the head size",
        why="it refuses sizes by a list of vLLM's own kernels, such as 288 of MiniCPM3, which ours serve",
        remove_when="MLACommonMetadata asks the backend's own class",
        needed=_mla_head_sizes_are_fixed,
    ),
    Entry(
        name="dcp_selection",
        what="validation asks the current config for decode context parallelism",
        why="0.26's selection does not tell the backend about it",
        remove_when="the oldest supported vLLM has AttentionSelectorConfig.use_dcp",
        needed=_selection_does_not_see_dcp,
    ),
    Entry(
        name="ragged_decode_graphs",
        what="compat.ragged_decode_limit",
        why="0.26 has no graphs of decodes with different query lengths, nor the function that bounds them",
        remove_when="the oldest supported vLLM has max_decode_query_len",
        needed=_no_ragged_decode_graphs,
    ),
    Entry(
        name="discarded_draws",
        what="compat.seeds_of puts a compat.Seed in the place of each generator",
        why="where the V1 model runner discards the token of an unfinished prompt, it moves the request's generator "
        "back by a draw; one that was never used has nothing to go back to, and one of a CPU cannot be moved at all: "
        "vLLM's engine ends there",
        remove_when="the runner does not touch generators",
        needed=_discarded_draws_are_taken_back,
    ),
    Entry(
        name="capture_bounds",
        what="dense.DSLMetadataBuilder.build_for_cudagraph_capture takes a graph's tokens for its longest query",
        why="the second model runner of 0.26 to 0.30 captures mixed batches as requests of one token, and says so; a "
        "replay may have one request with all tokens. The first runner and later versions say the graph's tokens",
        remove_when="the oldest supported vLLM is 0.31",
        needed=_captures_understate_queries,
    ),
    Entry(
        name="sampling_filters",
        what="compat.filters_of",
        why="0.33's SamplingStates.get_top_k_top_p takes the number of logits, and says thirdly whether a row has "
        "top-p alone, which chooses among vLLM's own kernels",
        remove_when="the oldest supported vLLM is 0.33",
        needed=_filters_come_alone,
    ),
    Entry(
        name="verification_of_whole_batches",
        what="sampler.v2_verification.WholeBatchRejectionSampler",
        why="0.26's V2 rejection sampler verifies and gathers results in one method; later ones verify a part of a "
        "batch at a time in _verify, which this package replaces",
        remove_when="the oldest supported vLLM has RejectionSampler._verify",
        needed=lambda: not verification_is_a_method(),
    ),
    Entry(
        name="processed_weights",
        what="compat.weights_are_processed",
        why="0.26 has no cache of weights that other processes laid out, nor the function that says so",
        remove_when="the oldest supported vLLM has is_weights_pre_processed",
        needed=_weights_are_never_shared,
    ),
    Entry(
        name="eager_monitor",
        what="compat.warm_up_is_over looks at the garbage collector where vLLM's monitor of compilations stays off",
        why="the monitor starts when warm-up is over; 0.32 leaves it off with --enforce-eager, but freezes the heap at "
        "the same place all the same",
        remove_when="vLLM tells plugins that warm-up is over",
        needed=_eager_is_not_monitored,
    ),
)


def warm_up_registry() -> Callable[[object], None] | None:
    """VLLM's function that takes a provider of kernels to compile; None where it has none."""
    if not providers_are_asked():
        return None
    from vllm.model_executor.warmup import cutedsl_warmup

    return getattr(cutedsl_warmup, "register_cutedsl_warmup_provider", None)


def local_rank() -> int:
    """This worker's number among those of its node and engine; 0 where there are no others."""
    from vllm.distributed import parallel_state

    world = getattr(parallel_state, "_WORLD", None)
    return 0 if world is None else int(world.local_rank)


def is_batch_invariant() -> bool:
    """Whether a row's result must not depend on its batch: VLLM_BATCH_INVARIANT."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def has_routed_experts() -> bool:
    """Whether vLLM has experts' layers of the kind whose kernels can be replaced."""
    return importlib.util.find_spec("vllm.model_executor.layers.fused_moe.routed_experts") is not None


def weights_are_processed() -> bool:
    """Whether the weights that are being loaded have another process's layout."""
    from vllm.model_executor import utils

    return not _weights_are_never_shared() and bool(utils.is_weights_pre_processed())


def expert_ids_dtype(parallel: Any) -> torch.dtype:
    """Of expert numbers, as the exchange of tokens that a FusedMoEParallelConfig has wants them."""
    wide = ("use_deepep_ht_kernels", "use_deepep_v2_kernels")
    return torch.int64 if any(getattr(parallel, name, False) for name in wide) else torch.int32


def page_size(vllm_config: Any, backend: Any) -> int:
    """Tokens a page of the cache, as far as that is known when a model is made: vLLM settles it when it is loaded."""
    settings = vllm_config.cache_config
    size: int = settings.block_size or 16
    return size if getattr(settings, "user_specified_block_size", False) else backend.get_preferred_block_size(size)


def warm_up_is_over(vllm_config: Any) -> bool:
    """Whether this process's worker has warmed up, and what it runs now are requests."""
    if getattr(getattr(vllm_config, "kernel_config", None), "enable_jit_warmup", True):
        from vllm.utils import jit_monitor

        return jit_monitor.is_active()
    return gc.get_freeze_count() > 0


def captures_mixed_batches(vllm_config: Any) -> bool:
    """Whether graphs of whole steps replay prompts beside decodes; asked at capture, when vLLM has settled the mode."""
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL


_wakes = 0


def watch_sleep() -> None:
    """Count how often this process's memory pools wake. A second call changes nothing."""
    if not sleep_frees_what_it_does_not_keep():
        return
    try:
        from vllm.device_allocator.cumem import CuMemAllocator
    except ImportError:
        # Its library needs a driver: where there is none, nothing sleeps.
        return

    theirs = CuMemAllocator.wake_up
    if hasattr(theirs, "wrapped_by_dsl"):
        return

    @functools.wraps(theirs)
    def wake_up(*arguments: Any, **keywords: Any) -> Any:
        global _wakes
        result = theirs(*arguments, **keywords)
        _wakes += 1
        return result

    wake_up.wrapped_by_dsl = True  # type: ignore[attr-defined]
    CuMemAllocator.wake_up = wake_up


def wakes() -> int:
    """How often memory pools have woken. What was allocated in a pool before that holds arbitrary values since."""
    return _wakes


def cpu_has_mla() -> bool:
    """Whether vLLM's MLA layer works on a CPU."""
    return not _cpu_has_no_mla()


class ContextChunk(NamedTuple):
    """A chunk of cached context that a run of prefills attends to, up-projected and packed.

    Attributes:
        key: names the chunk within its step.
        query_start_loc, kv_start_loc: [requests + 1] int32 on the device.
        max_query_len, max_kv_len: upper bounds, in tokens.
    """

    key: int
    query_start_loc: torch.Tensor
    kv_start_loc: torch.Tensor
    max_query_len: int
    max_kv_len: int


def context_chunk(chunk: Any, prefill: Any) -> ContextChunk:
    """One form for both: vLLM's chunk object, or the index of a chunk in the prefill metadata."""
    if not isinstance(chunk, int):
        return ContextChunk(
            chunk.index, chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        )
    context = prefill.chunked_context
    return ContextChunk(
        chunk, prefill.query_start_loc, context.cu_seq_lens[chunk], prefill.max_query_len, context.max_seq_lens[chunk]
    )


def merge_all_prefills(mla_metadata: Any) -> None:
    """Have context merged into every prefill of a step: one without context has an lse of -inf there."""
    context: Any = getattr(mla_metadata.prefill, "chunked_context", None)
    if context is not None and hasattr(context, "prefill_tokens_with_context"):
        context.prefill_tokens_with_context = None


def decode_query_bound(arguments: Mapping[str, Any]) -> int:
    """The longest query in the decode part of a batch; `arguments` are those of _build_decode."""
    if "max_query_len" in arguments:
        return arguments["max_query_len"]
    return int(arguments["query_start_loc_cpu"].diff().max())


def is_causal(mla_metadata: Any) -> bool:
    return getattr(mla_metadata, "causal", True)


def uses_dcp(selection: Mapping[str, Any]) -> bool:
    """Whether decode context parallelism is on; `selection` are the arguments of validate_configuration."""
    if "use_dcp" in selection:
        return selection["use_dcp"]
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.decode_context_parallel_size > 1


def ragged_decode_limit(vllm_config: Any) -> int | None:
    """The longest query of a decode batch with different query lengths that a graph may replay."""
    from vllm.v1.attention import backend

    limit = getattr(backend, "max_decode_query_len", None)
    return None if limit is None else limit(vllm_config)


def filters_of(
    states: Any, requests: torch.Tensor, in_batch: Any, vocab: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Top-k and top-p of a step's rows on the V2 model runner; None where no request has one.

    Args:
        states: vLLM's SamplingStates.
        requests: [rows] on the device, each row's request.
        in_batch: the same requests on the host.
        vocab: logits of a row.
    """
    arguments = () if _filters_come_alone() else (vocab,)
    top_k, top_p, *_ = states.get_top_k_top_p(requests, in_batch, *arguments)
    return top_k, top_p


class Seed:
    """All that is needed of a request's torch.Generator, in its place."""

    def __init__(self, generator: torch.Generator) -> None:
        seed = generator.initial_seed()
        # From 0 to 2**64 - 1 there, int64 here.
        self.value = seed - 2**64 if seed >= 2**63 else seed

    def get_offset(self) -> int:
        """VLLM subtracts a draw from it and sets the result."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Tokens depend on their position alone: nothing has to be taken back."""


def seeds_of(generators: MutableMapping[int, Any]) -> dict[int, int]:
    """Row -> seed, int64, of the V1 model runner's generators; the mapping holds no generator afterwards."""
    for row, generator in generators.items():
        if not isinstance(generator, Seed):
            generators[row] = Seed(generator)
    return {row: seed.value for row, seed in generators.items()}


def last_positions(runner: Any, rows: int) -> torch.Tensor:
    """Where each request's last scheduled token is in its sequence, int64 [rows], of the V1 model runner."""
    last: torch.Tensor = runner.query_start_loc.gpu[1 : rows + 1] - 1
    return runner.positions[last]
