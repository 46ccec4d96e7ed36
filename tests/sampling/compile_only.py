# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton sampler for a GPU that is not present.

    python -m tests.sampling.compile_only sm_90 [ID ...]

Prints one line of JSON for each compiled kernel, and for each case that does not compile. It runs in its own process,
as tests/attention/compile_only.py does.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.sampling.plan import SamplingPlan
from dsl_backend.sampling.spec import LogprobsMode, Parameters, SamplingSpec
from tests.attention.compile_only import Compiled
from tests.gpu_stand_in import gpu

ROWS = 2
# Case -> (parameters that are given, fields of the spec).
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "none": ((), {"dtype": torch.float32}),
    "temperature": (("temperature",), {"dtype": torch.bfloat16}),
    "top-k": (("temperature", "top_k"), {"dtype": torch.float32}),
    "top-p": (("temperature", "top_p"), {"dtype": torch.float16}),
    "min-p": (("temperature", "min_p"), {"dtype": torch.float32}),
    "all": (
        ("temperature", "top_k", "top_p", "min_p"),
        {
            "dtype": torch.float32,
            "token_dtype": torch.int32,
            "logprobs": True,
            "logprobs_mode": LogprobsMode.PROCESSED_LOGPROBS,
            "num_logprobs": 5,
        },
    ),
    "raw-logprobs": ((), {"dtype": torch.bfloat16, "logprobs_mode": LogprobsMode.RAW_LOGPROBS, "num_logprobs": 5}),
    "small": (("temperature", "top_k", "top_p"), {"dtype": torch.float32, "vocab": 300}),
}


def case(name: str, target: Target) -> Iterator[Compiled]:
    """Compile every kernel that a case launches."""
    given, facts = CASES[name]
    spec = SamplingSpec(**{"vocab": 128256, **facts})
    plan = SamplingPlan(spec, target, ROWS, torch.device("cpu"), "triton")
    values = {key: torch.ones(ROWS, dtype=torch.int32 if key == "top_k" else torch.float32) for key in given}
    ids = torch.zeros(ROWS, dtype=torch.int64)
    with gpu(target) as stand_in:
        logits = torch.empty(ROWS, spec.vocab, dtype=spec.dtype)
        plan.kernel.launch(logits, Parameters(seeds=ids, positions=ids, **values), plan.results)
    for kernel, compiled, seconds in stand_in.calls:
        yield Compiled(case=name, kernel=kernel, shared=compiled.metadata.shared, seconds=seconds)


def say(compiled: Compiled) -> None:
    sys.stdout.write(json.dumps(asdict(compiled)) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    arch, *names = arguments
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"no case {', '.join(unknown)}: choose from {', '.join(CASES)}")
    for name in names or CASES:
        try:
            for compiled in case(name, from_arch(arch)):
                say(compiled)
        except Exception as error:  # noqa: PERF203 - compilers raise many types of errors, and the other cases still have to run
            say(Compiled(case=name, error=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(sys.argv[1:])
