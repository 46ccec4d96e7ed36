# SPDX-License-Identifier: Apache-2.0
"""Experts as an operator: what it makes of its tensors, and one node for torch.compile."""

from dataclasses import replace

import pytest
import torch

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import api, ops
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.testing.experts import BLOCK_SCALED_CASES, CASES, SCALED_CASES, SHARED_CASES, ExpertsCase, tensors

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ops.plan_of.cache_clear()


def facts_of(case: ExpertsCase) -> tuple[str, list[float], str, float]:
    """What the operator is told beside tensors."""
    name, parameters = ops.named(case.spec.activation, case.spec.interleaved)
    return name, parameters, case.router_weights.value, case.shared_weight


def shared_of(given: ExpertsOperands) -> list[torch.Tensor]:
    """Weights of shared experts."""
    return [one for one in (given.shared_w13, given.shared_w2) if one is not None]


def operands_of(given: ExpertsOperands) -> tuple[object, ...]:
    """What the operator is given of tensors, beside the output."""
    weights, routing = [given.w13, given.w2, *shared_of(given)], [given.topk_weights, given.topk_ids, given.expert_map]
    return given.x, weights, routing, [given.w13_bias, given.w2_bias], list(given.scales)


def by_operator(case: ExpertsCase, given: ExpertsOperands) -> torch.Tensor:
    out = torch.full_like(given.out, torch.nan)
    ops.EXPERTS(out, *operands_of(given), *facts_of(case))
    return out


@pytest.mark.parametrize("name", [*CASES, *SCALED_CASES, *SHARED_CASES, *BLOCK_SCALED_CASES])
def test_as_by_plan_and_run(name: str) -> None:
    """All that a plan is told, the operator reads off its tensors."""
    case = (CASES | SCALED_CASES | SHARED_CASES | BLOCK_SCALED_CASES)[name]
    given = tensors(case, "cpu")
    plan = api.plan(case.spec, CPU)
    more = {"w13_bias": given.w13_bias, "w2_bias": given.w2_bias, "expert_map": given.expert_map}
    shared = {"shared_w13": given.shared_w13, "shared_w2": given.shared_w2}
    run = api.run(plan, *given[:5], **more, **shared, scales=given.scales)
    assert torch.equal(by_operator(case, given).nan_to_num(), run.nan_to_num())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "activation", [Swiglu(), Swiglu(alpha=2.0, beta=0.5), SWIGLU_OAI, Geglu(), Geglu(tanh=True)], ids=str
)
def test_activations_in_a_schema(activation: Activation, interleaved: bool) -> None:
    assert ops.activation_of(*ops.named(activation, interleaved)) == (activation, interleaved)


def test_one_node_of_a_graph() -> None:
    case = CASES["gpt-oss"]
    given, facts, graphs = tensors(case, "cpu"), facts_of(case), []

    def layer(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ops.EXPERTS(out, x, *operands_of(given)[1:], *facts)
        return out + 1

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    out = compiled(torch.empty_like(given.out), given.x)
    assert torch.equal(out, by_operator(case, given) + 1)
    assert [name for name in graphs[0] if "experts" in name] == ["dsl_backend.experts.default"]


def test_scales_of_no_format() -> None:
    given = tensors(SCALED_CASES["blocks"], "cpu")
    given = given._replace(scales=given.scales._replace(w13=torch.ones(4)))
    with pytest.raises(InvalidInput, match=r"w13_scale has 1 dimensions: 2 \(channels\) or 3 \(blocks\) are needed"):
        by_operator(SCALED_CASES["blocks"], given)


def test_scales_of_other_weights() -> None:
    case = BLOCK_SCALED_CASES["nvfp4"]
    given = tensors(case, "cpu")
    given = given._replace(w13=given.w13.view(torch.float8_e4m3fn))
    with pytest.raises(InvalidInput, match="w13 is float8_e4m3fn with scales in float8_e4m3fn: scales in float32, or"):
        by_operator(case, given)


def test_a_kernel_that_is_named() -> None:
    case = CASES["gpt-oss"]
    given = tensors(case, "cpu")
    ops.EXPERTS(given.out, *operands_of(given), *facts_of(case), "reference")
    with pytest.raises(Unsupported, match="experts decode: serves GPUs of"):
        ops.EXPERTS(given.out, *operands_of(given), *facts_of(case), "cute-decode")


def test_a_plan_for_each_kind_of_layer() -> None:
    case = CASES["gpt-oss"]
    given = tensors(case, "cpu")
    by_operator(case, given)
    by_operator(case, tensors(replace(case, tokens=3), "cpu"))
    assert ops.plan_of.cache_info().currsize == 1


def test_tensors_that_are_no_layer() -> None:
    case = CASES["gpt-oss"]
    given = tensors(case, "cpu")
    with pytest.raises(InvalidInput, match="w2 has shape"):
        by_operator(case, given._replace(w2=given.w2[:-1]))
