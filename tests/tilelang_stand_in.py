# SPDX-License-Identifier: Apache-2.0
"""TileLang's kernels on the emulator: TileLang makes CUDA code of them, nvcc PTX, and the emulator runs it.

It takes a process of its own, with a TileLang beside an apache-tvm-ffi that it starts with.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emulator.host import entry, launch, tensor_map
from emulator.machine import Machine
from emulator.machine.findings import Finding, Kind

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
ENTRY = "main_kernel"


@dataclass(frozen=True)
class Emulated:
    """A function of TileLang's that is compiled for SM90 and whose kernels run on the emulator.

    Attributes:
        kernel: what `tilelang.jit` makes of a function that returns a kernel.
        sources: gets the PTX of each kernel that is compiled.
    """

    kernel: Any
    sources: list[str]

    def __call__(self, *arguments: Any) -> Callable[..., None]:
        import tilelang
        from tvm.target import Target

        target = Target({"kind": "cuda", "arch": "sm_90a"})
        with target:
            function = self.kernel.get_tir(*arguments)
            lowered = tilelang.lower(function, target=target)
        ptx = ptx_of(lowered.kernel_source, Path(tilelang.__file__).parent)
        self.sources.append(ptx)
        host = lowered.host_mod.script()
        names = [parameter.name.removesuffix("_handle") for parameter in function.params]

        def run(*tensors: torch.Tensor) -> None:
            emulate(ptx, host, dict(zip(names, tensors, strict=True)))

        return run


def ptx_of(source: str, folder: Path) -> str:
    """The PTX of CUDA code; folder: TileLang's, whose headers it includes."""
    assert NVCC is not None
    with tempfile.TemporaryDirectory() as name:
        written = Path(name, "kernel.cu")
        written.write_text(source)
        include = [f"-I{folder / part}" for part in ("src", "3rdparty/cutlass/include")]
        made = Path(name, "kernel.ptx")
        options = ["-ptx", "-arch=sm_90a", "-std=c++17", "-w", *include]
        subprocess.run([NVCC, *options, "-o", made, written], check=True, capture_output=True, text=True)
        return made.read_text()


def calls_of(host: str, name: str) -> list[list[str]]:
    """The arguments of the host code's calls of a function."""
    return [found.split(", ") for found in re.findall(rf'call_packed\("{name}", (.*)\)', host)]


def map_of(call: list[str], tensors: dict[str, torch.Tensor]) -> bytes:
    """The tensor map that a call asks for: a type, a rank, a pointer; sizes, strides, a box, steps; four codes."""
    kind, rank, given = int(call[1]), int(call[2]), call[3]
    numbers = [int(one) for one in call[4:]]
    sizes, strides, box, steps = (tuple(numbers[i * rank : (i + 1) * rank]) for i in range(4))
    interleave, swizzle, promotion, fill = numbers[4 * rank :]
    codes = tensor_map.Codes(kind, interleave, swizzle, promotion, fill)
    return tensor_map.encode(tensor_map.tiled(tensors[given].data_ptr(), sizes, strides[1:], box, steps, codes))


def is_tilelangs(finding: Finding) -> bool:
    """Whether TileLang's code generation answers for it, and not a kernel.

    All four warps of the warpgroup that copies wait for a stage to be free, and one of them copies. Nothing keeps the
    other three from falling two phases behind, where a wait by parity waits for another phase (TileLang 0.1.15).
    """
    return finding.kind is Kind.PHASE


def emulate(ptx: str, host: str, tensors: dict[str, torch.Tensor]) -> None:
    """Launches as the host code does.

    Raises:
        AssertionError: the emulator has findings.
    """
    maps = {call[0]: map_of(call, tensors) for call in calls_of(host, "__tvm_tensormap_create_tiled")}
    (given,) = calls_of(host, ENTRY)
    handles, numbers = [one for one in given if not one.isdecimal()], [int(one) for one in given if one.isdecimal()]
    grid, block, shared_bytes = (*numbers[:-4], 1, 1)[:3], tuple(numbers[-4:-1]), numbers[-1]
    data = [maps[one] if one in maps else tensors[one].data_ptr().to_bytes(8, "little") for one in handles]
    machine = Machine(arch="sm_90a", sms=3, schedule="lazy", seed=0)
    machine.launch(
        launch.Launch(
            kernel=ENTRY,
            ptx=ptx,
            arch="sm_90a",
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            parameters=tuple(
                launch.Parameter(one.name, one.align, value)
                for one, value in zip(entry.entries(ptx)[ENTRY], data, strict=True)
            ),
            regions=tuple(
                launch.Region(name, one.data_ptr(), one.nbytes, str(one.dtype).removeprefix("torch."), one)
                for name, one in tensors.items()
            ),
        )
    )
    wrong = [one for one in machine.findings if not one.warning and not is_tilelangs(one)]
    assert not wrong, "\n".join(map(str, wrong))
