# SPDX-License-Identifier: Apache-2.0
"""Cases of batches: lengths of requests, and what lies in memory around them."""

from dsl_backend.testing.cases.case import DECODE, EDGES, FULL, Case
from dsl_backend.testing.inputs import Layout, Surroundings

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
