# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands by SM100's GEMMs."""

from functools import lru_cache

from dsl_backend.gemm.configs import estimate_us
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.scaled_host import build, key_of, run
from dsl_backend.gemm.sm100 import scaled_configs
from dsl_backend.gemm.sm100.configs import GemmConfig
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.scaled.kernel import Launch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


@lru_cache(maxsize=1 << 16)
def chosen(spec: ScaledLinearSpec, rows: int, target: Target, libraries: str) -> tuple[GemmConfig, Function]:
    """The kernel for so many rows, and its function, kept by what host code is linked with.

    The cost model of 16-bit GEMMs chooses among tiles: their order follows from bytes and waves.
    """
    found = scaled_configs.fitting(spec, target.smem_bytes)
    config = min(found, key=lambda one: estimate_us(one, spec, rows, target))
    kernel = scaled_configs.kernel(spec)
    return config, build(kernel, key_of(spec, config, spec.column_major), target)


def bind(spec: ScaledLinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernel for the rows."""
    count = rows.on_host()
    config, function = chosen(spec, count, target, toolkit.libraries())
    ctas = max_ctas(config, count, target)

    def launch(operands: ScaledOperands) -> None:
        run(function, config, operands, ctas, workspace)

    return launch
