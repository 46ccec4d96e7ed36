# SPDX-License-Identifier: Apache-2.0
"""PTX as text becomes a typed module: `parse(text)`; what is not in the tables of forms is refused, all at once."""

from emulator.ptx.errors import PtxError, Refusal, Refused
from emulator.ptx.flow import BLOCKING, GATHERING, Block, Graph, graph
from emulator.ptx.grammar import Form, Op, Role
from emulator.ptx.ir import Function, Instr, Module
from emulator.ptx.parser import parse
from emulator.ptx.printer import show, show_instr

__all__ = [
    "BLOCKING",
    "GATHERING",
    "Block",
    "Form",
    "Function",
    "Graph",
    "Instr",
    "Module",
    "Op",
    "PtxError",
    "Refusal",
    "Refused",
    "Role",
    "graph",
    "parse",
    "show",
    "show_instr",
]
