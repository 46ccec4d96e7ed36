# SPDX-License-Identifier: Apache-2.0
"""Linear layers by the CuTe DSL GEMMs."""

from functools import lru_cache

from dsl_backend.gemm.configs import Config
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.host import build, key_of, run
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.kernel import Launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import config_of
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


@lru_cache(maxsize=1 << 16)
def chosen(spec: LinearSpec, rows: int, target: Target, libraries: str) -> tuple[Config, Function]:
    """The kernel for so many rows, and its function, kept by what host code is linked with."""
    config = config_of(spec, rows, target)
    return config, build(key_of(spec, config), target)


def bind(spec: LinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The fastest kernel for the rows."""
    count = rows.on_host()
    config, function = chosen(spec, count, target, toolkit.libraries())
    ctas = max_ctas(config, count, target)
    return lambda operands: run(function, config, operands, ctas, workspace)
