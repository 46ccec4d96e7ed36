# SPDX-License-Identifier: Apache-2.0
"""Cases find mistakes in the bounds of what top-k's candidates are."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from sampling_cases import emulate

from dsl_backend.sampling.cute import candidates, host, row
from dsl_backend.testing.sampling import CASES, SamplingCase
from dsl_backend.testing.sampling import row as any_row
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, compile_again, spoil_methods, spoilt

# With a mistake, rows that have fewer logits apart may draw for ever.
ROWS = 6 * (any_row(t=30, k=20),)
ONE, FOUR = (replace(case, rows=ROWS) for case in CASES if case.id in ("few-groups", "few-groups-4"))
FOUND = (
    (Mistake("a bucket too few", candidates, "distance(row, x) <= last", "distance(row, x) < last"), ONE),
    (Mistake("a bucket before k", candidates, "last_bucket = self.bucket_of_rank(smem, row.top_k)\n        for",
             "last_bucket = self.bucket_of_rank(smem, row.top_k // 2)\n        for"), ONE),
    (Mistake("counts of before", candidates, "            smem.sBins[i] = cutlass.Uint32(0)\n", "            pass\n"),
     ONE),
    (Mistake("the last thread's again", candidates, "first + thread < count and ", ""), ONE),
    (Mistake("what another CTA reads", row, "self.cluster.rank() * self.threads + cute", "cute"), FOUR),
)  # fmt: skip
QUICK = ("a bucket too few",)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [pytest.param(one, case, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one, case in FOUND],
)
def test_mistake_is_found(
    mistake: Mistake, case: SamplingCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = candidates.CandidateSampler if mistake.module is candidates else row.RowReader
    spoil_methods(right, spoilt(mistake, tmp_path), monkeypatch)
    compile_again(monkeypatch, host)
    with pytest.raises((AssertionError, EmulatorError)):
        emulate(case, "sm_90a", "random", seed=1)
