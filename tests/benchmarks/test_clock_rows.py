# SPDX-License-Identifier: Apache-2.0
"""The emulator's clock stays as near to measured rows as docs/emulator-clock.md says that it is."""

import subprocess
import sys

import pytest

from benchmarks.clock import __main__ as command
from benchmarks.clock.measured import MEASURED, ROWS
from benchmarks.clock.peers import flops
from emulator.clock.chips import CHIPS
from emulator.clock.machine import time_of

pytest.importorskip("cutlass")
BY_NAME = {row.name: row for row in ROWS}
CHIP = "H200"


def error(name):
    """The clock's time of a row against the GPU's."""
    row = BY_NAME[name]
    times = [time_of(one, CHIPS[CHIP]) for one in command.recorded(row, None)]
    return sum(time.microseconds for time in times) / row.microseconds - 1


@pytest.mark.parametrize("name", ["softmax 512x8192", "softmax 4096x8192", "softmax 1024x32768"])
def test_a_row_stays_within_its_error(name):
    assert abs(error(name)) < 0.1


@pytest.mark.rest
@pytest.mark.parametrize("name", ["linear held-out-deepseek-v2-lite-shared-640"])
def test_a_gemm_stays_within_its_error(name):
    assert abs(error(name)) < 0.25


def test_a_quarter_of_the_rows_is_fitted():
    fitted_rows = [row for row in ROWS if row.fitted]
    assert len(fitted_rows) <= len(MEASURED) / 4
    assert {row.chip for row in fitted_rows} == {CHIP}
    assert len(BY_NAME) == len(ROWS)
    fitted = [known for known in CHIPS[CHIP].constants.values() if known.source.startswith("fitted")]
    assert 0 < len(fitted) <= 8


@pytest.mark.rest
def test_a_published_figure_stays_within_its_error():
    """In a process of its own, which believes that it has a B200."""
    pytest.importorskip("triton", reason="quack imports Triton")
    asked = [sys.executable, "-W", "ignore", "-m", "benchmarks.clock", "--chip", "B200", "--rows", "^quack-gemm 4096"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=400, check=False)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("| quack-gemm")]
    assert abs(int(line.split("|")[4].strip().removesuffix("%"))) <= 15, done.stderr


@pytest.mark.parametrize(
    ("operator", "row", "right"),
    [
        ("flash", "hd128-h16-4x8k", 4 * 8192**2 * 128 * 16 * 4),
        ("flash", "hd128-h16-4x8k-causal", 2 * 8192**2 * 128 * 16 * 4),
        ("flash-mla", "h128-b2-k4k", 2 * 2 * 128 * 4096 * (576 + 512)),
        ("quack-gemm", "4096x512x64", 2 * 4096 * 512 * 64),
    ],
)
def test_operations_are_counted_as_publishers_count_them(operator, row, right):
    assert flops(operator, row) == right
    with pytest.raises(KeyError):
        flops(operator, "llama-8b-64")


def test_rows_that_were_kept_are_not_simulated_again(tmp_path, capsys, monkeypatch):
    row = BY_NAME["softmax 512x4096"]
    first = command.recorded(row, tmp_path)
    monkeypatch.setattr(command, "run_of", None)
    again = command.recorded(row, tmp_path)
    times = [[time_of(one, CHIPS[CHIP]).cycles for one in some] for some in (first, again)]
    assert times[0] == times[1]
    monkeypatch.setattr("sys.argv", ["clock", "--rows", "^softmax", "--keep", str(tmp_path), "--kept"])
    assert command.main() == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("| softmax 512x4096 | 4.03 |")
    assert shown[3].startswith("| mean, worst of 1 held out |")
