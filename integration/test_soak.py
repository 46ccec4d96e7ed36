# SPDX-License-Identifier: Apache-2.0
"""The soak: a short one with a real server, and a test server whose faults of every kind must be detected."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from integration.environment import ROOT, device
from integration.judge import Judge, Request, requests
from integration.offline import Answer
from integration.soak import MIB, Tally, parse_options, verdict_of
from integration.streams import Streamed, at_once, body_of, stream


@pytest.mark.e2e
def test_soak(tmp_path: Path) -> None:
    """No answer is lost or wrong, memory does not grow, and the command reports this."""
    count = device().load.soak
    command = [sys.executable, "-m", "integration.soak", "--requests", str(count), "--json", str(tmp_path / "out")]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0
    result = json.loads((tmp_path / "out").read_text())
    assert (result["lost"], result["wrong"], result["faults"]) == (0, 0, [])
    assert result["right"] + result["misused"] == count
    assert result["misused"] > 0
    assert result["generated"] > count


class Faulty(BaseHTTPRequestHandler):
    """Answers as vLLM does, with the fault that the request's model names."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault, tokens = body["model"], body["max_tokens"]
        if fault == "status":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        if fault == "error event":
            self.event({"error": {"message": "engine died"}})
            return
        for token in range(tokens - (fault == "short")):
            if fault == "broken off" and token == 2:
                return
            if fault == "half an event" and token == 2:
                self.wfile.write(b'data: {"choices": [{"tok')
                return
            self.event({"choices": [{"token_ids": [token + 7], "finish_reason": None}]})
        self.event({"choices": [{"token_ids": [], "finish_reason": "abort" if fault == "aborted" else "length"}]})
        self.event({"choices": [], "usage": {"completion_tokens": tokens - (fault == "usage")}})
        if fault != "no end":
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: object) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Does not log requests."""


class FaultyServer(ThreadingHTTPServer):
    # Connections that wait to be taken: with 5, the default, a busy machine resets some of those that come at once.
    request_queue_size = 128


@pytest.fixture
def faulty() -> Iterator[str]:
    with FaultyServer(("127.0.0.1", 0), Faulty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def from_faulty(url: str, fault: str) -> Streamed:
    return stream(url, body_of((7, 8), 4, logprobs=False, model=fault), timeout_s=10)


def test_a_whole_answer(faulty: str) -> None:
    streamed = from_faulty(faulty, "none")
    assert streamed.fault(4) is None
    assert streamed.answer.tokens == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("status", "status 503"),
        ("error event", "engine died"),
        ("short", "3 tokens"),
        ("usage", "3 by usage"),
        ("aborted", "'abort'"),
        ("broken off", "broke off"),
        ("half an event", "JSONDecodeError"),
        ("no end", "broke off"),
    ],
)
def test_a_fault_is_seen(faulty: str, fault: str, says: str) -> None:
    assert says in (from_faulty(faulty, fault).fault(4) or "")


def test_nobody_listens() -> None:
    assert "Refused" in (from_faulty("http://127.0.0.1:9", "none").fault(4) or "")


def test_many_at_once_keep_their_order(faulty: str) -> None:
    calls = [lambda n=n: stream(faulty, body_of((7,), n, logprobs=False)) for n in range(1, 20)]
    answers = at_once(calls)
    assert [one.fault(n) for n, one in enumerate(answers, 1)] == [None] * len(calls)
    assert [len(one.answer.tokens) for one in answers] == list(range(1, 20))


class Scripted(Judge):
    """A judge whose engine has one answer to each request, and a fixed gap to any other answer."""

    def __init__(self, asked: list[Request], behind: float) -> None:
        self.exact = {
            one.prompt: Answer([], [], list(range(one.tokens)), [{token: -1.0} for token in range(one.tokens)])
            for one in asked
        }
        self.behind = behind

    def run(self, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> list[Answer]:
        return [Answer([-1.0 - self.behind] * (len(one) - 1), [-1.0] * (len(one) - 1), [], []) for one in prompts]


COUNT = 20


def tally_of(asked: list[Request]) -> Tally:
    """Of 20 requests: 19 right answers, one bad request, memory flat."""
    tally = Tally(misused=1, memory=[(0, 100 * MIB), (10, 200 * MIB), (20, 200 * MIB)])
    tally.answered[asked[0], tuple(range(asked[0].tokens))] = COUNT - 1
    return tally


def test_verdict() -> None:
    """Each kind of fault fails the soak, a near tie does not."""
    asked = requests(1, 8)
    other = (asked[0], tuple(range(1, asked[0].tokens + 1)))
    good, far, near = tally_of(asked), Scripted(asked, behind=5.0), Scripted(asked, behind=0.0)

    def verdict(tally: Tally, judge: Judge = far, busy: str | None = None) -> tuple[int, int, int, tuple[str, ...]]:
        found = verdict_of(tally, judge, COUNT, 1.0, 64 * MIB, busy)
        return found.right, found.wrong, found.lost, found.faults

    assert verdict(good) == (COUNT - 1, 0, 0, ())
    differs = tally_of(asked)
    differs.answered[asked[0], tuple(range(asked[0].tokens))] -= 1
    differs.answered[other] += 1
    assert verdict(differs, near) == (COUNT - 1, 0, 0, ())
    right, wrong, lost, faults = verdict(differs)
    assert (right, wrong, lost) == (COUNT - 2, 1, 0)
    assert "wrong: " in faults[0]
    missing = tally_of(asked)
    missing.answered[asked[0], tuple(range(asked[0].tokens))] -= 2
    missing.lost.append("the stream broke off")
    assert verdict(missing)[2:] == (2, ("lost: the stream broke off", "1 requests never ended"))
    mistreated = tally_of(asked)
    mistreated.mistreated.append("no choices: 200")
    assert verdict(mistreated)[3] == ("misused: no choices: 200",)
    leaking = tally_of(asked)
    leaking.memory.append((COUNT, 300 * MIB))
    assert verdict(leaking)[3] == ("memory grew by 100 MiB after the warm-up",)
    assert verdict(good, busy="not idle")[3] == ("not idle",)


@pytest.mark.parametrize("arguments", [["--requests", "3"], ["--concurrency", "0"], ["--requests", "many"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert arguments[1] in capsys.readouterr().err
