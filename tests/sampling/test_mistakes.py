# SPDX-License-Identifier: Apache-2.0
"""Cases find mistakes in the bounds of what top-k's candidates are, and in what the filters keep."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from sampling_cases import emulate

from dsl_backend.sampling.cute import candidates, host, last_kept, row
from dsl_backend.testing.sampling import CASES, SamplingCase
from dsl_backend.testing.sampling import row as any_row
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, compile_again, spoil_methods, spoilt

# With a mistake, rows that have fewer logits apart may draw for ever.
# The block of the case of four CTAs has 32 groups, and that of the other one 15.
TOP_K = {"few-groups": 20, "few-groups-4": 40}
KEPT = next(case for case in CASES if case.id == "kept")
WHOLE = next(case for case in CASES if case.id == "kept-whole")
ONE, FOUR = (replace(case, rows=6 * (any_row(t=30, k=TOP_K[case.id]),)) for case in CASES if case.id in TOP_K)
FOUND = (
    (Mistake("a bucket too few", candidates, "distance(row, x) <= last", "distance(row, x) < last"), ONE),
    (Mistake("a bucket before k", candidates, "last_bucket = self.bucket_of_rank(smem, row.top_k)\n        for",
             "last_bucket = self.bucket_of_rank(smem, row.top_k // 2)\n        for"), ONE),
    (Mistake("counts of before", candidates, "            smem.sBins[i] = cutlass.Uint32(0)\n", "            pass\n"),
     ONE),
    (Mistake("the last thread's again", candidates, "first + thread < count and ", ""), ONE),
    (Mistake("columns that no CTA reads", row, "rank() * self.threads + cute", "rank() * 64 + cute"), FOUR),
    (Mistake("ties in the other order", candidates, "sCandX[other], smem.sCandId[other], x, token_id)",
             "sCandX[other], token_id, x, smem.sCandId[other])"), KEPT),
    (Mistake("the sum without the last one", candidates, "write_kept(row, prob_sum,", "write_kept(row, before,"), KEPT),
    (Mistake("a tie too few", last_kept, " + prob - 1) // prob", ") // prob"), KEPT),
    (Mistake("no sum above the range", last_kept, "count, found.above,", "count, cutlass.Uint64(0),"), KEPT),
    (Mistake("the sum by blocks", last_kept, "write_kept(row, above, lowest", "write_kept(row, limit, lowest"), KEPT),
    (Mistake("half of a row's sum", last_kept, "write_kept(row, limit, fix", "write_kept(row, limit // 2, fix"), WHOLE),
    (Mistake("a part too high", last_kept, "low, reaches = bound,", "low, reaches = bound + 1,"), KEPT),
)  # fmt: skip
QUICK = ("a bucket too few", "a tie too few")
RIGHT = {candidates: candidates.CandidateSampler, row: row.RowReader, last_kept: last_kept.LastKept}


@pytest.mark.parametrize(
    ("mistake", "case"),
    [pytest.param(one, case, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one, case in FOUND],
)
def test_mistake_is_found(
    mistake: Mistake, case: SamplingCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_methods(RIGHT[mistake.module], spoilt(mistake, tmp_path), monkeypatch)
    compile_again(monkeypatch, host)
    with pytest.raises((AssertionError, EmulatorError)):
        emulate(case, "sm_90a", "random", seed=1)
