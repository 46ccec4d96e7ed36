# SPDX-License-Identifier: Apache-2.0
"""Keys and values that no row of a request sees, below its window: they may be another request's by now."""

import torch

from dsl_backend.testing.inputs import Expected, Problem

NAN, ZERO = 0xFF, 0x00  # bytes of NaN, and of 0, in a float of any width


def fill_unseen(problem: Problem, byte: int) -> int:
    """Fill keys and values below the windows of all of a request's rows; returns how many keys that are."""
    table, page, left = problem.batch.block_table, problem.spec.page_size, problem.spec.window_left
    assert table is not None
    assert page is not None
    assert left is not None
    found = 0
    for request, (q_len, kv_len) in enumerate(zip(problem.q_lens, problem.kv_lens, strict=True)):
        for key in range(max(kv_len - q_len - left, 0)):
            for tensor in (problem.keys, problem.values):
                tensor[int(table[request, key // page]), key % page].view(torch.uint8).fill_(byte)
            found += 1
    return found


def expected_of(problem: Problem, nan_below: bool) -> tuple[Expected, torch.Tensor]:
    """What is right, and the scores' magnitude; with nan_below, there is NaN below all windows from then on."""
    if nan_below:
        assert fill_unseen(problem, ZERO) > 0
    found = problem.expected(), problem.score_magnitude()
    if nan_below:
        fill_unseen(problem, NAN)
    return found
