# SPDX-License-Identifier: Apache-2.0
"""Cases of normalising latent parts, rotating rope parts and writing both into a paged cache of absorbed MLA."""

import random
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from dsl_backend.attention import reference, rope, rope_reference
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeStyle
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import Target
from dsl_backend.testing.inputs import K_SCALE, Layout, empty_like_cache, normal, not_a_number
from dsl_backend.testing.numerics import assert_rounded_once
from dsl_backend.testing.rope_writes import angles, assert_same_memory, launched, slots_of, with_specials

F32, BF16, FP16, FP8, E5M2 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
NEOX, GPTJ = RopeStyle.NEOX, RopeStyle.GPTJ
EPS = 1e-5


@dataclass(frozen=True)
class MLARopeCase:
    """One launch, by value.

    Attributes:
        tokens: that have a position. without_slot: the last of them, which have none.
        padding_tokens: rows of queries and keys behind them.
        skipped: how many slots are negative. beyond: how many lie behind the last page.
        pages: in the cache; page: tokens of each.
        latent, rope: elements of the two parts of a key. nope: elements of a query head in front of its rope part.
        positions: rows of the table. wide_table: it is float32.
        wide_norm: the weights are float32.
        fp8_dtype: of an fp8 cache.
        layout: of the cache. in_place: outputs are their inputs.
        gain: multiplies the numbers.
        specials: NaN, infinities, zeros of both signs and subnormals among the numbers.
        why: what this case alone would find.
    """

    id: str = ""
    _: KW_ONLY
    why: str = ""
    tier: str = "smoke"
    tokens: int = 5
    without_slot: int = 0
    padding_tokens: int = 1
    skipped: int = 1
    beyond: int = 0
    pages: int = 4
    page: int = 16
    heads: int = 4
    latent: int = 64
    rope: int = 32
    nope: int = 16
    style: RopeStyle = GPTJ
    positions: int = 50
    wide_table: bool = False
    wide_norm: bool = False
    dtype: torch.dtype = BF16
    fp8: bool = False
    fp8_dtype: torch.dtype = FP8
    layout: Layout = Layout.SIDE_BY_SIDE
    in_place: bool = True
    gain: float = 1.0
    specials: bool = False
    seed: int = 0

    @property
    def spec(self) -> MLARopeSpec:
        layer = AttentionSpec(
            heads_q=self.heads,
            heads_kv=1,
            head_dim=self.latent + self.rope,
            head_dim_v=self.latent,
            dtype=self.dtype,
            kv_dtype=self.fp8_dtype if self.fp8 else self.dtype,
            page_size=self.page,
            scale=1.0,
            mla=True,
        )
        return MLARopeSpec(
            layer=layer,
            style=self.style,
            table_dtype=F32 if self.wide_table else self.dtype,
            norm_dtype=F32 if self.wide_norm else self.dtype,
        )


DEEPSEEK: dict[str, Any] = {"latent": 512, "rope": 64, "nope": 128}

MLA_ROPES: tuple[MLARopeCase, ...] = (
    MLARopeCase("deepseek", **DEEPSEEK, heads=3, page=64, why="DeepSeek's sizes: a warp for a latent, 4 lanes a head"),
    MLARopeCase("neox", style=NEOX, rope=64, why="halves are pairs"),
    MLARopeCase("separate", in_place=False, why="outputs of their own, and inputs stay as they are"),
    MLARopeCase(
        "neox-separate", style=NEOX, rope=48, in_place=False, wide_table=True, why="3 lanes of 4; float32 table"
    ),
    MLARopeCase("fp16", dtype=FP16, latent=80, heads=7, why="lanes without elements of a latent; no powers of two"),
    MLARopeCase("fp8", fp8=True, gain=4.0, why="both parts are divided by the scale, what prompts read is not"),
    MLARopeCase("e5m2", fp8=True, fp8_dtype=E5M2, dtype=FP16, style=NEOX, in_place=False, why="e5m2"),
    MLARopeCase("fp8-padded", fp8=True, layout=Layout.PADDED, latent=256, why="room between rows stays as it was"),
    MLARopeCase("padded", layout=Layout.PADDED, page=48, why="the same in 16 bits; pages of no power of two"),
    MLARopeCase("specials", specials=True, why="NaN in one latent alone; infinities are rotated"),
    MLARopeCase("specials-fp8", specials=True, fp8=True, why="saturation"),
    MLARopeCase("all-skipped", skipped=5, why="a step of padding writes nothing to the cache"),
    MLARopeCase("beyond", beyond=3, skipped=0, why="slots behind the last page are skipped"),
    MLARopeCase("few-slots", tokens=9, without_slot=4, skipped=2, why="all tokens are rotated, the first are written"),
    MLARopeCase("no-slots", tokens=3, without_slot=3, skipped=0, why="vLLM's warm-up"),
    MLARopeCase("no-tokens", tokens=0, skipped=0, why="an empty step"),
    MLARopeCase("one-token", tokens=1, skipped=0, padding_tokens=0, heads=16, **DEEPSEEK, why="a step of one request"),
    MLARopeCase(
        "many", tokens=40, heads=11, latent=32, rope=16, why="CTAs that begin amid a token; 64 latents of a CTA"
    ),
    MLARopeCase("wide-norm", wide_norm=True, why="float32 weights: CuTe DSL refuses them"),
    MLARopeCase("odd-rotation", rope=20, latent=72, why="no whole vectors: CuTe DSL refuses them"),
    MLARopeCase("real", tier="gpu", tokens=300, heads=16, page=64, pages=9, **DEEPSEEK, why="DeepSeek-V2-Lite"),
    MLARopeCase(
        "real-prefill",
        tier="gpu",
        tokens=4096,
        heads=128,
        page=64,
        pages=70,
        positions=8192,
        **DEEPSEEK,
        why="a prompt of DeepSeek-V3",
    ),
    MLARopeCase(
        "real-fp8", tier="gpu", tokens=300, heads=16, page=64, pages=9, fp8=True, gain=4.0, **DEEPSEEK, why="in e4m3"
    ),
)


def build(case: MLARopeCase, device: torch.device | str) -> MLARopeTensors:
    """The tensors of a case, as vLLM has them; the cache, outputs and what lies between rows start as NaN."""
    device, spec = torch.device(device), case.spec
    generator = torch.Generator(device).manual_seed(case.seed)
    rows, slots = case.tokens + case.padding_tokens, case.tokens - case.without_slot

    def numbers(*shape: int) -> torch.Tensor:
        made = normal((rows, *shape), generator) * case.gain
        return (with_specials(made) if case.specials else made).to(case.dtype)

    # Rope parts behind the others, and keys in rows with more beside them, as of a projection that queries share.
    heads = not_a_number((rows, case.heads, case.nope + case.rope), case.dtype, device)
    keys = not_a_number((rows, case.latent + case.rope + 16), case.dtype, device)
    q, latent, rope_part = heads[..., case.nope :], keys[:, : case.latent], keys[:, case.latent : -16]
    for part in (q, latent, rope_part):
        part.copy_(numbers(*part.shape[1:]))
    outputs = (q, latent, rope_part)
    if not case.in_place:
        q_out, latent_out, rope_out = (not_a_number(part.shape, case.dtype, device) for part in outputs)
        outputs = (q_out, latent_out, rope_out)
    cache, _ = empty_like_cache(spec.layer, (case.pages, case.page), case.layout, device)
    return MLARopeTensors(
        q,
        latent,
        rope_part,
        torch.randint(case.positions, (case.tokens,), generator=generator, device=device),
        angles(case.positions, case.rope, generator).to(spec.table_dtype),
        (normal((case.latent,), generator) / 8 + 1).to(spec.norm_dtype),
        *outputs,
        cache.squeeze(-2),
        slots_of(case, slots, generator, device),
        torch.tensor([K_SCALE], device=device) if case.fp8 else None,
    )


def check_mla_rope(
    case: MLARopeCase, kernel: str | None, device: torch.device | str, target: Target | None = None
) -> None:
    """Raises AssertionError where a result is not rounded once, or anything else was written.

    The target is the device's own where none is named.
    """
    twice = build(case, device), build(case, device)
    mine, theirs = launched(case, twice, rope.rope_write_mla, kernel, target)
    judge(case, mine, theirs, kernel)


def judge(case: MLARopeCase, mine: MLARopeTensors, theirs: MLARopeTensors, kernel: str | None) -> None:
    """Compare all that a launch had with tensors that no launch has seen; their slots are in the cache or negative."""
    spec, tokens = case.spec, case.tokens
    # Triton's interpreter truncates bfloat16.
    truncated = kernel == "triton" and mine.q.device.type == "cpu"
    exact, single = (rope_reference.exact_mla(theirs, spec, EPS, dtype) for dtype in (torch.float64, F32))
    kept = theirs.slots >= 0
    at = (theirs.slots[kept] // case.page, theirs.slots[kept] % case.page)
    stored = reference.indexable(mine.cache)[at]
    cached = stored.view(mine.cache.dtype).split_with_sizes((case.latent, case.rope), -1)
    outputs = ("q_out", "latent_out", "rope_out")
    judged = [
        (name, getattr(mine, name)[:tokens].clone(), *right)
        for name, *right in zip(outputs, exact, single, strict=True)
    ]
    scale = 1.0 if theirs.scale is None else theirs.scale
    for name, found, *right in zip(("latent", "rope"), cached, exact[1:], single[1:], strict=True):
        rows = [one[: len(kept)][kept] / scale for one in right]
        judged.append((f"cached {name}", found, *rows))
    for name, found, *right in judged:
        rows = [one.reshape(-1, found.shape[-1]) for one in (found, *right)]
        assert_rounded_once(rows[0], rows[1], rows[2], truncated=truncated, what=f"{case.id}: {name}")
    # What was judged is taken over; everything else must be the same bits.
    for name, found, *_ in judged[:3]:
        getattr(theirs, name)[:tokens] = found
    reference.indexable(theirs.cache)[at] = stored
    for name, ours, expected in zip(MLARopeTensors._fields, mine, theirs, strict=True):
        if ours is not None and expected is not None and name != "slots":
            assert_same_memory(f"{case.id}: {name}", ours, expected, near=False)


def random_case(draw: random.Random, tokens: int) -> MLARopeCase:
    """A problem of any kind that CuTe DSL's kernel serves."""
    page, slots = draw.choice((16, 32, 48)), draw.randint(0, tokens)
    count = slots + draw.choice((0, 0, 1, 3))
    return MLARopeCase(
        tokens=count,
        without_slot=count - slots,
        padding_tokens=draw.choice((0, 1)),
        skipped=draw.choice((0, slots // 3)),
        pages=-(-slots // page) + draw.randint(1, 3),
        page=page,
        heads=draw.choice((1, 3, 16)),
        latent=draw.choice((32, 80, 256, 512)),
        rope=draw.choice((16, 32, 48, 64)),
        nope=draw.choice((0, 64)),
        style=draw.choice((NEOX, GPTJ)),
        positions=draw.choice((1, 70)),
        wide_table=draw.random() < 0.4,
        dtype=draw.choice((BF16, FP16)),
        fp8=draw.random() < 0.5,
        fp8_dtype=draw.choice((FP8, E5M2)),
        layout=draw.choice((Layout.SIDE_BY_SIDE, Layout.PADDED)),
        in_place=draw.random() < 0.6,
        gain=draw.choice((1.0, 1.0, 1e-2, 30.0)),
        specials=draw.random() < 0.2,
        seed=draw.randrange(2**31),
    )
