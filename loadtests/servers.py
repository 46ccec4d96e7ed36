# SPDX-License-Identifier: Apache-2.0
"""Starts the server of one backend, checks which backend serves its layers, and stops it."""

import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.children import LOG_TAIL, cause, startup_lines
from benchmarks.engine.extension import WorkerFacts, objection
from integration.server import Server, ServerError, running
from loadtests.exposure import DEVELOPMENT, LOCAL, ExposureError, refuse_exposed, values_of
from loadtests.subjects import Subject

MODEL = "measured"  # the served model name
# Development mode provides the route collective_rpc, which asks the workers for their attention backends.
ENVIRONMENT = {DEVELOPMENT: "1"}
# vLLM's counters that are read before and after a load, and their names in results.
COUNTERS = {
    "queried": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "generated": "vllm:generation_tokens_total",
    "tpot_s": "vllm:request_time_per_output_token_seconds_sum",
    "tpot_requests": "vllm:request_time_per_output_token_seconds_count",
}


def check_flags(flags: Sequence[str]) -> None:
    """Refuses flags that change the address that a server listens on.

    Raises:
        ExposureError: a flag would change the address.
    """
    for host in values_of(flags, "--host"):
        refuse_exposed(host, ENVIRONMENT)
        if host not in (LOCAL, "localhost"):
            raise ExposureError(f"--host {host}: these servers listen on {LOCAL}; remove --host")
    for name in ("--port", "--uds"):
        if values_of(flags, name):
            raise ExposureError(
                f"{name}: these servers are for this client only, on {LOCAL} and a free port; remove the flag"
            )


def counters_in(metrics: str) -> dict[str, float]:
    """The values of the COUNTERS that a server has, each summed over its labels."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        metric, _, value = line.rpartition(" ")
        for name, wanted in COUNTERS.items():
            if metric.partition("{")[0] == wanted:
                found[name] = found.get(name, 0.0) + float(value)
    return found


def server_tpot_ms(counted: dict[str, float]) -> float | None:
    """The server's mean time between the tokens of a request during a load; None if it has no such counter."""
    requests = counted.get("tpot_requests")
    return 1000 * counted["tpot_s"] / requests if requests and "tpot_s" in counted else None


class BackendError(RuntimeError):
    """A backend cannot be measured.

    Attributes:
        log_tail: the end of the server's log.
    """

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


@dataclass(frozen=True)
class Served:
    """A running server whose layers the backend serves.

    Attributes:
        ready_s: seconds from its start until it answered.
        facts: the facts that its workers report (WorkerFacts), and `max_model_len`.
        startup_lines: log lines about the chosen backend and the time of each part of the start.
        key: the key for the Authorization header; may be empty.
        model: the served model name.
    """

    server: Server
    command: list[str]
    ready_s: float
    facts: dict[str, Any]
    startup_lines: list[str]
    key: str = ""
    model: str = MODEL

    def alive(self) -> bool:
        return self.server.process.poll() is None

    def ended(self) -> BackendError:
        """The reason why the server ended under load, from its log."""
        log = self.server.log
        return BackendError(f"died under load: {cause(log, self.server.process.poll())}", log[-LOG_TAIL:])

    @property
    def url(self) -> str:
        return self.server.url

    def counters(self) -> dict[str, float]:
        """The values of the COUNTERS that this vLLM has."""
        return counters_in(str(self.server.ask("/metrics").body))


@contextlib.contextmanager
def serve(backend: str, subject: Subject, flags: Sequence[str], log: Path, start_s: float) -> Iterator[Served]:
    """Starts a server of one backend; it is stopped at the end of the block.

    Args:
        flags: flags of `vllm serve`.
        start_s: the time limit in seconds for the server to start.

    Raises:
        BackendError: the server did not start, or another backend serves its layers.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", subject.path]
    command += ["--served-model-name", MODEL, "--host", LOCAL, "--attention-backend", backend]
    command += ["--worker-extension-cls", f"{WorkerFacts.__module__}.{WorkerFacts.__qualname__}"]
    command += [*subject.flags, *flags]
    began = time.monotonic()
    environment = {**ENVIRONMENT, **subject.environment}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running(command, log, start_s, **environment))
        except ServerError as error:
            text = log.read_text(errors="replace")
            first = str(error).partition("\n")[0].rstrip(":")
            why = cause(text, int(first.rpartition(" ")[2])) if first.startswith("ended") else first
            raise BackendError(f"did not start: {why}", text[-LOG_TAIL:]) from None
        ready_s = time.monotonic() - began
        reply = server.ask("/collective_rpc", {"method": "attention_facts"})
        if reply.status != 200:
            raise BackendError(f"does not report its attention backends: {reply.body}", server.log[-LOG_TAIL:])
        key = (values_of(flags, "--api-key") or [""])[0]
        facts = {**reply.body["results"][0], "max_model_len": longest_of(server, key)}
        refused = objection(backend, facts["served_by"])
        if refused:
            raise BackendError(refused, server.log[-LOG_TAIL:])
        yield Served(server, command, ready_s, facts, startup_lines(server.log), key)


def longest_of(server: Server, key: str) -> int:
    """The tokens of the longest request that a server accepts."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{server.url}/v1/models", None, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            longest: int = json.load(response)["data"][0]["max_model_len"]
            return longest
    except OSError as error:
        raise BackendError(f"does not list its model: {error}", server.log[-LOG_TAIL:]) from None
