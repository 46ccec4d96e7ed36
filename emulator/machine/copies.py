# SPDX-License-Identifier: Apache-2.0
"""Bulk and tensor copies: which bytes of shared memory go with which bytes of global memory, and what becomes of them.

Functions of addresses and data alone: who is allowed to touch what, and when, is the machine's business.

Sources: PTX ISA 9.2, sections Tensors (5.5), cp.async.bulk and cp.reduce.async.bulk (9.7.9.25.4.1 and .2), Restriction
on Tensor Copy instructions (9.7.9.25.5.1), cp.async.bulk.tensor and cp.reduce.async.bulk.tensor (9.7.9.25.5.2 and .3);
CUDA Driver API, cuTensorMapEncodeTiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.host.tensor_map import Element, TensorMap
from emulator.machine import floats
from emulator.machine.findings import Kind
from emulator.machine.formats import BF16, F16, Format, Rounding, encode_tf32
from emulator.machine.memory import MemoryFault
from emulator.machine.swizzle import Swizzle

Addresses = NDArray[np.int64]
Mask = NDArray[np.bool_]
Data = NDArray[np.uint8]
Values = NDArray[Any]

CHUNK = 16  # bytes that every swizzle keeps together, and that sizes and addresses are multiples of
SHARED_ALIGNMENT = 128
# The swizzles look at no address bit above the ninth.
PERIOD = 1024
# Types of which 16 elements take 16 bytes of shared memory: bytes that hold data, at the start of those.
UNPACKED = {Element.U4_UNPACKED: 8, Element.U6_UNPACKED: 12}
UNPACKED_ROW = 128  # elements: the one size of a box's rows, and what sizes and coordinates are multiples of
GATHERED_ROWS = 4


class CopyError(ValueError):
    """A copy that the ISA does not define; the message names the rule."""

    kind = Kind.COPY


@dataclass(frozen=True)
class Transfer:
    """What a copy moves, in units of a few bytes, in the order of the box.

    Arrays may be shared between transfers: do not write to them.

    Attributes:
        unit: bytes of a unit, a power of two, up to 16; addresses are multiples of it.
        shared: [n] addresses of the units in the CTA's shared memory, after the swizzle.
        source: [n] their addresses in global memory; without meaning where the unit is not inside.
        inside: [n] whether the unit is in bounds. A load fills the others with zeros, a store or reduction skips them.
            Where a tensor's rows do not end at a multiple of 16 bytes, a store's last unit reaches beyond.
        bytes: what an mbarrier's complete_tx counts: all of the box, out of bounds or padding as it may be.
        dense: the first byte in shared memory and the end, if the units are all that is between them.
    """

    unit: int
    shared: Addresses
    source: Addresses
    inside: Mask
    bytes: int
    dense: tuple[int, int] | None = None


@dataclass(frozen=True)
class Pattern:
    """The part of a transfer that does not depend on where it goes.

    Attributes:
        shared: [n] as in a transfer, for a box at the address modulo PERIOD.
        source: [n] bytes from the box's first element.
        counts: units along each dimension, the contiguous one last.
        dense: as in a transfer.
    """

    shared: Addresses
    source: Addresses
    inside: Mask
    counts: tuple[int, ...]
    dense: tuple[int, int] | None


def tile(tensor: TensorMap, coordinates: Sequence[int], shared: int, *, store: bool = False) -> Transfer:
    """The `.tile` mode.

    Args:
        coordinates: of the box's first element, signed, the contiguous dimension first.
        shared: address of the box in the CTA's shared memory.
        store: from shared to global memory, a reduction included.

    Raises:
        CopyError: the ISA does not define the copy.
        MemoryFault: the address in shared memory is misaligned.
        Unsupported: elements would have to be packed into bits.
    """
    if len(coordinates) != tensor.rank:
        raise CopyError(f"{len(coordinates)} coordinates for a tensor of rank {tensor.rank}")
    starts = tuple(coordinates)
    check(tensor, store)
    check_start(tensor, starts, shared, store)
    sizes = tuple(-(-size // step) for size, step in zip(tensor.box, tensor.element_strides, strict=True))
    unit = unit_bytes(tensor, starts[0], store)
    pattern = pattern_of(tensor, sizes, unit, shared % PERIOD)
    return Transfer(
        unit,
        pattern.shared + (shared - shared % PERIOD),
        pattern.source + first_address(tensor, starts),
        inside(tensor, starts, sizes, unit, pattern),
        tensor.box_bytes,
        moved(pattern.dense, shared - shared % PERIOD),
    )


def gather4(tensor: TensorMap, coordinates: Sequence[int], shared: int, *, store: bool = False) -> Transfer:
    """The modes `.tile::gather4` and, as a store, `.tile::scatter4`: four rows of a matrix, one after the other.

    Args:
        coordinates: the first column, then the four rows.
        shared, store: as for `tile`.

    Raises:
        CopyError, MemoryFault, Unsupported: as for `tile`, and for a tensor that is no matrix or a box of several rows.
    """
    if tensor.rank != 2 or tensor.box[1] != 1:
        raise CopyError(f"four rows at a time want a matrix and boxes of one row, not a box {tensor.box}")
    if len(coordinates) != 1 + GATHERED_ROWS:
        raise CopyError(f"{len(coordinates)} coordinates for one column and {GATHERED_ROWS} rows")
    column, *rows = coordinates
    check(tensor, store)
    check_start(tensor, coordinates, shared, store)
    unit = unit_bytes(tensor, column, store)
    pattern = pattern_of(tensor, (tensor.box[0], GATHERED_ROWS), unit, shared % PERIOD)
    firsts = np.array([first_address(tensor, (column, row)) for row in rows], dtype=np.int64)
    per_row = pattern.counts[1]
    columns = columns_inside(tensor, column, unit, per_row)
    known = np.array([0 <= row < tensor.dims[1] for row in rows])
    return Transfer(
        unit,
        pattern.shared + (shared - shared % PERIOD),
        (firsts[:, None] + pattern.source[:per_row]).reshape(-1),
        (known[:, None] & columns).reshape(-1),
        GATHERED_ROWS * tensor.box_bytes,
        moved(pattern.dense, shared - shared % PERIOD),
    )


def moved(stretch: tuple[int, int] | None, by: int) -> tuple[int, int] | None:
    return None if stretch is None else (stretch[0] + by, stretch[1] + by)


def bulk(source: int, shared: int, size: int, *, mask: int = 0xFFFF, ignored: tuple[int, int] = (0, 0)) -> Transfer:
    """A copy that is no tensor's: a stretch of bytes.

    Args:
        source: the other side's address: in global memory, or in another CTA's shared memory.
        size: bytes.
        mask: of `.cp_mask`: bit i lets byte i of each 16 pass; the others are not part of the transfer.
        ignored: of `.ignore_oob`: bytes at the beginning and at the end that may be out of bounds; they are not part
            of the transfer either, what the destination holds there is indeterminate.

    Raises:
        MemoryFault: an address is no multiple of 16.
        CopyError: the size is no multiple of 16, or more is to be ignored than 15 bytes of an end.
    """
    for address, space in ((source, "source"), (shared, "shared")):
        if address % CHUNK:
            raise MemoryFault(Kind.ALIGNMENT, f"{space} address {address:#x} is not aligned to {CHUNK} bytes", 0)
    if size % CHUNK or size < 0:
        raise CopyError(f"a bulk copy of {size} bytes: sizes are multiples of {CHUNK}")
    if not all(0 <= count < CHUNK for count in ignored):
        raise CopyError(f"a bulk copy that ignores {ignored} bytes: 0 to {CHUNK - 1} can be")
    unit = CHUNK if mask == 0xFFFF and not any(ignored) else 1
    offsets = np.arange(0, size, unit, dtype=np.int64)
    if unit == 1:
        passes = (mask >> (offsets % CHUNK) & 1).astype(bool) & (offsets >= ignored[0]) & (offsets < size - ignored[1])
        offsets = offsets[passes]
    dense = (shared, shared + size) if unit == CHUNK else None
    everything = np.ones(offsets.size, dtype=np.bool_)
    return Transfer(unit, shared + offsets, wrapped(source) + offsets, everything, size, dense)


@lru_cache(maxsize=1024)
def check(tensor: TensorMap, store: bool) -> None:
    """Raises CopyError or Unsupported for what no copy with the tensor map may be."""
    element, unpacked = tensor.element, tensor.element in UNPACKED
    alignment = 2 * CHUNK if unpacked else CHUNK
    row_bits, row_bytes = tensor.box[0] * element.bits, tensor.box[0] * element.shared_bits // 8
    rules = (
        (tensor.address % alignment != 0, f"the address {tensor.address:#x} is no multiple of {alignment}"),
        (any(step % alignment for step in tensor.strides), f"strides {tensor.strides}: no multiples of {alignment}"),
        (row_bits % (8 * CHUNK) != 0, f"a row of {row_bits} bits: no multiple of {CHUNK} bytes"),
        (0 < tensor.swizzle < row_bytes, f"a row of {row_bytes} bytes: more than the swizzle's {tensor.swizzle}"),
        (tensor.element_strides[0] != 1, f"every {tensor.element_strides[0]}th element of dimension 0: none may go"),
        (element is Element.U4 and tensor.dims[0] % 2 != 0, f"{tensor.dims[0]} elements of 4 bits: an odd number"),
        (unpacked and tensor.box[0] != UNPACKED_ROW, f"a row of {tensor.box[0]} elements: must be {UNPACKED_ROW}"),
        (unpacked and tensor.dims[0] % UNPACKED_ROW != 0, f"{tensor.dims[0]} elements: no multiple of {UNPACKED_ROW}"),
        (unpacked and tensor.swizzle not in (0, 128), f"a swizzle of {tensor.swizzle} bytes: must be 0 or 128"),
        (store and element is Element.U4_UNPACKED, "a store: there are only loads"),
    )
    if broken := [words for breaks, words in rules if breaks]:
        raise CopyError(f"a tensor copy of {element.name}: {'; '.join(broken)}")
    if store and element is Element.U6_UNPACKED:
        raise Unsupported("a tensor store of 6-bit elements, each from a byte of its own (.b6p2x16)")


def check_start(tensor: TensorMap, starts: Sequence[int], shared: int, store: bool) -> None:
    """Raises MemoryFault or CopyError for a place that a box cannot be at."""
    if store and min(starts) < 0:
        raise CopyError(f"a tensor store at {tuple(starts)}: a store's coordinates must not be negative")
    if shared % SHARED_ALIGNMENT:
        raise MemoryFault(
            Kind.ALIGNMENT, f"shared address {shared:#x} is not aligned to {SHARED_ALIGNMENT} bytes: a box must be", 0
        )
    if tensor.element in UNPACKED and starts[0] % UNPACKED_ROW:
        raise CopyError(f"{tensor.element.name} from element {starts[0]}: must be a multiple of {UNPACKED_ROW}")
    if starts[0] * tensor.element.bits % (8 * CHUNK):
        raise CopyError(f"{tensor.element.name} from element {starts[0]}: boxes start at multiples of {CHUNK} bytes")


def wrapped(address: int) -> int:
    """An address modulo 2**64, as int64 has it: maps may count on additions that wrap around."""
    return (address + (1 << 63)) % (1 << 64) - (1 << 63)


def first_address(tensor: TensorMap, starts: tuple[int, ...]) -> int:
    """Address of a box's first element, wherever that is."""
    steps = sum(start * step for start, step in zip(starts[1:], tensor.strides, strict=True))
    return wrapped(tensor.address + starts[0] * tensor.element.bits // 8 + steps)


def unit_bytes(tensor: TensorMap, start: int, store: bool) -> int:
    """The largest unit whose parts are all in bounds or all out of bounds.

    A store writes 16 bytes where any of them are in bounds: up to 15 behind a row's end (seen on an H200).
    """
    if tensor.element in UNPACKED:
        # Rows are in or out as a whole; a unit divides the data of a chunk and its offset.
        return UNPACKED[tensor.element] & -UNPACKED[tensor.element]
    if store or start + tensor.box[0] <= tensor.dims[0]:
        return CHUNK
    edge = tensor.dims[0] * tensor.element.bits // 8 | CHUNK
    return edge & -edge


@lru_cache(maxsize=1024)
def pattern_of(tensor: TensorMap, sizes: tuple[int, ...], unit: int, shared: int) -> Pattern:
    """The pattern of a box of `sizes` elements, the contiguous dimension first, at a shared address below PERIOD."""
    element = tensor.element
    row_bytes = sizes[0] * element.shared_bits // 8
    if element in UNPACKED:
        row = np.arange(0, row_bytes, CHUNK)[:, None] + np.arange(0, UNPACKED[element], unit)
    else:
        row = np.arange(0, row_bytes, unit)
    row = row.reshape(-1).astype(np.int64)
    along = np.arange(row.size, dtype=np.int64) * unit
    counts = (*sizes[:0:-1], row.size)
    # Rows narrower than the swizzle's span are a span apart; the rest of it is left alone (seen on an H200).
    pitch = tensor.swizzle or row_bytes
    rows = np.arange(int(np.prod(sizes[1:])), dtype=np.int64)[:, None] * pitch
    source = along
    for size, step, every in zip(sizes[1:], tensor.strides, tensor.element_strides[1:], strict=True):
        offsets = np.arange(size, dtype=np.int64) * (every * step)
        source = (offsets.reshape(-1, *(1,) * source.ndim) + source[None]).astype(np.int64)
    swizzle = Swizzle.B128_ATOM_32 if tensor.atom == 2 * CHUNK else Swizzle(tensor.swizzle)
    addresses = swizzle.apply(shared + (rows + row).reshape(-1))
    everything = np.ones(addresses.size, dtype=np.bool_)
    first, end = int(addresses.min()), int(addresses.max()) + unit
    dense = (first, end) if end - first == addresses.size * unit else None
    pattern = Pattern(addresses, source.reshape(-1), everything, counts, dense)
    for array in (pattern.shared, pattern.source, pattern.inside):
        array.flags.writeable = False
    return pattern


def columns_inside(tensor: TensorMap, start: int, unit: int, count: int) -> Mask:
    """[count] whether each unit of a row is in bounds of the contiguous dimension."""
    if tensor.element in UNPACKED:
        return np.full(count, 0 <= start < tensor.dims[0])
    places = start * tensor.element.bits // 8 + np.arange(count, dtype=np.int64) * unit
    return (places >= 0) & (places < tensor.dims[0] * tensor.element.bits // 8)


def inside(tensor: TensorMap, starts: tuple[int, ...], sizes: tuple[int, ...], unit: int, pattern: Pattern) -> Mask:
    """[n] whether each unit of a box is in bounds."""
    ends = zip(starts, sizes, tensor.element_strides, tensor.dims, strict=True)
    if all(start >= 0 and start + (size - 1) * every < dim for start, size, every, dim in ends):
        return pattern.inside
    mask = columns_inside(tensor, starts[0], unit, pattern.counts[-1])
    for start, size, every, dim in zip(starts[1:], sizes[1:], tensor.element_strides[1:], tensor.dims[1:], strict=True):
        places = start + np.arange(size) * every
        known = (places >= 0) & (places < dim)
        mask = known.reshape(-1, *(1,) * mask.ndim) & mask[None]
    return mask.reshape(-1)


def convert(tensor: TensorMap, data: Data) -> Data:
    """What a load writes for bytes of global memory: rounded to tf32 where the map says so, else themselves."""
    if not tensor.tf32:
        return data
    # cvt's NaN has the 13 bits set that tf32 lacks; a copy's has not (seen on an H200).
    return (encode_tf32(data.view(np.float32), Rounding.NEAREST) & np.uint32(0xFFFFE000)).view(np.uint8)


INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64}
HALVES: dict[str, Format] = {"f16": F16, "bf16": BF16}
# What the ISA allows, by operation: with tensors and .global, and with .shared::cluster.
GLOBAL = {
    "add": {"u32", "s32", "u64", "f32", "f64", "f16", "bf16"},
    **{op: {"u32", "s32", "u64", "s64", "f16", "bf16"} for op in ("min", "max")},
    **{op: {"u32"} for op in ("inc", "dec")},
    **{op: {"b32", "b64"} for op in ("and", "or", "xor")},
}
CLUSTER = {
    "add": {"u32", "s32", "u64"},
    **{op: {"u32", "s32"} for op in ("min", "max")},
    **{op: {"u32"} for op in ("inc", "dec")},
    **{op: {"b32"} for op in ("and", "or", "xor")},
}
# A tensor map does not say whether integers are signed: DSL's maps call all of them unsigned.
TYPES = {Element.U32: "u32", Element.U64: "u64", Element.F16: "f16", Element.BF16: "bf16", Element.F32: "f32"}


def reduce(op: str, element: Element | str, old: Data, new: Data, *, cluster: bool = False) -> Data:
    """What a reduction leaves in its destination.

    Args:
        op: add, min, max, inc, dec, and, or, xor.
        element: a tensor map's type, or the type modifier of a bulk reduction.
        old: bytes of the destination.
        new: bytes of the source, as many.
        cluster: the destination is another CTA's shared memory: fewer types.

    Raises:
        CopyError: the ISA has no such operation on the type.
    """
    kind = element if isinstance(element, str) else TYPES.get(element, element.name)
    if not isinstance(element, str) and op in ("and", "or", "xor") and kind in ("u32", "u64"):
        kind = kind.replace("u", "b")
    if kind not in (CLUSTER if cluster else GLOBAL).get(op, set()):
        raise CopyError(f"a reduction .{op} of {kind}{' in shared memory' if cluster else ''}: there is none")
    if kind in HALVES:
        return reduce_halves(op, HALVES[kind], old.view(np.uint16), new.view(np.uint16)).view(np.uint8)
    if kind == "f32":
        return add_f32(old.view(np.float32), new.view(np.float32)).view(np.uint8)
    if kind == "f64":
        with np.errstate(over="ignore", invalid="ignore"):
            return (old.view(np.float64) + new.view(np.float64)).view(np.uint8)
    return OPERATIONS[op](old.view(INTEGERS[kind]), new.view(INTEGERS[kind])).view(np.uint8)


def add_f32(old: floats.F32, new: floats.F32) -> floats.F32:
    """Rounded to nearest.

    Subnormal numbers stay: the ISA says that bulk reductions flush them, but an H200 does so in neither sort.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return floats.canonical(old + new)


def reduce_halves(op: str, form: Format, old: Values, new: Values) -> Values:
    """Subnormal numbers are kept; float64 holds every sum closely enough that rounding it again is rounding once."""
    a, b = form.decode(old), form.decode(new)
    with np.errstate(invalid="ignore"):
        if op == "add":
            return form.encode(a + b, saturate=False)
        first = (a < b) | ((a == b) & np.signbit(a)) if op == "min" else (a > b) | ((a == b) & ~np.signbit(a))
    chosen = np.where((first & ~np.isnan(a)) | np.isnan(b), old, new)
    nan = form.encode(np.array([np.nan]), saturate=False)[0]
    return np.where(np.isnan(a) & np.isnan(b), nan, chosen).astype(np.uint16)


def increment(old: Values, new: Values) -> Values:
    return np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1))


def decrement(old: Values, new: Values) -> Values:
    return np.where((old == 0) | (old > new), new, old - old.dtype.type(1))


OPERATIONS: dict[str, Callable[[Values, Values], Values]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": increment,
    "dec": decrement,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
