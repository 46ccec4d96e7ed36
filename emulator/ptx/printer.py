# SPDX-License-Identifier: Apache-2.0
"""A module as PTX again: for messages, for mutants, and to show that nothing is lost (`parse(show(m)) == m`).

Scopes are gone: names are unique in their function.
"""

from collections.abc import Iterator
from dataclasses import replace

from emulator.ptx.ir import (
    BITS,
    Address,
    Function,
    Imm,
    Instr,
    Label,
    Loc,
    Module,
    Names,
    Not,
    Operand,
    Pair,
    Reg,
    Registers,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vec,
)


def show(module: Module) -> str:
    """The module as text."""
    strings: dict[str, str] = {}
    parts = [
        f".version {module.version[0]}.{module.version[1]}",
        f".target {', '.join(module.target)}",
        f".address_size {module.address_size}",
        *(f'.file {index} "{name}"' for index, name in module.files.items()),
        *(f"{_variable(variable)};" for variable in module.variables),
        *(line for function in module.functions for line in _function(function, strings)),
    ]
    if strings:
        parts.append(".section .debug_str {")
        for name, label in strings.items():
            data = ", ".join(str(byte) for byte in (*name.encode(), 0))
            parts.append(f"{label}: .b8 {data}")
        parts.append("}")
    return "\n".join(parts) + "\n"


def show_instr(instr: Instr) -> str:
    """One instruction, without its place."""
    guard = "" if instr.guard is None else f"@{'!' * instr.guard.negated}{instr.guard.reg.name} "
    operands = ", ".join(show_operand(operand) for operand in instr.args if operand is not None)
    return f"{guard}{instr.op.text} {operands}".rstrip() + ";"


def show_operand(operand: Operand) -> str:
    """An operand as it is written."""
    match operand:
        case Reg() | Label():
            return operand.name
        case Imm(value, "int"):
            return str(value)
        case Imm(value, kind):
            return f"0f{value:08X}" if kind == "f32" else f"0d{value:016X}"
        case Special(name, component):
            return name if component is None else f"{name}.{component}"
        case Symbol(name, offset):
            return name if not offset else f"{name}+{offset}"
        case Address():
            return f"[{_inside(operand)}]"
        case TensorAddress(at, coordinates):
            return f"[{_inside(at)}, {{{', '.join(map(show_operand, coordinates))}}}]"
        case Sink():
            return "_"
        case Not(reg):
            return f"!{reg.name}"
        case Pair(first, second):
            return f"{show_operand(first)}|{show_operand(second)}"
        case Vec(items):
            return f"{{{', '.join(map(show_operand, items))}}}"
        case Names(items):
            return f"({', '.join(map(show_operand, items))})"


def _inside(address: Address) -> str:
    if address.base is None:
        return str(address.offset)
    base = show_operand(address.base)
    return base if not address.offset else f"{base}+{address.offset}"


def _variable(variable: Variable) -> str:
    """A declaration, without what ends it."""
    kind, _, vector = variable.type.partition(".")
    linkage = f".{variable.linkage} " if variable.linkage else ""
    shape = "".join(f"[{dim or ''}]" for dim in variable.dims)
    words = f".{variable.space} .align {variable.align} {f'.{vector} ' if vector else ''}.{kind}"
    return f"{linkage}{words} {variable.name}{shape}{_initial(variable, kind)}"


def _initial(variable: Variable, kind: str) -> str:
    if not variable.initial:
        return ""
    size = BITS[kind] // 8
    symbols = {offset: (symbol, generic) for offset, symbol, generic in variable.relocations}
    values = []
    for offset in range(0, len(variable.initial), size):
        if offset in symbols:
            symbol, generic = symbols[offset]
            values.append(f"generic({show_operand(symbol)})" if generic else show_operand(symbol))
        elif kind in ("f32", "f64"):
            bits = int.from_bytes(variable.initial[offset : offset + size], "little")
            values.append(show_operand(Imm(bits, "f32" if kind == "f32" else "f64")))
        else:
            values.append(str(int.from_bytes(variable.initial[offset : offset + size], "little")))
    return f" = {{{', '.join(values)}}}" if variable.dims else f" = {values[0]}"


def _function(function: Function, strings: dict[str, str]) -> Iterator[str]:
    linkage = f".{function.linkage} " if function.linkage else ""
    returns = f" ({', '.join(map(_variable, function.returns))})" if function.returns else ""
    params = ",\n  ".join(map(_variable, function.params))
    yield f"{linkage}{'.entry' if function.entry else '.func'}{returns} {function.name}({params})"
    for name, numbers in function.directives.items():
        yield f".{name} {', '.join(map(str, numbers))}".rstrip()
    if function.code is None:
        yield ";"
        return
    yield "{"
    yield from (_registers(declared) for declared in function.registers)
    yield from (f"{_variable(variable)};" for variable in function.variables)
    yield from (f"{name}: .branchtargets {', '.join(targets)};" for name, targets in function.tables.items())
    labels: dict[int, list[str]] = {}
    for name, at in function.labels.items():
        labels.setdefault(at, []).append(name)
    loc: Loc | None = None
    for at, instr in enumerate(function.code):
        yield from (f"{name}:" for name in labels.get(at, ()))
        if instr.loc != loc and instr.loc is not None:
            yield from _loc(instr.loc, strings)
        loc = instr.loc
        yield f"\t{show_instr(instr)}"
    yield from (f"{name}:" for name in labels.get(len(function.code), ()))
    yield "}"


def _registers(declared: Registers) -> str:
    return f".reg .{declared.type} {declared.prefix}{'' if declared.count is None else f'<{declared.count}>'};"


def _loc(loc: Loc, strings: dict[str, str]) -> Iterator[str]:
    """`.loc`, behind those of the places where it was inlined: a reader looks them up by what came last."""
    text = f".loc {loc.file} {loc.line} {loc.column}"
    if loc.inlined_at is not None:
        yield from _loc(loc.inlined_at, strings)
        at = loc.inlined_at
    if loc.function is not None:
        label = strings.setdefault(loc.function, f"$L__info_string{len(strings)}")
        text += f", function_name {label}"
    if loc.inlined_at is not None:
        text += f", inlined_at {at.file} {at.line} {at.column}"
    yield text


def without_instr(function: Function, at: int) -> Function:
    """The function with one instruction less; labels behind it move up."""
    if function.code is None:
        raise ValueError(f"{function.name} is only declared")
    labels = {name: where - (where > at) for name, where in function.labels.items()}
    return replace(function, code=function.code[:at] + function.code[at + 1 :], labels=labels)
