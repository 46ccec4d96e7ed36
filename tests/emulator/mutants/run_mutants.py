# SPDX-License-Identifier: Apache-2.0
"""Judges the mutants of one kernel, or a part of them, and prints the verdicts as lines of JSON.

python tests/emulator/mutants/run_mutants.py KERNEL [--suite MODULE] [--shard NUMBER OF] [--sample COUNT]
"""

import argparse
import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
sys.path[:0] = [str(HERE.parents[2]), str(HERE), str(HERE.parent / "kernels")]

from judge import judge, mutants_of, original  # noqa: E402  after the path
from suite import load  # noqa: E402

DEFAULT = "emulated_suite"


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the mutants of a kernel.")
    parser.add_argument("kernel")
    parser.add_argument("--suite", default=DEFAULT, help="a module with a SUITE")
    parser.add_argument("--shard", nargs=2, type=int, default=(0, 1), metavar=("NUMBER", "OF"))
    parser.add_argument("--sample", type=int, help="so many of the kernel's mutants, drawn by a fixed seed")
    options = parser.parse_args()
    number, of = options.shard
    suite = load(options.suite)
    if options.kernel not in suite.names:
        parser.error(f"no kernel {options.kernel!r}: there are {', '.join(suite.names)}")
    kernel = suite.kernel(options.kernel)
    launch = original(kernel)
    chosen = mutants_of(kernel, launch)
    if options.sample is not None:
        chosen = random.Random(kernel.name).sample(chosen, min(options.sample, len(chosen)))
    for mutant in chosen[number::of]:
        sys.stdout.write(json.dumps(asdict(judge(kernel, launch, mutant))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
