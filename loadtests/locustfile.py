# SPDX-License-Identifier: Apache-2.0
"""The locust users of the load tests: they stream completions in closed or open loop.

    locust -f loadtests/locustfile.py --host http://localhost:8000 --headless -u 8 --load-seconds 60 --scenario 128-128

Closed loop: each of `-u` users sends its next request after the previous one is answered. Open loop, with --rate: the
users are independent Poisson sources that do not wait for answers, and --rate is their total number of requests/s.
`--processes N` distributes the users over N processes. Without --headless, locust serves its own pages.
"""

import argparse
import atexit
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Group
from geventhttpclient import HTTPClient
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

# Locust runs this file by its path, so the package must be made importable.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loadtests import figures, records
from loadtests.exposure import KEY
from loadtests.figures import NAP_S
from loadtests.prompts import Request, Source
from loadtests.scenario import ScenarioError, load_all
from loadtests.stream import Failure, Reader, Sample

TICK_S = 0.25
SILENCE_S = 300  # a request fails after this time without a byte
CONNECTIONS = 4096
BLOCK = 1 << 16
# Made before locust forks, so that all processes of this machine share one folder.
SCRATCH = Path(tempfile.mkdtemp(prefix="dsl-load-"))
LEADER = os.getpid()
# The message that asks a worker to drain its requests, its reply, and the workers that have replied.
DRAIN = "drain"
DRAINED: set[str] = set()


@atexit.register
def remove_scratch() -> None:
    if os.getpid() == LEADER:
        shutil.rmtree(SCRATCH, ignore_errors=True)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("streaming completions")
    group.add_argument("--scenario", default="128-128", help="a name, or a .toml file")
    group.add_argument("--scale", type=float, default=1.0, help="factor of the scenario's lengths")
    group.add_argument("--rate", type=float, default=0.0, help="requests a second in open loop (default: closed loop)")
    group.add_argument("--load-seconds", type=float, default=0.0, help="stop sending after this time, then quit")
    group.add_argument("--drain-seconds", type=float, default=60.0, help="time limit for the last requests to end")
    group.add_argument("--served-model", default="", help="the model's name (default: the server's first)")
    group.add_argument("--vocabulary", type=int, default=1000, help="upper bound of the prompts' token ids")
    group.add_argument("--no-detokenize", action="store_true", help="for servers without a tokenizer")
    group.add_argument("--request-seed", default="0", help="seed of the prompts")
    group.add_argument("--records", default="", help="folder for the records (default: print a summary only)")


class Client:
    """The state that the users of a process share: the scenario, the connections, the record."""

    def __init__(self, environment: Environment) -> None:
        options: Any = environment.parsed_options
        (self.scenario,) = load_all([options.scenario], options.scale)
        self.host = environment.host or options.host
        self.options = options
        self.source = Source(self.scenario, options.vocabulary, options.request_seed)
        self.model = options.served_model or first_model(self.host)
        # In open loop a user has many requests in flight. Connections are opened when needed.
        self.http = HTTPClient.from_url(
            self.host, concurrency=CONNECTIONS, network_timeout=SILENCE_S, block_size=BLOCK, connection_timeout=30
        )
        # The pool's hook; the client has no option for it.
        vars(self.http._connection_pool)["after_connect"] = send_at_once
        index = getattr(environment.runner, "worker_index", 0)
        self.index = max(index, 0)
        folder = Path(options.records)
        folder.mkdir(parents=True, exist_ok=True)
        self.writer = records.Writer(folder / f"{self.index}-{os.getpid()}.jsonl")
        self.stopping = Event()
        self.users = self.sent = self.done = self.failed = self.tokens = 0
        self.late_us: list[int] = []
        self.writer.add("start", at=time.monotonic())
        self.watching = gevent.spawn(self.watch)

    @property
    def in_flight(self) -> int:
        return self.sent - self.done - self.failed

    def watch(self) -> None:
        """Measures how late the event loop wakes a sleeper: the times of tokens are late by the same amount."""
        ticked = time.monotonic()
        while True:
            due = time.monotonic() + NAP_S
            gevent.sleep(NAP_S)
            now = time.monotonic()
            self.late_us.append(max(0, round(1e6 * (now - due))))
            if now - ticked >= TICK_S:
                ticked = now
                self.tick(now)

    def tick(self, now: float) -> None:
        late, self.late_us = self.late_us, []
        counts = {name: getattr(self, name) for name in ("sent", "done", "failed", "tokens")}
        self.writer.add("tick", at=now, cpu_s=time.process_time(), late_us=late, **counts)

    def close(self) -> None:
        self.watching.kill()
        self.tick(time.monotonic())
        self.writer.add("stop", at=time.monotonic(), sent=self.sent)
        self.writer.close()
        self.http.close()

    def send(self, request: Request, environment: Environment, due: float) -> None:
        """Sends a request and records the result. Its times are relative to the time when it was due."""
        body = json.dumps(self.source.body(request, self.model, not self.options.no_detokenize)).encode()
        sample = Sample(sent=due, output=request.output)
        reader = Reader(sample, request.prompt_tokens)
        self.sent += 1
        try:
            self.stream(body, reader)
            reader.finish()
        except gevent.GreenletExit:
            sample.fail(Failure.UNFINISHED, f"after {reader.total} of {request.output} tokens")
            raise
        # Exception is the only common base of geventhttpclient's and the sockets' errors.
        except Exception as error:
            kind = Failure.TRUNCATED if sample.tokens else Failure.CONNECTION
            sample.fail(kind, f"{type(error).__name__}: {error}")
        finally:
            self.done += not sample.failure
            self.failed += bool(sample.failure)
            self.writer.sample(sample)
            tell_locust(environment, self.scenario.name, sample)

    def stream(self, body: bytes, reader: Reader) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **authorization()}
        response = self.http.request("POST", "/v1/completions", body=body, headers=headers)
        try:
            if response.status_code != 200:
                text = response.read().decode(errors="replace")
                reader.sample.fail(Failure.STATUS, f"{response.status_code}: {text}")
                return
            before = 0
            arrived = clock_of(response)
            while not reader.sample.failure and (line := response.readline(b"\n")):
                reader.line(arrived[0], line)
                self.tokens += reader.total - before
                before = reader.total
        finally:
            response.release()


def clock_of(response: Any) -> list[float]:
    """Records the time of the latest read from a response's socket.

    The time when a line is parsed would be wrong: buffered lines would seem to arrive in quick succession.
    """
    latest, feed = [time.monotonic()], response.feed

    def stamped(data: bytes) -> None:
        latest[0] = time.monotonic()
        feed(data)

    # The hook between the socket and the buffer of lines; the client has no option for it.
    vars(response)["feed"] = stamped
    return latest


def send_at_once(connection: Any) -> None:
    """Sets TCP_NODELAY: otherwise the end of a long prompt waits up to 40 ms for an acknowledgement."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def authorization() -> dict[str, str]:
    """The header with the API key; empty without one."""
    key = os.environ.get(KEY, "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def first_model(host: str) -> str:
    with urllib.request.urlopen(
        urllib.request.Request(f"{host}/v1/models", None, authorization()), timeout=30
    ) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


def tell_locust(environment: Environment, name: str, sample: Sample) -> None:
    """Reports the request to locust's own tables and charts."""
    error = RuntimeError(f"{sample.failure}: {sample.detail}") if sample.failure else None
    times = {"answer": sample.e2e_ms if sample.at_us else 0.0}
    if not error:
        times |= {"TTFT": sample.ttft_ms} | ({"TPOT": sample.tpot_ms} if sample.tpot_ms is not None else {})
    for kind, value in times.items():
        environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value,
            response_length=sample.tokens[-1] if sample.tokens else 0,
            exception=error,
            context={},
        )


class CompletionUser(User):
    """A user in closed loop, or with --rate a source of arrivals in open loop."""

    def on_start(self) -> None:
        self.client: Client = vars(self.environment)["completions"]
        self.number, self.turn = self.client.users, 0
        self.client.users += 1
        options: Any = self.environment.parsed_options
        self.rate = options.rate / max(1, options.num_users or 1)
        self.in_flight = Group()
        self.dice = random.Random(f"{options.request_seed}/{self.client.index}/{self.number}")
        self.due = time.monotonic()

    @task
    def act(self) -> None:
        if self.rate:
            # Add to the last arrival, not to the current time, so that a late client does not reduce the load.
            self.due += self.dice.expovariate(self.rate)
            self.client.stopping.wait(max(0.0, self.due - time.monotonic()))
        if self.client.stopping.is_set():
            gevent.sleep(0.1)
            return
        request = self.client.source.request(self.client.index, self.number, self.turn)
        self.turn += 1
        if self.rate:
            self.in_flight.spawn(self.client.send, request, self.environment, self.due)
        else:
            self.client.send(request, self.environment, time.monotonic())

    def on_stop(self) -> None:
        try:
            self.in_flight.join()
        finally:
            self.in_flight.kill()


@events.init.add_listener
def prepare(environment: Environment, runner: Any, **_: Any) -> None:
    """Checks the options. In the master process, ends the load after its time."""
    options: Any = environment.parsed_options
    try:
        load_all([options.scenario], options.scale)
        if not 0 <= options.rate < float("inf"):
            raise ScenarioError(f"--rate {options.rate}: a number of requests a second is needed, 0 for closed loop")
        if options.headless:
            options.served_model = options.served_model or first_model(options.host or "")
    except ScenarioError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except (OSError, ValueError, LookupError) as error:
        print(f"--host {options.host} does not list its models: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if isinstance(runner, WorkerRunner):
        runner.register_message(DRAIN, drain_and_tell, concurrent=True)
    if isinstance(runner, MasterRunner):
        runner.register_message(DRAIN, lambda environment, msg, **_: DRAINED.add(msg.node_id))
    if not isinstance(runner, WorkerRunner) and options.load_seconds:
        runner.environment.events.test_start.add_listener(lambda **_: gevent.spawn(end_later, runner, options))


def end_later(runner: Any, options: argparse.Namespace) -> None:
    """After the load's time, waits until the requests in flight have ended, and then quits.

    Locust itself gives worker processes only three seconds, whatever the --stop-timeout is.
    """
    gevent.sleep(options.load_seconds)
    if isinstance(runner, MasterRunner):
        expected = runner.worker_count
        runner.send_message(DRAIN, options.drain_seconds)
        deadline = time.monotonic() + options.drain_seconds + 30
        while len(DRAINED) < expected and time.monotonic() < deadline:
            gevent.sleep(NAP_S)
    else:
        drain(runner.environment, options.drain_seconds)
    runner.quit()


def drain(environment: Environment, limit_s: float) -> None:
    """Stops sending; returns when no request is in flight or the time limit is reached."""
    client: Client | None = vars(environment).get("completions")
    if client is None:
        return
    client.stopping.set()
    deadline = time.monotonic() + limit_s
    while client.in_flight and time.monotonic() < deadline:
        gevent.sleep(NAP_S)


def drain_and_tell(environment: Environment, msg: Any, **_: Any) -> None:
    drain(environment, msg.data)
    if environment.runner:
        environment.runner.send_message(DRAIN)


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, MasterRunner):
        return
    vars(environment)["completions"] = Client(environment)


@events.test_stopping.add_listener
def send_no_more(environment: Environment, **_: Any) -> None:
    if client := vars(environment).get("completions"):
        client.stopping.set()


@events.test_stop.add_listener
def finish(environment: Environment, **_: Any) -> None:
    if client := vars(environment).pop("completions", None):
        client.close()


@events.init.add_listener
def keep_records(environment: Environment, runner: Any, **_: Any) -> None:
    """Without --records, prints a summary at the end."""
    options: Any = environment.parsed_options
    asked = bool(options.records)
    options.records = options.records or str(SCRATCH)
    if isinstance(runner, WorkerRunner):
        return

    if not asked:
        environment.events.quit.add_listener(lambda **_: print(figures.text(records.read_all(SCRATCH))))
