# SPDX-License-Identifier: Apache-2.0
"""Which operands an instruction has, by the roles of its form."""

from collections.abc import Sequence

from emulator.ptx.grammar import Op, Role
from emulator.ptx.ir import (
    Address,
    Imm,
    Label,
    Names,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vec,
)

LENGTHS = {f"{prefix}{n}": n for prefix in "vx" for n in (1, 2, 4, 8, 16, 32, 64, 128)}
ELEMENT = (Reg, Imm, Sink, Symbol, Special)


def bind(ops: Sequence[Op], operands: Sequence[Operand]) -> tuple[Op, tuple[Operand | None, ...]] | str:
    """The first of `ops` that takes these operands, with one for each role; else what none of them can take."""
    why = ""
    for op in ops:
        found = _bind(op, operands)
        if not isinstance(found, str):
            return op, found
        why = why or found
    return why


def _bind(op: Op, operands: Sequence[Operand]) -> tuple[Operand | None, ...] | str:
    """Operands in the order of the roles. An optional one is taken wherever it fits and enough are left."""
    roles = op.form.roles
    needed = [role.when not in ("?",) and (not role.when or role.when in op.mods) for role in roles]
    args: list[Operand | None] = []
    at = 0
    for index, role in enumerate(roles):
        left, still = len(operands) - at, sum(needed[index + 1 :])
        absent = (role.when == "?" and left <= still) or bool(
            role.when and role.when != "?" and role.when not in op.mods
        )
        if absent:
            args.append(None)
            continue
        if not left:
            return f"{op.text} lacks operand {role.name}"
        taken = _fit(op, role, operands[at])
        if isinstance(taken, str):
            if role.when == "?":
                args.append(None)
                continue
            return taken
        args.append(taken)
        at += 1
    if at != len(operands):
        return f"{op.text} has {len(operands)} operands, {len(operands) - at} too many"
    return tuple(args)


def _fit(op: Op, role: Role, operand: Operand) -> Operand | str:
    """The operand in the shape that the role has, or what is wrong with it."""
    kind = op.type_of(role)
    if role.address:
        wanted = TensorAddress if kind == "tensor" else Address
        return operand if isinstance(operand, wanted) else f"{op.text}: {role.name} is not {_name(wanted)}"
    if kind in ("label", "function", "names"):
        return _fit_name(op, role, operand, kind)
    if kind == "imm":
        return operand if isinstance(operand, Imm) else f"{op.text}: {role.name} is not a constant"
    if role.vector is not None:
        return _fit_vector(op, role, operand)
    return _fit_scalar(op, role, operand, kind)


def _fit_name(op: Op, role: Role, operand: Operand, kind: str) -> Operand | str:
    if kind == "names":
        return operand if isinstance(operand, Names) else f"{op.text}: {role.name} is not a list in parentheses"
    if isinstance(operand, Label):
        return operand
    if kind == "function" and isinstance(operand, Symbol | Reg):
        return operand
    return f"{op.text}: {role.name} is not a {kind}"


def _fit_vector(op: Op, role: Role, operand: Operand) -> Operand | str:
    length = LENGTHS[op.mods[role.vector]] if role.vector and role.vector in op.mods else None
    if role.vector and length is None:
        return _fit_scalar(op, role, operand, op.type_of(role))
    if not isinstance(operand, Vec):
        predicate = isinstance(operand, Reg) and operand.type == "pred"
        parts = op.type_of(role) == "parts"
        if length not in (None, 1) or role.when or parts or predicate or not isinstance(operand, ELEMENT):
            return f"{op.text}: {role.name} is not a vector"
        operand = Vec((operand,))
    if length is not None and len(operand.items) != length:
        return f"{op.text}: {role.name} has {len(operand.items)} elements, not {length}"
    if role.access != "r" and not all(isinstance(item, Reg | Sink) for item in operand.items):
        return f"{op.text}: {role.name} is a destination and has something else than registers"
    return operand


def _fit_scalar(op: Op, role: Role, operand: Operand, kind: str) -> Operand | str:
    if isinstance(operand, Vec) and len(operand.items) == 1:
        operand = operand.items[0]  # as Triton writes it; ptxas takes it too
    if isinstance(operand, Pair):
        return operand if role.pair else f"{op.text}: {role.name} is no pair"
    if role.access != "r":
        allowed = isinstance(operand, Sink) or (
            isinstance(operand, Reg) and (operand.type == "pred") == (kind == "pred")
        )
        return operand if allowed else f"{op.text}: {role.name} is not a destination of type {kind or 'any'}"
    if kind == "pred":
        allowed = isinstance(operand, Not | Imm | Special) or (isinstance(operand, Reg) and operand.type == "pred")
        return operand if allowed else f"{op.text}: {role.name} is not a predicate"
    allowed = isinstance(operand, Imm | Special | Symbol) or (isinstance(operand, Reg) and operand.type != "pred")
    return operand if allowed else f"{op.text}: {role.name} is not a value of type {kind or 'any'}"


def _name(wanted: type) -> str:
    return "[map, {coordinates}]" if wanted is TensorAddress else "an address"
