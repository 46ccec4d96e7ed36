# SPDX-License-Identifier: Apache-2.0
"""Compares the emulator's results with a chip's, by the rules of `micro_case`."""

from dataclasses import dataclass

import numpy as np
from micro_case import Array, Bits, Case, Close, Result
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TINY = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126}
LARGEST = {"f16": 2.0**16, "bf16": 2.0**128, "f32": 2.0**128}
SPACING = {"f16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 2.0**-133), "f32": (2.0**-23, 2.0**-149)}


@dataclass(frozen=True)
class Comparison:
    """Of one result.

    Attributes:
        wrong: elements that the rule does not allow.
        unequal: elements whose bits differ.
        worst: the largest difference, as a part of what the rule allows; of Bits, zero or infinity.
        example: the first wrong element in words.
    """

    label: str
    wrong: int
    unequal: int
    count: int
    worst: float
    example: str = ""

    def __str__(self) -> str:
        told = f": {self.example}" if self.example else ""
        counts = f"{self.wrong} of {self.count} wrong, {self.unequal} not the same bits"
        return f"{self.label}: {counts}, {self.worst:.3g} of what is allowed{told}"


def decode(raw: NDArray[np.uint8], kind: str) -> Floats:
    """Values of a stretch of elements."""
    with np.errstate(invalid="ignore"):  # a NaN that signals
        if kind == "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return raw.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(np.float64)


def is_nan(raw: NDArray[np.uint8], kind: str) -> NDArray[np.bool_]:
    return np.isnan(decode(raw, kind.removesuffix("x2")))


def spacing(value: Floats, kind: str) -> Floats:
    """A unit of the last place."""
    relative, least = SPACING[kind]
    with np.errstate(all="ignore"):
        power = np.where(value == 0, 0.0, 2.0 ** np.floor(np.log2(np.abs(value))))
    return np.maximum(np.where(np.isfinite(power), power, 0) * relative, least)


def differences(kind: str, chip: Floats, own: Floats, allowed: Floats, flushes: bool) -> Floats:
    """Each difference as a part of what is allowed."""
    with np.errstate(all="ignore"):
        # Just beyond the largest number is infinity.
        near = [np.where(np.isinf(one), np.copysign(LARGEST[kind], one), one) for one in (chip, own)]
        found = np.abs(near[0] - near[1]) / allowed
        finite = np.isfinite(chip) | np.isfinite(own)
        found = np.where(finite, found, np.where(chip == own, 0.0, np.inf))
        found = np.where(np.isnan(chip) & np.isnan(own), 0.0, np.where(np.isnan(chip) | np.isnan(own), np.inf, found))
        if flushes:
            # The smallest normal number and what rounds to it from below, which is flushed.
            boundary = np.maximum(np.abs(chip), np.abs(own)) <= TINY[kind] * (1 + 2.0**-20)
            found = np.where(boundary & (np.signbit(chip) == np.signbit(own)), 0.0, found)
        return np.where((chip == 0) & (own == 0) & (np.signbit(chip) != np.signbit(own)), np.inf, found)


def compare(
    result: Result, chip: NDArray[np.uint8], own: NDArray[np.uint8], magnitude: NDArray[np.uint8] | None = None
) -> Comparison:
    """Bytes of one result.

    Args:
        magnitude: the result of inputs without signs, for Sum.
    """
    rule = result.rule
    if isinstance(rule, Bits):
        names = rule.nan.removesuffix("x2")
        kind = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}.get(names, f"u{result.content.itemsize}")
        left, right = chip.view(kind), own.view(kind)
        unequal = left != right
        wrong = unequal & ~(is_nan(chip, names) & is_nan(own, names)) if names else unequal
        return told(result, left, right, wrong, unequal, np.where(wrong, np.inf, 0.0))
    width = {"f16": "u2", "bf16": "u2", "f32": "u4"}[rule.format]
    a, b = decode(chip, rule.format), decode(own, rule.format)
    # Of an infinite result no more is allowed than of the largest number.
    size_of_own = np.minimum(np.abs(b), LARGEST[rule.format])
    unit = spacing(size_of_own, rule.format)
    with np.errstate(all="ignore"):
        if isinstance(rule, Close):
            allowed = np.maximum(rule.relative * size_of_own, rule.absolute) + unit
        else:
            assert magnitude is not None
            size = decode(magnitude, rule.format)
            allowed = rule.terms * 2.0**-rule.bits * np.where(np.isfinite(size), size, 0.0) + unit
    parts = differences(rule.format, a, b, allowed, ".ftz" in result.label)
    left, right = chip.view(width), own.view(width)
    return told(result, left, right, parts > 1, left != right, parts)


def told(
    result: Result, chip: Array, own: Array, wrong: NDArray[np.bool_], unequal: NDArray[np.bool_], parts: Floats
) -> Comparison:
    example = ""
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        example = f"element {place}: chip {int(chip[place]):#x}, emulator {int(own[place]):#x}"
    worst = float(parts.max()) if parts.size else 0.0
    return Comparison(result.label, int(wrong.sum()), int(unequal.sum()), wrong.size, worst, example)


def compare_case(
    case: Case, chip: NDArray[np.uint8], own: NDArray[np.uint8], magnitude: NDArray[np.uint8] | None = None
) -> list[Comparison]:
    """All results of a case."""
    found = []
    for result, start in zip(case.results, case.offsets, strict=False):
        part = slice(start, start + result.content.nbytes)
        sized = None if magnitude is None else magnitude[part].copy()
        found.append(compare(result, chip[part].copy(), own[part].copy(), sized))
    return found
