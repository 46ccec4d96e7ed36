# SPDX-License-Identifier: Apache-2.0
"""Machines that stand in for the emulator's own: one that only records, one that computes a known kernel."""

import ctypes

from emulator import Launch


class Recorder:
    """Keeps the launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.findings: list[str] = []

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)

    @property
    def last(self) -> Launch:
        return self.launches[-1]


class AffineMachine(Recorder):
    """Does what `simple_kernels.Affine` does with scale 2: the proof that addresses are those of the tensors."""

    def launch(self, launch: Launch) -> None:
        super().launch(launch)
        x, y, count = (int.from_bytes(parameter.data[:8], "little") for parameter in launch.parameters)
        source, target = (ctypes.c_float * count).from_address(x), (ctypes.c_float * count).from_address(y)
        for index in range(count):
            target[index] = source[index] * 2 + 1


class Failing(Recorder):
    """Raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def launch(self, launch: Launch) -> None:
        raise self.error
