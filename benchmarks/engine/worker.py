# SPDX-License-Identifier: Apache-2.0
"""The process of one backend: `python -m PACKAGE.engine.worker FOLDER` runs FOLDER/job.json.

It appends each event to FOLDER/events at once, one JSON object on each line.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .extension import WorkerFacts, objection
from .scenarios import SAMPLING, Figure, Scenario, prompts, rates


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


def measure(llm: Any, scenario: Scenario, job: Job, events: Events) -> None:
    def requests(count: int, turn: int) -> list[list[int]]:
        return prompts(count, scenario.prompt, job.vocabulary, job.seed * 1000 + turn)

    def run(kind: str, asked: list[list[int]], output: int) -> float:
        seconds = generate(llm, asked, output, scenario.sampled)
        events.add("run", scenario=scenario.id, kind=kind, seconds=seconds)
        return seconds

    warm = run("warm-up", requests(scenario.warm_requests, 0), scenario.warm_output)
    seconds, first_seconds = [], []
    for turn in range(1, scenario.timed_runs + 1):
        asked = requests(scenario.requests, turn)
        if scenario.figure is Figure.DECODE:
            # After this run the prefix cache contains the prompts.
            run("prompts", asked, 1)
            first_seconds.append(run("first token", asked, 1))
        seconds.append(run("timed", asked, scenario.output))
    events.add(
        "result",
        scenario=scenario.id,
        unit=scenario.figure.value,
        rates=rates(scenario, seconds, first_seconds),
        seconds=seconds,
        first_token_seconds=first_seconds,
        warm_seconds=warm,
    )


def attempt(llm: Any, scenario: Scenario, job: Job, events: Events) -> None:
    """Measures a scenario, or reports its error. If the engine is dead, the process ends."""
    try:
        measure(llm, scenario, job, events)
    except Exception as error:  # an engine may raise anything
        events.add("error", scenario=scenario.id, message=message(error))
        if "EngineDead" in type(error).__name__:
            raise


def main() -> None:
    folder = Path(sys.argv[1])
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
    for scenario in job.scenarios:
        attempt(llm, scenario, job, events)
    events.add("compiled", **llm.collective_rpc("compile_facts")[0])


def message(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


if __name__ == "__main__":
    main()
