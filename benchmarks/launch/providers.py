# SPDX-License-Identifier: Apache-2.0
"""The providers of a launch: CuTe DSL as this package calls it and as it comes, other DSLs, torch, torch.compile."""

from dataclasses import dataclass

import torch
from dsl_backend.providers import Run, provider
from dsl_backend.runtime import target as targets

from ..columns import missing, missing_cutile, missing_gluon, missing_tilelang, needs_gpu
from .problems import THREADS, Inputs, Problem

REFERENCE = "reference"


@dataclass(frozen=True)
class AddOneKey:
    """Of the compiled kernel: there is one."""


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    """Of CuTe DSL's kernel; `reference` is torch's, for a machine without a GPU."""
    if kernel == REFERENCE:
        return []
    if kernel is not None:
        return [f"launch has no kernel {kernel!r}: choose {REFERENCE}, or name none"]
    found = missing("cutlass", "nvidia-cutlass-dsl")
    return found or targets.detect().arch_objections("sm90", "sm100")


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """The kernel as this package compiles and calls its own: from its cache, through TVM-FFI."""
    return eager(problem, inputs) if kernel == REFERENCE else with_tvm_ffi(inputs, targets.detect())


def with_tvm_ffi(inputs: Inputs, target: targets.Target) -> Run:
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
    from dsl_backend.runtime.compile import compile_kernel

    from .kernels.cute_kernel import AddOne

    fake = [make_fake_compact_tensor(Float32, (1, cute.sym_int()), stride_order=(1, 0)) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    function = compile_kernel(AddOne(), (*fake, stream), key=AddOneKey(), target=target)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        function(layer.x, layer.out)
        return layer.out

    return run


def cute_objections(problem: Problem) -> list[str]:
    return objections(problem)


@provider(
    "launch", name="CuTe DSL", objections=cute_objections, package="nvidia-cutlass-dsl", code=["kernels/cute_kernel.py"]
)
def plain_cute(problem: Problem, inputs: Inputs) -> Run:
    """The same kernel as CuTe DSL's own examples call theirs: tensors are converted at each launch."""
    from cuda.bindings import driver
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    from .kernels.cute_kernel import AddOne

    def arguments(index: int) -> tuple[object, ...]:
        layer = inputs.layers[index]
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        return from_dlpack(layer.x), from_dlpack(layer.out), stream

    function = cute.compile(AddOne(), *arguments(0))

    def run(index: int) -> torch.Tensor:
        function(*arguments(index))
        return inputs.layers[index].out

    return run


def triton_objections(problem: Problem) -> list[str]:
    return [] if targets.triton_interpreted() else missing("triton")


@provider("launch", name="Triton", objections=triton_objections, package="triton", code=["kernels/triton_kernel.py"])
def triton(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.triton_kernel import add_one

    return with_grid(add_one, problem, inputs)


def gluon_objections(problem: Problem) -> list[str]:
    return missing_gluon()


@provider("launch", name="Gluon", objections=gluon_objections, package="triton", code=["kernels/gluon_kernel.py"])
def gluon(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.gluon_kernel import add_one

    return with_grid(add_one, problem, inputs)


def with_grid(kernel: object, problem: Problem, inputs: Inputs) -> Run:
    """A launch of one program of a kernel of Triton's."""
    launch = kernel[(1,)]  # type: ignore[index]

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        launch(layer.x, layer.out, problem.elements, BLOCK=THREADS)
        return layer.out

    return run


@provider("launch", name="torch", package="torch")
def eager(problem: Problem, inputs: Inputs) -> Run:
    """A kernel of torch, through its dispatcher."""

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return torch.add(layer.x, 1, out=layer.out)

    return run


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@provider("launch", name="torch.compile", objections=needs_gpu, package="torch")
def compiled(problem: Problem, inputs: Inputs) -> Run:
    torch.compiler.reset()
    made = torch.compile(add_one, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda index: made(inputs.layers[index].x)


def helion_objections(problem: Problem) -> list[str]:
    return missing("helion")


@provider("launch", name="Helion", objections=helion_objections, package="helion", code=["kernels/helion_kernel.py"])
def helion(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.helion_kernel import add_one

    rows = rows_of(inputs)

    def run(index: int) -> torch.Tensor:
        add_one(*rows[index])
        return inputs.layers[index].out

    return run


def tilelang_objections(problem: Problem) -> list[str]:
    return missing_tilelang()


@provider(
    "launch", name="TileLang", objections=tilelang_objections, package="tilelang", code=["kernels/tilelang_kernel.py"]
)
def tilelang(problem: Problem, inputs: Inputs) -> Run:
    from .kernels.tilelang_kernel import add_one

    kernel, rows = add_one(problem.elements), rows_of(inputs)

    def run(index: int) -> torch.Tensor:
        kernel(*rows[index])
        return inputs.layers[index].out

    return run


def cutile_objections(problem: Problem) -> list[str]:
    return missing_cutile()


@provider("launch", name="cuTile", objections=cutile_objections, package="cuda-tile", code=["kernels/cutile_kernel.py"])
def cutile(problem: Problem, inputs: Inputs) -> Run:
    import cuda.tile as ct

    from .kernels.cutile_kernel import add_one

    rows = rows_of(inputs)

    def run(index: int) -> torch.Tensor:
        ct.launch(torch.cuda.current_stream(), (1, 1, 1), add_one, rows[index])
        return inputs.layers[index].out

    return run


def rows_of(inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's x and out as vectors."""
    return [(layer.x[0], layer.out[0]) for layer in inputs.layers]
