# SPDX-License-Identifier: Apache-2.0
"""The script that fits the GEMMs' cost model to timings."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.linear import clocked, fit
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.configs import deepest, fitting
from dsl_backend.gemm.cost import COSTS, Costs
from dsl_backend.gemm.sm90 import configs as sm90
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import Dtypes, GemmSpec
from dsl_backend.runtime.target import from_arch

TARGET = dataclasses.replace(from_arch("sm_90a"), chip=from_arch("sm_90a").chips[1], gpu="timed")
SHAPES = ((70, 2240, 1736), (33, 3224, 1928), (96, 1320, 2752), (320, 3584, 8192))


def lines(costs: Costs) -> list[str]:
    """What a sweep would write on a GPU that these costs describe exactly; with a kernel that is not ours."""
    found = []
    for m, n, k in SHAPES:
        spec = GemmSpec(n=n, k=k, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
        facts = {"row": f"{m}x{n}x{k}", "m": m, "n": n, "k": k, "gated": True, "dtype": "bfloat16"}
        for config in fitting(spec, TARGET):
            one = fit.Timing("row", spec, m, config, 0.0)
            us = one.estimate_us(TARGET, costs)
            found.append(json.dumps({**facts, "us": us, "name": type(config).__name__, **dataclasses.asdict(config)}))
        found.append(json.dumps({**facts, "us": 1.0, "name": "Unfused"}))
    return found


def test_constants_are_found_again() -> None:
    """From twice and half of what they are."""
    timings = fit.timings_of(lines(COSTS))
    off = dataclasses.replace(
        COSTS,
        row_of_16_ns=COSTS.row_of_16_ns / 2,
        stream_k=dataclasses.replace(COSTS.stream_k, launch_ns=2 * COSTS.stream_k.launch_ns),
    )
    assert fit.error(timings, TARGET, COSTS) == pytest.approx(0, abs=1e-9)
    assert fit.error(timings, TARGET, off) > 0.05
    found = fit.fitted(timings, TARGET, off, ("rows", "stream_k"))
    assert fit.error(timings, TARGET, found) < 0.02
    assert found.row_of_16_ns == pytest.approx(COSTS.row_of_16_ns, rel=0.1)
    assert found.gemm == COSTS.gemm, "of kernels that were not asked for"


def test_what_a_choice_costs() -> None:
    timings = fit.timings_of(lines(COSTS))
    assert set(fit.regrets(timings, TARGET, COSTS).values()) == {1.0}
    slow = dataclasses.replace(COSTS, stream_k=dataclasses.replace(COSTS.stream_k, launch_ns=1e-3, awaited_ns=1e-3))
    assert max(fit.regrets(timings, TARGET, slow).values()) > 1.02


def test_kinds_of_kernels() -> None:
    spec = GemmSpec(n=3584, k=8192, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
    kinds = []
    for tiles in (sm90.GEMMS[0], sm90.SWAP_AB[0], sm90.SMALL_M[0], sm90.SPLIT_K[0]):
        config = deepest(tiles, spec, TARGET.smem_bytes)
        assert config is not None
        kinds.append(fit.Timing("row", spec, 8, config, 1.0).kind)
    assert kinds == ["gemm", "swap_ab", "stream_k", "split_k"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.jsonl").write_text("\n".join(lines(COSTS)))
    monkeypatch.setattr(sys, "argv", ["fit", str(tmp_path / "sweep.jsonl"), "--of", "rows"])
    assert fit.main() == 0
    printed = capsys.readouterr().out
    assert "the choice takes 0.0 % longer than the fastest, of 4 rows" in printed
    assert "row_of_16_ns" in printed
    monkeypatch.setattr(sys, "argv", ["fit", str(tmp_path / "sweep.jsonl"), "--of", "typo"])
    with pytest.raises(SystemExit):
        fit.main()
    assert "--of has typo: gemm, swap_ab, stream_k, split_k, rows are possible" in capsys.readouterr().err


def test_times_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stream-K's and split-K's of a narrow layer, as `fit` reads them; the fastest is first."""
    pytest.importorskip("cutlass")
    file = tmp_path / "clocked.jsonl"
    both = [sm100.SmallMConfig(), sm100.SmallMConfig(num_splits=4)]
    monkeypatch.setattr(clocked, "likely", lambda problem, target, most: both[:most])
    monkeypatch.setattr(sys, "argv", ["clocked", "--shapes", "256x1024", "--rows", "8", "--json", str(file)])
    assert clocked.main() == 0
    found = fit.timings_of(file.read_text().splitlines(), "sm100")
    assert {one.kind for one in found} == {"stream_k", "split_k"}
    assert [one.us for one in found] == sorted(one.us for one in found)
    assert 1 < found[0].us < 20
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert " * " in printed[0]
    monkeypatch.setattr(sys, "argv", ["clocked", "--shapes", "typo"])
    with pytest.raises(SystemExit):
        clocked.main()
    assert "--shapes has 'typo'" in capsys.readouterr().err
