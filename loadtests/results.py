# SPDX-License-Identifier: Apache-2.0
"""Reads the lines of results.jsonl into a table: scenario, level, backend, round -> figures."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.figures import Ratio, ratio
from loadtests.scenario import Level, Scenario

Record = dict[str, Any]
OURS = "dsl"


@dataclass(frozen=True)
class Metric:
    """A metric of a run.

    Attributes:
        of: computes the value from the figures of a run (figures.Figures as JSON), or None.
        higher: whether a higher value is better.
    """

    name: str
    of: Callable[[Record], float | None]
    higher: bool


def percentile_of(name: str, percent: int) -> Callable[[Record], float | None]:
    def value(figures: Record) -> float | None:
        found: float | None = figures.get(name, {}).get(f"p{percent}")
        return found

    return value


REQUESTS = Metric("requests/s", lambda figures: figures.get("requests_per_s"), higher=True)
INPUT = Metric("input tokens/s", lambda figures: figures.get("input_per_s"), higher=True)
PER_DEVICE = Metric("tokens/s", lambda figures: figures["output_per_s"] / figures["devices"], higher=True)
PER_USER = Metric("tokens/s/user", lambda figures: figures.get("per_user"), higher=True)
TTFT = Metric("TTFT p50", percentile_of("ttft", 50), higher=False)
TPOT = Metric("TPOT p50", percentile_of("tpot", 50), higher=False)
COMPARED = (PER_DEVICE, TTFT, TPOT)


def limit_of(figures: Record) -> str:
    """Why the client was the limit of a run; empty if it was not."""
    found: str = figures.get("client", {}).get("limit", "")
    return found


@dataclass(frozen=True)
class Value:
    """The median and range of a metric over rounds."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass
class Cell:
    """The results of one backend at one level of one scenario.

    Attributes:
        figures: round -> the run's figures, including `devices`.
        server: round -> the changes of the server's counters during the run.
    """

    figures: dict[int, Record] = field(default_factory=dict)
    server: dict[int, Record] = field(default_factory=dict)

    @property
    def sound(self) -> dict[int, Record]:
        """The figures of the rounds in which the client was not the limit."""
        return {number: figures for number, figures in self.figures.items() if not limit_of(figures)}

    def rounds(self, of: Callable[[Record], float | None]) -> dict[int, float | None]:
        """The metric in each sound round. Rounds that the client limited are not compared."""
        return {number: of(figures) for number, figures in self.sound.items()}

    def value(self, of: Callable[[Record], float | None]) -> Value | None:
        """Median and range over sound rounds, or over all rounds if none is sound; None if no round has the metric."""
        found = [value for figures in (self.sound or self.figures).values() if (value := of(figures)) is not None]
        return Value(statistics.median(found), min(found), max(found), len(found)) if found else None

    @property
    def sent(self) -> int:
        """The number of requests sent in the windows of all rounds."""
        return sum(figures.get("sent", 0) for figures in self.figures.values())

    @property
    def limited(self) -> bool:
        """Whether the client was the limit in every round. Then rates are lower bounds and times are upper bounds."""
        return not self.sound

    @property
    def unresolved(self) -> dict[str, str]:
        """Name of a latency that no round resolved -> the reason in the last round."""
        reasons: dict[str, str] = {}
        for figures in self.figures.values():
            reasons |= figures.get("unresolved", {})
        return {name: why for name, why in reasons.items() if self.value(percentile_of(name, 50)) is None}

    def histogram(self, name: str) -> dict[int, int]:
        """Bin -> number of values over all sound rounds (see figures.histogram)."""
        total: Counter[int] = Counter()
        for figures in self.sound.values():
            # The keys of JSON objects are strings.
            total.update({int(place): count for place, count in figures.get("histograms", {}).get(name, {}).items()})
        return dict(sorted(total.items()))

    @property
    def errors(self) -> dict[str, int]:
        """Kind -> number of requests over all rounds."""
        total: dict[str, int] = {}
        for figures in self.figures.values():
            for kind, count in figures.get("errors", {}).items():
                total[kind] = total.get(kind, 0) + count
        return total


@dataclass
class Results:
    """The results of a comparison.

    Attributes:
        environment: the first line.
        cells: (scenario, level, backend) -> its results.
        servers, failed: lines of these kinds.
        end: the last line; None if the run has not ended.
    """

    environment: Record
    cells: dict[tuple[str, Level, str], Cell] = field(default_factory=dict)
    servers: list[Record] = field(default_factory=list)
    failed: list[Record] = field(default_factory=list)
    end: Record | None = None

    @property
    def scenarios(self) -> list[Scenario]:
        return [Scenario.model_validate(fields) for fields in self.environment["scenarios"]]

    @property
    def backends(self) -> list[str]:
        names: list[str] = self.environment["backends"]
        return names

    @property
    def ours(self) -> str | None:
        """The backend that is compared with the others: dsl, or the first of the servers that already ran."""
        first = self.backends[0] if self.environment.get("urls") else None
        return next((name for name in self.backends if name.lower() == OURS), first)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.backends if name != self.ours]

    def levels(self, scenario: str) -> list[Level]:
        """The backends that have figures."""
        found = {level for name, level, _ in self.cells if name == scenario}
        return sorted(found, key=lambda level: (level.rate, level.users))

    def doubtful(self, scenario: str, level: Level, peer: str) -> bool:
        """Whether there is no ratio because the client was the limit in every round of one of the two."""
        cells = [self.cells.get((scenario, level, name or "")) for name in (self.ours, peer)]
        return any(cell is not None and cell.limited for cell in cells)

    def ratio(self, scenario: str, level: Level, peer: str, metric: Metric) -> Ratio | None:
        """The ratio of dsl and a peer; None if no round has both."""
        ours, theirs = (self.cells.get((scenario, level, name or "")) for name in (self.ours, peer))
        if ours is None or theirs is None:
            return None
        return ratio(ours.rounds(metric.of), theirs.rounds(metric.of), metric.higher)


def gather(records: Sequence[Record]) -> Results:
    """Sorts a run's lines into Results.

    Raises:
        ValueError: the first line is not of kind `environment`.
    """
    if not records or records[0].get("kind") != "environment":
        raise ValueError("the first line is not of kind `environment`: loadtests.compare did not write this file")
    results = Results(records[0])
    for record in records[1:]:
        kind = record["kind"]
        if kind == "run":
            key = (record["scenario"], Level(**record["level"]), record["backend"])
            cell = results.cells.setdefault(key, Cell())
            cell.figures[record["round"]] = {**record["figures"], "devices": record["devices"]}
            cell.server[record["round"]] = record.get("server", {})
        elif kind == "server":
            results.servers.append(record)
        elif kind == "failed":
            results.failed.append(record)
        elif kind == "end":
            results.end = record
    return results


def read(path: Path) -> list[Record]:
    """The lines of a file, without an unfinished last line."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
