# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' door: one operator, several, all of them, or the comparison of DSLs."""

import pathlib
from collections.abc import Sequence

from rich.console import Console

from . import command, dsls
from .command import DEFAULTS, Options
from .dsls import command as compare


def main(
    op: str | Sequence[str],
    json_path: pathlib.Path | None = None,
    options: Options = DEFAULTS,
    console: Console | None = None,
) -> int:
    """Measures operators and their peers, see `command.main`.

    Args:
        op: as `command.main`; or `dsls`, alone or followed by names of its tables.
    """
    names = [op] if isinstance(op, str) else list(op)
    if names[:1] == [dsls.NAME]:
        return compare.main(names[1:], json_path, options, console or Console())
    return command.main(names, json_path, options, console)
