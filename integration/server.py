# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` as a child process: starts it, waits until it answers, keeps its log, and stops it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import child_environment, free_port, stop_group
from integration.environment import ROOT, device

START_S = 420
LOG_CHARS = 8000
IDLE_S = 20
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class ServerError(RuntimeError):
    """The server ended, or did not answer in time. The message contains the end of its log."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: without a trailing slash.
        log_path: the file of its output.
    """

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def account(self) -> str:
        """The state of the process and the end of its log, as text."""
        status = self.process.poll()
        return f"{'running' if status is None else f'ended with status {status}'}\n{self.log[-LOG_CHARS:]}"

    def ask(self, path: str, body: object | None = None, timeout_s: float = 120) -> Reply:
        """Sends GET, or POST if there is a body. A reply with status 4xx or 5xx does not raise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return Reply(response.status, parse(response.read()))
        except urllib.error.HTTPError as error:
            return Reply(error.code, parse(error.read()))

    def complete(self, prompt: object, **options: object) -> Any:
        """The first choice of a greedy completion of token ids or text by the model `demo`.

        Raises:
            AssertionError: the server did not answer 200.
        """
        body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = self.ask("/v1/completions", body | {"logprobs": 5, "return_token_ids": True} | options)
        assert reply.status == 200, reply
        return reply.body["choices"][0]

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a counter or gauge over all labels, or over the lines with one label such as `engine="0"`."""
        text = self.ask("/metrics").body
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and label in line]
        assert lines, f"no metric {name} {label}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def processes(self) -> list[int]:
        """The ids of the server's process and of all its descendants; empty after they have ended."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if session_of(path) == self.process.pid]

    def resident_bytes(self) -> int:
        """The resident memory of these processes. Memory that two of them share counts twice."""
        pages = 0
        for number in self.processes():
            with contextlib.suppress(OSError):
                pages += int((Path("/proc") / str(number) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def await_idle(self, limit_s: float = IDLE_S) -> None:
        """Returns when no request runs or waits and the KV cache is free.

        Raises:
            AssertionError: that took longer than the limit. The message lists the remaining requests and usage.
        """
        began = time.monotonic()
        while left := {name: value for name in BUSY if (value := self.metric(name))}:
            assert time.monotonic() - began < limit_s, f"after {limit_s:.0f} s without a client: {left}"
            time.sleep(0.1)


def session_of(process: Path) -> int | None:
    """The session id of a process from its folder in /proc; None if the process has ended or is a zombie."""
    try:
        # The fields after the name, which is in parentheses and may contain any character.
        state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state == "Z" else int(session)


def parse(payload: bytes) -> Any:
    text = payload.decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def start(command: list[str], log_path: Path, **environment: str) -> Server:
    """Starts a command that serves on the appended port, without waiting for it."""
    port = free_port()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=child_environment(**environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A process group of its own, so that the workers can be stopped too.
            start_new_session=True,
        )
    return Server(f"http://127.0.0.1:{port}", log_path, process)


def await_health(server: Server, limit_s: float = START_S) -> None:
    """Returns when the server answers; prints the last line of its log every ten seconds.

    Raises:
        ServerError: the server ended or took longer than the limit.
    """
    began = said = time.monotonic()
    while time.monotonic() - began < limit_s:
        if server.process.poll() is not None:
            raise ServerError(server.account)
        with contextlib.suppress(OSError):
            if server.ask("/health", timeout_s=5).status == 200:
                print(f"server: up after {time.monotonic() - began:.0f} s", flush=True)
                return
        if time.monotonic() - said >= 10:
            said = time.monotonic()
            last = (server.log.splitlines() or [""])[-1]
            print(f"server: {said - began:.0f} s, {last[:150]}", flush=True)
        time.sleep(0.3)
    raise ServerError(f"did not answer within {limit_s:.0f} s: {server.account}")


@contextlib.contextmanager
def serve(model: Path, log_path: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Starts a server and waits until it answers; it is stopped at the end of the block.

    Raises:
        ServerError: the server did not start.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", *device().flags, *flags]
    with running(command, log_path, START_S, **environment) as server:
        yield server


@contextlib.contextmanager
def running(command: list[str], log_path: Path, limit_s: float = START_S, **environment: str) -> Iterator[Server]:
    """Like serve, for any command with the option --port, and with a time limit in seconds.

    Raises:
        ServerError: the server did not start.
    """
    server = start(command, log_path, **environment)
    try:
        await_health(server, limit_s)
        yield server
    except Exception as error:
        # The caller's error may be caused by the server's, which is only in its log.
        if not isinstance(error, ServerError):
            print(f"server: {server.account}", flush=True)
        raise
    finally:
        stop_group(server.process)
