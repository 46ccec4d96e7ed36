# SPDX-License-Identifier: Apache-2.0
"""What the code of a CuTe DSL linear layer depends on."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from dsl_backend.linear.configs import Config
from dsl_backend.linear.spec import Activation

Its = TypeVar("Its", bound=Config, covariant=True)


@dataclass(frozen=True, kw_only=True)
class LinearKey(Generic[Its]):
    """All that a kernel's code depends on; see `spec.LinearSpec`. The configuration's class says which kernel it is."""

    dtype: str
    activation: Activation | None
    interleaved: bool
    bias: bool
    residual: bool
    config: Its
