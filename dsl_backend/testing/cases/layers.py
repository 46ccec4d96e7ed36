# SPDX-License-Identifier: Apache-2.0
"""Cases of layers: heads, dtypes, head sizes, pages and packed keys."""

from dsl_backend.testing.cases.case import BF16, E5M2, FP16, FULL, Case
from dsl_backend.testing.inputs import Layout, Surroundings

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
