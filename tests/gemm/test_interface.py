# SPDX-License-Identifier: Apache-2.0
"""What the GEMMs take, and what they refuse."""

from dataclasses import replace

import pytest
import torch

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.gemm.configs import candidates
from dsl_backend.gemm.spec import Dtypes, Rows
from dsl_backend.gemm.tiles import GemmTiles
from dsl_backend.linear import dispatch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace

needs_cute = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
SPEC = LinearSpec(n=64, k=128, dtypes=Dtypes.of(torch.bfloat16))
MIXED = Dtypes(x=torch.bfloat16, weight=torch.float16, out=torch.bfloat16)
H200 = from_arch("sm_90a")


@pytest.mark.parametrize("kernel", [entry.name for entry in dispatch.TABLE])
def test_rows_that_only_the_device_knows_are_refused(kernel: str) -> None:
    if kernel == "cute" and toolkit.missing():
        pytest.skip("CuTe DSL is not installed")
    entry = next(entry for entry in dispatch.TABLE if entry.name == kernel)
    bind = entry.load()
    with pytest.raises(Unsupported, match="number of rows that only the device knows"):
        bind(SPEC, Rows(8, on_device=True), H200, Workspace(torch.device("cpu")))


def test_operands_of_several_types_are_refused() -> None:
    mixed = replace(SPEC, dtypes=MIXED)
    words = "x, weight and out need one dtype, these are bfloat16 x float16 -> bfloat16"
    assert words in dispatch.cute(mixed, H200)
    assert words in dispatch.triton(mixed, H200)
    assert words not in dispatch.cute(SPEC, H200)


@pytest.mark.parametrize("name", ["x", "weight", "out"])
def test_each_type_is_checked(name: str) -> None:
    accepted = "one of float16, bfloat16 is needed"
    with pytest.raises(InvalidInput, match=f"dtype of {name} is float32: {accepted}"):
        replace(SPEC, dtypes=replace(MIXED, **{name: torch.float32}))
    with pytest.raises(InvalidInput, match=f"dtype of {name} is float8_e4m3fn, which needs a scale"):
        replace(SPEC, dtypes=replace(MIXED, **{name: torch.float8_e4m3fn}))


def test_sizes_come_from_the_operands_types() -> None:
    """A stage of x, a box of weights and the staged output count by their own types."""
    config = next(config for config in candidates(SPEC, H200) if isinstance(config, GemmTiles))

    class Wide:
        """Stands for a type of 4 bytes, which no kernel takes yet."""

        itemsize = 4

    def bytes_with(**changes: object) -> int:
        dtypes = Dtypes.of(torch.bfloat16)
        for operand, dtype in changes.items():
            object.__setattr__(dtypes, operand, dtype)
        return config.smem_bytes(replace(SPEC, dtypes=dtypes))

    usual = bytes_with()
    assert bytes_with(x=Wide) - usual == config.stages * config.tile_m * 64 * 2
    assert bytes_with(weight=Wide) - usual == config.stages * config.weight_rows * 64 * 2
    assert bytes_with(out=Wide) - usual == config.epilogue_elements(SPEC.parts) * 2


@needs_cute
@pytest.mark.parametrize("value", [3, 3.0, True])
def test_python_numbers_are_not_compiled_in(value: object) -> None:
    from cutlass import Int32

    from dsl_backend.gemm.args import GemmArgs, require_dynamic
    from dsl_backend.gemm.host import fake_args, key_of

    args = fake_args(key_of(SPEC, candidates(SPEC, H200)[0]))
    require_dynamic(args)
    with pytest.raises(InvalidInput, match=r"args\.max_ctas is the Python number"):
        require_dynamic(args._replace(max_ctas=value))  # type: ignore[arg-type]
    require_dynamic(GemmArgs(args.operands, None, Int32(3)))
    with pytest.raises(InvalidInput, match=r"args\.operands\.bias is the Python number"):
        require_dynamic(args._replace(operands=args.operands._replace(bias=value)))  # type: ignore[arg-type]


@needs_cute
def test_arrival_counts_follow_from_the_edge() -> None:
    from dsl_backend.primitives.pipeline import TMA, UMMA, warpgroups, warps

    assert [role.count for role in (TMA, UMMA, warps(4), warps(4, ctas=2), warpgroups(2, ctas=2))] == [1, 1, 4, 8, 4]
