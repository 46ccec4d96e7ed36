# SPDX-License-Identifier: Apache-2.0
"""Cases of absorbed MLA."""

from dsl_backend.testing.cases.case import DECODE, E5M2, FP16, mla
from dsl_backend.testing.cases.scores import STALE
from dsl_backend.testing.inputs import Layout, Surroundings

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
        (288, 256),
        id="mla-fp8-queries",
        q_lens=(1, 2),
        kv_lens=(70, 20),
        fp8=True,
        fp8_q=True,
        split_q=True,
        why="quantised queries of two parts",
    ),
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
