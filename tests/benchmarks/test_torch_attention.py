# SPDX-License-Identifier: Apache-2.0
"""The columns of torch's attention and of this package's Triton kernel are right in rows of one length."""

from importlib import metadata

import pytest
import torch

import benchmarks
from benchmarks import check
from benchmarks.attention import torch_sdpa
from benchmarks.attention.problems import dense

# Imports of several seconds, and Triton's interpreter.
LONG = ("torch.compile", "Triton")


@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("name", ["torch", *(pytest.param(one, marks=pytest.mark.rest) for one in LONG)])
def test_prefill(name: str, heads_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention is not compiled here: that takes a GPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch_sdpa, "needs_gpu", list)
    operator, problem = benchmarks.operators()["prefill"], dense(64, 4, heads_kv, [20, 20], [20, 20])
    (column,) = (one for one in operator.providers([]) if one.name == name)
    assert not column.objections(problem)
    inputs = operator.build(problem, 2, torch.device("cpu"), 3)
    prepared = column.prepare(problem, inputs)
    out = prepared.view(prepared.run(1))
    check.require_right(out, operator.reference(problem, inputs, 1), problem.limits)


@pytest.mark.parametrize(
    ("number", "said"),
    [(91002, "cuDNN 9.10.2"), (None, "without cuDNN"), (RuntimeError("needs a\nnewer one"), "needs a newer one")],
)
def test_cudnn_has_a_version(number: int | Exception | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int | None:
        if isinstance(number, Exception):
            raise number
        return number

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    (column,) = (one for one in benchmarks.operators()["prefill"].providers([]) if one.name == "cuDNN")
    assert column.source.startswith(f"torch {metadata.version('torch')}, {said}")


@pytest.mark.parametrize("name", ["torch", "torch.compile", "cuDNN"])
def test_torch_says_what_it_does_not_serve(name: str) -> None:
    """CuDNN's own frontend serves e4m3."""
    (column,) = (one for one in benchmarks.operators()["prefill"].providers([]) if one.name == name)
    said = column.objections(dense(64, 4, 2, [1, 9], [40, 30], window_left=6, kv_dtype=torch.float8_e4m3fn))
    found = [word for word in ("length", "context", "window", "torch does not pass fp8") if word in " ".join(said)]
    assert found == ["length", "context", "window", *(["torch does not pass fp8"] if name != "cuDNN" else [])]
