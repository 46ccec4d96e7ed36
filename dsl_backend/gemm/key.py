# SPDX-License-Identifier: Apache-2.0
"""What the code of a GEMM kernel depends on."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from dsl_backend.gemm.activation import Activation
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles

ConfigT = TypeVar("ConfigT", bound=GemmTiles | SmallMTiles, covariant=True)


@dataclass(frozen=True, kw_only=True)
class GemmKey(Generic[ConfigT]):
    """All that a kernel's code depends on; see `spec.GemmSpec`. The configuration's class says which kernel it is.

    Attributes:
        apart: an activation's values share no arithmetic: the bits of one do not depend on another row's.
    """

    dtypes: Dtypes
    activation: Activation | None
    interleaved: bool
    bias: bool
    residual: bool
    config: ConfigT
    apart: bool = False
