# SPDX-License-Identifier: Apache-2.0
"""Cases of NVFP4 caches."""

from dsl_backend.testing.cases.case import FP16, FULL, Case
from dsl_backend.testing.inputs import Layout, Surroundings

HEADS_FIRST = Surroundings(layout=Layout.HEADS_FIRST)

NVFP4 = [
    Case("nvfp4", (1, 6, 20), (50, 37, 20), nvfp4=True, around=HEADS_FIRST, why="elements, and scales of blocks"),
    Case("nvfp4-tokens-first", (1, 6, 20), (50, 37, 20), nvfp4=True, dtype=FP16, why="heads inside of a page's tokens"),
    Case(
        "nvfp4-128",
        (1, 40),
        (300, 130),
        heads=(8, 2),
        dim=128,
        page=64,
        nvfp4=True,
        scales_by_head=True,
        softcap=5.0,
        around=HEADS_FIRST,
        why="scales of each key head and of each block go into every score change",
    ),
    Case(
        "nvfp4-192-128",
        (1, 20),
        (150, 90),
        heads=(3, 1),
        dim=192,
        dim_v=128,
        page=48,
        nvfp4=True,
        window=(40, None),
        sinks=True,
        around=Surroundings(layout=Layout.SEPARATE, stale=True),
        why="keys and values of two sizes; NaN scales below the window",
    ),
    Case("nvfp4-96", (1, 20), (200, 90), dim=96, page=32, nvfp4=True, around=HEADS_FIRST, why="copies of 16 bytes"),
    Case(
        "nvfp4-256",
        (2, 40),
        (150, 100),
        dim=256,
        dtype=FP16,
        nvfp4=True,
        causality=FULL,
        around=Surroundings(layout=Layout.PADDED),
        why="room between pages",
    ),
    Case(
        "nvfp4-queries",
        (1, 6, 20),
        (90, 37, 20),
        nvfp4=True,
        fp8_q=True,
        scales_by_head=True,
        around=Surroundings(layout=Layout.HEADS_FIRST, fused_q=True),
        why="quantised queries over a cache of 4 bits",
    ),
]
