# SPDX-License-Identifier: Apache-2.0
"""Operators of torch: torch.compile sees one node, and bad registrations are refused."""

import itertools

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.op import register_op

NUMBERS = itertools.count()


def name() -> str:
    return f"of_a_test_{next(NUMBERS)}"


def scale(x: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    out.copy_(x * factor)


def rows(x: torch.Tensor, count: int) -> torch.Tensor:
    # What a kernel does cannot be traced.
    return torch.from_numpy(x.numpy()[:count].sum(axis=1))


def fake_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty(count)


def test_torch_accepts_it() -> None:
    """Torch's own checks: schema, fake tensors, dynamic shapes."""
    for op, arguments in (
        (register_op(name(), rows, fake=fake_rows), (torch.randn(5, 4), 3)),
        (
            register_op(name(), scale, fake=lambda x, factor, out: None, mutates=["out"]),
            (torch.randn(4), 2.0, torch.zeros(4)),
        ),
    ):
        results = torch.library.opcheck(op, arguments)
        assert set(results.values()) == {"SUCCESS"}


class Weight(torch.nn.Parameter):
    """A parameter that hears of every function that is called with it, as vLLM's do."""

    heard = 0

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        cls.heard += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_looks_at_tensors_of_other_classes_are_no_calls() -> None:
    def looks(x: torch.Tensor) -> torch.Tensor:
        return x.new_full((x.shape[0],), sum(x.stride()))

    op = register_op(name(), looks, fake=lambda x: x.new_empty(x.shape[0]))
    weight = Weight(torch.zeros(3, 4), requires_grad=False)
    assert (weight.shape, Weight.heard) == ((3, 4), 1)
    assert op(weight).tolist() == [5.0] * 3
    assert Weight.heard == 2


def test_a_lie_is_found() -> None:
    """The check above can fail: a fake that makes another shape, and a write that was not announced."""
    wrong = register_op(name(), rows, fake=lambda x, count: x.new_empty(count + 1))
    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
        torch.library.opcheck(wrong, (torch.randn(5, 4), 3))
    silent = register_op(name(), scale, fake=lambda x, factor, out: None)
    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
        torch.library.opcheck(silent, (torch.randn(4), 2.0, torch.zeros(4)))


def test_compiled_code_has_it_as_one_node() -> None:
    op = register_op(name(), rows, fake=fake_rows)
    writes = register_op(name(), scale, fake=lambda x, factor, out: None, mutates=["out"])
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        writes(x, 3.0, out)
        return op(out, 2) + 1

    x = torch.randn(4, 8)
    torch.testing.assert_close(function(x), (x * 3)[:2].sum(dim=1) + 1)
    torch.testing.assert_close(function(x.repeat(2, 2)), (x * 6)[:2].sum(dim=1) + 1)
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count(op) == called.count(writes) == 1


def test_again() -> None:
    chosen = name()
    op = register_op(chosen, rows, fake=fake_rows)
    assert register_op(chosen, rows, fake=fake_rows) is op
    assert op is getattr(torch.ops.dsl_backend, chosen).default
    with pytest.raises(InvalidInput, match=f"operator dsl_backend::{chosen} is registered already"):
        register_op(chosen, scale, fake=fake_rows)


def unannotated(x, y: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return x


@pytest.mark.parametrize(
    ("chosen", "function", "mutates", "message"),
    [
        ("a-b", rows, (), "operator name 'a-b' is not an identifier"),
        ("unannotated", unannotated, (), "operator dsl_backend::unannotated cannot be registered: .*annotation"),
        ("mutates", rows, ["z"], "operator dsl_backend::mutates cannot be registered: .*z"),
    ],
)
def test_refusals(chosen: str, function: object, mutates: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        register_op(chosen, function, fake=fake_rows, mutates=mutates)  # type: ignore[arg-type]
    assert not hasattr(torch.ops.dsl_backend, "unannotated")
