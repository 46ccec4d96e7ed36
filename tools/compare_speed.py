# SPDX-License-Identifier: Apache-2.0
"""Time two checkouts beside each other: whether a change costs a kernel or the host anything.

    python tools/compare_speed.py OLD NEW     twelve rows of decode, prefill, MLA, linear and softmax, on a GPU
    python tools/compare_speed.py OLD NEW --tolerance 0.01 -- --seconds 1

OLD and NEW are folders with a checkout each. Their benches run in turn, each in a process of its own, with our kernels
alone. For each row the table has the smallest median of all rounds, of the kernel by replay of a CUDA graph and of the
host for a launch without a graph, and the ratio of new to old. The exit status is 1 if a kernel's ratio is above 1 +
the tolerance, if a row is in one checkout only, or if one failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Operator and the regular expression of its rows: one of each kind of kernel that a step launches.
ROWS: Mapping[str, str] = {
    "decode": "^hd128-h32x8-b(1|8|64)-k8k$",
    "prefill": "^hd128-h32x8-(4x4k|1x16k)$",
    "mla-decode": "^h(16|128)-b(1-k8k|64-k4k)-q1$",
    "linear": "^llama-8b-(1|64)$",
    "softmax": "^32768x4096$",
}


@dataclass(frozen=True)
class Time:
    """Microseconds of one row: of the kernel, and of the host that launches it."""

    kernel: float
    host: float

    def least(self, other: "Time") -> "Time":
        return Time(min(self.kernel, other.kernel), min(self.host, other.host))


# A row's operator and id.
Times = dict[tuple[str, str], Time]


def measure(checkout: Path, rows: Mapping[str, str], options: Sequence[str]) -> Times:
    """Times of one process, which compiles the kernels of all rows together.

    Raises:
        SystemExit: a bench failed, or wrote no row.
    """
    patterns = "|".join(f"(?:{pattern})" for pattern in dict.fromkeys(rows.values()))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "dsl_backend.cli", "bench", *rows, "--rows", patterns, "--peers", "none"]
        path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [*command, "--json", str(file), *options],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{checkout}: bench {' '.join(rows)} failed with status {done.returncode}\n{done.stdout}")
        found = times_of(file.read_text())
    chosen = {row: time for row, time in found.items() if re.search(rows[row[0]], row[1])}
    if not chosen:
        raise SystemExit(f"{checkout}: no row of {', '.join(rows)} was timed")
    return chosen


def times_of(text: str) -> Times:
    """Times in what `bench --json` wrote, of rows whose first cell, ours, has one."""
    found: Times = {}
    for row in map(json.loads, text.splitlines()):
        if row["kind"] == "row" and row["cells"] and row["cells"][0]["status"] == "ok":
            cell = row["cells"][0]
            found[row["operator"], row["id"]] = Time(cell["median_us"], cell["launch_us"])
    return found


def in_turn(old: Path, new: Path, rows: Mapping[str, str], options: Sequence[str], rounds: int) -> tuple[Times, Times]:
    """The smallest times of each checkout, with the order of the two changed from round to round."""
    best: tuple[Times, Times] = ({}, {})
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            for row, time in measure((old, new)[index], rows, options).items():
                best[index][row] = time.least(best[index].get(row, time))
    return best


def table(old: Times, new: Times) -> list[str]:
    """One line a row that both have, the slowest against its old time first."""
    lines = ["| operator | row | old us | new us | new / old | host us, old | new | new / old |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    both = sorted(old.keys() & new.keys(), key=lambda row: -new[row].kernel / old[row].kernel)
    for row in both:
        a, b = old[row], new[row]
        lines.append(
            f"| {row[0]} | {row[1]} | {a.kernel:.2f} | {b.kernel:.2f} | {b.kernel / a.kernel:.3f} "
            f"| {a.host:.1f} | {b.host:.1f} | {b.host / a.host:.2f} |"
        )
    return lines


def problems(old: Times, new: Times, tolerance: float) -> list[str]:
    """What is against the new checkout, a line each."""
    found = [f"{operator} {row}: in one checkout only" for operator, row in sorted(old.keys() ^ new.keys())]
    for row in sorted(old.keys() & new.keys()):
        ratio = new[row].kernel / old[row].kernel
        if ratio > 1 + tolerance:
            found.append(f"{row[0]} {row[1]}: {ratio:.3f} times the old time, more than {1 + tolerance:g}")
    return found


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--`, and behind it."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="of each checkout; default 3")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of a kernel's time; default 0.01")
    parser.add_argument("--rows", nargs=2, action="append", metavar=("OPERATOR", "REGEX"), help="instead of the twelve")
    parser.epilog = "Behind --: options of `dsl-backend bench`."
    own, options = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(own)
    for checkout in (given.old, given.new):
        if not (checkout / "dsl_backend" / "cli.py").is_file():
            parser.error(f"{checkout} has no dsl_backend/cli.py: name a checkout's folder")
    if given.rounds < 1 or given.tolerance < 0:
        parser.error(f"--rounds {given.rounds} must be at least 1, --tolerance {given.tolerance:g} at least 0")
    rows = dict(given.rows) if given.rows else ROWS
    old, new = in_turn(given.old.resolve(), given.new.resolve(), rows, options, given.rounds)
    print("\n".join(table(old, new)))
    against = problems(old, new, given.tolerance)
    print("\n".join(against) if against else f"{len(new)} rows: none is slower by more than {given.tolerance:.1%}")
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
