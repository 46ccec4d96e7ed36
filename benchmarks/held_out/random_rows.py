# SPDX-License-Identifier: Apache-2.0
"""The random list: shapes that were drawn from a seed before anything was tuned for them.

A row's id is its place in the list and its shape. The list must not change: results of different commits are compared
by it. A new list gets another seed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from dsl_backend.norm.spec import Scaling

from ..attention.problems import Problem, dense, latent
from ..attention.rows import heads as heads_name
from ..linear.problems import Problem as LinearProblem
from ..norm.problems import Problem as NormProblem
from ..scaled_linear.problems import Problem as ScaledProblem
from ..softmax.problems import Problem as SoftmaxProblem
from .draw import Draw

SEED = 28
COUNTS = {"mla-decode": 60, "prefill": 60, "linear": 100, "scaled-linear": 60, "softmax": 30, "norm": 40}

K = 1024
# Keys of all requests of a batch: 1.2 GB of latent rows, and at most 4.3 GB of dense keys and values.
MOST_LATENT_KEYS, MOST_DENSE_KEYS = 1 << 20, 1 << 19
MLA_HEADS = (16, 32, 64, 128)
HEAD_DIMS = (64, 96, 128, 256)
# (query heads, key heads): of a tensor-parallel rank with few heads, and of whole models.
FEW_HEADS = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (2, 2), (4, 2), (6, 2), (8, 2), (8, 8))
MODEL_HEADS = ((12, 2), (16, 2), (16, 16), (28, 4), (32, 8), (40, 8))
# (columns of the output, columns of x) of gated layers: of published models, whole and of tensor-parallel ranks.
GATED = (
    (3584, 8192),
    (7168, 8192),
    (14336, 8192),
    (7168, 4096),
    (14336, 4096),
    (12288, 4096),
    (9472, 3584),
    (18944, 3584),
    (8960, 1536),
    (9728, 2560),
    (6912, 5120),
    (12800, 5120),
    (16384, 5120),
    (32768, 5120),
    (10752, 5376),
    (21504, 5376),
    (2048, 7168),
    (9216, 7168),
)
# Hidden sizes of published models, from 0.5 to 405 billion weights.
HIDDEN_SIZES = (896, 1536, 2048, 2560, 2880, 3584, 4096, 5120, 5376, 7168, 8192, 16384)
HEAD_SIZES = (64, 96, 128, 192, 256, 512)
VOCABULARIES = (32000, 50257, 102400, 128256, 151936, 201088)


def span(values: list[int]) -> str:
    """One length, or the shortest and the longest."""
    return str(values[0]) if min(values) == max(values) else f"{min(values)}to{max(values)}"


def limited(lengths: list[int], most: int) -> list[int]:
    """The first lengths whose sum is at most `most`; at least one."""
    kept, total = lengths[:1], lengths[0]
    for length in lengths[1:]:
        total += length
        if total > most:
            break
        kept.append(length)
    return kept


def mla_batch(draw: Draw, kind: int) -> tuple[list[int], list[int]]:
    """(queries, keys) of each request."""
    if kind in (0, 1):  # speculative decoding
        batch, queries, keys = draw.log_between(4, 128), draw.between(2, 8), draw.log_between(K // 2, 32 * K)
    elif kind == 2:  # few long requests
        batch, queries, keys = draw.between(1, 8), draw.between(1, 4), draw.log_between(8 * K, 128 * K)
    elif kind == 3:  # few short requests
        batch, queries, keys = draw.between(1, 8), draw.between(1, 8), draw.log_between(64, 2 * K)
    elif kind == 4:  # many short requests
        batch, queries, keys = draw.log_between(64, 256), draw.between(1, 2), draw.log_between(128, 2 * K)
    else:  # requests of different lengths, and with different numbers of accepted drafts
        batch, queries = draw.log_between(8, 128), draw.between(1, 8)
        kv_lens = limited(draw.lengths(batch, 32, 32 * K), MOST_LATENT_KEYS)
        return [draw.between(1, queries) for _ in kv_lens], kv_lens
    kv_lens = limited([keys] * batch, MOST_LATENT_KEYS)
    return [queries] * len(kv_lens), kv_lens


def mla(draw: Draw, index: int, page: int) -> tuple[str, Problem]:
    q_lens, kv_lens = mla_batch(draw, index % 6)
    heads = draw.one_of(MLA_HEADS)
    name = f"h{heads}-b{len(q_lens)}-q{span(q_lens)}-k{span(kv_lens)}"
    return name, latent(heads, q_lens, kv_lens, page_size=page)


def prefill_batch(draw: Draw, kind: int) -> tuple[list[int], list[int]]:
    """(new tokens, keys before them) of each request."""
    if kind == 0:  # prompts of one length
        new = draw.log_between(128, 16 * K)
        prompts = [new] * draw.between(1, max(1, 16 * K // new))
        return prompts, [0] * len(prompts)
    if kind == 1:  # prompts of different lengths
        prompts = limited(draw.lengths(draw.between(2, 24), 32, 8 * K), 16 * K)
        return prompts, [0] * len(prompts)
    prompts = draw.lengths(draw.between(1, 4), 64, 4 * K)
    contexts = [draw.log_between(256, 32 * K) for _ in prompts]
    if kind == 2:  # chunks of prompts behind what is in the cache
        return prompts, contexts
    decodes = limited(draw.lengths(draw.log_between(4, 128), 128, 16 * K), MOST_DENSE_KEYS // 2)
    return [1] * len(decodes) + prompts, [keys - 1 for keys in decodes] + contexts


def prefill(draw: Draw, index: int, page: int) -> tuple[str, Problem]:
    kind, head_dim = index % 4, HEAD_DIMS[index // 4 % 4]
    heads = draw.one_of(FEW_HEADS if draw.between(1, 3) <= 2 else MODEL_HEADS)
    q_lens, contexts = prefill_batch(draw, kind)
    kv_lens = [new + before for new, before in zip(q_lens, contexts, strict=True)]
    decodes = sum(new == 1 for new in q_lens)
    shown = f"{decodes}x1+" * (decodes > 0) + f"{len(q_lens) - decodes}x{span([new for new in q_lens if new > 1])}"
    name = f"{heads_name(head_dim, *heads)}-{shown}" + f"-k{span(kv_lens)}" * any(contexts)
    return name, dense(head_dim, *heads, q_lens, kv_lens, page_size=page)


def gated(draw: Draw, index: int, page: int) -> tuple[str, LinearProblem]:
    # Half of the rows have 65 to 512 tokens, a fifth about 2000.
    kind = index % 10
    m = draw.log_between(65, 512) if kind < 5 else draw.between(1600, 2400) if kind < 7 else draw.log_between(1, 8 * K)
    n, k = draw.one_of(GATED)
    if index % 4 == 3:  # sizes that fit no tile
        n, k = 8 * draw.log_between(128, 2048), 8 * draw.log_between(128, K)
    return f"{m}x{n}x{k}", LinearProblem(m=m, n=n, k=k)


def scaled(draw: Draw, index: int, page: int) -> tuple[str, ScaledProblem]:
    """Gated layers and down projections in turn, with scales of channels, then of blocks."""
    kind, is_gated = index % 10, index % 2 == 0
    scheme = ("channels", "blocks")[index // 2 % 2]
    m = draw.log_between(1, 64) if kind < 4 else draw.log_between(65, 512) if kind < 7 else draw.log_between(513, 8 * K)
    n, k = draw.one_of(GATED)
    if index % 5 == 4:  # sizes that fit no tile; blocks of up rows begin where those of gate rows end
        multiple = 128 if is_gated and scheme == "blocks" else 16
        n, k = multiple * draw.log_between(1024 // multiple, 16 * K // multiple), 16 * draw.log_between(64, 512)
    if not is_gated:
        n, k = k, n
    name = f"{scheme}-{'gated' if is_gated else 'plain'}-{m}x{n}x{k}"
    return name, ScaledProblem(m=m, n=n, k=k, scheme=scheme, gated=is_gated)


def softmax_row(draw: Draw, index: int, page: int) -> tuple[str, SoftmaxProblem]:
    kind = index % 3
    width = draw.one_of(VOCABULARIES) if kind == 0 else draw.log_between(256, 128 * K)
    width = 8 * (width // 8) if kind == 1 else width
    # At most 2^28 elements: 0.5 GB in bfloat16.
    rows = draw.log_between(1, min(64 * K, (1 << 28) // width))
    dtype = torch.float32 if draw.between(1, 3) == 3 else torch.bfloat16
    name = f"{rows}x{width}" + ("-f32" if dtype == torch.float32 else "")
    return name, SoftmaxProblem(rows=rows, width=width, dtype=dtype, out_dtype=dtype)


def norm_row(draw: Draw, index: int, page: int) -> tuple[str, NormProblem]:
    kind = index % 4
    width = draw.one_of(HIDDEN_SIZES)
    if kind == 0:  # decode steps
        rows, residual, scaling = draw.log_between(1, 512), True, Scaling.NONE
    elif kind == 1:  # prefill steps; a third of them quantized
        rows, residual = draw.log_between(512, 16 * K), True
        scaling = draw.one_of((Scaling.NONE, Scaling.TOKEN, Scaling.TENSOR))
    elif kind == 2:  # norms of heads
        rows, width, residual, scaling = draw.log_between(32, 256 * K), draw.one_of(HEAD_SIZES), False, Scaling.NONE
    else:  # any width
        rows, width = draw.log_between(1, 4 * K), draw.log_between(64, 64 * K)
        residual, scaling = draw.between(1, 2) == 2, Scaling.NONE
    problem = NormProblem(rows=rows, width=width, residual=residual, scaling=scaling)
    extras = "-residual" * residual + f"-fp8-{scaling.value}" * (scaling is not Scaling.NONE)
    return f"{rows}x{width}{extras}", problem


# Operator -> the function that draws a row.
FAMILIES: Mapping[str, Callable[[Draw, int, int], tuple[str, Any]]] = {
    "mla-decode": mla,
    "prefill": prefill,
    "linear": gated,
    "scaled-linear": scaled,
    "softmax": softmax_row,
    "norm": norm_row,
}


def problems(operator: str, page_size: int, seed: int = SEED) -> Iterator[tuple[str, Any]]:
    """(name, problem) of an operator's rows; none if it has no list. Names of another seed's rows have the seed."""
    if operator in FAMILIES:
        prefix = "" if seed == SEED else f"{seed}-"
        for index in range(COUNTS[operator]):
            name, problem = FAMILIES[operator](Draw(seed, operator, index), index, page_size)
            yield f"{prefix}{index:02}-{name}", problem
