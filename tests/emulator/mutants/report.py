# SPDX-License-Identifier: Apache-2.0
"""The page of a suite: how the mutants of each kernel and kind were found.

python tests/emulator/mutants/report.py [--suite MODULE] [--jobs 2] [--verdicts FILE ...] > docs/emulator-mutants.md
python tests/emulator/mutants/report.py [--suite MODULE] [--jobs 2] --sample 8

Judges all mutants, or reads verdicts that run_mutants.py printed. A sample of each kernel's mutants is told in one
paragraph, for the top of a page whose tables are older.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from judge import Verdict
from run_mutants import DEFAULT
from suite import Suite, judged, load, reason

BAR = 0.95


def outcome(suite: Suite, verdict: Verdict) -> str:
    if verdict.found == "value":
        return "value"
    if verdict.found is not None:
        return "check"
    if reason(verdict, suite.equivalent):
        return "equivalent"
    return "not seen" if reason(verdict, suite.unseen) else "survived"


OUTCOMES = ("value", "check", "equivalent", "not seen", "survived")


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell or '') for cell in cells)} |"


def lines(suite: Suite, verdicts: list[Verdict]) -> Iterator[str]:
    total = Counter(outcome(suite, one) for one in verdicts)
    found, real = total["value"] + total["check"], len(verdicts) - total["equivalent"]
    yield suite.head
    yield f"{len(verdicts)} mutants, {total['equivalent']} of them equivalent. Of the other {real}, {found} are found:"
    yield f"{100 * found / real:.1f} %; the bar is {100 * BAR:.0f} %.\n"
    kernels, kinds = ([*dict.fromkeys(getattr(one, what) for one in verdicts)] for what in ("kernel", "kind"))
    yield row(["kernel", "mutants", *OUTCOMES])
    yield row(["---"] + ["---:"] * (1 + len(OUTCOMES)))
    for name in kernels:
        of = Counter(outcome(suite, one) for one in verdicts if one.kernel == name)
        yield row([name, of.total(), *(of[one] for one in OUTCOMES)])
    yield "\nBy kind of mistake: found by value (v), by a check (c), equivalent (e), not seen (n), survived (s).\n"
    yield row(["kind", *kernels])
    yield row(["---"] * (1 + len(kernels)))
    counts = Counter((one.kind, one.kernel, outcome(suite, one)) for one in verdicts)
    for kind in sorted(kinds):
        cells = [[(counts[kind, kernel, one], one[0]) for one in OUTCOMES] for kernel in kernels]
        yield row([kind, *(" ".join(f"{count}{letter}" for count, letter in cell if count) for cell in cells)])
    yield ""
    yield "## What found them, by kind of mistake\n"
    by: dict[str, Counter[str]] = defaultdict(Counter)
    for one in verdicts:
        if one.found:
            by[one.kind][one.found.partition(": Unsupported")[0]] += 1
    yield row(["kind", "found by"])
    yield row(["---", "---"])
    for kind, names in sorted(by.items()):
        yield row([kind, ", ".join(f"{name} {count}" for name, count in names.most_common())])
    for title, rows in (("Equivalent", suite.equivalent), ("Mistakes that are not seen", suite.unseen)):
        yield f"\n## {title}\n"
        those = [one for one in verdicts if one.found is None and reason(one, rows)]
        for why in dict.fromkeys(reason(one, rows) for one in those):
            yield f"- {why}:"
            yield from (f"  - {one.kernel}: {one.kind}, {one.what}" for one in those if reason(one, rows) == why)
    left = [one for one in verdicts if outcome(suite, one) == "survived"]
    if left:
        yield "\n## Survivors without an explanation\n"
        yield from (f"- {one}" for one in left)


def sampled(suite: Suite, verdicts: list[Verdict]) -> str:
    """What became of a sample, in one paragraph."""
    total = Counter(outcome(suite, one) for one in verdicts)
    left = [str(one) for one in verdicts if outcome(suite, one) == "survived"]
    found, real = total["value"] + total["check"], len(verdicts) - total["equivalent"]
    return (
        f"{len(verdicts)} mutants, drawn by a fixed seed. Equivalent: {total['equivalent']}. Of the other {real}, "
        f"{found} are found ({total['value']} by value, {total['check']} by a check). "
        f"Known not to be seen: {total['not seen']}. Survivors without an explanation: {'; '.join(left) or 'none'}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge all mutants and print the table of how they were found.")
    parser.add_argument("--suite", default=DEFAULT, help="a module with a SUITE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verdicts", nargs="*", type=Path, help="what run_mutants.py printed, in place of running it")
    parser.add_argument("--sample", type=int, help="judge so many mutants of each kernel, drawn by a fixed seed")
    options = parser.parse_args()
    suite = load(options.suite)
    if options.verdicts:
        texts = [line for path in options.verdicts for line in path.read_text().splitlines()]
        verdicts = [Verdict(**json.loads(line)) for line in texts]
    else:
        with ThreadPoolExecutor(options.jobs) as pool:
            found = pool.map(partial(judged, options.suite, sample=options.sample), suite.names)
            verdicts = [one for those in found for one in those]
    if options.sample is not None:
        sys.stdout.write(sampled(suite, verdicts) + "\n")
        return
    sys.stdout.write("\n".join(lines(suite, verdicts)) + "\n")


if __name__ == "__main__":
    main()
