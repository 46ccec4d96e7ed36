# SPDX-License-Identifier: Apache-2.0
"""PTX snippets are a module of the parser's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))
