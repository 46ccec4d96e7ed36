# SPDX-License-Identifier: Apache-2.0
"""The Triton sampler compiles for every architecture, without its GPU, and needs no more than it has.

What is compiled stands in compile_only.py; every change is checked with the part named here.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from dsl_backend.runtime.target import from_arch
from tests.attention.compile_only import ARCHS, Compiled
from tests.sampling.compile_only import CASES

# The one with everything in it where code is most particular, elsewhere what most requests need.
CI = {
    "sm_75": ("all",),
    "sm_80": ("temperature",),
    "sm_89": ("small",),
    "sm_90a": ("all",),
    "sm_100a": ("top-p",),
    "sm_120a": ("all",),
}
LIMIT_S = 900


def compile_for(arch: str, ids: list[str], environment: dict[str, str]) -> list[Compiled]:
    command = [sys.executable, "-m", "tests.sampling.compile_only", arch, *ids]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def complaints(found: list[Compiled], ids: list[str], smem_bytes: int) -> list[str]:
    said = [f"{case}: nothing was compiled" for case in ids if case not in {one.case for one in found}]
    said += [f"{one.case}: {one.error}" for one in found if one.error]
    said += [f"{one.case}: {one.shared} B do not fit {smem_bytes}" for one in found if one.shared > smem_bytes]
    return said


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_and_fit(arch: str, server_environment: dict[str, str]) -> None:
    ids = list(CI[arch])
    found = compile_for(arch, ids, server_environment)
    assert complaints(found, ids, from_arch(arch).smem_bytes) == []
    assert ("rank_row" in {one.kernel for one in found}) == ("all" in ids)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
def test_all_kernels_compile_and_fit(arch: str, server_environment: dict[str, str]) -> None:
    ids = list(CASES)
    assert complaints(compile_for(arch, ids, server_environment), ids, from_arch(arch).smem_bytes) == []


def test_every_architecture_is_compiled_for() -> None:
    assert set(CI) == set(ARCHS)


def test_what_is_complained_of() -> None:
    fine = Compiled(case="a", kernel="k", shared=1000)
    assert complaints([fine], ["a"], 1000) == []
    assert complaints([fine], ["a", "b"], 999) == ["b: nothing was compiled", "a: 1000 B do not fit 999"]
    assert complaints([Compiled(case="a", error="no")], ["a"], 0) == ["a: no"]


def test_a_case_that_does_not_exist_is_refused(server_environment: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="no case both: choose from none"):
        compile_for("sm_90", ["both"], server_environment)
