# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the sampler's kernels: no register spills."""

import pytest

pytest.importorskip("cutlass")

from tests.machine_code import found, sampling_subjects

QUICK = ("sm_90a-sampling-bfloat16",)
# Bytes of stack that are known and not yet gone.
KNOWN = {
    f"{arch}-sampling-{dtype}-likeliest": stack
    for arch, float32, short in (("sm_90a", 40, 24), ("sm_100a", 56, 24), ("sm_103a", 56, 24))
    for dtype, stack in (("float32", float32), ("bfloat16", short), ("float16", short))
}
# Of the second launch of top-p alone, which no default has yet.
KNOWN |= {"sm_90a-sampling-float32": 24, "sm_100a-sampling-float32": 8, "sm_103a-sampling-float32": 8}
# Where the passes over a row that find where top-p ends are in the kernel.
KNOWN |= {
    f"{arch}-sampling-{dtype}-kept": stack
    for arch in ("sm_90a", "sm_100a", "sm_103a")
    for dtype, stack in (("float32", 40), ("bfloat16", 40), ("float16", 16))
}
IDS = [subject.id for subject in sampling_subjects()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.full,)) for n in IDS])
def test_registers_suffice(name: str) -> None:
    for code in found(name):
        assert code.registers > 0
        assert code.stack <= KNOWN.get(name, 0), f"{code.stack} bytes of stack: {code}"
