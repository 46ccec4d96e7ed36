# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import pathlib
import sys

from .command import main, operators
from .engine import command as engine


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure operators against their peers.")
    parser.add_argument("op", nargs="*", metavar="OP", help=f"of {', '.join(sorted(operators()))}")
    parser.add_argument("--json", type=pathlib.Path, dest="json_path", help="write one JSON object a line")
    parser.add_argument("--report", type=pathlib.Path, dest="report_path", help="write a page with pictures")
    parser.add_argument(
        "--from", type=pathlib.Path, dest="sources", default=[], action="append", help="picture an earlier run's JSON"
    )
    parser.add_argument("--rows", help="regular expression over ids of rows, in any group (default: the table)")
    parser.add_argument("--peers", help="comma-separated names, all, or none")
    parser.add_argument("--kernels", help="comma-separated names of our kernels, each a column")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: 16)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing for each provider of each row")
    parser.add_argument("--prepare-seconds", type=float, default=240.0, help="until a provider is given up")
    parser.add_argument("--flush", action="store_true", help="overwrite the last-level cache before each replay")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, whose figures say nothing about a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", dest="only_list", help="print rows and providers, run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Engines are no operator: their cases, options and report are others.
    if sys.argv[1:2] == ["engine"]:
        sys.exit(engine.main(sys.argv[2:]))
    chosen = vars(parse())
    sys.exit(main(chosen.pop("op"), chosen.pop("json_path"), **chosen))
