# SPDX-License-Identifier: Apache-2.0
"""Reads from the source of an attention module's `forward` what happens between its projection and its attention.

The common form is: project, split, normalise query and key heads (or not), rotate, attend, project. The code is parsed
and not run: its statements are followed with symbols for values. Conditions on the module's own flags are decided by
their values; anything that is not of the form ends the reading with a sentence.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

# Methods of a tensor that keep its elements in their order.
VIEWS = ("view", "view_as", "reshape", "unflatten", "flatten", "contiguous")


class OtherForm(Exception):
    """The code is not of the common form; the message says where."""


@dataclass(frozen=True)
class Form:
    """What a module's `forward` does.

    Attributes:
        arguments: the names of its positional arguments, without self; `positions` and `hidden` are two of them.
        projection, rotary, attention, output: attributes of the module.
        norms: attributes of the norms of query and key heads; None where there are none.
        sizes: columns of queries, keys and values.
    """

    arguments: tuple[str, ...]
    positions: str
    hidden: str
    projection: str
    rotary: str
    attention: str
    output: str
    norms: tuple[str, str] | None
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """The symbol of a value: an argument, or what became of the queries, keys or values."""

    name: str
    norm: str | None = None
    rotated: bool = False


OTHER = Part("other")


def form_of(module: nn.Module, attention: str) -> Form:
    """The form of a module's `forward`. Raises OtherForm: it has another one, or its source cannot be read.

    Args:
        attention: the attribute of its attention.
    """
    return Reading(module, parsed(module), attention).form()


def parsed(module: nn.Module) -> ast.FunctionDef:
    """The `forward` of a module's class. Raises OtherForm: its source cannot be read."""
    kind = type(module)
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        raise OtherForm(f"the source of {kind.__name__} cannot be read") from None
    if not isinstance(function, ast.FunctionDef):
        raise OtherForm(f"{kind.__name__}.forward is no function")
    return function


class Reading:
    """Follows the statements of a `forward`."""

    def __init__(self, module: nn.Module, function: ast.FunctionDef, attention: str) -> None:
        self.module, self.function, self.attention = module, function, attention
        names = [argument.arg for argument in function.args.args]
        self.self_name, self.arguments = names[0], tuple(names[1:])
        self.values: dict[str, Any] = {name: Part(name) for name in self.arguments}
        self.found: dict[str, Any] = {}

    def form(self) -> Form:
        returned = self.block(self.function.body)
        if returned != Part("projected"):
            raise self.other("it does not return the projected output of its attention")
        norms = self.found.get("norms")
        return Form(
            arguments=self.arguments,
            positions=self.found["positions"],
            hidden=self.found["hidden"],
            projection=self.found["projection"],
            rotary=self.found["rotary"],
            attention=self.attention,
            output=self.found["output"],
            norms=norms,
            sizes=self.found["sizes"],
        )

    def other(self, why: str, node: ast.AST | None = None) -> OtherForm:
        where = "" if node is None else f" ({ast.unparse(node).splitlines()[0]})"
        return OtherForm(f"{type(self.module).__name__} is not of the common form: {why}{where}")

    def block(self, statements: list[ast.stmt]) -> Any:
        """What a block returns; None where it goes on."""
        for statement in statements:
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self.value(statement.value)
            if isinstance(statement, ast.If):
                returned = self.block(statement.body if self.flag(statement.test) else statement.orelse)
                if returned is not None:
                    return returned
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self.assign(statement.targets[0], self.value(statement.value), statement)
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                raise self.other("a statement that is not known", statement)
        return None

    def assign(self, target: ast.expr, value: Any, statement: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            self.values[target.id] = value
            return
        if not (isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(target.elts) == len(value)):
            raise self.other("an assignment that is not known", statement)
        for name, one in zip(target.elts, value, strict=True):
            self.assign(name, one, statement)

    def flag(self, node: ast.expr) -> bool:
        """A condition on the module's own flags."""
        if isinstance(node, ast.BoolOp):
            values = [self.flag(one) for one in node.values]
            return any(values) if isinstance(node.op, ast.Or) else all(values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.flag(node.operand)
        value = getattr(self.module, name, None) if (name := self.attribute(node)) else self
        if value is None or isinstance(value, (bool, int)):
            return bool(value)
        raise self.other("a condition on other things than its own flags", node)

    def attribute(self, node: ast.expr) -> str | None:
        """The name in `self.name`; None of anything else."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            return node.attr
        return None

    def value(self, node: ast.expr) -> Any:
        """The symbol of an expression."""
        if isinstance(node, ast.Name):
            if node.id not in self.values:
                raise self.other("a name that is not known", node)
            return self.values[node.id]
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
            # One of the results of a projection.
            given, at = self.call(node.value), node.slice
            if isinstance(given, tuple) and isinstance(at, ast.Constant) and at.value == 0:
                return given[0]
        if "shape" in {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}:
            return OTHER  # a number that views are made with
        raise self.other("an expression that is not known", node)

    def call(self, node: ast.Call) -> Any:
        """The symbol of a call: of one of the module's modules, or of a method of a tensor."""
        if not isinstance(node.func, ast.Attribute):
            raise self.other("a call that is not known", node)
        name = self.attribute(node.func)
        if name is None:
            return self.method(node, node.func)
        if node.keywords:
            raise self.other("a call with keywords", node)
        given = tuple(self.value(one) for one in node.args)
        step = {1: self.one_argument, 3: self.three_arguments}.get(len(given))
        result = None if step is None else step(name, given)
        if result is None:
            raise self.other("a call that is not known", node)
        return result

    def one_argument(self, name: str, given: tuple[Any, ...]) -> Any:
        (value,) = given
        if not isinstance(value, Part):
            return None
        if value.name in self.arguments and "projection" not in self.found:
            self.found |= {"projection": name, "hidden": value.name}
            return Part("qkv"), OTHER
        if value in (Part("q"), Part("k")):
            first, second = self.found.get("norms", (None, None))
            self.found["norms"] = (name, second) if value.name == "q" else (first, name)
            return replace(value, norm=name)
        if value == Part("attended"):
            self.found["output"] = name
            return Part("projected"), OTHER
        return None

    def three_arguments(self, name: str, given: tuple[Any, ...]) -> Any:
        q_norm, k_norm = self.found.get("norms", (None, None))
        q, k = Part("q", q_norm), Part("k", k_norm)
        normalised = (q_norm is None) == (k_norm is None)
        turned = replace(q, rotated=True), replace(k, rotated=True)
        if name == self.attention:
            return Part("attended") if given == (*turned, Part("v")) else None
        if normalised and given[1:] == (q, k) and isinstance(given[0], Part) and given[0].name in self.arguments:
            self.found |= {"rotary": name, "positions": given[0].name}
            return turned
        return None

    def method(self, node: ast.Call, function: ast.Attribute) -> Any:
        value = self.value(function.value)
        if function.attr == "split" and value == Part("qkv") and node.args:
            self.found["sizes"] = self.sizes(node.args[0])
            return Part("q"), Part("k"), Part("v")
        if function.attr in VIEWS and isinstance(value, Part):
            return value
        raise self.other("a call that is not known", node)

    def sizes(self, node: ast.expr) -> tuple[int, ...]:
        """The columns that the projection's result is split into."""
        names = [self.attribute(one) for one in node.elts] if isinstance(node, ast.List) else []
        sizes = [getattr(self.module, name, None) for name in names if name]
        if len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
            raise self.other("queries, keys and values are not split by the module's sizes", node)
        return tuple(size for size in sizes if isinstance(size, int))
