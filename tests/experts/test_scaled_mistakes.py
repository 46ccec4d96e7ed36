# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the epilogue of consumers side by side, each of which a case on the emulator finds."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from test_scaled import EMULATED, SCALED_CASES, emulate

from dsl_backend.experts.cute import scaled_host
from dsl_backend.experts.cute.sm90 import scaled_grouped
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, compile_again, spoilt

# Several work tiles a CTA; several groups of columns.
TILES, GROUPS = "few-tall", "few-wide"
QUICK = "consumers do not wait for each other"
MISTAKES = [
    (
        TILES,
        Mistake(
            QUICK,
            scaled_grouped,
            "cute.arch.barrier(barrier_id=BOTH_BARRIER, number_of_threads=CONSUMERS * WARPGROUP)",
            "pass",
        ),
    ),
    (
        TILES,
        Mistake("one buffer for all tiles", scaled_grouped, "sMaxima[None, None, i % 2]", "sMaxima[None, None, 0]"),
    ),
    (
        TILES,
        Mistake("its own columns alone", scaled_grouped, "sMaxima[rows[b], 1 - group]", "sMaxima[rows[b], group]"),
    ),
    (
        TILES,
        Mistake("one row of two", scaled_grouped, "sMaxima[rows[b], group] =", "sMaxima[rows[0], group] ="),
    ),
    (
        GROUPS,
        Mistake("a scale's group", scaled_grouped, "(self.group_tiles * self.side)", "self.group_tiles"),
    ),
]


def run(name: str) -> None:
    """Under two orders of events."""
    case, config, routing_ctas = EMULATED[name]
    for schedule in ("lazy", "random"):
        emulate(SCALED_CASES[case], config, schedule, 1, routing_ctas)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(name, one, id=one.id, marks=pytest.mark.rest if one.id == QUICK else pytest.mark.full)
        for name, one in MISTAKES
    ],
)
def test_it_is_found(name: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, scaled_host)
    monkeypatch.setattr(scaled_grouped, "product", spoilt(mistake, tmp_path).product)
    with pytest.raises((EmulatorError, AssertionError)):
        run(name)
