# SPDX-License-Identifier: Apache-2.0
"""Rows in which a peer was faster than this package on an H200 or an H100 in November 2026.

The first held-out lists were not kept. Where only a range was noted, the lengths are drawn from the seed.
"""

from collections.abc import Iterator
from typing import Any

from ..attention.problems import dense, latent
from ..linear.problems import Problem as LinearProblem
from ..sampling.problems import Problem as SamplingProblem
from ..softmax.problems import Problem as SoftmaxProblem
from .draw import Draw

SEED = 28
K = 1024


def mla(page: int) -> Iterator[tuple[str, Any]]:
    for heads in (32, 64):
        yield f"h{heads}-b20-q3-k6k", latent(heads, [3] * 20, [6 * K] * 20, page_size=page)
    lengths = Draw(SEED, "lost mla", 0).lengths(64, 48, 20 * K)
    yield "h64-b64-k48to20k", latent(64, [1] * 64, lengths, page_size=page)
    for heads, batch, keys in ((64, 200, 1200), (128, 1, 1500), (128, 5, 30 * K)):
        yield f"h{heads}-b{batch}-k{keys}", latent(heads, [1] * batch, [keys] * batch, page_size=page)


def prefill(page: int) -> Iterator[tuple[str, Any]]:
    draw = Draw(SEED, "lost prefill", 0)
    decodes = [4 * K] * 100
    mixed = dense(128, 28, 4, [1] * 100 + [1948], [*decodes, 1948], page_size=page)
    yield "hd128-h28x4-100x1+1948", mixed
    lengths = draw.lengths(16, 16, 8 * K)
    yield "hd96-h32x32-b16-ragged", dense(96, 32, 32, lengths, lengths, page_size=page)
    new, before, decodes = draw.lengths(2, 256, 2 * K), draw.lengths(2, 8 * K, 30 * K), draw.lengths(60, 128, 8 * K)
    q_lens, kv_lens = [1] * 60 + new, [*decodes, new[0] + before[0], new[1] + before[1]]
    yield "hd64-h12x2-60x1+2-behind-30k", dense(64, 12, 2, q_lens, kv_lens, page_size=page)
    yield "hd128-h12x2-730-behind-30k", dense(128, 12, 2, [730], [30 * K + 730], page_size=page)
    yield "hd128-h32x8-1168-behind-5k", dense(128, 32, 8, [1168], [5 * K + 1168], page_size=page)


def linear() -> Iterator[tuple[str, Any]]:
    shapes = ((320, 3584, 8192), (320, 32768, 5120), (320, 18944, 3584), (2000, 3584, 8192), (2000, 14336, 4096))
    for m, n, k in shapes:
        yield f"{m}x{n}x{k}", LinearProblem(m=m, n=n, k=k)


def softmax() -> Iterator[tuple[str, Any]]:
    for rows, width in ((64, 201088), (1000, 12344)):
        yield f"{rows}x{width}", SoftmaxProblem(rows=rows, width=width)


def sampling() -> Iterator[tuple[str, Any]]:
    for filters, batches in {"none": (128, 512), "p": (32, 128, 512)}.items():
        for rows in batches:
            yield f"{filters}-{rows}x201088", SamplingProblem(rows=rows, vocab=201088, filters=filters)


def problems(operator: str, page_size: int) -> Iterator[tuple[str, Any]]:
    """(name, problem) of an operator's rows; none if it has none."""
    if operator in ("mla-decode", "prefill"):
        yield from (mla if operator == "mla-decode" else prefill)(page_size)
    elif operator in ("linear", "softmax", "sampling"):
        yield from {"linear": linear, "softmax": softmax, "sampling": sampling}[operator]()
