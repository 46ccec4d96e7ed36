# SPDX-License-Identifier: Apache-2.0
"""One file for each chip that the clock knows."""

from collections.abc import Mapping
from types import MappingProxyType

from emulator.clock.chips.b200 import B200
from emulator.clock.chips.b300 import B300
from emulator.clock.chips.gb200 import GB200
from emulator.clock.chips.gb300 import GB300
from emulator.clock.chips.h100 import H100
from emulator.clock.chips.h200 import H200
from emulator.clock.constants import ChipClock
from emulator.errors import Unsupported

CHIPS: Mapping[str, ChipClock] = MappingProxyType({one.name: one for one in (H100, H200, B200, GB200, B300, GB300)})
# What an arch stands for where nobody names a chip.
DEFAULTS = MappingProxyType({"sm_90": "H200", "sm_100": "B200", "sm_103": "B300"})


def chip_of(arch: str, name: str | None = None) -> ChipClock:
    """The chip of a name, or the one that stands for an architecture such as sm_90a.

    Raises:
        Unsupported: there is none, or it has another architecture.
    """
    family = arch.rstrip("af")
    wanted = name or DEFAULTS.get(family)
    found = CHIPS.get(wanted or "")
    if found is None:
        raise Unsupported(f"the clock has no chip {name or 'for ' + arch}; it has {', '.join(CHIPS)}")
    if found.arch != family:
        raise Unsupported(f"{found.name} is an {found.arch}, and the kernel is for {arch}")
    return found
