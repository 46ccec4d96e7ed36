# SPDX-License-Identifier: Apache-2.0
"""Attention cases with the reason for each. Lists, not products: a case that has no reason of its own is not here.

Tiers: `smoke` runs at every change, `full` adds cases that repeat a feature at other sizes, `gpu` has real sizes.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from dsl_backend.attention.spec import AttentionSpec, Causality
from dsl_backend.testing.inputs import Layout, Problem, Surroundings, make_problem

BF16, FP16, FP8, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
FULL, CAUSAL, PER_REQUEST = Causality.FULL, Causality.CAUSAL, Causality.PER_REQUEST
TIERS = ("smoke", "full", "gpu")

# Every length where a tile of 16, 32, 64 or 128 keys begins or ends.
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem, by value: its repr rebuilds it.

    Attributes:
        id: of the test; empty for the problems of a fuzzer.
        why: what would break without it.
        q_lens, kv_lens: tokens of each request; (0, 0) is padding.
        heads: query and key/value heads.
        dim: of a head's queries and keys; dim_v of its values where it differs.
        fp8: keys and values are stored as fp8, of fp8_dtype.
        scales_by_head: each key head has scales of its own.
        window: keys visible before and after a position.
        causal: of each request, and then Causality.PER_REQUEST.
        scale: of q·k; 1 / sqrt(dim) by default.
        q_gain: multiplies q, for cases whose feature shows at large scores only.
        nan_request: index of a request with a NaN in its first query's first head.
        split_q: absorbed MLA's q comes in two parts.
        batch_invariant: `AttentionSpec.batch_invariant`.
        programs: split the keys over that many programs, in shares as small as one tile; None: as the kernel likes.
        tile: query rows and keys of the kernels' tiles; None: as the kernel likes.
        seed: of the numbers.
    """

    id: str = ""
    why: str = ""
    tier: str = "smoke"
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dim_v: int | None = None
    dtype: torch.dtype = BF16
    fp8: bool = False
    fp8_dtype: torch.dtype = FP8
    scales_by_head: bool = False
    page: int | None = 16
    scale: float | None = None
    causality: Causality = CAUSAL
    causal: tuple[bool, ...] | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    latent: bool = False
    q_gain: float = 1.0
    nan_request: int | None = None
    split_q: bool = False
    batch_invariant: bool = False
    programs: int | None = None
    tile: tuple[int, int] | None = None
    around: Surroundings = field(default_factory=Surroundings)
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads[0],
            heads_kv=self.heads[1],
            head_dim=self.dim,
            head_dim_v=self.dim if self.dim_v is None else self.dim_v,
            dtype=self.dtype,
            kv_dtype=self.fp8_dtype if self.fp8 else self.dtype,
            page_size=self.page,
            scale=1 / math.sqrt(self.dim) if self.scale is None else self.scale,
            causality=self.causality if self.causal is None else PER_REQUEST,
            window_left=self.window[0],
            window_right=self.window[1],
            softcap=self.softcap,
            sinks=self.sinks,
            alibi=self.alibi,
            latent=self.latent,
            batch_invariant=self.batch_invariant,
        )

    def problem(self, device: torch.device | str = "cpu") -> Problem:
        problem = make_problem(
            self.spec,
            self.q_lens,
            self.kv_lens,
            seed=self.seed,
            device=device,
            causal=self.causal,
            around=self.around,
            scales_by_head=self.scales_by_head,
        )
        problem.q.mul_(self.q_gain)
        if self.nan_request is not None:
            problem.q[sum(self.q_lens[: self.nan_request]), 0] = math.nan
        return problem


def mla(heads: int, dims: tuple[int, int] = (576, 512), **facts: Any) -> Case:
    """A case of absorbed MLA."""
    return Case(heads=(heads, 1), dim=dims[0], dim_v=dims[1], latent=True, **facts)


DECODE = (1, 1, 1, 1)

HEADS = [
    Case(id="mha", q_lens=(1, 5, 18), kv_lens=(33, 20, 18), heads=(3, 3), why="a key head for each query head"),
    Case(id="gqa-4", q_lens=(1, 5, 18), kv_lens=(33, 20, 18), heads=(8, 2), why="Llama 3 8B's group"),
    Case(id="gqa-8", q_lens=(1, 3, 17), kv_lens=(33, 20, 17), heads=(16, 2), why="two queries fill a tile of 16 rows"),
    Case(id="gqa-7", q_lens=(1, 3, 17), kv_lens=(33, 20, 17), heads=(14, 2), why="Qwen 2's group: no power of two"),
    Case(id="gqa-5", q_lens=(1, 4, 17), kv_lens=(33, 20, 17), heads=(5, 1), why="a query straddles two row tiles"),
    Case(id="mqa", q_lens=(1, 2, 17), kv_lens=(33, 20, 17), heads=(8, 1), why="one key head for all"),
    Case(
        id="mqa-20",
        q_lens=(1, 2),
        kv_lens=(33, 20),
        heads=(20, 1),
        why="more heads share a key head than a tile has rows",
        tier="full",
    ),
    Case(id="one-head", q_lens=(1, 16), kv_lens=(1, 16), heads=(1, 1), why="smallest legal head counts"),
]

DTYPES = [
    Case(id="fp16", q_lens=(1, 6, 20), kv_lens=(50, 37, 20), dtype=FP16, why="float16 throughout"),
    Case(
        id="fp8-bf16",
        q_lens=(1, 6, 20),
        kv_lens=(50, 37, 20),
        fp8=True,
        why="e4m3 keys and values with different scales, bfloat16 queries",
    ),
    Case(
        id="e5m2-bf16",
        q_lens=(1, 2, 20),
        kv_lens=(33, 20, 64),
        fp8=True,
        fp8_dtype=E5M2,
        scales_by_head=True,
        why="e5m2 keys and values, scales of each key head, bfloat16 queries",
    ),
    Case(
        id="e5m2-fp16",
        q_lens=(1, 2, 20),
        kv_lens=(33, 20, 64),
        fp8=True,
        fp8_dtype=E5M2,
        dtype=FP16,
        why="e5m2 keys and values, float16 queries",
    ),
    Case(
        id="by-head-fp8",
        q_lens=(1, 2, 20),
        kv_lens=(33, 20, 64),
        heads=(6, 3),
        fp8=True,
        scales_by_head=True,
        softcap=5.0,
        alibi=True,
        why="scales of each key head go into every score change",
    ),
    Case(
        id="fp8-fp16",
        q_lens=(1, 6, 20),
        kv_lens=(50, 37, 20),
        fp8=True,
        dtype=FP16,
        why="e4m3 keys and values, float16 queries",
    ),
]

HEAD_DIMS = [
    Case(
        id=f"dim-{dim}",
        q_lens=(1, 18),
        kv_lens=(35, 21),
        heads=(2, 1),
        dim=dim,
        dtype=FP16 if dim % 32 else BF16,
        # What lies behind a key's last element is then another token's, and may be NaN.
        around=Surroundings(layout=Layout.SEPARATE),
        tier="smoke" if dim in (64, 72, 80, 96, 128, 256) else "full",
        why="head sizes that models have: columns past a power of two must count for nothing",
    )
    for dim in (64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 200, 248, 256, 512)
]

PAGES = [
    Case(
        id=f"page-{page}",
        q_lens=(1, 4, 19),
        kv_lens=lens,
        page=page,
        why=why,
    )
    for page, lens, why in (
        (32, (65, 31, 32), "a tile of keys within a page, lengths at its edges"),
        (48, (97, 48, 49), "pages that tiles of keys do not divide"),
        (528, (530, 40, 19), "hybrid models' pages: longer than most requests, and not a power of two"),
    )
]
PAGES += [
    Case(
        id=f"page-{page}-tile-{tile[0]}-{tile[1]}",
        q_lens=(1, 4, 35),
        kv_lens=lens,
        page=page,
        tile=tile,
        why=why,
    )
    for page, tile, lens, why in (
        (16, (16, 64), (65, 31, 64), "a tile of keys gathers several pages"),
        (48, (32, 32), (97, 48, 49), "every other tile of keys straddles two pages"),
        (528, (16, 64), (530, 40, 35), "a tile of keys straddles two pages that are no powers of two"),
        (32, (32, 32), (65, 33, 35), "a tile of keys is a page; rows of several queries in a tile"),
    )
]

LENGTHS = [
    Case(id="decode-1", q_lens=(1,), kv_lens=(1,), why="smallest legal problem: the output is the value"),
    Case(
        id="decode-edges",
        q_lens=(1,) * len(EDGES),
        kv_lens=EDGES,
        heads=(2, 1),
        why="decode with every length where a tile of keys begins or ends",
    ),
    Case(
        id="prefill-edges",
        q_lens=(1, 15, 16, 17, 31, 32, 33),
        kv_lens=(1, 15, 16, 17, 31, 32, 33),
        heads=(2, 1),
        why="fresh prefill at the edges of tiles of rows and keys",
    ),
    Case(
        id="prefill-edges-64",
        q_lens=(63, 64, 65),
        kv_lens=(63, 64, 65),
        heads=(1, 1),
        tier="full",
        why="fresh prefill at the edges of larger tiles",
    ),
    Case(
        id="prefill-edges-128",
        q_lens=(127, 128, 129),
        kv_lens=(127, 128, 129),
        heads=(1, 1),
        tier="full",
        why="fresh prefill at the edges of larger tiles",
    ),
    Case(
        id="extend-edges",
        q_lens=(17, 33, 18, 20, 17),
        kv_lens=(18, 65, 31, 128, 129),
        heads=(2, 1),
        why="the diagonal starts anywhere in a tile of keys",
    ),
    Case(
        id="mixed",
        q_lens=(1, 19, 30, 1, 2),
        kv_lens=(70, 55, 30, 1, 40),
        why="decode, extend and fresh prefill in one batch: two kernels share it and neither touches the other's rows",
    ),
    Case(
        id="speculative",
        q_lens=(2, 3, 4, 5, 6, 7, 8),
        kv_lens=(40, 3, 17, 64, 70, 8, 33),
        why="draft tokens: short queries with a diagonal of their own",
    ),
    Case(
        id="at-the-limit",
        q_lens=(16, 17, 15, 1),
        kv_lens=(30, 31, 15, 9),
        heads=(2, 1),
        why="queries as long as the decode kernel takes, and one more",
    ),
    Case(id="no-requests", q_lens=(), kv_lens=(), why="a step without requests leaves every row alone"),
    Case(
        id="no-rows",
        q_lens=(),
        kv_lens=(),
        around=Surroundings(padding_tokens=0, spare_rows=0),
        why="a step without a single row",
    ),
    Case(
        id="padding-requests",
        q_lens=(1, 0, 1, 0, 0, 0),
        kv_lens=(20, 0, 7, 0, 0, 0),
        why="a CUDA graph's batch is filled up with empty requests, more than the kernel scans at a time",
    ),
    Case(
        id="padding-first",
        q_lens=(0, 0, 0, 0, 0, 18, 0, 1),
        kv_lens=(0, 0, 0, 0, 0, 18, 0, 3),
        why="empty requests in front",
    ),
    Case(
        id="idle-request",
        q_lens=(1, 0, 17),
        kv_lens=(20, 33, 17),
        why="a request with keys and no query this step",
    ),
    Case(
        id="many-requests",
        q_lens=(1,) * 37,
        kv_lens=tuple(1 + 7 * i % 40 for i in range(37)),
        heads=(2, 1),
        why="requests in several chunks of the scan over lengths",
    ),
    Case(
        id="no-keys",
        q_lens=(1, 18, 2, 3),
        kv_lens=(0, 0, 30, 0),
        causality=FULL,
        why="rows that see no key are 0, their lse -inf",
    ),
    Case(
        id="more-queries-than-keys",
        q_lens=(5, 20),
        kv_lens=(3, 7),
        why="a causal request whose first queries stand before its first key",
    ),
    Case(
        id="loose-bounds",
        q_lens=(1, 2),
        kv_lens=(20, 33),
        around=Surroundings(max_query_len=60, max_seq_len=400, padding_tokens=40),
        why="a captured graph promises bounds far above the lengths",
    ),
]

MASKS = [
    Case(
        id="window-1",
        q_lens=(1, 18),
        kv_lens=(40, 35),
        window=(0, None),
        why="each position sees itself alone: the output is its value",
    ),
    Case(id="window-2", q_lens=(1, 18), kv_lens=(40, 35), window=(1, None), why="one key before"),
    Case(
        id="window-16",
        q_lens=(1, 2, 40, 20, 18),
        kv_lens=(33, 32, 40, 70, 18),
        window=(15, None),
        why="a window as wide as a tile: both of its edges within one",
    ),
    Case(
        id="window-100",
        q_lens=(1, 1, 3, 20),
        kv_lens=(101, 160, 120, 130),
        heads=(2, 1),
        window=(99, None),
        why="tiles left of the window are skipped, the ones inside are not masked",
    ),
    Case(
        id="window-wide",
        q_lens=(1, 20),
        kv_lens=(30, 25),
        window=(4096, None),
        why="a window longer than the request",
    ),
    Case(
        id="window-widest",
        q_lens=(1, 20, 5),
        kv_lens=(30, 25, 2),
        window=(2**31 - 1, 2**31 - 1),
        causality=FULL,
        tier="full",
        why="positions plus or minus the widest window must not wrap around",
    ),
    Case(
        id="window-both-sides",
        q_lens=(40, 21, 1, 3),
        kv_lens=(40, 21, 1, 3),
        window=(7, 7),
        causality=FULL,
        why="an encoder's local attention (ModernBERT): symmetrical, not causal",
    ),
    Case(
        id="window-right",
        q_lens=(20, 3),
        kv_lens=(45, 30),
        window=(None, 4),
        causality=FULL,
        why="bounded on the right only",
    ),
    Case(
        id="window-causal-right",
        q_lens=(20, 3),
        kv_lens=(45, 30),
        window=(5, 4),
        why="causal wins over a window that reaches to the right",
    ),
    Case(
        id="window-before-keys",
        q_lens=(20, 5),
        kv_lens=(7, 2),
        window=(3, 3),
        causality=FULL,
        why="rows whose whole window lies before the first key see nothing",
    ),
    Case(id="full", q_lens=(1, 20, 5), kv_lens=(33, 20, 40), causality=FULL, why="not causal, over a paged context"),
    Case(
        id="cross",
        q_lens=(20, 3, 1),
        kv_lens=(9, 1, 35),
        causality=FULL,
        why="cross attention: more queries than keys, and all see all",
    ),
    Case(
        id="per-request",
        q_lens=(20, 19, 3, 4, 1),
        kv_lens=(33, 19, 20, 9, 18),
        causal=(True, False, False, True, False),
        why="images are bidirectional in a batch of causal text",
    ),
    Case(
        id="per-request-window",
        q_lens=(20, 19, 3, 4),
        kv_lens=(33, 19, 20, 9),
        causal=(True, False, False, True),
        window=(6, 3),
        why="the right edge of the window differs from request to request",
    ),
]

SCORES = [
    Case(
        id="softcap",
        q_lens=(1, 20, 3),
        kv_lens=(33, 20, 18),
        softcap=5.0,
        q_gain=4.0,
        why="Gemma 2's bend of the scores, at scores that it bends",
    ),
    Case(
        id="softcap-30-small",
        q_lens=(1, 20),
        kv_lens=(33, 20),
        softcap=30.0,
        dtype=FP16,
        why="at small scores tanh is nearly straight: cancellation would show in the lse",
    ),
    Case(
        id="softcap-saturated",
        q_lens=(1, 20),
        kv_lens=(33, 20),
        softcap=2.0,
        q_gain=64.0,
        why="e^x overflows before the cap is applied",
    ),
    Case(id="sinks", q_lens=(1, 20, 4), kv_lens=(40, 20, 9), sinks=True, why="gpt-oss' sink logits"),
    Case(
        id="sinks-bf16",
        q_lens=(1, 17),
        kv_lens=(20, 17),
        sinks=True,
        around=Surroundings(sinks_dtype=BF16),
        why="checkpoints store sinks in 16 bits",
    ),
    Case(
        id="sinks-no-keys",
        q_lens=(1, 17),
        kv_lens=(0, 0),
        causality=FULL,
        sinks=True,
        why="the sink alone is the denominator: output 0, lse the sink",
    ),
    Case(id="alibi", q_lens=(1, 20, 4), kv_lens=(40, 20, 33), alibi=True, why="BLOOM's and MPT's slopes"),
    Case(
        id="alibi-full",
        q_lens=(20, 4),
        kv_lens=(20, 33),
        alibi=True,
        causality=FULL,
        heads=(6, 3),
        why="keys after the position are distant too; heads no power of two",
    ),
    Case(
        id="large-scores",
        q_lens=(1, 20),
        kv_lens=(40, 30),
        scale=2.0,
        why="scores of hundreds: the running maximum must carry the softmax",
    ),
    Case(
        id="negative-scale",
        q_lens=(1, 18),
        kv_lens=(33, 20),
        scale=-0.125,
        tier="full",
        why="the sign of the scale belongs to the scores",
    ),
    Case(id="zero-scale", q_lens=(1, 18), kv_lens=(33, 20), scale=0.0, tier="full", why="a plain mean of the values"),
]

COMBINATIONS = [
    Case(
        id="window-sinks",
        q_lens=(1, 20, 3),
        kv_lens=(60, 40, 33),
        heads=(8, 1),
        window=(15, None),
        sinks=True,
        why="gpt-oss' layers",
    ),
    Case(
        id="window-softcap",
        q_lens=(1, 20, 3),
        kv_lens=(60, 40, 33),
        window=(20, None),
        softcap=5.0,
        q_gain=3.0,
        why="Gemma 2's layers: masked after bending",
    ),
    Case(
        id="alibi-fp8",
        q_lens=(1, 20, 3),
        kv_lens=(60, 40, 33),
        alibi=True,
        fp8=True,
        why="slopes are added to scores that include the key scale",
    ),
    Case(
        id="sinks-fp8",
        q_lens=(1, 20),
        kv_lens=(60, 40),
        sinks=True,
        fp8=True,
        why="the value scale applies after the sink joined",
    ),
    Case(
        id="softcap-fp8",
        q_lens=(1, 20),
        kv_lens=(40, 33),
        softcap=5.0,
        q_gain=3.0,
        fp8=True,
        why="the key scale applies before the cap",
    ),
    Case(
        id="everything",
        q_lens=(1, 20, 3, 0),
        kv_lens=(60, 40, 33, 0),
        dim=80,
        heads=(10, 2),
        page=48,
        window=(25, 2),
        causal=(True, False, False, True),
        softcap=8.0,
        sinks=True,
        alibi=True,
        fp8=True,
        q_gain=2.0,
        why="order of all features: scale, softcap, slopes, mask, sink",
    ),
]

PACKED = [
    Case(
        id="encoder",
        q_lens=(20, 1, 33, 17),
        kv_lens=(20, 1, 33, 17),
        page=None,
        causality=FULL,
        why="encoder-only models: packed keys, neighbours' keys are adjacent in memory and must not be seen",
    ),
    Case(
        id="packed-causal",
        q_lens=(20, 1, 33),
        kv_lens=(20, 1, 40),
        page=None,
        why="packed keys with a diagonal, as in MLA's prefill",
    ),
    Case(
        id="packed-192-128",
        q_lens=(18, 1, 5),
        kv_lens=(30, 7, 5),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        around=Surroundings(layout=Layout.SEPARATE),
        why="MLA's prefill: queries and keys longer than values, its chunks merged by lse",
    ),
    Case(
        id="packed-192-128-context",
        q_lens=(18, 2),
        kv_lens=(37, 9),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        causality=FULL,
        tier="full",
        why="MLA's prefill over a chunk of cached context: not causal",
    ),
    Case(
        id="packed-window",
        q_lens=(40, 25),
        kv_lens=(40, 25),
        page=None,
        causality=FULL,
        window=(6, 6),
        why="local layers of an encoder",
    ),
    Case(
        id="packed-empty",
        q_lens=(0, 5, 0),
        kv_lens=(0, 5, 0),
        page=None,
        causality=FULL,
        why="padding requests between packed ones",
    ),
]

LATENT = [
    mla(16, id="mla-16", q_lens=DECODE, kv_lens=(1, 17, 40, 64), why="DeepSeek V2 Lite: heads fill one tile of rows"),
    mla(
        8,
        id="mla-8-ragged",
        q_lens=(1, 2, 5, 8, 0),
        kv_lens=(33, 17, 5, 20, 0),
        why="8 heads of a sharded V3, speculative queries of unequal length",
    ),
    mla(128, id="mla-128", q_lens=(1,), kv_lens=(20,), tier="full", why="DeepSeek V3 on one GPU"),
    mla(12, id="mla-12", q_lens=(1, 3), kv_lens=(20, 33), tier="full", why="a head count that tiles do not divide"),
    mla(16, (320, 256), id="mla-320", q_lens=(1, 2), kv_lens=(33, 20), why="the smaller latent of 256 + 64"),
    mla(16, (288, 256), id="mla-288", q_lens=(1, 2), kv_lens=(33, 20), tier="full", why="MiniCPM 3: 256 + 32"),
    mla(
        20,
        id="mla-tile-32-32",
        q_lens=(1, 3),
        kv_lens=(33, 70),
        tile=(32, 32),
        tier="full",
        why="several row tiles of several pages",
    ),
    mla(16, id="mla-split-q", q_lens=(1, 2), kv_lens=(33, 20), split_q=True, why="latent and rope of q lie apart"),
    mla(16, id="mla-e5m2", q_lens=(1, 2), kv_lens=(33, 20), fp8=True, fp8_dtype=E5M2, why="a latent cache in e5m2"),
    mla(16, id="mla-fp8", q_lens=(1, 2), kv_lens=(33, 20), fp8=True, why="a latent cache in e4m3"),
    mla(
        16,
        id="mla-padded",
        q_lens=(1, 2),
        kv_lens=(33, 20),
        page=32,
        dtype=FP16,
        around=Surroundings(layout=Layout.PADDED),
        why="cache rows with room between them",
    ),
    mla(16, id="mla-mixed", q_lens=(20, 1), kv_lens=(40, 20), tier="full", why="a chunk of prefill among decodes"),
]

SURROUNDINGS = [
    Case(
        id=f"layout-{layout.value}",
        q_lens=(1, 18, 3),
        kv_lens=(50, 33, 18),
        around=Surroundings(layout=layout, fused_q=True),
        why="strides come at run time, of the cache and of q",
    )
    for layout in (Layout.HEADS_FIRST, Layout.SEPARATE, Layout.PADDED)
]
SURROUNDINGS += [
    Case(
        id=f"nan-{name}",
        q_lens=q_lens,
        kv_lens=kv_lens,
        nan_request=1,
        why="one request's NaN stays its own, even where requests share a program",
    )
    for name, q_lens, kv_lens in (("decode", DECODE, (20, 33, 40, 17)), ("prefill", (18, 17, 20), (18, 33, 20)))
]

STALE = Surroundings(stale=True)
# A weight of 0 does not take away a NaN: values that no row sees must not be multiplied. Lengths leave stale keys in a
# tile beside visible ones, in pages of their own, and in tiles of their own, of each width of a tile.
WINDOWS = [
    Case(
        id="stale-decode",
        q_lens=(1, 1, 1, 1, 1, 2),
        kv_lens=(33, 70, 131, 200, 290, 300),
        heads=(8, 1),
        window=(20, None),
        around=STALE,
        why="decode: a NaN in front of the window, in pages that another request may have by now",
    ),
    Case(
        id="stale-decode-fp8",
        q_lens=(1, 1, 3),
        kv_lens=(70, 131, 300),
        heads=(4, 2),
        window=(20, None),
        fp8=True,
        around=STALE,
        why="the same in e4m3",
    ),
    Case(
        id="stale-prefill",
        q_lens=(20, 150, 70, 1),
        kv_lens=(133, 300, 75, 200),
        heads=(2, 1),
        window=(30, None),
        page=32,
        around=STALE,
        why="the first row tile of a chunk over a longer context",
    ),
    Case(
        id="stale-prefill-fp8",
        q_lens=(20, 70),
        kv_lens=(133, 175),
        heads=(2, 1),
        window=(30, 5),
        causality=FULL,
        dtype=FP16,
        fp8=True,
        around=STALE,
        why="the same in e4m3, with a window to both sides",
    ),
    Case(
        id="stale-packed",
        q_lens=(20, 140),
        kv_lens=(133, 300),
        heads=(2, 2),
        dim=128,
        page=None,
        window=(40, None),
        around=STALE,
        why="packed keys, whose tiles begin anywhere",
    ),
    Case(
        id="stale-sinks",
        q_lens=(1, 2, 30),
        kv_lens=(131, 160, 170),
        heads=(8, 1),
        window=(15, None),
        sinks=True,
        softcap=5.0,
        alibi=True,
        around=STALE,
        why="scores that are bent are NaN too until they are masked",
    ),
    Case(
        id="stale-splits",
        q_lens=(1, 2),
        kv_lens=(500, 430),
        heads=(2, 1),
        window=(300, None),
        programs=8,
        tile=(16, 16),
        around=STALE,
        why="the window begins in one part of several",
    ),
]
LATENT += [
    mla(
        16,
        id=f"stale-mla{'-fp8' if fp8 else ''}",
        q_lens=(1, 2, 1),
        kv_lens=(40, 150, 131),
        window=(20, None),
        fp8=fp8,
        around=STALE,
        why="keys are the values: those of no row must be neither",
    )
    for fp8 in (False, True)
]

# Tiles of 16 keys on a GPU too: these short ranges shall have many parts there as well.
SPLITS = [
    Case(
        id="splits-many",
        q_lens=(1, 2, 1),
        kv_lens=(200, 100, 5),
        programs=16,
        tile=(16, 16),
        why="one long range over many programs, merged by whoever comes last",
    ),
    Case(
        id="splits-one-tile",
        q_lens=(1, 1),
        kv_lens=(160, 40),
        heads=(2, 1),
        programs=64,
        tile=(16, 16),
        why="more programs than tiles",
    ),
    Case(
        id="splits-more-than-merged-at-once",
        q_lens=(1,),
        kv_lens=(330,),
        heads=(2, 1),
        programs=42,
        tile=(16, 16),
        why="more parts of a range than the merge looks at in one go",
    ),
    Case(
        id="splits-large-scores",
        q_lens=(1, 2),
        kv_lens=(330, 90),
        heads=(2, 1),
        scale=16.0,
        programs=64,
        tile=(16, 16),
        why="parts whose largest scores lie hundreds apart: weighting by the wrong one overflows",
    ),
    Case(
        id="splits-uneven",
        q_lens=(1, 3, 1, 0, 1),
        kv_lens=(90, 64, 1, 0, 75),
        programs=7,
        tile=(16, 16),
        why="shares end anywhere; a program finishes one range and begins another",
    ),
    Case(
        id="splits-one-program",
        q_lens=(1, 3, 1),
        kv_lens=(40, 64, 1),
        programs=1,
        tile=(16, 16),
        why="no range is split",
    ),
    Case(
        id="splits-masked",
        q_lens=(8, 1),
        kv_lens=(100, 60),
        heads=(2, 1),
        window=(20, None),
        programs=16,
        tile=(16, 16),
        why="parts in which some rows see nothing at all",
    ),
    Case(
        id="splits-sinks-fp8",
        q_lens=(1, 2),
        kv_lens=(150, 70),
        sinks=True,
        fp8=True,
        programs=8,
        tile=(16, 16),
        why="sink and scales apply once, not once a part",
    ),
    Case(
        id="splits-no-keys",
        q_lens=(1, 2),
        kv_lens=(0, 70),
        causality=FULL,
        programs=8,
        tile=(16, 16),
        why="an empty range among split ones",
    ),
    Case(
        id="splits-nan",
        q_lens=DECODE,
        kv_lens=(40, 70, 64, 33),
        nan_request=1,
        programs=8,
        tile=(16, 16),
        why="a NaN crosses the merge of its own request only",
    ),
    Case(
        id="splits-80",
        q_lens=(1, 2),
        kv_lens=(100, 70),
        dim=80,
        programs=8,
        tile=(16, 16),
        why="partial results in two blocks",
    ),
    mla(16, id="splits-mla", q_lens=(1, 2), kv_lens=(100, 40), programs=8, tile=(16, 16), why="wide partial results"),
    mla(
        20,
        id="splits-mla-20",
        q_lens=(1, 3),
        kv_lens=(70, 40),
        programs=9,
        tile=(16, 16),
        tier="full",
        why="row tiles of one request end in different programs",
    ),
]

LONG_DECODE = (1,) * 64


def real(id: str, why: str, **facts: Any) -> Case:
    """A case of real size."""
    return Case(id=f"real-{id}", why=why, tier="gpu", **{"heads": (32, 8), "dim": 128, **facts})


GPU = [
    real(
        "decode",
        "Llama 3 8B, a batch of 64",
        q_lens=LONG_DECODE,
        kv_lens=tuple(37 + 131 * i for i in range(64)),
    ),
    real("decode-long", "one long request: every program works on it", q_lens=(1,), kv_lens=(131072,)),
    real(
        "decode-skewed",
        "one long request among short ones",
        q_lens=LONG_DECODE,
        kv_lens=(100_003, *(17 + i for i in range(63))),
        seed=1,
    ),
    real("decode-256", "a large batch", q_lens=(1,) * 256, kv_lens=tuple(700 + i for i in range(256))),
    real("decode-fp8", "a cache of e4m3", q_lens=LONG_DECODE, kv_lens=tuple(99 + 61 * i for i in range(64)), fp8=True),
    real("decode-page-528", "pages of a hybrid model", q_lens=(1,) * 16, kv_lens=(5000,) * 16, page=528),
    real("speculative", "four drafts a request", q_lens=(5,) * 32, kv_lens=tuple(500 + 97 * i for i in range(32))),
    real("prefill", "a fresh prompt", q_lens=(4096,), kv_lens=(4096,)),
    real("prefill-batch", "prompts of unequal length", q_lens=(1, 777, 2048, 129), kv_lens=(1, 777, 2048, 129)),
    real("extend", "a chunk over a long context", q_lens=(2048,), kv_lens=(16384,), heads=(8, 2)),
    real(
        "mixed",
        "chunked prefill: decodes ride along",
        q_lens=(*(1,) * 30, 1024, 600),
        kv_lens=(*(100 + 171 * i for i in range(30)), 3000, 600),
    ),
    real("prefill-fp8", "a prompt over a cache of e4m3", q_lens=(1500,), kv_lens=(4000,), fp8=True),
    real(
        "gpt-oss",
        "window and sinks, 64 heads of 64",
        q_lens=(*(1,) * 8, 1500),
        kv_lens=(*(900 + 333 * i for i in range(8)), 2500),
        heads=(64, 8),
        dim=64,
        window=(127, None),
        sinks=True,
    ),
    real(
        "gemma-2",
        "softcap and window, heads of 256",
        q_lens=(*(1,) * 8, 1200),
        kv_lens=(*(700 + 501 * i for i in range(8)), 5000),
        heads=(16, 8),
        dim=256,
        window=(4095, None),
        softcap=50.0,
        q_gain=4.0,
    ),
    real("qwen-2", "groups of seven", q_lens=(1, 1, 900), kv_lens=(3000, 40, 1000), heads=(28, 4)),
    real("dim-512", "the widest heads", q_lens=(1, 1, 300), kv_lens=(3000, 40, 1000), heads=(8, 1), dim=512),
    real(
        "encoder",
        "packed and bidirectional",
        q_lens=(512, 77, 1, 1500),
        kv_lens=(512, 77, 1, 1500),
        heads=(16, 16),
        dim=64,
        page=None,
        causality=FULL,
    ),
    real(
        "mla-prefill",
        "192 against 128, packed",
        q_lens=(1024, 300),
        kv_lens=(1024, 300),
        heads=(16, 16),
        dim=192,
        dim_v=128,
        page=None,
        around=Surroundings(layout=Layout.SEPARATE),
    ),
    real("alibi", "slopes at long distances", q_lens=(1, 1, 700), kv_lens=(9000, 77, 700), heads=(32, 32), alibi=True),
    mla(128, id="real-mla-128", tier="gpu", q_lens=(1,) * 32, kv_lens=(4096,) * 32, page=64, why="DeepSeek V3 decode"),
    mla(
        16,
        id="real-mla-16",
        tier="gpu",
        q_lens=(1,) * 64,
        kv_lens=tuple(50 + 201 * i for i in range(64)),
        page=64,
        split_q=True,
        why="V3 sharded over eight GPUs, unequal lengths",
    ),
    mla(
        128,
        id="real-mla-speculative",
        tier="gpu",
        q_lens=(2, 3, 1, 4) * 4,
        kv_lens=tuple(900 + 777 * i for i in range(16)),
        page=64,
        why="drafts with 128 heads: several row tiles a request",
    ),
    mla(
        128,
        id="real-mla-fp8",
        tier="gpu",
        q_lens=(1,) * 16,
        kv_lens=tuple(100 + 1001 * i for i in range(16)),
        page=64,
        fp8=True,
        why="a latent cache in e4m3",
    ),
]
GPU += [
    real(
        f"dim-{dim}-{str(dtype).removeprefix('torch.')}",
        "every head size in real tiles",
        q_lens=(1, 3, 300, 129),
        kv_lens=(777, 65, 1000, 129),
        heads=(8, 2),
        dim=dim,
        dtype=dtype,
    )
    for dim in (64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 200, 248, 256)
    for dtype in (BF16, FP16)
]

CASES: tuple[Case, ...] = (
    *HEADS,
    *DTYPES,
    *HEAD_DIMS,
    *PAGES,
    *LENGTHS,
    *MASKS,
    *SCORES,
    *COMBINATIONS,
    *PACKED,
    *LATENT,
    *SURROUNDINGS,
    *WINDOWS,
    *SPLITS,
    *GPU,
)


def by_id(name: str) -> Case:
    """The case of that id."""
    return next(case for case in CASES if case.id == name)
