# SPDX-License-Identifier: Apache-2.0
"""Linear layers of packed weights as functions: results, what is refused, what is compiled ahead."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear.weight_only import api, dispatch, eager, precompile
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.target import detect, from_arch
from dsl_backend.testing.weight_only import (
    CASES,
    REAL,
    WeightOnlyCase,
    WeightOnlyTensors,
    check_weight_only,
    judge,
    random_case,
    tensors,
)

W4 = WeightOnlyFormat()
KINDS = (W4, WeightOnlyFormat(zero_points=True, group=256), WeightOnlyFormat(bits=8, group=None))
CASE = WeightOnlyCase(rows=70, n=136, k=456, kind=W4, bias=True)
ON_GPU = torch.cuda.is_available()
SM90 = "cute-sm90"
KERNELS = (
    pytest.param("reference", marks=pytest.mark.skipif(ON_GPU, reason="is for CPUs")),
    pytest.param(SM90, marks=pytest.mark.gpu),
)
# Problems on a GPU: four of each layer, since every kernel takes seconds to compile.
FUZZED, LAYERS = 40, 10


def check(case: WeightOnlyCase, kernel: str, device: torch.device) -> None:
    """Skips on a GPU that is not the kernel's."""
    if kernel == SM90 and (why := detect(device).arch_objections("sm90")):
        pytest.skip("; ".join(why))
    check_weight_only(case, kernel, device.type)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, kernel: str, device: torch.device) -> None:
    check(CASES[name], kernel, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_real(name: str, device: torch.device) -> None:
    check(REAL[name], SM90, device)


# More of them: `dsl-backend verify --families weight_only_linear`.
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(FUZZED))
def test_fuzz_on_a_gpu(seed: int, device: torch.device) -> None:
    rows = 64 if seed % 2 else 2000
    check(random_case(seed, 3000, 3000, rows, facts=random.Random(seed % LAYERS)), SM90, device)


def test_fuzz_on_a_cpu() -> None:
    for seed in range(60):
        check_weight_only(random_case(seed, 150, 400, 100), "reference", "cpu")


def altered(given: WeightOnlyTensors, what: str) -> WeightOnlyTensors:
    """Tensors with one mistake in what the kernel is given, and not in what is expected."""
    if what == "a weight":
        packed = given.packed.clone()
        packed.view(torch.uint8).view(-1)[0] ^= 0x0F
        return given._replace(packed=packed)
    return given._replace(x=given.x.roll(1, 1)) if what == "columns of k" else given._replace(bias=given.bias * 1.05)


@pytest.mark.parametrize("what", ["a weight", "columns of k", "bias"])
def test_the_check_sees_what_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the way of `dsl-backend verify`, whose API gets other tensors."""
    inner = api.weight_only_linear

    def wrong(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, **how: Any) -> torch.Tensor:
        given = altered(tensors(CASE, "cpu"), what)
        return inner(given.x, given.packed, given.bias, **how)

    check_weight_only(CASE, "reference", "cpu")
    monkeypatch.setattr(api, "weight_only_linear", wrong)
    with pytest.raises(AssertionError, match="beyond the budget"):
        check_weight_only(CASE, "reference", "cpu")


def called(case: WeightOnlyCase, given: WeightOnlyTensors, **options: Any) -> None:
    given.out.copy_(api.weight_only_linear(given.x, given.packed, given.bias, n=case.n, kind=case.kind, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_reference_is_right(kind: WeightOnlyFormat, dtype: torch.dtype) -> None:
    case = WeightOnlyCase(rows=9, n=136, k=456, kind=kind, dtype=dtype, bias=True, pad_x=3)
    given = tensors(case, "cpu")
    called(case, given)
    judge(case, given)


@pytest.mark.parametrize("rows", [5, pytest.param(70, marks=pytest.mark.rest)])
def test_on_an_emulated_sm90(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What is chosen for the rows, from the checks to the launch; x's rows begin anywhere, and are copied."""
    emulator = pytest.importorskip("emulator")
    pytest.importorskip("cutlass")
    monkeypatch.setattr(eager, "targets", SimpleNamespace(detect=lambda device: from_arch("sm_90a")))
    monkeypatch.setattr(eager, "_known", {})
    case = WeightOnlyCase(rows=rows, n=136, k=456, kind=W4, bias=True, pad_x=3)
    given = tensors(case, "cpu")
    with emulator.device(arch="sm_90a", sms=4, schedule="lazy", strict=True):
        called(case, given, kernel="cute-sm90")
    judge(case, given)


def test_one_node_of_a_graph_for_any_number_of_rows() -> None:
    given = tensors(CASE, "cpu")
    nodes = []

    def backend(graph: Any, inputs: Any) -> Any:
        nodes.extend(node for node in graph.graph.nodes if "weight_only_linear" in str(node.target))
        return graph.forward

    def layer(x: torch.Tensor) -> torch.Tensor:
        return api.weight_only_linear(x, given.packed, given.bias, n=CASE.n, kind=W4)

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for rows in (70, 33):
        x = given.x[:rows].clone()
        assert torch.equal(compiled(x), layer(x))
    assert len(nodes) == 1


def test_no_rows() -> None:
    given = tensors(CASE, "cpu")
    out = api.weight_only_linear(given.x[:0], given.packed, n=CASE.n, kind=W4)
    assert (out.shape, out.dtype) == ((0, CASE.n), torch.bfloat16)


WRONG: dict[str, dict[str, Any]] = {
    "n is 0": {"n": 0},
    "n is 132: a multiple of 8": {"n": 132},
    "kind is 4: a WeightOnlyFormat": {"kind": 4},
    "kernel is 3: a name": {"kernel": 3},
    "no kernel 'marlin': choose one of cute-sm90, reference": {"kernel": "marlin"},
    r"packed has shape \(3, 4, 1056\): \[4, 4, 1056\] is needed for 200 rows of 456 columns": {"n": 200},
    "x is float32": {"x": torch.zeros(2, 456)},
    r"x has shape \(456,\)": {"x": torch.zeros(456, dtype=torch.bfloat16)},
    r"bias has shape \(8,\): \[136\] is needed": {"bias": torch.zeros(8, dtype=torch.bfloat16)},
    "dtype of packed is int64": {"packed": torch.zeros(3, 4, 1056, dtype=torch.int64)},
    "packed has strides": {"packed": torch.zeros(3, 4, 2112, dtype=torch.int32)[..., ::2]},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str) -> None:
    given = tensors(CASE, "cpu")
    facts = {"x": given.x, "packed": given.packed, "n": CASE.n, "kind": W4} | WRONG[message]
    with pytest.raises(InvalidInput, match=message):
        api.weight_only_linear(**facts)


def test_kernels_that_do_not_serve_say_why() -> None:
    given = tensors(CASE, "cpu")
    with pytest.raises(Unsupported, match="weight-only-linear sm90"):
        api.weight_only_linear(given.x, given.packed, n=CASE.n, kind=W4, kernel="cute-sm90")
    with pytest.raises(Unsupported, match="weight-only-linear reference: is for CPUs, this is sm_100a"):
        dispatch.choose(CASE.spec, from_arch("sm_100a"))


def test_all_that_is_chosen_is_compiled_ahead() -> None:
    pytest.importorskip("cutlass")
    from dsl_backend.gemm.sm90.weight_only_configs import candidates

    target = from_arch("sm_90a")
    specs = [str(one) for one in precompile.precompile_specs_of(CASE.spec, target)]
    assert len(specs) == len(set(specs)) == len(candidates(CASE.spec, target)) > 1
    assert list(precompile.precompile_specs_of(CASE.spec, from_arch("cpu"))) == []
