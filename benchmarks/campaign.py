# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks campaign`: all measurements and tests that need a GPU, within a time limit.

It keeps all GPUs of a host busy: each step runs in a process of its own on one GPU, and the next step starts when a GPU
is free. A step that would end too late is stopped, and what it wrote until then is kept. Each GPU's steps have an equal
part of the CPU's cores for themselves: beside tests and compilers that take all cores, engines and benches are slower.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import ROOT, child_environment, stop_group

POLL_S = 0.2
# Seconds from the request to stop until a step's processes are killed, at most.
GRACE_S = 5.0
# Lines of a step's output that the summary repeats.
TAIL_LINES = 30
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Step:
    """A measurement or test.

    Attributes:
        arguments: of the Python interpreter. `{seconds}` becomes the step's time in seconds, `{json}` its JSON file.
        least_s: it is not started with fewer seconds left.
        most_s: it gets at most so many seconds.
        shows: what the result answers.
    """

    name: str
    arguments: tuple[str, ...]
    least_s: float
    most_s: float
    shows: str


def bench(name: str, arguments: str, least_s: float, most_s: float, shows: str) -> Step:
    words = ("-m", "benchmarks", *arguments.split(), "--limit-seconds", "{seconds}", "--json", "{json}")
    return Step(name, words, least_s, most_s, shows)


def tests(name: str, arguments: str, least_s: float, most_s: float, shows: str) -> Step:
    words = ("-m", "pytest", *arguments.split(), "-q", "--tb=short", "-p", "no:cacheprovider")
    return Step(name, words, least_s, most_s, shows)


def engine(name: str, model: str, served: Sequence[str], shows: str) -> Step:
    """Engines in which kernels that are off by default serve: options of the plugin, set to `dsl`."""
    options = json.dumps({"additional_config": {"dsl": dict.fromkeys(served, "dsl")}}, separators=(",", ":"))
    return bench(name, f"engine --quick --model {model} --engine {options}", 150, 330, shows)


def tune(name: str, arguments: str, shows: str) -> Step:
    words = ("-m", "dsl_backend.cli", "tune", *arguments.split(), "--json", "{json}")
    return Step(name, words, 60, 200, shows)


NORM_PEERS = "quack,vLLM,FlashInfer,Triton"
# FlashInfer would compile for minutes.
FP8_PEERS = "FA3,TRITON_ATTN,TRITON_MLA,FLASH_ATTN_MLA,FLASHMLA"
INVARIANT_PEERS = "ordinary,FA3,TRITON_ATTN,FLASH_ATTN_MLA"
# The most important first: a campaign that ends early has those.
STEPS = (
    bench("llama", "engine --quick --model llama-8b", 150, 330, "tokens/s beside FLASH_ATTN, and the cold start"),
    bench("deepseek", "engine --quick --model deepseek-v2-lite", 150, 330, "tokens/s beside FLASH_ATTN_MLA"),
    engine("llama-step", "llama-8b", ("projections", "norms"), "tokens/s with our projections and norms"),
    engine("experts-engine", "qwen3-30b-a3b-12", ("experts",), "tokens/s with our experts"),
    bench("experts", "experts --kernels cute-decode,cute-grouped", 40, 150, "experts beside vLLM's Triton"),
    bench(
        "scaled-linear", "scaled-linear --kernels cute-sm90", 40, 150, "fp8 layers beside CUTLASS, DeepGEMM and torch"
    ),
    bench("fp8-products", "prefill --rows fp8 --peers e4m3", 30, 100, "attention's products in 8 bits, and in 16"),
    tests("attention-tests", "tests/attention -m gpu -n 4", 60, 240, "attention against the reference"),
    tests("other-tests", "tests --ignore tests/attention -m gpu -n 4", 60, 200, "other families against the reference"),
    bench("fp8", f"decode prefill mla-decode --rows fp8|e5m2 --peers {FP8_PEERS}", 40, 150, "fp8 caches beside vLLM's"),
    bench(
        "invariant",
        f"decode prefill mla-decode --rows invariant --peers {INVARIANT_PEERS}",
        40,
        120,
        "batch-invariant mode, its peers in the same mode, and our kernels without it",
    ),
    bench("held-out-attention", "mla-decode prefill --held-out", 60, 200, "shapes that nothing is tuned for"),
    bench("held-out-others", "linear softmax norm --held-out", 60, 200, "shapes that nothing is tuned for"),
    bench(
        "norm", f"norm --rows grid|fp8|wide|narrow --peers {NORM_PEERS}", 30, 150, "RMSNorm of every width and output"
    ),
    bench("rope", "rope-write-kv write-kv", 30, 120, "norms, rotation and cache write beside vLLM's kernels"),
    bench("rope-mla", "rope-write-mla", 30, 120, "MLA's norm, rotation and cache write beside vLLM's kernels"),
    engine("rope-step", "llama-8b", ("rope",), "tokens/s with one launch between qkv and attention"),
    bench("sampling", "sampling verification --peers vLLM,plain", 30, 150, "every filter, and drafts"),
    tune("tune-mla", "attention --classes mla_decode", "configurations of MLA, row groups and combine among them"),
    tune("tune-experts", "experts", "tiles of experts, and from how many tokens on"),
    tune("tune-linear", "linear", "tiles of gate and up projections, and of projections"),
    tests("host-tests", "tests -n 4 -k triton", 60, 300, "Triton's tests on a GPU and beside it"),
    Step("invariance", ("-m", "integration.invariance", "--graphs"), 60, 240, "served log-probabilities, bit by bit"),
    Step("clock", ("-m", "emulator.clock.measure"), 20, 60, "constants of the emulator's clock, on this chip"),
    # FlashInfer compiles its sampling kernels for minutes.
    bench("sampling-flashinfer", "sampling --peers FlashInfer", 300, 600, "every filter beside FlashInfer"),
    bench("dsls", "dsls --seconds 0.1", 120, 330, "DSLs compared: operators, launches, compile times"),
    tests("served", "integration/test_numerics.py integration/test_linear.py", 60, 240, "log-probabilities of engines"),
)


@dataclass
class Run:
    """A step that was started.

    Attributes:
        until: the `time.monotonic()` at which it is stopped.
    """

    step: Step
    gpu: str
    process: "subprocess.Popen[bytes]"
    began: float
    until: float
    outcome: str = ""
    seconds: float = 0.0


@dataclass
class Campaign:
    """Runs steps on GPUs, each GPU one step at a time.

    Attributes:
        out: the folder of each step's output (NAME.log) and results (NAME.jsonl).
        gpus: values of CUDA_VISIBLE_DEVICES.
        until: the `time.monotonic()` at which all steps must have ended.
    """

    out: Path
    gpus: Sequence[str]
    until: float
    runs: list[Run] = field(default_factory=list)
    left: list[Step] = field(default_factory=list)

    def execute(self, steps: Sequence[Step]) -> None:
        """Starts the steps in order, and returns when all have ended."""
        waiting = list(steps)
        running: dict[str, Run] = {}
        try:
            while waiting or running:
                for gpu in self.gpus:
                    if gpu not in running and waiting:
                        self.start_next(gpu, waiting, running)
                time.sleep(POLL_S)
                for gpu in [gpu for gpu, run in running.items() if ended(run)]:
                    run = running.pop(gpu)
                    print(f"{run.step.name}: {run.outcome} after {run.seconds:.0f} s", flush=True)
        finally:
            for run in running.values():
                stop(run)

    def start_next(self, gpu: str, waiting: list[Step], running: dict[str, Run]) -> None:
        """Starts the first step for which there is time; those before it are left out."""
        while waiting:
            step = waiting.pop(0)
            seconds = min(step.most_s, self.until - time.monotonic() - GRACE_S)
            if seconds < step.least_s:
                self.left.append(step)
                continue
            running[gpu] = self.start(step, gpu, seconds)
            self.runs.append(running[gpu])
            return

    def start(self, step: Step, gpu: str, seconds: float) -> Run:
        # A step ends its own work a little before it is stopped, to have the time to print what it found.
        words = {"seconds": f"{seconds * 0.9:.0f}", "json": str(self.out / f"{step.name}.jsonl")}
        command = [sys.executable, *(filled(word, words) for word in step.arguments)]
        with (self.out / f"{step.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(CUDA_VISIBLE_DEVICES=gpu),
                start_new_session=True,
            )
        os.sched_setaffinity(process.pid, self.cores(gpu))
        now = time.monotonic()
        return Run(step, gpu, process, now, now + seconds)

    def cores(self, gpu: str) -> set[int]:
        """The CPU's cores for the steps of a GPU; all cores where there are fewer than GPUs."""
        every = sorted(os.sched_getaffinity(0))
        return set(every[self.gpus.index(gpu) :: len(self.gpus)] if len(every) >= len(self.gpus) else every)

    def summary(self) -> str:
        """A table of all steps, then the last lines of each one's output."""
        rows = [(run.step.name, run.gpu, run.outcome, f"{run.seconds:.0f} s", run.step.shows) for run in self.runs]
        rows += [(step.name, "-", "no time left", "", step.shows) for step in self.left]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for run in self.runs:
            lines += ["", f"== {run.step.name}: {run.outcome}", *self.tail(run.step)]
        return "\n".join(lines) + "\n"

    def tail(self, step: Step) -> list[str]:
        text = (self.out / f"{step.name}.log").read_text(errors="replace")
        return [line for line in ESCAPES.sub("", text).splitlines() if line.strip()][-TAIL_LINES:]

    @property
    def complete(self) -> bool:
        """Whether every step was started and succeeded."""
        return not self.left and all(run.outcome == "ok" for run in self.runs)


def filled(word: str, values: Mapping[str, str]) -> str:
    """An argument with `{seconds}` and `{json}` replaced; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def ended(run: Run) -> bool:
    """Whether a step has ended; stops it if its time is over."""
    status = run.process.poll()
    if status is not None:
        run.outcome = "ok" if status == 0 else f"status {status}"
        stop(run)
    elif time.monotonic() >= run.until:
        stop(run)
        run.outcome = "stopped"
    else:
        return False
    run.seconds = time.monotonic() - run.began
    return True


def stop(run: Run) -> None:
    """End a step and all that it started, which may still run if the step has ended, and disturb the next one."""
    stop_group(run.process, wait_s=GRACE_S / 2)


def choose(names: str | None) -> list[Step]:
    """The steps with these comma-separated names, in the order of `STEPS`.

    Raises:
        ValueError: a name is none of a step.
    """
    if names is None:
        return list(STEPS)
    asked = [name.strip() for name in names.split(",") if name.strip()]
    known = [step.name for step in STEPS]
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise ValueError(f"no step {', '.join(unknown) or repr(names)}: choose from {', '.join(known)}")
    return [step for step in STEPS if step.name in asked]


def visible_gpus() -> list[str]:
    """The values of CUDA_VISIBLE_DEVICES that show one GPU each."""
    import torch

    count = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] or [str(index) for index in range(count)]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks campaign", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/campaign"), help="folder of logs and results")
    parser.add_argument("--limit-seconds", type=float, default=3600, help="end after so many seconds (default: 3600)")
    parser.add_argument("--only", help="comma-separated names of steps (default: all)")
    parser.add_argument("--gpus", help="comma-separated values of CUDA_VISIBLE_DEVICES (default: every GPU)")
    parser.add_argument("--list", action="store_true", dest="only_list", help="print the steps, run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every step succeeded, 1 if one failed or was left out, 2 if the arguments or the GPU are missing."""
    options: Any = parse(arguments)
    try:
        steps = choose(options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.only_list:
        for step in steps:
            print(f"{step.name:<20}{step.least_s:>5.0f} to {step.most_s:>3.0f} s  {step.shows}")
        return 0
    gpus = visible_gpus() if options.gpus is None else [name for name in options.gpus.split(",") if name]
    if not gpus:
        print("there is no CUDA device: the steps measure nothing without one", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(options.out.resolve(), gpus, time.monotonic() + options.limit_seconds)
    campaign.execute(steps)
    text = campaign.summary()
    (options.out / "summary.txt").write_text(text)
    print(text)
    return 0 if campaign.complete else 1
