# SPDX-License-Identifier: Apache-2.0
"""Prefill, decode and MLA decode for the judge."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsl_backend.attention import reference
from dsl_backend.testing.numerics import error_over_budget

from ..judge.registry import LAYERS, OneOutput, Trial
from . import inputs as tensors
from .inputs import Inputs, pages_of
from .problems import Problem, dense, latent

HEADS = ((64, 8, 2), (128, 4, 1), (64, 2, 2))  # (head_dim, query heads, key heads)


@dataclass(frozen=True)
class Attention(OneOutput):
    """Requests of any lengths. What no query sees is NaN: the ends of last pages, and whole pages of the cache."""

    operator: str

    def trials(self, draw: random.Random, emulated: bool) -> Sequence[Trial]:
        longest, count = (80, 3) if emulated else (200, 5)

        def lengths(shortest: int = 1) -> list[int]:
            return [draw.randint(shortest, longest) for _ in range(draw.randint(2, count))]

        make = {"decode": self.decode, "prefill": self.prefill, "mla-decode": self.mla}[self.operator]
        found = make(draw, lengths)
        return [Trial(id=name, why=why, problem=problem) for name, why, problem in (found[:3] if emulated else found)]

    def decode(self, draw: random.Random, lengths: Any) -> list[tuple[str, str, Problem]]:
        def of(heads: tuple[int, int, int], keys: list[int], queries: int = 1, **more: Any) -> Problem:
            return dense(*heads, [queries] * len(keys), keys, **more)

        few = draw.randint(2, 4)
        return [
            ("gqa", "several query heads for each key head, ragged lengths", of(HEADS[0], lengths())),
            ("window", "a window, older keys are not seen", of(HEADS[1], lengths(), window_left=draw.randint(5, 60))),
            ("pages", "another page size", of(HEADS[2], lengths(), page_size=32)),
            ("one-key", "a request with one key", of(HEADS[0], [1, *lengths()])),
            ("queries", "several queries of a request: causal among them", of(HEADS[0], lengths(few), few)),
            ("multi-query", "one key head", of(HEADS[1], lengths())),
        ]

    def prefill(self, draw: random.Random, lengths: Any) -> list[tuple[str, str, Problem]]:
        def of(heads: tuple[int, int, int], new: list[int], context: int = 0, **more: Any) -> Problem:
            cached = [draw.randint(0, context) for _ in new]
            return dense(*heads, new, [q + old for q, old in zip(new, cached, strict=True)], **more)

        return [
            ("gqa", "several query heads for each key head, ragged lengths", of(HEADS[0], lengths())),
            ("context", "keys of an earlier step", of(HEADS[1], lengths(), 70)),
            (
                "window",
                "a window, older keys are not seen",
                of(HEADS[2], lengths(), 20, window_left=draw.randint(5, 60)),
            ),
            ("mixed", "decodes in the batch", of(HEADS[0], [1, *lengths(), 1], 90)),
            ("pages", "another page size", of(HEADS[0], lengths(), page_size=32)),
        ]

    def mla(self, draw: random.Random, lengths: Any) -> list[tuple[str, str, Problem]]:
        def of(heads: int, keys: list[int], queries: int = 1, **more: Any) -> Problem:
            return latent(heads, [queries] * len(keys), keys, **more)

        return [
            ("heads", "ragged lengths", of(16, lengths())),
            ("queries", "two queries of a request: causal among them", of(8, lengths(2), 2)),
            ("pages", "another page size", of(16, lengths(), page_size=64)),
            ("one-key", "a request with one key", of(16, [1, *lengths()])),
        ]

    def build(self, trial: Trial, device: torch.device, seed: int) -> Inputs:
        problem: Problem = trial.problem
        made = tensors.build(problem, LAYERS, device, seed)
        assert problem.page_size is not None
        # Two pages more than the requests have: page numbers move up, and the first and the last one are nobody's.
        assert made.batch.block_table is not None
        table = made.batch.block_table + 1
        batch = replace(made.batch, block_table=table)
        layers = []
        for layer in made.layers:
            spare = torch.full_like(layer.cache[:1], torch.nan)
            cache = torch.cat([spare, layer.cache, spare])
            for request, kv_len in enumerate(problem.kv_lens):
                last = int(table[request, pages_of(kv_len, problem.page_size) - 1])
                cache[last, (kv_len - 1) % problem.page_size + 1 :] = torch.nan
            gapped = torch.zeros(problem.tokens, problem.heads_q, problem.head_dim_v + 8, device=device)
            out = gapped.to(problem.dtype)[..., : problem.head_dim_v]
            keys, values = tensors.split(problem, cache)
            layers.append(replace(layer, cache=cache, keys=keys, values=values, out=out))
        return replace(made, batch=batch, layers=tuple(layers))

    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        return [layer.out for layer in inputs.layers]

    def nudge(self, inputs: Inputs, layer: int, draw: random.Random) -> None:
        """The value of the last request's last key, which its last query sees."""
        table, length = inputs.batch.block_table, int(inputs.batch.seq_lens[-1])
        assert table is not None
        given = inputs.layers[layer]
        page_size = given.keys.shape[1]
        place = int(table[len(inputs.batch.seq_lens) - 1, (length - 1) // page_size]), (length - 1) % page_size
        given.values[place] += 8

    def error(self, trial: Trial, inputs: Inputs, layer: int, out: torch.Tensor, *further: torch.Tensor) -> float:
        given, spec = inputs.layers[layer], trial.problem.spec

        def compute(dtype: torch.dtype) -> torch.Tensor:
            return reference.attention(spec, inputs.batch, given.q, given.keys, given.values, compute_dtype=dtype)[0]

        return error_over_budget(out, compute(torch.float64), compute(out.dtype))

    def hidden(self, inputs: Any) -> Any:
        return inputs


JUDGED = {name: Attention(name) for name in ("prefill", "decode", "mla-decode")}
