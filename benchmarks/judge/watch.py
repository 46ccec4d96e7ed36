# SPDX-License-Identifier: Apache-2.0
"""What a candidate did to its process that an honest one has no reason for: replaced functions, network access.

It is looked at from inside the candidate's process, so that a candidate may hide it. Nothing depends on it: results are
compared and time is measured in the judge's process.
"""

import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

CLOCKS = (
    "time",
    "time_ns",
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "sleep",
)
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
# What vLLM replaces when it is imported.
LEFT_OUT = ("torch.manual_seed", "torch.cuda.set_stream")
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def watched() -> Iterator[tuple[str, object, str]]:
    """(name, owner, attribute) of functions that compare results, move data or measure time."""
    for name in CLOCKS:
        yield f"time.{name}", time, name
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.testing": torch.testing,
        "torch.nn.functional": torch.nn.functional,
        "torch.cuda": torch.cuda,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.cuda.Stream": torch.cuda.Stream,
        "torch.cuda.CUDAGraph": torch.cuda.CUDAGraph,
    }
    for label, owner in owners.items():
        for name, value in list(vars(owner).items()):
            if isinstance(value, (*CALLABLE, type)) and not name.startswith("__"):
                yield f"{label}.{name}", owner, name
    # Tensor inherits most of what it does.
    for name, value in list(vars(torch._C.TensorBase).items()):
        if isinstance(value, CALLABLE):
            yield f"torch.Tensor.{name}", torch.Tensor, name


class Watch:
    """Remembers functions as they are now, and listens for network access.

    Args:
        block: raise PermissionError where the candidate opens a connection.
    """

    def __init__(self, block: bool) -> None:
        self.functions = {
            name: (owner, key, getattr(owner, key, None)) for name, owner, key in watched() if name not in LEFT_OUT
        }
        self.calls: list[str] = []
        listen(self.calls.append, block)

    def findings(self) -> list[str]:
        """A sentence for each kind of thing that was found; the same at each call."""
        replaced = [name for name, (owner, key, was) in self.functions.items() if getattr(owner, key, None) is not was]
        found = []
        if replaced:
            more = f" and {len(replaced) - 5} more" if len(replaced) > 5 else ""
            found.append(f"replaced {', '.join(replaced[:5])}{more}")
        if self.calls:
            found.append(f"used the network: {', '.join(dict.fromkeys(self.calls))}")
        return found


def listen(record: Callable[[str], object], block: bool) -> None:
    """Hooks of the interpreter stay until the process ends."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in NETWORK and not is_local(event, arguments):
            record(event)
            if block:
                raise PermissionError("a candidate has no network")

    sys.addaudithook(hook)


def is_local(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an address is a path: a Unix socket, which leads to this machine only."""
    return event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], (str, bytes))
