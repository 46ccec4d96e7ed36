# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m benchmarks`."""

import argparse
import pathlib
import sys

from . import campaign
from .command import Options, operators
from .engine import command as engine
from .entry import main


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure operators and their peers.")
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
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page of the KV cache (default: 16)")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of each provider in each row (default: 0.3)")
    parser.add_argument(
        "--prepare-seconds", type=float, default=240.0, help="time limit to plan and compile a provider (default: 240)"
    )
    parser.add_argument("--flush", action="store_true", help="overwrite the last-level cache before each replay")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, whose times say nothing about a GPU")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    parser.add_argument(
        "--held-out", action="store_true", help="rows that nothing is tuned for; what is slower than a peer first"
    )
    parser.add_argument("--commit", help="commit of the code, if it is not in a git checkout")
    parser.add_argument("--limit-seconds", type=float, help="start no row after so many seconds")
    parser.add_argument("--list", action="store_true", dest="only_list", help="print rows and providers, run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # The benchmark of whole engines has its own cases, options and report.
    if sys.argv[1:2] == ["engine"]:
        sys.exit(engine.main(sys.argv[2:]))
    if sys.argv[1:2] == ["campaign"]:
        sys.exit(campaign.main(sys.argv[2:]))
    chosen = vars(parse())
    sys.exit(main(chosen.pop("op"), chosen.pop("json_path"), Options(**chosen)))
