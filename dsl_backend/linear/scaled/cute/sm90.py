# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands by SM90's GEMMs."""

from functools import lru_cache

from dsl_backend.gemm.configs import INVARIANT_FOR, Config, estimate_us
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.scaled_host import build, key_of, run
from dsl_backend.gemm.sm90 import scaled_configs
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.scaled.kernel import Launch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


@lru_cache(maxsize=1 << 16)
def chosen(spec: ScaledLinearSpec, rows: int, target: Target, libraries: str) -> tuple[Config, Function]:
    """The kernel for so many rows, and its function, kept by what host code is linked with.

    The cost model of 16-bit GEMMs chooses, with the bytes and the operations of 8 bits: nothing was timed.
    """
    rows = INVARIANT_FOR if spec.batch_invariant else rows
    found = scaled_configs.fitting(spec, target.smem_bytes)
    config = min(found, key=lambda one: estimate_us(one, spec, rows, target))
    key = key_of(spec, config, spec.column_major)
    return config, build(scaled_configs.kernel(config), key, target)


def bind(spec: ScaledLinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernel for the rows."""
    count = rows.on_host()
    config, function = chosen(spec, count, target, toolkit.libraries())
    ctas = max_ctas(config, count, target)
    return lambda operands: run(function, config, operands, ctas, workspace)
