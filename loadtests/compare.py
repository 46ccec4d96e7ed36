# SPDX-License-Identifier: Apache-2.0
"""Compares backends: applies the same load to a server of each in turn, and writes a file of results and a page.

    python -m loadtests.compare --model llama-8b --backends dsl FLASH_ATTN --scenario 1k-1k -- --max-num-seqs 256
    python -m loadtests.compare --url dsl=http://127.0.0.1:8000 other=http://127.0.0.1:8001 --scenario 1k-1k

The flags after `--` are passed to every server. With --url no server is started: the servers must already run.
"""

import argparse
import contextlib
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import facts
from benchmarks.processes import exit_on_sigterm
from benchmarks.report import JsonLines
from loadtests import client, offline, page, remote, servers
from loadtests.client import ClientError, Load, ServerGoneError
from loadtests.exposure import KEY, ExposureError, mask, scrub, secrets_of
from loadtests.figures import checked, milliseconds
from loadtests.progress import Reporter
from loadtests.records import Tick
from loadtests.remote import Remote, UrlError
from loadtests.results import OURS
from loadtests.scenario import Level, Scenario, ScenarioError, load_all, names
from loadtests.servers import BackendError, Served, check_flags, server_tpot_ms
from loadtests.subjects import Subject, SubjectError, resolve

Record = dict[str, Any]
WRONG_USE = 2
INTERRUPTED = 130
VOCABULARY = 1000  # every model has at least this many tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to compare.

    Attributes:
        subject: the model to serve; None with servers that already run.
        urls: name -> address of the servers that already run.
        vocabulary: prompts have token ids below this number.
        flags: further flags of every server.
        rounds: the number of repetitions. Each round starts with another backend.
        processes: the largest number of client processes.
        start_s: the time limit in seconds for a server to start.
        offline: measure engines without servers.
        out: the folder of results.jsonl, page.html and the logs.
        served_model, key: for servers that already run: the model's name (None for the first one) and the API key.
        keep_samples: keep the client's records of every request.
    """

    subject: Subject | None
    urls: dict[str, str]
    vocabulary: int
    backends: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    flags: tuple[str, ...]
    rounds: int
    processes: int
    seed: int
    start_s: float
    offline: bool
    out: Path
    keep_samples: bool
    served_model: str | None = None
    key: str = ""

    @property
    def loads(self) -> list[tuple[Scenario, Level]]:
        """The loads of one backend in one round."""
        pairs = [(scenario, level) for scenario in self.scenarios for level in scenario.levels]
        return [(scenario, level) for scenario, level in pairs if level.users or not self.offline]

    def turns(self) -> Iterator[tuple[int, str]]:
        """(round, backend), interleaved, so that a drift during the run affects all backends alike."""
        for number in range(self.rounds):
            first = number % len(self.backends)
            for backend in self.backends[first:] + self.backends[:first]:
                yield number, backend


@dataclass
class Comparison:
    """A run of a plan, and its results so far.

    Attributes:
        dropped: backend -> why it is not started again.
        secrets: texts that are removed from everything that is written.
        faults: the number of loads that failed or had failed requests.
    """

    plan: Plan
    reporter: Reporter
    lines: JsonLines
    secrets: Sequence[str] = ()
    records: list[Record] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    faults: int = 0

    def add(self, kind: str, **fields: Any) -> None:
        record = scrub({"kind": kind, **fields}, self.secrets)
        self.records.append(record)
        self.lines.write(record)

    def run(self) -> None:
        for number, backend in self.plan.turns():
            if backend in self.dropped:
                self.reporter.step(len(self.plan.loads))
                continue
            before = self.reporter.finished
            try:
                way = self.engine if self.plan.offline else self.reached if self.plan.urls else self.server
                way(backend, number)
            except BackendError as error:
                self.dropped[backend] = str(error)
                self.fail(backend, number, str(error), log_tail=error.log_tail)
            self.reporter.step(before + len(self.plan.loads) - self.reporter.finished)
            self.write_page()

    def fail(self, backend: str, number: int, message: str, scenario: str | None = None, log_tail: str = "") -> None:
        self.faults += 1
        where = f"{backend}, {scenario}" if scenario else backend
        self.reporter.say(f"{where}: FAILED: {message}")
        self.add("failed", backend=backend, round=number, scenario=scenario, message=message, log_tail=log_tail)

    def started(self, backend: str, number: int, ready_s: float, facts: dict[str, Any], lines: list[str]) -> None:
        served = f"layers served by {facts['served_by']}, graphs {facts['graphs']}, page {facts['page_size']}"
        self.reporter.say(f"{backend}: round {number + 1} of {self.plan.rounds}, ready after {ready_s:.0f} s; {served}")
        self.add("server", backend=backend, round=number, ready_s=ready_s, facts=facts, startup_lines=lines)

    def server(self, backend: str, number: int) -> None:
        """Runs one round of one backend, with its own server."""
        plan = self.plan
        assert plan.subject is not None
        log = plan.out / "logs" / f"{backend}-{number}.log"
        self.reporter.status(f"{backend}: starting")
        with self.scrubbed(log), servers.serve(backend, plan.subject, plan.flags, log, plan.start_s) as served:
            self.started(backend, number, served.ready_s, served.facts, served.startup_lines)
            self.loads(backend, number, served, plan.subject.tokenizer)

    def reached(self, backend: str, number: int) -> None:
        """Runs one round of a server that already runs."""
        plan = self.plan
        try:
            remote_server = remote.reach(backend, plan.urls[backend], plan.served_model, plan.key)
        except UrlError as error:
            raise BackendError(str(error), "") from None
        at = f"{remote_server.url}, model {remote_server.model}"
        self.reporter.say(f"{backend}: round {number + 1} of {plan.rounds}, {at}")
        self.add("server", backend=backend, round=number, ready_s=0.0, facts=remote_server.facts, startup_lines=[])
        self.loads(backend, number, remote_server, remote_server.detokenize)

    def loads(self, backend: str, number: int, served: Served | Remote, detokenize: bool) -> None:
        """Runs all levels of all scenarios on a running server."""
        most = served.facts["max_model_len"]
        for scenario, level in self.plan.loads:
            if most is not None and scenario.longest > most:
                why = f"requests of {scenario.longest} tokens, the server accepts {most}: see --scale, --max-model-len"
                self.fail(backend, number, why, scenario.name)
            else:
                self.load(backend, number, served, scenario, level, detokenize)
            self.reporter.step()

    @contextlib.contextmanager
    def scrubbed(self, log: Path) -> Iterator[None]:
        """Removes secrets from a log after its server has ended: vLLM logs its flags."""
        try:
            yield
        finally:
            if self.secrets and log.exists():
                log.write_text(scrub(log.read_text(errors="replace"), self.secrets))

    def load(
        self, backend: str, number: int, served: Served | Remote, scenario: Scenario, level: Level, detokenize: bool
    ) -> None:
        """Runs one level of one scenario on a running server."""
        plan = self.plan
        what = f"{backend}: round {number + 1}, {scenario.name}, {level.label}"

        def show(seconds: float, ticks: list[Tick]) -> None:
            totals = {name: sum(getattr(tick, name) for tick in ticks) for name in ("sent", "done", "failed", "tokens")}
            phase = "warm-up" if seconds < scenario.warm_s else "measuring"
            phase = phase if seconds < scenario.warm_s + scenario.window_s + client.SKEW_S else "ending"
            counts = ", ".join(f"{count} {name}" for name, count in totals.items())
            self.reporter.status(f"{what}: {phase}, {seconds:.0f} s, {counts}")

        with self.folder(
            f"{backend}-{number}-{scenario.name}-{level.label}".replace("/", "-").replace(" ", "-")
        ) as folder:
            load = Load(
                url=served.url,
                model=served.model,
                vocabulary=plan.vocabulary,
                detokenize=detokenize,
                scenario=scenario,
                level=level,
                # Every backend gets the same requests; each round and level has different ones.
                seed=f"{plan.seed}/{number}/{scenario.name}/{level.label}",
                processes=plan.processes,
                folder=folder,
                key=served.key,
            )
            before = served.counters()
            try:
                found = client.run(load, served.alive, show)
            except ServerGoneError:
                raise served.ended() from None
            except (ClientError, ValueError) as error:
                self.fail(backend, number, str(error), scenario.name)
                return
            if not served.alive():
                raise served.ended()
            after = served.counters()
        counted = {name: after[name] - value for name, value in before.items() if name in after}
        found = checked(found, server_tpot_ms(counted))
        # A window without an answer measured nothing.
        self.faults += bool(found.errors) or not found.done
        self.add(
            "run",
            mode="serve",
            backend=backend,
            round=number,
            scenario=scenario.name,
            level={"users": level.users, "rate": level.rate},
            devices=served.facts["devices"],
            figures=found.to_json(),
            server=counted,
        )
        errors = ", ".join(f"{count} x {kind} ({found.details[kind]})" for kind, count in found.errors.items())
        limit = "".join(
            f"; no {name.upper()}: {why}" for name, why in found.unresolved.items() if not found.client.limit
        )
        limit = f"; THE CLIENT WAS THE LIMIT: {found.client.limit}" if found.client.limit else limit
        times = f"TTFT p50 {milliseconds(found.ttft.p50)} ms, TPOT p50 {milliseconds(found.tpot.p50)} ms"
        rates = f"{found.requests_per_s:.2f} requests/s, {found.output_per_s:.1f} tokens/s, {times}"
        self.reporter.say(f"{what}: {rates}, {found.done}/{found.sent} done; errors: {errors or 'none'}{limit}")

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """The folder of one load's files."""
        if self.plan.keep_samples:
            path = self.plan.out / "samples" / name
            path.mkdir(parents=True)
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="dsl-load-") as scratch:
            yield Path(scratch)

    def engine(self, backend: str, number: int) -> None:
        """Runs one round of one backend, as an engine without a server."""
        plan = self.plan
        assert plan.subject is not None
        seed = plan.seed * 1000 + number
        with self.folder(f"{backend}-{number}") as folder:
            events = offline.run(backend, plan.scenarios, plan.subject, plan.flags, plan.start_s, seed, folder)
            devices = 1
            for event in events:
                if event["event"] == "note":
                    self.reporter.status(f"{backend}: {event['text']}")
                elif event["event"] == "ready":
                    devices = event["facts"]["devices"]
                    self.started(backend, number, event["ready_s"], event["facts"], event["startup_lines"])
                elif event["event"] == "failed":
                    self.fail(backend, number, event["message"], event["scenario"])
                    self.reporter.step()
                else:
                    level: Level = event["level"]
                    self.add(
                        "run",
                        mode="offline",
                        backend=backend,
                        round=number,
                        scenario=event["scenario"],
                        level={"users": level.users, "rate": 0.0},
                        devices=devices,
                        figures={"output_per_s": event["output_per_s"]},
                    )
                    what = f"{backend}: round {number + 1}, {event['scenario']}, batch of {level.users}"
                    self.reporter.say(f"{what}: {event['output_per_s']:.1f} tokens/s")
                    self.reporter.step()

    def write_page(self) -> None:
        page.write(self.records, self.plan.out / "page.html")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    own, flags = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, flags = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare",
        description="Compare attention backends of vLLM under the same load; write results.jsonl and page.html.",
        epilog="The flags after -- are passed to every server (vLLM's own flags).",
    )
    parser.add_argument(
        "--model",
        help="a shape (llama-8b, ...), demo, a folder, or a name on a hub; with --url the name that servers give "
        "theirs "
        "(default: the first of /v1/models)",
    )
    parser.add_argument(
        "--url",
        nargs="+",
        action="extend",
        metavar="NAME=URL",
        help=f"servers that already run, instead of --backends; the environment variable {KEY} has their API key",
    )
    parser.add_argument("--backends", nargs="+", help="vLLM's attention backends (default: dsl and its peers)")
    parser.add_argument(
        "--scenario",
        nargs="+",
        default=["128-128"],
        dest="scenarios",
        help=f"names from {', '.join(names())}, or .toml files",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths, such as 0.1")
    parser.add_argument("--users", type=int, nargs="+", help="levels of closed loop (default: the scenario's)")
    parser.add_argument("--rates", type=float, nargs="+", help="levels of open loop, requests/s (default: likewise)")
    parser.add_argument("--warm-seconds", type=float, help="load before the window (default: the scenario's)")
    parser.add_argument("--window-seconds", type=float, help="measured time (default: the scenario's)")
    parser.add_argument(
        "--drain-seconds", type=float, help="time limit for requests after the window (default: the scenario's)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, interleaved (default: 3)")
    parser.add_argument(
        "--processes", type=int, help="largest number of client processes (default: half of the cores, up to 16)"
    )
    parser.add_argument("--offline", action="store_true", help="measure engines without servers: tokens/s of batches")
    parser.add_argument("--out", type=Path, help="folder for the results (default: results/load-TIME)")
    parser.add_argument(
        "--vocabulary", type=int, help="upper bound of token ids (default: from the model's config; with --url 1000)"
    )
    parser.add_argument("--seed", type=int, help="seed of the requests (default: 0; with --url a new one each time)")
    parser.add_argument(
        "--start-seconds", type=float, default=600, help="time limit for a server to start (default: 600)"
    )
    parser.add_argument("--keep-samples", action="store_true", help="keep the records of every request")
    parser.add_argument("--commit", help="commit of the code, if it is not in a git checkout")
    options = parser.parse_args(own)
    options.flags = flags
    if not options.url and not options.model:
        parser.error("--model is needed, or --url NAME=URL for servers that already run")
    if options.url:
        given = {"--backends": options.backends, "--offline": options.offline, "flags after --": flags}
        for name in (name for name, value in given.items() if value):
            parser.error(f"{name} cannot be used with --url: the servers already run")
    for name in ("rounds", "processes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: at least 1 is needed")
    return options


def check_backends(names: Sequence[str]) -> None:
    """Raises ScenarioError: vLLM knows no such attention backend. It says so itself when it starts with one."""
    with contextlib.suppress(ImportError):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        known = dict.fromkeys((OURS.upper(), *AttentionBackendEnum.__members__))
        # As vLLM reads them.
        if strange := [name for name in names if name.upper() not in known]:
            raise ScenarioError(
                f"--backends {' '.join(strange)}: vLLM has no such attention backend; choose from {', '.join(known)}"
            )


def plan_of(options: argparse.Namespace, scratch: Path) -> Plan:
    """The plan that the options describe.

    Raises:
        ScenarioError, SubjectError, ExposureError, UrlError: an option is not valid.
    """
    users, rates = options.users, options.rates
    # If the user gives levels of one kind, the scenario's levels of the other kind are not run.
    users, rates = (() if users is None and rates else users), (() if rates is None and users else rates)
    scenarios = load_all(
        options.scenarios,
        options.scale,
        users=users,
        rates=rates,
        warm_s=options.warm_seconds,
        window_s=options.window_seconds,
        drain_s=options.drain_seconds,
    )
    urls = remote.parse(options.url or [])
    key = os.environ.get(KEY, "")
    for name, url in urls.items():
        remote.reach(name, url, options.model, key)
    subject = None if urls else resolve(options.model, scratch, options.flags, options.vocabulary)
    backends = tuple(urls or options.backends or (subject.backends if subject else ()))
    # A server that already runs may still have the prompts of an earlier run in its prefix cache.
    seed = time.time_ns() % 10**9 if urls else 0
    if len(set(backends)) < len(backends):
        raise ScenarioError(f"--backends {' '.join(backends)}: a name occurs twice")
    if options.backends:
        check_backends(options.backends)
    check_flags(options.flags)
    if options.offline:
        offline.engine_arguments(options.flags)
        for scenario in scenarios:
            offline.batches(scenario)
    now = datetime.datetime.now(datetime.timezone.utc)
    return Plan(
        subject=subject,
        urls=urls,
        vocabulary=subject.vocabulary if subject else options.vocabulary or VOCABULARY,
        served_model=options.model if urls else None,
        key=key if urls else "",
        backends=backends,
        scenarios=tuple(scenarios),
        flags=tuple(options.flags),
        rounds=options.rounds,
        processes=options.processes or max(1, min(16, (os.cpu_count() or 2) // 2)),
        seed=seed if options.seed is None else options.seed,
        start_s=options.start_seconds,
        offline=options.offline,
        out=options.out or Path("results") / now.strftime("load-%Y%m%d-%H%M%S"),
        keep_samples=options.keep_samples,
    )


def environment_of(plan: Plan, arguments: Sequence[str], commit: str | None) -> Record:
    """The facts that the results depend on."""
    gathered = facts.gather(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    gathered["commit"] = commit or gathered["commit"]
    gathered["versions"] |= {"locust": facts.version("locust")}
    return {
        **gathered,
        "on_gpu": torch.cuda.is_available(),
        "cores": os.cpu_count(),
        "command": ["python", "-m", "loadtests.compare", *mask(arguments)],
        "model": plan.subject.name if plan.subject else plan.served_model or "the servers' first model",
        "urls": plan.urls,
        "backends": list(plan.backends),
        "rounds": plan.rounds,
        "processes": plan.processes,
        "seed": plan.seed,
        "flags": mask([*(plan.subject.flags if plan.subject else ()), *plan.flags]),
        "offline": plan.offline,
        "scenarios": [scenario.model_dump() for scenario in plan.scenarios],
    }


def run(plan: Plan, arguments: Sequence[str], commit: str | None) -> int:
    """Runs the comparison; returns 0 if no load of any backend had an error, else 1."""
    (plan.out / "logs").mkdir(parents=True, exist_ok=True)
    console = Console()
    steps = len(plan.loads) * len(plan.backends) * plan.rounds
    status, reason = 1, "it raised"
    with Reporter(console, steps) as reporter:
        comparison = Comparison(plan, reporter, JsonLines(plan.out / "results.jsonl"), secrets_of(arguments))
        comparison.add("environment", **environment_of(plan, arguments, commit))
        try:
            comparison.run()
            status, reason = int(comparison.faults > 0), ""
        except KeyboardInterrupt:
            status, reason = INTERRUPTED, "interrupted"
        except SystemExit as error:
            status, reason = int(str(error.code or 0)), "ended by a signal"
            raise
        finally:
            comparison.add("end", status=status, reason=reason)
            comparison.write_page()
    for line in page.ratio_lines(comparison.records):
        print(line)
    for backend, message in comparison.dropped.items():
        print(f"{backend} FAILED: {message}")
    print(f"results: {plan.out / 'results.jsonl'}; page: {plan.out / 'page.html'}")
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="dsl-models-") as scratch:
        try:
            plan = plan_of(options, Path(scratch))
        except (ScenarioError, SubjectError, ExposureError, UrlError) as error:
            print(error, file=sys.stderr)
            return WRONG_USE
        return run(plan, arguments, options.commit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
