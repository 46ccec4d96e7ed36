# SPDX-License-Identifier: Apache-2.0
"""What the clock knows of a chip: numbers, each with where it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported

# In the order of replay.h. Cycles of the SM's clock, unless the name says bytes: those are bytes a cycle and SM.
NAMES = (
    "branch",
    "shared_latency",
    "shuffle_latency",
    "lsu_queue",
    "l2_latency",
    "hbm_latency",
    "tma_issue",
    "port_bytes",
    "l2_bytes",
    "hbm_bytes",
    "shared_bytes",
    "barrier",
    "cluster_barrier",
    "mbarrier_arrive",
    "mbarrier_wake",
    "wgmma_latency",
    "store_latency",
    "distant_latency",
    "dispatch",
    "tensor_move_bytes",
    "tensor_move_latency",
    "commit_latency",
    "store_cost",
    "distant_arrive",
    "distant_bytes",
    "gpu_fence",
    "youngest_first",
)
# Not the replay's own: of instructions (tables.py) and of launches (grid.py).
OF_TABLES = (
    *("alu_latency", "fma_latency", "special_latency", "mma_latency", "special_rate", "matrix_flops"),
    *("tma_latency", "bulk_latency", "async_store"),
)
OF_LAUNCHES = (
    "launch_us",
    "overlapped_us",
    "dependent_us",
    "l2_halves",
    "matrix_clock",
    "hbm_terabytes",
    "hbm_efficiency",
    "l2_terabytes",
    "l2_mebibytes",
)
EVERY = frozenset((*NAMES, *OF_TABLES, *OF_LAUNCHES)) - {"hbm_bytes", "l2_bytes"}


@dataclass(frozen=True)
class Known:
    """A number and its source: a document, a measurement with its commit, or `assumed` and why."""

    value: float
    source: str


@dataclass(frozen=True, eq=False)
class ChipClock:
    """A chip as the clock models it.

    Attributes:
        arch: that it runs, without the suffix: sm_90.
        gigahertz: of the SMs under load.
        constants: by the names above.
    """

    name: str
    arch: str
    sms: int
    gigahertz: float
    constants: Mapping[str, Known]

    def __post_init__(self) -> None:
        missing, strange = EVERY - self.constants.keys(), self.constants.keys() - EVERY
        if missing or strange:
            raise ValueError(f"{self.name}: constants missing: {sorted(missing)}; not known: {sorted(strange)}")

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def with_values(self, **values: float) -> "ChipClock":
        """The same chip with some numbers replaced, as a fit does it.

        Raises:
            Unsupported: a name is none of the constants'.
        """
        if strange := values.keys() - EVERY:
            raise Unsupported(f"the clock has no constants {sorted(strange)}; it has {', '.join(sorted(EVERY))}")
        changed = {name: Known(value, "given by the caller") for name, value in values.items()}
        return replace(self, constants={**self.constants, **changed})

    def share(self, terabytes: float, active: float) -> float:
        """Bytes a cycle of each of so many SMs, of a rate of the chip's in TB/s."""
        return terabytes * 1e3 / self.gigahertz / max(1, min(active, self.sms))

    def of_replay(self, active: float) -> NDArray[np.float64]:
        """The replay's constants while so many SMs are at work."""
        shares = {
            "hbm_bytes": self.share(self["hbm_terabytes"] * self["hbm_efficiency"], active),
            "l2_bytes": self.share(self["l2_terabytes"], active),
        }
        return np.array([shares[name] if name in shares else self[name] for name in NAMES])

    def microseconds(self, cycles: float, matrix: float = 0.0) -> float:
        """Time of some cycles.

        Args:
            matrix: part of them in which the tensor cores are busy: their power lowers the clock.
        """
        return cycles / self.gigahertz / 1e3 / (1 - (1 - self["matrix_clock"]) * min(1.0, matrix))
