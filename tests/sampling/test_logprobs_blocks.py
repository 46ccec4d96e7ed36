# SPDX-License-Identifier: Apache-2.0
"""Launches over blocks write the definition's log-probabilities, from any workspace, behind any sampler."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dsl_backend.runtime.target import detect
from dsl_backend.sampling import reference
from dsl_backend.sampling.spec import Parameters
from dsl_backend.sampling.triton import logprobs_host as host
from dsl_backend.testing import sampling
from dsl_backend.testing.sampling import INF, NAN, SamplingCase, row

# Of a GPU with which 1300 logits are three blocks, the last one in part.
SMS, VOCAB = 6, 1300
# All filters, each on and off, and greedy rows.
MIXED = tuple(row("spread", t=3, k=k, p=p, m=m) for k, p, m in product((0, 70), (1.0, 0.6), (0.0, 0.01)))
MIXED += (row(t=0, k=70, p=0.6),)
TIES = (
    *(row("ties", t=5, k=300, p=0.5, m=0.001), row("equal", p=0.4), row("ties", k=40), row("equal", p=0.0)),
    *(row("ties", t=2, p=0.2), row("equal", p=0.01), row("equal", p=0.999), row("equal", k=3, p=0.5)),
    row("zeros", p=0.5),
)
ODD = (
    *(row("inf", k=5, p=0.9), row("dead", k=5, p=0.9), row("nan", p=0.8), row("all-nan", p=0.8), row(t=NAN, p=0.5)),
    *(row(name, p=0.8) for name in ("dead", "few", "one", "inf", "huge", "steep", "sorted")),
    *(row(name, k=5, p=0.9) for name in ("all-nan", "few", "masked")),
    *(row(t=INF, k=9), row(k=-3, p=NAN, m=NAN), row(k=2**31 - 1, p=-1.0), row(k=4, m=2.0)),
)
ROWS = {"mixed": MIXED, "ties": TIES, "odd": ODD}


def case_of(rows: tuple[Any, ...], vocab: int = VOCAB, **facts: Any) -> SamplingCase:
    return SamplingCase(id="", why="", vocab=vocab, rows=rows, **facts)


def written(x: torch.Tensor, parameters: Parameters, sms: int = SMS) -> torch.Tensor:
    """Log-probabilities, by a workspace that holds the worst that a step before can leave."""
    target = detect(x.device)
    if x.device.type == "cpu":
        target = replace(target, sm_count=sms)
    rows, vocab = x.shape
    writer = host.RowLogprobs(vocab, target, rows + 1, x.device)
    for tensor in writer.workspace:
        tensor.fill_(NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 4)
    found = torch.full((rows, vocab), 7.0, device=x.device)
    writer.launch(x, parameters, found)
    return found


def assert_same(found: torch.Tensor, x: torch.Tensor, parameters: Parameters) -> None:
    """What is kept is exact; the rest is rounding."""
    _, expected = reference.sample(x, parameters)
    assert torch.equal(found > -INF, expected > -INF), (
        f"{(found > -INF).sum(1).tolist()} tokens are kept where {(expected > -INF).sum(1).tolist()} are right"
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [MIXED[1::3], TIES[:2], ODD[:4]])
def test_rows_of_two_blocks(rows: tuple[Any, ...], device: torch.device) -> None:
    """The second one in part."""
    x, parameters = sampling.tensors(case_of(rows, 700), device)
    assert_same(written(x, parameters, 2), x, parameters)


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_three_blocks(name: str, device: torch.device) -> None:
    x, parameters = sampling.tensors(case_of(ROWS[name]), device)
    assert_same(written(x, parameters), x, parameters)


@pytest.mark.full
def test_sums_by_blocks(device: torch.device) -> None:
    """Of the same bits in one block and in three; the number of blocks is that of a GPU's SMs."""
    x, parameters = sampling.tensors(case_of(MIXED[::3] + TIES[::4]), device)
    assert torch.equal(written(x, parameters), written(x, parameters, 1))


@pytest.mark.parametrize("rows", [MIXED[7:8], pytest.param(MIXED[::3] + TIES[::4], marks=pytest.mark.full)])
def test_programs_with_several_blocks(
    rows: tuple[Any, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many rows; the number of programs changes no bit."""
    x, parameters = sampling.tensors(case_of(rows), device)
    expected = written(x, parameters)
    for programs in (1, 2):
        monkeypatch.setattr(host.RowSums, "grid", lambda _, rows, programs=programs: (rows, programs))
        assert torch.equal(written(x, parameters), expected)


def test_programs_of_rows(device: torch.device) -> None:
    """Many rows have few programs each."""
    sums = host.RowSums(128_256, replace(detect(device), sm_count=132), 1, device)
    assert [sums.grid(rows) for rows in (6, 384, 6000)] == [(6, 63), (384, 11), (6000, 1)]


@pytest.mark.parametrize("vocab", [1, pytest.param(300, marks=pytest.mark.full)])
def test_few_logits(vocab: int, device: torch.device) -> None:
    x, parameters = sampling.tensors(case_of((MIXED[7], TIES[0], ODD[0]), vocab), device)
    assert_same(written(x, parameters), x, parameters)


@pytest.mark.full
def test_a_real_vocabulary(device: torch.device) -> None:
    x, parameters = sampling.tensors(case_of((row(k=50, p=0.9), row("ties", p=0.7), row(m=0.02)), 128_256), device)
    assert_same(written(x, parameters, 132), x, parameters)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_random_rows(seed: int, device: torch.device) -> None:
    case = sampling.random_case(seed, widest=VOCAB)
    x, parameters = sampling.tensors(case, device)
    if not sampling.has_subnormal(x):
        assert_same(written(x, parameters), x, parameters)


class Launches:
    """Records the launches of a kernel; `change` says with which grid each is made, or that it is not (None)."""

    def __init__(self, kernel: Any, change: Callable[[tuple[int, ...], int], tuple[int, ...] | None]) -> None:
        self.kernel, self.change = kernel, change
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        changed = self.change(grid, len(self.grids))
        self.grids.append(grid)
        return (lambda *_, **__: None) if changed is None else self.kernel[changed]


KERNELS = ("max_of_row_blocks", "count_digits", "sum_of_row_blocks", "sum_digits", "write_logprobs")


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ((), (1, 0, 1, 0, 1)),
        (("temperature", "min_p"), (1, 0, 1, 0, 1)),
        (("top_k",), (1, 7, 1, 0, 1)),
        (("top_p",), (1, 0, 1, 7, 1)),
        (("top_k", "top_p"), (1, 7, 1, 7, 1)),
    ],
)
def test_launches(given: tuple[str, ...], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that no row has are not launched; each launch has a program for each block of each row."""
    found = {name: Launches(getattr(host, name), lambda grid, n: None) for name in KERNELS}
    for name, kernel in found.items():
        monkeypatch.setattr(host, name, kernel)
    x, parameters = sampling.tensors(case_of(MIXED[:4]))
    some = Parameters(
        **{name: value for name, value in vars(parameters).items() if name in ("seeds", "positions", *given)}
    )
    written(x, some)
    assert tuple(len(kernel.grids) for kernel in found.values()) == counts
    assert {grid for kernel in found.values() for grid in kernel.grids} == {(4, 3)}


def test_filters_that_are_off_for_all_rows(device: torch.device) -> None:
    x, parameters = sampling.tensors(case_of((row(t=1), row("ties", t=1))), device)
    none = Parameters(seeds=parameters.seeds, positions=parameters.positions)
    assert_same(written(x, none), x, none)
    assert torch.equal(written(x, none), written(x, parameters))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("sum_of_row_blocks", lambda grid, n: (grid[0], grid[1] - 1), id="a block's sum is missing"),
        pytest.param(
            "count_digits",
            lambda grid, n: None if n == 3 else grid,
            id="a digit of top-k is missing",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "sum_digits",
            lambda grid, n: None if n == 3 else grid,
            id="a digit of top-p is missing",
            marks=pytest.mark.full,
        ),
        pytest.param("sum_digits", lambda grid, n: (grid[0], grid[1] - (n == 6)), id="ties of a block are not counted"),
    ],
)
def test_a_launch_that_does_less_is_found(
    name: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(host, name, Launches(getattr(host, name), change))
    x, parameters = sampling.tensors(case_of((row(t=3, k=70, p=0.6), row("equal", p=0.4)), 700), device)
    with pytest.raises(AssertionError):
        assert_same(written(x, parameters, 2), x, parameters)
