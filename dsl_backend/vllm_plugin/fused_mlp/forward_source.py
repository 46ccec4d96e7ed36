# SPDX-License-Identifier: Apache-2.0
"""Checks by reading source code that a module passes its projection's result to its activation and to nothing else.

The code is parsed, not run.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from torch import nn

# vLLM's function that calls an activation, or a fused one that quantises for the next layer: (activation, x, layer).
CALLS_ACTIVATION = "maybe_fused_act_quant"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def objection(kind: type, linear: str, activation: str) -> str | None:
    """Why a module's projection and activation cannot be fused; None where they can.

    Args:
        kind: the module's class.
        linear, activation: names of its attributes.
    """
    functions = methods(kind)
    if functions is None:
        return f"the source of {kind.__name__} cannot be read"
    if adjacent(functions, linear, activation):
        return None
    return f"{kind.__name__} does not just hand {linear}'s result to {activation}"


def methods(kind: type) -> list[Function] | None:
    """The parsed methods of a class, inherited ones too, without __init__; None where a source cannot be read."""
    found: dict[str, object] = {}
    for owner in kind.__mro__:
        if owner not in (nn.Module, object):
            for name, value in vars(owner).items():
                found.setdefault(name, value)
    try:
        trees = [
            ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]
            for name, value in found.items()
            if inspect.isfunction(value) and name != "__init__"
        ]
    except (OSError, TypeError, SyntaxError):
        return None
    return [tree for tree in trees if isinstance(tree, Function)]


def adjacent(functions: Sequence[Function], linear: str, activation: str) -> bool:
    """Whether the methods use each attribute once, and the activation on exactly the projection's result."""
    uses = [(function, node) for function in functions for node in ast.walk(function) if attribute(node, function)]
    named = [[use for use in uses if attribute(use[1], use[0]) == name] for name in (linear, activation)]
    if [len(one) for one in named] != [1, 1]:
        return False
    ((function, projection),), ((other, _),) = named
    if function is not other:
        return False
    given = argument(function, activation)
    if given is None:
        return False
    if returned_by(given, projection):
        return True
    return isinstance(given, ast.Name) and any(
        passed_on(function, first, second, projection, given)
        for block in blocks(function)
        for first, second in pairwise(block)
    )


def attribute(node: ast.AST | None, function: Function) -> str | None:
    """The name in `self.name`; None of anything else."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or not function.args.args:
        return None
    return node.attr if node.value.id == function.args.args[0].arg else None


def argument(function: Function, activation: str) -> ast.expr | None:
    """The one argument that the activation is called with; None where it is not called, or with more arguments."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or node.keywords:
            continue
        if attribute(node.func, function) == activation:
            return node.args[0] if len(node.args) == 1 else None
        if isinstance(node.func, ast.Name) and node.func.id == CALLS_ACTIVATION:
            return node.args[1] if len(node.args) == 3 and attribute(node.args[0], function) == activation else None
    return None


def returned_by(node: ast.expr, projection: ast.AST) -> bool:
    """Whether a node is a call of the projection, or its first result: some projections return a bias too."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
        node = node.value
    return isinstance(node, ast.Call) and node.func is projection


def blocks(function: Function) -> Iterator[list[ast.stmt]]:
    """Each sequence of statements. Loops are left out: there an earlier statement may run after a later one."""
    waiting: list[ast.AST] = [function]
    while waiting:
        node = waiting.pop()
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                yield inner
                waiting += [one for one in inner if not isinstance(one, (ast.For, ast.While, ast.AsyncFor))]


def passed_on(function: Function, first: ast.stmt, second: ast.stmt, projection: ast.AST, given: ast.Name) -> bool:
    """Whether `first` stores the projection's result in a variable that only `second` reads, and only as `given`."""
    name = given.id
    if not (isinstance(first, ast.Assign) and len(first.targets) == 1 and returned_by(first.value, projection)):
        return False
    if not isinstance(second, (ast.Assign, ast.AnnAssign, ast.Return)) or stored(first) != name:
        return False
    if loads(second, name) != [given]:
        return False
    if stored(second) == name:
        return True
    return all(node is given or node.lineno <= (first.end_lineno or 0) for node in loads(function, name))


def stored(statement: ast.stmt) -> str | None:
    """The variable that an assignment stores its value, or its first value, in."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def loads(node: ast.AST, name: str) -> list[ast.Name]:
    """The nodes that read a variable."""
    return [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Store)
    ]
