# SPDX-License-Identifier: Apache-2.0
"""Starts of servers, without a server: what each finds in its caches, and what becomes of one that does not come."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import start


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """(backend, caches that it found) of each start; a start fills all."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def stand_in(backend: str, settings: Any, folder: Path, log: Path) -> float:
        found.append((backend, tuple(sorted(path.name for path in folder.iterdir()))))
        for place in start.caches(folder).values():
            Path(place).mkdir(exist_ok=True)
        log.write_text("INFO compiling 34 kernels in 15 processes while weights load\nINFO something else\n")
        return float(len(found))

    monkeypatch.setattr(start, "seconds_until_ready", stand_in)
    return found


def test_what_each_start_finds(
    seen: list[tuple[str, tuple[str, ...]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows"
    words = ["--model", "tiny", "--backends", "FLASH_ATTN,dsl", "--rounds", "2", "--json", str(file)]
    assert start.main(words) == 0
    everything = ("dsl", "inductor", "triton", "vllm")
    turn = [("FLASH_ATTN", found) for found in ((), everything, everything)]
    turn += [("dsl", found) for found in ((), everything, ("inductor", "triton", "vllm"), everything)]
    assert seen == [("FLASH_ATTN", ()), *turn, *turn]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["seconds"] for row in rows] == [float(number) for number in range(2, 16)], "the first is not reported"
    assert rows[5]["caches"] == "without dsl kernels"
    assert rows[0]["log_lines"] == ["compiling 34 kernels in 15 processes while weights load"]
    shown = capsys.readouterr().out
    assert "dsl  caches without dsl kernels    10.5 s (median of 2)" in shown


def test_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def die(_: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        log.write_text("ValueError: no memory\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)

    monkeypatch.setattr(start, "start", die)
    assert start.main(["--model", "tiny", "--backends", "dsl"]) == 1
    assert "a server did not start: ended with status 3: ValueError: no memory" in capsys.readouterr().err
