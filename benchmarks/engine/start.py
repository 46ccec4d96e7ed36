# SPDX-License-Identifier: Apache-2.0
"""Measures the seconds from `vllm serve` to the first answer, with caches in different states.

`python -m benchmarks.engine.start --model llama-8b --json FILE`. Dummy weights load faster than real ones, so less
compilation is hidden behind the loading. A first start, which is not reported, brings files into the page cache.
"""

import argparse
import contextlib
import json
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..processes import child_environment, free_port, stop_group
from .children import POLL_S, Settings, ask, cause, serve_command, start
from .models import SHAPES

# The states of the caches. EMPTY: no caches. FULL: the caches that the previous start left. KERNELS: the same without
# the compiled kernels of dsl.
EMPTY, FULL, KERNELS = "empty", "full", "without dsl kernels"
OURS = "dsl"
# Log lines about compilation.
COMPILE_LINE = re.compile(
    r"(compiling \d+ kernels in .*|compiled \d+ of \d+ kernels.*|compiled .* in [\d.]+ s|torch\.compile took.*)"
)


class Failed(Exception):
    """A server did not answer. The message says why."""


def caches(folder: Path) -> dict[str, str]:
    """The environment variables that move every cache of a start into one folder."""
    return {
        "DSL_BACKEND_CACHE_DIR": str(folder / "dsl"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def seconds_until_ready(backend: str, settings: Settings, folder: Path, log: Path) -> float:
    """Starts a server, waits until it answers, and stops it; returns the seconds until the answer.

    Raises:
        Failed: the server ended, or did not answer in time.
    """
    port = free_port()
    command = serve_command(backend, settings, settings.write_model(), port)
    process = start(command, log, child_environment(**caches(folder)))
    began = time.monotonic()
    try:
        while (seconds := time.monotonic() - began) < settings.start_s:
            with contextlib.suppress(OSError):
                ask(f"http://127.0.0.1:{port}/health", timeout_s=5)
                return time.monotonic() - began
            if process.poll() is not None:
                raise Failed(cause(log.read_text(errors="replace"), process.returncode))
            time.sleep(POLL_S)
        raise Failed(f"did not answer within {seconds:.0f} s")
    finally:
        stop_group(process, signal.SIGTERM)


def states(backend: str) -> tuple[str, ...]:
    return (EMPTY, FULL, KERNELS, FULL) if backend == OURS else (EMPTY, FULL, FULL)


def prepared(state: str, folder: Path) -> Path:
    """Brings the folder of a backend's caches into the given state; returns the folder."""
    if state == EMPTY:
        shutil.rmtree(folder, ignore_errors=True)
    elif state == KERNELS:
        shutil.rmtree(folder / "dsl", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def measured(backends: Sequence[str], settings: Settings, rounds: int, folder: Path) -> Iterator[dict[str, object]]:
    """Yields a row for each start: backend, state of the caches, seconds, and the log lines about compilation."""
    log = folder / "log"
    seconds_until_ready(backends[0], settings, prepared(EMPTY, folder / "first"), log)
    for number in range(rounds):
        for backend in backends:
            for state in states(backend):
                seconds = seconds_until_ready(backend, settings, prepared(state, folder / backend), log)
                row = {"round": number, "backend": backend, "caches": state, "seconds": round(seconds, 2)}
                yield row | {"log_lines": COMPILE_LINE.findall(log.read_text(errors="replace"))}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.start", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--backends", help="comma-separated backends (default: dsl and its peers for the model)")
    parser.add_argument("--rounds", type=int, default=2, help="starts in each state (default: 2)")
    parser.add_argument("--json", type=Path, dest="json_path", help="write one JSON object on each line")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    parser.add_argument("--eager", action="store_true", help="run without torch.compile and CUDA graphs")
    parser.add_argument(
        "--start-seconds", type=float, default=400, help="time limit for a server to start (default: 400)"
    )
    options = parser.parse_args(arguments)
    shape = SHAPES[options.model]
    backends = options.backends.split(",") if options.backends else shape.backends
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="start-", ignore_cleanup_errors=True) as scratch:
        settings = Settings(
            shape=shape,
            model=options.model,
            engine=options.engine,
            eager=options.eager,
            start_s=options.start_seconds,
            cache=Path(scratch) / "model",
        )
        try:
            for row in measured(backends, settings, options.rounds, Path(scratch)):
                line = json.dumps(row)
                print(line, flush=True)
                if options.json_path is not None:
                    with options.json_path.open("a") as file:
                        file.write(line + "\n")
                found.setdefault((str(row["backend"]), str(row["caches"])), []).append(float(str(row["seconds"])))
        except Failed as error:
            print(f"a server did not start: {error}", file=sys.stderr)
            return 1
    for (backend, state), seconds in found.items():
        print(f"{backend:>14}  caches {state:<20} {statistics.median(seconds):6.1f} s (median of {len(seconds)})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
