# SPDX-License-Identifier: Apache-2.0
"""The figures of a load: rates in a window, latency percentiles, goodput, and whether the client was the limit."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from loadtests.records import Process, Tick
from loadtests.scenario import MLPERF, Limits
from loadtests.stream import Sample

PERCENTS = (50, 90, 99)
BINS = 20  # histogram bins for each factor of ten; a bin is 12 % wide
# A client process that uses more than this share of a core has an event loop that falls behind.
BUSY = 0.9
# A latency is resolved if the client's event loop is late by at most this share of the latency.
LATE_SHARE = 0.2
# If more than this share of an answer's chunks shared a socket read with others, the time between tokens is unknown.
TOGETHER_SHARE = 0.5
# The client's time between tokens must be at least this share of the server's; it cannot really be much shorter.
SEEN_SHARE = 0.5
# Seconds between the client's samples of its event loop's lateness.
NAP_S = 0.01


@dataclass(frozen=True)
class Window:
    """The measured part of a load, in seconds of the monotonic clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


@dataclass(frozen=True)
class Spread:
    """Percentiles of values; None if there are no values.

    Attributes:
        n: the number of values.
    """

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Goodput:
    """The requests sent in the window that met the limits.

    Attributes:
        per_s: their number divided by the window's seconds; None if the time between tokens is not resolved.
        share: their share of all requests sent in the window, including failed ones; None if that is unknown.
    """

    name: str
    ttft_ms: float
    tpot_ms: float
    per_s: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class Health:
    """The state of the client in the window.

    Attributes:
        busy: the share of a core that its busiest process used.
        late_ms: p99 of the event loops' lateness, weighted by time, so that a stall counts by its length.
        limit: why the client, and not the server, limited the load; empty if it did not.
    """

    processes: int
    busy: float
    late_ms: float
    limit: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of a load at one level.

    Attributes:
        sent, done: the requests sent in the window, and how many of them got a complete answer.
        requests_per_s: complete answers that ended in the window, per second.
        output_per_s, input_per_s: tokens that arrived in the window, and prompt tokens of answers that began in it,
            per second.
        ttft, tpot, itl, e2e: milliseconds, for good requests sent in the window: time to the first token, mean time
            between a request's tokens, time between chunks, time to the last token. Empty if not resolved.
        histograms: name of a latency -> bin -> number of values, see `histogram`.
        unresolved: name of a latency that the client could not resolve -> why.
        per_user: tokens/s of one user: 1000 / median TPOT.
        errors: kind -> number of requests in the whole load, including the warm-up.
        details: kind -> the message of the first error.
        all_sent, all_tokens: requests and tokens of the whole load.
    """

    window_s: float
    sent: int
    done: int
    requests_per_s: float
    output_per_s: float
    input_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    histograms: dict[str, dict[int, int]]
    unresolved: dict[str, str]
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
    """A percentile of sorted values, with linear interpolation."""
    position = (len(values) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0, None, None, None, None)
    percentiles = (percentile(ordered, percent) for percent in PERCENTS)
    return Spread(len(ordered), sum(ordered) / len(ordered), *percentiles)


def histogram(values: Iterable[float]) -> dict[int, int]:
    """Bin -> number of positive values in it. Bin b covers 10^(b / BINS) to 10^((b + 1) / BINS)."""
    return dict(sorted(Counter(math.floor(BINS * math.log10(value)) for value in values if value > 0).items()))


def window_of(processes: Sequence[Process], warm_s: float, window_s: float | None = None) -> Window:
    """The window that begins `warm_s` after the last process has started.

    Args:
        window_s: its length; None for the time until the first process stopped.

    Raises:
        ValueError: the load did not last until the window.
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
    """The tokens of an answer, complete or not, that arrived in the window."""
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


def goodput(sent: Sequence[Sample], window: Window, limits: Limits, resolved: bool = True) -> Goodput:
    """The requests within the limits.

    Args:
        resolved: whether the time between tokens is resolved.
    """
    if not resolved:
        return Goodput(limits.name, limits.ttft_ms, limits.tpot_ms, None, None)
    good = sum(keeps(sample, limits) for sample in sent)
    share = good / len(sent) if sent else None
    return Goodput(limits.name, limits.ttft_ms, limits.tpot_ms, good / window.seconds, share)


def busy_share(ticks: Sequence[Tick]) -> float:
    """Processor time divided by elapsed time, between the first and the last tick."""
    if len(ticks) < 2:
        return 0.0
    return (ticks[-1].cpu_s - ticks[0].cpu_s) / (ticks[-1].at - ticks[0].at)


def lateness(ticks: Iterable[Tick]) -> float:
    """p99 of the event loop's lateness in ms, weighted by time.

    The weights matter: a stall of seconds is one sample among hundreds, but everything that arrives meanwhile waits.
    """
    naps = sorted(late_us / 1e6 for tick in ticks for late_us in tick.late_us)
    left = 0.99 * sum(NAP_S + late for late in naps)
    for late in naps:
        left -= NAP_S + late
        if left <= 0:
            return 1000 * late
    return 0.0


def blurred(late_ms: float, name: str, time_ms: float | None) -> str:
    """Why a client with this lateness cannot resolve a latency; empty if it can."""
    if time_ms is None or late_ms <= LATE_SHARE * time_ms:
        return ""
    return f"the client's event loop was up to {late_ms:.3g} ms late (p99), and {name} took {time_ms:.3g} ms (p50)"


def health(processes: Sequence[Process], window: Window, answer_ms: float | None) -> Health:
    """The client's state, and whether it was the limit.

    Args:
        answer_ms: median time from an answer's first token to its last. The client must be able to resolve it.
    """
    within = [[tick for tick in process.ticks if window.holds(tick.at)] for process in processes]
    busy = max(map(busy_share, within), default=0.0)
    late_ms = lateness(tick for ticks in within for tick in ticks)
    reasons = [f"a client process took {busy:.0%} of a core"] if busy > BUSY else []
    if reason := blurred(late_ms, "answers, from the first token to the last,", answer_ms):
        reasons.append(reason)
    return Health(processes=len(processes), busy=busy, late_ms=late_ms, limit="; ".join(reasons))


def unresolved_times(good: Sequence[Sample], client: Health) -> dict[str, str]:
    """Name of a latency that the client could not resolve -> why."""
    if client.limit:
        why = f"the client was the limit: {client.limit}"
        return {"tpot": why, "itl": why}
    found: dict[str, str] = {}
    together = spread(share for sample in good if (share := sample.together) is not None).p50
    if together is not None and together > TOGETHER_SHARE:
        burst = f"tokens came in bursts: {together:.0%} of an answer's pieces (p50) came in one read with others"
        found |= {"tpot": burst, "itl": burst}
    elif gaps := blurred(client.late_ms, "the time between two pieces", spread(gaps_of(good)).p50):
        found["itl"] = gaps
    if first := blurred(client.late_ms, "the first token", spread(sample.ttft_ms for sample in good).p50):
        found["ttft"] = first
    return found


def gaps_of(samples: Iterable[Sample]) -> Iterator[float]:
    """The milliseconds between the chunks of answers."""
    return ((b - a) / 1000 for sample in samples for a, b in pairwise(sample.at_us))


def summarize(processes: Sequence[Process], window: Window, limits: Sequence[Limits] = MLPERF) -> Figures:
    """The figures of a load in a window."""
    samples = [sample for process in processes for sample in process.samples]
    sent = [sample for sample in samples if window.holds(sample.sent)]
    good = [sample for sample in sent if not sample.failure]
    began = [s for s in samples if s.at_us and window.holds(s.sent + s.at_us[0] / 1e6)]
    ended = [s for s in samples if not s.failure and window.holds(s.sent + s.at_us[-1] / 1e6)]
    client = health(processes, window, spread(s.answer_ms for s in good if len(s.at_us) > 1).p50)
    unresolved = unresolved_times(good, client)
    values = {
        "ttft": [sample.ttft_ms for sample in good],
        "tpot": [value for sample in good if (value := sample.tpot_ms) is not None],
        "itl": list(gaps_of(good)),
        "e2e": [sample.e2e_ms for sample in good],
    }
    resolved = {name: [] if name in unresolved else found for name, found in values.items()}
    tpot = spread(resolved["tpot"])
    failed = [sample for sample in samples if sample.failure]
    return Figures(
        window_s=window.seconds,
        sent=len(sent),
        done=len(good),
        requests_per_s=len(ended) / window.seconds,
        output_per_s=sum(tokens_within(sample, window) for sample in samples) / window.seconds,
        input_per_s=sum(sample.prompt_tokens for sample in began) / window.seconds,
        ttft=spread(resolved["ttft"]),
        tpot=tpot,
        itl=spread(resolved["itl"]),
        e2e=spread(resolved["e2e"]),
        histograms={name: histogram(found) for name, found in resolved.items()},
        unresolved=unresolved,
        per_user=1000 / tpot.p50 if tpot.p50 else None,
        goodput=[goodput(sent, window, one, "tpot" not in unresolved) for one in limits],
        errors=dict(Counter(sample.failure for sample in failed)),
        details={sample.failure: sample.detail for sample in reversed(failed)},
        client=client,
        all_sent=len(samples),
        all_tokens=sum(sample.tokens[-1] for sample in samples if sample.tokens),
    )


def checked(found: Figures, server_ms: float | None) -> Figures:
    """The figures, without the time between tokens if the server's own measurement contradicts it.

    Args:
        server_ms: the server's mean time between the tokens of a request; None if it does not report one.
    """
    seen = found.tpot.mean
    if seen is None or server_ms is None or seen >= SEEN_SHARE * server_ms:
        return found
    why = f"tokens came in bursts: {seen:.3g} ms apart at the client, where the server counted {server_ms:.3g} ms"
    nothing = spread([])
    return replace(
        found,
        tpot=nothing,
        itl=nothing,
        per_user=None,
        goodput=[replace(one, per_s=None, share=None) for one in found.goodput],
        histograms=found.histograms | {"tpot": {}, "itl": {}},
        unresolved=found.unresolved | {"tpot": why, "itl": why},
    )


@dataclass(frozen=True)
class Ratio:
    """The ratio of two backends, over the rounds that both ran. Above 1 the first one is better.

    Attributes:
        median, low, high: of the ratios of the rounds.
        rounds: the number of rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> str:
        """`better` or `worse` if all of at least two rounds agree, else `open`."""
        if self.rounds < 2 or self.low <= 1 <= self.high:
            return "open"
        return "better" if self.low > 1 else "worse"


def ratio(ours: Mapping[int, float | None], theirs: Mapping[int, float | None], higher: bool) -> Ratio | None:
    """Compares round by round; None if no round has both values.

    Args:
        ours, theirs: round -> value.
        higher: whether a higher value is better; if not, the ratio is inverted, so that above 1 is always better.
    """
    found = []
    for number, own in ours.items():
        other = theirs.get(number)
        if own and other:
            found.append(own / other if higher else other / own)
    return Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points, sorted by the first coordinate."""
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
        return f"no figures: {error}"
    rows = [
        f"{found.done} of {found.sent} requests in {found.window_s:.1f} s, {found.requests_per_s:.2f} requests/s, "
        f"{found.output_per_s:.1f} output and {found.input_per_s:.1f} input tokens/s (from the first request on)"
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        one: Spread = getattr(found, name)
        values = ", ".join(f"p{percent} {milliseconds(getattr(one, f'p{percent}'))}" for percent in PERCENTS)
        values += f", mean {milliseconds(one.mean)} (n = {one.n})"
        rows.append(
            f"{name.upper():4} ms: {f'not resolved: {found.unresolved[name]}' if name in found.unresolved else values}"
        )
    for kept in found.goodput:
        share = "-" if kept.share is None else f"{kept.share:.0%}"
        rate = "-" if kept.per_s is None else f"{kept.per_s:.2f}/s"
        rows.append(f"goodput, {kept.name} ({kept.ttft_ms:g}/{kept.tpot_ms:g} ms): {rate}, {share}")
    rows += [f"error: {kind}: {count} ({found.details[kind]})" for kind, count in found.errors.items()]
    if found.client.limit:
        rows.append(f"the client was the limit: {found.client.limit}; give it more --processes, or cores of its own")
    return "\n".join(rows)
