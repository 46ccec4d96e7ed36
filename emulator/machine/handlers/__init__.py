# SPDX-License-Identifier: Apache-2.0
"""The instructions that the interpreter hands to the machine, by family.

A family is a module here that calls `executes` on its functions; importing it is all that it takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from emulator.machine.handlers.registry import HANDLERS

if TYPE_CHECKING:
    from emulator.machine.runner import Handler
    from emulator.ptx.ir import Instr

FAMILIES = (
    "memory",
    "atomics",
    "barriers",
    "control",
    "copies",
    "cp_async",
    "cluster_control",
    "matrix",
    "wgmma",
    "tensor",
    "tensor_mma",
)


def handler_of(instr: "Instr") -> "Handler | None":
    """What executes an instruction; None where nothing does."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return HANDLERS.get(instr.op.form.id)
