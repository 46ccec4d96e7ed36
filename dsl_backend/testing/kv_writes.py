# SPDX-License-Identifier: Apache-2.0
"""Cases of writing keys and values into a paged cache, judged byte by byte."""

import math
from dataclasses import KW_ONLY, dataclass

import torch

from dsl_backend.attention import api, reference
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.quant.format import NVFP4_KV
from dsl_backend.runtime.target import Target
from dsl_backend.testing.inputs import K_SCALE, V_SCALE, Layout, empty_like_cache, normal, not_a_number, scale_of

BF16, FP16, FP8, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class WriteCase:
    """One write, by value.

    Attributes:
        tokens: entries of the slot mapping.
        padding_tokens: rows of key and value past the slot mapping.
        skipped: how many of the slots are negative.
        beyond: how many lie behind the last page.
        pages: in the cache; the last one is always written to.
        heads: key/value heads.
        dim, dim_v: elements of a key and a value; of the latent and the rope part where latent.
        fused: key and value are slices of wider rows, as the output of a fused qkv projection is.
        gain: multiplies the numbers; a large one saturates fp8.
        fp8_dtype: of an fp8 cache. nvfp4: the cache is in NVFP4. scales_by_head: each head has scales of its own.
        specials: NaN, infinities, zeros of both signs and subnormals among the numbers.
    """

    id: str = ""
    _: KW_ONLY
    why: str = ""
    tier: str = "smoke"
    tokens: int = 9
    padding_tokens: int = 2
    skipped: int = 2
    beyond: int = 0
    pages: int = 4
    heads: int = 2
    dim: int = 64
    dim_v: int = 64
    dtype: torch.dtype = BF16
    fp8: bool = False
    fp8_dtype: torch.dtype = FP8
    nvfp4: bool = False
    scales_by_head: bool = False
    page: int = 16
    layout: Layout = Layout.SIDE_BY_SIDE
    mla: bool = False
    fused: bool = False
    gain: float = 1.0
    specials: bool = False
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads,
            heads_kv=self.heads,
            head_dim=self.dim + self.dim_v if self.mla else self.dim,
            head_dim_v=self.dim if self.mla else self.dim_v,
            dtype=self.dtype,
            kv_dtype=NVFP4_KV.dtype if self.nvfp4 else self.fp8_dtype if self.fp8 else self.dtype,
            page_size=self.page,
            scale=1.0,
            mla=self.mla,
        )


WRITES: tuple[WriteCase, ...] = (
    WriteCase("bf16", why="a plain copy, bit by bit"),
    WriteCase("fp16", dtype=FP16, dim=72, dim_v=72, heads=3, why="heads and head sizes that are no powers of two"),
    WriteCase("specials", specials=True, why="NaN, infinities and subnormals are copied like anything else"),
    WriteCase("fp8", fp8=True, why="division by two different scales, rounded to nearest even"),
    WriteCase("fp8-fp16", fp8=True, dtype=FP16, why="from float16"),
    WriteCase("fp8-saturated", fp8=True, gain=60.0, why="values past 448 saturate, on both sides"),
    WriteCase("fp8-subnormal", fp8=True, gain=2e-4, why="e4m3's subnormal numbers, and what rounds to zero"),
    WriteCase("fp8-specials", fp8=True, specials=True, why="NaN stays NaN, infinities saturate"),
    WriteCase("fp8-by-head", heads=3, fp8=True, scales_by_head=True, why="each head is divided by its own scales"),
    WriteCase("e5m2", fp8=True, fp8_dtype=E5M2, why="rounded to two bits, to nearest even"),
    WriteCase(
        "e5m2-fp16", heads=3, fp8=True, fp8_dtype=E5M2, scales_by_head=True, dtype=FP16, why="scales of each head"
    ),
    WriteCase("e5m2-saturated", fp8=True, fp8_dtype=E5M2, gain=6e3, why="values past 57344 saturate, on both sides"),
    WriteCase("e5m2-subnormal", fp8=True, fp8_dtype=E5M2, gain=1e-6, why="e5m2's subnormal numbers, and zero"),
    WriteCase("e5m2-specials", fp8=True, fp8_dtype=E5M2, specials=True, why="NaN stays NaN, infinities saturate"),
    WriteCase("nvfp4", nvfp4=True, layout=Layout.HEADS_FIRST, why="scales of blocks, elements rounded to nearest even"),
    WriteCase("nvfp4-fp16", nvfp4=True, dtype=FP16, dim=96, dim_v=48, heads=3, scales_by_head=True, why="tokens first"),
    WriteCase("nvfp4-saturated", nvfp4=True, gain=400.0, fused=True, why="scales past 448, elements past 6"),
    WriteCase("nvfp4-tiny", nvfp4=True, gain=1e-4, why="subnormal scales, and scales of zero"),
    WriteCase("nvfp4-specials", nvfp4=True, specials=True, why="a block's scale is NaN; infinities saturate"),
    WriteCase("nvfp4-no-tokens", nvfp4=True, tokens=0, skipped=0, why="an empty step"),
    WriteCase("nvfp4-padded", nvfp4=True, layout=Layout.PADDED, page=48, beyond=3, why="room between pages"),
    WriteCase("all-skipped", skipped=9, why="a step of padding writes nothing"),
    WriteCase("beyond", beyond=5, fused=True, why="slots behind the last page are skipped, near ones and far ones"),
    WriteCase("beyond-fp8", beyond=3, fp8=True, page=48, layout=Layout.PADDED, why="the same; a page of any size"),
    WriteCase("no-tokens", tokens=0, skipped=0, why="an empty step"),
    WriteCase("one-token", tokens=1, skipped=0, padding_tokens=0, heads=1, why="smallest step"),
    WriteCase("dims-differ", dim=192, dim_v=128, heads=1, why="keys longer than values"),
    WriteCase("narrow", dim=16, dim_v=8, heads=1, tokens=200, pages=14, why="a block for many tokens, not all there"),
    WriteCase("uneven", dim=96, dim_v=72, heads=13, why="a token's rows end amid a warp and amid a block"),
    WriteCase("wide", dim=512, dim_v=256, heads=32, fused=True, why="a token for many blocks"),
    WriteCase("wide-fp8", dim=128, dim_v=128, heads=32, fp8=True, fused=True, why="the same in e4m3"),
    WriteCase("page-528", page=528, pages=2, tokens=20, why="slots far into a page that is no power of two"),
    WriteCase("heads-first", layout=Layout.HEADS_FIRST, fused=True, why="heads outside of a page's tokens"),
    WriteCase("separate", layout=Layout.SEPARATE, fused=True, why="two tensors"),
    WriteCase("padded", layout=Layout.PADDED, fused=True, fp8=True, why="room between rows stays as it was"),
    WriteCase("latent", mla=True, heads=1, dim=512, dim_v=64, why="MLA's row: latent, then rope"),
    WriteCase(
        "latent-fused", mla=True, heads=1, dim=512, dim_v=64, fused=True, tokens=40, why="others lie between rows"
    ),
    WriteCase(
        "latent-fp8", mla=True, heads=1, dim=512, dim_v=64, fp8=True, layout=Layout.PADDED, why="MLA's row in e4m3"
    ),
    WriteCase("real-prefill", tier="gpu", tokens=4096, pages=600, heads=8, dim=128, dim_v=128, why="a prompt's keys"),
    WriteCase(
        "real-fp8",
        tier="gpu",
        tokens=4096,
        pages=600,
        heads=8,
        dim=128,
        dim_v=128,
        fp8=True,
        gain=4.0,
        why="a prompt's keys in e4m3",
    ),
)


@dataclass
class Write:
    """The tensors that `api.write_kv` takes."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor


def build(case: WriteCase, device: torch.device | str) -> Write:
    """The tensors of a case; the cache starts as NaN."""
    device, spec = torch.device(device), case.spec
    random = torch.Generator(device).manual_seed(case.seed)
    cache, values = empty_like_cache(spec, (case.pages, case.page), case.layout, device)
    key_cache, value_cache = (cache[..., : case.dim], cache[..., case.dim :]) if case.mla else (cache, values)

    def rows(dim: int) -> torch.Tensor:
        shape = (case.tokens + case.padding_tokens, case.heads, dim)
        numbers = normal(shape, random) * case.gain
        if case.specials and numbers.numel():
            odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 6e4], device=device)
            numbers.view(-1)[: len(odd)] = odd
        if not case.fused:
            return numbers.to(case.dtype)
        wide = not_a_number((shape[0], shape[1] * 2, dim), case.dtype, device)
        wide[:, : case.heads] = numbers.to(case.dtype)
        return wide[:, : case.heads]

    slots = torch.randperm(case.pages * case.page, generator=random, device=device)[: case.tokens]
    if case.tokens and not (slots == case.pages * case.page - 1).any():
        slots[-1] = case.pages * case.page - 1
    far = torch.tensor([0, 1, case.page, 2**31, 2**62], device=device)
    slots[case.skipped : case.skipped + case.beyond] = case.pages * case.page + far[: case.beyond]
    slots[: case.skipped] = torch.tensor([-1, -(2**40)], device=device).repeat(case.tokens)[: case.skipped]
    return Write(rows(case.dim), rows(case.dim_v), key_cache, value_cache, slots)


def everything(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the memory that a view belongs to, flat."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)


def check_write(case: WriteCase, kernel: str, device: torch.device | str, target: Target | None = None) -> None:
    """Write with a kernel and with the reference: the caches, and all memory around them, must be the same.

    The target is the device's own where none is named.

    NaN may have any bits. Where Triton stores e4m3, a neighbouring number is right too if the exact quotient lies
    within float32's rounding of the midpoint between the two: its division on a GPU may be off by two units in the last
    place.
    """
    k_scale, v_scale = (
        scale_of(case.spec, scale, case.scales_by_head).to(device) if case.spec.is_quantized_kv else None
        for scale in (K_SCALE, V_SCALE)
    )
    mine, theirs = build(case, device), build(case, device)
    # The reference refuses slots that are not there, which kernels skip.
    slots = mine.slots.where(mine.slots < case.pages * case.page, -1)
    if kernel == "reference":
        mine.slots = slots
    tensors = (mine.key, mine.value, mine.key_cache, mine.value_cache, mine.slots)
    if target is None:
        api.write_kv(case.spec, *tensors, k_scale=k_scale, v_scale=v_scale, kernel=kernel)
    else:
        api.Writer(case.spec, lambda: target, kernel)(*tensors, k_scale, v_scale)
    reference.write_kv(theirs.key, theirs.value, theirs.key_cache, theirs.value_cache, slots, k_scale, v_scale)
    if kernel == "triton" and case.fp8 and k_scale is not None and v_scale is not None:
        kept = slots >= 0
        pages, tokens = slots[kept] // case.page, slots[kept] % case.page
        for ours, right, rows, scale in (
            (mine.key_cache, theirs.key_cache, mine.key, k_scale),
            (mine.value_cache, theirs.value_cache, mine.value, v_scale),
        ):
            exact = rows[: case.tokens][kept].double() / scale.double().view(-1, 1)
            forgive_midpoints(ours, right, exact, pages, tokens)
    for name, ours, right in (
        ("key", mine.key_cache, theirs.key_cache),
        ("value", mine.value_cache, theirs.value_cache),
    ):
        found, expected = everything(ours), everything(right)
        same = reference.indexable(found) == reference.indexable(expected)
        if not case.spec.is_quantized_kv:
            same = found.view(torch.int16) == expected.view(torch.int16)
        if case.nvfp4:
            found, expected = found.view(torch.uint8), expected.view(torch.uint8)
        wrong = ~(same | (found.float().isnan() & expected.float().isnan()))
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{name} cache: {int(wrong.sum())} of {wrong.numel()} elements of its memory differ, first at offset "
                f"{at}: {float(found[at])} where {float(expected[at])} is right; strides {ours.stride()}"
            )


def forgive_midpoints(
    found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Take over into `expected` what was found where rounding may go either way. exact: [tokens, heads, dim]."""
    mine, theirs = (reference.indexable(cache)[pages, tokens].view(cache.dtype) for cache in (found, expected))
    middle = (mine.double() + theirs.double()) / 2
    tie = ((exact - middle).abs() <= 2**-22 * exact.abs()) & (
        (reference.indexable(mine).int() - reference.indexable(theirs).int()).abs() == 1
    )
    bytes_of = reference.indexable(theirs)
    bytes_of[tie] = reference.indexable(mine)[tie]
    reference.indexable(expected)[pages, tokens] = bytes_of
