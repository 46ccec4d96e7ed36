# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole engines on a tiny model: it runs and reports the backend."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.environment import ROOT, device

pytestmark = pytest.mark.e2e


def measure(path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs the benchmark; returns its JSON lines."""
    command = [sys.executable, "-m", "benchmarks", "engine", "--model", "tiny", "--eager", *arguments]
    subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=True)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_engine(tmp_path: Path) -> None:
    scenarios = "sampled,prefill,long-b1"
    environment, engine, *results, compiled = measure(tmp_path / "out", "--backends", "dsl", "--scenarios", scenarios)
    assert environment["kind"] == "environment"
    assert engine["served_by"] == {"DSL": 2}
    assert any("dsl serves attention" in line for line in engine["startup_lines"])
    assert [result["scenario"] for result in results] == scenarios.split(",")
    assert compiled["while_serving"] == 0
    assert all(len(result["rates"]) == 2 and min(result["rates"]) > 0 for result in results)


def test_two_engines_take_turns(tmp_path: Path) -> None:
    peer = device().dense
    lines = measure(tmp_path / "out", "--backends", f"dsl,{peer}", "--scenarios", "b1,prefill", "--quick")
    results = {(line["backend"], line["scenario"]): line["value"] for line in lines if line["kind"] == "result"}
    assert set(results) == {(backend, scenario) for backend in ("dsl", peer) for scenario in ("b1", "prefill")}
    assert min(results.values()) > 0
    served = {line["backend"]: line["served_by"] for line in lines if line["kind"] == "engine"}
    assert served == {"dsl": {"DSL": 2}, peer: {peer: 2}}
    assert all(line["while_serving"] == 0 for line in lines if line["kind"] == "compiled")


def test_server_of_a_peer(tmp_path: Path) -> None:
    """The other half: a server, with one of vLLM's own backends."""
    backend = device().dense
    _, engine, result = measure(tmp_path / "out", "--backends", backend, "--serve", "--concurrent", "8")
    assert engine["served_by"] == {backend: 2}
    assert (result["scenario"], result["errors"]) == ("serve-8", 0)
    assert result["value"] > 0
