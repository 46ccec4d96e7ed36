# SPDX-License-Identifier: Apache-2.0
"""Cases of layers: heads, dtypes, head sizes, pages and packed keys."""

from dsl_backend.testing.cases.case import BF16, E5M2, FP16, FULL, Case
from dsl_backend.testing.inputs import Layout, Surroundings

HEADS = [
    Case("mha", (1, 5, 18), (33, 20, 18), heads=(3, 3), why="a key head for each query head"),
    Case("gqa-4", (1, 5, 18), (33, 20, 18), heads=(8, 2), why="Llama 3 8B's group"),
    Case("gqa-8", (1, 3, 17), (33, 20, 17), heads=(16, 2), why="two queries fill a tile of 16 rows"),
    Case("gqa-7", (1, 3, 17), (33, 20, 17), heads=(14, 2), why="Qwen 2's group: no power of two"),
    Case("gqa-5", (1, 4, 17), (33, 20, 17), heads=(5, 1), why="a query straddles two row tiles"),
    Case("mqa", (1, 2, 17), (33, 20, 17), heads=(8, 1), why="one key head for all"),
    Case(
        "mqa-20", (1, 2), (33, 20), heads=(20, 1), tier="full", why="more heads share a key head than a tile has rows"
    ),
    Case("one-head", (1, 16), (1, 16), heads=(1, 1), why="smallest legal head counts"),
]

DTYPES = [
    Case("fp16", (1, 6, 20), (50, 37, 20), dtype=FP16, why="float16 throughout"),
    Case("fp8-bf16", (1, 6, 20), (50, 37, 20), fp8=True, why="e4m3 with different scales of keys and values"),
    Case(
        "e5m2-bf16",
        (1, 2, 20),
        (33, 20, 64),
        fp8=True,
        fp8_dtype=E5M2,
        scales_by_head=True,
        why="e5m2 keys and values, scales of each key head, bfloat16 queries",
    ),
    Case(
        "e5m2-fp16",
        (1, 2, 20),
        (33, 20, 64),
        fp8=True,
        fp8_dtype=E5M2,
        dtype=FP16,
        why="e5m2 keys and values, float16 queries",
    ),
    Case(
        "by-head-fp8",
        (1, 2, 20),
        (33, 20, 64),
        heads=(6, 3),
        fp8=True,
        scales_by_head=True,
        softcap=5.0,
        alibi=True,
        why="scales of each key head go into every score change",
    ),
    Case("fp8-fp16", (1, 6, 20), (50, 37, 20), fp8=True, dtype=FP16, why="e4m3 keys and values, float16 queries"),
    Case(
        "by-request-fp8",
        (1, 2, 20),
        (33, 20, 64),
        fp8=True,
        scales_by_head=True,
        scales_by_request=True,
        sinks=True,
        why="scales of each request and key head, whose strides are not those of a tensor of their own",
    ),
    Case(
        "fp8-queries",
        (1, 2, 20),
        (150, 20, 64),
        heads=(6, 3),
        fp8=True,
        fp8_q=True,
        scales_by_head=True,
        window=(40, None),
        nan_request=1,
        around=Surroundings(fused_q=True),
        why="quantised queries with scales of each key head",
    ),
    Case(
        "fp8-queries-by-request",
        (1, 2, 20),
        (150, 20, 64),
        dtype=FP16,
        fp8=True,
        fp8_dtype=E5M2,
        fp8_q=True,
        scales_by_request=True,
        softcap=5.0,
        why="quantised queries with scales of each request, whose scores are capped",
    ),
    Case(
        "by-request-splits",
        (0, 2, 1, 0, 1),
        (0, 700, 40, 0, 900),
        heads=(4, 1),
        fp8=True,
        scales_by_request=True,
        programs=5,
        why="the combine kernel finds the request of a row; requests without queries; one key head",
    ),
    Case(
        "by-request-invariant",
        (1, 2, 20),
        (20, 1500, 64),
        fp8=True,
        fp8_dtype=E5M2,
        scales_by_request=True,
        batch_invariant=True,
        why="fixed splits are combined with the request's scale",
    ),
    Case(
        "fp8-out",
        (1, 2, 20),
        (150, 20, 64),
        heads=(6, 3),
        fp8_out=True,
        window=(40, None),
        nan_request=1,
        why="outputs in e4m3, of which some saturate; a NaN stays its request's",
    ),
    Case(
        "fp8-out-splits",
        (0, 2, 1, 0, 1),
        (0, 700, 40, 0, 900),
        heads=(4, 1),
        dim=80,
        dtype=FP16,
        fp8=True,
        fp8_out=True,
        programs=5,
        why="the combine kernel rounds to e4m3; values have a scale too; rows of 80 bytes",
    ),
    Case(
        "fp8-out-invariant",
        (1, 2, 20),
        (20, 1500, 64),
        fp8_out=True,
        batch_invariant=True,
        sinks=True,
        why="fixed splits are combined to e4m3, by lanes of single columns",
    ),
]

NVFP4_OUTPUTS = [
    Case(
        "nvfp4-out",
        (1, 2, 127),
        (60, 20, 129),
        heads=(2, 1),
        nvfp4_out=True,
        window=(40, None),
        nan_request=1,
        why="outputs in NVFP4, scales of two tiles of 128 rows, some saturated; a NaN stays its block's",
    ),
    Case(
        "nvfp4-out-splits",
        (0, 2, 1, 0, 1),
        (0, 700, 40, 0, 900),
        heads=(4, 1),
        dim=80,
        dtype=FP16,
        fp8=True,
        nvfp4_out=True,
        programs=5,
        why="the combine kernel finds the scales of blocks; rows of 40 bytes; values have a scale too",
    ),
    Case(
        "nvfp4-out-splits-128",
        (0, 2, 1, 0, 1),
        (0, 700, 40, 0, 900),
        heads=(4, 1),
        dim=128,
        nvfp4_out=True,
        programs=5,
        sinks=True,
        tier="full",
        why="the same with four columns a lane; a row of zeros",
    ),
    Case(
        "nvfp4-out-invariant",
        (1, 2, 20),
        (20, 1500, 64),
        nvfp4_out=True,
        batch_invariant=True,
        tier="full",
        why="fixed splits are combined to NVFP4, by lanes of single columns",
    ),
]

HEAD_DIMS = [
    Case(
        f"dim-{dim}",
        (1, 18),
        (35, 21),
        heads=(2, 1),
        dim=dim,
        dtype=FP16 if dim % 32 else BF16,
        around=Surroundings(layout=Layout.SEPARATE),
        tier="smoke" if dim in (64, 72, 80, 96, 128, 256) else "full",
        why="head sizes that models have: columns past a power of two must count for nothing",
    )
    for dim in (64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 200, 248, 256, 512)
]

PAGES = [
    Case(f"page-{page}", (1, 4, 19), lens, page=page, why=why)
    for page, lens, why in (
        (32, (65, 31, 32), "a tile of keys within a page, lengths at its edges"),
        (48, (97, 48, 49), "pages that tiles of keys do not divide"),
        (528, (530, 40, 19), "hybrid models' pages: longer than most requests, and not a power of two"),
    )
]
PAGES += [
    Case(f"page-{page}-tile-{tile[0]}-{tile[1]}", (1, 4, 35), lens, page=page, tile=tile, why=why)
    for page, tile, lens, why in (
        (16, (16, 64), (65, 31, 64), "a tile of keys gathers several pages"),
        (48, (32, 32), (97, 48, 49), "every other tile of keys straddles two pages"),
        (528, (16, 64), (530, 40, 35), "a tile of keys straddles two pages that are no powers of two"),
        (32, (32, 32), (65, 33, 35), "a tile of keys is a page; rows of several queries in a tile"),
    )
]

PACKED = [
    Case(
        "encoder",
        (20, 1, 33, 17),
        (20, 1, 33, 17),
        page=None,
        causality=FULL,
        why="encoder-only models: packed keys, neighbours' keys are adjacent in memory and must not be seen",
    ),
    Case("packed-causal", (20, 1, 33), (20, 1, 40), page=None, why="packed keys with a diagonal, as in MLA's prefill"),
    Case(
        "packed-192-128",
        (18, 1, 5),
        (30, 7, 5),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        around=Surroundings(layout=Layout.SEPARATE),
        why="MLA's prefill: queries and keys longer than values, its chunks merged by lse",
    ),
    Case(
        "packed-192-128-context",
        (18, 2),
        (37, 9),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        causality=FULL,
        tier="full",
        why="MLA's prefill over a chunk of cached context: not causal",
    ),
    Case(
        "packed-window", (40, 25), (40, 25), page=None, causality=FULL, window=(6, 6), why="local layers of an encoder"
    ),
    Case("packed-empty", (0, 5, 0), (0, 5, 0), page=None, causality=FULL, why="padding requests between packed ones"),
]
