# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.dsls.compile_child OPERATOR ROW PROVIDER DEVICE`: the seconds until a kernel's first result.

Prints one JSON object: `seconds`, or `status` and `message`.
"""

import json
import sys
import time
from typing import Any

import torch

from .. import timing
from ..command import operators
from ..runner import short_message


def first_result(operator: Any, row: str, name: str, device: torch.device) -> float:
    """Seconds from `prepare` until the first launch has ended, on ready inputs."""
    (case,) = (case for case in operator.cases() if case.id == row)
    (provider,) = (one for one in operator.providers([]) if one.name == name)
    inputs = operator.build(case.problem, 1, device, 0)
    timing.synchronize(device)
    start = time.perf_counter()
    provider.prepare(case.problem, inputs).run(0)
    timing.synchronize(device)
    return time.perf_counter() - start


def main(arguments: list[str]) -> dict[str, Any]:
    operator, row, name, device = arguments
    try:
        return {"seconds": first_result(operators()[operator], row, name, torch.device(device))}
    except Exception as error:  # a provider may raise anything
        return {"status": "error", "message": short_message(error)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
