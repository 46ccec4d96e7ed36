# SPDX-License-Identifier: Apache-2.0
"""The process of one backend: `python -m PACKAGE.engine.worker FOLDER` starts the engine of FOLDER/job.json.

It then runs what the parent appends to FOLDER/orders, and appends each event to FOLDER/events at once. Both files have
one JSON value on each line. An order is a scenario and the number of a run, 0 for the warm-up; null ends the process.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .extension import WorkerFacts, objection
from .scenarios import SAMPLING, Figure, Scenario, prompts, rates

ORDER_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Job:
    """An engine and the scenarios to run.

    Attributes:
        engine: arguments of vllm.LLM.
        vocabulary: the size of the vocabulary that prompts are drawn from.
        seed: the seed of the prompts.
    """

    backend: str
    engine: dict[str, Any]
    scenarios: list[Scenario]
    vocabulary: int
    seed: int = 0

    def to_json(self) -> str:
        scenarios = [asdict(scenario) | {"figure": scenario.figure.name} for scenario in self.scenarios]
        return json.dumps(asdict(self) | {"scenarios": scenarios})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        scenarios = [Scenario(**one | {"figure": Figure[one["figure"]]}) for one in fields.pop("scenarios")]
        return cls(scenarios=scenarios, **fields)


def new_entries(path: Path, seen: int) -> list[Any]:
    """The JSON values on the lines after the first `seen`, without an unfinished last line."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines[seen:]]


def orders(path: Path, parent: int) -> Iterator[tuple[str, int]]:
    """Yields orders as they come, until the null, or until the parent's process is gone."""
    seen = 0
    while os.getppid() == parent:
        for order in new_entries(path, seen):
            if order is None:
                return
            seen += 1
            yield order[0], order[1]
        time.sleep(ORDER_POLL_S)


class Events:
    """Appends events to a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.monotonic()

    def add(self, event: str, **fields: Any) -> None:
        """Appends an event, with the seconds since this object was made."""
        entry = {"event": event, "at_s": round(time.monotonic() - self.began, 2), **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def generate(llm: Any, prompts: list[list[int]], output: int, sampled: bool = False) -> float:
    """Generates `output` tokens for each prompt; returns the seconds.

    Raises:
        RuntimeError: a request got another number of tokens.
    """
    from vllm import SamplingParams

    choice = SAMPLING if sampled else {"temperature": 0}
    sampling = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, **choice)
    began = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    given = [len(request.outputs[0].token_ids) for request in done]
    if given != [output] * len(prompts):
        raise RuntimeError(f"{len(prompts)} requests of {output} tokens got {sorted(set(given))}")
    return seconds


@dataclass
class Measurement:
    """The runs of one scenario.

    Attributes:
        seconds: the timed runs.
        first_seconds: for Figure.DECODE, runs of the same prompts that end with the first token.
    """

    llm: Any
    scenario: Scenario
    job: Job
    events: Events
    warm_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)

    def run(self, turn: int) -> None:
        """Runs the warm-up, which is turn 0, or a timed run."""
        scenario = self.scenario
        if turn == 0:
            asked = self.prompts(scenario.warm_requests, turn)
            self.warm_seconds = self.timed("warm-up", asked, scenario.warm_output)
            return
        asked = self.prompts(scenario.requests, turn)
        if scenario.figure is Figure.DECODE:
            # After this run the prefix cache contains the prompts.
            self.timed("prompts", asked, 1)
            self.first_seconds.append(self.timed("first token", asked, 1))
        self.seconds.append(self.timed("timed", asked, scenario.output))

    def prompts(self, count: int, turn: int) -> list[list[int]]:
        """Of no other turn or scenario: the prefix cache has no hits."""
        seed = f"{self.scenario.id} {self.job.seed} {turn}"
        return prompts(count, self.scenario.prompt, self.job.vocabulary, seed)

    def timed(self, kind: str, asked: list[list[int]], output: int) -> float:
        seconds = generate(self.llm, asked, output, self.scenario.sampled)
        self.events.add("run", scenario=self.scenario.id, kind=kind, seconds=seconds)
        return seconds

    def report(self) -> None:
        self.events.add(
            "result",
            scenario=self.scenario.id,
            unit=self.scenario.figure.value,
            rates=rates(self.scenario, self.seconds, self.first_seconds),
            seconds=self.seconds,
            first_token_seconds=self.first_seconds,
            warm_seconds=self.warm_seconds,
        )


def obey(asked: Iterator[tuple[str, int]], llm: Any, job: Job, events: Events) -> None:
    """Runs all orders. A scenario that fails is reported and not continued; if the engine is dead, the process ends.

    A scenario's result is reported after its last run, or at the end of the orders.
    """
    scenarios = {scenario.id: scenario for scenario in job.scenarios}
    unfinished: dict[str, Measurement] = {}
    failed = set()
    for name, turn in asked:
        if name not in failed:
            try:
                unfinished.setdefault(name, Measurement(llm, scenarios[name], job, events)).run(turn)
            except Exception as error:  # an engine may raise anything
                failed.add(name)
                del unfinished[name]
                events.add("error", scenario=name, message=message(error))
                if "EngineDead" in type(error).__name__:
                    raise
            else:
                if turn == scenarios[name].timed_runs:
                    unfinished.pop(name).report()
        events.add("done", scenario=name)
    for measurement in unfinished.values():
        if measurement.seconds:
            measurement.report()


def main() -> None:
    folder, parent = Path(sys.argv[1]), os.getppid()
    events = Events(folder / "events")
    job = Job.from_json((folder / "job.json").read_text())
    try:
        from vllm import LLM

        events.add("imported")
        extension = f"{WorkerFacts.__module__}.{WorkerFacts.__qualname__}"
        llm = LLM(attention_backend=job.backend, worker_extension_cls=extension, **job.engine)
        facts = llm.collective_rpc("attention_facts")[0]
    except Exception as error:
        events.add("failed", message=message(error))
        raise
    events.add("ready", facts=facts)
    refused = objection(job.backend, facts["served_by"])
    if refused:
        events.add("failed", message=refused)
        return
    obey(orders(folder / "orders", parent), llm, job, events)
    events.add("compiled", **llm.collective_rpc("compile_facts")[0])


def message(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


if __name__ == "__main__":
    main()
