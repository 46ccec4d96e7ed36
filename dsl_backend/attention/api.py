# SPDX-License-Identifier: Apache-2.0
"""Attention on tensors: plan a step once, run it for every layer, write new keys into the cache.

    plan = api.plan(spec, batch)                 # once a step
    out = api.run(plan, q, keys, values)         # for each layer of that spec

All lengths stay on the device: neither call reads one, so both may be captured in a CUDA graph. A shape that does not
fit is refused here with InvalidInput, a problem that no kernel serves with Unsupported and every kernel's objection.
"""

import torch

from dsl_backend.attention import dispatch
from dsl_backend.attention.plan import AttentionPlan, Operands, Planner, Workspace
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality, short
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import target as targets

__all__ = ["AttentionPlan", "AttentionSpec", "Batch", "Causality", "Planner", "Workspace", "plan", "run", "write_kv"]


def require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidInput(message)


def check_batch(spec: AttentionSpec, batch: Batch) -> None:
    """Raises InvalidInput where the batch does not fit the spec."""
    requests, device = batch.num_requests, batch.seq_lens.device
    starts = batch.query_start_loc
    require(
        starts.shape == (requests + 1,),
        f"query_start_loc has shape {tuple(starts.shape)}: [requests + 1] = {(requests + 1,)} is needed",
    )
    expected = [("query_start_loc", starts), ("seq_lens", batch.seq_lens)]
    if spec.page_size is None:
        require(batch.kv_start_loc is not None, "packed keys need kv_start_loc")
        assert batch.kv_start_loc is not None
        require(
            batch.kv_start_loc.shape == (requests + 1,),
            f"kv_start_loc has shape {tuple(batch.kv_start_loc.shape)}: [requests + 1] = {(requests + 1,)} is needed",
        )
        expected.append(("kv_start_loc", batch.kv_start_loc))
    else:
        require(batch.block_table is not None, "paged keys need a block_table")
        assert batch.block_table is not None
        table = batch.block_table
        require(
            table.dim() == 2 and table.shape[0] >= requests and table.stride(-1) in (0, 1),
            f"block_table has shape {tuple(table.shape)} and strides {table.stride()}: [requests = {requests}, pages] "
            f"with neighbouring pages side by side is needed",
        )
        expected.append(("block_table", table))
    for name, tensor in expected:
        require(tensor.dtype == torch.int32, f"{name} is {short(tensor.dtype)}: int32 is needed")
        require(tensor.device == device, f"{name} is on {tensor.device}, seq_lens on {device}")
        require(name == "block_table" or tensor.is_contiguous(), f"{name} is not contiguous")
    if spec.causality is Causality.PER_REQUEST:
        require(
            batch.causal is not None and batch.causal.shape == (requests,) and batch.causal.dtype == torch.bool,
            "Causality.PER_REQUEST needs Batch.causal, [requests] bool",
        )
    for name in ("num_tokens", "max_query_len", "max_seq_len"):
        require(getattr(batch, name) >= 0, f"{name}={getattr(batch, name)} is negative")


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
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves the spec.

    Raises:
        InvalidInput: a tensor of the batch does not fit.
        Unsupported: no kernel serves the spec on the batch's device.
    """
    check_batch(spec, batch)
    device = batch.seq_lens.device
    planner = Planner(spec, targets.detect(device), workspace or Workspace(device), kernel)
    return planner.plan(batch)


def check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A tensor [rows >= shape[0], *shape[1:]] whose last dimension is contiguous."""
    require(
        tensor.dim() == len(shape) and tensor.shape[0] >= shape[0] and tuple(tensor.shape[1:]) == shape[1:],
        f"{name} has shape {tuple(tensor.shape)}: {shape} is needed, the first dimension or more",
    )
    require(tensor.dtype == dtype, f"{name} is {short(tensor.dtype)}: {short(dtype)} is needed")
    require(
        tensor.shape[-1] == 1 or tensor.stride(-1) == 1,
        f"{name} has stride {tensor.stride(-1)} in its last dimension: 1 is needed",
    )


def run(
    plan: AttentionPlan,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer.

    Args:
        plan: of this step and this layer's spec.
        q: [tokens, heads_q, head_dim]; for absorbed MLA also a pair of its first head_dim_v and its other elements.
        keys: [pages, page_size, heads_kv, head_dim], or packed [tokens_kv, heads_kv, head_dim]. Any strides but the
            last. Pages past a request's length and tokens past it in its last page may hold anything.
        values: the same with head_dim_v. For absorbed MLA, keys[..., :head_dim_v].
        out: [tokens, heads_q, head_dim_v], written in place and returned; a new tensor by default. Rows that belong
            to no request are left as they are; a row that sees no key becomes 0.
        lse: [tokens, heads_q] float32 of any strides, receives the natural logarithm of the softmax's denominator
            (sinks included).
        sinks: [heads_q] float32, 16-bit or 32-bit, where the spec has sinks.
        alibi_slopes: [heads_q] float32, where the spec has alibi.
        k_scale, v_scale: one-element float32 tensors; real values are stored fp8 values times these.

    Raises:
        InvalidInput: a tensor does not fit the plan; the message names it.
    """
    spec, batch = plan.spec, plan.batch
    q_rope = None
    rows = batch.num_tokens
    if isinstance(q, tuple):
        require(spec.latent, "only absorbed MLA takes q in two parts")
        q, q_rope = q
        check_rows("q[0]", q, (rows, spec.heads_q, spec.head_dim_v), spec.dtype)
        check_rows("q[1]", q_rope, (rows, spec.heads_q, spec.head_dim - spec.head_dim_v), spec.dtype)
    else:
        check_rows("q", q, (rows, spec.heads_q, spec.head_dim), spec.dtype)
    if out is None:
        out = q.new_zeros((q.shape[0], spec.heads_q, spec.head_dim_v))
    check_rows("out", out, (rows, spec.heads_q, spec.head_dim_v), spec.dtype)
    lead = (0,) if spec.page_size is None else (0, spec.page_size)
    check_rows("keys", keys, (*lead, spec.heads_kv, spec.head_dim), spec.kv_dtype)
    check_rows("values", values, (*lead, spec.heads_kv, spec.head_dim_v), spec.kv_dtype)
    require(
        not spec.latent or (values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()),
        "absorbed MLA's values are keys[..., :head_dim_v], not a tensor of their own",
    )
    if lse is not None:
        require(
            lse.dim() == 2 and lse.shape[0] >= rows and lse.shape[1] == spec.heads_q and lse.dtype == torch.float32,
            f"lse is {short(lse.dtype)} {tuple(lse.shape)}: float32 {(rows, spec.heads_q)} is needed",
        )
    for name, tensor, wanted in (("sinks", sinks, spec.sinks), ("alibi_slopes", alibi_slopes, spec.alibi)):
        require((tensor is not None) == wanted, f"{name} {'are missing' if wanted else 'were given'}: {spec=!s}")
        require(
            tensor is None or (tensor.shape == (spec.heads_q,) and tensor.is_contiguous()),
            f"{name} must be contiguous, [heads_q = {spec.heads_q}]",
        )
    for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        require(
            tensor is None or (tensor.numel() == 1 and tensor.dtype == torch.float32),
            f"{name} must hold one float32",
        )
    plan.launch(Operands(q, q_rope, keys, values, out, lse, sinks, alibi_slopes, k_scale, v_scale))
    return out


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
        key_cache, value_cache: [pages, page_size, heads_kv, dim], any strides but the last.
        slot_mapping: [tokens or fewer] int64; slot s is token s % page_size of page s // page_size, negative: skip.
        k_scale, v_scale: one-element float32 tensors; an fp8 cache stores x / scale, saturated at ±448.

    Raises:
        InvalidInput: a tensor does not fit.
        Unsupported: no kernel serves the spec on this device.
    """
    require(spec.page_size is not None, "a cache without pages has no slots")
    assert spec.page_size is not None
    tokens = slot_mapping.shape[0]
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        check_rows(name, rows, (tokens, spec.heads_kv, cache.shape[-1]), spec.dtype)
        check_rows(f"{name}_cache", cache, (0, spec.page_size, spec.heads_kv, rows.shape[-1]), spec.kv_dtype)
    require(
        slot_mapping.dtype == torch.int64 and slot_mapping.dim() == 1 and slot_mapping.is_contiguous(),
        f"slot_mapping is {short(slot_mapping.dtype)} {tuple(slot_mapping.shape)}: contiguous int64 [tokens] is needed",
    )
    entry = dispatch.choose(dispatch.Operation.WRITE_KV, spec, targets.detect(key.device), kernel)
    entry.load()(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
