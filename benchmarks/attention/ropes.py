# SPDX-License-Identifier: Apache-2.0
"""What lies between a qkv projection and attention: norms of heads, rotary embedding and cache write.

This package has one launch for it. vLLM has two or three: the norms and the rotation, and the write.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from dsl_backend.attention import reference as writes
from dsl_backend.attention import rope, rope_dispatch, rope_reference
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeSpec, RopeStyle, RopeTensors
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import short
from dsl_backend.providers import Launch, Limits, Run, provider
from dsl_backend.runtime import target as targets

from ..case import Case, Reference, case_of, compared_rows
from ..check import BF16_LIMITS
from ..columns import missing, reasons
from .inputs import movable, normal

EPS = 1e-6
COMPARED = 64  # tokens of a layer
POSITIONS = 4096
PAGES_SPARE = 4  # slots for each token, so that the written slots are scattered
FP8 = torch.float8_e4m3fn
# Rounding to e4m3 costs up to 2^-4 an element.
FP8_LIMITS = Limits(total=0.05, row=0.1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The rows of a fused projection of some tokens.

    Attributes:
        heads: (query heads, key/value heads).
        norm: each query and key head is normalised, as in Qwen3.
    """

    tokens: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    norm: bool = False
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads[0],
            heads_kv=self.heads[1],
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            scale=1.0,
        )

    @property
    def rope_spec(self) -> RopeSpec:
        return RopeSpec(
            layer=self.spec,
            rotary_dim=self.head_dim,
            style=RopeStyle.NEOX,
            table_dtype=self.dtype,
            norm_dtype=self.dtype if self.norm else None,
        )

    @property
    def traffic_bytes(self) -> int:
        """Queries are read and written, keys and values read and stored; a row of the table for each token."""
        q, kv = (heads * self.head_dim for heads in (self.heads[0], 2 * self.heads[1]))
        elements = (2 * q + kv + self.head_dim) * self.dtype.itemsize + kv * self.kv_dtype.itemsize
        return self.tokens * (elements + 16)

    @property
    def limits(self) -> Limits:
        return FP8_LIMITS if self.kv_dtype == FP8 else BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "heads_q": self.heads[0],
            "heads_kv": self.heads[1],
            "head_dim": self.head_dim,
            "norm": self.norm,
            "page_size": self.page_size,
            "kv_dtype": short(self.kv_dtype),
        }


def cases(page: int = 16) -> list[Case[Problem]]:
    """Llama-8B's and Qwen3's layers, from a step of one request to a prompt."""
    llama, qwen = Problem(tokens=1, page_size=page), Problem(tokens=1, norm=True, page_size=page)
    found = [
        case_of(f"{name}-t{tokens}", replace(layer, tokens=tokens), axis="tokens")
        for name, layer in (("llama", llama), ("qwen3", qwen))
        for tokens in (1, 16, 64, 512, 8192)
    ]
    found += [
        case_of(f"qwen3-t{tokens}", replace(qwen, tokens=tokens, kv_dtype=FP8), "fp8", axis="tokens")
        for tokens in (64, 8192)
    ]
    found.append(case_of("hd64-t5", replace(qwen, tokens=5, heads=(4, 2), head_dim=64), "tiny"))
    return found


@dataclass(frozen=True)
class Inputs:
    """The layers, which share positions and slots."""

    layers: tuple[RopeTensors, ...]

    def found(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Queries, and what the slots of a layer's cache hold: [tokens, elements]; fp8 as float32."""
        tensors = self.layers[layer]
        page = tensors.key_cache.shape[1]
        at = (tensors.slots // page, tensors.slots % page)
        rows = [movable(cache)[at].view(cache.dtype) for cache in (tensors.key_cache, tensors.value_cache)]
        return torch.cat([one.float().flatten(1) for one in (q, *rows)], 1)


class AnyProblem(Protocol):
    """A problem of dense attention, or of MLA."""

    @property
    def tokens(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    @property
    def rope_spec(self) -> RopeSpec | MLARopeSpec: ...


class AnyInputs(Protocol):
    """The layers of a problem: RopeTensors or MLARopeTensors."""

    @property
    def layers(self) -> tuple[Any, ...]: ...
    def found(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


class Shared(NamedTuple):
    """What the layers of a problem share.

    Attributes:
        pages: of a layer's cache. slots: of the tokens, scattered over it.
        table: cosines and sines of POSITIONS positions, [POSITIONS, rotary_dim].
        scale: of an fp8 cache.
    """

    pages: int
    slots: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    scale: torch.Tensor | None


def shared(problem: AnyProblem, rotary_dim: int, generator: torch.Generator, seed: int) -> Shared:
    device, pages = generator.device, -(-problem.tokens * PAGES_SPARE // problem.page_size)
    slots = torch.randperm(pages * problem.page_size, generator=torch.Generator().manual_seed(seed))
    angles = torch.rand(POSITIONS, rotary_dim // 2, generator=generator, device=device) * 2 * math.pi
    return Shared(
        pages=pages,
        slots=slots[: problem.tokens].to(device),
        positions=torch.randint(POSITIONS, (problem.tokens,), generator=generator, device=device),
        table=torch.cat((angles.cos(), angles.sin()), 1).to(problem.dtype),
        scale=torch.ones(1, device=device) if problem.kv_dtype == FP8 else None,
    )


def build(problem: Problem, layers: int, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    pages, at, positions, table, scale = shared(problem, problem.head_dim, generator, seed)
    heads_q, heads_kv = problem.heads

    def layer() -> RopeTensors:
        rows = normal((problem.tokens, heads_q + 2 * heads_kv, problem.head_dim), problem.dtype, generator)
        q, key, value = rows.split_with_sizes((heads_q, heads_kv, heads_kv), 1)
        shape = (pages, problem.page_size, heads_kv, 2 * problem.head_dim)
        keys, values = torch.zeros(shape, device=device).to(problem.kv_dtype).chunk(2, -1)
        weight = normal((problem.head_dim,), problem.dtype, generator) / 8 + 1 if problem.norm else None
        out = torch.empty_like(q)
        return RopeTensors(q, key, value, positions, table, weight, weight, out, keys, values, at, scale, scale)

    return Inputs(tuple(layer() for _ in range(layers)))


def poison(inputs: Inputs) -> None:
    for layer in inputs.layers:
        layer.q_out.fill_(torch.nan)
        poison_cache(layer.key_cache)
        poison_cache(layer.value_cache)


def poison_cache(cache: torch.Tensor) -> None:
    if cache.dtype == FP8:
        movable(cache).fill_(0x7F)  # e4m3's NaN
    else:
        cache.fill_(torch.nan)


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first token, the last one and random ones: queries and keys in float64, values as they are stored."""
    tensors = inputs.layers[layer]
    rows = compared_rows(problem.tokens, COMPARED, seed, tensors.q.device)
    few = tensors._replace(
        q=tensors.q[rows], key=tensors.key[rows], value=tensors.value[rows], positions=tensors.positions[rows]
    )
    q, key = rope_reference.exact(few, problem.rope_spec, EPS)
    value = writes.quantize(few.value, problem.kv_dtype, tensors.v_scale).double()
    return Reference(rows, torch.cat([one.flatten(1) for one in (q, key, value)], 1))


def compared(inputs: AnyInputs, layer: int, result: torch.Tensor) -> torch.Tensor:
    """What a launch made: from its queries [tokens, heads, dim]; or whole, [tokens, elements], as a peer kept it."""
    return result if result.dim() == 2 else inputs.found(layer, result)


def objections(problem: AnyProblem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: rope_dispatch.choose(problem.rope_spec, targets.detect(), kernel))


def ours(problem: AnyProblem, inputs: AnyInputs, kernel: str | None = None) -> Run:
    """`rope.rope_write_kv` or `rope.rope_write_mla`, bound once, as vLLM's layers have it."""
    writer = rope.writer(problem.rope_spec, inputs.layers[0].q.device, kernel)

    def run(index: int) -> torch.Tensor:
        tensors = inputs.layers[index]
        writer(tensors, EPS)
        return tensors.q_out

    return run


TensorsT = TypeVar("TensorsT", RopeTensors, MLARopeTensors)


def in_place(launch: Callable[[TensorsT], None], inputs: AnyInputs, copied: Callable[[TensorsT], TensorsT]) -> Launch:
    """A launch of what rotates its inputs in place, on copies of them. The first results are checked.

    Args:
        copied: tensors with copies of what is rotated.
    """
    layers, first = [], {}
    for index, given in enumerate(inputs.layers):
        tensors = copied(given)
        launch(tensors)
        first[tensors.q.data_ptr()] = inputs.found(index, tensors.q)
        layers.append(tensors)

    def run(index: int) -> torch.Tensor:
        launch(layers[index])
        return layers[index].q

    return Launch(run, lambda result: first[result.data_ptr()])


def copied(given: RopeTensors) -> RopeTensors:
    """Tensors with copies of queries, keys and values, side by side as before."""
    rows = torch.cat((given.q, given.key, given.value), 1)
    q, key, value = rows.split_with_sizes([one.shape[1] for one in (given.q, given.key, given.value)], 1)
    return given._replace(q=q, key=key, value=value)


def eager(problem: Problem, tensors: RopeTensors) -> None:
    """Eager torch, in place, a launch for each of its operations."""
    q, key = rope_reference.exact(tensors, problem.rope_spec, EPS, torch.float32)
    tensors.q.copy_(q)
    tensors.key.copy_(key)
    page = tensors.key_cache.shape[1]
    at = (tensors.slots // page, tensors.slots % page)
    for cache, rows, scale in (
        (tensors.key_cache, tensors.key, tensors.k_scale),
        (tensors.value_cache, tensors.value, tensors.v_scale),
    ):
        # Not by `attention.reference.write_kv`, whose checks read the device: a graph could not record it.
        movable(cache)[at] = movable(writes.quantize(rows, cache.dtype, scale))


@provider("rope-write-kv", name="torch", package="torch")
def eager_torch(problem: Problem, inputs: Inputs) -> Launch:
    """The reference's rotation, and a scatter into the cache."""
    return in_place(lambda tensors: eager(problem, tensors), inputs, copied)


def vllm_objections(problem: Problem) -> list[str]:
    return missing("vllm")


@provider("rope-write-kv", name="vLLM", objections=vllm_objections, package="vllm")
def vllm(problem: Problem, inputs: Inputs) -> Launch:
    """VLLM's CUDA kernels: `fused_qk_norm_rope` or `rotary_embedding`, and `reshape_and_cache_flash` behind it."""
    from vllm import _custom_ops as ops

    kind = "auto" if problem.kv_dtype == problem.dtype else "fp8"
    scale = torch.ones((), device=inputs.layers[0].q.device)
    heads_q, heads_kv = problem.heads
    width = (heads_q + 2 * heads_kv) * problem.head_dim

    def launch(layer: RopeTensors) -> None:
        if problem.norm:
            ops.fused_qk_norm_rope(
                layer.q.as_strided((problem.tokens, width), (width, 1)), heads_q, heads_kv, heads_kv,
                problem.head_dim, EPS, layer.q_weight, layer.k_weight, layer.cos_sin, True, layer.positions,
            )  # fmt: skip
        else:
            q, key = (
                one.as_strided((problem.tokens, one.shape[1] * problem.head_dim), (width, 1))
                for one in (layer.q, layer.key)
            )
            ops.rotary_embedding(layer.positions, q, key, problem.head_dim, layer.cos_sin, True)
        ops.reshape_and_cache_flash(
            layer.key, layer.value, layer.key_cache, layer.value_cache, layer.slots, kind, scale, scale
        )

    return in_place(launch, inputs, copied)
