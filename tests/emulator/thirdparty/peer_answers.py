# SPDX-License-Identifier: Apache-2.0
"""What a chip answered to the cases of others' kernels.

The file is an .npz: `index`, JSON as bytes, and of each output a sample of its elements' bits, as unsigned integers.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peer_cases import octets

FILE = Path(__file__).resolve().parents[1] / "golden" / "thirdparty" / "golden_sm90.npz"
SAMPLE = 4096
# Prime, and so coprime to what it goes through: no place comes twice, and none is left out where all are wanted.
STEP = 2654435761


def places(count: int) -> NDArray[np.int64]:
    """Which of so many elements are kept: SAMPLE at most, spread evenly and over all rows and columns."""
    return np.sort(np.arange(min(count, SAMPLE)) * STEP % count)


@dataclass(frozen=True)
class Output:
    """A tensor, of which a sample is kept.

    Attributes:
        dtype: without "torch.".
        digest: of all elements' bits.
        sample: the bits of the elements at `places`.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    sample: NDArray[Any]

    @classmethod
    def of(cls, x: torch.Tensor) -> "Output":
        data = octets(x)
        bits = np.frombuffer(data, f"u{x.element_size()}")
        name = str(x.dtype).removeprefix("torch.")
        return cls(name, tuple(x.shape), hashlib.sha256(data).hexdigest(), bits[places(x.numel())])

    def values(self) -> torch.Tensor:
        """The sample as numbers."""
        octets_of_sample = torch.from_numpy(self.sample.view(np.uint8).copy())
        return octets_of_sample.view(getattr(torch, self.dtype))


@dataclass(frozen=True)
class Answer:
    """Of one case.

    Attributes:
        inputs: their digest.
        steady: whether every one of several calls gave the same bits.
    """

    inputs: str
    outputs: dict[str, Output]
    steady: bool


@dataclass
class Answers:
    """Of one chip.

    Attributes:
        source: what answered: GPU, versions, date and commit, by name.
        cases: by name.
    """

    source: dict[str, str] = field(default_factory=dict)
    cases: dict[str, Answer] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        index = {
            "source": self.source,
            "cases": {
                name: {
                    "inputs": answer.inputs,
                    "steady": answer.steady,
                    "outputs": {key: [one.dtype, one.shape, one.digest] for key, one in answer.outputs.items()},
                }
                for name, answer in self.cases.items()
            },
        }
        samples = {
            f"{name}/{key}": one.sample for name, answer in self.cases.items() for key, one in answer.outputs.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **samples)

    @classmethod
    def load(cls, path: Path = FILE) -> "Answers":
        """Without a file there are no answers."""
        if not path.exists():
            return cls()
        with np.load(path) as stored:
            index = json.loads(stored["index"].tobytes())
            found = cls(index["source"])
            for name, told in index["cases"].items():
                outputs = {
                    key: Output(dtype, tuple(shape), digest, stored[f"{name}/{key}"])
                    for key, (dtype, shape, digest) in told["outputs"].items()
                }
                found.cases[name] = Answer(told["inputs"], outputs, told["steady"])
        return found
