# SPDX-License-Identifier: Apache-2.0
"""The operator families, for those who want something of all of them: the command line and the plugin.

A family that has CuTe DSL kernels has a module `precompile`. When that is imported, it registers which kernels a model
needs (`runtime.precompile.register_family`). Its `served_by_others` says why other kernels serve a part of a model.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from dsl_backend.errors import by_reason

if TYPE_CHECKING:
    from dsl_backend.runtime.model import ModelShape
    from dsl_backend.runtime.target import Target

FAMILIES = ("attention", "linear", "sampling", "softmax")


def load_all() -> None:
    """Import the `precompile` of every family that has one."""
    for family in FAMILIES:
        package = f"dsl_backend.{family}"
        if importlib.util.find_spec(package) is None:
            continue
        if importlib.util.find_spec(f"{package}.precompile") is not None:
            importlib.import_module(f"{package}.precompile")


def served_by_others(family: str, model: "ModelShape", target: "Target") -> list[str]:
    """Why CuTe DSL's kernels of a family do not serve all of a model: `what: reason`, each reason once."""
    if family not in FAMILIES:
        return []
    found = importlib.import_module(f"dsl_backend.{family}.precompile").served_by_others(model, target)
    return [f"{'; '.join(parts)}: {reason}" for reason, parts in by_reason(found).items()]
