# SPDX-License-Identifier: Apache-2.0
"""A provider that fails, lies or objects gets a cell that says so, and never a time."""

import time
from collections.abc import Callable

import pytest
import torch

import benchmarks
from benchmarks import check, runner, timing
from benchmarks.attention import inputs, oracle
from benchmarks.attention.inputs import Inputs
from benchmarks.attention.problems import Problem, dense
from benchmarks.case import Reference, case_of
from dsl_backend.providers import Launch, Limits

CPU = torch.device("cpu")
CASE = case_of("two", dense(64, 4, 2, [1, 1], [5, 20]))
SETTINGS = runner.Settings(seconds=0.01)


class Right:
    """Copies the exact result."""

    name, default = "right", True

    def objections(self, problem: Problem) -> list[str]:
        return []

    def limits(self, problem: Problem) -> Limits:
        return check.BF16_LIMITS

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        exact = [oracle.reference(problem, inputs, index).values for index in range(len(inputs.layers))]

        def run(index: int) -> torch.Tensor:
            inputs.layers[index].out.copy_(exact[index])
            return inputs.layers[index].out

        return Launch(run)


class Altered(Right):
    """Changes a right result with `change` from the launch `since` on."""

    def __init__(self, name: str, change: Callable[[torch.Tensor], object], since: int = 0) -> None:
        self.name, self.change, self.since = name, change, since

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        right = super().prepare(problem, inputs)
        launches = 0

        def run(index: int) -> torch.Tensor:
            nonlocal launches
            out = right.run(index)
            if launches >= self.since:
                self.change(out)
            launches += 1
            return out

        return Launch(run)


class Raises(Right):
    def __init__(self, where: str) -> None:
        self.name, self.where = f"raises in {where}", where

    def objections(self, problem: Problem) -> list[str]:
        if self.where == "objections":
            raise ImportError("no such\nlibrary")
        return []

    def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
        if self.where == "prepare":
            raise RuntimeError("does not compile")

        def run(index: int) -> torch.Tensor:
            raise RuntimeError("does not launch")

        return Launch(run)


class Objects(Right):
    name = "objects"

    def objections(self, problem: Problem) -> list[str]:
        return ["has one reason", "and another"]


def fail_later(launches: int) -> Callable[[torch.Tensor], None]:
    def change(out: torch.Tensor) -> None:
        nonlocal launches
        launches -= 1
        if launches < 0:
            raise RuntimeError("worked until now")

    return change


def run(*providers: Right, settings: runner.Settings = SETTINGS) -> dict[str, runner.Cell]:
    row = runner.run_case(benchmarks.operators()["decode"], CASE, providers, CPU, settings)
    assert [cell.provider for cell in row.cells] == [provider.name for provider in providers]
    return {cell.provider: cell for cell in row.cells}


def test_a_right_provider_is_timed() -> None:
    cell = run(Right())["right"]
    assert cell.status == "ok"
    assert cell.error is not None
    assert cell.error.total < 3e-3
    assert cell.time is not None
    assert 0 < cell.time.p10_us <= cell.time.median_us <= cell.time.p90_us
    assert cell.time.samples >= runner.ROUNDS


@pytest.mark.parametrize("where", ["objections", "prepare", "run"])
def test_a_provider_that_raises_is_reported_and_the_others_run(where: str) -> None:
    cells = run(Raises(where), Right())
    bad = cells[f"raises in {where}"]
    assert (bad.status, bad.time) == ("error", None)
    assert "\n" not in bad.message
    assert bad.message.startswith(("ImportError: no such library", "RuntimeError: does not"))
    assert cells["right"].status == "ok"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.mul_(1.05), "error"),
        (lambda out: out[1, 3].neg_(), "worst row"),
        (lambda out: out[0, 0, :1].fill_(torch.nan), "1 of 512 elements are not finite"),
        (lambda out: out.zero_(), "error"),
    ],
    ids=["scaled", "one row", "one element", "zeros"],
)
def test_a_wrong_result_is_not_timed(change: Callable[[torch.Tensor], object], message: str) -> None:
    cells = run(Altered("wrong", change), Right())
    assert (cells["wrong"].status, cells["wrong"].time) == ("wrong", None)
    assert message in cells["wrong"].message
    assert cells["right"].status == "ok"


def test_a_result_that_goes_wrong_when_replayed_is_seen() -> None:
    assert run(Altered("second", lambda out: out.zero_(), since=1))["second"].status == "wrong"


def test_an_output_that_nobody_writes_is_seen() -> None:
    class Idle(Right):
        name = "idle"

        def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
            return Launch(lambda index: inputs.layers[index].out)

    # the provider before it left the right result in the same memory
    cells = run(Right(), Idle())
    assert cells["idle"].status == "wrong"
    assert "never written" in cells["idle"].message


def test_a_provider_that_fails_while_timed_is_reported() -> None:
    cells = run(Altered("tires", fail_later(4)), Right())
    assert cells["tires"].status == "error"
    assert "worked until now" in cells["tires"].message
    assert cells["right"].status == "ok"


def test_objections_are_kept() -> None:
    cell = run(Objects(), Right())["objects"]
    assert (cell.status, cell.message) == ("skipped", "has one reason; and another")


def test_a_provider_that_compiles_for_too_long_is_given_up() -> None:
    class Slow(Right):
        name = "slow"

        def prepare(self, problem: Problem, inputs: Inputs) -> Launch:
            time.sleep(30)
            raise AssertionError

    start = time.perf_counter()
    cells = run(Slow(), Right(), settings=runner.Settings(seconds=0.01, prepare_seconds=2.0))
    assert time.perf_counter() - start < 20
    assert cells["slow"].message == "TimeoutError: not ready after 2 s"
    assert cells["right"].status == "ok"


def test_inputs_that_cannot_be_made_fail_the_row_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(inputs, "build", too_large)
    cell = run(Right())["right"]
    assert cell.status == "error"
    assert "no room" in cell.message


def test_providers_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    class Logged:
        def __init__(self, name: str) -> None:
            self.name, self.results = name, []  # type: ignore[var-annotated]

        def sample(self) -> float:
            order.append(self.name)
            return 1.0

    summaries = runner.measure_in_turns({"a": Logged("a"), "b": Logged("b")}, seconds=0.0)
    # each turn: one sample that is not counted and one that is
    assert order[:8] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert all(
        isinstance(summary, timing.Summary) and summary.samples == runner.ROUNDS for summary in summaries.values()
    )


def test_summary_takes_quantiles() -> None:
    summary = timing.summarize([float(value) for value in range(101)])
    assert (summary.median_us, summary.p10_us, summary.p90_us, summary.samples) == (50, 10, 90, 101)
    assert timing.summarize([3.0, 1.0]).median_us == 2.0


def test_layers_outgrow_the_cache() -> None:
    l2 = 60 << 20
    assert timing.layers_needed(34 << 20, l2) == 6
    assert timing.layers_needed(1 << 30, l2) == 1
    assert timing.layers_needed(1, l2) == timing.MOST_LAYERS
    assert timing.layers_needed(100, 0) == 1


def test_a_row_of_zeros_is_measured_on_the_others_scale() -> None:
    exact = torch.ones(4, 2, 8, dtype=torch.float64)
    exact[2, 1] = 0
    reference = Reference(torch.arange(4), exact)
    assert check.measure(exact.float(), reference) == check.Error(0.0, 0.0)
    wrong = exact.clone()
    wrong[2, 1] = 1
    assert check.measure(wrong.float(), reference).row > 1
