# SPDX-License-Identifier: Apache-2.0
"""Cases of key ranges that several programs process."""

from typing import Any

from dsl_backend.testing.cases.case import DECODE, FULL, MLA, Case


def split(name: str, programs: int, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **facts: Any) -> Case:
    return Case(f"splits-{name}", q_lens, kv_lens, programs=programs, tile=(16, 16), **facts)


# Tiles of 16 keys on a GPU too, so that these short ranges have many splits there as well.
SPLITS = [
    split("many", 16, (1, 2, 1), (200, 100, 5), why="one long range over many programs, merged by whoever comes last"),
    split("one-tile", 64, (1, 1), (160, 40), heads=(2, 1), why="more programs than tiles"),
    split(
        "more-than-merged-at-once",
        42,
        (1,),
        (330,),
        heads=(2, 1),
        why="more parts of a range than the merge looks at in one go",
    ),
    split(
        "large-scores",
        64,
        (1, 2),
        (330, 90),
        heads=(2, 1),
        scale=16.0,
        why="largest scores of parts lie hundreds apart: rescaling by the wrong one overflows",
    ),
    split(
        "uneven",
        7,
        (1, 3, 1, 0, 1),
        (90, 64, 1, 0, 75),
        why="splits end anywhere; a program ends one range and begins another",
    ),
    split("one-program", 1, (1, 3, 1), (40, 64, 1), why="no range is split"),
    split(
        "masked",
        16,
        (8, 1),
        (100, 60),
        heads=(2, 1),
        window=(20, None),
        why="parts in which some rows see nothing at all",
    ),
    split("sinks-fp8", 8, (1, 2), (150, 70), sinks=True, fp8=True, why="sink and scales apply once, not once a part"),
    split("no-keys", 8, (1, 2), (0, 70), causality=FULL, why="an empty range among split ones"),
    split("nan", 8, DECODE, (40, 70, 64, 33), nan_request=1, why="a NaN crosses the merge of its own request only"),
    split("80", 8, (1, 2), (100, 70), dim=80, why="partial results in two blocks"),
    split("mla", 8, (1, 2), (100, 40), heads=(16, 1), **MLA, why="wide partial results"),
    split(
        "mla-20",
        9,
        (1, 3),
        (70, 40),
        heads=(20, 1),
        **MLA,
        tier="full",
        why="row tiles of one request end in different programs",
    ),
]
