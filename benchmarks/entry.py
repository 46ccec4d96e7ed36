# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' door: one operator, several, all of them, or the comparison of DSLs.

`python -m benchmarks` and `dsl-backend bench` have the same arguments.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console

from . import command, dsls
from .command import DEFAULTS, Options, operators
from .dsls import command as compare
from .held_out import random_rows

PROG = "python -m benchmarks"
Number = TypeVar("Number", int, float)


def run(arguments: Sequence[str], prog: str = PROG) -> int:
    """`main`, with the arguments of a command line."""
    chosen = vars(parse(arguments, prog))
    return main(chosen.pop("op"), chosen.pop("json_path"), Options(**chosen))


def at_least(kind: type[Number], least: Number) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    number.__name__ = kind.__name__  # that argparse names if the text is no number
    return number


def parse(arguments: Sequence[str], prog: str = PROG) -> argparse.Namespace:
    """Raises SystemExit: an argument is not valid, or help was asked for."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure operators and their peers.")
    parser.add_argument(
        "op", nargs="*", metavar="OP", help=f"one or several of {', '.join(sorted(operators()))}; or dsls"
    )
    parser.add_argument("--json", type=pathlib.Path, dest="json_path", help="write one JSON object on each line")
    parser.add_argument("--report", type=pathlib.Path, dest="report_path", help="write an HTML page with charts")
    parser.add_argument(
        "--from",
        type=pathlib.Path,
        dest="sources",
        default=[],
        action="append",
        help="make the page or the held-out rows' summary from the JSON of an earlier run; may be repeated",
    )
    parser.add_argument("--rows", help="regular expression for row ids, in any group (default: the group table)")
    parser.add_argument("--peers", help="comma-separated names, all, or none")
    parser.add_argument(
        "--with", type=pathlib.Path, dest="files", default=[], action="append", help="a file with further providers"
    )
    parser.add_argument("--kernels", help="comma-separated names of this package's kernels, each a column")
    parser.add_argument(
        "--page-size", type=at_least(int, 1), default=16, help="tokens of a page of the KV cache (default: 16)"
    )
    parser.add_argument(
        "--seconds", type=at_least(float, 0), default=0.3, help="timing of each provider in each row (default: 0.3)"
    )
    parser.add_argument(
        "--prepare-seconds",
        type=at_least(float, 0),
        default=240.0,
        help="time limit to plan and compile a provider (default: 240)",
    )
    parser.add_argument("--flush", action="store_true", help="overwrite the last-level cache before each replay")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, whose times say nothing about a GPU")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    parser.add_argument(
        "--held-out", action="store_true", help="rows that nothing is tuned for; what is slower than a peer first"
    )
    parser.add_argument(
        "--held-out-seed",
        type=int,
        default=random_rows.SEED,
        help=f"another seed draws new random rows (default: {random_rows.SEED})",
    )
    parser.add_argument("--commit", help="commit of the code, if it is not in a git checkout")
    parser.add_argument("--limit-seconds", type=at_least(float, 0), help="start no row after so many seconds")
    parser.add_argument("--list", action="store_true", dest="only_list", help="print rows and providers, run nothing")
    return parser.parse_args(arguments)


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
