# SPDX-License-Identifier: Apache-2.0
"""PTX of real kernels, made without a GPU, and a census of the forms in it.

    python tests/emulator/corpus.py compile OUT [RECIPE ...]    one process for each recipe and arch
    python tests/emulator/corpus.py script OUT ARCH FILE [ARGUMENT ...]    an example's script, as far as it compiles
    python tests/emulator/corpus.py census OUT [OUT ...] > tests/emulator/ptx/forms.txt

FlashAttention-4 (`flash_attn.cute`) and quack come from wherever Python finds them; a recipe whose package is missing,
or that the arch has no kernel for, fails alone. PTX of other people's kernels stays out of the repository.
"""

import os
import runpy
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ARCHS = ("sm_90a", "sm_100a")
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
ATTENTION: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"causal": True},
    "hd64": {"dim": (64, 64)},
    "hd192": {"dim": (192, 128), "causal": True},
    "split": {"num_splits": 3},
    "window": {"window_size_left": 64, "window_size_right": 0, "softcap": 5.0},
    "varlen": {"varlen": True, "causal": True},
    "paged": {"paged": True},
}


class HardwareInfo:
    """Stands in for a GPU that is asked how large it is."""

    def __init__(self, *_: Any) -> None: ...

    def get_max_active_clusters(self, *_: Any, **__: Any) -> int:
        return 4

    def get_device_multiprocessor_count(self, *_: Any) -> int:
        return 4

    def get_l2_cache_size_in_bytes(self, *_: Any) -> int:
        return 1 << 25


def pretend(arch: str, folder: Path) -> None:
    """Settings of the compiler and of the packages, before any of them is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    major_minor = arch.rstrip("a").replace("sm_", "")
    os.environ |= {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "FLASH_ATTENTION_ARCH": f"sm_{major_minor}",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "QUACK_ARCH": major_minor,
        "QUACK_CACHE_ENABLED": "0",
    }
    import cutlass.utils
    import cutlass.utils.hardware_info
    import torch
    from cutlass.base_dsl.runtime import cuda as cuda_helpers

    cuda_helpers.initialize_cuda_context = lambda *_, **__: None
    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = HardwareInfo
    torch.cuda.get_device_capability = lambda *_, **__: CAPABILITY[arch]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_, **__: type(
        "Properties", (), {"multi_processor_count": 132, "major": CAPABILITY[arch][0], "minor": CAPABILITY[arch][1]}
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def empty(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.empty(*shape, dtype=getattr(torch, dtype), device="cuda")


def attention(
    dim: tuple[int, int] = (128, 128), varlen: bool = False, paged: bool = False, **options: Any
) -> Callable[[str], None]:
    def run(arch: str) -> None:
        from flash_attn.cute.interface import _flash_attn_fwd

        batch, length, heads, heads_kv = 2, 256, 4, 2
        q_shape: tuple[int, ...] = (batch, length)
        kv_shape: tuple[int, ...] = (batch, length)
        if varlen:
            q_shape = kv_shape = (batch * length,)
            ends = empty(batch + 1, dtype="int32")
            options.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=length, max_seqlen_k=length)
        if paged:
            kv_shape = (64, 128)
            options.update(page_table=empty(batch, 4, dtype="int32"), seqused_k=empty(batch, dtype="int32"))
        q, k = empty(*q_shape, heads, dim[0]), empty(*kv_shape, heads_kv, dim[0])
        _flash_attn_fwd(q, k, empty(*kv_shape, heads_kv, dim[1]), return_lse=True, **options)

    return run


def softmax(width: int) -> Callable[[str], None]:
    def run(arch: str) -> None:
        from quack.softmax import _softmax_fwd

        _softmax_fwd(empty(64, width), empty(64, width))

    return run


def rmsnorm(arch: str) -> None:
    from quack.rmsnorm import rmsnorm_fwd

    rmsnorm_fwd(empty(64, 4096), empty(4096), eps=1e-5)


def topk(arch: str) -> None:
    from quack.topk import _topk_fwd

    _topk_fwd(empty(64, 1024), 16, False, empty(64, 16), empty(64, 16, dtype="int32"))


def gemm(pair: bool, dtype: str = "bfloat16") -> Callable[[str], None]:
    """`pair`: two CTAs of a cluster share a tile where the arch can do that."""

    def run(arch: str) -> None:
        from quack.gemm import gemm as run_gemm

        a, b = empty(1, 256, 512, dtype=dtype), empty(1, 512, 512, dtype=dtype)
        tile_m = 256 if pair and arch == "sm_100a" else 128
        run_gemm(a, b, empty(1, 256, 512), None, None, tile_m, 128, 2 if pair else 1, 1)

    return run


def own(arch: str) -> None:
    """Kernels of this folder, with real settings of the compiler and tensors that nobody has to allocate."""
    sys.path.insert(0, str(Path(__file__).parent / "kernels"))
    import cutlass
    from cutlass import cute
    from tma_kernels import TmaCopy
    from warp_kernels import RowSoftmax

    def matrix(dtype: Any, columns: int) -> Any:
        return cute.runtime.make_fake_compact_tensor(dtype, (cute.sym_int(), columns), stride_order=(1, 0))

    cute.compile(RowSoftmax(), matrix(cutlass.BFloat16, 128), matrix(cutlass.BFloat16, 128))
    cute.compile(TmaCopy(), matrix(cutlass.Float16, 64), matrix(cutlass.Float16, 64))


RECIPES: dict[str, Callable[[str], None]] = {
    "own": own,
    **{f"fa4_{name}": attention(**options) for name, options in ATTENTION.items()},
    "quack_softmax": softmax(4096),
    "quack_softmax_cluster": softmax(131072),
    "quack_rmsnorm": rmsnorm,
    "quack_topk": topk,
    "quack_gemm": gemm(pair=False),
    "quack_gemm_pair": gemm(pair=True),
    "quack_gemm_fp8": gemm(pair=True, dtype="float8_e4m3fn"),
}


def compile_one(out: Path, name: str, arch: str) -> None:
    """Compile one recipe; what fails behind its compilation, for want of a GPU, does not matter."""
    pretend(arch, out / f"{name}.{arch}")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if name == "own" else FakeTensorMode():
        RECIPES[name](arch)


def compile_all(out: Path, names: Sequence[str]) -> None:
    for name in names or RECIPES:
        for arch in ARCHS:
            done = subprocess.run(
                [sys.executable, __file__, "one", str(out), name, arch], capture_output=True, text=True
            )
            made = sum(1 for file in (out / f"{name}.{arch}").glob("*.ptx") if file.stat().st_size)
            last = "" if made else (done.stderr.strip().splitlines() or [""])[-1][:150]
            say(f"{name} {arch}: {made} kernels {last}")


def run_script(out: Path, arch: str, script: Path, arguments: Sequence[str]) -> None:
    """A script that makes its tensors on a GPU makes them on the CPU; what it launches does nothing."""
    pretend(arch, out / f"{script.stem}.{arch}")
    import torch
    from cuda.bindings import driver
    from cutlass.base_dsl import jit_executor
    from torch.overrides import TorchFunctionMode

    driver.cuInit = lambda *_: (driver.CUresult.CUDA_SUCCESS,)
    jit_executor.JitCompiledFunction.__call__ = lambda *_, **__: None

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
            if named.get("device") is not None:
                named["device"] = "cpu"
            name = getattr(func, "__name__", "")
            if name == "cuda":
                return args[0]
            if name == "to":
                args = tuple("cpu" if str(arg).startswith("cuda") else arg for arg in args)
            return func(*args, **named)

    stream = type("Stream", (), {"cuda_stream": 0})
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: stream
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent), *map(str, list(script.parents)[1:6])]
    with OnTheCpu():
        runpy.run_path(str(script), run_name="__main__")


def census(folders: Sequence[Path]) -> Iterator[str]:
    """For each form and shape of operands: how often in each arch, in how many kernels."""
    from emulator.ptx import Refused, parse

    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    kernels: dict[tuple[str, str], set[str]] = defaultdict(set)
    totals: Counter[str] = Counter()
    for path in sorted(path for folder in folders for path in folder.rglob("*.ptx") if path.stat().st_size):
        try:
            found = parse(path.read_text())
        except Refused as refused:
            sys.stderr.write(f"{path}\n{refused}\n")
            continue
        arch = found.target[0]
        totals[arch] += 1
        for function in found.functions:
            for instr in function.code or ():
                key = (instr.op.text, shape(instr.args))
                counts[key][arch] += 1
                kernels[key].add(str(path))
    modules = " and ".join(f"{totals[arch]} modules of {arch}" for arch in ARCHS)
    yield f"# opcode, operands, then how often in {modules}, and in how many of them"
    for key in sorted(counts):
        yield " ".join((*key, *(str(counts[key][arch]) for arch in ARCHS), str(len(kernels[key]))))


def shape(args: Sequence[Any]) -> str:
    """Operands by kind: r register, p predicate, i and f constants, a address, t3 tensor, v4 vector, ..."""
    return ",".join(_kind(arg) for arg in args if arg is not None) or "-"


def _kind(arg: Any) -> str:
    from emulator.ptx import ir

    match arg:
        case ir.Reg(_, kind):
            return "p" if kind == "pred" else "r"
        case ir.Imm(_, kind):
            return "i" if kind == "int" else "f"
        case ir.Pair(first, second):
            return f"{_kind(first)}|{_kind(second)}"
        case ir.Vec(items):
            return f"v{len(items)}"
        case ir.TensorAddress(_, coordinates):
            return f"t{len(coordinates)}"
    kinds = {"Special": "s", "Symbol": "y", "Address": "a", "Sink": "_", "Not": "!", "Label": "l", "Names": "()"}
    return kinds[type(arg).__name__]


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["compile", out, *names]:
            compile_all(Path(out), names)
        case ["one", out, name, arch]:
            compile_one(Path(out), name, arch)
        case ["script", out, arch, script, *rest]:
            run_script(Path(out), arch, Path(script).resolve(), rest)
        case ["census", *folders]:
            for line in census([Path(folder) for folder in folders]):
                say(line)
        case _:
            say(__doc__ or "")


if __name__ == "__main__":
    main(sys.argv[1:])
