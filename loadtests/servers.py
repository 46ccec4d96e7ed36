# SPDX-License-Identifier: Apache-2.0
"""The server of one backend: started, asked what serves its layers, stopped."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.children import LOG_TAIL, cause, told
from benchmarks.engine.extension import WorkerFacts, objection
from integration.server import Server, ServerError, running
from loadtests.subjects import Subject

MODEL = "measured"  # the name that a server gives its model
# vLLM's counters that are read before and after a load, and the names they get.
COUNTERS = {
    "queried": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "generated": "vllm:generation_tokens_total",
}


class BackendError(RuntimeError):
    """A backend cannot be measured.

    Attributes:
        log_tail: the end of its server's log.
    """

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


@dataclass(frozen=True)
class Served:
    """A server that answers and that the backend serves.

    Attributes:
        ready_s: seconds from its start until it answered.
        facts: what its workers say (WorkerFacts), and `max_model_len`.
        told: what its log says about the choice of a backend and where the start's time went.
    """

    server: Server
    command: list[str]
    ready_s: float
    facts: dict[str, Any]
    told: list[str]

    def alive(self) -> bool:
        return self.server.process.poll() is None

    def ended(self) -> BackendError:
        """Why a server that was loaded is gone, from its log."""
        log = self.server.log
        return BackendError(f"died under load: {cause(log, self.server.process.poll())}", log[-LOG_TAIL:])

    def counters(self) -> dict[str, float]:
        """Those of COUNTERS that this vLLM has."""
        found = {}
        for name, metric in COUNTERS.items():
            with contextlib.suppress(AssertionError):
                found[name] = self.server.metric(metric)
        return found


@contextlib.contextmanager
def serve(backend: str, subject: Subject, flags: Sequence[str], log: Path, start_s: float) -> Iterator[Served]:
    """A server of one backend; it is stopped at the end.

    Args:
        flags: of `vllm serve`.
        start_s: seconds until it has to answer.

    Raises:
        BackendError: it did not start, or something else serves its layers.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", subject.path]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--attention-backend", backend]
    command += ["--worker-extension-cls", f"{WorkerFacts.__module__}.{WorkerFacts.__qualname__}"]
    command += [*subject.flags, *flags]
    began = time.monotonic()
    # Development mode has the route that asks the workers what serves.
    environment = {"VLLM_SERVER_DEV_MODE": "1", **subject.environment}
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
        models = server.ask("/v1/models")
        if reply.status != 200 or models.status != 200:
            raise BackendError(f"does not say what serves: {reply.body} {models.body}", server.log[-LOG_TAIL:])
        facts = {**reply.body["results"][0], "max_model_len": models.body["data"][0]["max_model_len"]}
        refused = objection(backend, facts["served_by"])
        if refused:
            raise BackendError(refused, server.log[-LOG_TAIL:])
        yield Served(server, command, ready_s, facts, told(server.log))
