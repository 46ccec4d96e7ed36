# SPDX-License-Identifier: Apache-2.0
"""Dispatch tables: the kernels of an operation, best first, each with its objections to a problem."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from dsl_backend.errors import InvalidInput, Unsupported, by_reason
from dsl_backend.runtime.target import Target

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class Variant:
    """A compiled kernel of an entry, and the batches that it serves.

    Attributes:
        name: what it is, such as `swap-AB 16x128`.
        config: its configuration.
        min_query_len, max_query_len: of a batch's longest query, both within; None is any.
        few_tiles: it takes the place of the others where a batch has few query tiles behind long keys.
    """

    name: str
    config: Any
    min_query_len: int = 0
    max_query_len: int | None = None
    few_tiles: bool = False

    def serves(self, query_len: int) -> bool:
        """Whether it serves a batch whose longest query has so many tokens."""
        return self.min_query_len <= query_len and (self.max_query_len is None or query_len <= self.max_query_len)

    @property
    def batches(self) -> str:
        if self.few_tiles:
            return "few query tiles behind long keys"
        if self.max_query_len is not None:
            return f"queries of at most {self.max_query_len} tokens"
        return f"queries of {self.min_query_len} tokens or more" if self.min_query_len else "all batches"


def no_variants(spec: Any, target: Target) -> list[Variant]:
    return []


@dataclass(frozen=True)
class Entry(Generic[Spec]):
    """Kernels that may serve an operation.

    Attributes:
        name: what users name it by; kernels of several SMs may share one.
        title: what it is, such as `dense-decode sm90`; printed by the doctor, in logs and in errors.
        kernel: `module:name` of its class or function, imported when it is first chosen.
        objections: why it does not serve a problem on a target; empty where it does.
        variants: the compiled kernels that it launches, and for which batches; empty if they are not listed.
        by_name: it is used only if a user names it, and listed by `named`; others serve by default.
    """

    name: str
    title: str
    kernel: str
    objections: Callable[[Spec, Target], list[str]]
    variants: Callable[[Spec, Target], list[Variant]] = no_variants
    by_name: bool = False

    def load(self) -> Any:
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)


def triton_objections(target: Target, *dtypes: torch.dtype) -> list[str]:
    """Why Triton kernels on tensors of these dtypes do not serve a target; empty where they do."""
    reasons = []
    if target.is_cpu and not target.interpreted:
        reasons.append("runs on a CUDA device, this is a CPU (TRITON_INTERPRET=1 interprets it)")
    if target.capability is not None and target.capability < (7, 5):
        reasons.append(f"needs compute capability 7.5 or newer, this is {target.arch}")
    if torch.bfloat16 in dtypes and not target.is_cpu and not target.native_bf16:
        reasons.append(f"bfloat16 needs compute capability 8.0 or newer, this is {target.arch}: use float16")
    return reasons


def cpu_only(spec: Any, target: Target) -> list[str]:
    """Objections of a reference, which computes on the host."""
    return [] if target.is_cpu else [f"is for CPUs, this is {target.arch}"]


Judged = list[tuple[Entry[Spec], list[str]]]


def judge(table: Sequence[Entry[Spec]], spec: Spec, target: Target) -> Judged[Spec]:
    """The entries that are used without being named, best entry first, each with its objections."""
    return [(entry, entry.objections(spec, target)) for entry in table if not entry.by_name]


def named(table: Sequence[Entry[Spec]], spec: Spec, target: Target) -> list[Entry[Spec]]:
    """The entries that serve a problem if a user names them, and not without."""
    return [entry for entry in table if entry.by_name and not entry.objections(spec, target)]


def check_name(operation: str, table: Sequence[Entry[Spec]], kernel: str | None) -> None:
    """Raises InvalidInput: the table has no kernel of that name; None is the best that serves."""
    names = list(dict.fromkeys(entry.name for entry in table))
    if kernel is not None and kernel not in names:
        raise InvalidInput(f"{operation} has no kernel {kernel!r}: choose one of {', '.join(names)}")


def choose(
    operation: str, table: Sequence[Entry[Spec]], spec: Spec, target: Target, kernel: str | None = None
) -> Entry[Spec]:
    """The first entry that does not object.

    Args:
        operation: its name, for messages.
        kernel: a name from the table: only that kernel is considered.

    Raises:
        InvalidInput: the table has no kernel of that name.
        Unsupported: no kernel, or not the one that was asked for, serves the problem; with every objection.
    """
    check_name(operation, table, kernel)
    objections: dict[str, list[str]] = {}
    asked = [entry for entry in table if (not entry.by_name if kernel is None else entry.name == kernel)]
    for entry in asked:
        reasons = entry.objections(spec, target)
        if not reasons:
            return entry
        known = objections.setdefault(entry.title, [])
        known += [reason for reason in reasons if reason not in known]
    raise Unsupported(f"{operation} ({spec}) on {target.arch}", objections)


def explained(judgements: Sequence[Judged[Spec]], titles: Sequence[str]) -> str:
    """Which kernels serve a layer, and the objections of better ones: each reason once.

    Args:
        judgements: of each operation of the layer.
        titles: of the kernel that serves each of them.
    """
    objections: dict[str, list[str]] = {}
    for judged, title in zip(judgements, titles, strict=True):
        for entry, reasons in judged:
            if entry.title == title and not reasons:
                break
            known = objections.setdefault(entry.title, [])
            known += [reason for reason in reasons or ["not the one asked for"] if reason not in known]
    served = ", ".join(dict.fromkeys(titles))
    against = "; ".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in by_reason(objections).items())
    return f"{served} (not by {against})" if against else served
