# SPDX-License-Identifier: Apache-2.0
"""The emulator's clock stays as near to measured rows as docs/emulator-clock.md says that it is."""

import pytest

from benchmarks.clock import __main__ as command
from benchmarks.clock.measured import CHIP, ROWS
from emulator.clock.chips import CHIPS
from emulator.clock.machine import time_of

pytest.importorskip("cutlass")
BY_NAME = {row.name: row for row in ROWS}


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
    assert sum(row.fitted for row in ROWS) <= len(ROWS) / 4
    assert len(BY_NAME) == len(ROWS)
    fitted = [known for known in CHIPS[CHIP].constants.values() if known.source.startswith("fitted")]
    assert 0 < len(fitted) <= 8


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
