# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m benchmarks campaign`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..processes import exit_on_sigterm
from . import __doc__ as about
from . import findings
from .execution import Campaign, planned
from .steps import PLANS, Step, chosen


def visible_gpus() -> list[str]:
    """The values of CUDA_VISIBLE_DEVICES that show one GPU each."""
    import torch

    count = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] or [str(index) for index in range(count)]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks campaign", description=about)
    parser.add_argument("--out", type=Path, default=Path("results/campaign"), help="folder of logs and results")
    parser.add_argument("--limit-seconds", type=float, default=3600, help="end after so many seconds (default: 3600)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", help="NAME or NAME=SECONDS, divided by commas, in their order (default: all)")
    which.add_argument("--plan", choices=tuple(PLANS), help="steps that belong together, with their seconds")
    parser.add_argument("--gpus", help="comma-separated values of CUDA_VISIBLE_DEVICES (default: every GPU)")
    parser.add_argument(
        "--list", action="store_true", dest="only_list", help="print the steps and when they would run; run nothing"
    )
    return parser.parse_args(arguments)


def listed(steps: Sequence[Step], gpus: int, limit_s: float) -> str:
    """The steps with when each would start if those before it take all their time; then what would be left out."""
    runs, left = planned(steps, gpus, limit_s)
    lines = [f"{gpus} GPU{'s' if gpus > 1 else ''}, {limit_s:g} s: from, seconds, GPUs, step"]
    lines += [
        f"{one.begin_s:5.0f} {one.seconds:4.0f} {one.step.gpus}  {one.step.name:<20} {one.step.shows}" for one in runs
    ]
    lines += [f"    -    - {step.gpus}  {step.name:<20} {why}" for step, why in left]
    used = sum(one.seconds * one.step.gpus for one in runs)
    return "\n".join([*lines, f"at most {used:.0f} GPU seconds"])


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every step succeeded, 1 if one failed or was left out, 2 if the arguments or the GPU are missing."""
    options: Any = parse(arguments)
    try:
        steps = chosen(PLANS[options.plan] if options.plan else options.steps)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    gpus = visible_gpus() if options.gpus is None else [name for name in options.gpus.split(",") if name]
    if options.only_list:
        print(listed(steps, max(1, len(gpus)), options.limit_seconds))
        return 0
    if not gpus:
        print("there is no CUDA device: the steps measure nothing without one", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    exit_on_sigterm()
    campaign = Campaign(options.out.resolve(), gpus, time.monotonic() + options.limit_seconds)
    campaign.execute(steps)
    (options.out / "summary.txt").write_text(findings.summary(campaign, most=None))
    print(findings.summary(campaign), flush=True)
    return 0 if campaign.complete else 1
