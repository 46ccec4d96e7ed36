# SPDX-License-Identifier: Apache-2.0
"""Kernels in chains that overlap: no findings, and the bits of the same kernels launched one by one.

docs/dependent-launch.md is the contract that the chains keep, and that the mistakes break.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("cutlass")

from emulator.machine.findings import Kind
from tests.primitives.dependent_chains import (
    ARCHS,
    CHAINS,
    SCHEDULES,
    WAIT,
    Builder,
    Mistake,
    decode,
    execute,
    kernel_of,
    run,
    tall_mlp,
    two_mlps,
    with_early_launch,
    with_late_wait,
    without_wait,
    without_waits,
)

QUICK = {("two_mlps", "sm_90a"), ("softmaxes", "sm_100a")}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=() if (name, arch) in QUICK else (pytest.mark.rest,))
        for name, (_, archs) in CHAINS.items()
        for arch in archs
    ],
)
def test_chain(name: str, arch: str) -> None:
    builder, _ = CHAINS[name]
    expected = run(builder, arch, "eager", overlap=False)
    assert not any(tensor.is_floating_point() and tensor.isnan().any() for tensor in expected)
    for seed, schedule in enumerate(SCHEDULES):
        for tensor, right in zip(run(builder, arch, schedule, seed), expected, strict=True):
            assert torch.equal(tensor.view(torch.uint8), right.view(torch.uint8)), schedule


# (launch, wait) of a decode step that nothing needs there: the first two projections write what no launch before them
# accesses, and have nothing to add that a launch wrote.
NOT_NEEDED = {"sm_90a": {(5, 1), (9, 1)}, "sm_100a": {(5, 0), (9, 0)}}


def launches_of_ours(builder: Builder, arch: str) -> list[tuple[int, int]]:
    """(launch, how many waits it has) of a chain's launches of this package's kernels."""
    _, machine = execute(builder, arch, "eager")
    return [
        (number, kernel_of(launch).count(WAIT))
        for number, launch in enumerate(machine.launches)
        if "dsl_backend" in launch.kernel
    ]


def is_found(builder: Builder, arch: str, launch: int, edit: Callable[[str], str]) -> bool:
    """Whether the emulator finds that a launch of a chain with a mistake depends on another one."""
    _, machine = execute(builder, arch, "lazy", mistake=Mistake(launch, edit))
    return Kind.DEPENDENCY in {one.kind for one in machine.findings}


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
def test_every_wait_is_needed(arch: str) -> None:
    """In a decode step: it comes behind the next access to global memory, which is seldomer a mistake than no wait."""
    missed = {
        (launch, wait)
        for launch, waits in launches_of_ours(decode, arch)
        for wait in range(waits)
        if not is_found(decode, arch, launch, partial(with_late_wait, number=wait))
    }
    assert missed == NOT_NEEDED[arch]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=(pytest.mark.full,) if arch == "sm_100a" else ())
        for name in ("latent", "rotation", "latent_rotation", "split_k", "verification", "scaled")
        for arch in ARCHS
    ],
)
def test_a_launch_that_does_not_wait_is_found(name: str, arch: str) -> None:
    """Each launch of this package in turn, except for one that nothing comes before.

    All of them access what a launch before wrote, or one behind them does, and relies on their wait for it.
    """
    builder, _ = CHAINS[name]
    launches = launches_of_ours(builder, arch)
    assert len(launches) > 2
    assert all(waits for _, waits in launches)
    behind = [launch for launch, _ in launches if launch > 0]
    assert [launch for launch in behind if not is_found(builder, arch, launch, without_waits)] == []


@pytest.mark.parametrize("edit", [without_wait, with_late_wait])
def test_missing_wait_is_found(edit: Callable[..., str]) -> None:
    """Of the load warp, in the second of two layers: it loads what the first one is about to store."""
    _, machine = execute(two_mlps, "sm_90a", "lazy", mistake=Mistake(1, partial(edit, number=0)))
    (finding, *_) = (one for one in machine.findings if one.kind is Kind.DEPENDENCY)
    assert "dsl_backend/" in finding.place.source
    assert finding.other is not None
    assert "dsl_backend/" in finding.other.source


@pytest.mark.parametrize("builder", [two_mlps, pytest.param(tall_mlp, marks=pytest.mark.rest)])
def test_tensor_memory_that_the_next_kernel_may_take_is_found(builder: Builder) -> None:
    """It is allocated behind launch_dependents."""
    _, machine = execute(builder, "sm_100a", "lazy", mistake=Mistake(0, with_early_launch))
    assert [one.kind for one in machine.findings] == [Kind.TENSOR_MEMORY]
