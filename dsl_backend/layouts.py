# SPDX-License-Identifier: Apache-2.0
"""CuTe's layout algebra in plain Python, for pictures and exercises (docs/layouts.md): no kernel needs it.

A layout is written `shape:stride`, such as `((2,4),(8,2)):((1,8),(2,64))`. Without a stride it is compact with the
first mode innermost. A swizzle stands in front: `Sw<3,3,3> o (8,64):(64,1)`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsl_backend.errors import InvalidInput

# An integer, or a tuple of such.
Nested = Any
TOKENS = re.compile(r"\s*(?:(\d+)|([():,]))")
SWIZZLE = re.compile(r"\s*Sw<\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*>\s*o\s*")


@dataclass(frozen=True)
class Swizzle:
    """Exclusive or of `bits` bits of an offset, from `base` on, with those `shift` higher."""

    bits: int
    base: int
    shift: int

    def __call__(self, offset: int) -> int:
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)

    def __str__(self) -> str:
        return f"Sw<{self.bits},{self.base},{self.shift}>"


@dataclass(frozen=True)
class Layout:
    """A function from coordinates to offsets.

    Attributes:
        shape, stride: nested in the same way.
        swizzle: applied to offsets.
    """

    shape: Nested
    stride: Nested
    swizzle: Swizzle | None = None

    @property
    def modes(self) -> list["Layout"]:
        """The layouts of its modes; itself where it has one only."""
        if isinstance(self.shape, int):
            return [Layout(self.shape, self.stride)]
        return [Layout(shape, stride) for shape, stride in zip(self.shape, self.stride, strict=True)]

    @property
    def size(self) -> int:
        """The number of coordinates."""
        result = 1
        for shape, _ in self.flat:
            result *= shape
        return result

    @property
    def cosize(self) -> int:
        """One more than the largest offset without a swizzle."""
        return 1 + sum((shape - 1) * stride for shape, stride in self.flat)

    @property
    def flat(self) -> list[tuple[int, int]]:
        """(shape, stride) of every leaf."""
        return list(zip(leaves(self.shape), leaves(self.stride), strict=True))

    def __call__(self, *coordinate: Nested) -> int:
        """The offset of a coordinate: an index, or an index or a tuple for each mode."""
        where = coordinate[0] if len(coordinate) == 1 else coordinate
        offset = inner(where, self.shape, self.stride)
        return self.swizzle(offset) if self.swizzle else offset

    def __str__(self) -> str:
        text = f"{written(self.shape)}:{written(self.stride)}"
        return f"{self.swizzle} o {text}" if self.swizzle else text


def leaves(nested: Nested) -> Iterator[int]:
    if isinstance(nested, int):
        yield nested
    else:
        for part in nested:
            yield from leaves(part)


def written(nested: Nested) -> str:
    return str(nested) if isinstance(nested, int) else f"({','.join(map(written, nested))})"


def inner(where: Nested, shape: Nested, stride: Nested) -> int:
    """The offset of a coordinate. An index of a tuple of modes counts through the first one first."""
    if isinstance(shape, int):
        if not isinstance(where, int):
            raise InvalidInput(f"coordinate {written(where)} has modes where the layout has one of {shape}")
        return int(where * stride)
    if isinstance(where, int):
        offset = 0
        for index, (part, step) in enumerate(zip(shape, stride, strict=True)):
            count = Layout(part, step).size
            # The last mode takes what is left, so that an index past the end continues.
            offset += inner(where if index == len(shape) - 1 else where % count, part, step)
            where //= count
        return offset
    if len(where) != len(shape):
        raise InvalidInput(f"coordinate {written(where)} has {len(where)} modes, the layout {len(shape)}")
    return sum(inner(*each) for each in zip(where, shape, stride, strict=True))


def compact(shape: Nested, first: int = 1) -> Nested:
    """The strides of a shape without gaps, the first mode innermost."""
    if isinstance(shape, int):
        return first
    strides = []
    for part in shape:
        strides.append(compact(part, first))
        first *= Layout(part, part).size
    return tuple(strides)


def parse(text: str) -> Layout:
    """The layout that a text describes.

    Raises:
        InvalidInput: it describes none; the message says where and why.
    """
    found = SWIZZLE.match(text)
    swizzle = Swizzle(*map(int, found.groups())) if found else None
    if "<" in text and found is None:
        raise InvalidInput(f"layout {text!r}: a swizzle is written Sw<bits,base,shift> o shape:stride")
    if swizzle is not None and swizzle.shift < swizzle.bits:
        raise InvalidInput(f"layout {text!r}: a shift of {swizzle.shift} is less than the {swizzle.bits} bits")
    reader = Reader(text, found.end() if found else 0)
    shape = reader.nested()
    if any(one < 1 for one in leaves(shape)):
        raise InvalidInput(f"layout {text!r}: a shape of 0: at least 1 is needed")
    stride = compact(shape)
    if reader.peek() == ":":
        reader.take(":")
        stride = reader.nested()
    if reader.peek():
        raise InvalidInput(f"layout {text!r}: {reader.peek()!r} at {reader.at} is not expected behind a whole layout")
    if not congruent(shape, stride):
        raise InvalidInput(f"layout {text!r}: stride {written(stride)} is not nested like shape {written(shape)}")
    return Layout(shape, stride, swizzle)


def congruent(a: Nested, b: Nested) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(map(congruent, a, b))


class Reader:
    """Reads integers and tuples from a text."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def peek(self) -> str:
        """The next token; empty at the end. Raises InvalidInput: it is none."""
        found = TOKENS.match(self.text, self.at)
        if found is None:
            if rest := self.text[self.at :].strip():
                raise InvalidInput(
                    f"layout {self.text!r}: {rest[0]!r} at {self.text.index(rest[0], self.at)} is no digit, "
                    "parenthesis, comma or colon"
                )
            return ""
        return found[1] or found[2]

    def take(self, *expected: str) -> str:
        """The next token. Raises InvalidInput: it is none of those that are expected."""
        token = self.peek()
        kind = "a number" if token.isdigit() else token
        if kind not in expected:
            seen = repr(token) if token else "the end"
            raise InvalidInput(f"layout {self.text!r}: {seen} at {self.at} where {' or '.join(expected)} is needed")
        found = TOKENS.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return token

    def nested(self) -> Nested:
        token = self.take("a number", "(")
        if token != "(":
            return int(token)
        parts = [self.nested()]
        while self.take(",", ")") == ",":
            parts.append(self.nested())
        return tuple(parts)


def given(layout: Layout | str) -> Layout:
    return parse(layout) if isinstance(layout, str) else layout


def joined(modes: Sequence[tuple[int, int]]) -> Layout:
    """A layout of these modes; without a tuple around one alone."""
    if not modes:
        return Layout(1, 0)
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(shape for shape, _ in modes), tuple(stride for _, stride in modes))


def coalesce(layout: Layout | str) -> Layout:
    """The same function of an index with as few modes as possible."""
    found: list[tuple[int, int]] = []
    for shape, stride in given(layout).flat:
        if shape == 1:
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * shape, found[-1][1])
        else:
            found.append((shape, stride))
    return joined(found)


def composition(a: Layout | str, b: Layout | str) -> Layout:
    """The layout R of b's shape with R(i) = a(b(i)).

    Raises:
        InvalidInput: b's steps do not divide a's modes, so that no layout does it.
    """
    a, b = given(a), given(b)
    result = composed(coalesce(a).flat or [(1, 0)], b.shape, b.stride)
    return Layout(result.shape, result.stride, a.swizzle)


def composed(modes: list[tuple[int, int]], shape: Nested, stride: Nested) -> Layout:
    if not isinstance(shape, int):
        parts = [composed(modes, *each) for each in zip(shape, stride, strict=True)]
        return Layout(tuple(part.shape for part in parts), tuple(part.stride for part in parts))
    if stride == 0 or shape == 1:
        return Layout(shape, 0)
    found, left, step = [], shape, stride
    for size, width in modes[:-1]:
        if step % size == 0:
            step //= size
            continue
        if size % step:
            raise InvalidInput(f"composition: a step of {stride} does not divide the mode {size}:{width}")
        taken = min(size // step, left)
        if left % taken:
            raise InvalidInput(f"composition: {shape}:{stride} ends inside of the mode {size}:{width}")
        found.append((taken, step * width))
        left, step = left // taken, 1
        if left == 1:
            break
    else:
        found.append((left, step * modes[-1][1]))
    return coalesce(joined(found))


def complement(layout: Layout | str, size: int) -> Layout:
    """The layout of the offsets where copies of `layout` begin that fill 0 ... size - 1 together.

    Raises:
        InvalidInput: the layout has an offset twice, or its modes interleave.
    """
    layout = given(layout)
    found, current = [], 1
    for stride, shape in sorted((stride, shape) for shape, stride in layout.flat if shape > 1):
        if stride == 0 or stride % current:
            raise InvalidInput(f"complement: {layout} has offsets twice, or modes that interleave")
        found.append((stride // current, current))
        current = shape * stride
    return coalesce(joined([*found, (-(-size // current), current)]))


def logical_divide(layout: Layout | str, tile: Layout | str) -> Layout:
    """(tile, rest): the elements of a tile, and the tiles."""
    layout, tile = given(layout), given(tile)
    rest = complement(tile, layout.size)
    parts = [composition(layout, one) for one in (tile, rest)]
    return Layout(tuple(one.shape for one in parts), tuple(one.stride for one in parts))


def logical_product(layout: Layout | str, copies: Layout | str) -> Layout:
    """(layout, copies): as many copies of a layout as `copies` has coordinates, in its order."""
    layout, copies = given(layout), given(copies)
    rest = composition(complement(layout, layout.size * copies.cosize), copies)
    return Layout((layout.shape, rest.shape), (layout.stride, rest.stride))
