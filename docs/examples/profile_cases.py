# SPDX-License-Identifier: Apache-2.0
"""Cases of docs/profile-a-kernel.md, for `python -m emulator docs/examples/profile_cases.py::rows --profile`."""

from dataclasses import replace

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from dsl_backend.gemm import host as gemm_host
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.sm90.configs import GemmConfig
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.softmax.cute import host as softmax_host
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import config_of

SM90 = from_arch("sm_90a")


def softmax(width: int, vector: int = 8, two_pass: bool = False) -> None:
    """Four rows of bfloat16; `vector` elements in an access."""
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    spec = SoftmaxSpec(width=width, dtype=x.dtype, out_dtype=x.dtype, vector=vector)
    config = config_of(spec, SM90)
    config = replace(config, two_pass=two_pass, vectors_per_thread=2 if two_pass else config.vectors_per_thread)
    softmax_host.build(softmax_host.key_of(spec, config), SM90)(x, torch.empty_like(x))


def rows() -> None:
    softmax(4096)


def narrow() -> None:
    softmax(4096, vector=1)


def twice() -> None:
    softmax(4096, two_pass=True)


def gemm(cluster: int) -> None:
    """Two tiles of a layer with SwiGLU; with a cluster its two CTAs share the weights."""
    config = GemmConfig(tile_m=128, box_n=64, stages=3, cluster=cluster)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator).bfloat16() for rows in (256, 128))
    spec = LinearSpec(n=64, k=256, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
    operands = GemmOperands(x, weight, None, None, torch.empty(256, 64, dtype=torch.bfloat16))
    function = gemm_host.build(gemm_host.key_of(spec, config), SM90)
    gemm_host.run(function, config, operands, 2, Workspace(torch.device("cpu")))


def alone() -> None:
    gemm(1)


def shared() -> None:
    gemm(2)


class Transpose:
    """out = x.T of one tile, float32 [32, 32], through shared memory whose rows are `pitch` elements apart.

    Args:
        ordered: whether a barrier is between the stores and the loads.
    """

    def __init__(self, pitch: int, ordered: bool):
        self.pitch, self.ordered = pitch, ordered

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(32, 32, 1))

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        column, row, _ = cute.arch.thread_idx()
        layout = cute.make_layout((32, 32), stride=(self.pitch, 1))
        sTile = SmemAllocator().allocate_tensor(cutlass.Float32, layout)
        sTile[row, column] = mX[row, column]
        if cutlass.const_expr(self.ordered):
            cute.arch.sync_threads()
        mOut[row, column] = sTile[column, row]


def transpose(pitch: int, ordered: bool = True) -> None:
    x, out = torch.arange(1024.0).view(32, 32), torch.zeros(32, 32)
    arguments = [from_dlpack(one) for one in (x, out)]
    cute.compile(Transpose(pitch, ordered), *arguments)(*arguments)


def conflicts() -> None:
    transpose(32)


def padded() -> None:
    transpose(33)


def unordered() -> None:
    transpose(33, ordered=False)
