# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for every architecture, without its GPU, and need no more than it has.

What is compiled and why stands in compile_only.py; every change is checked with the part that CI
names here, which has each architecture and each feature once.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from dsl_backend.runtime.target import Target, from_arch
from tests.attention.compile_only import ARCHS, ATTENTION, ROPES, WRITES, Compiled

IDS = [case.id for case in (*ATTENTION, *WRITES, *ROPES)]
# Of each architecture the kernels that most layers need, and what is tightest or most particular there.
EVERYWHERE = ("dense-128", "mla-16", "write-fp8")
CI = {
    "sm_75": ("dense-512-step", "mla-128-fp8", "fp8-step", "nvfp4-step", "invariant-mla"),
    "sm_80": ("softcap-sinks", "fp8-queries", "mla-16-fp8", "mla-320", "invariant-128", "rope-norm-fp8"),
    "sm_89": ("mla-128", "mla-drafts-fp8", "per-request", "nvfp4-step", "rope-mla-fp8"),
    "sm_90a": (
        "dense-80",
        "nvfp4",
        "write-nvfp4",
        "mla-prefill",
        "mla-128",
        "mla-128-fp8",
        "write",
        "invariant-80",
        "rope-norm-fp8",
        "rope-mla",
    ),
    "sm_100a": ("dense-256", "nvfp4-outputs", "dense-512", "mla-128", "fp8-256", "invariant-256-fp8"),
    "sm_120a": ("dense-512", "window", "alibi", "mla-drafts", "write-mla", "invariant-512", "rope"),
}
LIMIT_S = 900
# CUDA keeps this for itself, of every program's share; the table of targets has one program's limit without it.
RESERVED_BYTES = 1024
TENSOR_COLUMNS = 512
# A row's elements and scales come several bytes at a time. Loads of single bytes are not pipelined either: with them,
# decoding from an NVFP4 cache took 24 times as long as from one of 16 bits (H200).
MOST_BYTE_LOADS = 8


def compile_for(arch: str, ids: list[str], environment: dict[str, str]) -> list[Compiled]:
    command = [sys.executable, "-m", "tests.attention.compile_only", arch, *ids]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def complaints(found: list[Compiled], ids: list[str], target: Target) -> list[str]:
    """A sentence for everything that a GPU of the target, or who chose the tiles for it, would stumble over."""
    said = [f"{case}: nothing was compiled" for case in ids if case not in {one.case for one in found}]
    for one in found:
        name = f"{one.case}: {one.kernel}"
        if one.error:
            said.append(f"{one.case}: {one.error}")
            continue
        reserved = RESERVED_BYTES * (one.programs - 1) if target.native_bf16 else 0
        if one.shared * one.programs + reserved > target.smem_bytes:
            said.append(f"{name}: {one.programs} of {one.shared} B shared memory do not fit {target.smem_bytes}")
        if one.tensor_columns * one.programs > TENSOR_COLUMNS:
            said.append(f"{name}: {one.programs} of {one.tensor_columns} columns of tensor memory do not fit")
        if one.byte_loads > MOST_BYTE_LOADS:
            said.append(f"{name}: {one.byte_loads} loads of single bytes")
        if one.predicted is not None and one.predicted < one.shared:
            said.append(f"{name}: needs {one.shared} B shared memory, its configuration says {one.predicted}")
    return said


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_and_fit(arch: str, server_environment: dict[str, str]) -> None:
    ids = [*EVERYWHERE, *CI[arch]]
    assert complaints(compile_for(arch, ids, server_environment), ids, from_arch(arch)) == []


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("part", range(3))
def test_all_kernels_compile_and_fit(arch: str, part: int, server_environment: dict[str, str]) -> None:
    ids = IDS[part::3]
    assert complaints(compile_for(arch, ids, server_environment), ids, from_arch(arch)) == []


def test_every_feature_is_compiled_at_every_change() -> None:
    """But for those that a larger case beside them includes."""
    included = {"dense-64", "dense-64-step", "dense-96-step", "dense-128-step", "dense-256-step", "fp8", "fp8-80"}
    chosen = set(EVERYWHERE).union(*CI.values())
    assert chosen | included == set(IDS)
    assert not chosen & included
    assert set(CI) == set(ARCHS)


FINE = Compiled(case="a", kernel="k", shared=1000, predicted=1000)


@pytest.mark.parametrize(
    ("one", "complaint"),
    [
        pytest.param(FINE, "", id="all is well"),
        pytest.param(replace(FINE, predicted=2000), "", id="more was expected"),
        pytest.param(replace(FINE, predicted=None), "", id="nothing was expected"),
        pytest.param(replace(FINE, predicted=999), "its configuration says 999", id="less was expected"),
        pytest.param(replace(FINE, error="no"), "a: no", id="does not compile"),
        pytest.param(replace(FINE, case="b"), "a: nothing was compiled", id="left out"),
        pytest.param(replace(FINE, shared=101376, predicted=None), "", id="just fits"),
        pytest.param(replace(FINE, shared=101377, predicted=None), "do not fit 101376", id="too large"),
        pytest.param(replace(FINE, shared=50176, predicted=None, programs=2), "", id="two just fit"),
        pytest.param(replace(FINE, shared=50177, predicted=None, programs=2), "2 of 50177 B", id="two are too large"),
        pytest.param(replace(FINE, byte_loads=8), "", id="a few bytes"),
        pytest.param(replace(FINE, byte_loads=9), "9 loads of single bytes", id="bytes one at a time"),
        pytest.param(replace(FINE, tensor_columns=512), "", id="tensor memory just fits"),
        pytest.param(
            replace(FINE, tensor_columns=512, programs=2), "2 of 512 columns", id="tensor memory is too small"
        ),
    ],
)
def test_what_is_complained_of(one: Compiled, complaint: str) -> None:
    said = complaints([one], ["a"], from_arch("sm_120"))
    assert len(said) == bool(complaint)
    assert complaint in "".join(said)


def test_turing_reserves_nothing() -> None:
    two = replace(FINE, shared=32 * 1024, predicted=None, programs=2)
    assert complaints([two], ["a"], from_arch("sm_75")) == []


def test_a_case_that_does_not_exist_is_refused(server_environment: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="no case dense-0: choose from dense-64"):
        compile_for("sm_90", ["dense-0"], server_environment)
