# SPDX-License-Identifier: Apache-2.0
"""Kernels that the emulator's tests share are modules of the folder kernels/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
