# SPDX-License-Identifier: Apache-2.0
"""Gated activations of a GEMM's epilogue."""

from dataclasses import dataclass

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
                checks.number(f"Swiglu's {name}", value)


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
