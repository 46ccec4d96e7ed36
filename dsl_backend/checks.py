# SPDX-License-Identifier: Apache-2.0
"""Checks of public arguments, shared by all operator families.

Each raises InvalidInput with a message of the form `NAME is VALUE: WHAT is needed`. They run when a spec, a batch or a
plan is made, and when a call passes tensors with a new combination of shapes and strides. Later calls with the same
layouts only compare the layouts.
"""

import enum
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from dsl_backend.errors import InvalidInput

Kind = TypeVar("Kind")
Member = TypeVar("Member", bound=enum.Enum)

# Kernels use 32-bit integers for sizes and indices.
MOST = 2**31 - 1
SHOWN_CHARACTERS = 80


def require(ok: bool, message: str) -> None:
    """Raises InvalidInput with the message unless ok."""
    if not ok:
        raise InvalidInput(message)


def short(dtype: torch.dtype | torch.layout) -> str:
    """The dtype's or layout's name without its module."""
    return str(dtype).removeprefix("torch.")


def shown(value: object) -> str:
    """A value as text for a message. Tensors and long values are shown by their type only."""
    text = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else a(type(value).__name__)


def integer(name: str, value: Any, least: int, most: int = MOST) -> int:
    """The value as an int. Accepts every integer type (numpy's too), but no bool and no tensor on a device."""
    found = None
    on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    if not isinstance(value, bool) and not on_device:
        try:
            found = operator.index(value)
        except (TypeError, RuntimeError):
            found = None
    if found is None or not least <= found <= most:
        last = "2**31 - 1" if most == MOST else most
        raise InvalidInput(f"{name} is {shown(value)}: an integer from {least} to {last} is needed")
    return found


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """The value as a finite float."""
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        found = float(value) if fits else math.nan
    except OverflowError:  # an int that no float can hold
        found = math.nan
    if not math.isfinite(found) or found < least:
        floor = "" if least == -math.inf else f" of at least {least:g}"
        raise InvalidInput(f"{name} is {shown(value)}: a finite number{floor} is needed")
    return found


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {shown(value)}: True or False is needed")


def member(name: str, value: Any, kind: type[Member]) -> None:
    """Checks that the value is a member of the enum. A member's name or value is not accepted."""
    if not isinstance(value, kind):
        accepted = ", ".join(str(one) for one in kind)
        raise InvalidInput(f"{name} is {shown(value)}: one of {accepted} is needed")


def instance(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} is {shown(value)}: {a(kind.__name__)} is needed")


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def dtype(name: str, value: Any, accepted: Sequence[torch.dtype] = ()) -> None:
    """Checks that the value is a torch dtype and, if `accepted` is not empty, one of those."""
    if not isinstance(value, torch.dtype):
        raise InvalidInput(f"{name} is {shown(value)}: a torch.dtype is needed")
    if accepted and value not in accepted:
        raise InvalidInput(f"{name} is {short(value)}: one of {', '.join(map(short, accepted))} is needed")


def kernel(value: Any) -> None:
    """Checks the type of a `kernel` argument. Dispatch checks the name itself."""
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"kernel is {shown(value)}: a name from the dispatch table or None is needed")


def device(name: str, value: Any) -> torch.device:
    """The value as a torch device; it may be a device or the name of one."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError:
            pass
    raise InvalidInput(f"{name} is {shown(value)}: a torch.device or its name, such as cuda:0 or cpu, is needed")


def tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        # Lists are shown by their type: their text may be very long.
        what = shown(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
        raise InvalidInput(f"{name} is {what}: a tensor is needed")
    if value.layout is not torch.strided:
        raise InvalidInput(f"{name} has layout {short(value.layout)}: a dense tensor is needed")


def facts_of(value: torch.Tensor | None, alignment: int = 16) -> object:
    """All facts of a tensor that checks and plans depend on; its values are not among them.

    Plans may depend on whether its address is a multiple of `alignment` bytes, or of a power of two below it. Facts of
    what is no dense tensor equal those of no dense tensor, and no check accepts it.
    """
    if not isinstance(value, torch.Tensor):
        return type(value)
    if value.layout is not torch.strided:
        return value.layout
    gradient = value.requires_grad and torch.is_grad_enabled()
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % alignment, gradient


def no_gradient(name: str, value: torch.Tensor) -> None:
    """Checks that no gradient is needed: no kernel has a backward pass."""
    if value.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(
            f"{name} requires a gradient, and there is no backward: call under torch.no_grad(), or detach it"
        )


def apart(name: str, value: torch.Tensor) -> None:
    """Checks that the rows of a tensor do not overlap in memory."""
    extent = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise InvalidInput(
                    f"{name} has shape {tuple(value.shape)} and strides {value.stride()}: its rows overlap in memory"
                )
            extent += (size - 1) * stride
