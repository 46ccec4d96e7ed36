# SPDX-License-Identifier: Apache-2.0
"""The scenarios that an engine runs, and the rate that is computed from each."""

import enum
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_ID = 16  # smaller ids are special tokens in many vocabularies
QUICK_TOKENS = 65536  # prompt tokens of a run of the quick form


class Figure(enum.Enum):
    """The rate that a scenario measures; the value is its unit in reports."""

    OUTPUT = "output tokens/s"
    INPUT = "input tokens/s"
    DECODE = "output tokens/s after the first"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A batch of requests that are submitted at once, and the rate to measure.

    Attributes:
        requests: the number of requests.
        prompt, output: tokens of each request.
        warm_requests, warm_output: requests and output tokens of the warm-up run, which is not timed.
        sampled: sample tokens with SAMPLING; otherwise decoding is greedy.
        timed_runs: the number of timed runs. The result is their median: some runs took twice as long as others.
    """

    id: str
    figure: Figure
    requests: int
    prompt: int
    output: int
    warm_requests: int
    warm_output: int
    sampled: bool = False
    timed_runs: int = 5

    def small(self) -> "Scenario":
        """The scenario at a size that a CPU runs in a second."""
        return replace(
            self,
            requests=min(self.requests, 4),
            prompt=min(self.prompt, 64),
            output=min(self.output, 8),
            warm_requests=1,
            warm_output=min(self.warm_output, 2),
            timed_runs=2,
        )


SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
B256 = Scenario(
    id="b256", figure=Figure.OUTPUT, requests=256, prompt=128, output=256, warm_requests=256, warm_output=16
)
LONG = Scenario(
    id="long-b1", figure=Figure.DECODE, requests=1, prompt=32768, output=128, warm_requests=1, warm_output=16
)
SCENARIOS = (
    Scenario(id="b1", figure=Figure.OUTPUT, requests=1, prompt=16, output=256, warm_requests=1, warm_output=32),
    replace(B256, id="b8", requests=8, warm_requests=8),
    replace(B256, id="b16", requests=16, warm_requests=16),
    replace(B256, id="b64", requests=64, warm_requests=64),
    B256,
    replace(B256, id="sampled", sampled=True),
    replace(B256, id="chat", prompt=1024, output=128),
    Scenario(
        id="prefill",
        figure=Figure.INPUT,
        requests=64,
        prompt=4096,
        output=1,
        warm_requests=8,
        warm_output=1,
        timed_runs=3,
    ),
    Scenario(id="prompt-16k", figure=Figure.INPUT, requests=1, prompt=16384, output=1, warm_requests=1, warm_output=1),
    replace(LONG, id="16k-b1", prompt=16384),
    LONG,
    replace(LONG, id="long-b32", requests=32, prompt=16384, timed_runs=2),
)


def sampled(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Greedy scenarios of generated tokens with sampling, which are measured by name alone: `b16-sampled`."""
    return [
        replace(one, id=f"{one.id}-sampled", sampled=True)
        for one in scenarios
        if one.figure is Figure.OUTPUT and not one.sampled
    ]


# Scenarios of a few seconds whose caches let two engines share a GPU of 80 GB.
QUICK = tuple(
    replace(
        scenario,
        requests=min(scenario.requests, max(1, QUICK_TOKENS // scenario.prompt)),
        output=min(scenario.output, 128),
        timed_runs=3,
    )
    for scenario in SCENARIOS
    if scenario.id != "long-b32"  # its name says how many requests it has, which are too many tokens
)


def choose(names: str | None, small: bool, quick: bool = False) -> list[Scenario]:
    """The scenarios of a comma-separated list, in the order of SCENARIOS and then those of `sampled`; by default all of
    SCENARIOS.

    Args:
        small: at a size for CPUs.
        quick: those of QUICK.

    Raises:
        ValueError: a name is unknown.
    """
    default = QUICK if quick else SCENARIOS
    known = {scenario.id: scenario for scenario in (*default, *sampled(default))}
    asked = (
        [one.id for one in default] if names is None else [name.strip() for name in names.split(",") if name.strip()]
    )
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(f"no scenario {', '.join(unknown)}: choose from {', '.join(known)}")
    chosen = [scenario for name, scenario in known.items() if name in asked]
    return [scenario.small() for scenario in chosen] if small else chosen


def prompts(requests: int, tokens: int, vocabulary: int, seed: int | str) -> list[list[int]]:
    """Prompts of random token ids. Those of different seeds differ from their first tokens on.

    An engine keeps prompts in its prefix cache: what is sent twice is computed once.
    """
    generator = random.Random(seed)
    return [generator.choices(range(FIRST_ID, vocabulary), k=tokens) for _ in range(requests)]


def rates(scenario: Scenario, seconds: Sequence[float], first_seconds: Sequence[float] = ()) -> list[float]:
    """The tokens per second of every timed run.

    Args:
        seconds: the time of each run.
        first_seconds: for Figure.DECODE, the times of runs of the same prompts that end with the first token.
    """
    if scenario.figure is Figure.INPUT:
        return [scenario.requests * scenario.prompt / one for one in seconds]
    if scenario.figure is Figure.OUTPUT:
        return [scenario.requests * scenario.output / one for one in seconds]
    prefill = statistics.median(first_seconds)
    return [scenario.requests * (scenario.output - 1) / (one - prefill) for one in seconds]
