# SPDX-License-Identifier: Apache-2.0
"""What lies between projections and attention, in one launch: norms, rotary embedding, cache write.

    rope.rope_write_kv(spec, tensors, eps=1e-6)   # queries, keys and values of heads
    rope.rope_write_mla(spec, tensors, eps=1e-6)  # absorbed MLA: rope parts of queries, and one latent row of keys

For each token, in float32, rounded once at the end:

1. With norms, z = x * (weight + weight_offset) * rsqrt(mean(x^2) + eps) for each query and key head; else z = x.
2. The first rotary_dim elements of z are rotated: (a cos - b sin, b cos + a sin) for each pair (a, b), by the row of
   the table that the token's position names. A scaled embedding (YaRN, Llama 3) is a table like any other.
3. q_out receives the query heads. Key heads go to the token's slot of the cache, and value heads as they are; an fp8
   cache stores x / scale, saturated, as `api.write_kv` has it.

A thread of a kernel reads all that it writes of a row beforehand, so q_out may be q. Keys are not written back.

Of absorbed MLA the latent part of keys is normalised, by weight alone, and not rotated. The rope parts of keys and
queries are rotated, all their elements, and not normalised. All three are also outputs, which prompts need that attend
to projected keys; each may be its input.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dsl_backend import checks
from dsl_backend.attention import rope_dispatch
from dsl_backend.attention.api import MOST_LAYOUTS, check_rows, check_scales
from dsl_backend.attention.rope_spec import (
    AnySpec,
    AnyTensors,
    MLARopeSpec,
    MLARopeTensors,
    RopeSpec,
    RopeStyle,
    RopeTensors,
    RopeWrites,
)
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.log import warning_once
from dsl_backend.runtime import target as targets

__all__ = [
    "MLARopeSpec",
    "MLARopeTensors",
    "RopeSpec",
    "RopeStyle",
    "RopeTensors",
    "RopeWriter",
    "rope_write_kv",
    "rope_write_mla",
    "writer",
]

# Kernels number the heads of all tokens in 32 bits.
MOST_HEADS = 2**31 - 2**10
OPTIONAL = ("q_weight", "k_weight", "k_scale", "v_scale", "scale")


def rope_write_kv(spec: RopeSpec, tensors: RopeTensors, *, eps: float = 1e-6, kernel: str | None = None) -> None:
    """Normalise and rotate queries and keys, and store keys and values at their slots of a paged cache.

    Args:
        tensors: as RopeTensors describes them. A slot beyond the cache is skipped by kernels, and a position beyond
            the table counts as 0; the reference refuses both. CuTe DSL's kernel may read the weights before the kernels
            in front of it on the stream have ended: no kernel of a step may write them.
        eps: added to the mean of squares; at least 0.
        kernel: a name from the dispatch table; no other kernel is taken. By default the best that serves the spec.

    Raises:
        InvalidInput: a tensor does not fit, or requires a gradient while gradients are on.
        Unsupported: no kernel serves the spec on this device.
    """
    checks.instance("spec", spec, RopeSpec)
    checks.instance("tensors", tensors, RopeTensors)
    launch(spec, tensors, eps, kernel)


def rope_write_mla(spec: MLARopeSpec, tensors: MLARopeTensors, *, eps: float = 1e-6, kernel: str | None = None) -> None:
    """Normalise the latent part of keys, rotate the rope parts of queries and keys, and store keys in a paged cache.

    Arguments and errors are those of `rope_write_kv`; MLARopeTensors describes the tensors.
    """
    checks.instance("spec", spec, MLARopeSpec)
    checks.instance("tensors", tensors, MLARopeTensors)
    launch(spec, tensors, eps, kernel)


def launch(spec: AnySpec, tensors: AnyTensors, eps: float, kernel: str | None) -> None:
    checks.tensor("slots", tensors.slots)
    checks.number("eps", eps, 0.0)
    checks.kernel(kernel)
    writer(spec, tensors.slots.device, kernel)(tensors, eps)


@cache
def writer(spec: AnySpec, device: torch.device, kernel: str | None = None) -> "RopeWriter":
    """What the functions above call; chosen once, since every layer calls it in every step."""
    return RopeWriter(spec, lambda: targets.detect(device), kernel)


class RopeWriter:
    """Serves layers of one spec. A layout that an earlier call had is not checked again, which saves host time.

    Args:
        target: returns the caches' target; called at first use.
        kernel: a name from the dispatch table; no other kernel is taken. By default the best that serves the spec;
            where that does not take the tensors' alignment or strides, the next one.
    """

    def __init__(self, spec: AnySpec, target: Callable[[], targets.Target], kernel: str | None = None) -> None:
        self.spec, self.target, self.kernel = spec, target, kernel
        self._by_layout: dict[tuple[Any, ...], RopeWrites[Any, Any]] = {}
        self._kernels: dict[str, RopeWrites[Any, Any]] = {}

    def __call__(self, tensors: AnyTensors, eps: float) -> None:
        """As `rope_write_kv` or `rope_write_mla`, by the kind of the spec."""
        try:
            facts = facts_of(tensors)
        except AttributeError:  # one of them is no tensor: `check` says which
            check(self.spec, tensors)
            raise
        serving = self._by_layout.get(facts)
        if serving is None or torch.is_grad_enabled():
            check(self.spec, tensors)
            if len(self._by_layout) >= MOST_LAYOUTS:
                self._by_layout.clear()
            serving = self._by_layout[facts] = self.kernel_for(tensors)
        if tensors.positions.shape[0]:
            serving(tensors, eps)

    def names(self) -> list[str]:
        """The kernels that serve the spec, best first; the named kernel alone where there is one."""
        target = self.target()
        best = rope_dispatch.choose(self.spec, target, self.kernel).name
        judged = rope_dispatch.judge(self.spec, target)
        return [best] if self.kernel else [entry.name for entry, reasons in judged if not reasons]

    def prepared(self, name: str) -> RopeWrites[Any, Any]:
        """The kernel of that name, compiled."""
        if name not in self._kernels:
            entry = rope_dispatch.choose(self.spec, self.target(), name)
            made: RopeWrites[Any, Any] = entry.load()(self.spec, self.target())
            made.prepare()
            self._kernels[name] = made
        return self._kernels[name]

    def prepare(self) -> None:
        """Compile what calls need. Raises Unsupported: no kernel serves the spec, or the named one does not."""
        self.prepared(self.names()[0])

    def kernel_for(self, tensors: AnyTensors) -> RopeWrites[Any, Any]:
        """The best kernel that takes the tensors' alignment and strides.

        Raises:
            InvalidInput: no kernel takes them.
            Unsupported: no kernel serves the spec, or the named one does not.
        """
        refused: list[str] = []
        for name in self.names():
            found = self.prepared(name)
            reasons = found.objections(tensors)
            if not reasons:
                if refused:
                    warning_once(f"queries are rotated by {name} (not by {', nor by '.join(refused)})")
                return found
            refused.append(f"{name}: {'; '.join(reasons)}")
        raise InvalidInput("; ".join(refused))


def facts_of(tensors: AnyTensors) -> tuple[Any, ...]:
    """All that `check` and a kernel's objections read. Called for every layer of every step."""
    layout = [one if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in tensors]
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return (addresses % 16, *layout)


def check(spec: AnySpec, tensors: AnyTensors) -> None:
    """Raises InvalidInput where a tensor does not fit the spec or the others."""
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if tensor is None and name in OPTIONAL:
            continue
        checks.tensor(name, tensor)
        assert tensor is not None
        checks.no_gradient(name, tensor)
    device, layer = tensors.slots.device, spec.layer
    for name, tensor in (("slots", tensors.slots), ("positions", tensors.positions)):
        require(
            tensor.dtype == torch.int64 and tensor.dim() == 1 and tensor.is_contiguous() and tensor.device == device,
            f"{name} is {short(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}: contiguous int64 [tokens] on "
            f"{device} is needed",
        )
    tokens, slots = tensors.positions.shape[0], tensors.slots.shape[0]
    require(slots <= tokens, f"slots has {slots} elements: {tokens} tokens, as positions has, or fewer are needed")
    heads = layer.heads_q + 2 * layer.heads_kv
    require(tokens * heads <= MOST_HEADS, f"{tokens} tokens of {heads} heads: {MOST_HEADS} heads are the most")
    if isinstance(spec, RopeSpec):
        assert isinstance(tensors, RopeTensors)
        check_heads(spec, tensors, tokens, device)
        check_parameters(spec, tensors, device)
        check_scales(layer, tensors.k_scale, tensors.v_scale, device)
    else:
        assert isinstance(tensors, MLARopeTensors)
        check_mla(spec, tensors, tokens, device)


def check_heads(spec: RopeSpec, tensors: RopeTensors, tokens: int, device: torch.device) -> None:
    """Raises InvalidInput where queries, keys, values or caches do not fit."""
    layer = spec.layer
    assert layer.page_size is not None
    for name, rows in (("q", tensors.q), ("q_out", tensors.q_out)):
        check_rows(name, rows, (tokens, layer.heads_q, layer.head_dim), layer.dtype, device)
    checks.apart("q_out", tensors.q_out)
    widths = (layer.head_dim, layer.head_dim_v)
    pairs = (("key", tensors.key, tensors.key_cache), ("value", tensors.value, tensors.value_cache))
    for width, (name, rows, pages) in zip(widths, pairs, strict=True):
        check_rows(name, rows, (tokens, layer.heads_kv, width), layer.dtype, device)
        check_rows(f"{name}_cache", pages, (0, layer.page_size, layer.heads_kv, width), layer.kv_dtype, device)
        checks.apart(f"{name}_cache", pages)
    pages_k, pages_v = tensors.key_cache.shape[0], tensors.value_cache.shape[0]
    require(pages_k == pages_v, f"key_cache holds {pages_k} pages, value_cache {pages_v}")


def check_parameters(spec: RopeSpec, tensors: RopeTensors, device: torch.device) -> None:
    """Raises InvalidInput where the table or the weights of the norms do not fit."""
    check_rows("cos_sin", tensors.cos_sin, (1, spec.rotary_dim), spec.table_dtype, device)
    for name, weight in (("q_weight", tensors.q_weight), ("k_weight", tensors.k_weight)):
        if spec.norm_dtype is None:
            require(weight is None, f"{name} is given, and the spec has no norm")
            continue
        require(weight is not None, f"the spec has a norm of each head: {name} is needed")
        assert weight is not None
        check_weight(name, weight, spec.layer.head_dim, spec.norm_dtype, device)


def check_weight(name: str, weight: torch.Tensor, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InvalidInput where the weights of a norm are not contiguous [dim]."""
    require(
        weight.shape == (dim,) and weight.dtype == dtype and weight.device == device,
        f"{name} is {short(weight.dtype)} {tuple(weight.shape)} on {weight.device}: {short(dtype)} [{dim}] on {device} "
        f"is needed",
    )
    require(weight.is_contiguous(), f"{name} has strides {weight.stride()}: contiguous elements are needed")


def check_mla(spec: MLARopeSpec, tensors: MLARopeTensors, tokens: int, device: torch.device) -> None:
    """Raises InvalidInput where a tensor of MLA does not fit."""
    layer, latent, rope = spec.layer, spec.latent_dim, spec.rope_dim
    assert layer.page_size is not None
    parts = (("q", (layer.heads_q, rope)), ("latent", (latent,)), ("rope", (rope,)))
    for name, shape in parts:
        check_rows(name, getattr(tensors, name), (tokens, *shape), layer.dtype, device)
        out = getattr(tensors, f"{name}_out")
        check_rows(f"{name}_out", out, (tokens, *shape), layer.dtype, device)
        checks.apart(f"{name}_out", out)
    check_rows("cache", tensors.cache, (0, layer.page_size, latent + rope), layer.kv_dtype, device)
    checks.apart("cache", tensors.cache)
    check_rows("cos_sin", tensors.cos_sin, (1, rope), spec.table_dtype, device)
    check_weight("weight", tensors.weight, latent, spec.norm_dtype, device)
    require(tensors.scale is not None or not layer.is_fp8_kv, "an fp8 cache needs scale")
    if tensors.scale is not None:
        check_scales(layer, tensors.scale, tensors.scale, device)
