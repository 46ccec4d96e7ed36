# SPDX-License-Identifier: Apache-2.0
"""Decode steps of this package's kernels as one CUDA graph, and launch by launch with full barriers between them.

What launches write is poisoned before each step, so that no result of an earlier step can stand for a missing one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dsl_backend.attention import api, rope
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeSpec, RopeStyle, RopeTensors
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.experts import ops
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.linear.api import linear
from dsl_backend.norm.api import rms_norm
from dsl_backend.runtime.workspace import Workspace, current_stream, workspace_of
from dsl_backend.sampling import api as sampling

BF16 = torch.bfloat16
POISON = {True: float("nan"), False: -7}
NAMED = ops.named(Swiglu(), False)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the layers of a step. `width`: of the dense layer; `expert_width`: of an expert."""

    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    latent: int
    rope: int
    width: int
    experts: int
    topk: int
    expert_width: int
    vocab: int
    context: int


# Projections of Llama-8B, experts of Qwen3-30B-A3B's width, latent attention of DeepSeek-V2-Lite.
REAL = Sizes(
    hidden=4096,
    heads=32,
    heads_kv=8,
    head_dim=128,
    latent=512,
    rope=64,
    width=14336,
    experts=64,
    topk=8,
    expert_width=768,
    vocab=32000,
    context=2000,
)
TINY = Sizes(
    hidden=128,
    heads=4,
    heads_kv=2,
    head_dim=64,
    latent=64,
    rope=32,
    width=96,
    experts=6,
    topk=2,
    expert_width=32,
    vocab=300,
    context=60,
)


@dataclass
class Step:
    """Launches in their order.

    Attributes:
        begin: gives what the step changes in place its first value.
        launches: by what they are.
        between: tensors that a launch writes and a later one reads.
        written: rows of caches, as (cache with one row for each slot, slots).
        outputs: tensors that are compared, with `written`.
        workspaces: scratch of attention; that of other launches is their stream's.
    """

    device: torch.device
    begin: Callable[[], object]
    launches: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    between: list[torch.Tensor] = field(default_factory=list)
    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    workspaces: list[Workspace] = field(default_factory=list)
    scratch: int = 0

    def add(self, name: str, launch: Callable[..., object], *arguments: Any, **named: Any) -> None:
        self.launches.append((name, partial(launch, *arguments, **named)))

    def buffer(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        self.between.append(made)
        return made

    def poison(self) -> None:
        shared = workspace_of(self.device, current_stream(self.device))
        for tensor in (*self.between, *self.outputs, shared.partials(self.scratch)):
            tensor.fill_(POISON[tensor.is_floating_point()])
        for workspace in self.workspaces:
            workspace.partials(0).fill_(torch.nan)
        for rows, slots in self.written:
            rows.index_fill_(0, slots, torch.nan)

    def results(self) -> list[torch.Tensor]:
        return [*self.outputs, *(rows.index_select(0, slots) for rows, slots in self.written)]

    def one_by_one(self) -> list[torch.Tensor]:
        """The results, with a full barrier behind each launch. Scratch and flags have grown after it."""
        for _ in range(2):  # scratch of the second run was poisoned
            self.poison()
            self.begin()
            for _, launch in self.launches:
                launch()
                barrier(self.device)
            self.scratch = workspace_of(self.device, current_stream(self.device)).partials(0).numel()
        results = [result.clone() for result in self.results()]
        assert not any(result.is_floating_point() and result.isnan().any() for result in results)
        return results

    def compared(self, expected: list[torch.Tensor], wrong: torch.Tensor, without: int | None = None) -> None:
        """One step in which launches may overlap; adds 1 to `wrong` where a bit of a result differs.

        Args:
            without: the number of a launch that is left out.
        """
        self.poison()
        self.begin()
        for number, (_, launch) in enumerate(self.launches):
            if number != without:
                launch()
        differ = [(bits(a) != bits(b)).any() for a, b in zip(self.results(), expected, strict=True)]
        wrong.add_(torch.stack(differ).any())


def barrier(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bits(values: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.element_size()])


def replay(step: Step, expected: list[torch.Tensor], times: int, without: int | None = None) -> int:
    """How many of so many replays of a step's graph have other bits than expected; on a CPU its launches in turn.

    Args:
        without: the number of a launch that is left out.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=step.device)
    run: Callable[[], object] = partial(step.compared, expected, wrong, without)
    if step.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    for _ in range(times):
        run()
    return int(wrong)


def unseen(step: Step, expected: list[torch.Tensor]) -> list[str]:
    """Launches that can be left out without a difference."""
    return [name for number, (name, _) in enumerate(step.launches) if replay(step, expected, 1, number) != 1]


class Random:
    """Normal tensors of a seed, made on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device, dtype=BF16)
        return made.mul_(gain)

    def weight(self, *shape: int) -> torch.Tensor:
        return self(*shape, gain=shape[-1] ** -0.5)


class Builder:
    """A step of `rows` requests, built layer by layer."""

    def __init__(self, rows: int, sizes: Sizes, device: torch.device, page: int) -> None:
        # With its index, as tensors have it.
        device = torch.empty(0, device=device).device
        self.rows, self.sizes, self.device, self.page = rows, sizes, device, page
        self.kernel = None if device.type == "cuda" else "reference"
        self.random = Random(device)
        start, self.residual = self.random(rows, sizes.hidden), torch.empty(rows, sizes.hidden, dtype=BF16).to(device)
        self.step = Step(device, partial(self.residual.copy_, start))
        self.step.outputs.append(self.residual)
        self.normed, self.made = (self.step.buffer(rows, sizes.hidden) for _ in range(2))
        self.step.add("norm", rms_norm, start, self.random(sizes.hidden), self.normed, kernel=self.kernel)
        lengths = torch.randint(sizes.context // 2, sizes.context, (rows,), generator=torch.Generator().manual_seed(1))
        pages = -(-sizes.context // page)
        self.table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(2)).view(rows, pages)
        last = lengths - 1
        slots = self.table[torch.arange(rows), last // page] * page + last % page
        self.positions, self.slots, self.pages = last.to(device), slots.to(device), rows * pages
        self.workspace = Workspace(device)
        self.step.workspaces.append(self.workspace)
        self.batch = Batch(
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
            seq_lens=lengths.to(device, torch.int32),
            num_tokens=rows,
            max_query_len=1,
            max_seq_len=sizes.context,
            block_table=self.table.to(device, torch.int32),
        )

    def table_of(self, rotary: int) -> torch.Tensor:
        angles = torch.rand(self.sizes.context, rotary // 2, generator=torch.Generator().manual_seed(3)) * 6.0
        return torch.cat((angles.cos(), angles.sin()), 1).to(self.device, BF16)

    def attention(self) -> None:
        """Projection, norms and rotation with the cache write, attention, projection, norm."""
        sizes, step, rows = self.sizes, self.step, self.rows
        q, kv = sizes.heads * sizes.head_dim, sizes.heads_kv * sizes.head_dim
        spec = AttentionSpec(
            heads_q=sizes.heads,
            heads_kv=sizes.heads_kv,
            head_dim=sizes.head_dim,
            head_dim_v=sizes.head_dim,
            dtype=BF16,
            kv_dtype=BF16,
            page_size=self.page,
            scale=sizes.head_dim**-0.5,
        )
        qkv, out = step.buffer(rows, q + 2 * kv), step.buffer(rows, sizes.heads, sizes.head_dim)
        queries = step.buffer(rows, sizes.heads, sizes.head_dim)
        self.product("qkv", self.normed, qkv)
        of_q, key, value = (part.unflatten(1, (-1, sizes.head_dim)) for part in qkv.split((q, kv, kv), 1))
        caches = [self.random(self.pages, self.page, sizes.heads_kv, sizes.head_dim) for _ in range(2)]
        step.written += [(cache.flatten(0, 1), self.slots) for cache in caches]
        tensors = RopeTensors(
            q=of_q,
            key=key,
            value=value,
            positions=self.positions,
            cos_sin=self.table_of(sizes.head_dim),
            q_weight=self.random(sizes.head_dim),
            k_weight=self.random(sizes.head_dim),
            q_out=queries,
            key_cache=caches[0],
            value_cache=caches[1],
            slots=self.slots,
        )
        rotation = RopeSpec(
            layer=spec, rotary_dim=sizes.head_dim, style=RopeStyle.NEOX, table_dtype=BF16, norm_dtype=BF16
        )
        step.add("rotation", rope.rope_write_kv, rotation, tensors, kernel=self.kernel)
        plan = api.plan(spec, self.batch, workspace=self.workspace, kernel=self.kernel)
        step.add("attention", api.run, plan, queries, *caches, out=out)
        self.project(out.view(rows, q))

    def latent_attention(self) -> None:
        """The same of absorbed MLA; its two small batched products are torch's."""
        sizes, step, rows, heads, nope = self.sizes, self.step, self.rows, self.sizes.heads, self.sizes.head_dim
        width = sizes.latent + sizes.rope
        spec = AttentionSpec(
            heads_q=heads,
            heads_kv=1,
            head_dim=width,
            head_dim_v=sizes.latent,
            dtype=BF16,
            kv_dtype=BF16,
            page_size=self.page,
            scale=width**-0.5,
            mla=True,
        )
        q, keys = step.buffer(rows, heads, nope + sizes.rope), step.buffer(rows, width)
        absorbed, out = step.buffer(heads, rows, sizes.latent), step.buffer(rows, heads, sizes.latent)
        values, context = step.buffer(heads, rows, nope), step.buffer(rows, heads, nope)
        rotated, latent, of_rope = (
            step.buffer(rows, *shape) for shape in ((heads, sizes.rope), (sizes.latent,), (sizes.rope,))
        )
        self.product("q", self.normed, q.flatten(1))
        self.product("keys", self.normed, keys)
        w_uk = self.random(heads, nope, sizes.latent, gain=nope**-0.5)
        step.add("absorb", torch.bmm, q[..., :nope].transpose(0, 1), w_uk, out=absorbed)
        cache = self.random(self.pages, self.page, width)
        step.written.append((cache.flatten(0, 1), self.slots))
        tensors = MLARopeTensors(
            q=q[..., nope:],
            latent=keys[:, : sizes.latent],
            rope=keys[:, sizes.latent :],
            positions=self.positions,
            cos_sin=self.table_of(sizes.rope),
            weight=self.random(sizes.latent),
            q_out=rotated,
            latent_out=latent,
            rope_out=of_rope,
            cache=cache,
            slots=self.slots,
        )
        step.outputs += [latent, of_rope]
        rotation = MLARopeSpec(layer=spec, style=RopeStyle.GPTJ, table_dtype=BF16, norm_dtype=BF16)
        step.add("rotation", rope.rope_write_mla, rotation, tensors, kernel=self.kernel)
        plan = api.plan(spec, self.batch, workspace=self.workspace, kernel=self.kernel)
        heads_of = cache.unsqueeze(2)
        queries = (absorbed.transpose(0, 1), rotated)
        step.add("attention", api.run, plan, queries, heads_of, heads_of[..., : sizes.latent], out=out)
        w_uv = self.random(heads, sizes.latent, nope, gain=sizes.latent**-0.5)
        step.add("values", torch.bmm, out.transpose(0, 1), w_uv, out=values)
        step.add("copy", context.copy_, values.transpose(0, 1))
        self.project(context.flatten(1))

    def product(self, name: str, x: torch.Tensor, out: torch.Tensor, activation: Swiglu | None = None) -> None:
        """A linear layer from x to out."""
        weight = self.random.weight(out.shape[1] * (1 if activation is None else 2), x.shape[1])
        self.step.add(name, linear, x, weight, out=out, activation=activation, kernel=self.kernel)

    def project(self, x: torch.Tensor) -> None:
        self.product("o", x, self.made)
        self.norm()

    def norm(self) -> None:
        """Adds what was made to the residual."""
        weight = self.random(self.sizes.hidden)
        self.step.add("norm", rms_norm, self.made, weight, self.normed, residual=self.residual, kernel=self.kernel)

    def dense(self) -> None:
        inner = self.step.buffer(self.rows, self.sizes.width)
        self.product("gate and up", self.normed, inner, Swiglu())
        self.product("down", inner, self.made)
        self.norm()

    def experts(self) -> None:
        """Router, torch's top-k, experts."""
        sizes, step = self.sizes, self.step
        logits = step.buffer(self.rows, sizes.experts)
        weights, ids = (step.buffer(self.rows, sizes.topk, dtype=dtype) for dtype in (torch.float32, torch.int32))

        def choose() -> None:
            best = logits.float().softmax(1).topk(sizes.topk, 1)
            weights.copy_(best.values)
            ids.copy_(best.indices)

        w13, w2 = (
            self.random(sizes.experts, *shape, gain=shape[-1] ** -0.5)
            for shape in ((2 * sizes.expert_width, sizes.hidden), (sizes.hidden, sizes.expert_width))
        )
        self.product("router", self.normed, logits)
        step.add("choice", choose)
        step.add(
            "experts",
            ops.EXPERTS,
            self.made,
            self.normed,
            [w13, w2],
            [weights, ids, None],
            [None, None],
            [],
            *NAMED,
            "output",
        )
        self.norm()

    def sampled(self) -> Step:
        """Logits and their tokens; the step is complete."""
        sizes, step, rows = self.sizes, self.step, self.rows
        logits = step.buffer(rows, sizes.vocab)
        step.outputs.append(logits)
        self.product("logits", self.normed, logits)
        plan = sampling.plan(sampling.SamplingSpec(vocab=sizes.vocab, dtype=BF16), rows, self.device, self.kernel)
        seeds = torch.arange(rows, device=self.device)
        parameters = sampling.Parameters(
            seeds=seeds, positions=self.positions, top_p=torch.full((rows,), 0.9).to(self.device)
        )
        step.outputs.append(plan.results.rows(rows).likeliest(0).tokens)
        step.add("sample", sampling.run, plan, logits, parameters)
        return step


def dense_step(rows: int, sizes: Sizes, device: torch.device) -> Step:
    """Two layers, one with a dense MLP and one with experts."""
    builder = Builder(rows, sizes, device, page=16)
    builder.attention()
    builder.dense()
    builder.attention()
    builder.experts()
    return builder.sampled()


def latent_step(rows: int, sizes: Sizes, device: torch.device) -> Step:
    """The same with latent attention."""
    builder = Builder(rows, sizes, device, page=64)
    builder.latent_attention()
    builder.dense()
    builder.latent_attention()
    builder.experts()
    return builder.sampled()
