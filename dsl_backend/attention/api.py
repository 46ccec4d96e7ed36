# SPDX-License-Identifier: Apache-2.0
"""Attention on tensors: plan a step once, run it for every layer, write new keys into the cache.

    plan = api.plan(spec, batch)                 # once a step
    out = api.run(plan, q, keys, values)         # for each layer of that spec

All lengths stay on the device: neither call reads one, so both may be captured in a CUDA graph. The graph then uses the
plan's tensors and scratch: keep the plan as long as the graph, or a workspace that you gave it. An argument that does
not fit raises InvalidInput; a problem that no kernel serves raises Unsupported with all objections. Errors in values on
a GPU, such as a slot beyond the cache, are not detected; `Batch` and `write_kv` say what happens then.
"""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch

from dsl_backend import checks
from dsl_backend.attention import dispatch
from dsl_backend.attention.plan import AttentionPlan, Planner
from dsl_backend.attention.protocol import Operands, Writes
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.log import warning_once
from dsl_backend.quant.format import NVFP4
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import Workspace

__all__ = ["AttentionPlan", "AttentionSpec", "Batch", "Causality", "Planner", "Workspace", "plan", "run", "write_kv"]

CAUSAL_DTYPES = (torch.bool, torch.int32)
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Layouts to remember; a served model has one or two for each number of rows.
MOST_LAYOUTS = 256


def check_batch(spec: AttentionSpec, batch: Batch) -> None:
    """Raises InvalidInput where the batch does not fit the spec.

    A message is made for a batch that does not fit alone: steps outside of a graph are planned one by one.
    """
    if batch.seq_lens.dim() != 1:
        raise InvalidInput(f"seq_lens has shape {tuple(batch.seq_lens.shape)}: [requests] is needed")
    requests, device = batch.num_requests, batch.device
    per_request = [("query_start_loc", batch.query_start_loc, requests + 1), ("seq_lens", batch.seq_lens, requests)]
    if spec.page_size is None:
        require(batch.kv_start_loc is not None, "packed keys need kv_start_loc")
        assert batch.kv_start_loc is not None
        per_request.append(("kv_start_loc", batch.kv_start_loc, requests + 1))
    else:
        require(batch.block_table is not None, "paged keys need a block_table")
        assert batch.block_table is not None
        table = batch.block_table
        shape = table.shape
        if len(shape) != 2 or shape[0] < requests or (shape[1] > 1 and table.stride(1) != 1):
            raise InvalidInput(
                f"block_table has shape {tuple(shape)} and strides {table.stride()}: [requests = {requests}, pages] "
                f"with pages contiguous in a row is needed"
            )
        check_integers("block_table", table, device)
    for name, tensor, length in per_request:
        if tensor.shape != (length,):
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}: {(length,)} is needed for {requests} requests")
        if not tensor.is_contiguous():
            raise InvalidInput(f"{name} is not contiguous")
        check_integers(name, tensor, device)
    if spec.causality is Causality.PER_REQUEST:
        causal = batch.causal
        require(
            causal is not None and causal.shape == (requests,) and causal.dtype in CAUSAL_DTYPES,
            "Causality.PER_REQUEST needs Batch.causal, [requests] bool or int32",
        )
        assert causal is not None
        require(causal.is_contiguous(), "causal is not contiguous")
        require(causal.device == device, f"causal is on {causal.device}, seq_lens on {device}")


def check_integers(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.dtype != torch.int32:
        raise InvalidInput(f"{name} is {short(tensor.dtype)}: int32 is needed")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, seq_lens on {device}")


def plan(
    spec: AttentionSpec,
    batch: Batch,
    *,
    workspace: Workspace | None = None,
    kernel: str | None = None,
) -> AttentionPlan:
    """Choose the kernels for a batch. A caller with many steps keeps a `Planner` and asks it instead.

    Args:
        workspace: scratch to share with other plans of the same stream; a new one by default.
        kernel: a name from the dispatch table; no other kernel is taken. By default the best that serves the spec.

    Raises:
        InvalidInput: a tensor of the batch does not fit.
        Unsupported: no kernel serves the spec on the batch's device.
    """
    checks.instance("spec", spec, AttentionSpec)
    checks.instance("batch", batch, Batch)
    checks.kernel(kernel)
    device = batch.device
    if workspace is not None:
        checks.instance("workspace", workspace, Workspace)
        require(workspace.device == device, f"workspace is on {workspace.device}, seq_lens on {device}")
    check_batch(spec, batch)
    planner = Planner(spec, targets.detect(device), workspace or Workspace(device), kernel)
    return planner.plan(batch)


def check_rows(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """A tensor [rows >= shape[0], *shape[1:]] whose last dimension is contiguous."""
    checks.tensor(name, tensor)
    held = tensor.shape
    if len(held) != len(shape) or held[0] < shape[0] or held[1:] != shape[1:]:
        raise InvalidInput(f"{name} has shape {tuple(held)}: {shape} is needed, the first dimension or more")
    if tensor.dtype != dtype:
        raise InvalidInput(f"{name} is {short(tensor.dtype)}: {short(dtype)} is needed")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}: {device} is needed")
    if held[-1] != 1 and tensor.stride(-1) != 1:
        raise InvalidInput(f"{name} has stride {tensor.stride(-1)} in its last dimension: 1 is needed")


def check_pages(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], spec: AttentionSpec, device: torch.device
) -> None:
    """Keys or values, or a cache of them; shape[-1] counts the elements of a row."""
    check_rows(name, tensor, (*shape[:-1], spec.kv.width(shape[-1])), spec.kv_dtype, device)
    checks.apart(name, tensor)
    if objection := spec.kv.page_objection(tensor):
        raise InvalidInput(f"{name} {objection}")


def check_scales(
    spec: AttentionSpec,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    device: torch.device,
    requests: int | None = None,
    q_scale: torch.Tensor | None = None,
) -> None:
    """A layer with a quantized cache needs both scales, each one number or [heads_kv]; other layers ignore theirs.

    Args:
        requests: of the batch, where the spec may have scales of each request; None where keys are written.
        q_scale: the same of queries, which no other layer may have.
    """
    require(q_scale is None or spec.is_fp8_q, f"q_scale was given, and queries are {short(spec.query_dtype)}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale), ("q_scale", q_scale)):
        if scale is None:
            needed_by = requests is not None and spec.is_fp8_q if name == "q_scale" else spec.is_quantized_kv
            kind = "fp8" if spec.is_fp8_kv else spec.kv
            require(not needed_by, f"{kind} {'queries' if name == 'q_scale' else 'keys and values'} need {name}")
            continue
        if spec.scales_by_request and requests is not None:
            fits, needed = scale.shape == (requests, spec.heads_kv), "float32 [requests, heads_kv] = "
            needed += str((requests, spec.heads_kv))
        else:
            fits = scale.numel() == 1 or scale.shape == (spec.heads_kv,)
            needed = f"one float32, or [heads_kv = {spec.heads_kv}] of them,"
        if not (fits and scale.dtype == torch.float32 and scale.device == device):
            raise InvalidInput(
                f"{name} is {short(scale.dtype)} {tuple(scale.shape)} on {scale.device}: {needed} on {device} is needed"
            )


def check_out_scale(spec: AttentionSpec, out_scale: torch.Tensor | None, device: torch.device) -> None:
    """A layer with quantised outputs needs their scale, which no other layer may have."""
    if out_scale is None:
        require(not spec.is_quantized_out, f"outputs in {spec.out_format} need out_scale")
        return
    require(spec.is_quantized_out, f"out_scale was given, and outputs are {short(spec.output_dtype)}")
    if out_scale.numel() != 1 or out_scale.dtype != torch.float32 or out_scale.device != device:
        raise InvalidInput(
            f"out_scale is {short(out_scale.dtype)} {tuple(out_scale.shape)} on {out_scale.device}: one float32 on "
            f"{device} is needed"
        )


def check_out_block_scale(spec: AttentionSpec, scale: torch.Tensor | None, rows: int, device: torch.device) -> None:
    """A layer with NVFP4 outputs needs a tensor for the scales of their blocks, which no other layer may have."""
    if scale is None:
        require(not spec.is_nvfp4_out, "outputs in nvfp4 need out in two parts: elements, and scales of blocks")
        return
    kind = "unquantised" if spec.out_format is None else f"in {spec.out_format}"
    require(spec.is_nvfp4_out, f"out was given in two parts, and outputs are {kind}: one tensor is needed")
    least, width = spec.block_scale_shape(rows)
    shaped = scale.dim() == 2 and scale.shape[0] >= least and scale.shape[1] == width and scale.is_contiguous()
    if not shaped or scale.dtype != NVFP4.scales or scale.device != device:
        raise InvalidInput(
            f"out[1] is {short(scale.dtype)} {tuple(scale.shape)} with strides {scale.stride()} on {scale.device}: "
            f"contiguous {short(NVFP4.scales)} {(least, width)} on {device} is needed, the first dimension or more, in "
            f"the order of quant.reference.swizzled"
        )


def check_per_head(
    name: str, tensor: torch.Tensor | None, wanted: bool, dtypes: tuple[torch.dtype, ...], plan: AttentionPlan
) -> None:
    spec = plan.spec
    if (tensor is not None) != wanted:
        raise InvalidInput(f"{name} {'are missing' if wanted else 'were given'}: {spec=!s}")
    if tensor is not None:
        if tensor.shape != (spec.heads_q,) or not tensor.is_contiguous() or tensor.dtype not in dtypes:
            raise InvalidInput(
                f"{name} are {short(tensor.dtype)} {tuple(tensor.shape)}: contiguous [heads_q = {spec.heads_q}] of "
                f"{', '.join(short(dtype) for dtype in dtypes)} is needed"
            )
        device = plan.batch.device
        require(tensor.device == device, f"{name} are on {tensor.device}: {device} is needed")


def run(
    plan: AttentionPlan,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer.

    Args:
        plan: of this step and this layer's spec.
        q: [tokens, heads_q, head_dim]; for absorbed MLA also a pair of its first head_dim_v and its other elements.
        keys: [pages, page_size, heads_kv, head_dim], or packed [tokens_kv, heads_kv, head_dim]. Any strides but the
            last, as long as no two elements share memory. Pages and tokens that no row of a request sees may hold
            anything, NaN included: those past its length, and those below its first row's window. A NaN in a key or
            value that only later rows of a request see may reach earlier rows of the same tile, as in FlashAttention.
            NVFP4's are bytes, [pages, page_size, heads_kv, head_dim / 2 + head_dim / 16] of torch.float4_e2m1fn_x2 in
            dense pages: `quant.format.KVFormat` says where elements and scales are.
        values: the same with head_dim_v. For absorbed MLA, keys[..., :head_dim_v].
        out: [tokens, heads_q, head_dim_v], written in place and returned; a new tensor by default. Rows that belong
            to no request are not written; a row that sees no key becomes 0. It must not share memory with another
            tensor, which is not checked. NVFP4 outputs are a pair: bytes [tokens, heads_q, head_dim_v / 2], two e2m1
            each, the first in the low bits, which are returned; and the scales of blocks of 16 columns, float8_e4m3fn
            [tokens, heads_q * head_dim_v / 16] padded to multiples of 128 and 4, swizzled as
            `quant.reference.swizzled` says. A scale is the largest magnitude of the block's products with out_scale
            / 6, rounded and saturated at 448; NaN if one of the products is. An element is the product divided by
            that scale, rounded and saturated at 6. Scales of rows that belong to no request are not written.
        lse: [tokens, heads_q] float32 of any strides without overlap; receives the natural logarithm of the softmax's
            denominator (sinks included).
        sinks: [heads_q] of float32, bfloat16 or float16, where the spec has sinks. A head with -inf has none.
        alibi_slopes: [heads_q] float32, where the spec has alibi.
        k_scale, v_scale: with fp8 or NVFP4 keys, one float32 each, or [heads_kv]; a real value is the stored value
            times its scale, and of NVFP4 times that of its block. With `spec.scales_by_request` [requests, heads_kv],
            of any strides.
        q_scale: the same of the queries where `spec.q_dtype` says that they are quantised; by key head.
        out_scale: one float32 where `spec.out_format` says that outputs are quantised. An output in e4m3 is stored
            divided by it, rounded, and saturated at 448, infinities too; NaN stays NaN. One in NVFP4 is multiplied
            by it, as in vLLM and FlashInfer: 2688 / the largest magnitude that is expected.

    Raises:
        InvalidInput: a tensor does not fit the plan, or requires a gradient while gradients are on (there is no
            backward); the message names it.
    """
    checks.instance("plan", plan, AttentionPlan)
    q_rope = None
    if isinstance(q, tuple):
        require(plan.spec.mla, "only absorbed MLA takes q in two parts")
        require(len(q) == 2, f"q has {len(q)} parts: two are needed, or one tensor")
        q, q_rope = q
        checks.tensor("q[1]", q_rope)
    out_block_scale = None
    if isinstance(out, tuple):
        require(len(out) == 2, f"out has {len(out)} parts: one tensor is needed, or of nvfp4 two")
        out, out_block_scale = out
        checks.tensor("out[1]", out_block_scale)
    if out is None:
        checks.tensor("q", q)
        out = q.new_zeros((*q.shape[:1], plan.spec.heads_q, plan.spec.output_width), dtype=plan.spec.output_dtype)
    scales = k_scale, v_scale, q_scale, out_scale, out_block_scale
    operands = Operands(q, q_rope, keys, values, out, lse, sinks, alibi_slopes, *scales)
    if torch.is_grad_enabled():
        check_gradients(operands)
    layouts = plan.planner.layouts
    facts = facts_of(plan, operands)
    if facts is None or facts not in layouts:
        check_operands(plan, operands)
        if len(layouts) >= MOST_LAYOUTS:
            layouts.clear()
        layouts.add(facts)
    plan.launch(operands)
    return out


def facts_of(plan: AttentionPlan, operands: Operands) -> tuple[Any, ...] | None:
    """All that `check_operands` reads beside the planner's spec; None where an operand is no tensor.

    Called for every layer of every step.
    """
    try:
        layout = [one if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in operands]
        shared = plan.spec.mla and operands.keys.data_ptr() == operands.values.data_ptr()
    except AttributeError:
        return None
    # Scales of requests are the only operands whose shape follows their number.
    requests = plan.batch.num_requests if plan.spec.scales_by_request else None
    return (plan.batch.num_tokens, requests, plan.batch.device, shared, *layout)


def check_gradients(tensors: Operands) -> None:
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if tensor is not None and getattr(tensor, "requires_grad", False):
            checks.no_gradient(name, tensor)


def check_operands(plan: AttentionPlan, operands: Operands) -> None:
    """Raises InvalidInput where a tensor does not fit the plan or the others."""
    spec, rows, device = plan.spec, plan.batch.num_tokens, plan.batch.device
    q, q_rope, keys, values, out, lse, sinks, alibi_slopes, k_scale, v_scale, q_scale, *out_scales = operands
    for name, tensor in zip(operands._fields[5:], operands[5:], strict=True):
        if tensor is not None:
            checks.tensor(name, tensor)
    if q_rope is None:
        check_rows("q", q, (rows, spec.heads_q, spec.head_dim), spec.query_dtype, device)
    else:
        check_rows("q[0]", q, (rows, spec.heads_q, spec.head_dim_v), spec.query_dtype, device)
        check_rows("q[1]", q_rope, (rows, spec.heads_q, spec.head_dim - spec.head_dim_v), spec.query_dtype, device)
    check_rows("out", out, (rows, spec.heads_q, spec.output_width), spec.output_dtype, device)
    checks.apart("out", out)
    lead = (0,) if spec.page_size is None else (0, spec.page_size)
    for name, tensor, width in (("keys", keys, spec.head_dim), ("values", values, spec.head_dim_v)):
        check_pages(name, tensor, (*lead, spec.heads_kv, width), spec, device)
    if keys.shape[0] != values.shape[0]:
        what = "tokens" if spec.page_size is None else "pages"
        raise InvalidInput(f"keys hold {keys.shape[0]} {what}, values {values.shape[0]}")
    require(
        not spec.mla or (values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()),
        "absorbed MLA's values are keys[..., :head_dim_v], not a tensor of their own",
    )
    if lse is not None:
        check_lse(lse, rows, spec.heads_q, device)
    check_per_head("sinks", sinks, spec.sinks, SINK_DTYPES, plan)
    check_per_head("alibi_slopes", alibi_slopes, spec.alibi, (torch.float32,), plan)
    check_scales(spec, k_scale, v_scale, device, plan.batch.num_requests, q_scale)
    check_out_scale(spec, out_scales[0], device)
    check_out_block_scale(spec, out_scales[1], rows, device)


def check_lse(lse: torch.Tensor, rows: int, heads: int, device: torch.device) -> None:
    if lse.dim() != 2 or lse.shape[0] < rows or lse.shape[1] != heads or lse.dtype != torch.float32:
        raise InvalidInput(f"lse is {short(lse.dtype)} {tuple(lse.shape)}: float32 {(rows, heads)} is needed")
    require(lse.device == device, f"lse is on {lse.device}: {device} is needed")
    checks.apart("lse", lse)


def write_kv(
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """Store new keys and values at their slots of a paged cache.

    Absorbed MLA stores the latent as the key and the rope part as the value: caches are cache[..., :latent] and
    cache[..., latent:].

    Args:
        key, value: [tokens, heads_kv, dim].
        key_cache, value_cache: [pages, page_size, heads_kv, dim], any strides but the last, as long as no two elements
            share memory; NVFP4's as `run` takes them.
        slot_mapping: [tokens or fewer] int64; slot s is token s % page_size of page s // page_size; a row whose slot
            is negative is skipped. A slot beyond the cache is an error: kernels skip it, since slots are not read on
            the host; the reference raises InvalidInput before it writes anything.
        k_scale, v_scale: with an fp8 or NVFP4 cache, one float32 each, or [heads_kv]; the cache stores x / scale.
            Infinities and what is too large saturate at the format's largest number (±448 of float8_e4m3fn, ±57344 of
            float8_e5m2, ±2688 of NVFP4). NVFP4's scale of a block is the largest magnitude of its quotients / 6.

    Raises:
        InvalidInput: a tensor does not fit, or requires a gradient while gradients are on.
        Unsupported: no kernel serves the spec on this device.
    """
    try:
        found = writer(spec, slot_mapping.device, kernel)
    except (AttributeError, TypeError):
        checks.tensor("slot_mapping", slot_mapping)
        checks.instance("spec", spec, AttentionSpec)
        checks.kernel(kernel)
        raise
    found(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


@cache
def writer(spec: AttentionSpec, device: torch.device, kernel: str | None = None) -> "Writer":
    """What `write_kv` calls; chosen once, since every layer calls it in every step."""
    return Writer(spec, lambda: targets.detect(device), kernel)


class Writer:
    """Stores keys and values for layers of one spec.

    Every layer of a step makes one call, and each costs host time: a layout that an earlier call had is not checked
    again.

    Args:
        target: returns the caches' target; called at first use.
        kernel: a name from the dispatch table; no other kernel is taken. By default the best that serves the spec;
            where that does not take the tensors' alignment or strides, the next one.
    """

    def __init__(self, spec: AttentionSpec, target: Callable[[], targets.Target], kernel: str | None = None) -> None:
        checks.instance("spec", spec, AttentionSpec)
        checks.kernel(kernel)
        self.spec, self.target, self.kernel = spec, target, kernel
        self._by_layout: dict[tuple[Any, ...], Writes] = {}
        self._kernels: dict[str, Writes] = {}

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """As `write_kv`."""
        if torch.is_grad_enabled():
            self.check_gradients(key, value, key_cache, value_cache)
        try:
            tokens, key_shape, value_shape = slot_mapping.numel(), key.shape, value.shape
            # All that `check` and a kernel's objections read, except the number of rows.
            facts = (
                (slot_mapping.dtype, slot_mapping.device, slot_mapping.dim(), slot_mapping.is_contiguous()),
                (key_shape[1:], key.stride(), key.dtype, key.device),
                (value_shape[1:], value.stride(), value.dtype, value.device),
                (key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.device),
                (value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.device),
                (key.data_ptr() | value.data_ptr()) % 16,
                (key_cache.data_ptr() | value_cache.data_ptr()) % 16,
                k_scale is None or (k_scale.shape, k_scale.dtype, k_scale.device),
                v_scale is None or (v_scale.shape, v_scale.dtype, v_scale.device),
            )
        except AttributeError:  # one of them is no tensor: `check` says which
            self.check(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
            raise
        serving = self._by_layout.get(facts)
        if serving is None or key_shape[0] < tokens or value_shape[0] < tokens:
            self.check(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
            if len(self._by_layout) >= MOST_LAYOUTS:
                self._by_layout.clear()
            serving = self._by_layout[facts] = self.kernel_for(key, value, key_cache, value_cache)
        if tokens:
            serving(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)

    @staticmethod
    def check_gradients(*tensors: torch.Tensor) -> None:
        for name, tensor in zip(("key", "value", "key_cache", "value_cache"), tensors, strict=True):
            checks.tensor(name, tensor)
            checks.no_gradient(name, tensor)

    def check(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        """Raises InvalidInput where a tensor does not fit the spec or the others."""
        spec = self.spec
        for name, tensor in (("slot_mapping", slot_mapping), ("k_scale", k_scale), ("v_scale", v_scale)):
            if tensor is not None or name == "slot_mapping":
                checks.tensor(name, tensor)
        require(spec.page_size is not None, "a cache without pages has no slots")
        assert spec.page_size is not None
        require(
            slot_mapping.dtype == torch.int64 and slot_mapping.dim() == 1 and slot_mapping.is_contiguous(),
            f"slot_mapping is {short(slot_mapping.dtype)} {tuple(slot_mapping.shape)}: contiguous int64 [tokens] is "
            f"needed",
        )
        tokens, device = slot_mapping.shape[0], slot_mapping.device
        dim, dim_v = spec.written_dims
        for name, rows, pages, width in (("key", key, key_cache, dim), ("value", value, value_cache, dim_v)):
            check_rows(name, rows, (tokens, spec.heads_kv, width), spec.dtype, device)
            check_pages(f"{name}_cache", pages, (0, spec.page_size, spec.heads_kv, width), spec, device)
        require(
            key_cache.shape[0] == value_cache.shape[0],
            f"key_cache holds {key_cache.shape[0]} pages, value_cache {value_cache.shape[0]}",
        )
        check_scales(spec, k_scale, v_scale, device)

    @cached_property
    def names(self) -> list[str]:
        """The kernels that serve the spec, best first; the named kernel alone where there is one."""
        operation, target = dispatch.Operation.WRITE_KV, self.target()
        best = dispatch.choose(operation, self.spec, target, self.kernel).name
        served = [entry.name for entry, reasons in dispatch.judge(operation, self.spec, target) if not reasons]
        return [best] if self.kernel else served

    def prepared(self, name: str) -> Writes:
        """The kernel of that name, compiled."""
        if name not in self._kernels:
            entry = dispatch.choose(dispatch.Operation.WRITE_KV, self.spec, self.target(), name)
            made: Writes = entry.load()(self.spec, self.target())
            made.prepare()
            self._kernels[name] = made
        return self._kernels[name]

    def prepare(self) -> None:
        """Compile what calls need.

        Raises:
            Unsupported: no kernel serves the spec, or the named one does not.
        """
        self.prepared(self.names[0])

    def kernel_for(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> Writes:
        """The best kernel that takes the tensors' alignment and strides.

        Raises:
            InvalidInput: no kernel takes them.
            Unsupported: no kernel serves the spec, or the named one does not.
        """
        refused: list[str] = []
        for name in self.names:
            found = self.prepared(name)
            reasons = found.objections(key, value, key_cache, value_cache)
            if not reasons:
                if refused:
                    warning_once(f"keys and values are written by {name} (not by {', nor by '.join(refused)})")
                return found
            refused.append(f"{name}: {'; '.join(reasons)}")
        raise InvalidInput("; ".join(refused))
