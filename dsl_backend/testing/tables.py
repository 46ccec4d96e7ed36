# SPDX-License-Identifier: Apache-2.0
"""Every operator family's problems by name: its table of cases, and random ones as `fuzz-SEED-INDEX`."""

import re
from collections.abc import Mapping

from dsl_backend.errors import InvalidInput
from dsl_backend.testing import experts, linear, norm, sampling, scaled, softmax, verification, weight_only
from dsl_backend.testing.cases import CASES
from dsl_backend.testing.fuzz import REAL, TINY, Problem, attention_family, problem
from dsl_backend.testing.kv_writes import WRITES
from dsl_backend.testing.mla_rope_writes import MLA_ROPES
from dsl_backend.testing.rope_writes import ROPES

# Distinct layers among a seed's random problems: each costs a compilation.
SPECS = 24
RANDOM = re.compile(r"fuzz-(\d+)-(\d+)")
# Of the table, where there is little time: one case of this many.
QUICK_STEP = 4
# Cases of experts, and those of real size.
EXPERTS = {
    "experts": ({**experts.CASES, **experts.SHARED_CASES, **experts.ADDED_CASES}, experts.REAL),
    "scaled_experts": (experts.SCALED_CASES, experts.SCALED_REAL),
    "block_scaled_experts": (experts.BLOCK_SCALED_CASES, experts.BLOCK_SCALED_REAL),
    "weight_only_experts": (experts.WEIGHT_ONLY_CASES, experts.WEIGHT_ONLY_REAL),
}


def table(family: str, device: str) -> Mapping[str, Problem]:
    """A family's cases; on a CPU without those of real size."""
    tiers = ("smoke",) if device == "cpu" else ("smoke", "full", "gpu")
    large = device != "cpu"
    if family == "linear":
        return {**linear.CASES, **(linear.REAL if large else {})}
    if family == "scaled_linear":
        return {**scaled.CASES, **(scaled.REAL if large else {})}
    if family == "weight_only_linear":
        return {**weight_only.CASES, **(weight_only.REAL if large else {})}
    if family in EXPERTS:
        cases, real = EXPERTS[family]
        return {**cases, **(real if large else {})}
    if family == "norm":
        return {case.id: case for case in (*norm.CASES, *(norm.WIDE if large else ()))}
    if family == "softmax":
        return {case.id: case for case in (*softmax.CASES, *(softmax.WIDE if large else ()))}
    if family == "sampling":
        return {case.id: case for case in (*sampling.CASES, *(sampling.WIDE if large else ()))}
    if family == "verification":
        return {case.id: case for case in (*verification.CASES, *(verification.WIDE if large else ()))}
    if family == "write_kv":
        return {case.id: case for case in WRITES if case.tier in tiers}
    if family == "rope_write_kv":
        return {case.id: case for case in ROPES if case.tier in tiers}
    if family == "rope_write_mla":
        return {case.id: case for case in MLA_ROPES if case.tier in tiers}
    return {case.id: case for case in CASES if case.tier in tiers and attention_family(case) == family}


def names(family: str, device: str, *, quick: bool, random: int, seed: int) -> list[str]:
    """The problems to go through: the table, or a part of it, then that many random ones."""
    known = list(table(family, device))
    return [*(known[::QUICK_STEP] if quick else known), *(f"fuzz-{seed}-{index}" for index in range(random))]


def find(family: str, name: str, device: str) -> Problem:
    """A problem by its name. Raises InvalidInput: the family has none of that name."""
    drawn = RANDOM.fullmatch(name)
    if drawn:
        return problem(family, int(drawn[1]), int(drawn[2]), TINY if device == "cpu" else REAL, SPECS)
    known = table(family, device)
    if name not in known:
        raise InvalidInput(f"{family} has no problem {name!r}: use fuzz-SEED-INDEX, or one of {', '.join(known)}")
    return known[name]
