# SPDX-License-Identifier: Apache-2.0
"""Cases of rotating queries and keys and writing keys and values into a paged cache."""

import math
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, TypeVar

import torch

from dsl_backend.attention import reference, rope, rope_reference
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeSpec, RopeStyle, RopeTensors
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import Target
from dsl_backend.testing.inputs import K_SCALE, V_SCALE, Layout, empty_like_cache, normal, not_a_number, scale_of
from dsl_backend.testing.kv_writes import everything
from dsl_backend.testing.numerics import assert_rounded_once

F32, BF16, FP16, FP8, E5M2 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
NEOX, GPTJ = RopeStyle.NEOX, RopeStyle.GPTJ
EPS = 1e-5


@dataclass(frozen=True)
class RopeCase:
    """One launch, by value.

    Attributes:
        tokens: that have a position. without_slot: the last of them, which have none.
        padding_tokens: rows of queries, keys and values behind them.
        skipped: how many slots are negative. beyond: how many lie behind the last page.
        pages: in the cache; page: tokens of each.
        heads: (query heads, key/value heads).
        rotary_dim: the whole head by default.
        positions: rows of the table. wide_table: it is float32.
        norm: heads are normalised. wide_norm: by float32 weights.
        fp8_dtype: of an fp8 cache. scales_by_head: each head has scales of its own.
        in_place: q_out is q.
        fused: queries, keys and values are slices of the output of one projection.
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
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dim_v: int | None = None
    rotary_dim: int | None = None
    style: RopeStyle = NEOX
    positions: int = 50
    wide_table: bool = False
    norm: bool = False
    wide_norm: bool = False
    weight_offset: float = 0.0
    dtype: torch.dtype = BF16
    fp8: bool = False
    fp8_dtype: torch.dtype = FP8
    scales_by_head: bool = False
    layout: Layout = Layout.SIDE_BY_SIDE
    in_place: bool = False
    fused: bool = True
    gain: float = 1.0
    specials: bool = False
    seed: int = 0

    @property
    def spec(self) -> RopeSpec:
        layer = AttentionSpec(
            heads_q=self.heads[0],
            heads_kv=self.heads[1],
            head_dim=self.dim,
            head_dim_v=self.dim_v or self.dim,
            dtype=self.dtype,
            kv_dtype=self.fp8_dtype if self.fp8 else self.dtype,
            page_size=self.page,
            scale=1.0,
        )
        return RopeSpec(
            layer=layer,
            rotary_dim=self.rotary_dim or self.dim,
            style=self.style,
            table_dtype=F32 if self.wide_table else self.dtype,
            norm_dtype=(F32 if self.wide_norm else self.dtype) if self.norm else None,
            weight_offset=self.weight_offset if self.norm else 0.0,
        )


ROPES: tuple[RopeCase, ...] = (
    RopeCase("llama", why="halves of whole heads, and a slice of a projection's rows"),
    RopeCase("gptj", style=GPTJ, why="neighbours are pairs"),
    RopeCase("qwen3", norm=True, dim=128, why="a norm of each head: 8 lanes, four heads in a warp"),
    RopeCase("gemma3", norm=True, weight_offset=1.0, dim=256, in_place=True, why="1 + weight; 16 lanes; in place"),
    RopeCase("gptj-norm", style=GPTJ, norm=True, wide_table=True, why="neighbours behind a norm, a float32 table"),
    RopeCase("partial", rotary_dim=32, why="a half of each head is left as it is"),
    RopeCase("partial-gptj", dim=128, rotary_dim=64, style=GPTJ, in_place=True, why="the same of neighbours, in place"),
    RopeCase("partial-norm", dim=96, rotary_dim=16, norm=True, why="lanes without elements; one lane rotates"),
    RopeCase("fp16", dtype=FP16, dim=80, heads=(3, 3), why="no powers of two"),
    RopeCase("fp8", fp8=True, gain=4.0, why="keys are divided by one scale, values by another"),
    RopeCase("fp8-norm", fp8=True, norm=True, scales_by_head=True, dtype=FP16, why="scales of each head"),
    RopeCase("e5m2", fp8=True, fp8_dtype=E5M2, style=GPTJ, scales_by_head=True, heads=(6, 3), why="e5m2"),
    RopeCase("specials", specials=True, why="NaN and infinities are rotated, and values are copied as they are"),
    RopeCase("specials-norm", specials=True, norm=True, fp8=True, why="NaN in a head's sum; saturation"),
    RopeCase("all-skipped", skipped=5, why="a step of padding writes no key"),
    RopeCase("beyond", beyond=3, skipped=0, why="slots behind the last page are skipped"),
    RopeCase("few-slots", tokens=9, without_slot=4, skipped=2, why="queries of all tokens, keys of the first"),
    RopeCase("no-slots", tokens=3, without_slot=3, skipped=0, why="vLLM's warm-up: queries alone"),
    RopeCase("no-tokens", tokens=0, skipped=0, why="an empty step"),
    RopeCase("one-token", tokens=1, skipped=0, padding_tokens=0, heads=(32, 8), dim=128, why="a step of one request"),
    RopeCase("mqa", heads=(7, 1), dim=64, tokens=11, why="CTAs that begin amid a token"),
    RopeCase("wide", heads=(2, 1), dim=512, rotary_dim=128, norm=True, why="a warp for each head"),
    RopeCase("dims-differ", dim=192, dim_v=128, rotary_dim=64, why="keys longer than values"),
    RopeCase("values-longer", dim=64, dim_v=96, fp8=True, why="values longer than keys"),
    RopeCase("heads-first", layout=Layout.HEADS_FIRST, why="heads outside of a page's tokens"),
    RopeCase("separate", layout=Layout.SEPARATE, fused=False, why="two caches, and three inputs"),
    RopeCase("padded", layout=Layout.PADDED, fp8=True, page=48, why="room between rows stays as it was"),
    RopeCase("wide-norm", norm=True, wide_norm=True, why="float32 weights: CuTe DSL refuses them"),
    RopeCase("odd-rotation", dim=72, rotary_dim=20, style=GPTJ, why="no whole vectors: CuTe DSL refuses them"),
    RopeCase(
        "real-prefill",
        tier="gpu",
        tokens=4096,
        pages=300,
        heads=(32, 8),
        dim=128,
        norm=True,
        positions=8192,
        why="a prompt of an 8B model",
    ),
)


def angles(positions: int, rotary_dim: int, generator: torch.Generator) -> torch.Tensor:
    """[positions, rotary_dim] float32: cosines, then sines, of random angles."""
    half = torch.rand(positions, rotary_dim // 2, generator=generator, device=generator.device) * 2 * math.pi
    return torch.cat((half.cos(), half.sin()), 1)


def with_specials(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers with NaN, infinities, zeros of both signs and subnormals at the beginning of the first row."""
    if numbers.numel():
        odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 6e4], device=numbers.device)
        numbers.view(-1)[: len(odd)] = odd
    return numbers


def build(case: RopeCase, device: torch.device | str) -> RopeTensors:
    """The tensors of a case; the cache, q_out and what lies between rows start as NaN."""
    device, spec = torch.device(device), case.spec
    layer, generator = spec.layer, torch.Generator(device).manual_seed(case.seed)
    rows, slots = case.tokens + case.padding_tokens, case.tokens - case.without_slot
    shapes = ((layer.heads_q, layer.head_dim), (layer.heads_kv, layer.head_dim), (layer.heads_kv, layer.head_dim_v))

    def numbers(shape: tuple[int, int]) -> torch.Tensor:
        made = normal((rows, *shape), generator) * case.gain
        return (with_specials(made) if case.specials else made).to(case.dtype)

    parts = [numbers(shape) for shape in shapes]
    if case.fused:
        # With room behind each row, as where a gate is projected too.
        wide = not_a_number((rows, sum(heads * dim for heads, dim in shapes) + 16), case.dtype, device)
        wide[:, :-16] = torch.cat([part.flatten(1) for part in parts], 1)
        sizes = [*(heads * dim for heads, dim in shapes), 16]
        split = wide.split_with_sizes(sizes, 1)
        parts = [one.unflatten(1, shape) for one, shape in zip(split, shapes, strict=False)]

    def weight() -> torch.Tensor | None:
        if spec.norm_dtype is None:
            return None
        return (normal((layer.head_dim,), generator) / 8 + 1 - spec.weight_offset).to(spec.norm_dtype)

    table = angles(case.positions, spec.rotary_dim, generator)
    k_scale, v_scale = (
        scale_of(layer, scale, case.scales_by_head).to(device) if case.fp8 else None for scale in (K_SCALE, V_SCALE)
    )
    key_cache, value_cache = empty_like_cache(layer, (case.pages, case.page), case.layout, device)
    q, key, value = parts
    return RopeTensors(
        q=q,
        key=key,
        value=value,
        positions=torch.randint(case.positions, (case.tokens,), generator=generator, device=device),
        cos_sin=table.to(spec.table_dtype),
        q_weight=weight(),
        k_weight=weight(),
        q_out=q if case.in_place else not_a_number(q.shape, case.dtype, device),
        key_cache=key_cache,
        value_cache=value_cache,
        slots=slots_of(case, slots, generator, device),
        k_scale=k_scale,
        v_scale=v_scale,
    )


class Slots(Protocol):
    """What slots are drawn by, of a case."""

    @property
    def pages(self) -> int: ...
    @property
    def page(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def beyond(self) -> int: ...


def slots_of(case: Slots, count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Distinct slots in any order: the first ones negative, the next ones beyond the cache."""
    capacity = case.pages * case.page
    slots = torch.randperm(capacity, generator=generator, device=device)[:count]
    slots[case.skipped : case.skipped + case.beyond] = capacity + 7 * torch.arange(case.beyond, device=device)
    slots[: case.skipped] = -1
    return slots


def check_rope(case: RopeCase, kernel: str | None, device: torch.device | str, target: Target | None = None) -> None:
    """Raises AssertionError where a query or key is not rounded once, a value differs, or anything else was written.

    The target is the device's own where none is named.
    """
    twice = build(case, device), build(case, device)
    mine, theirs = launched(case, twice, rope.rope_write_kv, kernel, target)
    judge(case, mine, theirs, kernel)


class Launches(Slots, Protocol):
    """What a launch takes, of a case."""

    @property
    def spec(self) -> RopeSpec | MLARopeSpec: ...


TensorsT = TypeVar("TensorsT", RopeTensors, MLARopeTensors)


def launched(
    case: Launches,
    twice: tuple[TensorsT, TensorsT],
    write: Callable[..., None],
    kernel: str | None,
    target: Target | None,
) -> tuple[TensorsT, TensorsT]:
    """(Tensors that a launch had, the same as no launch has seen them, with slots that are in the cache or negative).

    Args:
        twice: tensors of a case, made twice.
        write: rope_write_kv or rope_write_mla.
        target: the device's own where none is given.
    """
    mine, theirs = twice
    # The reference refuses slots that are not there, which kernels skip.
    slots = mine.slots.where(mine.slots < case.pages * case.page, -1)
    if kernel == "reference":
        mine = mine._replace(slots=slots)
    if target is None:
        write(case.spec, mine, eps=EPS, kernel=kernel)
    else:
        rope.RopeWriter(case.spec, lambda: target, kernel)(mine, EPS)
    return mine, theirs._replace(slots=slots)


def judge(case: RopeCase, mine: RopeTensors, theirs: RopeTensors, kernel: str | None) -> None:
    """Compare all that a launch had with tensors that no launch has seen; their slots are in the cache or negative."""
    spec, tokens = case.spec, case.tokens
    # Triton's interpreter truncates bfloat16.
    truncated = kernel == "triton" and mine.q.device.type == "cpu"
    exact, single = (rope_reference.exact(theirs, spec, EPS, dtype) for dtype in (torch.float64, F32))
    reference.write_kv(
        theirs.key,
        theirs.value,
        theirs.key_cache,
        theirs.value_cache,
        theirs.slots,
        theirs.k_scale,
        theirs.v_scale,
    )
    kept = theirs.slots >= 0
    at = (theirs.slots[kept] // case.page, theirs.slots[kept] % case.page)
    scale = 1.0 if theirs.k_scale is None else theirs.k_scale.view(-1, 1)
    q = mine.q_out[:tokens].clone()
    key = reference.indexable(mine.key_cache)[at].view(mine.key_cache.dtype)
    keys = [one[1][: len(kept)][kept] / scale for one in (exact, single)]
    for name, found, right in (("queries", q, [exact[0], single[0]]), ("keys", key, keys)):
        rows = [one.flatten(0, 1) for one in (found, *right)]
        assert_rounded_once(rows[0], rows[1], rows[2], truncated=truncated, what=f"{case.id}: {name}")
    # What was judged is taken over; everything else must be the same bits.
    theirs.q_out[:tokens] = q
    reference.indexable(theirs.key_cache)[at] = reference.indexable(key)
    for name, ours, expected in zip(RopeTensors._fields, mine, theirs, strict=True):
        if ours is not None and expected is not None and name != "slots":
            assert_same_memory(f"{case.id}: {name}", ours, expected, case.fp8 and kernel == "triton")


def assert_same_memory(name: str, ours: torch.Tensor, right: torch.Tensor, near: bool) -> None:
    """Raises AssertionError where any element of the memory that a tensor lies in differs; NaN may have any bits.

    Args:
        near: an fp8 number may be the neighbouring one: Triton's division may be off by two units in the last place.
    """
    found, expected = everything(ours), everything(right)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits, right_bits = (one.view(kinds[one.element_size()]).long() for one in (found, expected))
    same = (bits - right_bits).abs() <= (1 if near and found.element_size() == 1 else 0)
    wrong = ~same & ~(found.float().isnan() & expected.float().isnan())
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements of its memory differ, first at offset {at}: "
            f"{float(found[at])} where {float(expected[at])} is right; strides {ours.stride()}"
        )


def random_case(draw: random.Random, tokens: int) -> RopeCase:
    """A problem of any kind that CuTe DSL's kernel serves."""
    dim = draw.choice((64, 80, 96, 112, 128, 192, 256))
    page, slots = draw.choice((16, 32, 48)), draw.randint(0, tokens)
    heads_kv = draw.choice((1, 2, 3))
    count = slots + draw.choice((0, 0, 1, 3))
    return RopeCase(
        tokens=count,
        without_slot=count - slots,
        padding_tokens=draw.choice((0, 1)),
        skipped=draw.choice((0, slots // 3)),
        pages=-(-slots // page) + draw.randint(1, 3),
        page=page,
        heads=(heads_kv * draw.choice((1, 2, 5)), heads_kv),
        dim=dim,
        dim_v=draw.choice((None, None, 64, 128)),
        rotary_dim=draw.choice((None, 16, dim // 32 * 16)),
        style=draw.choice((NEOX, GPTJ)),
        positions=draw.choice((1, 70)),
        wide_table=draw.random() < 0.4,
        norm=draw.random() < 0.5,
        weight_offset=draw.choice((0.0, 1.0)),
        dtype=draw.choice((BF16, FP16)),
        fp8=draw.random() < 0.5,
        fp8_dtype=draw.choice((FP8, E5M2)),
        scales_by_head=draw.random() < 0.5,
        layout=draw.choice(tuple(Layout)),
        in_place=draw.random() < 0.4,
        fused=draw.random() < 0.6,
        gain=draw.choice((1.0, 1.0, 1e-2, 30.0)),
        specials=draw.random() < 0.2,
        seed=draw.randrange(2**31),
    )
