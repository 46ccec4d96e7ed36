# SPDX-License-Identifier: Apache-2.0
"""Problems in processes that may hang or crash: each gets an outcome, whatever becomes of those before it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import verify_children

from dsl_backend.errors import InvalidInput
from dsl_backend.testing import fuzz, tables, worker
from dsl_backend.testing.cases import CASES
from dsl_backend.testing.worker import Outcome, Status


def test_a_child_that_hangs_is_ended() -> None:
    with worker.Child(verify_children.silent) as child:
        with pytest.raises(TimeoutError, match="not done after 0 s"):
            child.receive(0.2)
        assert child.process.is_alive()
    assert not child.process.is_alive()
    assert not child.log.exists()


def test_a_child_that_dies_is_heard() -> None:
    with worker.Child(verify_children.dies, 3) as child:
        assert child.receive(60) == "before"
        with pytest.raises(EOFError, match="exit status 3: last words"):
            child.receive(60)


class Scripted:
    """A child that does to each problem what its name says."""

    began: list[tuple[str, ...]] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        assert work is worker.check_all
        names = arguments[2]
        self.names = iter(names)
        self.began.append(names)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None: ...

    def receive(self, seconds: float) -> Outcome:
        name = next(self.names)
        if name.startswith("hang"):
            raise TimeoutError("not done")
        if name.startswith("crash"):
            raise EOFError("exit status -11")
        return Outcome(name, Status.ERROR if name.startswith("fault") else Status.RIGHT, lost=name.startswith("fault"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(worker, "Child", Scripted)
    Scripted.began.clear()
    return Scripted


def outcomes(*names: str) -> list[tuple[str, Status]]:
    return [(one.name, one.status) for one in worker.checks("decode", "cute", names, "cuda")]


def test_what_follows_a_loss_runs_in_another_process(scripted: type[Scripted]) -> None:
    assert outcomes("a", "hang", "b", "fault", "c") == [
        ("a", Status.RIGHT),
        ("hang", Status.HUNG),
        ("b", Status.RIGHT),
        ("fault", Status.ERROR),
        ("c", Status.RIGHT),
    ]
    assert scripted.began == [("a", "hang", "b", "fault", "c"), ("b", "fault", "c"), ("c",)]


def test_after_too_many_losses_the_rest_is_not_run(scripted: type[Scripted]) -> None:
    found = outcomes("crash-1", "hang", "a", "crash-2", "b", "c")
    assert found[:4] == [
        ("crash-1", Status.CRASHED),
        ("hang", Status.HUNG),
        ("a", Status.RIGHT),
        ("crash-2", Status.CRASHED),
    ]
    assert found[4:] == [("b", Status.NOT_RUN), ("c", Status.NOT_RUN)]
    assert len(scripted.began) == worker.MOST_LOST
    assert Status.NOT_RUN.failed


def test_a_loss_of_the_last_problem_starts_nothing(scripted: type[Scripted]) -> None:
    assert outcomes("a", "crash") == [("a", Status.RIGHT), ("crash", Status.CRASHED)]
    assert len(scripted.began) == 1


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (AssertionError("off by one"), Status.WRONG, "off by one"),
        (RuntimeError("no such thing"), Status.ERROR, "RuntimeError: no such thing"),
        (worker.Unsupported("x", {"cute": ["too wide", "too long"]}), Status.REFUSED, "too wide; too long"),
    ],
)
def test_what_a_kernel_raises(monkeypatch: pytest.MonkeyPatch, raised: Exception, status: Status, says: str) -> None:
    def check(*_: object) -> None:
        raise raised

    monkeypatch.setattr(fuzz, "check", check)
    found = worker.check("softmax", "cute", "warp", "cpu")
    assert (found.status, found.message, found.lost) == (status, says, False)
    found = worker.check("softmax", "cute", "fuzz-3-1", "cpu")
    assert found.message.startswith(says)
    assert ("SoftmaxCase(id='fuzz-" in found.message) == found.status.failed, "Python that rebuilds a random problem"


def test_a_fault_of_the_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(fuzz, "check", fault)
    monkeypatch.setattr(tables, "find", fault)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    sent: list[Outcome] = []
    sender: worker.Connection = type("Sender", (), {"send": staticmethod(sent.append)})()  # type: ignore[assignment]
    worker.check_all(sender, "softmax", "cute", ("warp", "block"), "cuda")
    assert [(one.name, one.status, one.lost) for one in sent] == [("warp", Status.ERROR, True)]


@pytest.mark.parametrize("family", fuzz.FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_name_is_found(family: str, device: str) -> None:
    names = tables.names(family, device, quick=False, random=2, seed=3)
    assert names[-2:] == [f"fuzz-3-{index}" for index in range(2)]
    assert len(set(names)) == len(names)
    problems = [tables.find(family, name, device) for name in names]
    assert len(problems) > (5 if device == "cpu" else 8)
    quick = tables.names(family, device, quick=True, random=0, seed=0)
    assert set(quick) < set(names)
    assert any("real" in name or "vocabulary" in name for name in names) == (device == "cuda")


def test_every_attention_case_has_a_family() -> None:
    found = [name for family in ("prefill", "decode", "mla") for name in tables.table(family, "cuda")]
    assert sorted(found) == sorted(case.id for case in CASES)


@pytest.mark.parametrize("name", ["no-such", "fuzz-1", "fuzz-a-b", ""])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(InvalidInput, match="softmax has no problem") as refused:
        tables.find("softmax", name, "cpu")
    assert repr(name) in str(refused.value)
    assert "cluster-16" in str(refused.value)
