# SPDX-License-Identifier: Apache-2.0
"""The 128-byte tensor maps that CuTe DSL's host code builds, or asks CUDA for.

NVIDIA documents how to make a tensor map (`cuTensorMapEncodeTiled`) and not what is in it. The layout below was read
off the stores in the printed host IR of the tested releases, and tests compile kernels over boxes, strides, swizzles,
types and ranks to see that each field comes back. A bit that was never seen set is refused: interleaving, a fill that
is not zero and im2col must be behind some of them. The driver's own maps (CUDA 13.0, on an H200) are the same except
for the 2, which is 0 there, and for the bytes of a box at 64 and the alignment of its pattern at 72; a GPU takes both.

    byte  0  address, u64
          8  u32: [3:0] 2 or 0, [6:4] rank - 1, [10:7] type, [15:13] swizzle, [16] tf32, [18:17] L2 promotion,
             [19] 32-byte atoms, [21] large
         12  bits 4 to 35 of the strides 1 to 4, u32 each
         28  bits 36 to 39 of the strides 1 to 4, a nibble each
         32  dimensions - 1, u32 each
         52  strides of elements - 1, 3 bits each
         55  box - 1, u8 each
"""

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

from emulator.errors import LaunchError, Unsupported

BYTES = 128
# CuTe DSL never writes the upper half: it holds what was on the stack.
WRITTEN_BYTES = 64
MAX_RANK = 5
TILED = (0, 2)  # the driver's, CuTe DSL's


class Element(enum.Enum):
    """Type of an element: number in a tensor map, bits in global memory, bits in shared memory.

    The unpacked types are `CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B` and `16U6_ALIGN16B`: 16 elements lie packed at the
    start of 16 bytes of shared memory.
    """

    U8 = (0, 8, 8)
    U16 = (1, 16, 16)
    U32 = (2, 32, 32)
    U64 = (4, 64, 64)
    F16 = (6, 16, 16)
    F32 = (7, 32, 32)
    F64 = (9, 64, 64)
    BF16 = (10, 16, 16)
    U4 = (11, 4, 4)
    U4_UNPACKED = (12, 4, 8)
    U6_UNPACKED = (13, 6, 8)

    @property
    def bits(self) -> int:
        """Of an element in global memory."""
        return self.value[1]

    @property
    def shared_bits(self) -> int:
        """Of the room that an element takes in shared memory."""
        return self.value[2]


ELEMENTS = {element.value[0]: element for element in Element}


class Promotion(enum.IntEnum):
    """How many bytes are fetched into L2 at a time; numbers as in `CUtensorMapL2promotion`."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Dimension 0 is the one that is contiguous.

    Attributes:
        address: of the tensor in global memory.
        dims: elements of each dimension.
        strides: bytes between elements of the dimensions 1 and up: one fewer than dims.
        box: elements of a copy, in each dimension.
        element_strides: 1 where every element is copied; nothing else was seen.
        element: a type of 8 bits and up says only how wide it is, except for floats that are not 8 bits wide.
        tf32: 32-bit floats are rounded to tf32 on their way.
        swizzle: span of the pattern in bytes: 0, 32, 64 or 128.
        interleave: always 0, others are refused.
        fill: of elements out of bounds: always zero, others are refused.
        atom: bytes that the swizzle keeps together: 16, or 32 with a swizzle of 128.
    """

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    element: Element
    tf32: bool
    swizzle: int
    promotion: Promotion
    interleave: int = 0
    fill: str = "zero"
    atom: int = 16

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def box_bytes(self) -> int:
        """Bytes that a copy of a box puts into shared memory."""
        count = 1
        for size, step in zip(self.box, self.element_strides, strict=True):
            count *= -(-size // step)
        return count * self.element.shared_bits // 8

    @property
    def span_bytes(self) -> int:
        """Bytes from the address to the end of the last element."""
        row_bytes = -(-self.dims[0] * self.element.bits // 8)
        return row_bytes + sum((size - 1) * step for size, step in zip(self.dims[1:], self.strides, strict=True))


class Codes(NamedTuple):
    """Numbers of cuda.h's enumerations, as cuTensorMapEncodeTiled takes them."""

    type: int
    interleave: int
    swizzle: int
    promotion: int
    fill: int


# By CUtensorMapDataType: the element, and whether it is rounded to tf32. Signed integers and floats whose subnormals
# are flushed have codes of their own in a tensor map, which were never seen.
DATA_TYPES = {
    0: (Element.U8, False),
    1: (Element.U16, False),
    2: (Element.U32, False),
    4: (Element.U64, False),
    6: (Element.F16, False),
    7: (Element.F32, False),
    8: (Element.F64, False),
    9: (Element.BF16, False),
    11: (Element.F32, True),
    13: (Element.U4, False),
    14: (Element.U4_UNPACKED, False),
    15: (Element.U6_UNPACKED, False),
}
# By CUtensorMapSwizzle: span and atom in bytes.
SWIZZLES = {0: (0, 16), 1: (32, 16), 2: (64, 16), 3: (128, 16), 4: (128, 32)}


def tiled(
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_strides: tuple[int, ...],
    codes: Codes,
) -> TensorMap:
    """What cuTensorMapEncodeTiled makes; arguments as TensorMap's.

    Raises:
        Unsupported: a type, swizzle, interleaving or fill that the emulator does not know.
        LaunchError: what CUDA would refuse (cuda.h, cuTensorMapEncodeTiled).
    """
    refuse(
        (codes.type not in DATA_TYPES, f"CUtensorMapDataType {codes.type}"),
        (codes.swizzle not in SWIZZLES, f"CUtensorMapSwizzle {codes.swizzle}"),
        (codes.interleave != 0, f"CUtensorMapInterleave {codes.interleave}"),
        (codes.fill != 0, f"CUtensorMapFloatOOBfill {codes.fill}"),
    )
    element, tf32 = DATA_TYPES[codes.type]
    swizzle, atom = SWIZZLES[codes.swizzle]
    promotion = Promotion(codes.promotion)
    made = TensorMap(address, dims, strides, box, element_strides, element, tf32, swizzle, promotion, atom=atom)
    if said := [words for holds, words in _objections(made) if holds]:
        raise LaunchError(f"cuTensorMapEncodeTiled: {'; '.join(said)}")
    return made


def _objections(made: TensorMap) -> tuple[tuple[bool, str], ...]:
    """What CUDA would refuse."""
    unpacked = made.element.shared_bits != made.element.bits
    aligned = 32 if unpacked else 16
    inner = made.box[0] * made.element.shared_bits // 8
    return (
        (made.address % aligned != 0, f"address {made.address:#x}; a multiple of {aligned}"),
        (not all(0 < size <= 1 << 32 for size in made.dims), f"dimensions {made.dims}; 1 to 2**32"),
        (
            not all(0 < step < 1 << 40 and step % aligned == 0 for step in made.strides),
            f"strides {made.strides}; multiples of {aligned} below 2**40",
        ),
        (not all(0 < size <= 256 for size in made.box), f"a box of {made.box}; 1 to 256"),
        (
            not all(0 < step <= 8 for step in made.element_strides),
            f"strides of elements {made.element_strides}; 1 to 8",
        ),
        (inner % 16 != 0, f"a box of {inner} bytes in the first dimension; a multiple of 16"),
        (
            bool(made.swizzle) and inner > made.swizzle,
            f"a box of {inner} bytes in the first dimension; at most {made.swizzle} are swizzled",
        ),
    )


def encode(made: TensorMap) -> bytes:
    """The tensor map's bytes; `decode` reads them."""
    spans = [span for span, _ in SWIZZLES.values()]
    flags = TILED[1] | made.rank - 1 << 4 | made.element.value[0] << 7 | spans.index(made.swizzle) << 13
    flags |= made.tf32 << 16 | made.promotion << 17 | (made.atom == 32) << 19
    steps = [step >> 4 for step in made.strides] + [0] * (MAX_RANK - 1 - len(made.strides))
    high = sum((step >> 32) << 4 * place for place, step in enumerate(steps))
    every = sum((step - 1) << 3 * place for place, step in enumerate(made.element_strides))
    low = [step & 0xFFFFFFFF for step in steps]
    head = struct.pack("<QI4II5I", made.address, flags, *low, high, *_less_one(made.dims))
    written = head + every.to_bytes(3, "little") + bytes(_less_one(made.box))
    return written.ljust(WRITTEN_BYTES, b"\0").ljust(BYTES, b"\0")


def _less_one(sizes: tuple[int, ...]) -> list[int]:
    return [size - 1 for size in sizes] + [0] * (MAX_RANK - len(sizes))


def field(word: int, low: int, bits: int) -> int:
    return word >> low & (1 << bits) - 1


def decode(data: bytes) -> TensorMap:
    """The tensor map in 128 bytes of a kernel's parameters."""
    if len(data) != BYTES:
        raise Unsupported(f"a tensor map has {BYTES} bytes, not {len(data)}")
    address, flags, *rest = struct.unpack_from("<QI4II5I", data)
    low_strides, high_strides, sizes = rest[:4], rest[4], rest[5:]
    rank = field(flags, 4, 3) + 1
    known = 1 << 19 | 0b11 << 17 | 1 << 16 | 0b111 << 13 | 0xF << 7 | 0b111 << 4 | 0xF | 1 << 21
    number = field(flags, 7, 4)
    strides = tuple((low | field(high_strides, 4 * i, 4) << 32) << 4 for i, low in enumerate(low_strides))
    element_strides = int.from_bytes(data[52:54], "little")
    boxes = data[55 : 55 + MAX_RANK]
    refuse(
        (field(flags, 0, 4) not in TILED, f"kind {field(flags, 0, 4)}"),
        (rank > MAX_RANK, f"rank {rank}"),
        (number not in ELEMENTS, f"element type {number}"),
        (field(flags, 13, 3) > 3, f"swizzle {field(flags, 13, 3)}"),
        (flags & ~known != 0, f"flags {flags & ~known:#x}, which may be an interleaved layout, a fill or im2col"),
        (high_strides >> 16 != 0, f"bits {high_strides >> 16:#x} beside the strides"),
        (element_strides >> 15 != 0 or data[54] != 0, "bits beside the strides of elements"),
        (any(data[60:WRITTEN_BYTES]), "bits behind the box"),
        (any(strides[rank - 1 :]), f"a stride beyond rank {rank}"),
        (any(sizes[rank:]) or any(boxes[rank:]), f"a size beyond rank {rank}"),
        (element_strides >> 3 * rank != 0, f"a stride of elements beyond rank {rank}"),
    )
    element = ELEMENTS[number]
    found = TensorMap(
        address=address,
        dims=tuple(size + 1 for size in sizes[:rank]),
        strides=strides[: rank - 1],
        box=tuple(size + 1 for size in boxes[:rank]),
        element_strides=tuple(field(element_strides, 3 * i, 3) + 1 for i in range(rank)),
        element=element,
        tf32=bool(field(flags, 16, 1)),
        swizzle=(0, 32, 64, 128)[field(flags, 13, 3)],
        promotion=Promotion(field(flags, 17, 2)),
        atom=32 if field(flags, 19, 1) else 16,
    )
    refuse(
        (found.tf32 and element is not Element.F32, f"tf32 of {element.name}"),
        (found.atom == 32 and found.swizzle != 128, f"32-byte atoms with a swizzle of {found.swizzle} bytes"),
    )
    return found


def refuse(*objections: tuple[bool, str]) -> None:
    """Raise with all objections that hold."""
    if said := [words for holds, words in objections if holds]:
        raise Unsupported(f"a tensor map that the emulator cannot read: {'; '.join(said)}")
