# SPDX-License-Identifier: Apache-2.0
"""The operator families, for those who want something of all of them: the command line and the plugin.

A family that has CuTe DSL kernels has a module `units`, which registers what it needs for a model when it is imported
(`runtime.precompile.register_family`).
"""

import importlib
import importlib.util

FAMILIES = ("attention", "linear", "sampling", "softmax")


def load_units() -> None:
    """Import the `units` of every family that has one."""
    for family in FAMILIES:
        package = f"dsl_backend.{family}"
        if importlib.util.find_spec(package) is None:
            continue
        if importlib.util.find_spec(f"{package}.units") is not None:
            importlib.import_module(f"{package}.units")
