# SPDX-License-Identifier: Apache-2.0
"""Checks by reading source code that a module passes one layer's result to the next one and to nothing else.

The code is parsed, not run. The layers are a projection and its activation, or the activation and the projection behind
it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

# vLLM's function that calls an activation, or a fused one that also quantises for the next layer, and its parameters.
# It asks the layer what inputs it takes; of an activation that was replaced it knows no fused one, and calls it.
CALLS_ACTIVATION = "maybe_fused_act_quant"
ACTIVATION, X, LAYER = PARAMETERS = ("act_fn", "x", "linear")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def objection(kind: type, first: str, second: str) -> str | None:
    """Why two layers of a module cannot be fused; None where they can.

    Args:
        kind: the module's class.
        first, second: names of its attributes.
    """
    functions = methods(kind)
    if functions is None:
        return f"the source of {kind.__name__} cannot be read"
    if adjacent(functions, first, second):
        return None
    return f"{kind.__name__} does not just hand {first}'s result to {second}"


def methods(kind: type) -> list[Function] | None:
    """The parsed methods of a class, inherited ones too, without __init__; None where a source cannot be read."""
    found: dict[str, object] = {}
    for owner in kind.__mro__:
        if owner not in (nn.Module, object):
            for name, value in vars(owner).items():
                found.setdefault(name, value)
    try:
        trees = [
            parsed(inspect.unwrap(value))
            for name, value in found.items()
            if inspect.isfunction(value) and name != "__init__"
        ]
    except (OSError, TypeError, SyntaxError):
        return None
    return [tree for tree in trees if isinstance(tree, Function)]


def parsed(function: Any) -> ast.stmt:
    """A function's definition, in which vLLM's function has its own name, however it was imported."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return OwnName(function.__globals__).visit(tree).body[0]


class OwnName(ast.NodeTransformer):
    """Writes the name of vLLM's function where another name of it, or a module before it, stands.

    Args:
        known: the global variables of the code.
    """

    def __init__(self, known: Mapping[str, object]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.of(node, self.known.get(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        owner = self.known.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return self.of(node, getattr(owner, node.attr, None) if inspect.ismodule(owner) else None)

    def of(self, node: ast.expr, value: object) -> ast.AST:
        if not inspect.isfunction(value) or value.__name__ != CALLS_ACTIVATION:
            return node
        return ast.copy_location(ast.Name(CALLS_ACTIVATION, ast.Load()), node)


def adjacent(functions: Sequence[Function], first: str, second: str) -> bool:
    """Whether the methods use each attribute once, and the second on exactly the first one's result.

    That a layer is named to vLLM's function beside the activation is no use of it.
    """
    named: list[list[tuple[Function, ast.AST]]] = [[], []]
    for function in functions:
        consulted = [call[LAYER] for call in calls_of_activation(function)]
        for node in ast.walk(function):
            for uses, name in zip(named, (first, second), strict=True):
                if attribute(node, function) == name and node not in consulted:
                    uses.append((function, node))
    if [len(uses) for uses in named] != [1, 1]:
        return False
    ((function, producer),), ((other, consumer),) = named
    if function is not other:
        return False
    given = argument(function, consumer)
    if given is None:
        return False
    if returned_by(given, producer):
        return True
    return isinstance(given, ast.Name) and any(
        passed_on(function, statement, following, producer, given)
        for block in blocks(function)
        for statement, following in pairwise(block)
    )


def attribute(node: ast.AST | None, function: Function) -> str | None:
    """The name in `self.name`; None of anything else."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or not function.args.args:
        return None
    return node.attr if node.value.id == function.args.args[0].arg else None


def call_of_activation(node: ast.AST) -> dict[str, ast.expr] | None:
    """The arguments by name of a call of vLLM's function; None of anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != CALLS_ACTIVATION:
        return None
    given = dict(zip(PARAMETERS, node.args, strict=False)) | {word.arg or "": word.value for word in node.keywords}
    complete = len(node.args) + len(node.keywords) == len(PARAMETERS) and set(given) == set(PARAMETERS)
    return given if complete else None


def calls_of_activation(function: Function) -> list[dict[str, ast.expr]]:
    return [call for node in ast.walk(function) if (call := call_of_activation(node)) is not None]


def argument(function: Function, layer: ast.AST) -> ast.expr | None:
    """The one argument that a layer is called with; None where it is not called, or with more arguments."""
    for call in calls_of_activation(function):
        if call[ACTIVATION] is layer:
            return call[X]
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.func is layer:
            return node.args[0] if len(node.args) == 1 and not node.keywords else None
    return None


def returned_by(node: ast.expr, layer: ast.AST) -> bool:
    """Whether a node is a call of a layer, or its first result: some projections return a bias too."""
    if (call := call_of_activation(node)) is not None:
        return call[ACTIVATION] is layer
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
        node = node.value
    return isinstance(node, ast.Call) and node.func is layer


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


def passed_on(function: Function, first: ast.stmt, second: ast.stmt, layer: ast.AST, given: ast.Name) -> bool:
    """Whether `first` stores a layer's result in a variable that only `second` reads, and only as `given`."""
    name = given.id
    if not (isinstance(first, ast.Assign) and len(first.targets) == 1 and returned_by(first.value, layer)):
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
