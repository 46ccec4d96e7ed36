# SPDX-License-Identifier: Apache-2.0
"""Runs one backend in child processes, as an offline engine or as a server, and yields events as records."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..processes import ROOT, child_environment, free_port, stop_group
from . import load, models
from .extension import WorkerFacts, objection
from .scenarios import Scenario
from .worker import Job, new_entries

Record = dict[str, Any]
POLL_S = 0.2
TURN_POLL_S = 0.02  # engines that run in turn wait for each other at most so long
SAY_S = 20
SERVED_RUNS = 2  # timed runs of a server's load
LOG_TAIL = 4000  # characters at the end of a failed engine's log that are kept
ERROR_LINE = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception)\b: .+")
# Log lines about the chosen backend, about whose kernels serve which layers, and about the time of each part of the
# start. "Selected" names vLLM's kernel of 8-bit linear layers, which dsl may replace.
STARTUP_LINE = re.compile(
    r"(Using \S+(?: attention)? backend.*|(?:dsl|vLLM) serves .*|Selected \S+ for \S+"
    r"|Model loading took.*|torch\.compile took.*|Graph capturing finished.*|init engine .*|GPU KV cache size.*)"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all backends of a run share.

    Attributes:
        engine: further arguments of vLLM's engine.
        eager: run without torch.compile and CUDA graphs.
        start_s: the time limit in seconds for an engine to become ready.
        scenario_s: the longest time in seconds without an event while a scenario runs.
        cache: VLLM_CACHE_ROOT of all engines. It also contains the model, whose path is part of the cache's keys.
        concurrent: the number of concurrent requests to a server.
    """

    shape: models.Shape
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    eager: bool = False
    start_s: float = 400
    scenario_s: float = 200
    cache: Path
    seed: int = 0
    concurrent: int = 64

    def write_model(self) -> Path:
        return models.write(self.shape, self.cache / "models" / self.model)

    def arguments(self) -> dict[str, Any]:
        """The engine's arguments, without the model and the backend."""
        given: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": self.shape.max_model_len,
            "max_num_seqs": 8 if self.shape.small else 256,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": True,  # different prompts share no prefix; DECODE scenarios repeat prompts
        }
        return given | ({"enforce_eager": True} if self.eager else {}) | self.engine


def arguments_of(backend: str, settings: Settings) -> dict[str, Any]:
    """The engine's arguments for a backend, which a draft model has too; without the model and the backend."""
    given = settings.arguments()
    drafts = given.get("speculative_config") or {}
    name = drafts.get("model")
    if name not in models.SHAPES:
        return given
    folder = models.write(models.SHAPES[name], settings.cache / "models" / name)
    # Without this vLLM chooses the draft model's backend by itself.
    return given | {"speculative_config": drafts | {"model": str(folder), "attention_backend": backend}}


def environment(settings: Settings, **changes: str) -> dict[str, str]:
    return child_environment(**{"VLLM_CACHE_ROOT": str(settings.cache)} | changes)


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A process group of its own can be stopped as one. It stays in this session, so ending the session ends it.
            preexec_fn=os.setpgrp,
        )


def cause(log: str, status: int | None) -> str:
    """How the process ended, and the first error in its log that is not a consequence of another, or the last line."""
    # Warnings may quote errors.
    lines = [line for line in log.splitlines() if " WARNING " not in line]
    found = [line.group() for line in map(ERROR_LINE.search, lines) if line]
    causes = [line for line in found if "Engine core initialization failed" not in line] or found
    ended = "was ended" if status is None else f"ended with status {status}"
    return f"{ended}: {causes[0] if causes else (log.strip().splitlines() or ['empty log'])[-1]}"[:600]


def startup_lines(log: str) -> list[str]:
    """The distinct lines of a log that match STARTUP_LINE."""
    return list(dict.fromkeys(line.group(1).strip()[:400] for line in STARTUP_LINE.finditer(log)))


def failure(message: str, log: str, scenario: str | None = None) -> Record:
    return {
        "event": "failed",
        "message": message,
        "log_tail": log[-LOG_TAIL:],
        "startup_lines": startup_lines(log),
        "scenario": scenario,
    }


class Engine:
    """The process of an offline engine (see worker.py).

    Args:
        folder: an empty folder for the files that are shared with the process.
        variables: further environment variables.

    Attributes:
        ready: whether the engine has started.
        ended: whether the process has ended or was given up.
    """

    def __init__(
        self, backend: str, scenarios: list[Scenario], settings: Settings, folder: Path, **variables: str
    ) -> None:
        engine = {"model": str(settings.write_model()), "disable_log_stats": True, **arguments_of(backend, settings)}
        job = Job(
            backend=backend,
            engine=engine,
            scenarios=scenarios,
            vocabulary=settings.shape.vocabulary,
            seed=settings.seed,
        )
        (folder / "job.json").write_text(job.to_json())
        self.backend, self.settings, self.folder = backend, settings, folder
        self.ready = self.failed = self.ended = False
        self.seen = self.ordered = self.done = 0
        command = [sys.executable, "-m", Job.__module__, str(folder)]
        self.process = start(command, folder / "log", environment(settings, **variables))
        self.began = self.said = self.heard = time.monotonic()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def idle(self) -> bool:
        """Whether it waits for an order, or has ended."""
        return self.ended or (self.ready and self.done == self.ordered)

    def order(self, scenario: str, turn: int) -> None:
        """Asks for a run of a scenario; 0 is the warm-up."""
        self._append([scenario, turn])

    def finish(self) -> None:
        """Asks the process to end after its orders."""
        self._append(None)

    def _append(self, order: object) -> None:
        with (self.folder / "orders").open("a") as file:
            file.write(json.dumps(order) + "\n")
        self.ordered += 1
        self.heard = self.said = time.monotonic()

    def poll(self) -> list[Record]:
        """The new events, without `done`; `failed` if the process failed or is silent for too long."""
        if self.ended:
            return []
        status = self.process.poll()
        events = [self._taken(event) for event in new_entries(self.folder / "events", self.seen)]
        self.seen += len(events)
        now = time.monotonic()
        limit = self.settings.scenario_s if self.ready else self.settings.start_s
        if events:
            self.heard = self.said = now
        if status is not None:
            self.ended = True
            if status and not self.failed:
                events.append(failure(cause(self.log, status), self.log))
        elif not self.idle and now - self.heard > limit:
            events.append(failure(f"no event for {limit:.0f} s", self.log))
            self.stop()
        elif not self.idle and now - self.said > SAY_S:
            self.said = now
            last = (self.log.splitlines() or [""])[-1]
            events.append({"event": "waiting", "at_s": now - self.began, "message": last[:150]})
        return [event for event in events if event["event"] != "done"]

    def _taken(self, event: Record) -> Record:
        name = event["event"]
        self.done += name == "done"
        self.ready |= name == "ready"
        self.failed |= name == "failed"
        if name == "ready":
            return event | {"startup_lines": startup_lines(self.log)}
        if name == "failed":
            text = self.log
            root = cause(text, None).removeprefix("was ended: ") if "Engine core" in event["message"] else ""
            return failure(f"{event['message']} {root}".strip(), text)
        return event

    def stop(self) -> None:
        self.ended = True
        # Not SIGINT, which what a shell starts in the background ignores.
        stop_group(self.process, signal.SIGTERM)


def offline(backend: str, scenarios: list[Scenario], settings: Settings, folder: Path) -> Iterator[Record]:
    """Yields the events of an engine that runs one scenario after the other."""
    engine = Engine(backend, scenarios, settings, folder)
    try:
        for scenario in scenarios:
            for turn in range(scenario.timed_runs + 1):
                engine.order(scenario.id, turn)
        engine.finish()
        for _, event in polled([engine]):
            yield event
    finally:
        engine.stop()


def polled(engines: Sequence[Engine], idle: Sequence[Engine] = ()) -> Iterator[tuple[str, Record]]:
    """Yields backends and events of all engines until those of `idle` wait for orders, by default until all ended."""
    while True:
        for engine in engines:
            for event in engine.poll():
                yield engine.backend, event
        if all(engine.idle for engine in idle) if idle else all(engine.ended for engine in engines):
            return
        time.sleep(TURN_POLL_S)


def side_by_side(
    backends: Sequence[str], scenarios: list[Scenario], settings: Settings, folder: Path, limit_s: float
) -> Iterator[tuple[str, Record]]:
    """Yields backends and events of engines that start at the same time and then run in turn, never two at once.

    Every run of a scenario is followed by the same run of the other engines, in alternating order.

    Args:
        limit_s: no further round of runs is begun if it would probably end later than this, in seconds from now.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        engines = []
        for backend in backends:
            (folder / backend).mkdir()
            # Engines that start at the same time would write the same files of vLLM's cache.
            root = str(settings.cache / "engines" / backend)
            engines.append(Engine(backend, scenarios, settings, folder / backend, VLLM_CACHE_ROOT=root))
            stack.callback(engines[-1].stop)
        yield from polled(engines, engines)
        seconds = 0.0
        for turn in range(max(scenario.timed_runs for scenario in scenarios) + 1):
            round_began = time.monotonic()
            if turn > 1 and round_began - began + seconds > limit_s:
                break
            for scenario in scenarios:
                for engine in engines[:: 1 if turn % 2 else -1]:
                    if turn <= scenario.timed_runs and not engine.ended:
                        engine.order(scenario.id, turn)
                        yield from polled(engines, [engine])
            seconds = time.monotonic() - round_began
        for engine in engines:
            engine.finish()
        yield from polled(engines)


def flag(name: str, value: object) -> list[str]:
    """An engine's argument as an option of `vllm serve`."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def serve_command(backend: str, settings: Settings, model: Path, port: int, **more: object) -> list[str]:
    """The command `vllm serve` for a model's folder; the server listens on 127.0.0.1 only."""
    options: dict[str, object] = {
        "served_model_name": load.MODEL,
        "host": "127.0.0.1",
        "port": port,
        "attention_backend": backend,
        **arguments_of(backend, settings),
        **more,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    return command + [word for name, value in options.items() for word in flag(name, value)]


def ask(url: str, body: object | None = None, timeout_s: float = 30) -> Any:
    """Sends GET, or POST if there is a body; returns the JSON of the answer, None if it is empty."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.loads(response.read() or "null")


def served(backend: str, settings: Settings, folder: Path) -> Iterator[Record]:
    """Yields the events of a server that answers concurrent streaming completions."""
    model = settings.write_model()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    extension = f"{WorkerFacts.__module__}.{WorkerFacts.__qualname__}"
    command = serve_command(backend, settings, model, port, worker_extension_cls=extension)
    log = folder / "log"
    # Development mode provides the route collective_rpc, which asks the workers for their attention backends.
    process = start(command, log, environment(settings, VLLM_SERVER_DEV_MODE="1"))
    began = said = time.monotonic()

    def text() -> str:
        return log.read_text(errors="replace")

    scenario = f"serve-{settings.concurrent}"
    try:
        while True:
            with contextlib.suppress(OSError):
                ask(f"{url}/health", timeout_s=5)
                break
            now = time.monotonic()
            if process.poll() is not None:
                yield failure(cause(text(), process.returncode), text())
                return
            if now - began > settings.start_s:
                yield failure(f"did not answer within {settings.start_s:.0f} s", text())
                return
            if now - said > SAY_S:
                said = now
                yield {"event": "waiting", "at_s": now - began, "message": (text().splitlines() or [""])[-1][:150]}
            time.sleep(POLL_S)
        ready_s = time.monotonic() - began
        facts = ask(f"{url}/collective_rpc", {"method": "attention_facts"})["results"][0]
        yield {"event": "ready", "at_s": ready_s, "facts": facts, "startup_lines": startup_lines(text())}
        refused = objection(backend, facts["served_by"])
        if refused:
            yield failure(refused, text())
            return
        longest_prompt, longest_output = (64, 8) if settings.shape.small else (4096, 512)

        def run(turn: int, longest: int) -> load.Outcome:
            requests = load.mixed(
                settings.concurrent, longest_prompt, longest, settings.shape.vocabulary, settings.seed * 1000 + turn
            )
            return load.send(url, requests)

        outcomes = []
        for turn in range(SERVED_RUNS + 1):
            outcome = run(turn, longest_output if turn else max(1, longest_output // 8))
            kind = "timed" if turn else "warm-up"
            yield {"event": "run", "scenario": scenario, "kind": kind, "seconds": outcome.seconds}
            if outcome.failed:
                message = f"{outcome.failed} of {settings.concurrent} requests failed: {'; '.join(outcome.errors[:3])}"
                yield failure(message, text(), scenario) | {"event": "error"}
                return
            outcomes += [outcome] if turn else []
        yield {
            "event": "result",
            "scenario": scenario,
            "unit": "output tokens/s",
            "rates": [outcome.rate for outcome in outcomes],
            "seconds": [outcome.seconds for outcome in outcomes],
            "errors": 0,
            "first_token_s": statistics.median(outcome.first_s for outcome in outcomes),
            "between_tokens_s": statistics.median(outcome.token_s for outcome in outcomes),
        }
    except (OSError, KeyError) as error:
        yield failure(f"{type(error).__name__}: {error}", text())
    finally:
        # Not SIGINT, which what a shell starts in the background ignores.
        stop_group(process, signal.SIGTERM)
