# SPDX-License-Identifier: Apache-2.0
"""Locust itself, in its own processes, against a server that stands in for vLLM's."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_stand_in import StandIn, serving

from loadtests import client, records
from loadtests.client import ClientError, Load, ServerGoneError
from loadtests.figures import Figures
from loadtests.scenario import Level, Scenario, load
from loadtests.stream import Failure

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIO = load("128-128").changed(prompt=12, output=6, warm_s=0.5, window_s=2.0, drain_s=5.0)


def run(server: StandIn, folder: Path, level: Level, scenario: Scenario = SCENARIO, processes: int = 1) -> Figures:
    what = Load(
        url=server.url,
        model="stand-in",
        vocabulary=500,
        detokenize=True,
        scenario=scenario,
        level=level,
        seed="7",
        processes=processes,
        folder=folder,
    )
    seen: list[int] = []
    found = client.run(what, lambda: True, lambda _, ticks: seen.append(sum(tick.sent for tick in ticks)))
    assert max(seen) > 0
    return found


def test_closed_loop(tmp_path: Path) -> None:
    """Users wait for their answers; two processes share them; every prompt is new; the server counts what we count."""
    # Long enough that a client on a busy machine can tell the time between tokens.
    with serving() as server:
        found = run(server, tmp_path, Level(users=4), SCENARIO.changed(output=60, window_s=4.0), processes=2)
    assert server.busiest == 4
    assert found.errors == {}
    assert found.client.processes == 2
    assert found.all_sent == len(server.bodies)
    assert found.all_tokens == 60 * len(server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)
    assert {len(body["prompt"]) for body in server.bodies} == {12}
    assert found.done == found.sent > 8
    # The stand-in sleeps 5 ms before each token. A machine that others keep busy makes the client the limit.
    assert (found.tpot.p50 is None) == bool(found.client.limit)
    assert found.tpot.p50 is None or 5 <= found.tpot.p50 < 50
    assert found.requests_per_s == pytest.approx(found.sent / 4.0, rel=0.4)
    assert found.output_per_s == pytest.approx(60 * found.sent / 4.0, rel=0.4)


def test_tokens_that_come_in_one_burst(tmp_path: Path) -> None:
    """Held back until the last one: their time of parsing is no time between tokens."""
    with serving("burst") as server:
        found = run(server, tmp_path, Level(users=1), SCENARIO.changed(output=60))
    assert found.errors == {}
    assert (found.tpot.p50, found.itl.p50, found.per_user) == (None, None, None)
    assert "one read with others" in found.unresolved["tpot"] or found.client.limit
    assert found.output_per_s > 0


def test_two_clients_on_one_machine(tmp_path: Path) -> None:
    """Each has its own processes."""
    folders = [tmp_path / "one", tmp_path / "two"]
    with serving() as server, ThreadPoolExecutor() as pool:
        ran = list(pool.map(lambda folder: run(server, folder, Level(users=2), processes=2), folders))
    assert [found.client.processes for found in ran] == [2, 2]
    assert all(found.errors == {} for found in ran)
    assert sum(found.all_sent for found in ran) == len(server.bodies)


def test_the_same_seed_sends_the_same_prompts(tmp_path: Path) -> None:
    prompts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with serving() as server:
            run(server, tmp_path / name, Level(users=1), SCENARIO.changed(window_s=0.5))
        prompts.append([body["prompt"] for body in server.bodies[:5]])
    assert prompts[0] == prompts[1]


def test_open_loop(tmp_path: Path) -> None:
    """Arrivals do not wait: they come at their rate although every answer takes half a second."""
    scenario = SCENARIO.changed(output=100, window_s=3.0)
    with serving() as server:
        found = run(server, tmp_path, Level(rate=20.0), scenario)
    assert found.errors == {}
    assert server.busiest > 4
    span = server.times[-1] - server.times[0]
    assert 12 < (len(server.times) - 1) / span < 30
    gaps = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    # Exponential, not even: the deviation is about the mean.
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 > 0.5 * mean


def test_errors_are_kept_apart(tmp_path: Path) -> None:
    faults = ("good", "status", "error", "cut", "short", "refuse")
    with serving(*faults) as server:
        found = run(server, tmp_path, Level(users=2))
    per_kind = len(server.bodies) // len(faults)
    wanted = {Failure.STATUS, Failure.STREAM, Failure.TRUNCATED, Failure.TOKENS, Failure.CONNECTION}
    assert set(found.errors) == {failure.value for failure in wanted}
    assert all(abs(count - per_kind) <= 1 for count in found.errors.values()), (found.errors, len(server.bodies))
    assert "503" in found.details[Failure.STATUS.value]
    assert "overloaded" in found.details[Failure.STATUS.value]
    assert "boom" in found.details[Failure.STREAM.value]
    assert found.done < found.sent
    resolved = "tpot" not in found.unresolved
    assert all((kept.share is not None) == resolved and (kept.share or 0) < 0.5 for kept in found.goodput)


def test_what_does_not_end_is_an_error_and_not_lost(tmp_path: Path) -> None:
    began = time.monotonic()
    with serving("hang") as server:
        found = run(server, tmp_path, Level(users=2), SCENARIO.changed(drain_s=1.0), processes=2)
    assert found.errors == {Failure.UNFINISHED.value: 2}
    assert found.all_tokens == 2
    assert time.monotonic() - began < 30


def test_a_server_that_ends_ends_the_load(tmp_path: Path) -> None:
    with serving() as server:
        what = Load(
            url=server.url,
            model="stand-in",
            vocabulary=500,
            detokenize=True,
            scenario=SCENARIO.changed(window_s=60.0),
            level=Level(users=1),
            seed="0",
            processes=1,
            folder=tmp_path,
        )
        with pytest.raises(ServerGoneError):
            client.run(what, lambda: len(server.bodies) < 10, lambda *_: None)


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(ClientError, match="status 1"):
        client.run(
            Load(
                url=url,
                model="",
                vocabulary=500,
                detokenize=True,
                scenario=SCENARIO,
                level=Level(users=1),
                seed="0",
                processes=1,
                folder=tmp_path,
            ),
            lambda: True,
            lambda *_: None,
        )


def locust(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--only-summary"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_by_hand() -> None:
    """Without the comparison: locust's own command sums up at its end and leaves nothing behind."""
    with serving() as server:
        done = locust("--host", server.url, "--load-seconds", "2", "-u", "2", "--scale", "0.1")
    assert done.returncode == 0, done.stderr
    # A busy machine leaves the client too late to tell it, which is then said.
    assert "TTFT ms: p50" in done.stdout or "TTFT ms: not resolved: " in done.stdout
    assert server.bodies[0]["model"] == "stand-in"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--host", "http://127.0.0.1:9", "--scenario", "none-such"], 2, "no scenario 'none-such'"),
        (["--host", "http://127.0.0.1:9", "--rate", "-1"], 2, "--rate -1.0"),
        (["--host", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 does not list its models"),
    ],
)
def test_by_hand_with_bad_input(arguments: list[str], status: int, says: str) -> None:
    done = locust(*arguments)
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr


def test_progress_is_read_while_it_is_written(tmp_path: Path) -> None:
    writer = records.Writer(tmp_path / "0-1.jsonl")
    fields: dict[str, Any] = {"cpu_s": 0.1, "late_us": [], "sent": 3, "done": 1, "failed": 0, "tokens": 9}
    writer.add("tick", at=1.0, **fields)
    writer.add("tick", at=2.0, **fields | {"sent": 4})
    (tick,) = records.last_ticks(tmp_path)
    assert (tick.at, tick.sent) == (2.0, 4)
    writer.close()
