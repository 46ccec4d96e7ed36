# SPDX-License-Identifier: Apache-2.0
"""tools/compare_speed.py: what is slower, missing or failed is told, with the exit status."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import command
from tools import compare_speed
from tools.compare_speed import Time, Times

DECODE, SOFTMAX = ("decode", "a"), ("softmax", "b")
ROOT = Path(__file__).resolve().parent.parent


def test_the_twelve_rows_exist() -> None:
    """A row that is renamed must be renamed there."""
    cases = {name: [case.id for case in operator.cases()] for name, operator in command.operators().items()}
    found = {name: [id for id in cases[name] if re.search(pattern, id)] for name, pattern in compare_speed.ROWS.items()}
    assert all(found.values()), found
    assert sum(map(len, found.values())) == 12


def test_a_slower_kernel_is_told() -> None:
    old: Times = {DECODE: Time(10, 5), SOFTMAX: Time(4, 5)}
    new: Times = {DECODE: Time(10.2, 5), SOFTMAX: Time(4.02, 50)}
    assert compare_speed.problems(old, new, 0.01) == ["decode a: 1.020 times the old time, more than 1.01"]
    assert not compare_speed.problems(old, new, 0.03)
    assert compare_speed.table(old, new)[2].startswith("| decode | a | 10.00 | 10.20 | 1.020 | 5.0 | 5.0 | 1.00 |")


def test_a_row_of_one_checkout_is_told() -> None:
    assert compare_speed.problems({DECODE: Time(1, 1)}, {}, 0.01) == ["decode a: in one checkout only"]


def test_rows_without_a_time_are_left_out() -> None:
    cell = {"status": "ok", "median_us": 2.0, "launch_us": 7.0}
    row = {"kind": "row", "operator": "decode", "id": "a", "cells": [cell]}
    failed = {**row, "id": "b", "cells": [{"status": "error"}]}
    text = "\n".join(map(json.dumps, [{"kind": "environment"}, row, failed]))
    assert compare_speed.times_of(text) == {DECODE: Time(2.0, 7.0)}


def test_the_smallest_of_all_rounds_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def measure(checkout: Path, rows: object, options: object) -> Times:
        order.append(checkout.name)
        return {DECODE: Time(10 - len(order), len(order))}

    monkeypatch.setattr(compare_speed, "measure", measure)
    old, new = compare_speed.in_turn(Path("old"), Path("new"), {}, [], 2)
    assert order == ["old", "new", "new", "old"]
    assert (old, new) == ({DECODE: Time(6, 1)}, {DECODE: Time(7, 2)})


def test_this_checkout_beside_itself_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rounds", "1", "--tolerance", "100", "--rows", "softmax", "^tiny-3x40$"]
    assert compare_speed.main([str(ROOT), str(ROOT), *options, "--", "--device", "cpu", "--seconds", "0.01"]) == 0
    assert "| softmax | tiny-3x40 |" in capsys.readouterr().out


def test_a_failed_bench_is_told() -> None:
    with pytest.raises(SystemExit, match=r"bench softmax failed with status \d"):
        compare_speed.measure(ROOT, {"softmax": "^no-such-row$"}, ["--device", "cpu"])


def test_a_folder_without_a_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_speed.main([str(tmp_path), str(ROOT)])
    assert "name a checkout's folder" in capsys.readouterr().err
