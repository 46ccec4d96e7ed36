# SPDX-License-Identifier: Apache-2.0
"""Test cases of experts: their tensors, their reference, random cases."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from dsl_backend.experts import api, reference
from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.testing.numerics import assert_within_budget

F16, BF16 = torch.float16, torch.bfloat16
SENTINEL = 77.0
ACTIVATIONS: tuple[Activation, ...] = (Swiglu(), SWIGLU_OAI, Geglu(), Geglu(tanh=True), Swiglu(limit=1.0))
# How tokens are routed: evenly, by Zipf's law, all to the same experts, to half of the experts.
ROUTINGS = ("uniform", "zipf", "one", "half")


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """A layer of experts, and what its tensors hold.

    Attributes:
        routing: one of ROUTINGS.
        padding: share of tokens' experts that are -1.
        mapped: there is an expert map: this rank has every other expert of twice as many.
        pad_x, pad_out: elements between rows.
        special: some tokens are NaN, infinite and zero.
    """

    tokens: int
    num_experts: int
    hidden: int
    width: int
    topk: int
    dtype: torch.dtype = BF16
    activation: Activation = field(default_factory=Swiglu)
    interleaved: bool = False
    biases: bool = False
    router_weights: RouterWeights = RouterWeights.OUTPUT
    mapped: bool = False
    ids_dtype: torch.dtype = torch.int32
    routing: str = "uniform"
    padding: float = 0.0
    pad_x: int = 0
    pad_out: int = 0
    gain: float = 1.0
    special: bool = False
    seed: int = 0

    @property
    def global_experts(self) -> int:
        return 2 * self.num_experts if self.mapped else self.num_experts

    @property
    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            num_experts=self.num_experts,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            topk=self.topk,
            dtype=self.dtype,
            activation=self.activation,
            interleaved=self.interleaved,
            w13_bias=self.biases,
            w2_bias=self.biases,
            router_weights=self.router_weights,
            global_experts=self.global_experts if self.mapped else None,
            ids_dtype=self.ids_dtype,
        )


def routed(case: ExpertsCase, generator: torch.Generator) -> torch.Tensor:
    """Different experts for each token, int64 [tokens, topk], some of them -1."""
    known = case.global_experts
    share = torch.ones(known)
    if case.routing == "zipf":
        share = 1 / torch.arange(1, known + 1)
    elif case.routing == "one":
        share[case.topk :] = 0
    elif case.routing == "half":
        share[: max(0, known // 2 - case.topk)] = 0
    ids = torch.multinomial(share.expand(case.tokens, known), case.topk, generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < case.padding] = -1
    return ids


def strided(values: torch.Tensor, pad: int, device: str) -> torch.Tensor:
    """A matrix whose rows have sentinels between them."""
    rows, width = values.shape
    buffer = torch.full((rows, width + pad), SENTINEL, dtype=values.dtype, device=device)
    view = buffer[:, :width]
    view.copy_(values)
    return view


def tensors(case: ExpertsCase, device: str) -> ExpertsOperands:
    """The operands of a case on a device."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * gain).to(case.dtype)

    experts, hidden, width = case.num_experts, case.hidden, case.width
    x = normal(case.tokens, hidden, gain=case.gain)
    if case.special:
        for start, value in enumerate((torch.nan, torch.inf, 0.0, -torch.inf)):
            x[start::7] = 0.0
            x[start::7, -1] = value
    ids = routed(case, generator)
    expert_map = None
    if case.mapped:
        expert_map = torch.full((case.global_experts,), -1, dtype=torch.int32)
        expert_map[1::2] = torch.arange(experts, dtype=torch.int32)
        expert_map = expert_map.to(device)
    weighted = case.router_weights is not RouterWeights.NONE
    return ExpertsOperands(
        x=strided(x, case.pad_x, device),
        w13=normal(experts, 2 * width, hidden, gain=hidden**-0.5).to(device),
        w2=normal(experts, hidden, width, gain=width**-0.5).to(device),
        topk_weights=torch.rand(case.tokens, case.topk, generator=generator).to(device) if weighted else None,
        topk_ids=ids.to(case.ids_dtype).to(device),
        w13_bias=normal(experts, 2 * width).to(device) if case.biases else None,
        w2_bias=normal(experts, hidden).to(device) if case.biases else None,
        expert_map=expert_map,
        out=strided(torch.full((case.tokens, hidden), SENTINEL, dtype=case.dtype), case.pad_out, device),
    )


def judge(case: ExpertsCase, given: ExpertsOperands) -> None:
    """Check that the error of `given.out` is within budget, and that nothing between its rows was written."""
    exact = reference.exact(case.spec, given)
    naive = reference.exact(case.spec, given, dtype=case.dtype)
    rounded = exact.to(torch.float32).to(case.dtype).double()
    # Values that overflow the output's type become infinities.
    exact = torch.where(rounded.isinf(), rounded, exact)
    assert_within_budget(given.out, exact, naive, what=str(case))
    stride = case.hidden + case.pad_out
    whole = given.out.as_strided((case.tokens, stride), (stride, 1))
    assert bool((whole[:, case.hidden :] == SENTINEL).all()), f"{case}: elements between rows were written"


def check_experts(case: ExpertsCase, kernel: str | None, device: str) -> None:
    """Raises AssertionError where the kernel's result is wrong."""
    given = tensors(case, device)
    plan = api.plan(case.spec, device, kernel=kernel)
    api.run(
        plan,
        given.x,
        given.w13,
        given.w2,
        given.topk_weights,
        given.topk_ids,
        w13_bias=given.w13_bias,
        w2_bias=given.w2_bias,
        expert_map=given.expert_map,
        out=given.out,
    )
    judge(case, given)


PLAIN = ExpertsCase(tokens=9, num_experts=6, hidden=72, width=40, topk=3)
CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        "plain": PLAIN,
        "one": ExpertsCase(tokens=1, num_experts=1, hidden=8, width=8, topk=1, dtype=F16),
        "many-tokens": ExpertsCase(tokens=300, num_experts=5, hidden=136, width=72, topk=2, routing="zipf"),
        "all-to-one": ExpertsCase(tokens=70, num_experts=8, hidden=64, width=64, topk=1, routing="one"),
        "without-tokens": ExpertsCase(tokens=33, num_experts=16, hidden=64, width=48, topk=2, routing="half"),
        "many-experts": ExpertsCase(tokens=20, num_experts=200, hidden=32, width=16, topk=16),
        "padding": ExpertsCase(tokens=40, num_experts=6, hidden=72, width=40, topk=3, padding=0.4),
        "all-padding": ExpertsCase(tokens=7, num_experts=6, hidden=72, width=40, topk=3, padding=1.0),
        "mapped": ExpertsCase(tokens=40, num_experts=6, hidden=72, width=40, topk=4, mapped=True, padding=0.1),
        "int64": ExpertsCase(tokens=12, num_experts=6, hidden=72, width=40, topk=3, ids_dtype=torch.int64),
        "gpt-oss": ExpertsCase(
            tokens=25,
            num_experts=8,
            hidden=72,
            width=88,
            topk=4,
            activation=SWIGLU_OAI,
            interleaved=True,
            biases=True,
            gain=6,
        ),
        "input-weights": ExpertsCase(
            tokens=21, num_experts=4, hidden=40, width=72, topk=1, router_weights=RouterWeights.INPUT
        ),
        "no-weights": ExpertsCase(
            tokens=21, num_experts=4, hidden=40, width=72, topk=2, router_weights=RouterWeights.NONE, dtype=F16
        ),
        "special": ExpertsCase(tokens=30, num_experts=4, hidden=72, width=40, topk=2, special=True),
        "strides": ExpertsCase(tokens=30, num_experts=4, hidden=72, width=40, topk=2, pad_x=8, pad_out=24),
        **{
            f"activation-{i}": ExpertsCase(
                tokens=19, num_experts=4, hidden=72, width=40, topk=2, activation=one, gain=3, biases=i % 2 == 0
            )
            for i, one in enumerate(ACTIVATIONS)
        },
    }
)


def qwen3_30b(tokens: int, routing: str = "uniform") -> ExpertsCase:
    return ExpertsCase(tokens=tokens, num_experts=128, hidden=2048, width=768, topk=8, routing=routing)


REAL: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        **{f"real-qwen3-{tokens}": qwen3_30b(tokens) for tokens in (1, 3, 16, 64, 200, 1000, 4096)},
        **{f"real-qwen3-{routing}": qwen3_30b(500, routing) for routing in ROUTINGS[1:]},
        "real-deepseek-v2-lite": ExpertsCase(tokens=300, num_experts=64, hidden=2048, width=1408, topk=6),
        "real-gpt-oss": ExpertsCase(
            tokens=77,
            num_experts=32,
            hidden=2880,
            width=2880,
            topk=4,
            activation=SWIGLU_OAI,
            interleaved=True,
            biases=True,
        ),
    }
)


def random_case(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ExpertsCase:
    """A random layer of experts whose sizes are multiples of 8.

    Args:
        most: tokens and sizes are up to about this number.
        facts: draws what kernels are compiled for, so that several cases can share a kernel; `draw` by default.
    """

    def size() -> int:
        value = int(2 ** draw.uniform(0, (most + 1).bit_length() - 1))
        if draw.random() < 0.3:
            value = max(1, round(value / 64) * 64 + draw.choice((-1, 0, 1)))
        return value

    facts = facts or draw
    topk = facts.choice((1, 1, 2, 3, 4, 8))
    choices = tuple(RouterWeights) if topk == 1 else (RouterWeights.OUTPUT, RouterWeights.OUTPUT, RouterWeights.NONE)
    return ExpertsCase(
        tokens=size(),
        num_experts=topk + draw.randrange(min(most, 130)),
        hidden=-(-size() // 8) * 8,
        width=-(-size() // 8) * 8,
        topk=topk,
        dtype=facts.choice((F16, BF16)),
        activation=facts.choice(ACTIVATIONS),
        interleaved=facts.random() < 0.3,
        biases=facts.random() < 0.25,
        router_weights=facts.choice(choices),
        mapped=facts.random() < 0.25,
        ids_dtype=facts.choice((torch.int32, torch.int64)),
        routing=draw.choice(ROUTINGS),
        padding=draw.choice((0.0, 0.0, 0.2, 0.9)),
        pad_x=draw.choice((0, 0, 8, 40)),
        pad_out=draw.choice((0, 0, 8, 40)),
        gain=draw.choice((1.0, 1.0, 0.1, 5.0)),
        special=draw.random() < 0.15,
        seed=draw.randrange(2**31),
    )
