# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the CuTe DSL kernels: `python -m dsl_backend.testing.machine_code [ID ...]`.

Neither an emulator nor a test of results sees registers that spill, or matrix products that ptxas lets run one at a
time because it found no registers for them in flight (its C7512): the code is right, and slow. One line of JSON for
each kernel of the default configurations, made for a GPU that need not be there.

It takes a process of its own, in which CuTe DSL keeps its machine code: that is decided when it is imported.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.testing.cases import FP16, FULL, Case, mla

# NVIDIA's cuda-binary format: .nv.info has attributes (format, kind, size or value), some of them of a kernel's symbol.
TEXT, INFO = ".text.", ".nv.info"
SIZED, FRAME_SIZE, REGISTERS = 4, 0x11, 0x2F
# ELF's own.
SYMBOL_BYTES, NO_CONTENTS = 24, 8


@dataclass(frozen=True, kw_only=True)
class Code:
    """A kernel's machine code.

    Attributes:
        id: of the case in `CASES`.
        kernel: the first or a later kernel of the function; the merge kernel comes behind the one that it merges for.
        registers: of a thread when it starts; warps trade them later.
        stack: bytes of local memory of a thread: what spills, and arrays that are indexed at run time.
        products: warpgroup products of SM90; None where no disassembler is at hand.
        waits: for products. Where products run one at a time there are as many.
        shared_bytes, tensor_columns: of a block, by its configuration; None for the merge kernel.
    """

    id: str
    arch: str
    config: str
    kernel: int
    registers: int
    stack: int
    products: int | None
    waits: int | None
    shared_bytes: int | None = None
    tensor_columns: int | None = None

    @property
    def serialised(self) -> bool:
        """Whether products run one at a time."""
        return bool(self.products and self.waits is not None and 2 * self.waits > self.products)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A layer and which of its kernels: for short queries, for long ones, or for the longest alone."""

    id: str
    arch: str
    case: Case
    short: bool
    longest: bool = False


def dense(name: str, **facts: Any) -> tuple[Case, str]:
    return Case(id=name, q_lens=(1,), kv_lens=(1,), **facts), name


LAYERS = (
    dense("hd64", heads=(64, 8), dim=64),
    dense("hd80", heads=(32, 8), dim=80),
    dense("hd96", heads=(32, 8), dim=96),
    dense("hd128", heads=(32, 8), dim=128),
    dense(
        "hd128-fp16-window-softcap-sinks",
        heads=(32, 8),
        dim=128,
        dtype=FP16,
        window=(99, None),
        softcap=5.0,
        sinks=True,
    ),
    dense("hd128-alibi-full", heads=(32, 32), dim=128, alibi=True, causality=FULL),
    dense("hd256", heads=(16, 2), dim=256),
    dense("hd512", heads=(16, 2), dim=512),
    dense("hd192x128-packed", heads=(16, 16), dim=192, dim_v=128, page=None),
    dense("hd128-fp8", heads=(32, 8), dim=128, fp8=True),
    (mla(16, q_lens=(1,), kv_lens=(1,)), "mla16"),
    (mla(128, q_lens=(1,), kv_lens=(1,)), "mla128"),
    (mla(16, q_lens=(1,), kv_lens=(1,), fp8=True), "mla16-fp8"),
    (mla(128, q_lens=(1,), kv_lens=(1,), fp8=True), "mla128-fp8"),
)
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def subjects() -> Iterator[Subject]:
    """Those that a CuTe DSL kernel serves."""
    from dsl_backend.attention import dispatch
    from dsl_backend.attention.sm90.configs import long_query_config
    from dsl_backend.runtime.target import from_arch

    for arch in ARCHS:
        for case, name in LAYERS:
            for operation in dispatch.attention_of(case.spec):
                judged = dispatch.judge(operation, case.spec, from_arch(arch))
                if any(entry.name == "cute" and not why for entry, why in judged):
                    short = operation is not dispatch.Operation.PREFILL
                    yield Subject(
                        id=f"{arch}-{name}-{'decode' if short else 'prefill'}", arch=arch, case=case, short=short
                    )
                    if arch == "sm_90a" and not short and long_query_config(case.spec):
                        yield Subject(id=f"{arch}-{name}-longest", arch=arch, case=case, short=False, longest=True)


def compiled(subject: Subject, folder: Path) -> Iterator[Code]:
    """Compile a subject's kernel, and read what came out."""
    from dsl_backend.attention.kernel import Workspace
    from dsl_backend.attention.plan import Planner
    from dsl_backend.runtime.target import from_arch

    spec: AttentionSpec = subject.case.spec
    planner = Planner(spec, from_arch(subject.arch), Workspace(torch.device("cpu")), "cute")
    kernel: Any = (planner.short if subject.short else planner.long)[2]
    kernel = kernel.longer if subject.longest else kernel
    sinks = torch.float32 if subject.case.sinks else None
    for old in folder.glob("*.cubin"):
        old.unlink()
    kernel.function(spec.latent, sinks)
    (file,) = folder.glob("*.cubin")
    for place, (registers, stack) in enumerate(kernels_of(file.read_bytes())):
        products, waits = counted(file) if place == 0 else (None, None)
        shared, columns = budgets(kernel.config, subject) if place == 0 else (None, None)
        yield Code(
            id=subject.id,
            arch=subject.arch,
            config=str(kernel.config),
            kernel=place,
            registers=registers,
            stack=stack,
            products=products,
            waits=waits,
            shared_bytes=shared,
            tensor_columns=columns,
        )


def budgets(config: Any, subject: Subject) -> tuple[int, int | None]:
    """(bytes of shared memory, columns of tensor memory) of a block."""
    spec = subject.case.spec
    return config.smem_bytes(spec), None if subject.arch == "sm_90a" else config.columns(spec)


def kernels_of(image: bytes) -> list[tuple[int, int]]:
    """(registers, bytes of stack) of each kernel, the largest code first."""
    sections = list(sections_of(image))
    names, symbols = (next(data for name, data, _ in sections if name == wanted) for wanted in (".strtab", ".symtab"))
    facts: dict[tuple[str, int], int] = {}
    for name, data, _ in sections:
        if name == INFO:
            for kind, symbol, value in facts_of(data):
                (place,) = struct.unpack_from("<I", symbols, SYMBOL_BYTES * symbol)
                facts[names[place : names.index(b"\0", place)].decode(), kind] = value
    code = sorted(((len(data), name.removeprefix(TEXT)) for name, data, _ in sections if name.startswith(TEXT)))
    return [(facts[name, REGISTERS], facts[name, FRAME_SIZE]) for _, name in reversed(code)]


def sections_of(image: bytes) -> Iterator[tuple[str, bytes, int]]:
    """(name, contents, type) of an ELF file's sections."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, named = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + size * i) for i in range(count)]
    texts = headers[named]
    for name, kind, _, _, offset, length, *_ in headers:
        start = texts[4] + name
        data = b"" if kind == NO_CONTENTS else image[offset : offset + length]
        yield image[start : image.index(b"\0", start)].decode(), data, kind


def facts_of(attributes: bytes) -> Iterator[tuple[int, int, int]]:
    """(kind, symbol, value) of the attributes that are a number of a kernel."""
    place = 0
    while place < len(attributes):
        form, kind, size = struct.unpack_from("<BBH", attributes, place)
        place += 4
        if form == SIZED:
            if kind in (FRAME_SIZE, REGISTERS):
                yield kind, *struct.unpack_from("<II", attributes, place)
            place += size


def disassembler() -> str | None:
    """NVIDIA's nvdisasm: on the path, or in the package of that name."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, packaged), None)


def counted(file: Path) -> tuple[int | None, int | None]:
    """(products, waits for them) in a file's code."""
    program = disassembler()
    if program is None:
        return None, None
    text = subprocess.run([program, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    # A product of no size only closes a batch of them.
    products = len(re.findall(r"HGMMA\.64x\d+x\d+\.F32", text))
    return products, len(re.findall(r"WARPGROUP\.DEPBAR", text))


def main(ids: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="machine-code-") as folder:
        os.environ.update(CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder, DSL_BACKEND_CACHE="0")
        for subject in subjects():
            if not ids or subject.id in ids:
                for code in compiled(subject, Path(folder)):
                    print(json.dumps(asdict(code)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
