# SPDX-License-Identifier: Apache-2.0
"""The rows of the sampling benchmark: the default group, and further groups, selected by a regular expression."""

from ..case import SMALLEST, TABLE, Case, case_of
from .problems import FILTERS, Problem

K = 1024
BATCHES = (1, 16, 64, 256)
VOCABULARIES = (32 * K, 128256, 151936, 256 * K)
QWEN = 151936
# Rows that are read as a whole: without filters, and with top-p alone, beside top-k and top-p.
WHOLE = "whole"
WHOLE_BATCHES = (32, 128, 512)
WHOLE_VOCAB = 201088
# With the log-probabilities of the likeliest tokens, beside the same without.
LOGPROBS = "logprobs"
LOGPROBS_BATCHES = (1, 32, 128, 512)
# A vocabulary of which a launch, and not the logits, takes the time.
SMALL = "small"
SMALL_VOCAB, SMALL_BATCHES = 300, (1, 16, 64, 256, 512)


def case(problem: Problem, group: str = TABLE, axis: str | None = None) -> Case[Problem]:
    suffix = "" if problem.dtype == "float32" else f"-{problem.dtype}"
    suffix += "" if problem.logprobs is None else f"-top{problem.logprobs}"
    name = f"{problem.filters}-{problem.rows}x{problem.vocab}{suffix}"
    return case_of(name, problem, group, axis)


def cases() -> list[Case[Problem]]:
    found = [case(Problem(rows=rows, vocab=QWEN, filters=name)) for name in FILTERS for rows in BATCHES]
    found += [
        case(Problem(rows=rows, vocab=vocab, filters=name), "vocab", "vocab")
        for name in FILTERS
        for rows in BATCHES
        for vocab in VOCABULARIES
        if vocab != QWEN
    ]
    found += [
        case(Problem(rows=rows, vocab=WHOLE_VOCAB, filters=name, dtype=dtype), WHOLE)
        for dtype in ("float32", "bfloat16")
        for name in ("none", "p", "k+p")
        for rows in WHOLE_BATCHES
    ]
    found += [
        case(Problem(rows=rows, vocab=QWEN, filters=name, dtype=dtype, logprobs=count), LOGPROBS)
        for dtype in ("float32", "bfloat16")
        for name in ("none", "k+p")
        for rows in LOGPROBS_BATCHES
        for count in (None, 20)
    ]
    found += [
        case(Problem(rows=rows, vocab=SMALL_VOCAB, filters=name), SMALL) for name in FILTERS for rows in SMALL_BATCHES
    ]
    found += [case(Problem(rows=1, vocab=300, filters=name), SMALLEST) for name in ("k+p", "min-p")]
    return found
