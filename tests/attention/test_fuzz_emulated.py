# SPDX-License-Identifier: Apache-2.0
"""Random small problems on the emulator, with the configurations that a chip would get, on every schedule."""

from dataclasses import replace
from itertools import count, islice

import pytest

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.runtime import registry
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check, fuzz
from dsl_backend.testing.cases import Case
from tests.attention.emulated import SCHEDULES, SMS

pytest.importorskip("cutlass")

ARCHS, FAMILIES = registry.EMULATED, ("decode", "prefill", "mla")
# A layer is compiled for some ten seconds: each has several problems.
LAYERS, PROBLEMS, SEED = 36, 5, 20261122
QUICK = 2  # layers of a family that every change is checked with, on SM100
SIZES = replace(fuzz.TINY, kv=400, q=150, requests=3, heads_kv=(1, 2), heads_mla=(8, 16, 20, 64))
SPECS = 10_000


def drawn(family: str, layer: int, turn: int) -> Case:
    case = fuzz.problem(family, SEED, layer + turn * SPECS, SIZES, SPECS)
    assert isinstance(case, Case)
    return case


def served(arch: str, family: str, layer: int) -> bool:
    """Whether a kernel in CuTe DSL serves the layer by itself, for short queries and for long ones."""
    spec = drawn(family, layer, 0).spec
    judged = [dispatch.judge(operation, spec, from_arch(arch)) for operation in dispatch.attention_of(spec)]
    attends = [entries for entries in judged if any(entry.name == "cute" for entry, _ in entries)]
    return all(any(entry.name == "cute" and not why for entry, why in entries) for entries in attends)


def layers(arch: str, family: str) -> list[int]:
    return list(islice((layer for layer in count() if served(arch, family, layer)), LAYERS))


def runs() -> list[object]:
    return [
        pytest.param(
            arch,
            family,
            layer,
            id=f"{arch}-{family}-{layer}",
            marks=() if place < QUICK and arch == "sm_100a" else (pytest.mark.full,),
        )
        for arch in ARCHS
        for family in FAMILIES
        for place, layer in enumerate(layers(arch, family))
    ]


@pytest.mark.parametrize(("arch", "family", "layer"), runs())
def test_random_problems_of_a_layer(arch: str, family: str, layer: int) -> None:
    """Right, and without a finding or a warning."""
    target = replace(from_arch(arch), sm_count=SMS)
    for turn in range(PROBLEMS):
        case = drawn(family, layer, turn)
        problem = case.problem()
        schedule = SCHEDULES[(layer + turn) % len(SCHEDULES)]
        with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=turn, strict=True):
            result = check.run(problem, "cute", split_q=case.split_q, adjust=check.forced(case), target=target)
        check.judge(result, problem.expected(), problem.score_magnitude())


def test_there_are_enough() -> None:
    assert all(len(layers(arch, family)) == LAYERS for arch in ARCHS for family in FAMILIES)
    assert len(FAMILIES) * LAYERS * PROBLEMS >= 500
