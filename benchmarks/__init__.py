# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of dsl_backend's operators and of the installed peers.

The harness (`case`, `runner`, `timing`, `check`, `report`) is the same for all operators. Each operator family has a
package with its rows, inputs, exact results and providers. All imports are relative, because the wheel contains this
package under another name.
"""

from .command import Options, operators
from .entry import main, run

__all__ = ["Options", "main", "operators", "run"]
