# SPDX-License-Identifier: Apache-2.0
"""The interpreter's library: built on first use, called through ctypes; the layouts that C and Python share."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from emulator import native

SOURCE = Path(__file__).with_name("core.c")
HEADERS = tuple(
    Path(__file__).with_name(f"{name}.h")
    for name in ("rows", "integer", "floats", "convert", "moves", "gather", "undefined")
)
# Contraction would fuse what PTX rounds twice; -fwrapv and no aliasing rules because rows are read as any type.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)

LANES = 32
MAX_FAULTS = 512
INSTR = np.dtype(
    [("code", "u2"), ("flags", "u2"), ("guard", "u4"), ("args", "u4", (8,)), ("extra", "u4", (2,))], align=True
)


class FaultRecord(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("index", "row", "lanes", "kind")]


class State(ctypes.Structure):
    """`Warp` of rows.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("rows", "init", "busy", "counts", "code", "tables", "parameters", "local", "faulted")
        ),
        *((name, ctypes.c_void_p) for name in ("known", "widths", "trace")),
        ("traced", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("parameter_base", "shared_base", "local_base", "executed")),
        *(
            (name, ctypes.c_uint32)
            for name in ("row_count", "code_count", "parameter_bytes", "local_bytes", "window", "born")
        ),
        *((name, ctypes.c_uint32) for name in ("live", "parked", "active", "at", "mask", "fault_count", "any_busy")),
        ("pc", ctypes.c_uint32 * LANES),
        ("faults", FaultRecord * MAX_FAULTS),
    ]


@cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        HostError: it cannot be built here.
    """
    loaded = ctypes.CDLL(str(native.build(SOURCE, FLAGS, HEADERS, ("-lm",))))
    loaded.core_operation.argtypes = [ctypes.c_uint32]
    loaded.core_operation.restype = ctypes.c_char_p
    loaded.core_run.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    loaded.core_run.restype = ctypes.c_int
    loaded.core_advance.argtypes = [ctypes.c_void_p]
    loaded.core_advance.restype = None
    sizes = loaded.core_sizes(0), loaded.core_sizes(1)
    if sizes != (INSTR.itemsize, ctypes.sizeof(State)):
        raise AssertionError(f"core.c and library.py disagree about layouts: {sizes}")
    return loaded


@cache
def operations() -> dict[str, int]:
    """Code by name of an operation of the interpreter."""
    found: dict[str, int] = {}
    while (name := library().core_operation(len(found))) is not None:
        found[name.decode()] = len(found)
    return found
