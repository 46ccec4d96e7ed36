# SPDX-License-Identifier: Apache-2.0
"""Runs locust in child processes against a server, at one level of one scenario."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, free_port, stop_group
from loadtests import records
from loadtests.exposure import KEY
from loadtests.figures import Figures, summarize, window_of
from loadtests.records import Tick
from loadtests.scenario import Level, Scenario

LOCUSTFILE = Path(__file__).resolve().parent / "locustfile.py"
POLL_S = 0.5
START_S = 60  # time limit for locust's processes to start the load
STOP_S = 1  # time for users to stop after the drain
# All processes start within this time. The load continues for as long after the window.
SKEW_S = 1.0


class ClientError(RuntimeError):
    """Locust failed. The message contains the end of its log."""


class ServerGoneError(RuntimeError):
    """The server ended under load."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that a client makes.

    Attributes:
        url, model: the server's address and its model's name.
        scenario: with its final lengths; it is written to a file in `folder` for locust.
        processes: the largest number of client processes; there are never more processes than users.
        folder: for records and locust's log.
        key: the key for the Authorization header; may be empty.
    """

    url: str
    model: str
    vocabulary: int
    detokenize: bool
    scenario: Scenario
    level: Level
    seed: str
    processes: int
    folder: Path
    key: str = ""

    @property
    def seconds(self) -> float:
        return self.scenario.warm_s + self.scenario.window_s + SKEW_S

    @property
    def users(self) -> int:
        """The number of locust users. In open loop there is one source of arrivals for each process."""
        return self.level.users or self.processes

    def command(self) -> list[str]:
        processes = min(self.processes, self.users)
        # All users have started after half of the warm-up.
        spawn = max(1.0, self.users / (self.scenario.warm_s / 2))
        words: list[object] = [sys.executable, "-m", "locust", "-f", LOCUSTFILE, "--headless", "--only-summary"]
        words += ["--host", self.url, "--users", self.users, "--spawn-rate", spawn]
        words += ["--load-seconds", self.seconds, "--drain-seconds", self.scenario.drain_s, "--stop-timeout", STOP_S]
        words += ["--scenario", self.scenario_file(), "--rate", self.level.rate, "--request-seed", self.seed]
        words += ["--served-model", self.model, "--vocabulary", self.vocabulary, "--records", self.folder / "records"]
        words += [] if self.detokenize else ["--no-detokenize"]
        if processes > 1:
            # By default all locust masters use the same port, and clients on one machine would share their workers.
            port = free_port()
            words += ["--processes", processes, "--master-bind-host", "127.0.0.1"]
            words += ["--master-bind-port", port, "--master-port", port]
        # Failed requests are results, not an error of the client.
        return [str(word) for word in [*words, "--exit-code-on-error", 0]]

    def scenario_file(self) -> Path:
        return self.folder / f"{self.scenario.name}.toml"

    def write_scenario(self) -> None:
        self.scenario_file().write_text(to_toml(self.scenario))


def to_toml(scenario: Scenario) -> str:
    """The scenario as the text of a file that `scenario.load` can read."""
    fields = scenario.model_dump(exclude={"name", "sampling", "limits"})
    lines = [f"{key} = {toml_value(value)}" for key, value in fields.items()]
    lines += ["[sampling]", *(f"{key} = {toml_value(value)}" for key, value in scenario.sampling.model_dump().items())]
    for limits in scenario.limits:
        lines += ["[[limits]]", *(f"{key} = {toml_value(value)}" for key, value in limits.model_dump().items())]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A value as TOML. For the types in scenarios, JSON is valid TOML."""
    return json.dumps(value)


def run(load: Load, alive: Callable[[], bool], progress: Callable[[float, list[Tick]], None]) -> Figures:
    """Loads a server; returns the figures of the window.

    Args:
        alive: returns whether the server still runs.
        progress: called about twice a second with the seconds since the start and the latest tick of every process.

    Raises:
        ClientError: locust failed.
        ServerGoneError: the server ended. The load is stopped.
    """
    records_folder = load.folder / "records"
    records_folder.mkdir(parents=True)
    load.write_scenario()
    log = load.folder / "locust.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            load.command(),
            cwd=ROOT,
            # Not on the command line, which every user of the machine can see.
            env=os.environ | ({KEY: load.key} if load.key else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    began = time.monotonic()
    limit = START_S + load.seconds + load.scenario.drain_s + START_S
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            progress(now - began, records.last_ticks(records_folder))
            if not alive():
                raise ServerGoneError("the server ended under load")
            if now - began > limit:
                raise ClientError(f"locust did not end within {limit:.0f} s:\n{tail(log)}")
    finally:
        stop_group(process, signal.SIGTERM)
    if process.returncode:
        raise ClientError(f"locust ended with status {process.returncode}:\n{tail(log)}")
    processes = records.read_all(records_folder)
    if not processes or any(one.stopped is None for one in processes):
        raise ClientError(f"a client process ended before its load did:\n{tail(log)}")
    return summarize(
        processes, window_of(processes, load.scenario.warm_s, load.scenario.window_s), load.scenario.limits
    )


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
