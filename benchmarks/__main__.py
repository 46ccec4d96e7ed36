# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m benchmarks`."""

import sys

from .campaign import command as campaign
from .engine import command as engine
from .entry import run
from .step import command as step

if __name__ == "__main__":
    # The benchmark of whole engines has its own cases, options and report.
    if sys.argv[1:2] == ["engine"]:
        sys.exit(engine.main(sys.argv[2:]))
    if sys.argv[1:2] == ["step"]:
        sys.exit(step.main(sys.argv[2:]))
    if sys.argv[1:2] == ["campaign"]:
        sys.exit(campaign.main(sys.argv[2:]))
    sys.exit(run(sys.argv[1:]))
