# SPDX-License-Identifier: Apache-2.0
"""No module of the plugin imports itself through others, those imported inside functions included."""

import graphlib
from pathlib import Path

import pytest

import dsl_backend.vllm_plugin
from tests.test_layering import imports

PACKAGE = "dsl_backend.vllm_plugin"
ROOT = Path(dsl_backend.vllm_plugin.__path__[0])


def sources() -> dict[str, str]:
    """Source of each module, by its full name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join((PACKAGE, *(part for part in parts if part != "__init__")))] = path.read_text()
    return found


def imported(texts: dict[str, str]) -> dict[str, set[str]]:
    """The plugin's modules that each of its modules imports. `from package import name` may import a module."""
    return {
        name: {
            max((one for one in texts if module == one or module.startswith(f"{one}.")), key=len, default=PACKAGE)
            for _, module in imports(text, name.rpartition(".")[0])
            if module.startswith(PACKAGE)
        }
        - {PACKAGE, name}
        for name, text in texts.items()
    }


def test_no_import_is_circular() -> None:
    graph = imported(sources())
    assert sum(map(len, graph.values())) > 30
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_a_circle_inside_functions_is_found() -> None:
    texts = {
        f"{PACKAGE}.a": f"def f():\n    from {PACKAGE} import b",
        f"{PACKAGE}.b": f"def f():\n    from {PACKAGE}.a import f",
    }
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter(imported(texts)).static_order())
