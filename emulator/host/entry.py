# SPDX-License-Identifier: Apache-2.0
"""The little that a launch needs of a PTX text before anybody parses it: parameters of an entry, static shared memory.

Source: PTX ISA, "Kernel Function Parameters" and ".shared".
"""

import math
import re
from dataclasses import dataclass

from emulator.errors import Unsupported

SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "f16x2": 4, "pred": 1}
SIZES |= {f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (32, 64)} | {"f32": 4, "f64": 8, "b128": 16}

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
DECLARATION = re.compile(
    r"^\.param\s+(?:\.align\s+(?P<before>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?(?P<name>[\w$%]+)\s*(?:\[(?P<count>\d+)\])?$"
)
SHARED = re.compile(
    r"(?P<extern>\.extern\s+)?(?<![\w.])\.shared\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"[\w$%]+\s*(?P<counts>(?:\[\d+\])*)"
)
TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.M)


@dataclass(frozen=True)
class Declared:
    """One `.param` of an entry; `align` and `size` in bytes."""

    name: str
    size: int
    align: int


def entries(ptx: str) -> dict[str, tuple[Declared, ...]]:
    """The parameters of every entry of a module."""
    text = COMMENT.sub(" ", ptx)
    return {found[1]: parameters(found[2] or "") for found in ENTRY.finditer(text)}


def parameters(text: str) -> tuple[Declared, ...]:
    return tuple(parameter(" ".join(part.split())) for part in text.split(",") if part.strip())


def parameter(text: str) -> Declared:
    found = DECLARATION.match(text)
    if not found or found["type"] not in SIZES:
        raise Unsupported(f"cannot read the kernel parameter {text!r}")
    size = SIZES[found["type"]]
    return Declared(found["name"], size * int(found["count"] or 1), int(found["before"] or size))


def static_shared_bytes(ptx: str) -> int:
    """Bytes of shared memory that a module's variables take, in the order of their declarations."""
    total = 0
    for found in SHARED.finditer(COMMENT.sub(" ", ptx)):
        if not found["extern"]:
            align = int(found["align"] or SIZES[found["type"]])
            count = math.prod(int(side) for side in re.findall(r"\d+", found["counts"]))
            total = -(-total // align) * align + count * SIZES[found["type"]]
    return total


def target(ptx: str) -> str:
    """The architecture that a module is for, such as sm_90a."""
    found = TARGET.search(ptx)
    if not found:
        raise Unsupported("a PTX text without a .target line")
    return found[1]
