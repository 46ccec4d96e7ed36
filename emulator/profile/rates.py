# SPDX-License-Identifier: Apache-2.0
"""Public rates of an SM, per cycle.

- Arithmetic, shuffles: CUDA C++ Programming Guide 12.6, "Arithmetic Instructions", column 9.0: 128 FP32 results, 64 of
  integers, logic and comparisons, 64 of FP64, 16 of special functions, 16 of other type conversions, 32 of shuffles.
  The same for 10.0, except where a later line says otherwise.
- Issue: one warp instruction for each of an SM's four parts (the same guide, "SIMT Architecture" and "Hardware
  Multithreading": a warp belongs to one of four schedulers). Warp w is taken to be in part w mod 4.
- FP32 pairs (f32x2, SM100): two results from one issue slot; the lanes stay 128, as peak FP32 rates say.
- Tensor cores: NVIDIA H200 data sheet: 989 TFLOP/s of dense bf16 at 132 SMs, 4096 FLOP a cycle and SM; fp8 and int8
  twice, tf32 half of it. B200: 8192, FlashAttention-4 (arXiv 2603.05451) and data sheet, 2.25 PFLOP/s at 148 SMs; fp8
  and fp6 twice, fp4 four times.
- Special functions: 16 on SM90 and SM100 (FlashAttention-4); exponentials 32 on SM103 (NVIDIA Blackwell Ultra
  architecture: exponentials at twice the rate).
- Shared memory: 32 banks of 4 bytes, 128 bytes (Programming Guide, "Shared Memory"; FlashAttention-4).
- Global memory: H200 4.8 TB/s, 132 SMs, 1.755 GHz under load; B200 8 TB/s, 148 SMs, 1.85 GHz, which is what 2.25
  PFLOP/s and 8192 FLOP give; B300 the same memory rate.

No public rate was found for tensor memory, for conversions of pairs and for the engine of bulk copies: these are
counted and cost nothing but their issue slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from emulator.errors import Unsupported
from emulator.profile.classes import Unit

PARTITIONS = 4

_UNITS = MappingProxyType(
    {
        Unit.ISSUE: 4.0,
        Unit.ALU: 64.0,
        Unit.FMA: 128.0,
        Unit.XU: 16.0,
        Unit.FP64: 64.0,
        Unit.SHUFFLE: 32.0,
        Unit.SHARED: 128.0,
    }
)


@dataclass(frozen=True)
class Rates:
    """What one SM does in a cycle.

    Attributes:
        units: results of each unit; warp instructions of ISSUE, bytes of SHARED.
        flops: of dense multiplication by format: f16 (bf16 too), tf32, f8, f4, i8.
        exponential: results of ex2; the other special functions are the unit's.
        sms, gigahertz, terabytes: of the chip, for its share of global memory.
    """

    name: str
    flops: Mapping[str, float]
    sms: int
    gigahertz: float
    terabytes: float
    exponential: float = 16.0
    units: Mapping[Unit, float] = field(default_factory=lambda: _UNITS)

    @property
    def global_bytes(self) -> float:
        """Bytes of global memory for each SM and cycle, if all SMs read at once and nothing is in the caches."""
        return self.terabytes * 1e3 / self.sms / self.gigahertz


_HOPPER = MappingProxyType({"f16": 4096.0, "tf32": 2048.0, "f8": 8192.0, "i8": 8192.0})
_BLACKWELL = MappingProxyType({"f16": 8192.0, "tf32": 4096.0, "f8": 16384.0, "i8": 16384.0, "f4": 32768.0})
H200 = Rates("H200 (SM90)", _HOPPER, sms=132, gigahertz=1.755, terabytes=4.8)
B200 = Rates("B200 (SM100)", _BLACKWELL, sms=148, gigahertz=1.85, terabytes=8.0)
B300 = Rates("B300 (SM103)", _BLACKWELL, sms=148, gigahertz=1.85, terabytes=8.0, exponential=32.0)
CHIPS: Mapping[str, Rates] = MappingProxyType({"sm_90": H200, "sm_100": B200, "sm_103": B300})


def rates(arch: str) -> Rates:
    """Of an architecture such as sm_100a.

    Raises:
        Unsupported: there are none for it.
    """
    found = CHIPS.get(arch.rstrip("af"))
    if found is None:
        raise Unsupported(f"the cycle model has no rates of {arch}; it has those of {', '.join(CHIPS)}")
    return found
