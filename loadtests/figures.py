# SPDX-License-Identifier: Apache-2.0
"""The figures of a load: rates in a window, percentiles of times, goodput, and whether the client was the limit."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtests.records import Process, Tick
from loadtests.scenario import MLPERF, Limits
from loadtests.stream import Sample

PERCENTS = (50, 90, 99)
# A process's share of a core from which locust's own event loop is known to fall behind.
BUSY = 0.9
# How late the client may look at the clock, beside the time between tokens, before it spoils the times.
LATE_SHARE, LATE_LEAST_MS = 0.2, 5.0


@dataclass(frozen=True)
class Window:
    """The measured part of a load; seconds on the monotonic clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


@dataclass(frozen=True)
class Spread:
    """Percentiles of some values; None where there are none.

    Attributes:
        n: values.
    """

    n: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Goodput:
    """Requests that kept limits.

    Attributes:
        per_s: of those sent in the window, by its seconds.
        share: of those sent in the window, failed ones included; None where none was sent.
    """

    name: str
    ttft_ms: float
    tpot_ms: float
    per_s: float
    share: float | None


@dataclass(frozen=True, kw_only=True)
class Health:
    """How the client fared in the window.

    Attributes:
        busy: share of a core that its busiest process took.
        late_ms: the 99th percentile of how late its event loops were.
        limit: why the client and not the server may be what was measured; empty where it was not.
    """

    processes: int
    busy: float
    late_ms: float
    limit: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a load at one level came to.

    Attributes:
        sent, done: requests sent in the window, and how many of these got their whole answer.
        output_per_s, input_per_s: tokens that came in the window, and prompt tokens of answers that began in it.
        ttft, tpot, itl, e2e: milliseconds, of good requests sent in the window: until the first token, between tokens
            on a request's average, between pieces, until the last token.
        per_user: tokens a second that a user sees come: 1000 over the median TPOT.
        errors: kind -> requests of the whole load, warm-up included.
        details: kind -> the first one's words.
        all_sent, all_tokens: of the whole load.
    """

    window_s: float
    sent: int
    done: int
    output_per_s: float
    input_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    per_user: float | None
    goodput: list[Goodput]
    errors: dict[str, int]
    details: dict[str, str]
    client: Health
    all_sent: int
    all_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, interpolated linearly between neighbours."""
    place = (len(values) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0, None, None, None)
    return Spread(len(ordered), *(percentile(ordered, percent) for percent in PERCENTS))


def window_of(processes: Sequence[Process], warm_s: float, window_s: float | None = None) -> Window:
    """The window that begins when all processes have been loading for a while.

    Args:
        window_s: None for all that is left until the first of them stopped.

    Raises:
        ValueError: no process loaded for so long.
    """
    started = [process.started for process in processes if process.started is not None]
    if not started:
        raise ValueError("no client process began to load")
    begin = max(started) + warm_s
    if window_s is not None:
        return Window(begin, begin + window_s)
    ends = [process.ticks[-1].at for process in processes if process.ticks]
    if not ends or min(ends) <= begin:
        raise ValueError(f"the load ended within the {warm_s:g} s of warm-up")
    return Window(begin, min(ends))


def tokens_within(sample: Sample, window: Window) -> int:
    """Tokens of an answer, whole or not, that came in the window."""
    before = total = 0
    for at_us, tokens in zip(sample.at_us, sample.tokens, strict=True):
        if window.holds(sample.sent + at_us / 1e6):
            total += tokens - before
        before = tokens
    return total


def keeps(sample: Sample, limits: Limits) -> bool:
    if sample.failure:
        return False
    tpot = sample.tpot_ms
    return sample.ttft_ms <= limits.ttft_ms and (tpot is None or tpot <= limits.tpot_ms)


def goodput(sent: Sequence[Sample], window: Window, limits: Limits) -> Goodput:
    good = sum(keeps(sample, limits) for sample in sent)
    share = good / len(sent) if sent else None
    return Goodput(limits.name, limits.ttft_ms, limits.tpot_ms, good / window.seconds, share)


def busy_share(ticks: Sequence[Tick]) -> float:
    """Processor time over time, between the first and the last of some ticks."""
    if len(ticks) < 2:
        return 0.0
    return (ticks[-1].cpu_s - ticks[0].cpu_s) / (ticks[-1].at - ticks[0].at)


def health(processes: Sequence[Process], window: Window, between_ms: float | None) -> Health:
    """Judge the client.

    Args:
        between_ms: median time between pieces, which the client must be able to tell.
    """
    within = [[tick for tick in process.ticks if window.holds(tick.at)] for process in processes]
    busy = max(map(busy_share, within), default=0.0)
    late = sorted(late_us / 1000 for ticks in within for tick in ticks for late_us in tick.late_us)
    late_ms = percentile(late, 99) if late else 0.0
    allowed = max(LATE_LEAST_MS, LATE_SHARE * (between_ms or 0.0))
    reasons = []
    if busy > BUSY:
        reasons.append(f"a client process took {busy:.0%} of a core")
    if late_ms > allowed:
        reasons.append(f"the client looked at its clock up to {late_ms:.1f} ms late (p99; {allowed:.1f} are fine)")
    return Health(processes=len(processes), busy=busy, late_ms=late_ms, limit="; ".join(reasons))


def summarize(processes: Sequence[Process], window: Window, limits: Sequence[Limits] = MLPERF) -> Figures:
    """The figures of a load in a window."""
    samples = [sample for process in processes for sample in process.samples]
    sent = [sample for sample in samples if window.holds(sample.sent)]
    good = [sample for sample in sent if not sample.failure]
    began = [s for s in samples if s.at_us and window.holds(s.sent + s.at_us[0] / 1e6)]
    tpot = spread(value for sample in good if (value := sample.tpot_ms) is not None)
    gaps = spread((b - a) / 1000 for s in good for a, b in zip(s.at_us, s.at_us[1:], strict=False))
    failed = [sample for sample in samples if sample.failure]
    return Figures(
        window_s=window.seconds,
        sent=len(sent),
        done=len(good),
        output_per_s=sum(tokens_within(sample, window) for sample in samples) / window.seconds,
        input_per_s=sum(sample.prompt_tokens for sample in began) / window.seconds,
        ttft=spread(sample.ttft_ms for sample in good),
        tpot=tpot,
        itl=gaps,
        e2e=spread(sample.e2e_ms for sample in good),
        per_user=1000 / tpot.p50 if tpot.p50 else None,
        goodput=[goodput(sent, window, one) for one in limits],
        errors=dict(Counter(sample.failure for sample in failed)),
        details={sample.failure: sample.detail for sample in reversed(failed)},
        client=health(processes, window, gaps.p50),
        all_sent=len(samples),
        all_tokens=sum(sample.tokens[-1] for sample in samples if sample.tokens),
    )


@dataclass(frozen=True)
class Ratio:
    """How many times as good ours is as theirs, over rounds that both took part in.

    Attributes:
        median, low, high: of the rounds' ratios, each of two runs of the same round.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> str:
        """`better` or `worse` where every one of several rounds says so, else `open`."""
        if self.rounds < 2 or self.low <= 1 <= self.high:
            return "open"
        return "better" if self.low > 1 else "worse"


def ratio(ours: Mapping[int, float | None], theirs: Mapping[int, float | None], higher: bool) -> Ratio | None:
    """Compare round by round; None where no round has both.

    Args:
        ours, theirs: round -> value.
        higher: whether more is better; else the ratio is turned over, so that above one is always better.
    """
    found = []
    for number, own in ours.items():
        other = theirs.get(number)
        if own and other:
            found.append(own / other if higher else other / own)
    return Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both coordinates, by the first."""
    best = -math.inf
    kept = []
    for x, y in sorted(set(points), reverse=True):
        if y > best:
            kept.append((x, y))
            best = y
    return kept[::-1]


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def text(processes: Sequence[Process], warm_s: float = 0.0, limits: Sequence[Limits] = MLPERF) -> str:
    """The figures of a load for a terminal."""
    try:
        found = summarize(processes, window_of(processes, warm_s), limits)
    except ValueError as error:
        return f"nothing to sum up: {error}"
    rows = [
        f"{found.done} of {found.sent} requests in {found.window_s:.1f} s, "
        f"{found.output_per_s:.1f} output and {found.input_per_s:.1f} input tokens/s (from the first request on)"
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        one: Spread = getattr(found, name)
        values = ", ".join(f"p{percent} {milliseconds(getattr(one, f'p{percent}'))}" for percent in PERCENTS)
        rows.append(f"{name.upper():4} ms: {values} (n = {one.n})")
    for kept in found.goodput:
        share = "-" if kept.share is None else f"{kept.share:.0%}"
        rows.append(f"goodput, {kept.name} ({kept.ttft_ms:g}/{kept.tpot_ms:g} ms): {kept.per_s:.2f}/s, {share}")
    rows += [f"error: {kind}: {count} ({found.details[kind]})" for kind, count in found.errors.items()]
    if found.client.limit:
        rows.append(f"the client is the limit: {found.client.limit}; give it more --processes, or cores of its own")
    return "\n".join(rows)
