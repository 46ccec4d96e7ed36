# SPDX-License-Identifier: Apache-2.0
"""Imports point down: adapter, operators, run-time, kernels, primitives.

The sources are read and not run, so that all of them are looked at, whatever is installed.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("attention", "linear", "sampling", "softmax")
KERNELS = ("cute", "triton")


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
        tuple(f"dsl_backend.{family}" for family in FAMILIES),
    ),
    *(
        Rule(
            f"{family}'s kernels know neither who plans nor who calls them",
            tuple(f"dsl_backend/{family}/{kernels}" for kernels in KERNELS),
            tuple(f"dsl_backend.{family}.{module}" for module in ("api", "plan", "dispatch", "reference", "ops"))
            + tuple(f"dsl_backend.{other}" for other in FAMILIES if other != family),
        )
        for family in FAMILIES
    ),
    Rule(
        "an operator family knows no other",
        ("dsl_backend/attention",),
        ("dsl_backend.linear", "dsl_backend.sampling", "dsl_backend.softmax"),
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


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions included and relative ones resolved.

    Imports that only a type checker runs are left out: they need nothing at run time.

    Args:
        package: the package that the source is in, for relative imports.
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
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
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
    "dsl_backend/runtime/target.py": (
        "from dsl_backend.attention.spec import AttentionSpec",
        "the run-time knows no operator",
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
        "linear's kernels know neither who plans nor who calls them",
        "sampling's kernels know neither who plans nor who calls them",
        "softmax's kernels know neither who plans nor who calls them",
        "an operator family knows no other",
    } == {rule.why for rule in RULES}
