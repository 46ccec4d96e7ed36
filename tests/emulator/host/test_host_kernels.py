# SPDX-License-Identifier: Apache-2.0
"""What the DSL makes of instructions that few kernels have, run."""

import pytest
import torch

import emulator

pytest.importorskip("cutlass")

from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from gemm_kernels import BlackwellGemm
from simple_kernels import Totals


@pytest.mark.parametrize("ctas", [1, 2])
def test_mn_major_tf32(ctas: int) -> None:
    """Tensor maps and descriptors of the swizzle with 32-byte atoms are the DSL's own."""
    a, b = torch.randn(96, 128 * ctas).T, torch.randn(96, 192).T
    # What is kept of a float is exact in tf32, and so are the products in float32.
    a, b = ((one * 64).round() / 64 for one in (a, b))
    out = torch.zeros(128 * ctas, 192, dtype=torch.float16)
    with emulator.device(arch="sm_100a", sms=2, strict=True):
        tensors = [from_dlpack(one, assumed_align=16) for one in (a, b, out)]
        cute.compile(BlackwellGemm(ctas, tf32=True), *tensors)(*tensors)
    assert (out == (a.double() @ b.double().T).half()).all()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        *((dtype, count) for dtype in (torch.float16, torch.bfloat16) for count in (1, 2, 4, 8)),
        *((torch.float32, count) for count in (1, 2, 4)),
    ],
)
def test_atomic_additions(arch: str, dtype: torch.dtype, count: int) -> None:
    """Of 2 halves the DSL makes one packed number, of 4 and 8 a vector."""
    x = torch.randint(-1, 2, (64, count)).to(dtype)
    out = torch.full((count,), 3.0).to(dtype)
    wanted = x.double().sum(0) + 3
    with emulator.device(arch=arch, strict=True):
        tensors = [from_dlpack(one, assumed_align=16) for one in (x, out)]
        cute.compile(Totals(), *tensors)(*tensors)
    assert (out.double() == wanted).all()
