# SPDX-License-Identifier: Apache-2.0
"""Cases of masks, of changes to scores, and of features in combination."""

from typing import Any

from dsl_backend.testing.cases.case import BF16, FP16, FULL, Case
from dsl_backend.testing.inputs import Surroundings

MASKS = [
    Case(
        "window-1", (1, 18), (40, 35), window=(0, None), why="each position sees itself alone: the output is its value"
    ),
    Case("window-2", (1, 18), (40, 35), window=(1, None), why="one key before"),
    Case(
        "window-16",
        (1, 2, 40, 20, 18),
        (33, 32, 40, 70, 18),
        window=(15, None),
        why="a window as wide as a tile: both of its edges within one",
    ),
    Case(
        "window-100",
        (1, 1, 3, 20),
        (101, 160, 120, 130),
        heads=(2, 1),
        window=(99, None),
        why="tiles left of the window are skipped, the ones inside are not masked",
    ),
    Case("window-wide", (1, 20), (30, 25), window=(4096, None), why="a window longer than the request"),
    Case(
        "window-widest",
        (1, 20, 5),
        (30, 25, 2),
        window=(2**31 - 1, 2**31 - 1),
        causality=FULL,
        tier="full",
        why="positions plus or minus the widest window must not wrap around",
    ),
    Case(
        "window-both-sides",
        (40, 21, 1, 3),
        (40, 21, 1, 3),
        window=(7, 7),
        causality=FULL,
        why="an encoder's local attention (ModernBERT): symmetrical, not causal",
    ),
    Case("window-right", (20, 3), (45, 30), window=(None, 4), causality=FULL, why="bounded on the right only"),
    Case(
        "window-causal-right",
        (20, 3),
        (45, 30),
        window=(5, 4),
        why="causal wins over a window that reaches to the right",
    ),
    Case(
        "window-before-keys",
        (20, 5),
        (7, 2),
        window=(3, 3),
        causality=FULL,
        why="rows whose whole window lies before the first key see nothing",
    ),
    Case("full", (1, 20, 5), (33, 20, 40), causality=FULL, why="not causal, over a paged context"),
    Case(
        "cross", (20, 3, 1), (9, 1, 35), causality=FULL, why="cross attention: more queries than keys, and all see all"
    ),
    Case(
        "per-request",
        (20, 19, 3, 4, 1),
        (33, 19, 20, 9, 18),
        causal=(True, False, False, True, False),
        why="images are bidirectional in a batch of causal text",
    ),
    Case(
        "per-request-window",
        (20, 19, 3, 4),
        (33, 19, 20, 9),
        causal=(True, False, False, True),
        window=(6, 3),
        why="the right edge of the window differs from request to request",
    ),
]

SCORES = [
    Case(
        "softcap", (1, 20, 3), (33, 20, 18), softcap=5.0, q_gain=4.0, why="Gemma 2's softcap, at scores that it changes"
    ),
    Case(
        "softcap-30-small",
        (1, 20),
        (33, 20),
        softcap=30.0,
        dtype=FP16,
        why="at small scores tanh is nearly straight: cancellation would show in the lse",
    ),
    Case(
        "softcap-saturated", (1, 20), (33, 20), softcap=2.0, q_gain=64.0, why="e^x overflows before the cap is applied"
    ),
    Case("sinks", (1, 20, 4), (40, 20, 9), sinks=True, why="gpt-oss' sink logits"),
    Case(
        "sinks-bf16",
        (1, 17),
        (20, 17),
        sinks=True,
        around=Surroundings(sinks_dtype=BF16),
        why="checkpoints store sinks in 16 bits",
    ),
    Case(
        "sinks-no-keys",
        (1, 17),
        (0, 0),
        causality=FULL,
        sinks=True,
        why="the sink alone is the denominator: output 0, lse the sink",
    ),
    Case("alibi", (1, 20, 4), (40, 20, 33), alibi=True, why="BLOOM's and MPT's slopes"),
    Case(
        "alibi-full",
        (20, 4),
        (20, 33),
        alibi=True,
        causality=FULL,
        heads=(6, 3),
        why="keys after the position are distant too; heads no power of two",
    ),
    Case(
        "large-scores",
        (1, 20),
        (40, 30),
        scale=2.0,
        why="scores of hundreds: the running maximum must carry the softmax",
    ),
    Case(
        "negative-scale",
        (1, 18),
        (33, 20),
        scale=-0.125,
        tier="full",
        why="the sign of the scale belongs to the scores",
    ),
    Case("zero-scale", (1, 18), (33, 20), scale=0.0, tier="full", why="a plain mean of the values"),
]

COMBINATIONS = [
    Case("window-sinks", (1, 20, 3), (60, 40, 33), heads=(8, 1), window=(15, None), sinks=True, why="gpt-oss' layers"),
    Case(
        "window-softcap",
        (1, 20, 3),
        (60, 40, 33),
        window=(20, None),
        softcap=5.0,
        q_gain=3.0,
        why="Gemma 2's layers: masked after bending",
    ),
    Case(
        "alibi-fp8",
        (1, 20, 3),
        (60, 40, 33),
        alibi=True,
        fp8=True,
        why="slopes are added to scores that include the key scale",
    ),
    Case("sinks-fp8", (1, 20), (60, 40), sinks=True, fp8=True, why="the value scale applies after the sink joined"),
    Case(
        "softcap-fp8", (1, 20), (40, 33), softcap=5.0, q_gain=3.0, fp8=True, why="the key scale applies before the cap"
    ),
    Case(
        "everything",
        (1, 20, 3, 0),
        (60, 40, 33, 0),
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

STALE = Surroundings(stale=True)


def stale(name: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **facts: Any) -> Case:
    return Case(f"stale-{name}", q_lens, kv_lens, around=STALE, **facts)


# A probability of 0 times NaN is NaN: values that no row sees must not be multiplied. Lengths leave stale keys in a
# tile beside visible ones, in pages of their own, and in tiles of their own, of each width of a tile.
WINDOWS = [
    stale(
        "decode",
        (1, 1, 1, 1, 1, 2),
        (33, 70, 131, 200, 290, 300),
        heads=(8, 1),
        window=(20, None),
        why="decode: a NaN in front of the window, in pages that another request may have by now",
    ),
    stale("decode-fp8", (1, 1, 3), (70, 131, 300), heads=(4, 2), window=(20, None), fp8=True, why="the same in e4m3"),
    stale(
        "prefill",
        (20, 150, 70, 1),
        (133, 300, 75, 200),
        heads=(2, 1),
        window=(30, None),
        page=32,
        why="the first row tile of a chunk over a longer context",
    ),
    stale(
        "prefill-fp8",
        (20, 70),
        (133, 175),
        heads=(2, 1),
        window=(30, 5),
        causality=FULL,
        dtype=FP16,
        fp8=True,
        why="the same in e4m3, with a window to both sides",
    ),
    stale(
        "packed",
        (20, 140),
        (133, 300),
        heads=(2, 2),
        dim=128,
        page=None,
        window=(40, None),
        why="packed keys, whose tiles begin anywhere",
    ),
    stale(
        "sinks",
        (1, 2, 30),
        (131, 160, 170),
        heads=(8, 1),
        window=(15, None),
        sinks=True,
        softcap=5.0,
        alibi=True,
        why="modified scores are NaN too until they are masked",
    ),
    stale(
        "splits",
        (1, 2),
        (500, 430),
        heads=(2, 1),
        window=(300, None),
        programs=8,
        tile=(16, 16),
        why="the window begins in one part of several",
    ),
]
