# SPDX-License-Identifier: Apache-2.0
"""Gated activations of a GEMM's epilogue."""

import math
from dataclasses import dataclass
from functools import cache

from dsl_backend import checks


@dataclass(frozen=True, kw_only=True)
class Swiglu:
    """gate * sigmoid(alpha * gate) * (up + beta).

    Attributes:
        limit: clamps gate to at most `limit` and up to [-limit, limit]; NaN stays NaN. None clamps nothing.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            if value is not None or name != "limit":
                checks.number(f"Swiglu's {name}", value, 0 if name == "limit" else -math.inf)


@dataclass(frozen=True, kw_only=True)
class Geglu:
    """gelu(gate) * up.

    Attributes:
        tanh: gelu by its tanh approximation, instead of the error function.
    """

    tanh: bool = False

    def __post_init__(self) -> None:
        checks.flag("Geglu's tanh", self.tanh)


Activation = Swiglu | Geglu
# gpt-oss' activation. Its checkpoints alternate gate and up rows: `interleaved`.
SWIGLU_OAI = Swiglu(alpha=1.702, beta=1.0, limit=7.0)


def encoded(activation: Activation | None) -> tuple[str, list[float]]:
    """An activation in types that an operator's schema allows; `decoded` is the inverse."""
    if activation is None:
        return "none", []
    if isinstance(activation, Geglu):
        return "geglu", [float(activation.tanh)]
    limit = [] if activation.limit is None else [activation.limit]
    return "swiglu", [activation.alpha, activation.beta, *limit]


def decoded(name: str, parameters: list[float]) -> Activation | None:
    return _decoded(name, tuple(parameters))


@cache
def _decoded(name: str, parameters: tuple[float, ...]) -> Activation | None:
    if name == "none":
        return None
    if name == "geglu":
        return Geglu(tanh=bool(parameters[0]))
    return Swiglu(alpha=parameters[0], beta=parameters[1], limit=parameters[2] if len(parameters) > 2 else None)
