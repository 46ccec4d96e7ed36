# SPDX-License-Identifier: Apache-2.0
"""The machine behind an emulated device."""

from collections.abc import Sequence

from emulator.host.launch import Launch
from emulator.machine.findings import Findings
from emulator.machine.launch import MOST_INSTRUCTIONS, Run
from emulator.machine.overlap import Overlap
from emulator.machine.profile import Profile
from emulator.machine.stream import Stream


class Machine:
    """Runs launches one after the other, or so that they overlap.

    Args:
        arch: such as sm_100a.
        sms: that run CTAs at the same time, one each.
        schedule: eager, lazy, random or late: when asynchronous work is done, and whether a warp is held back.
        seed: of the random schedule; of late, the warp that is held back.
        limit: warp instructions of a launch, after which it counts as endless.

    Attributes:
        findings: what the checks found, over all launches.
        profile: what the kernels did.
    """

    def __init__(
        self, arch: str, sms: int, schedule: str = "lazy", seed: int = 0, *, limit: int = MOST_INSTRUCTIONS
    ) -> None:
        self.arch, self.sms, self.schedule, self.seed = arch, sms, schedule, seed
        self.limit = limit
        self.findings = Findings()
        self.profile = Profile()

    def launch(self, launch: Launch) -> None:
        """Run a kernel to its end, or to a finding that makes going on impossible.

        Raises:
            EmulatorError: something in it is not emulated.
        """
        self._run(launch).execute()

    def overlap(self, launches: Sequence[Launch]) -> None:
        """Run kernels of which each may start while the one before it runs; otherwise as `launch`."""
        overlap = Overlap(list(launches))
        Stream([self._run(launch, overlap) for launch in launches], self.schedule, self.seed).execute()

    def _run(self, launch: Launch, overlap: Overlap | None = None) -> Run:
        return Run(launch, self.sms, self.schedule, self.seed, self.findings, self.profile, self.limit, overlap)
