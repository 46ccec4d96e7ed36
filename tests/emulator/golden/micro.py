# SPDX-License-Identifier: Apache-2.0
"""All micro-kernels, and the file in which a chip's answers to them are kept.

The file is an .npz with `index`, JSON as bytes, and `data`, all outputs one behind the other, compressed with LZMA.
"""

import json
import lzma
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import micro_lanes
import micro_matrix
import micro_memory
import micro_tensor
import numpy as np
from micro_case import Case
from numpy.typing import NDArray

FILE = Path(__file__).with_name("golden_sm90.npz")


@lru_cache(maxsize=1)
def cases() -> dict[str, Case]:
    """By name."""
    found = [*micro_lanes.cases(), *micro_matrix.cases(), *micro_memory.cases(), *micro_tensor.cases()]
    names = {case.name: case for case in found}
    if len(names) != len(found) or len({case.entry for case in found}) != len(found):
        raise ValueError("two micro-kernels of one name")
    return names


@dataclass
class Golden:
    """What a device answered.

    Attributes:
        source: the device and its driver, or "emulator".
        outputs: bytes by case.
        digests: of the cases that were run: a case that has changed since has another one.
        maps: tensor maps by case as the driver made them, with the address that each is of.
        errors: by case, in words.
    """

    source: str
    outputs: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    maps: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        index = {
            "source": self.source,
            "outputs": [[name, len(out), self.digests[name]] for name, out in self.outputs.items()],
            "maps": {name: [[address, data.hex()] for address, data in some] for name, some in self.maps.items()},
            "errors": self.errors,
        }
        data = lzma.compress(b"".join(out.tobytes() for out in self.outputs.values()), preset=9)
        np.savez(
            path,
            index=np.frombuffer(lzma.compress(json.dumps(index).encode(), preset=9), np.uint8),
            data=np.frombuffer(data, np.uint8),
        )

    @classmethod
    def load(cls, path: Path = FILE) -> "Golden":
        with np.load(path) as stored:
            index = json.loads(lzma.decompress(stored["index"].tobytes()))
            data = np.frombuffer(lzma.decompress(stored["data"].tobytes()), np.uint8)
        found = cls(index["source"], errors=index["errors"])
        place = 0
        for name, size, digest in index["outputs"]:
            found.outputs[name], found.digests[name] = data[place : place + size], digest
            place += size
        found.maps = {
            name: [(address, bytes.fromhex(text)) for address, text in some] for name, some in index["maps"].items()
        }
        return found
