# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of dsl_backend's operators, side by side with the peers that are installed.

The harness (`case`, `runner`, `timing`, `check`, `report`) knows no operator; a package for each operator family holds
its rows, inputs, exact results and providers. Imports are relative, since a wheel carries this package under another
name.
"""

from .command import main, operators

__all__ = ["main", "operators"]
