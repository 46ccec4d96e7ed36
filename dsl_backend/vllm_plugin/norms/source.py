# SPDX-License-Identifier: Apache-2.0
"""Follows a norm's result by reading source code: to a module of the same layer, and there to one projection.

    hidden_states, residual = self.norm(hidden_states, residual)
    hidden_states = self.attention(positions, hidden_states)      # of the layer
    qkv, _ = self.qkv_proj(hidden_states)                         # of the attention

A projection that is all that reads the result may get it in 8 bits. The code is parsed, not run.
"""

import ast
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from dsl_backend.vllm_plugin.fused_mlp.forward_source import Function, loads, methods, parsed, stored


class Given(NamedTuple):
    """What a module of a layer is called with.

    Attributes:
        module: the name of the layer's attribute.
        argument: of the norm's result: its place, or its name.
    """

    module: str
    argument: int | str


@cache
def given_to(kind: type, norm: str) -> Given | str:
    """The one module that a layer of a class gives a norm's result to; or why there is none.

    Args:
        norm: the name of the layer's attribute.
    """
    functions = methods(kind)
    if functions is None:
        return f"the source of {kind.__name__} cannot be read"
    reason = f"{kind.__name__} does not just hand {norm}'s result to one module"
    forward = next((one for one in functions if one.name == "forward"), None)
    if forward is None or any(attributes(one, norm) for one in functions if one is not forward):
        return reason
    for place, first in enumerate(forward.body[:-1]):
        name = made(first, norm)
        if name is None:
            continue
        second, rest = forward.body[place + 1], forward.body[place + 2 :]
        found = taken(second, name)
        read_later = stored(second) != name and is_read(rest, name)
        all_calls = len(attributes(first, norm)) == len(attributes(forward, norm))
        return reason if found is None or read_later or not all_calls else found
    return reason


@cache
def taken_by(kind: type, argument: int | str) -> str:
    """The name of the projection that alone reads an argument of a module's `forward`; empty where there is none."""
    function: Any = inspect.getattr_static(kind, "forward", None)
    try:
        forward = parsed(inspect.unwrap(function))
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(forward, Function):
        return ""
    names = [one.arg for one in (*forward.args.posonlyargs, *forward.args.args, *forward.args.kwonlyargs)][1:]
    name = argument if isinstance(argument, str) else names[argument] if argument < len(names) else ""
    if name not in names:
        return ""
    for place, statement in enumerate(forward.body):
        if not loads(statement, name):
            continue
        found = taken(statement, name)
        read_later = stored(statement) != name and is_read(forward.body[place + 1 :], name)
        return "" if found is None or found.argument != 0 or read_later else found.module
    return ""


def is_read(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether statements read a variable before one of them stores another value in it."""
    for one in statements:
        if loads(one, name):
            return True
        if stored(one) == name:
            return False
    return False


def attributes(node: ast.AST, name: str) -> list[ast.Attribute]:
    """Where `self.name` stands."""
    return [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr == name and is_own(one)]


def is_own(node: ast.expr) -> bool:
    """Whether a node is `self.something`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def made(statement: ast.stmt, norm: str) -> str | None:
    """The variable that a statement stores the norm's result in, in both of its branches where it has two."""
    if isinstance(statement, ast.If):
        if not (statement.body and statement.orelse):
            return None
        names = {made(branch[-1], norm) for branch in (statement.body, statement.orelse)}
        ends = [branch[-1] for branch in (statement.body, statement.orelse)]
        only = sum(len(attributes(one, norm)) for one in ends) == len(attributes(statement, norm))
        return names.pop() if len(names) == 1 and only else None
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    calls = is_own(statement.value.func) and statement.value.func in attributes(statement, norm)
    return stored(statement) if calls and len(attributes(statement, norm)) == 1 else None


def taken(statement: ast.stmt, name: str) -> Given | None:
    """What a statement calls with a variable, if it reads the variable nowhere else; None otherwise."""
    if not isinstance(statement, ast.Assign) or len(loads(statement, name)) != 1:
        return None
    call = statement.value
    if isinstance(call, ast.Subscript):
        call = call.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not is_own(call.func):
        return None
    for place, argument in enumerate(call.args):
        if isinstance(argument, ast.Name) and argument.id == name:
            return Given(call.func.attr, place)
    for keyword in call.keywords:
        if keyword.arg is not None and isinstance(keyword.value, ast.Name) and keyword.value.id == name:
            return Given(call.func.attr, keyword.arg)
    return None
