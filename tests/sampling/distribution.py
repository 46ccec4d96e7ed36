# SPDX-License-Identifier: Apache-2.0
"""Whether tokens come as often as their probabilities say."""

from collections.abc import Callable

import torch

from dsl_backend.sampling import reference
from dsl_backend.sampling.spec import Parameters

VOCAB = 50
AT_ONCE = 100_000
SETTINGS = {
    "all": {},
    "hot": {"temperature": 1.7},
    "k": {"temperature": 0.8, "top_k": 10},
    "p": {"top_p": 0.9},
    "kp": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
}
# Of as many seeds, or of as many positions of one seed.
ALONG = ["seeds", "positions"]
Draw = Callable[[torch.Tensor, Parameters], torch.Tensor]


def logits() -> torch.Tensor:
    """[1, VOCAB]."""
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


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


def assert_fair(name: str, along: str, draws: int, device: torch.device, draw: Draw) -> None:
    """Draws of one row by a sampler, against the exact probabilities.

    Args:
        draw: (logits [rows, VOCAB] float32, parameters) -> tokens [rows].
    """
    x = logits()
    chance = reference.probabilities(x, setting(name, 1, along, 0, torch.device("cpu")))[0]
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    rows = x.to(device).expand(AT_ONCE, -1).contiguous()
    for start in range(0, draws, AT_ONCE):
        tokens = draw(rows, setting(name, AT_ONCE, along, start, device))
        counts += torch.bincount(tokens, minlength=VOCAB).cpu()
    assert counts.sum() == draws
    assert (counts[chance == 0] == 0).all()
    statistic, freedom = chi_square(counts, chance)
    # Five standard deviations of a chi-square above its mean.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    cosine = torch.nn.functional.cosine_similarity(counts.double(), chance, dim=0)
    assert cosine > 0.999
