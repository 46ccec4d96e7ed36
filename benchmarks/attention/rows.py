# SPDX-License-Identifier: Apache-2.0
"""The rows of each attention benchmark: the default group, and further groups, selected by a regular expression."""

import random

import torch

from ..case import TABLE, Case, case_of
from .problems import Problem, WriteProblem, dense, latent, packed

K = 1024
FP8 = torch.float8_e4m3fn
# Group -> storage type of keys and values. `--rows fp8` selects both groups.
FP8_GROUPS = {"fp8": FP8, "fp8-e5m2": torch.float8_e5m2}
# (batch, keys): one user with short and very long contexts, a few users, many users, and the largest batches.
DECODE_SHAPES = ((1, 8 * K), (1, 128 * K), (8, 8 * K), (64, 1 * K), (64, 8 * K), (256, 2 * K))
# (head_dim, query heads, key heads): 8B models, gpt-oss, and one of eight tensor-parallel ranks of a 70B model.
DECODE_HEADS = ((128, 32, 8), (64, 64, 8), (128, 8, 1))
SWEEP_BATCHES, SWEEP_LENGTHS = (1, 4, 16, 64, 128), (1, 4, 16, 64, 128)
PREFILL_SHAPES = ((16, 1 * K), (4, 4 * K), (1, 16 * K))
PREFILL_HEADS = ((128, 32, 8), (64, 64, 8), (256, 16, 2))
# Further heads over e4m3 caches: twice the query heads of an 8B model, and keys of 192 with values of 128 (MiMo, and
# DeepSeek's sizes without absorption).
FP8_HEADS = ((128, 64, 8), *PREFILL_HEADS[1:])
UNEQUAL_DIMS, UNEQUAL_HEADS = (192, 128), (64, 8)
# Drafts, and the next turns of conversations: (query heads, tokens, keys, batch) with heads of 128 and 8 key heads.
SHORT_QUERIES = (
    *((64, tokens, 8 * K, 32) for tokens in (9, 16, 32, 64)),
    (64, 16, 2 * K, 64),
    (64, 48, K, 64),
    (64, 90, 4 * K, 32),
    (64, 100, 8 * K, 32),
    *((32, tokens, 8 * K, 32) for tokens in (9, 16)),
    (32, 16, 2 * K, 64),
    (32, 100, 8 * K, 32),
)
# The same by rows of a key head, query heads times tokens: 96, 128 and 256. (query heads, tokens), (batch, keys).
MANY_ROWS = ((64, 12), (64, 16), (128, 16))
MANY_ROWS_KEYS = ((1, 32 * K), (4, 8 * K), (16, 2 * K), (64, 2 * K), (32, 8 * K), (8, 32 * K))
# 16k tokens in prompts of these lengths, with as many key heads as query heads: the tables of FlashAttention's papers.
LENGTHS, LENGTH_HEADS = tuple(512 * 2**i for i in range(6)), (128, 16, 16)
LATENT_SHAPES = ((1, 8 * K), (8, 8 * K), (64, 4 * K), (128, 4 * K))
# Groups of the same rows over 16-bit and over e4m3 caches. Heads of absorbed MLA: DeepSeek V2 Lite's, or V3's on two
# GPUs and on one.
DRAFTS = (("drafts", torch.bfloat16), ("e4m3-drafts", FP8))
DRAFT_TOKENS, DRAFT_SHAPES, DRAFT_LATENT_HEADS = (1, 2, 4, 8), ((8, 8 * K), (64, 4 * K)), (16, 64, 128)


def length(tokens: int) -> str:
    """8192 as `8k`."""
    return f"{tokens // K}k" if tokens % K == 0 else str(tokens)


def heads(head_dim: int, heads_q: int, heads_kv: int) -> str:
    return f"hd{head_dim}-h{heads_q}x{heads_kv}"


def zipf_lengths(count: int, shortest: int = 16, longest: int = 32 * K, seed: int = 0) -> tuple[int, ...]:
    """Lengths with a frequency proportional to 1/length (Zipf's law): many short requests, a few of full length."""
    draw = random.Random(seed)
    return tuple(round(shortest * (longest / shortest) ** draw.random()) for _ in range(count))


def decode_cases(page: int = 16) -> list[Case[Problem]]:
    def row(
        h: tuple[int, int, int],
        batch: int,
        keys: int,
        group: str = TABLE,
        q: int = 1,
        axis: str | None = None,
        **more: object,
    ) -> Case:
        problem = dense(*h, [q] * batch, [keys] * batch, page_size=page, **more)  # type: ignore[arg-type]
        return case_of(f"{heads(*h)}-b{batch}-k{length(keys)}", problem, group, axis)

    main = DECODE_HEADS[0]
    cases = [row(h, *shape) for h in DECODE_HEADS for shape in DECODE_SHAPES]
    cases += [row(h, b, 8 * K, "batch", axis="requests") for h in DECODE_HEADS for b in SWEEP_BATCHES]
    cases += [row(h, 8, k * K, "length", axis="max_kv_len") for h in DECODE_HEADS for k in SWEEP_LENGTHS]
    for h in DECODE_HEADS:
        for batch in (8, 64, 256):
            problem = dense(*h, [1] * batch, zipf_lengths(batch, seed=batch), page_size=page)
            cases.append(case_of(f"{heads(*h)}-b{batch}", problem, "ragged"))
    cases += [row((64, 64, 8), b, 8 * K, "window128", window_left=127) for b in (8, 64)]
    cases += [row(main, b, 32 * K, "window4k", window_left=4 * K - 1) for b in (1, 16)]
    cases += [row(main, *shape, name, kv_dtype=kind) for name, kind in FP8_GROUPS.items() for shape in DECODE_SHAPES]
    # The same rows over 16-bit caches are those of the table, and of q1 to q8.
    cases += [row(h, *shape, "e4m3-heads", kv_dtype=FP8) for h in DECODE_HEADS[1:] for shape in DECODE_SHAPES]
    cases += [row(main, *shape, f"e4m3-q{q}", q=q, kv_dtype=FP8) for q in DRAFT_TOKENS for shape in DRAFT_SHAPES]
    cases += [row(main, *shape, "invariant", batch_invariant=True) for shape in DECODE_SHAPES]
    cases += [row((512, 16, 2), b, 8 * K, "hd512") for b in (1, 8, 64)]
    cases += [row(main, *shape, f"q{q}", q=q) for q in DRAFT_TOKENS for shape in DRAFT_SHAPES]
    cases.append(case_of("hd64-h4x2", dense(64, 4, 2, [1, 1, 1], [5, 16, 40], page_size=page), "tiny"))
    return cases


def prefill_cases(page: int = 16) -> list[Case[Problem]]:
    def row(
        h: tuple[int, int, int],
        batch: int,
        new: int,
        group: str = TABLE,
        context: int = 0,
        axis: str | None = None,
        **more: object,
    ) -> Case:
        problem = dense(*h, [new] * batch, [context + new] * batch, page_size=page, **more)  # type: ignore[arg-type]
        return case_of(f"{heads(*h)}-{batch}x{length(new)}", problem, group, axis)

    main = PREFILL_HEADS[0]
    # The same number of tokens, from many short requests to one long one.
    cases = [row(h, *shape, axis="max_q_len") for h in PREFILL_HEADS for shape in PREFILL_SHAPES]
    cases += [row(LENGTH_HEADS, 16 * K // new, new, "lengths", axis="max_q_len") for new in LENGTHS]
    for h in PREFILL_HEADS[:2]:
        lens = zipf_lengths(16, seed=2)
        cases.append(case_of(f"{heads(*h)}-b16", dense(*h, lens, lens, page_size=page), "ragged"))
    cases += [row(main, b, 2 * K, "context8k", context=8 * K) for b in (1, 4)]
    # A scheduler's step: a chunk of one prompt and the decodes of other requests.
    mixed = dense(*main, [1] * 63 + [2 * K], [4 * K] * 63 + [6 * K], page_size=page)
    cases.append(case_of(f"{heads(*main)}-63x1+2k", mixed, "mixed"))
    cases += [row(main, *shape, "window1k", window_left=K - 1) for shape in PREFILL_SHAPES[1:]]
    cases += [row((64, 64, 8), *shape, "window128", window_left=127) for shape in PREFILL_SHAPES[1:]]
    cases += [row(main, *shape, name, kv_dtype=kind) for name, kind in FP8_GROUPS.items() for shape in PREFILL_SHAPES]
    cases += [row(h, *shape, "e4m3-heads", kv_dtype=FP8) for h in FP8_HEADS for shape in PREFILL_SHAPES[1:]]
    dim, dim_v = UNEQUAL_DIMS
    for batch, new in PREFILL_SHAPES[1:]:
        problem = dense(
            dim, *UNEQUAL_HEADS, [new] * batch, [new] * batch, page_size=page, kv_dtype=FP8, head_dim_v=dim_v
        )
        name = f"{heads(dim, *UNEQUAL_HEADS).replace('-', f'v{dim_v}-', 1)}-{batch}x{length(new)}"
        cases.append(case_of(name, problem, "e4m3-heads"))
    for heads_q, tokens in MANY_ROWS:
        for batch, keys in MANY_ROWS_KEYS:
            problem = dense(128, heads_q, 8, [tokens] * batch, [keys] * batch, page_size=page, kv_dtype=FP8)
            cases.append(case_of(f"{heads_q * tokens // 8}-b{batch}-k{length(keys)}", problem, "e4m3-rows"))
    for heads_q, tokens, keys, batch in SHORT_QUERIES:
        for name, kind in (("short-queries", torch.bfloat16), ("e4m3-short-queries", FP8)):
            problem = dense(128, heads_q, 8, [tokens] * batch, [keys] * batch, page_size=page, kv_dtype=kind)
            cases.append(case_of(f"{heads(128, heads_q, 8)}-b{batch}-q{tokens}-k{length(keys)}", problem, name))
    cases += [row(main, *shape, "invariant", batch_invariant=True) for shape in PREFILL_SHAPES]
    cases += [row((512, 16, 2), *shape, "hd512") for shape in PREFILL_SHAPES]
    cases.append(case_of("hd64-h4x2", dense(64, 4, 2, [7, 33], [7, 40], page_size=page), "tiny"))
    return cases


def latent_cases(page: int = 16) -> list[Case[Problem]]:
    cases = []
    for h in (16, 128):
        for q in (1, 2):
            for batch, keys in LATENT_SHAPES:
                problem = latent(h, [q] * batch, [keys] * batch, page_size=page)
                cases.append(case_of(f"h{h}-b{batch}-k{length(keys)}-q{q}", problem))
        cases += [
            case_of(f"h{h}-b{b}-k8k", latent(h, [1] * b, [8 * K] * b, page_size=page), "batch", "requests")
            for b in SWEEP_BATCHES
        ]
        for batch, keys in LATENT_SHAPES:
            problem = latent(h, [1] * batch, [keys] * batch, page_size=page, batch_invariant=True)
            cases.append(case_of(f"h{h}-b{batch}-k{length(keys)}", problem, "invariant"))
            for name, kind in FP8_GROUPS.items():
                problem = latent(h, [1] * batch, [keys] * batch, page_size=page, kv_dtype=kind)
                cases.append(case_of(f"h{h}-b{batch}-k{length(keys)}", problem, name))
    for h in (16, 128):
        problem = latent(h, [1] * 64, zipf_lengths(64, seed=3), page_size=page)
        cases.append(case_of(f"h{h}-b64", problem, "ragged"))
        cases += [
            case_of(f"h{h}-b{b}-k8k", latent(h, [q] * b, [8 * K] * b, page_size=page), f"q{q}")
            for q in (4, 8)
            for b in (8, 64)
        ]
        cases += [
            case_of(f"h{h}-b{b}-k{length(keys)}", latent(h, [1] * b, [keys] * b, page_size=page), "short")
            for b in (16, 64, 256)
            for keys in (256, K, 2 * K)
        ]
        # A served step: short prompts, which use absorbed MLA, together with decodes.
        cases += [
            case_of(f"h{h}-{b}x1+{q}", latent(h, [1] * b + [q], [2 * q] * b + [q], page_size=page), "prompt")
            for b, q in ((15, 256), (63, 256), (63, 448))
        ]
    for group, kind in DRAFTS:
        for h in DRAFT_LATENT_HEADS:
            for q in DRAFT_TOKENS:
                for batch, keys in DRAFT_SHAPES:
                    problem = latent(h, [q] * batch, [keys] * batch, page_size=page, kv_dtype=kind)
                    cases.append(case_of(f"h{h}-b{batch}-k{length(keys)}-q{q}", problem, group))
    cases.append(case_of("h4", latent(4, [1, 2], [20, 40], page_size=page), "tiny"))
    return cases


def packed_cases(page: int = 16) -> list[Case[Problem]]:
    cases = [case_of(f"h16-{b}x{length(n)}", packed(16, [n] * b), axis="max_q_len") for b, n in PREFILL_SHAPES]
    cases += [case_of(f"h128-{b}x{length(n)}", packed(128, [n] * b), "heads128") for b, n in ((8, K), (2, 4 * K))]
    cases.append(case_of("h16-b16", packed(16, zipf_lengths(16, seed=2)), "ragged"))
    cases.append(case_of("h2", packed(2, [7, 33]), "tiny"))
    return cases


def write_cases(page: int = 16) -> list[Case[WriteProblem]]:
    def own(tokens: int, dtype: torch.dtype = torch.bfloat16) -> WriteProblem:
        return WriteProblem(tokens=tokens, heads_kv=8, head_dim=128, head_dim_v=128, page_size=page, kv_dtype=dtype)

    def mla(tokens: int) -> WriteProblem:
        return WriteProblem(tokens=tokens, heads_kv=1, head_dim=512, head_dim_v=64, page_size=page, mla=True)

    cases = [case_of(f"hd128-h8-t{length(t)}", own(t), axis="tokens") for t in (1, 64, 256, 8 * K)]
    cases += [case_of(f"mla-t{length(t)}", mla(t), axis="tokens") for t in (1, 64, 256, 8 * K)]
    cases += [case_of(f"hd128-h8-t{length(t)}", own(t, FP8), "fp8") for t in (64, 8 * K)]
    tiny = WriteProblem(tokens=5, heads_kv=2, head_dim=64, head_dim_v=64, page_size=page)
    cases.append(case_of("hd64-h2-t5", tiny, "tiny"))
    return cases
