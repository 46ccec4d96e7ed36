# SPDX-License-Identifier: Apache-2.0
"""Times that the emulator's clock predicted, for `dsl-backend verify` to print beside a GPU's.

`python -m benchmarks.clock --predict` made them. This module needs no emulator, which the wheel does not have.
"""

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("predictions.jsonl")
KERNEL = "cute"
MARK = "by the clock"
# Operators whose configurations for an architecture were chosen by the clock and never timed (docs/decisions.md).
BLACKWELL = frozenset({"prefill", "mla-decode", "softmax"})
CHOSEN = {"sm_100": BLACKWELL, "sm_103": BLACKWELL}


@dataclass(frozen=True)
class Prediction:
    """What the clock says of a benchmark's row.

    Attributes:
        chip: such as B200.
        operator, row: as `dsl-backend bench` names them.
        us: with the configurations that dispatch chooses.
        mark: MARK where the clock chose the configuration.
    """

    chip: str
    operator: str
    row: str
    us: float
    mark: str = ""

    def line(self) -> str:
        return json.dumps(asdict(self))


def of_chip(operator: str, row: str, us: float, chip: str, arch: str) -> Prediction:
    return Prediction(chip, operator, row, round(us, 1), MARK if operator in CHOSEN.get(arch, ()) else "")


@cache
def everything(file: Path = FILE) -> tuple[Prediction, ...]:
    return tuple(Prediction(**json.loads(line)) for line in file.read_text().splitlines())


def of_device(device: str, file: Path = FILE) -> dict[tuple[str, str], Prediction]:
    """Predictions for a GPU by its name, such as NVIDIA B200, by operator and row; none for a GPU without a clock."""
    words = re.split(r"[^A-Za-z0-9]+", device)
    return {(one.operator, one.row): one for one in everything(file) if one.chip in words}
