# SPDX-License-Identifier: Apache-2.0
"""Whether tokens come as often as their probabilities say."""

from collections.abc import Callable

import torch

from dsl_backend.sampling import reference
from dsl_backend.sampling.fixed_point import BLOCK
from dsl_backend.sampling.spec import Parameters

# A part of one block, and three blocks of which the last is not full.
VOCAB, BLOCKS_VOCAB = 50, 2 * BLOCK + 276
AT_ONCE = {VOCAB: 100_000, BLOCKS_VOCAB: 4_000}
SETTINGS = {
    "all": {},
    "hot": {"temperature": 1.7},
    "k": {"temperature": 0.8, "top_k": 10},
    "p": {"top_p": 0.9},
    "kp": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
}
# Those with which a row is summed by blocks.
BY_BLOCKS = ("all", "hot", "p")
# Of as many seeds, or of as many positions of one seed.
ALONG = ["seeds", "positions"]
Draw = Callable[[torch.Tensor, Parameters], torch.Tensor]


def logits(vocab: int = VOCAB) -> torch.Tensor:
    """[1, vocab]."""
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 2


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """[blocks], of [vocab]."""
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).sum(-1)


def setting(name: str, rows: int, along: str, start: int, device: torch.device) -> Parameters:
    """So many rows that differ in seed or position, from `start` on."""
    count = torch.arange(start, start + rows, device=device)
    fixed_one = torch.full_like(count, 42)
    kinds = {"top_k": torch.int32}
    filters = {
        key: torch.full((rows,), value, dtype=kinds.get(key, torch.float32), device=device)
        for key, value in SETTINGS[name].items()
    }
    return Parameters(**{"seeds": fixed_one, "positions": fixed_one, along: count}, **filters)


def chi_square(counts: torch.Tensor, chance: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom, of what has at least 20 draws expected; the rest is one class."""
    expected = chance * counts.sum()
    often = expected >= 20
    seen = torch.cat([counts[often], counts[~often].sum().reshape(1)]).double()
    wanted = torch.cat([expected[often], expected[~often].sum().reshape(1)])
    some = wanted > 0
    return ((seen - wanted)[some] ** 2 / wanted[some]).sum().item(), int(some.sum()) - 1


def assert_fair(name: str, along: str, draws: int, device: torch.device, draw: Draw, vocab: int = VOCAB) -> None:
    """Draws of one row by a sampler, against the exact probabilities: of tokens, and of blocks.

    Args:
        draw: (logits [rows, vocab] float32, parameters) -> tokens [rows].
    """
    x, at_once = logits(vocab), AT_ONCE[vocab]
    chance = reference.probabilities(x, setting(name, 1, along, 0, torch.device("cpu")))[0]
    counts = torch.zeros(vocab, dtype=torch.int64)
    rows = x.to(device).expand(at_once, -1).contiguous()
    for start in range(0, draws, at_once):
        tokens = draw(rows, setting(name, at_once, along, start, device))
        counts += torch.bincount(tokens, minlength=vocab).cpu()
    assert counts.sum() == draws
    assert (counts[chance == 0] == 0).all()
    # A few blocks show a small part of the tokens that is in another one, which over a thousand tokens is noise.
    sums = [] if vocab <= BLOCK else [(block_sums(counts), block_sums(chance))]
    for seen, wanted in [(counts, chance), *sums]:
        statistic, freedom = chi_square(seen, wanted)
        # Five standard deviations of a chi-square above its mean.
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    cosine = torch.nn.functional.cosine_similarity(counts.double(), chance, dim=0)
    assert cosine > 0.999
