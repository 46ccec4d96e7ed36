# SPDX-License-Identifier: Apache-2.0
"""Kernels as PTX text are run by a module of the folder handlers/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "handlers"))
