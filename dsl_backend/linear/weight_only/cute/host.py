# SPDX-License-Identifier: Apache-2.0
"""Linear layers of packed weights by the GEMMs of SM90: one for few rows, one for any number; both read one layout."""

from collections.abc import Iterator
from functools import lru_cache

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.sm90.weight_only_configs import Config, candidates, chosen
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.gemm.weight_only_host import build, key_of, run
from dsl_backend.linear.weight_only.kernel import Launch
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


@lru_cache(maxsize=1 << 12)
def function_of(spec: WeightOnlyGemmSpec, config: Config, target: Target, libraries: str) -> Function:
    """Kept by what it is linked with."""
    return build(key_of(spec, config), target)


def precompile_specs(spec: WeightOnlyGemmSpec, target: Target) -> Iterator[PrecompileSpec]:
    """Of any number of rows."""
    for config in candidates(spec, target):
        yield PrecompileSpec("linear", build, key_of(spec, config), target)


def bind(spec: WeightOnlyGemmSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernel for the rows."""
    count = rows.on_host()
    config = chosen(spec, count, target)
    function = function_of(spec, config, target, toolkit.libraries())
    ctas = max_ctas(config, count, target)

    def launch(operands: GemmOperands) -> None:
        run(function, config, operands, ctas, workspace)

    return launch
