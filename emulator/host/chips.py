# SPDX-License-Identifier: Apache-2.0
"""What the emulated devices have.

Sources: CUDA C++ Programming Guide, "Compute Capabilities" (limits); the numbers of attributes are `cudaDeviceAttr` of
driver_types.h.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from emulator.errors import Unsupported

KIB = 1024


@dataclass(frozen=True)
class Chip:
    """One kind of device.

    Attributes:
        sms: of a whole chip; an emulated device may be asked to have fewer.
        shared_bytes: largest opt-in shared memory of a block, static and dynamic together.
        l2_bytes: of the level-2 cache; only host code that asks for it sees it.
    """

    capability: tuple[int, int]
    sms: int
    shared_bytes: int = 227 * KIB
    l2_bytes: int = 50 * KIB * KIB
    max_threads: int = 1024
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    max_cluster: int = 16

    def attributes(self, sms: int) -> dict[int, int]:
        """Value of each `cudaDeviceAttr` that is answered."""
        names = (1, 2, 3, 4, 5, 6, 7)
        limits = dict(zip(names, (self.max_threads, *self.max_block, *self.max_grid), strict=True))
        return limits | {
            8: 48 * KIB,  # shared memory of a block without opting in
            10: 32,  # lanes of a warp
            12: 64 * KIB,  # registers of a block
            16: sms,
            38: self.l2_bytes,
            39: 2048,  # threads of an SM
            75: self.capability[0],
            76: self.capability[1],
            81: self.shared_bytes + KIB,  # shared memory of an SM: a block's and what is reserved for it
            82: 64 * KIB,  # registers of an SM
            95: 1,  # cooperative launch
            97: self.shared_bytes,
            106: 32,  # blocks of an SM
            111: KIB,  # shared memory that is reserved for each block
        }


HOPPER = Chip((9, 0), sms=132)
BLACKWELL = Chip((10, 0), sms=148, l2_bytes=126 * KIB * KIB)
BLACKWELL_ULTRA = replace(BLACKWELL, capability=(10, 3))
_FAMILIES = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_103": BLACKWELL_ULTRA}
CHIPS = MappingProxyType({name + suffix: one for name, one in _FAMILIES.items() for suffix in ("", "a")})


def chip(arch: str) -> Chip:
    if arch not in CHIPS:
        raise Unsupported(f"no emulated device has the architecture {arch!r}; there are {', '.join(CHIPS)}")
    return CHIPS[arch]
