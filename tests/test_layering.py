# SPDX-License-Identifier: Apache-2.0
"""Imports point down: adapter, operators, run-time, kernels, primitives; and no files import each other in a circle.

Functions take few parameters, of known types, and no word that the field has another one for is a name or in prose.
The sources are read and not run, so that all of them are looked at, whatever is installed. `python
tests/test_layering.py` prints the structure: the folders, their lines, what each imports, the circles, and parameters.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from dsl_backend.families import NAMES as FAMILIES

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("cute", "triton")
# Of a family: what plans and calls its kernels.
CALLERS = ("api", "eager", "plan", "dispatch", "reference", "ops")


@dataclass(frozen=True)
class Rule:
    """Files below a folder must not import modules of some prefixes.

    Attributes:
        folders: relative to the repository.
        but: folders below them that the rule leaves out.
        allowed: prefixes that are fine although a forbidden one covers them.
    """

    why: str
    folders: tuple[str, ...]
    forbidden: tuple[str, ...]
    but: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    def allows(self, module: str) -> bool:
        return not covered(module, self.forbidden) or covered(module, self.allowed)


RULES = (
    Rule("only the plugin knows vLLM", ("dsl_backend",), ("vllm",), but=("dsl_backend/vllm_plugin",)),
    Rule(
        "nothing below the command line knows the plugin",
        tuple(f"dsl_backend/{name}" for name in (*FAMILIES, "gemm", "quant", "runtime", "primitives", "testing")),
        ("dsl_backend.vllm_plugin", "dsl_backend.cli", "dsl_backend.doctor", "dsl_backend.verify"),
    ),
    Rule(
        "only who verifies needs the tests' problems",
        ("dsl_backend",),
        ("dsl_backend.testing",),
        but=("dsl_backend/testing", "dsl_backend/verify.py"),
    ),
    Rule(
        "primitives are cutlass alone",
        ("dsl_backend/primitives",),
        ("torch", "vllm", "triton", "dsl_backend"),
        allowed=("dsl_backend.primitives",),
    ),
    Rule(
        "the run-time knows no operator",
        ("dsl_backend/runtime",),
        (*(f"dsl_backend.{family}" for family in FAMILIES), "dsl_backend.gemm"),
    ),
    Rule(
        "gemm knows no family",
        ("dsl_backend/gemm",),
        tuple(f"dsl_backend.{family}" for family in FAMILIES),
    ),
    *(
        Rule(
            f"{family}'s kernels know neither who plans nor who calls them",
            tuple(f"dsl_backend/{family}/{kernels}" for kernels in KERNELS),
            tuple(
                f"dsl_backend.{family}.{module}" for module in ("api", "eager", "plan", "dispatch", "reference", "ops")
            )
            + tuple(f"dsl_backend.{other}" for other in FAMILIES if other != family),
        )
        for family in FAMILIES
    ),
    Rule(
        "kernels of quantised layers know neither who plans nor who calls them",
        tuple(f"dsl_backend/linear/scaled/{kernels}" for kernels in KERNELS),
        tuple(f"dsl_backend.linear{room}.{module}" for room in ("", ".scaled") for module in CALLERS)
        + tuple(f"dsl_backend.{other}" for other in FAMILIES if other != "linear"),
    ),
    Rule(
        "an operator family knows no other",
        ("dsl_backend/attention",),
        ("dsl_backend.linear", "dsl_backend.norm", "dsl_backend.sampling", "dsl_backend.softmax"),
    ),
    Rule("the emulator knows no kernel", ("emulator",), ("dsl_backend", "vllm")),
    Rule(
        "the package needs neither its tests nor its benchmarks",
        ("dsl_backend",),
        ("tests", "integration", "benchmarks", "emulator", "loadtests"),
        but=("dsl_backend/cli.py",),
    ),
)


def covered(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def imports(source: str, package: str, *, type_checking: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions included and relative ones resolved.

    Args:
        package: the package that the source is in, for relative imports.
        type_checking: imports that only a type checker runs too, which need nothing at run time.
    """
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from package import module` imports the module; a name that is none covers nothing that base does not.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif not type_checking and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def breaches(rule: Rule, root: Path) -> list[str]:
    """`file:line: module` of every import that the rule forbids."""
    found = []
    for folder in rule.folders:
        for file in sorted((root / folder).rglob("*.py")):
            name = file.relative_to(root)
            if any(name.is_relative_to(left_out) for left_out in rule.but):
                continue
            package = ".".join(name.parent.parts)
            found += [
                f"{name}:{line}: {module}"
                for line, module in imports(file.read_text(), package)
                if not rule.allows(module)
            ]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why)
def test_imports_point_down(rule: Rule) -> None:
    assert breaches(rule, ROOT) == []


WRONG = {
    "dsl_backend/attention/api.py": ("import vllm.config", "only the plugin knows vLLM"),
    "dsl_backend/attention/triton/prefill.py": (
        "def late():\n    from dsl_backend.attention import plan",
        "attention's kernels know neither who plans nor who calls them",
    ),
    "dsl_backend/attention/cute/sm90/decode.py": (
        "from ...dispatch import choose",
        "attention's kernels know neither who plans nor who calls them",
    ),
    "dsl_backend/primitives/copy.py": ("import torch", "primitives are cutlass alone"),
    "dsl_backend/linear/scaled/triton/gemm.py": (
        "from dsl_backend.linear.scaled import plan, eager",
        "kernels of quantised layers know neither who plans nor who calls them",
    ),
    "dsl_backend/runtime/target.py": (
        "from dsl_backend.attention.spec import AttentionSpec",
        "the run-time knows no operator",
    ),
    "dsl_backend/gemm/configs.py": (
        "from dsl_backend.linear.spec import LinearSpec",
        "gemm knows no family",
    ),
    "dsl_backend/testing/inputs.py": (
        "from dsl_backend.vllm_plugin.registration import register",
        "nothing below the command line knows the plugin",
    ),
    "emulator/ptx.py": ("from dsl_backend.runtime import target", "the emulator knows no kernel"),
    "dsl_backend/linear/api.py": (
        "from dsl_backend.testing import numerics",
        "only who verifies needs the tests' problems",
    ),
    "dsl_backend/doctor.py": (
        "import benchmarks.case",
        "the package needs neither its tests nor its benchmarks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_breach_is_found(tmp_path: Path, name: str) -> None:
    source, why = WRONG[name]
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert [rule.why for rule in RULES if breaches(rule, tmp_path)] == [why]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("dsl_backend/vllm_plugin/dense.py", "import vllm"),
        (
            "dsl_backend/attention/triton/prefill.py",
            "from dsl_backend.attention.configs import PrefillConfig\nimport triton",
        ),
        ("dsl_backend/attention/api.py", "import vllm_of_another_name"),
        (
            "dsl_backend/attention/triton/launch.py",
            "if TYPE_CHECKING:\n    from dsl_backend.attention.protocol import Operands",
        ),
        ("dsl_backend/primitives/copy.py", "import cutlass\nfrom dsl_backend.primitives import mma"),
    ],
)
def test_what_is_allowed(tmp_path: Path, name: str, source: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert [breaches(rule, tmp_path) for rule in RULES if breaches(rule, tmp_path)] == []


def test_every_rule_is_seen_to_fail() -> None:
    assert {why for _, why in WRONG.values()} | {
        "experts's kernels know neither who plans nor who calls them",
        "linear's kernels know neither who plans nor who calls them",
        "norm's kernels know neither who plans nor who calls them",
        "sampling's kernels know neither who plans nor who calls them",
        "softmax's kernels know neither who plans nor who calls them",
        "an operator family knows no other",
    } == {rule.why for rule in RULES}


PACKAGES = ("dsl_backend", "emulator", "benchmarks", "loadtests")
# Circles of imports between files that are known, those for type checkers included. One that goes is taken from this
# list; none is added.
CIRCLES: tuple[tuple[str, ...], ...] = (
    # For type checkers alone: handlers, profilers and watchers are given the machine that they work on.
    (
        "emulator.machine.cluster",
        "emulator.machine.handlers",
        "emulator.machine.handlers.registry",
        "emulator.machine.launch",
        "emulator.machine.loads",
        "emulator.machine.profile",
        "emulator.machine.runner",
        "emulator.machine.watch",
    ),
    # For type checkers alone: a summary's text is made from the summary.
    ("emulator.profile.report", "emulator.profile.summary"),
)


def module_of(file: Path) -> str:
    """The name of a file, relative to the repository, as it is imported."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def graph(root: Path) -> dict[str, set[str]]:
    """Module -> the modules of PACKAGES that it imports, inside functions and for type checkers as well."""
    files = [file.relative_to(root) for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    known = {module_of(file): file for file in files}
    found: dict[str, set[str]] = {}
    for module, file in known.items():
        # `from package import module` names both; a package's own file is only meant where no module is.
        source, package = (root / file).read_text(), ".".join(file.parent.parts)
        named = [name for _, name in imports(source, package, type_checking=True)]
        targets = {name if name in known else name.rpartition(".")[0] for name in named}
        found[module] = {name for name in targets if name in known and name != module}
    return found


def circles(edges: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """The groups of modules of which each imports all others of its group, directly or not."""
    reached: dict[str, set[str]] = {}
    for module in edges:
        seen: set[str] = set()
        todo = list(edges[module])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += edges[name]
        reached[module] = seen
    groups = {
        tuple(sorted({module} | {name for name in reached[module] if module in reached[name]}))
        for module in edges
        if module in reached[module]
    }
    return sorted(groups)


def test_one_convention_for_dependent_launches() -> None:
    """Kernels call `primitives/dependent_launch.py`, which says what they may do before they wait."""
    sources = (ROOT / "dsl_backend").rglob("*.py")
    assert [one.name for one in sources if "griddepcontrol_" in one.read_text()] == ["dependent_launch.py"]


def test_circles_are_the_known_ones() -> None:
    assert circles(graph(ROOT)) == sorted(CIRCLES)


def test_a_circle_is_found(tmp_path: Path) -> None:
    """Also where an import is inside a function or for type checkers alone, and through a third file."""
    sources = {
        "api.py": "if TYPE_CHECKING:\n    from dsl_backend.linear import plan",
        "plan.py": "def late():\n    from dsl_backend.linear.ops import run",
        "ops.py": "import dsl_backend.linear.api",
        "spec.py": "from dsl_backend.linear import plan",
        "__init__.py": "",
    }
    folder = tmp_path / "dsl_backend" / "linear"
    folder.mkdir(parents=True)
    for name, source in sources.items():
        (folder / name).write_text(source)
    assert circles(graph(tmp_path)) == [("dsl_backend.linear.api", "dsl_backend.linear.ops", "dsl_backend.linear.plan")]
    (folder / "plan.py").write_text("")
    graph.cache_clear()
    assert circles(graph(tmp_path)) == []


MOST_PARAMETERS = 12
# The share of parameters of SM100's attention that have a type.
TYPED_SHARE = 0.95
SM100 = "dsl_backend/attention/cute/sm100"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> list[ast.arg]:
    """Of a function, with `*args` and `**kwargs` as one each; not the object or class that a method is called on."""
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [one for one in found if one is not None and one.arg not in ("self", "cls")]


def functions(folder: Path) -> Iterator[tuple[str, list[ast.arg]]]:
    """(file:line: name, parameters) of all functions below a folder."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, Function):
                yield f"{file.relative_to(folder)}:{node.lineno}: {node.name}", parameters(node)


def long_signatures(folder: Path) -> list[str]:
    """Functions with more parameters than a reader keeps apart, Triton's and CuTe DSL's kernels among them."""
    return [f"{place} has {len(given)}" for place, given in functions(folder) if len(given) > MOST_PARAMETERS]


def typed_share(folder: Path) -> float:
    given = [one for _, many in functions(folder) for one in many]
    return sum(one.annotation is not None for one in given) / len(given)


@pytest.mark.parametrize("folder", [*PACKAGES, "tools", "tests", "integration"])
def test_functions_take_few_parameters(folder: str) -> None:
    assert long_signatures(ROOT / folder) == []


def test_parameters_of_attention_have_types() -> None:
    assert typed_share(ROOT / SM100) >= TYPED_SHARE


def test_a_long_signature_is_found(tmp_path: Path) -> None:
    names = ", ".join(f"p{number}" for number in range(9))
    (tmp_path / "many.py").write_text(f"def many({names}, *r, a: int, b, **o): ...\ndef few(self, {names}, *r): ...")
    assert long_signatures(tmp_path) == ["many.py:1: many has 13"]
    assert typed_share(tmp_path) == 1 / 23


# Words of this project's first months, for each of which the field has its own (row_max, rescale_threshold, work tile).
OLD_WORDS = re.compile(
    r"\b(weigh|weighing|guess|ledger|patience|slack|tops|shrink|Corrector|Weigher|Widener|KeyShares|OwnShares|"
    r"ClaimedTiles|bend)\b"
)


def test_old_words_are_gone() -> None:
    files = sorted((ROOT / "dsl_backend").rglob("*.py"))
    assert len(files) > 100
    assert [
        f"{file.relative_to(ROOT)}: {found}" for file in files if (found := OLD_WORDS.findall(file.read_text()))
    ] == []


def room_of(module: str) -> str:
    """The folder of a module that the structure shows: two levels of a package, three of attention's kernels."""
    parts = module.split(".")
    is_file = not (ROOT / Path(*parts)).is_dir()
    return "/".join(parts[: -1 if is_file else None][:4])


def structure() -> str:
    """A line for each folder: its files, its lines, and the folders that it imports."""
    edges = graph(ROOT)
    rooms: dict[str, set[str]] = {}
    sizes: dict[str, list[int]] = {}
    for module, targets in edges.items():
        room = room_of(module)
        rooms.setdefault(room, set()).update(room_of(name) for name in targets)
        path = ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        sizes.setdefault(room, []).append(len(file.read_text().splitlines()))
    lines = []
    for room in sorted(rooms):
        below = ", ".join(name.removeprefix("dsl_backend/") for name in sorted(rooms[room] - {room})) or "nothing"
        lines.append(f"{room:38}{len(sizes[room]):4} files{sum(sizes[room]):7} lines  imports {below}")
    lines += [f"circle: {', '.join(group)}" for group in circles(edges)] or ["no circles of imports between files"]
    lines += [f"more than {MOST_PARAMETERS} parameters: {one}" for one in long_signatures(ROOT / "dsl_backend")]
    lines += [f"parameters with a type, attention/cute/sm100: {typed_share(ROOT / SM100):.1%}"]
    return "\n".join(lines)


def test_the_structure_names_every_folder() -> None:
    shown = structure()
    for folder in ("dsl_backend/attention/cute/sm90", "dsl_backend/runtime", "dsl_backend/gemm", "emulator/machine"):
        assert f"\n{folder} " in shown


if __name__ == "__main__":
    print(structure())  # noqa: T201
