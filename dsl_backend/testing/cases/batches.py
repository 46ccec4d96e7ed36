# SPDX-License-Identifier: Apache-2.0
"""Cases of batches: lengths of requests, and what lies in memory around them."""

from dsl_backend.testing.cases.case import DECODE, EDGES, FULL, Case
from dsl_backend.testing.inputs import Layout, Surroundings

LENGTHS = [
    Case("decode-1", (1,), (1,), why="smallest legal problem: the output is the value"),
    Case(
        "decode-edges",
        (1,) * len(EDGES),
        EDGES,
        heads=(2, 1),
        why="decode with every length where a tile of keys begins or ends",
    ),
    Case(
        "prefill-edges",
        (1, 15, 16, 17, 31, 32, 33),
        (1, 15, 16, 17, 31, 32, 33),
        heads=(2, 1),
        why="fresh prefill at the edges of tiles of rows and keys",
    ),
    *(
        Case(
            f"prefill-edges-{n}",
            edges,
            edges,
            heads=(1, 1),
            tier="full",
            why="fresh prefill at the edges of larger tiles",
        )
        for n in (64, 128)
        for edges in [(n - 1, n, n + 1)]
    ),
    Case(
        "extend-edges",
        (17, 33, 18, 20, 17),
        (18, 65, 31, 128, 129),
        heads=(2, 1),
        why="the diagonal starts anywhere in a tile of keys",
    ),
    Case(
        "mixed",
        (1, 19, 30, 1, 2),
        (70, 55, 30, 1, 40),
        why="decode, extend and fresh prefill in one batch: two kernels share it and neither touches the other's rows",
    ),
    Case(
        "speculative",
        (2, 3, 4, 5, 6, 7, 8),
        (40, 3, 17, 64, 70, 8, 33),
        why="draft tokens: short queries with a diagonal of their own",
    ),
    Case(
        "at-the-limit",
        (16, 17, 15, 1),
        (30, 31, 15, 9),
        heads=(2, 1),
        why="queries as long as the decode kernel takes, and one more",
    ),
    Case("no-requests", (), (), why="a step without requests leaves every row alone"),
    Case("no-rows", (), (), around=Surroundings(padding_tokens=0, spare_rows=0), why="a step without a single row"),
    Case(
        "padding-requests",
        (1, 0, 1, 0, 0, 0),
        (20, 0, 7, 0, 0, 0),
        why="a CUDA graph's batch is filled up with empty requests, more than the kernel scans at a time",
    ),
    Case("padding-first", (0, 0, 0, 0, 0, 18, 0, 1), (0, 0, 0, 0, 0, 18, 0, 3), why="empty requests in front"),
    Case("idle-request", (1, 0, 17), (20, 33, 17), why="a request with keys and no query this step"),
    Case(
        "many-requests",
        (1,) * 37,
        tuple(1 + 7 * i % 40 for i in range(37)),
        heads=(2, 1),
        why="requests in several chunks of the scan over lengths",
    ),
    Case("no-keys", (1, 18, 2, 3), (0, 0, 30, 0), causality=FULL, why="rows that see no key are 0, their lse -inf"),
    Case(
        "more-queries-than-keys", (5, 20), (3, 7), why="a causal request whose first queries stand before its first key"
    ),
    Case(
        "loose-bounds",
        (1, 2),
        (20, 33),
        around=Surroundings(max_query_len=60, max_seq_len=400, padding_tokens=40),
        why="a captured graph promises bounds far above the lengths",
    ),
]

SURROUNDINGS = [
    Case(
        f"layout-{layout.value}",
        (1, 18, 3),
        (50, 33, 18),
        around=Surroundings(layout=layout, fused_q=True),
        why="strides come at run time, of the cache and of q",
    )
    for layout in (Layout.HEADS_FIRST, Layout.SEPARATE, Layout.PADDED)
]
SURROUNDINGS += [
    Case(
        f"nan-{name}",
        q_lens,
        kv_lens,
        nan_request=1,
        why="one request's NaN stays its own, even where requests share a program",
    )
    for name, q_lens, kv_lens in (("decode", DECODE, (20, 33, 40, 17)), ("prefill", (18, 17, 20), (18, 33, 20)))
]
