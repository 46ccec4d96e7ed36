# SPDX-License-Identifier: Apache-2.0
"""Reads from the source of an MLA layer's `forward` what happens between its projections and its attention.

The common form is: project (queries by way of a normalised latent of their own, or not), split keys in latent and rope
part, normalise the one, rotate the other and the end of each query head, attend, project. It is read as
`forward_source` reads a dense layer's: conditions on the module's own attributes are decided by their values, and
arguments that may be left out count as None.
"""

import ast
from dataclasses import dataclass
from typing import Any

from torch import nn

from dsl_backend.vllm_plugin.rope.forward_source import OTHER, Part, Reading, parsed


@dataclass(frozen=True)
class LatentForm:
    """What an MLA layer's `forward` does.

    Attributes:
        arguments: the names of its positional arguments, without self; `positions` and `hidden` are two of them, and
            the others have to be None.
        keys: the projection whose result has latent and rope part of keys, behind the latent of queries if q_norm is
            not None.
        q_norm: of the latent of queries; None where queries are projected from the hidden states.
        queries: the projection to query heads.
        norm: of the latent part of keys. rotary, attention, output: attributes too.
    """

    arguments: tuple[str, ...]
    positions: str
    hidden: str
    keys: str
    q_norm: str | None
    queries: str
    norm: str
    rotary: str
    attention: str
    output: str


@dataclass(frozen=True)
class Known:
    """A value that the module's attributes decide: a number, None, or the module of that attribute."""

    value: int | None = None
    module: str = ""


def latent_form_of(module: nn.Module, attention: str) -> LatentForm:
    """The form of a module's `forward`. Raises OtherForm: it has another one, or its source cannot be read.

    Args:
        attention: the attribute of its attention.
    """
    return LatentReading(module, parsed(module), attention).latent_form()


class LatentReading(Reading):
    """Follows the statements of an MLA layer's `forward`."""

    def latent_form(self) -> LatentForm:
        if self.block(self.function.body) != Part("projected"):
            raise self.other("it does not return the projected output of its attention")
        fields = ("positions", "hidden", "keys", "queries", "norm", "rotary", "output")
        return LatentForm(
            arguments=self.arguments,
            attention=self.attention,
            q_norm=self.found.get("q_norm"),
            **{name: self.found[name] for name in fields},
        )

    def block(self, statements: list[ast.stmt]) -> Any:
        return super().block([one for one in statements if not isinstance(one, ast.Assert)])

    def assign(self, target: ast.expr, value: Any, statement: ast.stmt) -> None:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            # The ends of query heads, in place.
            if self.value(target) != Part("q end") or value != Part("q end", rotated=True):
                raise self.other("an assignment that is not known", statement)
            value, target = Part("q heads", rotated=True), target.value
        super().assign(target, value, statement)

    def flag(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            if self.value(node.comparators[0]) != Known():
                raise self.other("a comparison that is not known", node)
            value = self.value(node.left)
            optional = isinstance(value, Part) and value.name in self.optional()
            return (optional or value == Known()) == isinstance(node.ops[0], ast.Is)
        if (name := self.attribute(node)) and isinstance(getattr(self.module, name, None), nn.Module):
            return True
        return super().flag(node)

    def optional(self) -> list[str]:
        """Arguments that may be left out."""
        count = len(self.function.args.defaults)
        return [argument.arg for argument in self.function.args.args[-count:]] if count else []

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and node.value is None:
            return Known()
        if name := self.attribute(node):
            value = getattr(self.module, name, None)
            if isinstance(value, nn.Module):
                return Known(module=name)
            if value is None or isinstance(value, int):
                return Known(value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return Known(self.number(node.left) + self.number(node.right))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self.end(node)
        return super().value(node)

    def number(self, node: ast.expr) -> int:
        value = self.value(node)
        if not isinstance(value, Known) or value.value is None:
            raise self.other("a number that is not known", node)
        return value.value

    def end(self, node: ast.Subscript) -> Part:
        """Query heads from their first rotated element on."""
        at = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        if self.value(node.value) == Part("q heads") and len(at) == 2 and isinstance(at[1], ast.Slice):
            whole, (first, end, step) = at[0], (at[1].lower, at[1].upper, at[1].step)
            every = isinstance(whole, ast.Constant) and whole.value is ... and end is None and step is None
            if every and first is not None and self.number(first) == self.size("qk_nope_head_dim"):
                return Part("q end")
        raise self.other("an expression that is not known", node)

    def call(self, node: ast.Call) -> Any:
        called = self.value(node.func) if isinstance(node.func, ast.Name) or self.attribute(node.func) else None
        if not isinstance(called, Known):
            if called is None and isinstance(node.func, ast.Attribute):
                return self.method(node, node.func)
            raise self.other("a call that is not known", node)
        given = tuple(self.value(one) for one in node.args)
        result = None
        if called.module == self.attention:
            result = self.attends(node, given)
        elif not node.keywords:
            result = {1: self.one_argument, 3: self.three_arguments}.get(len(given), self.no_step)(called.module, given)
        if result is None:
            raise self.other("a call that is not known", node)
        return result

    def no_step(self, name: str, given: tuple[Any, ...]) -> Any:
        return None

    def one_argument(self, name: str, given: tuple[Any, ...]) -> Any:
        (value,) = given
        fused = "q_norm" in self.found
        if value == Part("q latent", norm=self.found.get("q_norm")) and fused:
            self.found["queries"] = name
            return Part("q"), OTHER
        if value == Part("q latent"):
            self.found["q_norm"] = name
            return Part("q latent", norm=name)
        if value == Part("latent"):
            self.found["norm"] = name
            return Part("latent", norm=name)
        if value == Part("attended"):
            self.found["output"] = name
            return Part("projected"), OTHER
        if not isinstance(value, Part) or value.name not in self.arguments:
            return None
        if "keys" not in self.found:
            self.found |= {"keys": name, "hidden": value.name}
            return Part("keys of a projection"), OTHER
        if value.name == self.found["hidden"] and "queries" not in self.found and not fused:
            self.found["queries"] = name
            return Part("q"), OTHER
        return None

    def three_arguments(self, name: str, given: tuple[Any, ...]) -> Any:
        if isinstance(given[0], Part) and given[0].name in self.arguments and given[1:] == (
            Part("q end"), Part("rope row"),
        ):  # fmt: skip
            self.found |= {"rotary": name, "positions": given[0].name}
            return Part("q end", rotated=True), Part("rope row", rotated=True)
        return None

    def attends(self, node: ast.Call, given: tuple[Any, ...]) -> Any:
        """Attention to rotated queries and both parts of keys; others are the shape of its output, or None."""
        wanted = (
            Part("q heads", rotated=True),
            Part("latent", norm=self.found.get("norm")),
            Part("rope row", rotated=True),
        )
        shape = f"({self.found.get('hidden')}.shape[0], self.num_heads * self.v_head_dim)"
        for keyword in node.keywords:
            is_shape = keyword.arg == "output_shape" and ast.unparse(keyword.value) == shape
            if not is_shape and self.value(keyword.value) != Known():
                return None
        return Part("attended") if given == wanted and "norm" in self.found else None

    def method(self, node: ast.Call, function: ast.Attribute) -> Any:
        value = self.value(function.value)
        arguments = [ast.unparse(one) for one in (*node.args[1:], *(one.value for one in node.keywords))]
        if function.attr == "split" and arguments == ["-1"] and isinstance(node.args[0], ast.List):
            result = self.split(value, [self.number(one) for one in node.args[0].elts])
        elif function.attr == "unsqueeze" and value == Part("rope") and ast.unparse(node.args[0]) == "1":
            result = Part("rope row")
        elif function.attr == "view" and value == Part("q") and ast.unparse(node.args[0]) == "-1":
            sizes = [self.number(one) for one in node.args[1:]]
            result = Part("q heads") if sizes == [self.size("num_heads"), self.size("qk_head_dim")] else None
        else:
            result = None
        if result is None:
            raise self.other("a call that is not known", node)
        return result

    def split(self, value: Any, sizes: list[int]) -> Any:
        """The parts of a projection's result, of these columns."""
        latent, rope, q_latent = (self.size(name) for name in ("kv_lora_rank", "qk_rope_head_dim", "q_lora_rank"))
        if value == Part("keys of a projection") and sizes == [q_latent, latent + rope]:
            return Part("q latent"), Part("keys")
        whole = Part("keys") if q_latent else Part("keys of a projection")
        return (Part("latent"), Part("rope")) if value == whole and sizes == [latent, rope] else None

    def size(self, name: str) -> int:
        """An attribute of the module; 0 where it has none."""
        return getattr(self.module, name, None) or 0
