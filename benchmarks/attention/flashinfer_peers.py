# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers. Without its package of compiled kernels, nvcc compiles for minutes at a kernel's first use.

They are columns by default all the same: `--prepare-seconds` bounds the wait, and the caches on disk are kept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from dsl_backend.providers import Run, provider

from ..columns import lacks, missing, of_capability
from .inputs import Inputs, pages_of, repage
from .problems import Problem
from .vllm_dense import e4m3_only, limits, queries

WORKSPACE_BYTES = 394 << 20  # vLLM's default
XQA_PAGES = (16, 32, 64, 128)
# Of `trtllm_batch_decode_with_kv_cache_mla`: the larger of the two sizes of page that vLLM gives it, and of how many
# tokens a row of its page table has a multiple.
LATENT_PAGE, TABLE_TOKENS = 64, 128
QK_NOPE_DIM = 128  # of DeepSeek's heads before absorption; it chooses nothing
# Dense CuTe DSL kernels in FlashInfer 0.7.2: tokens of a page, and of what a head's elements are a multiple, or the
# most that prefill has tensor memory for.
CUTE = "flashinfer.cute_dsl.attention"
CUTE_DECODE, CUTE_DECODE_PAGES, CUTE_DECODE_HEADS = "BatchDecodePagedCuteDSLWrapper", (8, 16, 32, 64), 64
CUTE_PREFILL, CUTE_PREFILL_PAGES, CUTE_PREFILL_HEADS = "BatchPrefillCuteDSLWrapper", (8, 16, 32, 64, 128), 128


def workspace(inputs: Inputs) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.one.device)


def page_lists(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block table in FlashInfer's form.

    Returns:
        first page of each request [requests + 1] and tokens in its last page [requests], int32 on the CPU; all pages
        one after another, int32 on the device.
    """
    assert problem.page_size is not None
    assert inputs.batch.block_table is not None
    counts = [pages_of(kv_len, problem.page_size) for kv_len in problem.kv_lens]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([(kv_len - 1) % problem.page_size + 1 for kv_len in problem.kv_lens], dtype=torch.int32)
    table = inputs.batch.block_table
    pages = torch.cat([table[request, :count] for request, count in enumerate(counts)])
    return starts, last, pages


def flashinfer_objections(problem: Problem) -> list[str]:
    return missing("flashinfer")


class Wrapper(Protocol):
    """A planned problem of FlashInfer's."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> object: ...


def sizes_of(problem: Problem) -> tuple[int | None, ...]:
    """The layer, as a paged plan takes it: query heads, key heads, elements of a head, tokens of a page."""
    return problem.heads_q, problem.heads_kv, problem.head_dim, problem.page_size


def options_of(problem: Problem) -> dict[str, Any]:
    """The rest of what a paged plan is told of a layer."""
    return {
        "window_left": -1 if problem.window_left is None else problem.window_left,
        "q_data_type": problem.dtype,
        "kv_data_type": problem.kv_dtype,
        "sm_scale": problem.scale,
    }


def paged_decode(problem: Problem, inputs: Inputs) -> Wrapper:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    starts, last, pages = page_lists(problem, inputs)
    device = inputs.one.device
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(inputs),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.to(device),
        paged_kv_indices_buffer=pages.clone(),
        paged_kv_last_page_len_buffer=last.to(device),
    )
    wrapper.plan(
        starts,
        pages,
        last,
        *sizes_of(problem),
        **options_of(problem),
    )
    return wrapper


def paged_prefill(problem: Problem, inputs: Inputs) -> Wrapper:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    starts, last, pages = page_lists(problem, inputs)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(inputs), "NHD")
    wrapper.plan(
        inputs.batch.query_start_loc.cpu(),
        starts,
        pages,
        last,
        *sizes_of(problem),
        head_dim_vo=problem.head_dim_v,
        causal=True,
        **options_of(problem),
    )
    return wrapper


@provider(
    "decode",
    "prefill",
    name="FLASHINFER",
    objections=flashinfer_objections,
    limits=limits,
    package="flashinfer-python",
)
def paged(problem: Problem, inputs: Inputs) -> Run:
    """FLASHINFER as vLLM uses it: decode on tensor cores in a CUDA graph, and its prefill for longer queries.

    With fp8 keys the queries stay 16 bits wide, as vLLM has them outside TensorRT-LLM's kernels.
    """
    run_layer = paged_decode(problem, inputs) if max(problem.q_lens) == 1 else paged_prefill(problem, inputs)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        run_layer.run(layer.q, (layer.keys, layer.values), out=layer.out)
        return layer.out

    return run


def cute_dense_objections(problem: Problem, pages: Sequence[int]) -> list[str]:
    """Of both CuTe DSL kernels for separate keys and values."""
    reasons = missing("flashinfer") + of_capability((10,)) + e4m3_only(problem)
    if problem.head_dim != problem.head_dim_v:
        reasons.append("has keys and values of one size")
    if problem.page_size not in pages:
        reasons.append(f"pages of {problem.page_size} are not one of {tuple(pages)}")
    return reasons


def cute_decode_objections(problem: Problem) -> list[str]:
    reasons = cute_dense_objections(problem, CUTE_DECODE_PAGES)
    if len(set(problem.q_lens)) > 1:
        reasons.append("needs the same number of queries in every request")
    if problem.head_dim % CUTE_DECODE_HEADS:
        reasons.append(f"heads of {problem.head_dim} are not a multiple of {CUTE_DECODE_HEADS}")
    return reasons or lacks(CUTE, CUTE_DECODE)


@provider(
    "decode",
    name="FlashInfer CuTe DSL",
    objections=cute_decode_objections,
    limits=limits,
    package="flashinfer-python",
)
def cute_decode(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's CuTe DSL decode, planned as its `BatchDecodeWithPagedKVCacheWrapper` plans it.

    The wrapper allocates the output, and fills it with zeros where it adds up the results of split keys in it. With
    fp8 keys the queries and P have 8 bits too.
    """
    from flashinfer.cute_dsl.attention import BatchDecodePagedCuteDSLWrapper

    starts, _, pages = page_lists(problem, inputs)
    q = queries(problem, inputs)
    heads_q, heads_kv, head_dim, page_size = sizes_of(problem)
    wrapper = BatchDecodePagedCuteDSLWrapper(workspace(inputs), use_cuda_graph=True)
    wrapper.plan(
        starts.to(inputs.one.device),
        pages,
        inputs.batch.seq_lens,
        num_qo_heads=heads_q,
        num_kv_heads=heads_kv,
        head_dim=head_dim,
        page_size=page_size,
        q_data_type=q[0].dtype,
        kv_data_type=problem.kv_dtype,
        o_data_type=problem.dtype,
        sm_scale=problem.scale,
        reduction="none" if problem.batch_invariant else "auto",
        q_len_per_req=problem.q_lens[0],
        window_left=problem.window_left,
        window_right=0,
        max_kv_len=max(problem.kv_lens),
    )

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        result: torch.Tensor = wrapper.run(q[index], layer.keys, layer.values)
        return result

    return run


def cute_prefill_objections(problem: Problem) -> list[str]:
    reasons = cute_dense_objections(problem, CUTE_PREFILL_PAGES)
    multiple = 32 // problem.kv_dtype.itemsize
    if problem.head_dim > CUTE_PREFILL_HEADS or problem.head_dim % multiple:
        reasons.append(f"has heads of up to {CUTE_PREFILL_HEADS}, in multiples of {multiple}")
    return reasons or lacks(CUTE, CUTE_PREFILL)


@provider(
    "prefill",
    name="FlashInfer CuTe DSL",
    objections=cute_prefill_objections,
    limits=limits,
    package="flashinfer-python",
)
def cute_prefill(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's CuTe DSL prefill over pages, planned as its `BatchPrefillWithPagedKVCacheWrapper` plans it.

    In each launch the wrapper copies the kernel's output, which has padding before it, to ours.
    """
    from flashinfer.cute_dsl.attention import BatchPrefillCuteDSLWrapper

    starts, last, pages = page_lists(problem, inputs)
    q = queries(problem, inputs)
    heads_q, heads_kv, head_dim, page_size = sizes_of(problem)
    wrapper = BatchPrefillCuteDSLWrapper(workspace(inputs), use_cuda_graph=True)
    wrapper.plan(
        inputs.batch.query_start_loc,
        num_qo_heads=heads_q,
        num_kv_heads=heads_kv,
        head_dim_qk=head_dim,
        head_dim_vo=problem.head_dim_v,
        causal=True,
        sm_scale=problem.scale,
        q_data_type=q[0].dtype,
        kv_data_type=problem.kv_dtype,
        window_left=-1 if problem.window_left is None else problem.window_left,
        page_size=page_size,
        paged_kv_indptr=starts,
        paged_kv_indices=pages,
        paged_kv_last_page_len=last,
        kv_layout="NHD",
    )

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        wrapper.run_paged(q[index], (layer.keys, layer.values), out=layer.out)
        return layer.out

    return run


def xqa_objections(problem: Problem) -> list[str]:
    reasons = missing("flashinfer") + e4m3_only(problem)
    if max(problem.q_lens) > 1:
        reasons.append("decodes one query a request without a mask tensor")
    if problem.page_size not in XQA_PAGES:
        reasons.append(f"pages of {problem.page_size} are not one of {XQA_PAGES}")
    return reasons


@provider("decode", name="XQA", objections=xqa_objections, limits=limits, package="flashinfer-python")
def xqa(problem: Problem, inputs: Inputs) -> Run:
    """TensorRT-LLM's XQA decode."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    scratch, batch = workspace(inputs), inputs.batch

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        xqa_batch_decode_with_kv_cache(
            layer.q,
            (layer.keys, layer.values),
            scratch,
            batch.block_table,
            batch.seq_lens,
            batch.max_seq_len,
            bmm1_scale=problem.scale,
            bmm2_scale=1.0,
            window_left=-1 if problem.window_left is None else problem.window_left,
            out=layer.out,
            kv_layout="NHD",
        )
        return layer.out

    return run


def latent_objections(problem: Problem) -> list[str]:
    reasons = missing("flashinfer")
    return [*reasons, "has MLA kernels for fp8 keys on SM100 only"] if problem.is_fp8_kv else reasons


@provider(
    "mla-decode",
    name="FLASHINFER_MLA",
    objections=latent_objections,
    limits=limits,
    package="flashinfer-python",
)
def latent(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's wrapper for MLA decode, by default with the kernel of FA3 on Hopper and that of FA2 elsewhere."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    starts, _, pages = page_lists(problem, inputs)
    batch, latent = inputs.batch, problem.head_dim_v
    device = inputs.one.device
    wrapper = BatchMLAPagedAttentionWrapper(
        workspace(inputs),
        use_cuda_graph=True,
        qo_indptr=batch.query_start_loc.clone(),
        kv_indptr=starts.to(device),
        kv_indices=pages.clone(),
        kv_len_arr=batch.seq_lens.clone(),
    )
    wrapper.plan(
        batch.query_start_loc,
        starts.to(device),
        pages,
        batch.seq_lens,
        problem.heads_q,
        latent,
        problem.head_dim - latent,
        problem.page_size,
        True,  # causal
        problem.scale,
        problem.dtype,
        problem.kv_dtype,
    )

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        q, cache = layer.q, layer.cache
        wrapper.run(q[..., :latent], q[..., latent:], cache[..., :latent], cache[..., latent:], out=layer.out)
        return layer.out

    return run


def backend_objections(problem: Problem, majors: Sequence[int]) -> list[str]:
    reasons = missing("flashinfer") + of_capability(majors) + e4m3_only(problem)
    if len(set(problem.q_lens)) > 1:
        reasons.append("needs the same number of queries in every request")
    if problem.batch_invariant:
        reasons.append("vLLM does not use it in batch-invariant mode")
    if problem.dtype != torch.bfloat16:
        reasons.append("writes bfloat16 only")
    return reasons


def xqa_latent_objections(problem: Problem) -> list[str]:
    reasons = backend_objections(problem, (12,))
    return [*reasons, "decodes one query a request"] if max(problem.q_lens) > 1 else reasons


def trtllm_objections(problem: Problem) -> list[str]:
    reasons = backend_objections(problem, (10,))
    if 64 < problem.heads_q < 128:
        reasons.append("has no tiles for 65 to 127 heads")
    return reasons


def cute_objections(problem: Problem) -> list[str]:
    reasons = backend_objections(problem, (10,))
    return [*reasons, "has at most 128 heads"] if problem.heads_q > 128 else reasons


def counters(problem: Problem, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The counters of trtllm-gen's kernels, zeroed once as in vLLM; before 0.6.18 FlashInfer zeroes its own."""
    from flashinfer import utils

    count = getattr(utils, "get_trtllm_gen_multi_ctas_kv_counter_bytes", None)
    if count is None:
        return {}
    device = inputs.one.device
    size = count(problem.requests, problem.heads_q, utils.get_device_sm_count(device))
    return {"multi_ctas_kv_counter_buffer": torch.zeros(size, dtype=torch.uint8, device=device)}


def latent_backend(problem: Problem, inputs: Inputs, backend: str) -> Run:
    """`trtllm_batch_decode_with_kv_cache_mla` with one of its backends, on the same keys in pages of 64."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    table, caches = repage(problem, inputs, LATENT_PAGE)
    # The added pages are beyond every request's length.
    table = torch.nn.functional.pad(table, (0, -table.shape[1] % (TABLE_TOKENS // LATENT_PAGE)))
    scratch, batch, latent = workspace(inputs), inputs.batch, problem.head_dim_v
    options = counters(problem, inputs) if backend == "trtllm-gen" else {}
    steps = (problem.requests, problem.q_lens[0], problem.heads_q)
    q = [one.view(*steps, problem.head_dim) for one in queries(problem, inputs)]
    # XQA's output has no dimension of a request's queries.
    rows = (problem.requests, problem.heads_q) if backend == "xqa" else steps

    def run(index: int) -> torch.Tensor:
        out = inputs.layers[index].out
        trtllm_batch_decode_with_kv_cache_mla(
            query=q[index],
            kv_cache=caches[index],
            workspace_buffer=scratch,
            qk_nope_head_dim=QK_NOPE_DIM,
            kv_lora_rank=latent,
            qk_rope_head_dim=problem.head_dim - latent,
            block_tables=table,
            seq_lens=batch.seq_lens,
            max_seq_len=batch.max_seq_len,
            out=out.view(*rows, latent),
            bmm1_scale=problem.scale,
            bmm2_scale=1.0,
            backend=backend,
            **options,
        )
        return out

    return run


for column, backend, objections in (
    ("FlashInfer CuTe DSL", "cute-dsl", cute_objections),
    ("trtllm-gen", "trtllm-gen", trtllm_objections),
    ("XQA", "xqa", xqa_latent_objections),
):
    provider("mla-decode", name=column, objections=objections, limits=limits, package="flashinfer-python")(
        partial(latent_backend, backend=backend)
    )


@provider(
    "mla-prefill",
    name="FLASHINFER",
    objections=flashinfer_objections,
    limits=limits,
    package="flashinfer-python",
)
def packed(problem: Problem, inputs: Inputs) -> Run:
    """FlashInfer's prefill over packed keys."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    batch = inputs.batch
    assert batch.kv_start_loc is not None
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(inputs), "NHD")
    wrapper.plan(
        batch.query_start_loc,
        batch.kv_start_loc,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        head_dim_vo=problem.head_dim_v,
        causal=True,
        sm_scale=problem.scale,
        q_data_type=problem.dtype,
        kv_data_type=problem.kv_dtype,
    )

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        wrapper.run(layer.q, layer.keys, layer.values, out=layer.out)
        return layer.out

    return run
