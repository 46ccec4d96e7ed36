# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that launches share: partial results, and counters that are 0 before and after each launch."""

import weakref
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import cuda_index

# The most streams whose launches may be captured: torch has a pool of 32 for each of two priorities.
CAPTURED_STREAMS = 64

_all: "weakref.WeakSet[Workspace | CapturedFlags]" = weakref.WeakSet()


class Part(NamedTuple):
    """A contiguous tensor in a buffer of others."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """Of 4 bytes, rounded up to 16 bytes so that the next part is aligned."""
        return -(-prod(self.shape) * self.dtype.itemsize // 16) * 4


class Workspace:
    """Buffers that launches share. They only grow; the old, smaller ones are kept, because a CUDA graph may use them.

    Launches that share a workspace must be ordered on one stream.

    Args:
        captured: flags of captured launches, which grow with those of this workspace.
    """

    def __init__(self, device: torch.device, captured: "CapturedFlags | None" = None) -> None:
        self.device, self.captured = checks.device("device", device), captured
        self._outgrown: list[torch.Tensor] = []
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._integers = torch.empty(0, dtype=torch.int32, device=device)
        self._operand = torch.empty(0, dtype=torch.uint8, device=device)
        self._flags = torch.zeros(0, dtype=torch.int32, device=device)
        _all.add(self)

    def partials(self, count: int) -> torch.Tensor:
        """[at least count] float32, contents undefined."""
        if self._partials.numel() < count:
            self._outgrown.append(self._partials)
            self._partials = torch.empty(count, dtype=torch.float32, device=self.device)
        return self._partials

    def tensors(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Tensors in the buffer of `partials`, one behind the other, contents undefined; each starts at 16 bytes."""
        sizes = [part.words for part in parts]
        buffers = self.partials(sum(sizes))[: sum(sizes)].split(sizes)
        flat = (buffer.view(part.dtype)[: prod(part.shape)] for buffer, part in zip(buffers, parts, strict=True))
        return [one.view(part.shape) for one, part in zip(flat, parts, strict=True)]

    def operand(self, size: int) -> torch.Tensor:
        """[at least size] bytes, contents undefined: what a launch reads that the one before it wrote."""
        if self._operand.numel() < size:
            self._outgrown.append(self._operand)
            self._operand = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._operand

    def integers(self, count: int) -> torch.Tensor:
        """[at least count] int32, contents undefined."""
        if self._integers.numel() < count:
            self._outgrown.append(self._integers)
            self._integers = torch.empty(count, dtype=torch.int32, device=self.device)
        return self._integers

    def flags(self, count: int) -> torch.Tensor:
        """[at least count] int32, all 0 when a launch begins and when it ends.

        Raises:
            InvalidInput: a graph is being captured, and the buffer would have to grow.
        """
        if self._flags.numel() < count:
            if capturing(self.device):
                raise InvalidInput("a layer is captured in a graph before its first run: run it once with as many rows")
            self._outgrown.append(self._flags)
            self._flags = torch.zeros(count, dtype=torch.int32, device=self.device)
            if self.captured is not None:
                self.captured.grow(count)
        return self._flags

    def reset(self) -> None:
        """Zero all flags, also in the old buffers, because a CUDA graph may use them."""
        for tensor in (self._flags, *self._outgrown):
            if tensor.dtype == torch.int32:
                tensor.zero_()


class CapturedFlags:
    """Flags of captured launches, one row for each stream, because streams of one graph run at the same time.

    They are allocated and zeroed before capture. A buffer that is zeroed during capture is zeroed when that graph is
    replayed, and not for other graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outgrown: list[torch.Tensor] = []
        self._rows = torch.zeros(CAPTURED_STREAMS, 0, dtype=torch.int32, device=device)
        _all.add(self)

    def grow(self, count: int) -> None:
        if self._rows.shape[1] < count:
            self._outgrown.append(self._rows)
            self._rows = torch.zeros(CAPTURED_STREAMS, count, dtype=torch.int32, device=self.device)

    def of(self, row: int, count: int) -> torch.Tensor:
        """[at least count] int32 of a stream. Raises InvalidInput: too small, or more streams than rows."""
        if row >= CAPTURED_STREAMS:
            raise InvalidInput(f"launches were captured on {row + 1} streams: {CAPTURED_STREAMS} are the most")
        if self._rows.shape[1] < count:
            raise InvalidInput("a layer is captured in a graph before its first run: run it once with as many rows")
        return self._rows[row]

    def reset(self) -> None:
        """As `Workspace.reset`."""
        for tensor in (self._rows, *self._outgrown):
            tensor.zero_()


class CapturedWorkspace(Workspace):
    """Scratch of launches that are captured on one stream, whose row in `flags` of all such streams is `row`."""

    def __init__(self, device: torch.device, flags: CapturedFlags, row: int) -> None:
        super().__init__(device)
        self._captured_flags, self._row = flags, row

    def flags(self, count: int) -> torch.Tensor:
        return self._captured_flags.of(self._row, count)


def reset_all() -> None:
    """Zero the flags of every workspace of the process, on each device's current stream.

    Call this when memory comes back with other contents, as after vLLM's sleep.
    """
    for workspace in list(_all):
        workspace.reset()


def capturing(device: torch.device) -> bool:
    """Whether launches on the device's current stream are captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def captured_flags(device: torch.device) -> CapturedFlags:
    """The flags of all captured launches on a device."""
    return CapturedFlags(device)


@cache
def workspace_of(device: torch.device, stream: int) -> Workspace:
    """The workspace of all calls on a stream, as `current_stream` names it.

    Graphs that were captured on one stream share it: they must not be replayed at the same time.
    """
    flags = captured_flags(device)
    return Workspace(device, flags) if stream >= 0 else CapturedWorkspace(device, flags, -1 - stream)


def stream_handle(device: torch.device) -> int:
    """CUDA's handle of the current stream of a GPU: of `torch.cuda.current_stream`, which makes an object each time."""
    return torch._C._cuda_getCurrentRawStream(cuda_index(device))


# A negative number for each captured stream, by device and handle.
_captured: dict[tuple[torch.device, int], int] = {}


def current_stream(device: torch.device) -> int:
    """The stream's handle; a negative number of its own while it is captured; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    handle = stream_handle(device)
    return _captured.setdefault((device, handle), -1 - len(_captured)) if capturing(device) else handle
