# SPDX-License-Identifier: Apache-2.0
"""Copies against loops over elements that are written from the ISA's sentences and tables."""

import itertools
import struct
import time
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import emulator
from emulator.host.tensor_map import Element, Promotion, TensorMap
from emulator.machine import copies
from emulator.machine.copies import CopyError, Transfer
from emulator.machine.memory import MemoryFault

BASE = 0x7F00_0000_0000
# Section 5.5.7: which 16-byte chunk of the data lies at each place of a 128-byte line, line by line.
LINES = {
    0: ["01234567"],
    32: ["01234567", "10325476"],
    64: ["01234567", "10325476", "23016745", "32107654"],
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
}
ATOMS_OF_32 = ["01234567", "23016745", "45670123", "67452301"]


def a_map(
    dims: tuple[int, ...],
    box: tuple[int, ...],
    element: Element = Element.BF16,
    swizzle: int = 0,
    strides: tuple[int, ...] | None = None,
    every: tuple[int, ...] | None = None,
) -> TensorMap:
    """A tensor map at BASE; by default rows are padded to 32 bytes."""
    if strides is None:
        strides, step = (), -(-dims[0] * element.bits // 256) * 32
        for size in dims[1:]:
            strides, step = (*strides, step), step * size
    return TensorMap(BASE, dims, strides, box, every or (1,) * len(dims), element, False, swizzle, Promotion.NONE)


def get_bits(memory: bytearray, bit: int, count: int) -> int:
    return int.from_bytes(memory[bit // 8 : (bit + count + 7) // 8], "little") >> bit % 8 & (1 << count) - 1


def set_bits(memory: bytearray, bit: int, count: int, value: int) -> None:
    stretch = slice(bit // 8, (bit + count + 7) // 8)
    old = int.from_bytes(memory[stretch], "little") & ~((1 << count) - 1 << bit % 8)
    memory[stretch] = (old | value << bit % 8).to_bytes(len(memory[stretch]), "little")


def swizzled(address: int, tensor: TensorMap) -> int:
    """Where the byte lies that would lie at `address` without a swizzle, read off the ISA's tables."""
    lines = ATOMS_OF_32 if tensor.atom == 32 else LINES[tensor.swizzle]
    chunk = str(address // 16 % 8)
    place = lines[address // 128 % len(lines)].index(chunk)
    return address // 128 * 128 + place * 16 + address % 16


@dataclass
class Memories:
    """The bytes of a tensor and of a CTA's shared memory, filled at random."""

    tensor: bytearray
    shared: bytearray

    @classmethod
    def of(cls, tensor: TensorMap, seed: int = 0, shared: int = 1 << 15) -> "Memories":
        rng = np.random.default_rng(seed)
        return cls(bytearray(rng.bytes(tensor.span_bytes + 64)), bytearray(rng.bytes(shared)))

    def copy(self) -> "Memories":
        return Memories(bytearray(self.tensor), bytearray(self.shared))


def copy_by_loops(tensor: TensorMap, corners: list[tuple[int, ...]], shared: int, store: bool, to: Memories) -> None:
    """Boxes at the corners, one behind the other in shared memory, element by element.

    Two rules are an H200's, not the ISA's: rows are as far apart as the swizzle's span, and a store writes whole chunks
    of 16 bytes.
    """
    at = 0
    last = tensor.dims[0]
    if store:
        last += -last % (128 // tensor.element.bits)
    for corner in corners:
        walks = [
            range(first, first + size, step)
            for first, size, step in zip(corner, tensor.box, tensor.element_strides, strict=True)
        ]
        for position in itertools.product(*reversed(walks)):
            place = position[::-1]
            width = tensor.element.bits
            group = {Element.U4_UNPACKED: 64, Element.U6_UNPACKED: 96}.get(tensor.element)
            # 16 elements, then padding to 128 bits.
            bit = at * width if group is None else at // 16 * 128 + at % 16 * width
            low, within = divmod(bit, 8)
            if tensor.swizzle:
                row, low = divmod(low, tensor.box[0] * tensor.element.shared_bits // 8)
                low += row * tensor.swizzle
            bit = swizzled(shared + low, tensor) * 8 + within
            at += 1
            known = all(0 <= index < size for index, size in zip(place, (last, *tensor.dims[1:]), strict=True))
            there = place[0] * width + 8 * sum(i * s for i, s in zip(place[1:], tensor.strides, strict=True))
            if not store:
                set_bits(to.shared, bit, width, get_bits(to.tensor, there, width) if known else 0)
            elif known:
                set_bits(to.tensor, there, width, get_bits(to.shared, bit, width))


def carry_out(transfer: Transfer, store: bool, to: Memories) -> None:
    """What a machine does with a transfer."""
    assert transfer.shared.dtype == transfer.source.dtype == np.int64
    assert transfer.shared.shape == transfer.source.shape == transfer.inside.shape
    assert not (transfer.shared % transfer.unit).any()
    assert not (transfer.source[transfer.inside] % transfer.unit).any()
    shared = np.frombuffer(to.shared, dtype=np.uint8)
    tensor = np.frombuffer(to.tensor, dtype=np.uint8)
    for here, there, known in zip(transfer.shared, transfer.source - BASE, transfer.inside, strict=True):
        side, other = slice(here, here + transfer.unit), slice(there, there + transfer.unit)
        if store and known:
            assert 0 <= there <= len(tensor) - transfer.unit
            tensor[other] = shared[side]
        elif not store:
            shared[side] = tensor[other] if known else 0


def agree(
    tensor: TensorMap, transfer: Transfer, corners: list[tuple[int, ...]], shared: int, store: bool, seed: int
) -> None:
    before = Memories.of(tensor, seed)
    expected, found = before.copy(), before.copy()
    copy_by_loops(tensor, corners, shared, store, expected)
    carry_out(transfer, store, found)
    assert found.tensor == expected.tensor
    assert found.shared == expected.shared


PLAIN = [e for e in Element if e not in (Element.U4_UNPACKED, Element.U6_UNPACKED)]


def random_copy(seed: int, store: bool) -> tuple[TensorMap, tuple[int, ...], int]:
    """A small tensor map, coordinates in, at and beyond the edges, and a shared address."""
    rng = np.random.default_rng([seed, store])
    rank = seed % 5 + 1
    element = PLAIN[seed // 5 % len(PLAIN)]
    swizzle = (0, 32, 64, 128)[int(rng.integers(4))]
    row = int(rng.integers(1, (swizzle or 128) // 16 + 1)) * 128 // element.bits
    widest = (1, 12, 6, 4, 3)[rank - 1]
    box = (row, *(int(rng.integers(1, widest + 1)) for _ in range(rank - 1)))
    every = (1, *(int(rng.integers(1, 3)) for _ in range(rank - 1)))
    dims = (2 * int(rng.integers(1, row + 4)), *(int(rng.integers(1, 2 * size + 2)) for size in box[1:]))
    tensor = a_map(dims, box, element, swizzle, every=every)
    lowest = 0 if store else -1
    start = [int(rng.integers(lowest * (size + 1), dim + 2)) for size, dim in zip(box, dims, strict=True)]
    start[0] -= start[0] % (128 // element.bits)
    return tensor, tuple(start), 128 * int(rng.integers(16))


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("seed", range(165))
def test_boxes(seed: int, store: bool) -> None:
    tensor, start, shared = random_copy(seed, store)
    transfer = copies.tile(tensor, start, shared, store=store)
    assert transfer.bytes == tensor.box_bytes
    agree(tensor, transfer, [start], shared, store, seed)


def test_random_boxes_are_of_every_sort() -> None:
    """All units, boxes that are inside, partly inside and outside, rows of a swizzle's span and narrower ones."""
    units, known, narrow = set(), set(), set()
    for seed in range(165):
        tensor, start, shared = random_copy(seed, False)
        transfer = copies.tile(tensor, start, shared)
        units.add(transfer.unit)
        known.add((bool(transfer.inside.any()), bool(transfer.inside.all())))
        narrow.add(0 < tensor.box[0] * tensor.element.bits < 8 * tensor.swizzle)
    assert units == {1, 2, 4, 8, 16}  # loads by less than 16 bytes end within a chunk
    assert known == {(False, False), (True, False), (True, True)}
    assert narrow == {False, True}


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("shared", [0, 128, 384, 1024, 2048 + 512])
def test_swizzles_anywhere(swizzle: int, shared: int) -> None:
    """A pattern belongs to the addresses, not to the box."""
    tensor = a_map((128, 40), ((swizzle or 64) // 2, 37), Element.BF16, swizzle)
    start = (16, 2)
    agree(tensor, copies.tile(tensor, start, shared), [start], shared, False, 1)


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("shared", [0, 128, 384, 1024, 2048 + 512])
@pytest.mark.parametrize("width", [4, 20, 32])
def test_32_byte_atoms_anywhere(width: int, shared: int, store: bool) -> None:
    tensor = replace(a_map((100, 40), (width, 37), Element.F32, 128), atom=32)
    start = (16, 2)
    agree(tensor, copies.tile(tensor, start, shared, store=store), [start], shared, store, 1)


def test_whole_boxes_move_by_16_bytes() -> None:
    tensor = a_map((512, 1000), (64, 128), Element.BF16, 128)
    transfer = copies.tile(tensor, (64, 128), 2048)
    assert (transfer.unit, transfer.shared.size, transfer.bytes) == (16, 1024, 128 * 128)
    assert transfer.inside.all()
    assert sorted(transfer.shared) == list(range(2048, 2048 + 128 * 128, 16))


def test_a_store_writes_whole_chunks() -> None:
    """12 elements of 2 bytes, padded to 32: an H200 overwrites the padding."""
    tensor = a_map((12, 4), (16, 2), Element.U16)
    transfer = copies.tile(tensor, (0, 1), 0, store=True)
    assert (transfer.unit, transfer.inside.all()) == (16, True)
    assert (transfer.source - BASE).tolist() == [32, 48, 64, 80]
    assert copies.tile(tensor, (0, 1), 0).inside.tolist() == [True, True, True, False] * 2


def test_narrow_rows_are_a_span_apart() -> None:
    """Rows of 32 bytes in a swizzle of 128, as an H200 lays them; the rest of the lines is left alone."""
    transfer = copies.tile(a_map((64, 8), (16, 8), Element.U16, 128), (0, 0), 0)
    assert transfer.bytes == 8 * 32
    assert transfer.shared.tolist() == [0, 16, 144, 128, 288, 304, 432, 416, 576, 592, 720, 704, 864, 880, 1008, 992]


def test_loads_and_stores_restore_a_tensor() -> None:
    tensor = a_map((88, 30, 3), (32, 8, 2), Element.U16, 64)
    source, target = Memories.of(tensor, 1), Memories.of(tensor, 2)
    corners = itertools.product(range(0, 88, 32), range(0, 30, 8), range(0, 3, 2))
    for corner in corners:
        carry_out(copies.tile(tensor, corner, 512), False, source)
        target.shared = source.shared
        carry_out(copies.tile(tensor, corner, 512, store=True), True, target)
    for plane, row in itertools.product(range(3), range(30)):
        first = plane * tensor.strides[1] + row * tensor.strides[0]
        assert target.tensor[first : first + 2 * 88] == source.tensor[first : first + 2 * 88]


@pytest.mark.parametrize("store", [False, True], ids=["gather4", "scatter4"])
@pytest.mark.parametrize("element", [Element.U8, Element.F16, Element.F32])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_four_rows(swizzle: int, element: Element, store: bool) -> None:
    tensor = a_map((1100 // element.bits, 20), (1024 // element.bits, 1), element, swizzle)
    column = (512 if store else -512) // element.bits
    for first in (0, column):
        rows = (19, 0, 7, 7) if not store else (19, 0, 20, 7)
        transfer = copies.gather4(tensor, (first, *rows), 384, store=store)
        assert transfer.bytes == 4 * 128
        agree(tensor, transfer, [(first, row) for row in rows], 384, store, 999 + first)
    transfer = copies.gather4(tensor, (0, -1, 20, 1 << 30, 4), 0)
    assert transfer.inside.reshape(4, -1).tolist()[:3] == [[False] * (len(transfer.inside) // 4)] * 3
    agree(tensor, transfer, [(0, -1), (0, 20), (0, 1 << 30), (0, 4)], 0, False, 5)


@pytest.mark.parametrize("element", [Element.U4_UNPACKED, Element.U6_UNPACKED])
@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("start", [(0, 0), (128, 3), (-128, 0), (256, 0), (0, -2)])
def test_padded_elements(element: Element, swizzle: int, start: tuple[int, int]) -> None:
    """The padding is nobody's: a copy does not write it, an mbarrier counts it."""
    tensor = a_map((256, 6), (128, 5), element, swizzle)
    transfer = copies.tile(tensor, start, 256)
    assert transfer.bytes == 5 * 128
    assert transfer.shared.size * transfer.unit * 8 == 5 * 128 * element.bits
    agree(tensor, transfer, [start], 256, False, 3)
    rows = (5, 0, 9, 2)
    tensor = a_map((256, 6), (128, 1), element, swizzle)
    agree(tensor, copies.gather4(tensor, (128, *rows), 0), [(128, row) for row in rows], 0, False, 4)


def test_addresses_wrap_around() -> None:
    """Maps of ragged tensors reach their elements by adding up to 2**64."""
    step = 1 << 34
    tensor = replace(a_map((64, 1 << 30, 1 << 30), (64, 4, 1), strides=(128, step - 128)), address=BASE)
    start = (0, 1 << 20, 1 << 30 - 1)
    transfer = copies.tile(tensor, start, 0)
    address = (BASE + start[1] * 128 + start[2] * (step - 128)) % (1 << 64)
    assert int(transfer.source[0]) % (1 << 64) == address
    assert transfer.inside.all()


MATRIX = a_map((64, 8), (16, 4), Element.U16)
HALF = a_map((128, 8), (128, 1), Element.U4_UNPACKED)


@pytest.mark.parametrize(
    ("tensor", "start", "words"),
    [
        (MATRIX, (0,), "1 coordinates for a tensor of rank 2"),
        (replace(MATRIX, address=BASE + 8), (0, 0), "multiple of 16"),
        (replace(MATRIX, strides=(136,)), (0, 0), r"strides \(136,\)"),
        (replace(MATRIX, box=(12, 4)), (0, 0), "row of 192 bits"),
        (replace(MATRIX, box=(32, 4), swizzle=32), (0, 0), "more than the swizzle's 32"),
        (replace(MATRIX, element_strides=(2, 1)), (0, 0), "every 2th element"),
        (a_map((7, 8), (32, 4), Element.U4), (0, 0), "odd number"),
        (a_map((64, 8), (32, 4), Element.U4), (16, 0), "multiples of 16 bytes"),
        (MATRIX, (4, 0), "multiples of 16 bytes"),
        (MATRIX, (-4, 0), "multiples of 16 bytes"),
        (replace(HALF, box=(64, 1)), (0, 0), "must be 128"),
        (replace(HALF, dims=(192, 8)), (0, 0), "192 elements"),
        (replace(HALF, address=BASE + 16), (0, 0), "multiple of 32"),
        (replace(HALF, strides=(80,)), (0, 0), "no multiples of 32"),
        (replace(HALF, swizzle=64), (0, 0), "must be 0 or 128"),
        (HALF, (64, 0), "must be a multiple of 128"),
    ],
)
def test_what_no_copy_may_be(tensor: TensorMap, start: tuple[int, ...], words: str) -> None:
    with pytest.raises(CopyError, match=words):
        copies.tile(tensor, start, 0)


def test_what_no_store_may_be() -> None:
    with pytest.raises(CopyError, match="only loads"):
        copies.tile(HALF, (0, 0), 0, store=True)
    for start in ((-16, 0), (0, -1)):
        with pytest.raises(CopyError, match="must not be negative"):
            copies.tile(MATRIX, start, 0, store=True)
    with pytest.raises(CopyError, match="must not be negative"):
        copies.gather4(replace(MATRIX, box=(16, 1)), (0, 1, 2, -1, 3), 0, store=True)
    with pytest.raises(emulator.Unsupported, match="b6p2x16"):
        copies.tile(a_map((128, 8), (128, 1), Element.U6_UNPACKED), (0, 0), 0, store=True)


def test_what_four_rows_may_not_be() -> None:
    row = replace(MATRIX, box=(16, 1))
    with pytest.raises(CopyError, match="boxes of one row"):
        copies.gather4(MATRIX, (0, 1, 2, 3, 4), 0)
    with pytest.raises(CopyError, match="a matrix"):
        copies.gather4(a_map((64, 8, 2), (16, 1, 1)), (0, 1, 2, 3, 4), 0)
    with pytest.raises(CopyError, match="2 coordinates"):
        copies.gather4(row, (0, 1), 0)


@pytest.mark.parametrize("shared", [16, 64, 1024 + 32])
def test_boxes_are_aligned_to_128_bytes(shared: int) -> None:
    with pytest.raises(MemoryFault, match="not aligned to 128"):
        copies.tile(MATRIX, (0, 0), shared)
    with pytest.raises(MemoryFault, match="not aligned to 128"):
        copies.gather4(replace(MATRIX, box=(16, 1)), (0, 1, 2, 3, 4), shared)


# --- Copies of bytes


def test_bulk() -> None:
    transfer = copies.bulk(BASE + 32, 48, 80)
    assert (transfer.unit, transfer.bytes, transfer.inside.all()) == (16, 80, True)
    assert transfer.shared.tolist() == [48, 64, 80, 96, 112]
    assert (transfer.source - transfer.shared == BASE - 16).all()


def test_bulk_in_part() -> None:
    transfer = copies.bulk(BASE, 16, 48, mask=0x8003)
    assert transfer.shared.tolist() == [16, 17, 31, 32, 33, 47, 48, 49, 63]
    transfer = copies.bulk(BASE, 0, 32, ignored=(15, 13))
    assert (transfer.shared.tolist(), transfer.bytes) == ([15, 16, 17, 18], 32)
    assert (transfer.source - BASE).tolist() == [15, 16, 17, 18]


def test_bulk_alignment() -> None:
    for source, shared in ((BASE + 8, 0), (BASE, 8)):
        with pytest.raises(MemoryFault, match="not aligned to 16"):
            copies.bulk(source, shared, 16)
    with pytest.raises(CopyError, match="24 bytes"):
        copies.bulk(BASE, 0, 24)
    with pytest.raises(CopyError, match="ignores"):
        copies.bulk(BASE, 0, 32, ignored=(16, 0))


# --- What becomes of the data


def test_only_tf32_is_rounded() -> None:
    data = np.arange(256, dtype=np.uint8)
    assert copies.convert(MATRIX, data) is data


def numbers(*values: int, size: int = 4) -> np.ndarray:
    return np.array(values, dtype=f"u{size}").view(np.uint8)


def test_tf32_is_rounded_to_nearest_even() -> None:
    tensor = replace(a_map((64, 8), (16, 4), Element.F32), tf32=True)
    pairs = {
        0x3F800FFF: 0x3F800000,
        0x3F801000: 0x3F800000,
        0x3F801001: 0x3F802000,
        0x3F803000: 0x3F804000,
        0xBF803000: 0xBF804000,
        0x7F7FFFFF: 0x7F800000,
        0x7F800000: 0x7F800000,
        0xFF800000: 0xFF800000,
        0x00001001: 0x00002000,
        0x80000001: 0x80000000,
        # As an H200 does.
        0x7F800001: 0x7FFFE000,
        0xFFC00000: 0x7FFFE000,
    }
    found = copies.convert(tensor, numbers(*pairs)).view(np.uint32)
    assert found.tolist() == list(pairs.values())


INTEGERS = {
    "u32": (4, False),
    "s32": (4, True),
    "u64": (8, False),
    "s64": (8, True),
    "b32": (4, False),
    "b64": (8, False),
}
RULES = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
# The tables of 9.7.9.25.4.2 and 9.7.9.25.5.3.
GLOBAL = {
    "add": "u32 s32 u64 f32 f64 f16 bf16",
    "min": "u32 s32 u64 s64 f16 bf16",
    "max": "u32 s32 u64 s64 f16 bf16",
    "inc": "u32",
    "dec": "u32",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
}
CLUSTER = {"add": "u32 s32 u64", "min": "u32 s32", "max": "u32 s32", "inc": "u32", "dec": "u32"} | dict.fromkeys(
    ("and", "or", "xor"), "b32"
)
ALL_TYPES = ["u32", "s32", "u64", "s64", "b32", "b64", "f16", "bf16", "f32", "f64"]


@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize("op", RULES)
def test_types_of_reductions(op: str, cluster: bool) -> None:
    zeros = np.zeros(16, dtype=np.uint8)
    for kind in ALL_TYPES:
        if kind in (CLUSTER if cluster else GLOBAL)[op].split():
            copies.reduce(op, kind, zeros, zeros, cluster=cluster)
        else:
            with pytest.raises(CopyError, match=f"{op} of {kind}"):
                copies.reduce(op, kind, zeros, zeros, cluster=cluster)


@pytest.mark.parametrize("op", RULES)
def test_reductions_of_integers(op: str) -> None:
    for kind in set(GLOBAL[op].split()) & set(INTEGERS):
        size, signed = INTEGERS[kind]
        top = 1 << 8 * size
        values = [0, 1, 2, 5, top // 2 - 1, top // 2, top // 2 + 1, top - 1, top - 2, 0x12345678]
        old, new = zip(*itertools.product(values, values), strict=True)

        def meaning(code: int, signed: bool = signed, top: int = top) -> int:
            return code - top if signed and code >= top // 2 else code

        expected = [RULES[op](meaning(a), meaning(b)) % top for a, b in zip(old, new, strict=True)]
        found = copies.reduce(op, kind, numbers(*old, size=size), numbers(*new, size=size))
        assert found.view(f"u{size}").tolist() == expected, kind
        element = {"u32": Element.U32, "b32": Element.U32, "u64": Element.U64, "b64": Element.U64}.get(kind)
        if element is not None:
            by_map = copies.reduce(op, element, numbers(*old, size=size), numbers(*new, size=size))
            assert by_map.view(f"u{size}").tolist() == expected, element


@pytest.mark.parametrize("element", [Element.U8, Element.U16, Element.F64, Element.U4])
def test_types_of_tensor_reductions(element: Element) -> None:
    """Section 9.7.9.25.5.3 has no .f64, unlike bulk reductions, and nothing below 16 bits."""
    zeros = np.zeros(16, dtype=np.uint8)
    with pytest.raises(CopyError, match="there is none"):
        copies.reduce("add", element, zeros, zeros)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_sums_of_halves(kind: str, dtype: torch.dtype) -> None:
    """Every sum is the nearest of exact sums, subnormal ones too."""
    rng = np.random.default_rng(3)
    old, new = (rng.integers(0, 1 << 16, 4096, dtype=np.uint16) for _ in range(2))
    new[::4] = old[::4] ^ 0x8001
    old[1::4], new[1::4] = old[1::4] & 0x83FF, new[1::4] & 0x807F
    a, b = (torch.from_numpy(codes.view(np.int16)).view(dtype).double() for codes in (old, new))
    expected = (a + b).to(dtype)
    found = copies.reduce("add", kind, old.view(np.uint8), new.view(np.uint8))
    result = torch.from_numpy(found.view(np.int16)).view(dtype)
    assert torch.equal(result.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(result.view(torch.int16)[number], expected.view(torch.int16)[number])
    assert set(found.view(np.uint16)[~number.numpy()]) == {0x7FFF}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_least_and_greatest_halves(kind: str) -> None:
    """A number beats NaN, and -0 is less than +0."""
    one, two, nan = {"f16": (0x3C00, 0x4000, 0x7E00), "bf16": (0x3F80, 0x4000, 0x7FC0)}[kind]
    zero, minus = 0x0000, 0x8000
    cases = [
        (one, two, one, two),
        (two, one, one, two),
        (minus | one, two, minus | one, two),
        (zero, minus, minus, zero),
        (minus, zero, minus, zero),
        (nan, one, one, one),
        (one, nan, one, one),
        (nan, nan, 0x7FFF, 0x7FFF),
    ]
    old, new, least, greatest = zip(*cases, strict=True)
    for op, expected in (("min", least), ("max", greatest)):
        found = copies.reduce(op, kind, numbers(*old, size=2), numbers(*new, size=2))
        assert tuple(found.view(np.uint16).tolist()) == expected, op


def as_fraction(code: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", code))[0])


def test_sums_of_floats() -> None:
    rng = np.random.default_rng(4)
    old = rng.integers(0x3F000000, 0x41000000, 64, dtype=np.uint32)
    new = rng.integers(0x3F000000, 0x41000000, 64, dtype=np.uint32) | np.uint32(1 << 31)
    for element in ("f32", Element.F32):
        found = copies.reduce("add", element, old.view(np.uint8), new.view(np.uint8)).view(np.uint32)
        for a, b, c in zip(old, new, found, strict=True):
            exact = as_fraction(int(a)) + as_fraction(int(b))
            error = abs(as_fraction(int(c)) - exact)
            for neighbour in (int(c) - 1, int(c) + 1):
                assert error <= abs(as_fraction(neighbour) - exact)


@pytest.mark.parametrize("element", ["f32", Element.F32])
def test_subnormal_sums_stay(element: Element | str) -> None:
    """As on an H200, whatever 9.7.9.25.4.2 says of bulk reductions."""
    old, new = numbers(1, 0x80000001, 0x00800001, 0x3F800000), numbers(1, 0x80000000, 0x80800000, 1)
    assert copies.reduce("add", element, old, new).view(np.uint32).tolist() == [2, 0x80000001, 1, 0x3F800000]


def test_sums_of_doubles() -> None:
    old, new = np.array([1.0, 2.0**53, -0.0]), np.array([2.0**-60, 1.0, 0.0])
    found = copies.reduce("add", "f64", old.view(np.uint8), new.view(np.uint8)).view(np.float64)
    assert found.tolist() == [1.0, 2.0**53, 0.0]


# --- Real maps, and how long it takes


class Recorder:
    """A machine that keeps the last launch."""

    def __init__(self) -> None:
        self.findings: list[str] = []

    def launch(self, launch: emulator.Launch) -> None:
        self.last = launch


def test_a_map_of_the_dsl() -> None:
    cutlass = pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack
    from tma_kernels import TensorMaps

    values = torch.arange(40 * 96, dtype=torch.int16).view(torch.float16).reshape(40, 96)
    machine = Recorder()
    with emulator.device(arch="sm_100a", machine=machine):
        view = from_dlpack(values, assumed_align=16)
        cutlass.cute.compile(TensorMaps([((32, 64), 128)]), view)(view)
    tensor = machine.last.tensor_map(0)
    transfer = copies.tile(tensor, (64, 16), 1024)
    codes = values.view(torch.int16).numpy().reshape(-1)
    shared = np.zeros(8192, dtype=np.uint8)
    for here, there, known in zip(transfer.shared, transfer.source - values.data_ptr(), transfer.inside, strict=True):
        shared[here : here + 16] = codes.view(np.uint8)[there : there + 16] if known else 0
    for row, column in itertools.product(range(32), range(64)):
        expected = codes[(16 + row) * 96 + 64 + column] if row < 24 and column < 32 else 0
        # Row r of 128 bytes: chunk c lies at c XOR r.
        place = 1024 + row * 128 + ((column // 8) ^ (row % 8)) * 16 + column % 8 * 2
        assert shared[place : place + 2].view(np.int16)[0] == expected


def test_time() -> None:
    """A box of 128 rows of 128 bytes, at coordinates and places that change: 10 us where this was written."""
    tensor = a_map((512, 1000), (64, 128), Element.BF16, 128)
    copies.tile(tensor, (0, 0), 0)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for index in range(100):
            copies.tile(tensor, (64 * (index % 8), 8 * index), 1024 * (index % 16))
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 500e-6
