# SPDX-License-Identifier: Apache-2.0
"""Streams become samples, and samples become figures: against values worked out by hand."""

import json
from pathlib import Path

import pytest

from loadtests import records
from loadtests.figures import (
    Window,
    checked,
    frontier,
    histogram,
    keeps,
    lateness,
    percentile,
    ratio,
    spread,
    summarize,
    text,
    tokens_within,
    window_of,
)
from loadtests.records import Process, Tick, Writer
from loadtests.scenario import Limits
from loadtests.stream import Failure, Reader, Sample

STRICT = Limits(name="strict", ttft_ms=100, tpot_ms=10)


def piece(tokens: int | None, prompt: int = 3, choices: bool = True, **more: object) -> bytes:
    body: dict[str, object] = {"choices": [{"text": "x"}] if choices else [], **more}
    if tokens is not None:
        body["usage"] = {"completion_tokens": tokens, "prompt_tokens": prompt}
    return b"data: " + json.dumps(body).encode() + b"\r\n"


def answer(lines: list[bytes], output: int = 4, prompt_tokens: int | None = 3) -> Sample:
    """A stream that begins 100 ms after its request, with a line every 10 ms."""
    sample = Sample(sent=50.0, output=output)
    reader = Reader(sample, prompt_tokens)
    for index, line in enumerate(lines):
        reader.line(50.1 + 0.01 * index, line)
    reader.finish()
    return sample


DONE = b"data: [DONE]\n"


def test_tokens_are_counted_by_usage_and_not_by_pieces() -> None:
    """Three tokens in the second piece, as with drafts that were accepted."""
    sample = answer([piece(1), b"\n", piece(4), piece(4, choices=False), DONE])
    assert (sample.failure, sample.tokens, sample.at_us) == ("", [1, 4], [100_000, 120_000])
    assert sample.ttft_ms == 100
    assert sample.e2e_ms == 120
    assert sample.tpot_ms == pytest.approx(20 / 3)
    assert sample.prompt_tokens == 3


def test_a_server_that_counts_at_the_end_alone() -> None:
    sample = answer([piece(None), piece(None), piece(4, choices=False), DONE])
    assert (sample.failure, sample.tokens) == ("", [2, 4])


def test_a_single_token_has_no_time_between() -> None:
    sample = answer([piece(1), DONE], output=1)
    assert (sample.failure, sample.tpot_ms) == ("", None)
    assert keeps(sample, STRICT)


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        ([piece(1), piece(4)], Failure.TRUNCATED),
        ([], Failure.TRUNCATED),
        ([piece(1), piece(3), DONE], Failure.TOKENS),
        ([piece(1), piece(5), DONE], Failure.TOKENS),
        ([piece(1), piece(4, prompt=2), DONE], Failure.TOKENS),
        ([DONE], Failure.TOKENS),
        ([piece(1), b'data: {"error": {"message": "boom"}}\n', DONE], Failure.STREAM),
        ([b"data: {half\n", DONE], Failure.STREAM),
    ],
)
def test_failures_are_kept_apart(lines: list[bytes], failure: Failure) -> None:
    assert answer(lines).failure == failure.value


def test_percentiles() -> None:
    assert percentile([10, 20, 30, 40, 50], 50) == 30
    assert percentile([10, 20, 30, 40, 50], 90) == pytest.approx(46)
    assert percentile([7], 99) == 7
    found = spread([3, 1, 2])
    assert (found.n, found.p50, found.p90, found.p99) == (3, 2, pytest.approx(2.8), pytest.approx(2.98))
    assert spread([]).p50 is None


def made(sent: float, first_ms: float, gap_ms: float, count: int, failure: str = "", prompt: int = 5) -> Sample:
    times = [round(1000 * (first_ms + gap_ms * index)) for index in range(count)]
    return Sample(sent, count, times, list(range(1, count + 1)), prompt, failure, failure and "why")


def test_tokens_in_the_window_are_those_that_came_in_it() -> None:
    """Sent before the window, over after it: tokens at 9.5, 10.0, 10.5, 11.0 s; two of them are inside."""
    assert tokens_within(made(9.0, 500, 500, 4), Window(10.0, 11.0)) == 2


def test_summary() -> None:
    window = Window(10.0, 20.0)
    samples = [
        made(9.9, 200, 100, 3),  # sent in warm-up: tokens at 10.1, 10.2, 10.3
        made(11.0, 50, 5, 3),  # keeps both limits
        made(12.0, 150, 5, 3),  # late first token
        made(13.0, 50, 20, 3),  # slow tokens
        made(14.0, 50, 5, 2, failure="truncated stream"),
        made(15.0, 0, 0, 0, failure="connection", prompt=0),
        made(19.99, 50, 5, 3),  # sent in the window, answered after it
        made(20.5, 50, 5, 3),  # sent after it
    ]
    ticks = [Tick(at=10.0 + i, cpu_s=0.5 * i, late_us=[1000]) for i in range(10)]
    found = summarize([Process(9.0, 21.0, 8, samples, ticks)], window, [STRICT])
    assert (found.sent, found.done, found.all_sent) == (6, 4, 8)
    # 3 of warm-up's, 3 each of the good ones in time, 2 of the broken one.
    assert found.output_per_s == pytest.approx((3 + 3 + 3 + 3 + 2) / 10)
    assert found.input_per_s == pytest.approx(5 * 5 / 10)
    assert (found.ttft.n, found.ttft.p50) == (4, 50)
    assert found.ttft.p90 == pytest.approx(50 + 0.7 * 100)
    assert found.tpot.p50 == 5
    assert found.per_user == 200
    assert (found.itl.n, found.itl.p50) == (8, 5)
    assert found.e2e.p50 == pytest.approx((60 + 90) / 2)
    (kept,) = found.goodput
    assert (kept.per_s, kept.share) == (pytest.approx(0.2), pytest.approx(1 / 3))
    assert found.errors == {"truncated stream": 1, "connection": 1}
    assert found.details == {"truncated stream": "why", "connection": "why"}
    assert found.client.busy == pytest.approx(0.5)
    assert (found.client.late_ms, found.client.limit) == (1, "")


def watched(cpu: float, late_us: int) -> list[Tick]:
    """Nine seconds of a client that takes a share of a core and oversleeps alike."""
    return [Tick(at=float(i), cpu_s=cpu * i, late_us=[late_us] * 5) for i in range(10)]


# Answers that take 10 ms from the first token to the last.
@pytest.mark.parametrize(
    ("cpu", "late_us", "says"),
    [(0.95, 100, "95% of a core"), (0.2, 9000, "up to 9 ms late (p99), and answers"), (0.2, 1900, "")],
)
def test_a_client_that_is_the_limit_says_so(cpu: float, late_us: int, says: str) -> None:
    """And tells no time between tokens, no speed that a user sees and no goodput."""
    idle = [Tick(at=float(i), cpu_s=0.0, late_us=[0]) for i in range(5)]
    busy = Process(0.0, 9.0, 1, [made(1.0, 50, 5, 3)], watched(cpu, late_us))
    found = summarize([busy, Process(0.0, 9.0, 0, [], idle)], Window(0.0, 9.0))
    assert says in found.client.limit
    assert bool(found.client.limit) == bool(says)
    resolved = not says
    assert (found.tpot.p50 is not None, found.per_user is not None, bool(found.histograms["tpot"])) == (resolved,) * 3
    assert all((kept.share is not None, kept.per_s is not None) == (resolved, resolved) for kept in found.goodput)
    assert (found.unresolved.get("tpot", "").startswith("the client was the limit: ")) == (not resolved)
    # Tokens that came did come.
    assert found.output_per_s == pytest.approx(3 / 9)
    assert found.requests_per_s == pytest.approx(1 / 9)


def test_each_time_is_told_as_well_as_the_client_looks() -> None:
    """2 ms late: answers of 200 ms are resolved; gaps of 5 ms and a first token after 8 ms are not."""
    found = summarize([Process(0.0, 9.0, 1, [made(1.0, 8, 5, 41)], watched(0.2, 2000))], Window(0.0, 9.0))
    assert found.client.limit == ""
    assert set(found.unresolved) == {"itl", "ttft"}
    assert (found.tpot.p50, found.itl.p50, found.ttft.p50) == (5, None, None)
    assert "2 ms late" in found.unresolved["itl"]


def test_a_stall_counts_by_its_length() -> None:
    """Half a second of nine, in one nap of some hundred."""
    naps = [Tick(at=float(i), cpu_s=0.0, late_us=[100] * 90) for i in range(9)]
    assert lateness(naps) == pytest.approx(0.1)
    assert lateness([*naps, Tick(at=9.0, cpu_s=0.0, late_us=[500_000])]) == pytest.approx(500)


def test_bursts_tell_no_time_between_tokens() -> None:
    """All pieces in two reads, from a client that was never late: the rate is resolved, the token time is not."""
    burst = Sample(1.0, 9, [900_000] * 5 + [905_700] * 4, list(range(1, 10)), 5)
    found = summarize([Process(0.0, 9.0, 1, [burst], watched(0.1, 10))], Window(0.0, 9.0))
    assert found.client.limit == ""
    assert (found.tpot.p50, found.per_user, found.itl.p50) == (None, None, None)
    assert "88% of an answer's pieces" in found.unresolved["tpot"]
    assert (found.ttft.p50, found.output_per_s) == (900, 1)
    at_once = Sample(1.0, 3, [900_000] * 3, [1, 2, 3], 5)
    assert at_once.tpot_ms is None


@pytest.mark.parametrize(("server_ms", "resolved"), [(None, True), (9.9, True), (0.1, True), (10.5, False)])
def test_the_server_s_own_time_between_tokens(server_ms: float | None, resolved: bool) -> None:
    """5 ms at the client: where the server counted more than twice that, tokens were held back and came in bursts."""
    found = summarize([Process(0.0, 9.0, 1, [made(1.0, 50, 5, 3)], watched(0.1, 10))], Window(0.0, 9.0))
    seen = checked(found, server_ms)
    assert (seen.tpot.p50, seen.per_user) == ((5, 200) if resolved else (None, None))
    assert ("the server counted 10.5 ms" in seen.unresolved.get("tpot", "")) == (not resolved)
    assert all((kept.share is not None) == resolved for kept in seen.goodput)


def test_histogram() -> None:
    """Twenty bins for each factor of ten; their sum is the number of values."""
    assert histogram([1, 1.1, 1.13, 10, 0.5, 0.0]) == {-7: 1, 0: 2, 1: 1, 20: 1}


def test_window_begins_with_the_last_process() -> None:
    ticks = [Tick(at=30.0, cpu_s=0)]
    processes = [Process(1.0, 40.0, 0, [], ticks), Process(2.5, 40.0, 0, [], ticks)]
    assert window_of(processes, 5, 10) == Window(7.5, 17.5)
    assert window_of(processes, 5) == Window(7.5, 30.0)
    with pytest.raises(ValueError, match="within the 60 s of warm-up"):
        window_of(processes, 60)
    with pytest.raises(ValueError, match="no client process"):
        window_of([], 5, 10)


def test_a_request_without_an_end_is_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "0-1.jsonl")
    writer.add("start", at=1.0)
    writer.sample(made(2.0, 50, 5, 3))
    writer.add("tick", at=3.0, cpu_s=0.1, late_us=[5], sent=2, done=1, failed=0, tokens=3)
    writer.close()
    (process,) = records.read_all(tmp_path)
    assert process.stopped is None
    assert [sample.failure for sample in process.samples] == ["", Failure.LOST.value]
    assert process.samples[0] == made(2.0, 50, 5, 3)
    assert [tick.tokens for tick in records.last_ticks(tmp_path)] == [3]
    with (tmp_path / "0-1.jsonl").open("a") as file:
        file.write('{"kind":"tick","at":4.0')
    assert len(records.read_all(tmp_path)[0].ticks) == 1


def test_ratios_pair_rounds() -> None:
    """Round 2 has no pair; the drift between rounds 0 and 1 cancels out."""
    found = ratio({0: 110.0, 1: 55.0, 2: 70.0}, {0: 100.0, 1: 50.0}, higher=True)
    assert found is not None
    assert (found.median, found.low, found.high, found.rounds) == (pytest.approx(1.1), *[pytest.approx(1.1)] * 2, 2)
    assert found.verdict == "better"
    slower = ratio({0: 12.0, 1: 30.0}, {0: 6.0, 1: 10.0}, higher=False)
    assert slower is not None
    assert (slower.low, slower.high, slower.verdict) == (pytest.approx(1 / 3), pytest.approx(0.5), "worse")
    mixed = ratio({0: 1.0, 1: 3.0}, {0: 2.0, 1: 2.0}, higher=True)
    assert mixed is not None
    assert (mixed.median, mixed.verdict) == (1.0, "open")
    once = ratio({0: 2.0}, {0: 1.0}, higher=True)
    assert once is not None
    assert once.verdict == "open"
    assert ratio({0: None}, {0: 1.0}, higher=True) is None


def test_frontier() -> None:
    points = [(1, 10), (2, 8), (2, 7), (1.5, 7.5), (3, 1), (0.5, 9)]
    assert frontier(points) == [(1, 10), (2, 8), (3, 1)]


def test_text_for_a_terminal() -> None:
    ticks = [Tick(at=5.0, cpu_s=0.1, late_us=[100]), Tick(at=9.0, cpu_s=0.2, late_us=[100])]
    samples = [made(1.0, 50, 5, 3), made(2.0, 50, 5, 3, failure="HTTP status")]
    shown = text([Process(1.0, 9.0, 2, samples, ticks)])
    assert "1 of 2 requests in 8.0 s" in shown
    assert "0.12 requests/s" in shown
    assert "TTFT ms: p50 50, p90 50, p99 50, mean 50 (n = 1)" in shown
    assert "error: HTTP status: 1 (why)" in shown
    assert "no figures: " in text([])
