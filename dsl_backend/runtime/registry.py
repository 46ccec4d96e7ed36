# SPDX-License-Identifier: Apache-2.0
"""The GPU architectures: one table that dispatch, the doctor, `compile`, and the tests without a GPU read.

A new SM is one entry of ARCHS, and kernels for it. Code asks for a feature or for `kernel_arch`, never for a capability
or a product name: an SM without kernels of its own then gets Triton's, and not those of a similar SM.
"""

import enum
import re
from dataclasses import dataclass

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.chip import Chip

Capability = tuple[int, int]
# The name of the target that is no GPU.
CPU = "cpu"


class Feature(enum.Enum):
    """What kernels and their configurations depend on."""

    NATIVE_BF16 = "bf16 matrix instructions"
    NATIVE_FP8 = "conversion instructions for e4m3"
    TMA = "bulk tensor copies"
    WGMMA = "warp-group matrix instructions of Hopper"
    TCGEN05 = "fifth-generation tensor cores with tensor memory"
    FAST_EXPONENTIALS = "special function units with twice the rate of ex2"


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A compute capability.

    Attributes:
        name: as compilers call it, such as `sm_90a`.
        smem_bytes: dynamic shared memory that one CTA may ask for.
        sm_count: SMs of the usual part, for planning without a device.
        chips: the usual parts, for compiling without a device what each of them may need; the first is planned for.
        kernel_arch: the CuTe DSL kernels that serve it, by the name of their folders; None where only Triton's do. They
            were compiled for it, and ran on it or on the emulator.
        emulated: the emulator has such a device.
        triton_tested: tests compile the Triton kernels for it (tests/attention/compile_only.py).
        note: follows the name in an objection.
    """

    name: str
    capability: Capability
    smem_bytes: int
    sm_count: int
    chips: tuple[Chip, ...] = ()
    features: frozenset[Feature] = frozenset()
    kernel_arch: str | None = None
    emulated: bool = False
    triton_tested: bool = False
    note: str = ""


_SM80 = frozenset({Feature.NATIVE_BF16})
_SM89 = _SM80 | {Feature.NATIVE_FP8}
# What every GPU since SM90 has. The matrix instructions are each architecture's own.
_SM90 = _SM89 | {Feature.TMA}
_TCGEN05 = _SM90 | {Feature.TCGEN05}
_KIB = 1024
_MIB = 1 << 20
# What the drivers of an H200 and an H100 say, since records are compared with that; of a B200 its data sheet.
_H200 = Chip(sm_count=132, memory_gb_s=4814, clock_mhz=1980, l2_bytes=60 * _MIB)
_H100 = Chip(sm_count=132, memory_gb_s=3352, clock_mhz=1980, l2_bytes=50 * _MIB)
_B200 = Chip(sm_count=148, memory_gb_s=8000, clock_mhz=1965, l2_bytes=126 * _MIB)

# Shared memory: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". SM counts: the
# vendor's architecture whitepapers.
ARCHS: tuple[Arch, ...] = (
    Arch(name="sm_70", capability=(7, 0), smem_bytes=96 * _KIB, sm_count=80),
    Arch(name="sm_72", capability=(7, 2), smem_bytes=96 * _KIB, sm_count=8),
    Arch(name="sm_75", capability=(7, 5), smem_bytes=64 * _KIB, sm_count=72, triton_tested=True),
    Arch(name="sm_80", capability=(8, 0), smem_bytes=163 * _KIB, sm_count=108, features=_SM80, triton_tested=True),
    Arch(name="sm_86", capability=(8, 6), smem_bytes=99 * _KIB, sm_count=84, features=_SM80),
    Arch(name="sm_87", capability=(8, 7), smem_bytes=163 * _KIB, sm_count=16, features=_SM80),
    Arch(name="sm_89", capability=(8, 9), smem_bytes=99 * _KIB, sm_count=128, features=_SM89, triton_tested=True),
    Arch(
        name="sm_90a",
        capability=(9, 0),
        smem_bytes=227 * _KIB,
        sm_count=132,
        chips=(_H200, _H100),
        features=_SM90 | {Feature.WGMMA},
        kernel_arch="sm90",
        emulated=True,
        triton_tested=True,
    ),
    Arch(
        name="sm_100a",
        capability=(10, 0),
        smem_bytes=227 * _KIB,
        sm_count=148,
        chips=(_B200,),
        features=_TCGEN05,
        kernel_arch="sm100",
        emulated=True,
        triton_tested=True,
    ),
    Arch(
        name="sm_103a",
        capability=(10, 3),
        smem_bytes=227 * _KIB,
        sm_count=148,
        chips=(_B200,),
        features=_TCGEN05 | {Feature.FAST_EXPONENTIALS},
        kernel_arch="sm100",
    ),
    Arch(
        name="sm_110a",
        capability=(11, 0),
        smem_bytes=227 * _KIB,
        sm_count=20,
        features=_TCGEN05,
        note=", for which CuTe DSL 4.6.0 with CUDA 12 generates no code",
    ),
    Arch(name="sm_120a", capability=(12, 0), smem_bytes=99 * _KIB, sm_count=170, features=_SM90, triton_tested=True),
    Arch(name="sm_121a", capability=(12, 1), smem_bytes=99 * _KIB, sm_count=48, features=_SM90),
)
BY_CAPABILITY = {arch.capability: arch for arch in ARCHS}
# Features that a later GPU need not have.
OF_ONE_ARCH = frozenset({Feature.WGMMA, Feature.TCGEN05, Feature.FAST_EXPONENTIALS})
# An unknown GPU has at least the shared memory of every GPU since SM86.
UNKNOWN_SMEM_BYTES, UNKNOWN_SM_COUNT = 99 * _KIB, 64


def name_of(capability: Capability) -> str:
    """The name that compilers use."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def of_capability(capability: Capability) -> Arch:
    """The entry of a compute capability; one that is not known has the portable features of those below it."""
    if capability in BY_CAPABILITY:
        return BY_CAPABILITY[capability]
    below = [arch.features for arch in ARCHS if arch.capability < capability]
    return Arch(
        name=name_of(capability),
        capability=capability,
        smem_bytes=UNKNOWN_SMEM_BYTES,
        sm_count=UNKNOWN_SM_COUNT,
        features=(below[-1] if below else frozenset()) - OF_ONE_ARCH,
    )


def named(name: str) -> Arch:
    """The entry of a name, with or without its suffix.

    Args:
        name: `sm_90`, `sm_90a`, `sm90`, `sm_100a` ...

    Raises:
        InvalidInput: the name is not one of these forms, or there is no such entry.
    """
    match = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    if match is None:
        raise InvalidInput(f"arch {name!r} is not a CUDA architecture: use a name such as sm_80, sm_90a, or {CPU}")
    capability = (int(match[1]), int(match[2]))
    if capability not in BY_CAPABILITY:
        known = ", ".join(arch.name for arch in ARCHS)
        raise InvalidInput(f"arch {name!r} is not known: use {CPU} or one of {known}")
    return BY_CAPABILITY[capability]


def with_kernels(*kernel_archs: str) -> tuple[Arch, ...]:
    """The architectures that CuTe DSL kernels serve: these kernels, or any where none are named."""
    return tuple(
        arch for arch in ARCHS if arch.kernel_arch is not None and arch.kernel_arch in (kernel_archs or KERNEL_ARCHS)
    )


# The sets of CuTe DSL kernels, each once.
KERNEL_ARCHS: tuple[str, ...] = tuple(dict.fromkeys(arch.kernel_arch for arch in ARCHS if arch.kernel_arch is not None))
# The architectures of the emulator's devices.
EMULATED: tuple[str, ...] = tuple(arch.name for arch in ARCHS if arch.emulated)
