# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands by the GEMMs of SM90 and SM100."""

from functools import lru_cache

from dsl_backend.gemm.configs import INVARIANT_FOR, Config, estimate_us
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.scaled_host import build, key_of, run
from dsl_backend.gemm.sm90 import scaled_configs as sm90
from dsl_backend.gemm.sm100 import scaled_configs as sm100
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
    arch = sm100 if target.tcgen05 else sm90
    config = min(arch.fitting(spec, target.smem_bytes), key=lambda one: estimate_us(one, spec, rows, target))
    return config, build(arch.kernel(spec, config), key_of(spec, config, spec.column_major), target)


def bind(spec: ScaledLinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernel for the rows."""
    count = rows.on_host()
    config, function = chosen(spec, count, target, toolkit.libraries())
    ctas = max_ctas(config, count, target)
    return lambda operands: run(function, config, operands, ctas, workspace)
