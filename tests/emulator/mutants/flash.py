# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's forward as a kernel whose mutants are judged, with keys for its pipelines to go round twice.

A process that imports it believes that it has a GPU of one arch (benchmarks/clock/stand_in.py), so it judges only that.
"""

import sys
from pathlib import Path

THIRDPARTY = Path(__file__).resolve().parent.parent / "thirdparty"
sys.path.insert(0, str(THIRDPARTY))

import torch  # noqa: E402
from cases_flash import Attention, attention  # noqa: E402
from judge import Kernel  # noqa: E402
from peer_budgets import judge  # noqa: E402
from peer_cases import Problem  # noqa: E402
from run_case import PEERS  # noqa: E402

from benchmarks.clock.stand_in import pretend  # noqa: E402

# Keys for two rounds of the buffers; on SM100 one persistent CTA makes the tiles of two heads.
PROBLEMS = {
    "sm_90a": Attention(queries=(128,), keys=(512,), heads=1, kv_heads=1),
    "sm_100a": Attention(queries=(256,), keys=(512,)),
}
SMS = 1
MOST = 2  # mutants of a kind
FLASH = {"FlashAttention-4 sm_90a": "sm_90a", "FlashAttention-4 sm_100a": "sm_100a"}


def installed() -> bool:
    """Whether FlashAttention-4 is there: `make peers`."""
    return (PEERS / ".set-up").is_file()


def flash(name: str) -> Kernel:
    """Make this process have a GPU of the kernel's arch, and build the problem at the first call."""
    arch = FLASH[name]
    pretend(arch, PEERS, SMS)
    problems: list[Problem] = []

    def case() -> bool:
        if not problems:
            torch.manual_seed(0)
            problems.append(attention(arch, PROBLEMS[arch]))
        (problem,) = problems
        outputs = problem.run()
        return all(judge(outputs[one], expected).wrong == 0 for one, expected in problem.expected.items())

    # It has warnings: phases half done at exit, tcgen05.ld without its wait.
    return Kernel(name, arch, case, sms=SMS, strict=False, most=MOST)
