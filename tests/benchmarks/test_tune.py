# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend tune` without a GPU: its loop with a clock that is told the times, its classes, what it refuses."""

import argparse
import dataclasses
import datetime
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import emulator
from benchmarks import sweep, timing, tune
from benchmarks.attention import tune as attention
from benchmarks.campaign.findings import of_sweep
from benchmarks.case import Reference
from benchmarks.experts import tune as experts
from benchmarks.experts.problems import Problem as ExpertsProblem
from benchmarks.held_out.compile_ahead import launch_once
from benchmarks.linear import sweep as linear_sweep
from benchmarks.linear import tune as linear
from benchmarks.linear.problems import Problem
from benchmarks.linear.sweep import contest
from benchmarks.norm import tune as norm
from benchmarks.norm.problems import Problem as NormProblem
from benchmarks.row_tune import rows_of
from benchmarks.runner import DeviceLostError
from benchmarks.sampling import tune as sampling
from benchmarks.sampling.problems import Problem as SamplingProblem
from benchmarks.scaled_linear import sweep as scaled_sweep
from benchmarks.scaled_linear import tune as scaled
from benchmarks.scaled_linear.problems import Problem as ScaledProblem
from benchmarks.softmax import tune as softmax
from benchmarks.softmax.problems import Problem as SoftmaxProblem
from benchmarks.sweep import Class, Contest, Ready
from dsl_backend import cli
from dsl_backend.experts.tuned import Ours, Theirs
from dsl_backend.gemm.configs import choose, estimate_us, fitting
from dsl_backend.gemm.sm90.configs import GemmConfig, SmallMConfig
from dsl_backend.linear.scaled.reference import products
from dsl_backend.linear.scaled.tuned import Ours as ScaledOurs
from dsl_backend.linear.scaled.tuned import Theirs as ScaledTheirs
from dsl_backend.linear.tuned import TUNED_CONFIGS, UNRECORDED_ROWS, Unfused, problem_of
from dsl_backend.providers import Launch
from dsl_backend.runtime import model as models
from dsl_backend.runtime import precompile, toolkit
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.tuned import TuningRecord
from dsl_backend.sampling.candidates import named
from dsl_backend.sampling.spec import SamplingSpec

GPU = "NVIDIA Test"
TARGET = dataclasses.replace(from_arch("sm_90a"), gpu=GPU)
SHARED = {
    "gpu": GPU,
    "arch": "sm_90a",
    "date": datetime.date(2026, 11, 23),
    "commit": "0123abc",
    "versions": {"driver": "580.1"},
}
DEFAULT, SLOWER, FASTER, FASTEST = (GemmConfig(band=band) for band in (8, 4, 2, 1))
EXACT = torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 16)


class Clock(timing.WallTimer):
    """Tells the times of a list in turn."""

    def __init__(self, launch: Launch, layers: int, times: list[float]) -> None:
        super().__init__(launch, layers)
        self.times, self.place = times, 0

    def sample(self) -> float:
        self.place += 1
        return self.times[self.place % len(self.times)]


class Chip:
    """Where configurations run: what they take, and what some of them do instead.

    Attributes:
        times: microseconds of a configuration in a contest, or several that are measured in turn.
        broken: what a configuration writes, or raises.
    """

    def __init__(self) -> None:
        self.times: dict[tuple[str, Any], float | list[float]] = {}
        self.broken: dict[Any, Any] = {}
        self.running: list[tuple[str, Any]] = []

    def contest(self, name: str, configs: list[Any]) -> Contest:
        outputs = [torch.empty(4, 16, dtype=torch.bfloat16) for _ in range(2)]

        def runner(config: Any) -> Callable[[int], torch.Tensor]:
            def run(index: int) -> torch.Tensor:
                wrong = self.broken.get(config)
                if isinstance(wrong, Exception):
                    raise wrong
                outputs[index].copy_(EXACT if wrong is None else wrong)
                self.running = [(name, config)]
                return outputs[index]

            return run

        return Contest(
            name=name,
            parameters={},
            configs=configs,
            chosen=configs[0],
            precompile_spec=lambda config: None,
            prepare=lambda: Ready(runner, outputs, Reference(torch.arange(4), EXACT)),
        )

    def make_timer(self, launch: Launch, layers: int, device: torch.device) -> timing.Timer:
        times = self.times[self.running[0]]
        return Clock(launch, layers, times if isinstance(times, list) else [times])


@pytest.fixture
def chip() -> Chip:
    return Chip()


def problem(least: int, most: int) -> Any:
    return problem_of(14336, 4096, True, torch.bfloat16, TARGET.sm_count).of_rows(least, most)


def class_of(chip: Chip, times: dict[Any, list[float | list[float]]], rows: tuple[int, int] = (65, 256)) -> Class:
    """A class whose configurations take so long in each of its rows; the first is the heuristic's."""
    count = len(next(iter(times.values())))
    names = [f"{rows[1]}-{place}" for place in range(count)]
    for config, each in times.items():
        chip.times |= {(name, config): us for name, us in zip(names, each, strict=True)}
    return Class(TUNED_CONFIGS, problem(*rows), tuple(chip.contest(name, list(times)) for name in names))


def run(chip: Chip, *classes: Class, path: Path | None = None) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    status = tune.tune(classes, TARGET, SHARED, path, console, 0.0, chip.make_timer)
    return status, console.file.getvalue()  # type: ignore[attr-defined]


def saved(path: Path) -> list[TuningRecord[Any]]:
    found, problems = TUNED_CONFIGS.read(path)
    assert problems == []
    return found


def configs(path: Path) -> list[Any]:
    return [record.config for record in saved(path)]


def test_the_fastest_is_kept(chip: Chip, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    one = class_of(chip, {DEFAULT: [10.0], SLOWER: [11.0], FASTEST: [8.0], FASTER: [9.0]})
    status, text = run(chip, one, path=path)
    assert status == 0
    (record,) = saved(path)
    assert (record.problem, record.config) == (problem(65, 256), FASTEST)
    assert (record.measurement.us, record.measurement.default_us, record.measurement.rows) == (8.0, 10.0, ("256-0",))
    assert record.measurement.model_dump(include=set(SHARED)) == SHARED
    line, _, table = text.partition("Compared with")
    assert "m65-256: 10.00 us, best 8.00 (+25.0 %), kept: band=1" in line
    assert "+25.0 %" in table
    assert "band=1" in table
    assert f"1 tuned configurations, written to {path}" in text


def test_the_compilation_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kernel is compiled once; it takes minutes on few cores."""
    specs = [PrecompileSpec("linear", print, key, TARGET) for key in ("a", "b", "a", "c")]
    clock = iter([0.0, 4.0, 11.0, 12.0])
    contests = [
        dataclasses.replace(Chip().contest("one", [DEFAULT]), precompile_spec=lambda config, spec=spec: spec)
        for spec in specs
    ]

    def compiled(todo: list[PrecompileSpec]) -> Iterator[precompile.Outcome]:
        for spec in todo:
            error = "no registers" if spec.key == "b" else None
            yield precompile.Outcome(spec, precompile.Result.COMPILED, error=error)

    monkeypatch.setattr(sweep.precompile, "run", compiled)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    sweep.compile_all(contests)
    first, wrong, half, last = capsys.readouterr().out.splitlines()
    assert first == "compiling 3 kernels"
    assert wrong.endswith("no registers")
    assert (half, last) == ("compiled 2 of 3 kernels after 11 s", "compiled 3 of 3 kernels after 12 s")


def test_without_a_file_nothing_is_kept(chip: Chip) -> None:
    status, text = run(chip, class_of(chip, {DEFAULT: [10.0], FASTER: [8.0]}))
    assert status == 0
    assert "1 tuned configurations, not written: use --json FILE" in text


@pytest.mark.parametrize(
    ("default", "other", "wins"),
    [
        (10.0, 9.85, False),
        (10.0, 9.75, True),
        # Its times scatter by more than it gains: half of what 80 % lie in is 5 % of the median.
        ([9.4, 10.0, 10.6], 9.75, False),
        (10.0, [9.15, 9.75, 10.35], False),
        ([9.4, 10.0, 10.6], 9.0, True),
    ],
)
def test_a_tuned_config_gains_more_than_the_scatter(
    chip: Chip, tmp_path: Path, default: Any, other: Any, wins: bool
) -> None:
    path = tmp_path / "tuned.json"
    run(chip, class_of(chip, {DEFAULT: [default], FASTER: [other]}), path=path)
    assert configs(path) == ([FASTER] if wins else [])


@pytest.mark.parametrize(
    ("other", "wins"),
    [
        ([8.0, 90.0], True),
        ([9.9, 90.0], True),
        ([9.9, 99.0], False),  # too little on the whole
        ([5.0, 105.0], False),  # slower in one row
        ([5.0, 101.0], True),  # by less than times scatter
    ],
)
def test_a_tuned_config_is_slower_in_no_row(chip: Chip, tmp_path: Path, other: list[Any], wins: bool) -> None:
    path = tmp_path / "tuned.json"
    run(chip, class_of(chip, {DEFAULT: [10.0, 100.0], FASTER: other}), path=path)
    assert configs(path) == ([FASTER] if wins else [])
    for record in saved(path):
        assert record.measurement.us == pytest.approx(math.sqrt(other[0] * other[1]), abs=1e-3)
        assert record.measurement.default_us == pytest.approx(math.sqrt(1000), abs=1e-3)


def test_what_loses_in_a_row_leaves_the_place_to_the_next(chip: Chip, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    run(chip, class_of(chip, {DEFAULT: [10.0, 100.0], FASTEST: [2.0, 120.0], FASTER: [9.0, 90.0]}), path=path)
    assert configs(path) == [FASTER]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (EXACT * 1.5, "elements are further from the oracle than the budget"),
        (torch.full((4, 16), torch.nan), "are not finite or were never written"),
        (RuntimeError("no such instruction"), "no such instruction"),
        (Exception("a compiler's own kind"), "a compiler's own kind"),
    ],
)
def test_what_is_wrong_cannot_win(chip: Chip, tmp_path: Path, wrong: Any, message: str) -> None:
    path = tmp_path / "tuned.json"
    chip.broken[FASTEST] = wrong
    status, text = run(chip, class_of(chip, {DEFAULT: [10.0], FASTEST: [5.0], FASTER: [9.0]}), path=path)
    assert status == 0
    assert configs(path) == [FASTER]
    assert message in text


def test_the_budget_is_the_heuristics(chip: Chip, tmp_path: Path) -> None:
    """Not the limits that a benchmark's peers have: an error of four ulp of a row's largest element is within those."""
    path = tmp_path / "tuned.json"
    chip.broken[FASTEST] = EXACT + 4 * 2**-7 * EXACT.abs().amax(1, keepdim=True) * torch.eye(4, 16)
    run(chip, class_of(chip, {DEFAULT: [10.0], FASTEST: [5.0]}), path=path)
    assert configs(path) == []
    chip.broken[FASTEST] = EXACT + 2**-7 * EXACT.abs().amax(1, keepdim=True) * torch.eye(4, 16)
    run(chip, class_of(chip, {DEFAULT: [10.0], FASTEST: [5.0]}), path=path)
    assert configs(path) == [FASTEST]


def test_a_wrong_heuristic_decides_nothing(chip: Chip, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    chip.broken[DEFAULT] = EXACT * 2
    first, second = (
        class_of(chip, {DEFAULT: [10.0], FASTER: [5.0]}),
        class_of(chip, {SLOWER: [9.0], FASTER: [5.0]}, (1, 8)),
    )
    status, text = run(chip, first, second, path=path)
    assert status == 1
    assert "FAILED linear-14336x4096-gated-bfloat16-m65-256: 256-0: the heuristic's" in text
    assert [record.problem for record in saved(path)] == [problem(1, 8)]


def test_a_lost_device_ends_the_run_and_leaves_what_was_found(
    chip: Chip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: torch.device, cause: BaseException) -> None:
        raise DeviceLostError(str(cause))

    monkeypatch.setattr(sweep, "require_alive", lost)
    path = tmp_path / "tuned.json"
    chip.broken[FASTEST] = RuntimeError("an illegal memory access")
    classes = [
        class_of(chip, {DEFAULT: [10.0], FASTER: [5.0]}, (1, 8)),
        class_of(chip, {DEFAULT: [10.0], FASTEST: [5.0]}, (9, 16)),
        class_of(chip, {DEFAULT: [10.0], FASTER: [5.0]}, (17, 32)),
    ]
    status, text = run(chip, *classes, path=path)
    assert status == 1
    assert "m9-16: the device no longer answers: an illegal memory access" in text
    assert [record.problem for record in saved(path)] == [problem(1, 8)]


def test_what_is_measured_again_is_replaced(chip: Chip, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    run(chip, class_of(chip, {DEFAULT: [10.0], FASTER: [8.0]}), path=path)
    run(chip, class_of(chip, {DEFAULT: [10.0], FASTER: [8.0]}, (1, 8)), path=path)
    run(chip, class_of(chip, {DEFAULT: [10.0], FASTER: [9.9]}, (129, 192)), path=path)
    assert {(record.problem.least_rows, record.problem.most_rows) for record in saved(path)} == {
        (1, 8),
        (65, 128),
        (193, 256),
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "kept"),
    [
        (9.0, 8.0, [FASTER, Unfused()]),
        (8.0, 9.0, [FASTER]),
        (9.0, 8.95, [FASTER]),
        (9.9, 9.0, [Unfused()]),
        (11.0, 10.5, []),
    ],
)
def test_what_is_not_ours_must_beat_the_best_of_ours(
    chip: Chip, tmp_path: Path, ours: float, theirs: float, kept: list[Any]
) -> None:
    path = tmp_path / "tuned.json"
    run(chip, class_of(chip, {DEFAULT: [10.0], FASTER: [ours], Unfused(): [theirs]}), path=path)
    assert configs(path) == kept
    for record in saved(path):
        if isinstance(record.config, Unfused):
            assert record.measurement.default_us == min(ours if ours < 9.8 else 10.0, 10.0)


class Twice(Chip):
    """Times of the second measurement, where a configuration has other ones then."""

    def __init__(self) -> None:
        super().__init__()
        self.again: dict[tuple[str, Any], float] = {}
        self.seen: list[tuple[str, Any]] = []

    def make_timer(self, launch: Launch, layers: int, device: torch.device) -> timing.Timer:
        which = self.running[0]
        self.seen.append(which)
        if self.seen.count(which) > 1 and which in self.again:
            return Clock(launch, layers, [self.again[which]])
        return super().make_timer(launch, layers, device)


@pytest.mark.parametrize(
    ("again", "kept"),
    [
        ({}, [(FASTEST, 8.0, 10.0)]),
        # The times of a record are the second measurement's.
        ({FASTEST: 9.0, DEFAULT: 9.5}, [(FASTEST, 9.0, 9.5)]),
        ({FASTEST: 9.9}, []),
        ({DEFAULT: 8.1}, []),
    ],
)
def test_what_wins_is_measured_twice(
    tmp_path: Path, again: dict[Any, float], kept: list[tuple[Any, float, float]]
) -> None:
    """The fastest of many is partly so by chance. The others are not timed again."""
    path, chip = tmp_path / "tuned.json", Twice()
    one = class_of(chip, {DEFAULT: [10.0], FASTEST: [8.0], FASTER: [9.0]})
    chip.again = {("256-0", config): us for config, us in again.items()}
    _, text = run(chip, one, path=path)
    found = [(record.config, record.measurement.us, record.measurement.default_us) for record in saved(path)]
    assert found == kept
    assert ("kept" in text.partition("Compared")[0]) is bool(kept)
    assert [config for _, config in chip.seen] == [DEFAULT, FASTEST, FASTER, DEFAULT, FASTEST]


def test_what_is_not_ours_is_compared_with_what_was_confirmed(tmp_path: Path) -> None:
    """Ours is not faster the second time: cuBLAS is compared with the heuristic's then."""
    path, chip = tmp_path / "tuned.json", Twice()
    one = class_of(chip, {DEFAULT: [10.0], FASTER: [9.0], Unfused(): [8.0]})
    chip.again = {("256-0", FASTER): 10.0}
    run(chip, one, path=path)
    assert [(record.config, record.measurement.default_us) for record in saved(path)] == [(Unfused(), 10.0)]


def test_a_winner_that_fails_the_second_time_is_not_kept(tmp_path: Path) -> None:
    class Failing(Twice):
        def make_timer(self, launch: Launch, layers: int, device: torch.device) -> timing.Timer:
            if self.seen.count(self.running[0]) and self.running[0][1] == FASTER:
                raise RuntimeError("out of memory")
            return super().make_timer(launch, layers, device)

    path, chip = tmp_path / "tuned.json", Failing()
    status, text = run(chip, class_of(chip, {DEFAULT: [10.0], FASTER: [8.0]}), path=path)
    assert (status, configs(path)) == (0, [])
    assert "out of memory" in text


def test_all_times_are_written(chip: Chip, tmp_path: Path) -> None:
    """As a sweep does, so that the campaign's summary reads them; of the first measurement."""
    file = io.StringIO()
    one = class_of(chip, {DEFAULT: [10.0, 20.0], FASTER: [8.0, 16.0]})
    console = Console(file=io.StringIO(), width=200)
    tune.tune([one], TARGET, SHARED, None, console, 0.0, chip.make_timer, file)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [(line["row"], line["us"], line["chosen"], line["band"]) for line in lines] == [
        (f"{one.name} 256-0", 10.0, True, 8),
        (f"{one.name} 256-0", 8.0, False, 2),
        (f"{one.name} 256-1", 20.0, True, 8),
        (f"{one.name} 256-1", 16.0, False, 2),
    ]
    assert list(of_sweep(lines)) == [
        f" 0.80x {one.name} 256-0: 10.00 us; 0.80 band=2",
        f" 0.80x {one.name} 256-1: 20.00 us; 0.80 band=2",
    ]


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_kernels_run_as_they_do_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulator, whose times decide nothing: inputs, kernels, checks, what is not ours beside them."""
    path = tmp_path / "tuned.json"
    small = dataclasses.replace(TARGET, sm_count=2)
    whole = contest(Problem(m=3, n=40, k=64), small, torch.device("cpu"))
    streams = [config for config in whole.configs if isinstance(config, SmallMConfig)]
    few = dataclasses.replace(whole, configs=(streams[0], streams[1], whole.configs[-1]))
    assert isinstance(few.configs[-1], Unfused)
    assert len(list(few.precompile_specs)) == 2
    one = Class(TUNED_CONFIGS, problem_of(40, 64, True, torch.bfloat16, 2), (few,))
    with emulator.device(arch="sm_90a", sms=2):
        console = Console(file=io.StringIO(), width=200)
        assert tune.tune([one], small, SHARED, path, console, 0.0) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "FAILED" not in text
    assert "SmallMConfig" not in text.partition("Beside")[0], "a configuration is wrong"
    assert len(saved(path)) == text.count(" kept ")


# The command.


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["tune", *words])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of one as listing classes needs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(targets, "detect", lambda device=None: TARGET)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    result = invoke()
    assert result.exit_code == cli.WRONG_USE
    assert "dsl-backend: tune needs an NVIDIA GPU, but found none" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rope"], "family 'rope' has nothing to tune: choose from attention, experts, linear, scaled-linear, norm"),
        (["--arch", "sm_90a"], "--arch is given without --list: it changes the list alone"),
        (["--candidates"], "--candidates is given without --list: it changes the list alone"),
        (["--list", "--arch", "hopper"], "arch 'hopper' is not a CUDA architecture"),
        (["norm", "--times", "/nowhere/x"], "--times /nowhere/x cannot be written"),
        (["--classes", "("], "--classes '(' is not a regular expression"),
        (["linear", "--classes", "hd128"], "--classes 'hd128' matches none of"),
        (["--seconds", "0"], "--seconds 0.0: more than 0 is needed"),
        (["--model", "nowhere"], "model 'nowhere': No such file or directory"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_is_refused(words: list[str], message: str) -> None:
    result = invoke(*words)
    assert result.exit_code == cli.WRONG_USE
    assert message in result.stderr


def test_a_gpu_that_is_taken_for_another_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "detect", lambda device=None: from_arch("sm_80"))
    assert "unset DSL_BACKEND_ARCH" in invoke().stderr


def test_a_gpu_without_kernels_in_cute_dsl(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    older = dataclasses.replace(from_arch("sm_80"), gpu="NVIDIA A100")
    monkeypatch.setattr(targets, "detect", lambda device=None: older)
    assert "nothing can be tuned: no CuTe DSL kernel serves this GPU" in invoke().stderr


@pytest.mark.usefixtures("gpu")
def test_a_broken_file_is_refused_before_the_timing(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    result = invoke("linear", "--json", str(path))
    assert result.exit_code == cli.WRONG_USE
    assert "is no file of tuned configurations" in result.stderr


@pytest.mark.usefixtures("gpu")
def test_others_kernels_are_compiled_before_the_timing(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours first, and then in parallel what others would compile one after the other."""
    order: list[Any] = []
    first, second = (class_of(chip, {DEFAULT: [10.0]}, rows) for rows in ((1, 8), (9, 16)))
    found = [dataclasses.replace(first, launches=("a", "b")), second, dataclasses.replace(first, launches=("c",))]
    monkeypatch.setattr(tune, "tuners", lambda: {"linear": lambda *_: found})
    monkeypatch.setattr(sweep, "compile_all", lambda contests: order.append(len(list(contests))))
    monkeypatch.setattr(tune.compile_ahead, "run", lambda tasks, processes: order.append((tasks, processes <= 3)))
    monkeypatch.setattr(tune, "shared_facts", lambda *_: SHARED)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: order.append("timed") or 0)
    assert invoke("linear").exit_code == 0
    assert order == [3, (["a", "b", "c"], True), "timed"]
    order.clear()
    found[:] = [second]
    assert invoke("linear").exit_code == 0
    assert order == [1, "timed"]


@pytest.mark.usefixtures("gpu")
def test_list() -> None:
    result = invoke("--list", "--classes", "decode-hd128-g4-bfloat16$|m65-96$")
    assert result.exit_code == 0, result.output
    lines = " ".join(result.stdout.split())
    assert "decode-hd128-g4-bfloat16: " in lines
    assert "hd128-h32x8-b256-k2k" in lines
    assert lines.count("-m65-96: ") == 3
    assert "prefill" not in lines


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize(
    ("arch", "name", "kind", "other"),
    [
        ("sm_90a", "norm-4096-bfloat16", "NormConfig", "use_pdl=False"),
        ("sm_100a", "sampling-151936-float32-m129-256", "ClusterConfig", "blocks_ahead=0"),
        ("sm_90a", "softmax-4096-bfloat16", "SoftmaxConfig", "late_dependents=True"),
    ],
)
def test_list_without_a_gpu(arch: str, name: str, kind: str, other: str) -> None:
    """Classes, rows, and with an option each configuration, as far as it differs from the default's."""
    words = (name.partition("-")[0], "--list", "--arch", arch, "--classes", f"^{name}$")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).startswith(f"{name}: ")
    assert " configurations; " in result.stdout
    assert kind not in result.stdout
    more = invoke(*words, "--candidates").stdout
    assert more.startswith(result.stdout)
    default, *others = more.removeprefix(result.stdout).splitlines()
    assert default.startswith(f"  default {kind}(")
    assert f"  {other}" in others
    assert f"{name}: {1 + len(others)} configurations" in more


def test_an_architecture_without_kernels_in_cute_dsl_has_no_classes() -> None:
    result = invoke("--list", "--arch", "sm_80")
    assert result.exit_code == cli.WRONG_USE
    assert "nothing can be tuned: no CuTe DSL kernel serves this GPU" in result.stderr


ROW_FAMILIES = (norm, sampling, softmax)


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize("family", ROW_FAMILIES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_classes_of_rows(family: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class's rows have the same configurations, the default first; each can be kept, and is then what is chosen."""
    monkeypatch.setattr(sampling, "VOCABULARIES", (151936,))
    target = dataclasses.replace(from_arch(arch), gpu=GPU)
    found = family.classes(target, torch.device("cpu"), None)
    assert len({one.problem for one in found}) == len(found) > 10
    shared = SHARED | {"arch": arch, "us": 1.0, "default_us": 2.0}
    for one in found:
        assert len({tuple(row.configs) for row in one.contests}) == 1
        first = one.contests[0]
        assert len(set(first.configs)) == len(first.configs) > 1
        assert len({row.name for row in one.contests}) == len(one.contests)
        assert first.chosen == first.configs[0], "there are no records of such a GPU"
        assert all(first.precompile_spec(config) is not None for config in first.configs)
        record = one.tuned_configs.record(one.problem, first.configs[-1], **shared)
        assert one.tuned_configs.understood(json.loads(record.measurement.model_dump_json())) == record
    records = [one.tuned_configs.record(one.problem, one.contests[0].configs[-1], **shared) for one in found]
    monkeypatch.setitem(found[0].tuned_configs.__dict__, "found", (records, []))
    for one in family.classes(target, torch.device("cpu"), None):
        assert all(row.chosen == row.configs[-1] for row in one.contests), one.name


def test_widths_are_timed_with_few_rows_and_with_many() -> None:
    """A record of a width holds for any number of rows."""
    (one,) = (one for one in softmax.classes(TARGET, torch.device("cpu"), None) if one.problem.width == 16384)
    assert [row.parameters["rows"] for row in one.contests] == [1, 16, 256, 4096, 65536]
    assert rows_of(262144) == (1, 16, 256, 4096)
    assert rows_of(1 << 31) == (1,)


@pytest.mark.parametrize("alone", [False, True])
def test_ranges_of_the_sampler_have_the_same_candidates(alone: bool) -> None:
    spec = SamplingSpec(vocab=151936)
    found = list(sampling.ranges(spec, TARGET, alone))
    assert (found[0][0], found[-1][1]) == (1, 1024)
    assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(found))
    for first, last in found:
        assert named(spec, TARGET, first, 4, alone) == named(spec, TARGET, last, 4, alone)
    assert {128, 256, 512} < {last for _, last in found}


def test_rows_of_a_model() -> None:
    """Its hidden size, and its vocabulary in float32 and as it computes logits."""
    config = {"num_attention_heads": 8, "hidden_size": 2048, "vocab_size": 32000, "dtype": "bfloat16"}
    model, device = models.shape_of(config), torch.device("cpu")
    assert [one.name for one in norm.classes(TARGET, device, model)] == [
        "norm-2048-bfloat16",
        "norm-2048-bfloat16-residual",
    ]
    assert {one.name for one in softmax.classes(TARGET, device, model)} == {
        f"{kind}-32000-{dtype}" for kind in ("softmax", "log-softmax") for dtype in ("float32", "bfloat16")
    }
    assert {(one.problem.vocab, one.problem.dtype) for one in sampling.classes(TARGET, device, model)} == {
        (32000, "float32"),
        (32000, "bfloat16"),
    }


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize(
    ("family", "problem"),
    [
        (norm, NormProblem(rows=3, width=256, residual=True)),
        (softmax, SoftmaxProblem(rows=3, width=256)),
        pytest.param(sampling, SamplingProblem(rows=2, vocab=300, filters="k+p"), marks=pytest.mark.rest),
        (sampling, SamplingProblem(rows=2, vocab=300, filters="p")),
    ],
    ids=["norm", "softmax", "sampling", "top-p"],
)
def test_kernels_of_rows_run_as_they_do_on_a_gpu(family: Any, problem: Any, tmp_path: Path) -> None:
    """On the emulator, whose times decide nothing; the last of three configurations is told to be the fastest."""
    path = tmp_path / "tuned.json"
    whole = family.contest(problem, TARGET, torch.device("cpu"))
    few = dataclasses.replace(whole, configs=(whole.configs[0], whole.configs[1], whole.configs[-1]))
    (one,) = (
        dataclasses.replace(found, contests=(few,)) for found in family.classes(TARGET, torch.device("cpu"), None)[:1]
    )
    times = iter([10.0, 9.0, 8.0, 10.0, 8.0])

    def told(launch: Launch, layers: int, device: torch.device) -> timing.Timer:
        return Clock(launch, layers, [next(times)])

    console = Console(file=io.StringIO(), width=200)
    with emulator.device(arch="sm_90a", sms=4):
        assert tune.tune([one], TARGET, SHARED, path, console, 0.0, told) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "FAILED" not in text
    records, problems = one.tuned_configs.read(path)
    assert problems == []
    assert [(record.config, record.measurement.us) for record in records] == [(few.configs[-1], 8.0)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_classes(arch: str) -> None:
    """Of every kind; a class's rows have the same configurations, the heuristic's first; each can be kept."""
    target = dataclasses.replace(from_arch(arch), gpu=GPU)
    found = [one for family in (attention, linear) for one in family.classes(target, torch.device("cpu"), None)]
    assert len({one.problem for one in found}) == len(found)
    assert {one.name.partition("-")[0] for one in found} >= {"decode", "prefill", "mla_decode"}
    for one in found:
        assert len({tuple(row.configs) for row in one.contests}) == 1
        # There are no records of such a GPU. A projection is compared with cuBLAS, also where dispatch has ours.
        few = isinstance(one.contests[0].configs[0], Unfused) and one.problem.most_rows <= UNRECORDED_ROWS
        for row in one.contests:
            assert row.chosen in row.configs
            assert (row.chosen == row.configs[0]) is not (few and arch == "sm_90a"), one.name
        for config in one.contests[0].configs[:1]:
            made = one.tuned_configs.record(one.problem, config, **SHARED, us=1.0, default_us=2.0)
            assert one.tuned_configs.understood(json.loads(made.measurement.model_dump_json())) == made


def test_ranges_of_rows_leave_no_gap() -> None:
    found = [one.problem for one in linear.classes(TARGET, torch.device("cpu"), None)]
    first = [one for one in found if one.n == found[0].n]
    assert first[0].least_rows == 1
    assert all(one.most_rows + 1 == other.least_rows for one, other in itertools.pairwise(first))


def test_experts_are_compared_with_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges leave no gap, both ends are timed, and only this package's kernels can be recorded."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(experts, "vllm_objections", lambda problem: [])
    found = experts.classes(TARGET, torch.device("cpu"), None)
    for weight in (None, "e4m3-128x128"):
        first = [one for one in found if (one.problem.num_experts, one.problem.weight) == (128, weight)]
        assert first[0].problem.least_rows == 1
        assert all(a.problem.most_rows + 1 == b.problem.least_rows for a, b in itertools.pairwise(first))
    for one in found:
        ends = dict.fromkeys((one.problem.least_rows, one.problem.most_rows))
        assert [of_end.parameters["m"] for of_end in one.contests] == list(ends)
        for of_end in one.contests:
            assert of_end.configs == (Theirs(), Ours())
            assert [spec.family for spec in of_end.precompile_specs] == ["experts"]
    # The second one has no kernel of this package's at all.
    for other in ("sm_80", "sm_75"):
        assert experts.classes(from_arch(other), torch.device("cpu"), None) == []
    monkeypatch.setattr(experts, "vllm_objections", lambda problem: ["vllm is not installed"])
    assert experts.classes(TARGET, torch.device("cpu"), None) == []


@pytest.fixture
def vllms_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it, on a CPU."""

    def product(problem: Any, inputs: Any) -> Callable[[Any], torch.Tensor]:
        return lambda layer: products(layer.x, layer.weight).to(torch.bfloat16)

    for module in (scaled, scaled_sweep):
        monkeypatch.setattr(module, "theirs_product", lambda problem: product)


@pytest.mark.usefixtures("vllms_product")
@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_layers_in_8_bits_are_compared_with_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges leave no gap, both ends are timed with the same configurations, and each of ours can be recorded."""
    monkeypatch.setattr(scaled, "TUNED", {name: scaled.TUNED[name] for name in ("gate-up", "v3-tp8-o")})
    found = scaled.classes(TARGET, torch.device("cpu"), None)
    assert len({one.problem for one in found}) == len(found) == 4 * len(scaled.ROWS)
    for sizes in {one.problem.of_rows(1, 1) for one in found}:
        of_layer = [one.problem for one in found if one.problem.of_rows(1, 1) == sizes]
        assert of_layer[0].least_rows == 1
        assert all(a.most_rows + 1 == b.least_rows for a, b in itertools.pairwise(of_layer))
    for one in found:
        ends = dict.fromkeys((one.problem.least_rows, one.problem.most_rows))
        assert [of_end.parameters["m"] for of_end in one.contests] == list(ends)
        assert len({tuple(of_end.configs) for of_end in one.contests}) == 1
        first, second, *others = one.contests[0].configs
        assert (first, second) == (ScaledTheirs(), ScaledOurs())
        assert len(others) == scaled.MOST
        for config in (second, *others):
            made = one.tuned_configs.record(one.problem, config, **SHARED, us=1.0, default_us=2.0)
            assert one.tuned_configs.understood(json.loads(made.measurement.model_dump_json())) == made
            for of_end in one.contests:
                assert of_end.precompile_spec(config) is not None
        assert one.launches == ()
    blocks = next(one for one in found if one.problem.weight == "e4m3-128x128" and one.problem.least_rows == 2)
    rows = [ScaledProblem(**of_end.parameters) for of_end in blocks.contests]
    monkeypatch.setattr(scaled, "theirs_product", lambda problem: scaled.deep_gemm_product)
    tasks = scaled.launches(rows)
    assert [(task.case.problem, task.provider.name) for task in tasks] == [(row, "DeepGEMM") for row in rows]
    assert launch_once(dataclasses.replace(tasks[0], device="cpu"))
    for module in (scaled, scaled_sweep):
        monkeypatch.setattr(module, "theirs_product", lambda problem: None)
    assert scaled.classes(TARGET, torch.device("cpu"), None) == []


@pytest.mark.usefixtures("vllms_product")
@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_in_8_bits_run_as_they_do_on_a_gpu(tmp_path: Path, gated: bool) -> None:
    """On the emulator, whose times decide nothing; one of the configurations is told to be the fastest."""
    path = tmp_path / "tuned.json"
    small = dataclasses.replace(TARGET, sm_count=4)
    problem = ScaledProblem(m=3, n=128, k=256, scheme="blocks", gated=gated)
    whole = scaled_sweep.contest(problem, small, torch.device("cpu"))
    # VLLM's, the cost model's choice, and another one.
    few = dataclasses.replace(whole, configs=whole.configs[:3])
    one = Class(scaled.TUNED_CONFIGS, scaled.problem_of(problem.spec, 4).of_rows(3, 3), (few,))
    times = iter([10.0, 9.0, 8.0, 10.0, 8.0])

    def told(launch: Launch, layers: int, device: torch.device) -> timing.Timer:
        return Clock(launch, layers, [next(times)])

    console = Console(file=io.StringIO(), width=200)
    with emulator.device(arch="sm_90a", sms=4):
        assert tune.tune([one], small, SHARED, path, console, 0.0, told) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "FAILED" not in text
    records, problems = scaled.TUNED_CONFIGS.read(path)
    assert problems == []
    assert [(record.config, record.measurement.us, record.measurement.default_us) for record in records] == [
        (few.configs[2], 8.0, 10.0)
    ]


def test_a_kernel_with_memory_of_its_own_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's experts return a new tensor: what was written into the layers' outputs is not theirs."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = ExpertsProblem(m=5, experts=4, hidden=64, width=40, topk=2)

    def theirs(problem: ExpertsProblem, inputs: Any) -> Callable[[int], torch.Tensor]:
        run = experts.ours(problem, inputs)

        def of_their_own(index: int) -> torch.Tensor:
            made = run(index).clone()
            inputs.layers[index].out.fill_(torch.nan)
            return made

        return of_their_own

    monkeypatch.setattr(experts, "vllm_triton", theirs)
    of_layer = experts.contest(problem, from_arch("cpu"), torch.device("cpu"))
    found = sweep.timed(of_layer, 0.0, lambda launch, layers, device: Clock(launch, layers, [1.0]))
    assert [(one.config, one.error) for one in found] == [(Theirs(), ""), (Ours(), "")]


def test_a_sweep_within_a_time(chip: Chip, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No problem is started after it; without one all are."""
    contests = [chip.contest(name, [DEFAULT, FASTER]) for name in ("first", "second")]
    given = argparse.Namespace(best=1, json=tmp_path / "times.jsonl", seconds=0.0, limit_seconds=None)
    assert sweep.run(contests, given) == 0
    rows = [json.loads(line)["row"] for line in given.json.read_text().splitlines()]
    assert rows == ["first", "first", "second", "second"]
    given.limit_seconds = -1.0
    assert sweep.run(contests, given) == 0
    assert given.json.read_text() == ""
    assert "2 of 2 problems were not timed" in capsys.readouterr().out


def test_drawn_layers_have_likely_configurations() -> None:
    """Those that dispatch may choose, the best by the estimate first; rows that are too many for split-K have none."""
    pytest.importorskip("cutlass")
    layer = Problem(m=300, n=3584, k=8192)
    found = linear_sweep.likely(layer, TARGET, 12)
    assert len(found) == 12
    assert found[0] == choose(layer.spec, 300, TARGET)
    estimates = [estimate_us(config, layer.spec, 300, TARGET) for config in found]
    assert estimates == sorted(estimates)
    assert set(linear_sweep.likely(layer, TARGET, 1000)) < set(fitting(layer.spec, TARGET))
    options = argparse.Namespace(drawn=101, shapes="typo", rows="1")
    drawn = list(linear_sweep.chosen_problems(options))
    assert len(drawn) == 100
    assert drawn != list(linear_sweep.chosen_problems(argparse.Namespace(**vars(options) | {"drawn": 102})))


def test_experts_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's share; none where the model has none."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(experts, "vllm_objections", lambda problem: [])
    config = {"num_attention_heads": 8, "hidden_size": 2048, "vocab_size": 1000, "intermediate_size": 1024}
    dense = models.shape_of(config, tensor_parallel=2)
    assert experts.classes(TARGET, torch.device("cpu"), dense) == []
    routed = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
    found = experts.classes(TARGET, torch.device("cpu"), models.shape_of(config | routed, tensor_parallel=2))
    sizes = {(one.problem.num_experts, one.problem.intermediate_size, one.problem.topk) for one in found}
    assert sizes == {(16, 384, 4)}


def test_experts_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In e4m3 blocks: the kernels that dispatch chooses for such weights; other formats have no classes."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(experts, "vllm_objections", lambda problem: [])
    config = {
        "num_attention_heads": 8,
        "hidden_size": 2048,
        "vocab_size": 1000,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
    }
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    found = experts.classes(TARGET, torch.device("cpu"), models.shape_of(config | blocks))
    assert {one.problem.weight for one in found} == {"e4m3-128x128"}
    assert len(found) == len(experts.TOKENS)
    for of_class in found:
        for of_ends in of_class.contests:
            (unit,) = of_ends.precompile_specs
            assert type(unit.key).__name__ == "ScaledExpertsKey"
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    assert experts.classes(TARGET, torch.device("cpu"), models.shape_of(config | mxfp4)) == []


def test_classes_of_a_model() -> None:
    config = {
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "head_dim": 128,
        "vocab_size": 1000,
        "intermediate_size": 18944,
        "dtype": "float16",
    }
    model = models.shape_of(config, tensor_parallel=2)
    device = torch.device("cpu")
    assert [one.name for one in attention.classes(TARGET, device, model)] == [
        "decode-hd128-g7-float16",
        "prefill-hd128-g7-float16",
    ]
    layers = [one.problem for one in linear.classes(TARGET, device, model)]
    assert {(one.n, one.k, one.gated, one.dtype) for one in layers} == {
        (9472, 3584, True, "float16"),
        # q, k and v; their output; down; logits, of a vocabulary that is padded to 1024.
        (2304, 3584, False, "float16"),
        (3584, 1792, False, "float16"),
        (3584, 9472, False, "float16"),
        (512, 3584, False, "float16"),
    }
    assert max(one.most_rows for one in layers if not one.gated) == 64 < max(one.most_rows for one in layers)
    deepseek = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "intermediate_size": None}
    model = models.shape_of(config | deepseek | {"dtype": "bfloat16", "num_attention_heads": 128}, tensor_parallel=8)
    assert [one.name for one in attention.classes(TARGET, device, model)] == [
        "mla_decode-hd576x512-g16-bfloat16",
        "prefill-hd192x128-g1-bfloat16-packed",
    ]
    assert {(one.problem.n, one.problem.k) for one in linear.classes(TARGET, device, model)} == {(128, 3584)}, (
        "the logits alone"
    )


def test_facts_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without a checkout has no commit: the package's version stands for it."""
    versions = dict.fromkeys((*tune.facts.COMPILERS, "vllm"), "1.2")
    gathered = {"driver": "580.1", "commit": None, "modified": False, "versions": versions}
    monkeypatch.setattr(tune, "facts", SimpleNamespace(gather=lambda device: gathered, COMPILERS=tune.facts.COMPILERS))
    found = tune.shared_facts(TARGET, torch.device("cpu"))
    assert found["commit"].startswith("dsl-backend ")
    assert found["versions"] == {"driver": "580.1", "nvidia-cutlass-dsl": "1.2", "torch": "1.2"}
    assert (found["gpu"], found["arch"], found["chip"]) == (GPU, "sm_90a", None)
