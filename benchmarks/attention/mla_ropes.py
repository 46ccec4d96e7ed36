# SPDX-License-Identifier: Apache-2.0
"""What lies between absorbed MLA's projections and its attention: the latent's norm, rotary embedding and cache write.

This package has one launch for it, vLLM three or four.
"""

from dataclasses import dataclass, replace

import torch
from dsl_backend.attention import api, rope, rope_reference
from dsl_backend.attention import reference as writes
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeStyle
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import short
from dsl_backend.norm.api import rms_norm
from dsl_backend.providers import Launch, Limits, Run, provider

from ..case import Case, Reference, case_of, compared_rows
from ..check import BF16_LIMITS
from ..columns import needs_gpu
from .inputs import movable, normal
from .ropes import COMPARED, EPS, FP8, FP8_LIMITS, in_place, poison_cache, shared, vllm_objections

LATENT, ROPE, NOPE = 512, 64, 128


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows of a layer's projections: queries of `heads` heads, and the two parts of keys. Sizes are DeepSeek's."""

    tokens: int
    heads: int = 16
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads,
            heads_kv=1,
            head_dim=LATENT + ROPE,
            head_dim_v=LATENT,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            scale=1.0,
            mla=True,
        )

    @property
    def rope_spec(self) -> MLARopeSpec:
        return MLARopeSpec(layer=self.spec, style=RopeStyle.GPTJ, table_dtype=self.dtype, norm_dtype=self.dtype)

    @property
    def traffic_bytes(self) -> int:
        """Queries and keys are read and written, and keys stored; a row of the table for each token."""
        key = LATENT + ROPE
        elements = 2 * (self.heads * ROPE + key) + ROPE
        return self.tokens * (elements * self.dtype.itemsize + key * self.kv_dtype.itemsize + 16)

    @property
    def limits(self) -> Limits:
        return FP8_LIMITS if self.kv_dtype == FP8 else BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "heads_q": self.heads,
            "page_size": self.page_size,
            "kv_dtype": short(self.kv_dtype),
        }


def cases() -> list[Case[Problem]]:
    """DeepSeek-V2-Lite's heads and V3's, from a step of one request to a prompt."""
    found = [
        case_of(f"h{heads}-t{tokens}", Problem(tokens=tokens, heads=heads), axis="tokens")
        for heads in (16, 128)
        for tokens in (1, 16, 64, 256, 2048)
    ]
    found += [
        case_of(f"h16-t{tokens}", Problem(tokens=tokens, kv_dtype=FP8), "fp8", axis="tokens") for tokens in (1, 64)
    ]
    found.append(case_of("h2-t5", Problem(tokens=5, heads=2), "tiny"))
    return found


@dataclass(frozen=True)
class Inputs:
    """The layers, which share positions and slots."""

    layers: tuple[MLARopeTensors, ...]

    def found(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Queries, and what the slots of a layer's cache hold: [tokens, elements]; fp8 as float32."""
        tensors = self.layers[layer]
        page = tensors.cache.shape[1]
        cached = movable(tensors.cache)[tensors.slots // page, tensors.slots % page].view(tensors.cache.dtype)
        return torch.cat((q.float().flatten(1), cached.float()), 1)


def build(problem: Problem, layers: int, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    tokens, dtype = problem.tokens, problem.dtype
    pages, at, positions, table, scale = shared(problem, ROPE, generator, seed)

    def layer() -> MLARopeTensors:
        q = normal((tokens, problem.heads, NOPE + ROPE), dtype, generator)[..., NOPE:]
        latent, rotated = normal((tokens, LATENT + ROPE), dtype, generator).split((LATENT, ROPE), 1)
        cache = torch.zeros(pages, problem.page_size, LATENT + ROPE, device=device).to(problem.kv_dtype)
        weight = normal((LATENT,), dtype, generator) / 8 + 1
        outputs = (torch.empty_like(q), torch.empty_like(latent), torch.empty_like(rotated))
        return MLARopeTensors(q, latent, rotated, positions, table, weight, *outputs, cache, at, scale)

    return Inputs(tuple(layer() for _ in range(layers)))


def poison(inputs: Inputs) -> None:
    for layer in inputs.layers:
        for out in (layer.q_out, layer.latent_out, layer.rope_out):
            out.fill_(torch.nan)
        poison_cache(layer.cache)


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first token, the last one and random ones, in float64."""
    tensors = inputs.layers[layer]
    rows = compared_rows(problem.tokens, COMPARED, seed, tensors.q.device)
    few = tensors._replace(
        q=tensors.q[rows], latent=tensors.latent[rows], rope=tensors.rope[rows], positions=tensors.positions[rows]
    )
    exact = rope_reference.exact_mla(few, problem.rope_spec, EPS)
    return Reference(rows, torch.cat([one.flatten(1) for one in exact], 1))


def copied(given: MLARopeTensors) -> MLARopeTensors:
    """Tensors with copies of the rope parts."""
    return given._replace(q=given.q.clone(), rope=given.rope.clone())


def eager(problem: Problem, tensors: MLARopeTensors) -> None:
    """Eager torch, a launch for each of its operations."""
    # Not by `exact_mla` and `write_kv`, whose checks read the device: a graph could not record it.
    latent = rope_reference.normalised(tensors.latent.unsqueeze(1), tensors.weight, 0.0, EPS, torch.float32)
    table = tensors.cos_sin[tensors.positions].float()
    q, rotated = (
        rope_reference.rotated(rows.float(), table, problem.rope_spec.style)
        for rows in (tensors.q, tensors.rope.unsqueeze(1))
    )
    tensors.q.copy_(q)
    tensors.rope.copy_(rotated.squeeze(1))
    page = tensors.cache.shape[1]
    keys = writes.quantize(torch.cat((latent, rotated), -1), tensors.cache.dtype, tensors.scale).squeeze(1)
    movable(tensors.cache)[tensors.slots // page, tensors.slots % page] = movable(keys)


@provider("rope-write-mla", name="torch", package="torch")
def eager_torch(problem: Problem, inputs: Inputs) -> Launch:
    """The reference's norm and rotation, and a scatter into the cache."""
    return in_place(lambda tensors: eager(problem, tensors), inputs, copied)


@provider("rope-write-mla", name="three launches", objections=needs_gpu, package="dsl-backend")
def three_launches(problem: Problem, inputs: Inputs) -> Run:
    """This package's norm, its rotation into pages of its own, and its cache write."""
    device = inputs.layers[0].q.device
    spec = problem.spec
    dense = replace(spec, head_dim=ROPE, head_dim_v=ROPE, kv_dtype=problem.dtype, mla=False)
    rotation = rope.writer(
        rope.RopeSpec(layer=dense, rotary_dim=ROPE, style=RopeStyle.GPTJ, table_dtype=problem.dtype), device
    )
    writer = api.writer(spec, device)
    # The rotation stores keys in order, in pages that are the rotated rows of the write.
    pages = -(-problem.tokens // problem.page_size)
    in_order = torch.arange(problem.tokens, device=device)
    rotated = torch.zeros(pages, problem.page_size, 1, ROPE, dtype=problem.dtype, device=device)
    beside = torch.zeros_like(rotated)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        rms_norm(layer.latent, layer.weight, layer.latent_out, eps=EPS)
        rope_rows = layer.rope.unsqueeze(1)
        rotation(
            rope.RopeTensors(
                layer.q, rope_rows, rope_rows, layer.positions, layer.cos_sin, None, None, layer.q_out, rotated, beside,
                in_order,
            ),
            EPS,
        )  # fmt: skip
        cache = layer.cache.unsqueeze(2)
        rope_out = rotated.view(-1, 1, ROPE)[: problem.tokens]
        latent = layer.latent_out.unsqueeze(1)
        writer(latent, rope_out, cache[..., :LATENT], cache[..., LATENT:], layer.slots, layer.scale, layer.scale)
        return layer.q_out

    return run


@provider("rope-write-mla", name="vLLM", objections=vllm_objections, package="vllm")
def vllm(problem: Problem, inputs: Inputs) -> Launch:
    """VLLM's CUDA kernels: `rms_norm`, `rotary_embedding` and `concat_and_cache_mla`."""
    from vllm import _custom_ops as ops

    kind = "auto" if problem.kv_dtype == problem.dtype else "fp8"
    scale = torch.ones((), device=inputs.layers[0].q.device)

    def launch(layer: MLARopeTensors) -> None:
        ops.rms_norm(layer.latent_out, layer.latent, layer.weight, EPS)
        key = layer.rope.unsqueeze(1)
        ops.rotary_embedding(layer.positions, layer.q, key, ROPE, layer.cos_sin, False)
        ops.concat_and_cache_mla(layer.latent_out, layer.rope, movable(layer.cache), layer.slots, kind, scale)

    return in_place(launch, inputs, copied)
