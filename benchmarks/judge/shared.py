# SPDX-License-Identifier: Apache-2.0
"""Tensors that two processes see: files that both map, or memory of a GPU that one opens from the other's handle.

Each storage lies between two guards. The judge makes the memory and fills it; the candidate's process only opens it.
"""

import io
import pathlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..timing import synchronize

# Bytes before and after each storage; a multiple of every alignment that a kernel may assume.
GUARD = 4096
GUARD_BYTE = 0xA5


class Pickler(pickle.Pickler):
    """Pickles tensors as views of numbered storages.

    Attributes:
        storages: those that were met, in order.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []
        self._known: dict[int, int] = {}

    def persistent_id(self, thing: object) -> object:
        if not isinstance(thing, torch.Tensor):
            return None
        storage = thing.untyped_storage()
        index = self._known.setdefault(storage.data_ptr(), len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
        dtype = str(thing.dtype).removeprefix("torch.")
        return index, dtype, thing.storage_offset(), tuple(thing.shape), thing.stride()


class Unpickler(pickle.Unpickler):
    """Makes tensors that are views of given memory, [GUARD + bytes + GUARD] uint8 for each storage."""

    def __init__(self, file: io.BytesIO, memory: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, pid: Any) -> torch.Tensor:
        index, name, offset, shape, stride = pid
        whole, dtype = self.memory[index], getattr(torch, name)
        start = GUARD // dtype.itemsize + offset
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), start, shape, stride)


def pickled(thing: object) -> tuple[bytes, list[torch.UntypedStorage]]:
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(thing)
    return file.getvalue(), pickler.storages


@dataclass
class Shared:
    """A thing with tensors, in memory that another process can open.

    Attributes:
        thing: a copy of what was shared, whose tensors are in the shared memory.
        memory: [GUARD + bytes + GUARD] uint8 for each storage.
        content: the pickled thing without its tensors' data.
        payload: what `opened` needs, for the other process.
    """

    thing: Any
    memory: list[torch.Tensor]
    content: bytes
    payload: bytes
    files: list[pathlib.Path]

    def refill(self, like: object) -> None:
        """Copies the content of a thing of the same kind and shapes into the shared memory."""
        _, storages = pickled(like)
        for whole, storage in zip(self.memory, storages, strict=True):
            inside(whole).copy_(bytes_of(storage))

    def snapshot(self) -> list[torch.Tensor]:
        """A copy of the memory as it is now.

        It is complete when this returns: a GPU would otherwise copy what another process, which it runs in turns with
        this one, writes afterwards.
        """
        copies = [whole.clone() for whole in self.memory]
        for device in {whole.device for whole in copies}:
            synchronize(device)
        return copies

    def at(self, snapshot: Sequence[torch.Tensor]) -> Any:
        """The thing as it was when the snapshot was taken."""
        return Unpickler(io.BytesIO(self.content), snapshot).load()

    def damage(
        self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> list[str]:
        """What was written between two snapshots, other than these outputs, which are views of `thing`'s tensors."""
        mine = [torch.zeros_like(whole) for whole in after]
        index_of = {whole.untyped_storage().data_ptr(): index for index, whole in enumerate(self.memory)}
        for out in outputs:
            mask, part = mine[index_of[out.untyped_storage().data_ptr()]], out.view(torch.uint8)
            mask.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(1)
        found = []
        for old, new, mask in zip(before, after, mine, strict=True):
            changed = (old != new) & (mask == 0)
            if bool(changed.any()):
                where = "beside an output" if bool(mask.any()) else "to an input"
                count, first = int(changed.sum()), int(changed.nonzero()[0]) - GUARD
                found.append(f"{count} bytes were written {where}, the first at byte {first} of its storage")
        return found

    def close(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def inside(whole: torch.Tensor) -> torch.Tensor:
    """The bytes between the guards."""
    return whole[GUARD : len(whole) - GUARD]


def share(thing: object, folder: pathlib.Path, name: str) -> Shared:
    """Copies a thing's tensors into memory that another process can open.

    Args:
        folder: of the files, where the tensors are on the CPU.
        name: of the files; unique in the folder.
    """
    content, storages = pickled(thing)
    memory, handles, files = [], [], []
    for index, storage in enumerate(storages):
        size = len(storage) + 2 * GUARD
        if storage.device.type == "cpu":
            files.append(folder / f"{name}-{index}")
            handles.append((map_file, (str(files[-1]), size)))
            whole = map_file(*handles[-1][1])
        else:
            from torch.multiprocessing.reductions import reduce_tensor  # here since only GPUs have such handles

            whole = torch.empty(size, dtype=torch.uint8, device=storage.device)
            handles.append(reduce_tensor(whole))  # type: ignore[no-untyped-call]
        whole.fill_(GUARD_BYTE)
        inside(whole).copy_(bytes_of(storage))
        memory.append(whole)
    mirrored = Unpickler(io.BytesIO(content), memory).load()
    return Shared(mirrored, memory, content, pickle.dumps((handles, content)), files)


def map_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def opened(payload: bytes) -> Any:
    """The thing, in the other process."""
    handles, content = pickle.loads(payload)
    return Unpickler(io.BytesIO(content), [open_it(*arguments) for open_it, arguments in handles]).load()
