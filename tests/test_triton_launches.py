# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of every operator launch as on a GPU, compute what they should, and compile before they serve.

What is launched and why stands in triton_launches.py. On sm_90a the emulator runs the compiled kernels, whose results
are checked; for other architectures they are compiled, loaded and launched.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.gpu_stand_in import COMPILER
from tests.triton_launches import CASES, ENGINES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="Triton needs gcc or clang")

LIMIT_S = 900
# One of each kernel.
QUICK = (
    *("dense", "batch-invariant", "write-fp8", "linear-plain", "scaled-linear", "experts-mapped"),
    "activated-rows",
    *("norm", "softmax", "logprobs", "drafts", "drafts-logits", "drafts-filtered"),
)
KERNELS = {
    *("prefill_kernel", "split_kv_kernel", "combine_kernel", "batch_invariant_kernel", "write_kv_kernel"),
    *(
        "gemm_kernel",
        "scaled_gemm_kernel",
        "quantize_rows_kernel",
        "activated_kernel",
        "count_kernel",
        "place_kernel",
        "product_kernel",
        "rms_norm_kernel",
        "softmax_kernel",
        "sample_row",
        "rank_row",
        "max_of_row_blocks",
        "count_digits",
        "sum_of_row_blocks",
        "sum_digits",
        "write_logprobs",
        "sum_of_blocks",
        "filter_rows",
        "accept_drafts",
        "rest_of_blocks",
    ),
}


def told(mode: str, arch: str, names: tuple[str, ...], environment: dict[str, str]) -> list[dict[str, object]]:
    """The lines of tests.triton_launches, one for each case."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_launches", mode, arch, *names]
    # A machine's own GPU is not asked.
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == list(names)
    return lines


def check_run(arch: str, names: tuple[str, ...], environment: dict[str, str]) -> set[str]:
    lines = told("run", arch, names, environment)
    assert [f"{line['case']}: {line['error']}" for line in lines if line["error"]] == []
    return {str(kernel) for line in lines for kernel in line["kernels"]}  # type: ignore[attr-defined]


def test_each_kernel_runs(server_environment: dict[str, str]) -> None:
    assert check_run("sm_90a", QUICK, server_environment) == KERNELS


def test_programs_that_read_each_others_sums_are_ordered(server_environment: dict[str, str]) -> None:
    """The emulator sees it if the last program of a request does not acquire what the others stored."""
    (line,) = told("run", "sm_90a", ("drafts-unordered",), server_environment)
    assert "data race" in str(line["error"])


@pytest.mark.rest
def test_other_cases_run(server_environment: dict[str, str]) -> None:
    check_run("sm_90a", tuple(name for name in CASES if name not in QUICK), server_environment)


@pytest.mark.rest
@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_each_kernel_launches(arch: str, server_environment: dict[str, str]) -> None:
    assert check_run(arch, QUICK, server_environment) == KERNELS


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.rest)])
def test_nothing_is_compiled_while_serving(arch: str, server_environment: dict[str, str]) -> None:
    lines = told("serve", arch, tuple(ENGINES), server_environment)
    assert [f"{line['case']}: {line['error']}" for line in lines if line["error"]] == []
    assert {line["case"]: line["later"] for line in lines if line["later"]} == {}
    assert all(line["before"] for line in lines)
