# SPDX-License-Identifier: Apache-2.0
"""What the machine tells whoever records a launch: the clock (`emulator.clock.traces`)."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emulator.ptx.ir import Instr


class Trace(Protocol):
    """Of one warp.

    Attributes:
        entries: instructions that it issued, as `Warp.traced` gives them, a part for each of its turns.
    """

    entries: list[NDArray[np.uint32]]

    def note(self, runner: Any, instr: Instr) -> None:
        """The machine is about to execute an instruction of a warp: a `Runner`."""

    def expired(self, index: int) -> None:
        """The warp goes on from a wait, its last instruction, although what it waited for has not come."""


class Recorder(Protocol):
    """Of a launch."""

    def begin(self, runner: Any, cluster: int) -> Trace:
        """A warp starts, of the cluster at that place in the grid."""
