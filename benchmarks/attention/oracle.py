# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 for some rows of a batch, on the batch's device."""

import random

import torch

from ..case import Reference
from .inputs import Inputs, tokens_of
from .problems import Problem

ROWS = 512  # number of compared rows of the whole batch


def sampled_rows(q_len: int, most: int, draw: random.Random) -> list[int]:
    """The compared query rows of one request: all if there are few, else the first, the last and random ones."""
    if q_len <= most:
        return list(range(q_len))
    return sorted({0, q_len - 1, *draw.sample(range(q_len), most - 2)})


def attend(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Attention of query rows at given positions of one request.

    Args:
        q: [n, heads_q, head_dim].
        k, v: [kv_len, heads_kv, dim].
        positions: [n] int64, each row's position in the request.

    Returns:
        [n, heads_q, head_dim_v] float64.
    """
    distance = positions[:, None] - torch.arange(k.shape[0], device=q.device)
    hidden = distance < 0
    if problem.window_left is not None:
        hidden |= distance > problem.window_left
    group = problem.heads_q // problem.heads_kv
    result = torch.empty(q.shape[0], problem.heads_q, problem.head_dim_v, dtype=torch.float64, device=q.device)
    for head in range(problem.heads_kv):  # one at a time: long contexts are large in float64
        of_head = slice(head * group, (head + 1) * group)
        scores = q[:, of_head].double() @ k[:, head].double().T * problem.scale
        weights = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), dim=-1)
        result[:, of_head] = weights @ v[:, head].double()
    return result


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The exact output rows of one layer."""
    draw = random.Random(seed)
    tensors = inputs.layers[layer]
    most = max(4, ROWS // problem.requests)
    rows, values = [], []
    first = 0
    for request, (q_len, kv_len) in enumerate(zip(problem.q_lens, problem.kv_lens, strict=True)):
        chosen = torch.tensor(sampled_rows(q_len, most, draw), device=tensors.q.device)
        k = tokens_of(problem, inputs, tensors.keys, request)
        v = tokens_of(problem, inputs, tensors.values, request)
        rows.append(first + chosen)
        values.append(attend(problem, tensors.q[first + chosen], k, v, kv_len - q_len + chosen))
        first += q_len
    return Reference(torch.cat(rows), torch.cat(values))
