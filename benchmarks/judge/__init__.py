# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend judge`: runs an unknown kernel in a process of its own, checks it, and times it.

The judge's process (`command`, `verdict`) makes inputs, owns all tensors, compares results and has the clock. The
candidate's process (`child`) sees the same memory (`shared`) and is asked to launch. What it answers is never believed:
a launch is right if the output's bytes are right when the answer arrives.
"""

from .command import Options, main
from .registry import OPERATORS

__all__ = ["OPERATORS", "Options", "main"]
