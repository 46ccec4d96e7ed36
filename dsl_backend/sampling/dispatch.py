# SPDX-License-Identifier: Apache-2.0
"""Which kernel samples on a target: a table of reasons, best kernel first."""

import enum
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ClusterConfig, widest_vector
from dsl_backend.sampling.spec import SamplingSpec


class Operation(enum.Enum):
    """The operations of this family, by the names that `dsl-backend doctor` prints."""

    SAMPLE = "sampling.sample"


@dataclass(frozen=True)
class Entry:
    """A kernel that may serve an operation.

    Attributes:
        name: what a user calls it by.
        kernel: `module:name` of its class, imported when it is first chosen.
        objections: why it does not serve a problem on a target; empty where it does.
    """

    name: str
    kernel: str
    objections: Callable[[SamplingSpec, Target], list[str]]

    def load(self) -> Any:
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)


@cache
def has_cute() -> bool:
    return all(importlib.util.find_spec(module) is not None for module in ("cutlass", "tvm_ffi"))


def cute(spec: SamplingSpec, target: Target) -> list[str]:
    """The kernel needs clusters; it is compiled for and proven on SM90 and SM100."""
    if not (target.wgmma or target.tcgen05):
        return [f"serves GPUs with wgmma or tcgen05 (sm_90a, sm_100a), this is {target.arch}"]
    reasons = [] if has_cute() else ["nvidia-cutlass-dsl is not installed: pip install 'dsl-backend[cute]'"]
    if spec.logprobs:
        reasons.append("gives tokens alone: logprobs=False is needed")
    config = ClusterConfig.default(spec, target, 1, widest_vector(spec))
    return reasons + config.objections(spec, target)


def triton(spec: SamplingSpec, target: Target) -> list[str]:
    reasons = []
    if target.is_cpu and not target.interpreted:
        reasons.append("runs on a CUDA device, this is a CPU (TRITON_INTERPRET=1 interprets it)")
    if not target.is_cpu and target.capability is not None and target.capability < (7, 5):
        reasons.append(f"needs compute capability 7.5 or newer, this is {target.arch}")
    return reasons


def cpu_only(spec: SamplingSpec, target: Target) -> list[str]:
    """The reference sorts and allocates at every step."""
    return [] if target.is_cpu else [f"is for CPUs, this is {target.arch}"]


TABLE: dict[Operation, tuple[Entry, ...]] = {
    # sm90's kernel uses nothing that SM100 lacks or does better: one class serves both.
    Operation.SAMPLE: (
        Entry("cute", "dsl_backend.sampling.sm90.launch:CuteSampler", cute),
        Entry("triton", "dsl_backend.sampling.triton.sample:TritonSampler", triton),
        Entry("reference", "dsl_backend.sampling.reference:ReferenceSampler", cpu_only),
    )
}


def judge(operation: Operation, spec: SamplingSpec, target: Target) -> list[tuple[Entry, list[str]]]:
    """Every entry of the operation with its objections, best entry first."""
    return [(entry, entry.objections(spec, target)) for entry in TABLE[operation]]


def choose(operation: Operation, spec: SamplingSpec, target: Target, kernel: str | None = None) -> Entry:
    """The first entry that does not object.

    Args:
        kernel: a name from the table; that kernel or none.

    Raises:
        InvalidInput: the table has no kernel of that name.
        Unsupported: no kernel, or not the one that was asked for, serves the problem; with every objection.
    """
    judged = judge(operation, spec, target)
    names = [entry.name for entry, _ in judged]
    if kernel is not None and kernel not in names:
        raise InvalidInput(f"{operation.value} has no kernel {kernel!r}: choose one of {', '.join(names)}")
    judged = [(entry, reasons) for entry, reasons in judged if kernel in (None, entry.name)]
    for entry, reasons in judged:
        if not reasons:
            return entry
    raise Unsupported(
        f"{operation.value} of {spec} on {target.arch}", {entry.name: reasons for entry, reasons in judged}
    )
