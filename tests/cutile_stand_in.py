# SPDX-License-Identifier: Apache-2.0
"""cuTile's functions as torch computes them, for kernels that are ordinary functions of tiles, one block at a time.

With `installed()`, `import cuda.tile` finds this. What a tile has beyond an array's end is NaN where no padding was
asked for: a kernel that lets it into a result is wrong.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

# The place of the block that runs, and the grid.
running: dict[str, tuple[int, ...]] = {}
Kernel = Callable[..., None]


def launch(stream: object, grid: Sequence[int], kernel: Kernel, arguments: Sequence[Any]) -> None:
    for place in itertools.product(*map(range, grid)):
        running.update(place=place, grid=tuple(grid))
        kernel(*arguments)


def num_tiles(array: torch.Tensor, axis: int, shape: Sequence[int]) -> int:
    return -(-array.shape[axis] // shape[axis])


def boxes(array: torch.Tensor, index: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Of a tile that lies in the array at least in part."""
    found = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, shape, strict=True))
    assert all(0 <= one.start < size for one, size in zip(found, array.shape, strict=True)), "a tile outside"
    return found


def load(
    array: torch.Tensor,
    index: Sequence[int],
    shape: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    padding_mode: float = math.nan,
) -> torch.Tensor:
    turned = array if order is None else array.permute(*order)
    inside = turned[boxes(turned, index, shape)]
    tile = torch.full(tuple(shape), padding_mode, dtype=array.dtype)
    tile[tuple(map(slice, inside.shape))] = inside
    return tile


def store(array: torch.Tensor, index: Sequence[int], tile: torch.Tensor) -> None:
    place = array[boxes(array, index, tile.shape)]
    place.copy_(tile[tuple(map(slice, place.shape))])


def mma(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    assert x.dtype == y.dtype
    assert acc.dtype == torch.float32
    return x.float() @ y.float() + acc


def kernel(function: Kernel, *, num_worker_warps: object = None) -> Kernel:
    return function


FUNCTIONS: dict[str, Any] = {
    "launch": launch,
    "num_tiles": num_tiles,
    "load": load,
    "store": store,
    "mma": mma,
    "kernel": kernel,
    "ByTarget": SimpleNamespace,
    "Constant": {int: int},
    "PaddingMode": SimpleNamespace(ZERO=0.0),
    "bid": lambda axis: running["place"][axis],
    "num_blocks": lambda axis: running["grid"][axis],
    "cdiv": lambda x, y: -(-x // y),
    "minimum": min,
    "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    "arange": lambda size, *, dtype: torch.arange(size, dtype=dtype),
    "astype": torch.Tensor.to,
    "reshape": torch.reshape,
    "where": torch.where,
    "maximum": torch.maximum,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "max": lambda x, axis, *, keepdims: x.amax(axis, keepdim=keepdims),
    "sum": lambda x, axis, *, keepdims: x.sum(axis, keepdim=keepdims),
    "float32": torch.float32,
    "int32": torch.int32,
}


@contextmanager
def installed() -> Iterator[None]:
    """Within, `cuda.tile` is this, for the modules of kernels that are imported within; a stream is anything."""
    made = ModuleType("cuda.tile")
    vars(made).update(FUNCTIONS)
    space = sys.modules.get("cuda") or ModuleType("cuda")
    before = set(sys.modules)
    with (
        mock.patch.dict(sys.modules, {"cuda": space, "cuda.tile": made}),
        mock.patch.object(space, "tile", made, create=True),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
    ):
        yield
    for name in set(sys.modules) - before:
        if name.endswith("cutile_kernel"):
            del sys.modules[name]
