# SPDX-License-Identifier: Apache-2.0
"""A device that kernels are chosen and compiled for: its features, by the registry, and its size."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import torch

from dsl_backend import checks, envs
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import chip as chips
from dsl_backend.runtime import registry
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.registry import Arch, Feature

Chosen = TypeVar("Chosen")
# The beginning of an objection that lists the GPUs which a kernel serves.
OTHER_GPUS = "serves GPUs of "


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that kernels are chosen and compiled for.

    Attributes:
        capability: CUDA compute capability (major, minor); None is a CPU.
        sm_count: streaming multiprocessors; 0 on a CPU.
        smem_bytes: dynamic shared memory that a CTA may use; 0 on a CPU.
        interpreted: Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1) on the host.
        gpu: the product's name; None if no GPU is present.
        chip: the GPU's size and rates, which estimates and tuning records are for (runtime/tuned.py); None if no GPU is
            present, or if its driver does not tell.
        spare_sms: SMs that a kernel leaves free for kernels that run at the same time.
    """

    capability: tuple[int, int] | None
    sm_count: int
    smem_bytes: int
    interpreted: bool = False
    gpu: str | None = None
    chip: Chip | None = None
    spare_sms: int = 0

    @property
    def used_sms(self) -> int:
        """The number of SMs that a kernel may use."""
        return self.sm_count - self.spare_sms

    def sparing(self, sms: int) -> "Target":
        """The same device, with so many SMs left free for other kernels. Raises InvalidInput: none would be left."""
        most = max(self.sm_count - 1, 0)
        sms = checks.integer("spare_sms", sms, -checks.MOST)
        if not 0 <= sms <= most:
            raise InvalidInput(f"spare_sms is {sms}: {self.arch} has {self.sm_count}, and 0 to {most} can be spared")
        return replace(self, spare_sms=sms)

    @property
    def is_cpu(self) -> bool:
        return self.capability is None

    @property
    def known(self) -> Arch | None:
        """The registry's entry; None for a CPU."""
        return None if self.capability is None else registry.of_capability(self.capability)

    @property
    def arch(self) -> str:
        """The name that compilers use, such as `sm_90a`; `cpu` for a CPU."""
        return registry.CPU if self.known is None else self.known.name

    @property
    def kernel_arch(self) -> str | None:
        """The CuTe DSL kernels that serve it, such as `sm90`; None where there are none."""
        return None if self.known is None else self.known.kernel_arch

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chip of the GPU; of a target without one, or without its chip, the usual parts of its architecture."""
        if self.chip is not None or self.known is None:
            return () if self.chip is None else (self.chip,)
        return self.known.chips

    def has(self, feature: Feature) -> bool:
        return self.known is not None and feature in self.known.features

    def arch_objections(self, *kernel_archs: str) -> list[str]:
        """Why kernels for these architectures do not serve the target; empty where they do."""
        if self.kernel_arch in kernel_archs:
            return []
        served = [arch.name for arch in registry.with_kernels(*kernel_archs)]
        note = "" if self.known is None else self.known.note
        return [f"{OTHER_GPUS}{', '.join(served)}, this is {self.arch}{note}"]

    def by_kernel_arch(self, choices: Mapping[str, Chosen]) -> Chosen:
        """The choice for the CuTe DSL kernels that serve the target. Raises InvalidInput: none is for them."""
        if self.kernel_arch is None or self.kernel_arch not in choices:
            raise InvalidInput("; ".join(self.arch_objections(*choices)))
        return choices[self.kernel_arch]

    @property
    def usual_dtype(self) -> torch.dtype:
        """The dtype that models are served in: bfloat16 where the target has it."""
        return torch.bfloat16 if self.is_cpu or self.native_bf16 else torch.float16

    @property
    def wgmma(self) -> bool:
        return self.has(Feature.WGMMA)

    @property
    def tcgen05(self) -> bool:
        return self.has(Feature.TCGEN05)

    @property
    def fast_exponentials(self) -> bool:
        return self.has(Feature.FAST_EXPONENTIALS)

    @property
    def tma(self) -> bool:
        return self.has(Feature.TMA)

    @property
    def native_fp8(self) -> bool:
        return self.has(Feature.NATIVE_FP8)

    @property
    def native_bf16(self) -> bool:
        return self.has(Feature.NATIVE_BF16)


def triton_interpreted() -> bool:
    """Whether Triton was told to interpret kernels on the host."""
    return envs.TRITON_INTERPRET.read()


def cpu_target() -> Target:
    return Target(capability=None, sm_count=0, smem_bytes=0, interpreted=triton_interpreted())


def from_arch(arch: str) -> Target:
    """The usual GPU of a named architecture, for planning and compiling without a device.

    Args:
        arch: `cpu`, or `sm_90`, `sm_90a`, `sm90`, `sm_100a` ...

    Raises:
        InvalidInput: the name is not one of these forms, or there is no such chip.
    """
    if arch == registry.CPU:
        return cpu_target()
    return of_capability(registry.named(arch).capability)


def of_capability(capability: tuple[int, int]) -> Target:
    """The usual GPU of a compute capability, which need not be in the registry."""
    facts = registry.of_capability(capability)
    return Target(capability=capability, sm_count=facts.sm_count, smem_bytes=facts.smem_bytes)


def cuda_index(device: torch.device) -> int:
    """The index of a CUDA device; of the current one if it has none. Raises InvalidInput: no such device is here."""
    index: int | None = device.index
    if index is not None:
        return index
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise missing(device, error) from error


def missing(device: object, error: Exception) -> InvalidInput:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return InvalidInput(f"device {device} is not there: {reason}; there are {torch.cuda.device_count()} CUDA devices")


@cache
def _of_cuda_device(index: int) -> Target:
    try:
        properties = torch.cuda.get_device_properties(index)
    except (AssertionError, RuntimeError) as error:
        raise missing(f"cuda:{index}", error) from error
    capability = (properties.major, properties.minor)
    return Target(
        capability=capability,
        sm_count=properties.multi_processor_count,
        smem_bytes=getattr(properties, "shared_memory_per_block_optin", registry.of_capability(capability).smem_bytes),
        gpu=properties.name,
        chip=chips.of_device(index),
    )


def overridden(found: Target) -> Target:
    """The GPU's target with the architecture that DSL_BACKEND_ARCH names.

    Raises:
        InvalidInput: it names no architecture, or one whose code the GPU cannot run.
    """
    arch = envs.ARCH.read()
    if arch is None:
        return found
    wanted = from_arch(arch)
    # Since SM90, code for one architecture runs on no other. Below SM90 only Triton serves, which asks the GPU itself.
    fits = not wanted.is_cpu and (wanted.capability == found.capability or not wanted.tma)
    if not fits or (wanted.capability or ()) > (found.capability or ()):
        raise InvalidInput(f"{envs.ARCH.name}={arch!r} is not accepted on a {found.arch}: use {envs.ARCH.accepts}")
    gpu = found.gpu if wanted.capability == found.capability else None
    smem_bytes = min(wanted.smem_bytes, found.smem_bytes)
    return replace(wanted, sm_count=found.sm_count, smem_bytes=smem_bytes, gpu=gpu, chip=found.chip)


def detect(device: torch.device | None = None) -> Target:
    """The target behind a torch device; without one, the current CUDA device, or the CPU where there is none.

    DSL_BACKEND_ARCH may change a GPU's architecture.

    Raises:
        InvalidInput: the device is neither a CUDA device nor the CPU, is not there, or DSL_BACKEND_ARCH does not fit
            it.
    """
    found = at_hand(device)
    return found if found.is_cpu else overridden(found)


@cache
def of_device(device: torch.device) -> Target:
    """As `detect`, as it was when first asked: for what every launch asks, which reads no environment then."""
    return detect(device)


def at_hand(device: torch.device | None = None) -> Target:
    """As `detect`, but without DSL_BACKEND_ARCH."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return cpu_target()
    if device.type != "cuda":
        raise InvalidInput(f"device {device} is not supported: use a CUDA device or the CPU")
    return _of_cuda_device(cuda_index(device))
