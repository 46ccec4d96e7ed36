# SPDX-License-Identifier: Apache-2.0
"""Sends many requests to one server; counts lost and wrong answers, and measures the growth of its memory.

    python -m integration.soak --requests 100000

The prompts are a fixed set of mixed lengths. An exact engine (vLLM's own backend, in float32) answers each of them
once, and every streamed answer is compared with that. Different answers are scored by the same engine, because two
tokens may be nearly equally likely. One request in fifty is invalid, abandoned or reset. The exit status is 1 if an
answer was lost or wrong, an invalid request was not refused, requests did not end, or the server's memory grew.
"""

import argparse
import contextlib
import json
import queue
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from integration import models
from integration.compare import TOLERANCE
from integration.environment import device
from integration.judge import Judge, Request, requests
from integration.misuse import BAD, CONTEXT, abandon, break_off, refused
from integration.models import MODELS
from integration.offline import Answer
from integration.server import Server, ServerError, serve
from integration.streams import body_of, stream

PROMPTS = 64
MISUSED = 0.02  # share of all requests
WARM = 0.2  # share of all requests after which the server's memory is expected to stay
SAY_S = 10
SAMPLES = 20  # of the server's memory, evenly over the requests
SHOWN = 5  # faults of each kind that are shown in full
MIB = 1 << 20


@dataclass
class Tally:
    """The outcomes of the requests.

    Attributes:
        answered: complete answers: (request, its tokens) -> how often.
        lost: descriptions of incomplete answers.
        misused: the number of requests that were invalid, abandoned or reset.
        mistreated: descriptions of wrong reactions to those.
        generated: the number of received tokens.
        memory: (requests ended, resident bytes of the server's processes).
    """

    answered: Counter[tuple[Request, tuple[int, ...]]] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    misused: int = 0
    mistreated: list[str] = field(default_factory=list)
    generated: int = 0
    memory: list[tuple[int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def ended(self) -> int:
        with self.lock:
            return self.answered.total() + len(self.lost) + self.misused

    def growth(self, requests: int) -> int:
        """The growth in bytes from the first sample after the warm-up to the last one."""
        warm = [held for ended, held in self.memory if ended >= WARM * requests]
        return warm[-1] - warm[0]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The soak's result. `faults` are the reasons to fail, as text."""

    requests: int
    right: int
    wrong: int
    lost: int
    misused: int
    near_ties: int
    generated: int
    seconds: float
    resident_before: int
    resident_after: int
    growth: int
    faults: tuple[str, ...]


def one_request(server: Server, asked: list[Request], seed: int, tally: Tally) -> None:
    """Sends the request of this number, valid or not, and records its outcome."""
    numbers = random.Random(seed)
    request = numbers.choice(asked)
    if numbers.random() < MISUSED:
        misuse: Callable[[], str | None] = numbers.choice(
            (
                partial(refused, server, numbers.choice(BAD)),
                partial(abandon, server, request, numbers.randint(1, 8)),
                partial(break_off, server, request, numbers.choice((0.3, 1.0)), numbers.random() < 0.5),
            )
        )
        try:
            fault = misuse()
        except (OSError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        with tally.lock:
            tally.misused += 1
            tally.mistreated += [fault] if fault else []
        return
    streamed = stream(server.url, body_of(request.prompt, request.tokens, logprobs=False))
    fault = streamed.fault(request.tokens)
    with tally.lock:
        tally.generated += len(streamed.answer.tokens)
        if fault is None:
            tally.answered[request, tuple(streamed.answer.tokens)] += 1
        else:
            tally.lost.append(fault)


def drive(server: Server, asked: list[Request], count: int, concurrency: int, seed: int, tally: Tally) -> None:
    """Sends all requests, a limited number at once; prints progress and records the server's memory."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(count):
        numbers.put(seed * 1_000_003 + number)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                one_request(server, asked, numbers.get_nowait(), tally)

    began = said = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        workers = [threads.submit(work) for _ in range(concurrency)]
        while not all(worker.done() for worker in workers):
            ended = tally.ended
            if ended >= len(tally.memory) * count / SAMPLES:
                tally.memory.append((ended, server.resident_bytes()))
            if time.monotonic() - said >= SAY_S:
                said = time.monotonic()
                rate = ended / (said - began)
                print(
                    f"soak: {ended} of {count}, {rate:.0f}/s, {(count - ended) / max(rate, 1e-9):.0f} s to go; "
                    f"{len(tally.lost)} lost, {tally.memory[-1][1] / MIB:.0f} MiB",
                    flush=True,
                )
            time.sleep(0.1)
        for worker in workers:
            worker.result()


def judged(judge: Judge, tally: Tally) -> tuple[int, int, list[str]]:
    """The numbers of wrong answers and of near ties with the exact engine's, and the first few wrong answers."""
    asked = [request for request, _ in tally.answered]
    answers = [Answer([], [], list(tokens), []) for _, tokens in tally.answered]
    wrong = ties = 0
    shown = []
    for request, answer, scored, often in zip(
        asked, answers, judge.score(asked, answers), tally.answered.values(), strict=True
    ):
        count = len(answer.tokens)
        gaps = [
            best - logprob
            for best, logprob in zip(scored.prompt_best[-count:], scored.prompt_logprobs[-count:], strict=True)
        ]
        if max(gaps) > 2 * TOLERANCE:
            wrong += often
            step = gaps.index(max(gaps))
            shown.append(f"{len(request.prompt)} tokens in: token {step} is behind the best by {gaps[step]:.4f}")
        elif not judge.agrees(request, answer.tokens):
            ties += often
    return wrong, ties, shown


def verdict_of(tally: Tally, judge: Judge, count: int, seconds: float, limit: int, busy: str | None) -> Verdict:
    """The verdict on a soak of `count` requests, with a limit in bytes for the growth of memory."""
    wrong, ties, shown = judged(judge, tally)
    answered = tally.answered.total()
    missing = count - tally.ended
    growth = tally.growth(count)
    faults = [f"lost: {fault}" for fault in tally.lost[:SHOWN]]
    faults += [f"wrong: {fault}" for fault in shown[:SHOWN]]
    faults += [f"misused: {fault}" for fault in tally.mistreated[:SHOWN]]
    faults += [f"{missing} requests never ended"] if missing else []
    faults += [f"memory grew by {growth / MIB:.0f} MiB after the warm-up"] if growth > limit else []
    faults += [busy] if busy else []
    return Verdict(
        requests=count,
        right=answered - wrong,
        wrong=wrong,
        lost=len(tally.lost) + missing,
        misused=tally.misused,
        near_ties=ties,
        generated=tally.generated,
        seconds=seconds,
        resident_before=tally.memory[0][1],
        resident_after=tally.memory[-1][1],
        growth=growth,
        faults=tuple(faults),
    )


def soak(server: Server, judge: Judge, asked: list[Request], options: argparse.Namespace) -> Verdict:
    """Sends the requests and checks the answers."""
    tally = Tally()
    began = time.monotonic()
    drive(server, asked, options.requests, options.concurrency, options.seed, tally)
    seconds = time.monotonic() - began
    busy = None
    try:
        server.await_idle()
        tally.memory.append((options.requests, server.resident_bytes()))
    except (AssertionError, OSError) as error:
        busy = f"the server is not idle at the end: {error}"
    return verdict_of(tally, judge, options.requests, seconds, options.memory_mib * MIB, busy)


def show(verdict: Verdict) -> None:
    table = Table(title="soak", show_header=False)
    rate = verdict.generated / verdict.seconds
    for name, value in (
        ("requests", f"{verdict.requests} in {verdict.seconds:.0f} s, {rate:.0f} tokens/s"),
        ("right", f"{verdict.right} ({verdict.near_ties} of them differ from the exact engine at a near tie)"),
        ("wrong", str(verdict.wrong)),
        ("lost", str(verdict.lost)),
        ("misused", f"{verdict.misused} invalid, abandoned or reset"),
        ("memory at the start", f"{verdict.resident_before / MIB:.0f} MiB"),
        ("memory at the end", f"{verdict.resident_after / MIB:.0f} MiB, {verdict.growth / MIB:+.0f} after the warm-up"),
    ):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    for fault in verdict.faults:
        console.print(fault, style="red", markup=False)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m integration.soak", description="Send many requests to one server.")
    parser.add_argument("--requests", type=int, default=100_000, help="at least 20 (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=device().load.streams, help="at once (default: %(default)s)")
    parser.add_argument("--backend", default="dsl", help="attention backend (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests' order (default: %(default)s)")
    parser.add_argument(
        "--memory-mib", type=int, default=64, help="allowed growth after the warm-up (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    options = parser.parse_args(arguments)
    if options.requests < SAMPLES:
        parser.error(f"--requests {options.requests}: at least {SAMPLES} are needed to see memory grow")
    if options.concurrency < 1:
        parser.error(f"--concurrency {options.concurrency}: at least 1 is needed")
    return options


def main() -> int:
    options = parse_options()
    load = device().load
    asked = requests(PROMPTS, load.longest, seed=1)
    flags = ["--attention-backend", options.backend, "--dtype", device().dtypes[0], "--max-model-len", str(CONTEXT)]
    flags += ["--max-num-seqs", str(load.sequences), *([] if device().cuda else ["--enforce-eager"]), *options.flags]
    with tempfile.TemporaryDirectory() as name:
        model = models.write(MODELS["llama"], Path(name) / "model")
        judge = Judge(model, asked)
        try:
            with serve(model, Path(name) / "log", *flags, **device().environment) as server:
                verdict = soak(server, judge, asked, options)
        except ServerError as error:
            print(f"soak: the server {error}", file=sys.stderr)
            return 2
    show(verdict)
    if options.json:
        options.json.write_text(json.dumps(asdict(verdict), indent=2) + "\n")
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
