# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the attention kernels: no register spills, and SM90's products are left in flight.

Both cost a multiple, and no result shows them: prefill ran at two thirds of its speed until products were in flight.
"""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from tests import machine_code
from tests.machine_code import Code, attention_subjects, found

# What a change is checked with; a kernel takes some ten seconds.
QUICK = (
    *(f"{arch}-hd128-{kind}" for arch in ("sm_90a", "sm_100a") for kind in ("prefill", "decode")),
    *(f"{arch}-mla16-decode" for arch in ("sm_90a", "sm_100a")),
    "sm_90a-hd128-extend",
    "sm_90a-mla16-invariant-decode",
    *(f"{arch}-hd128-fp8-e4m3" for arch in ("sm_90a", "sm_100a")),
    "sm_90a-hd128-fp8-e4m3-longest",
    "sm_100a-hd128-fp8-queries-e4m3",
    *(f"{arch}-mla16-fp8-e4m3" for arch in ("sm_90a", "sm_100a")),
    "sm_100a-hd128-launched",
    "sm_100a-hd128-few",
    "sm_100a-hd256-prefill",
)
# Bytes of stack of a kernel that may be: the combine kernel has code for tasks of two widths, and spills four words of
# the split range before a task.
ALLOWED_STACK = {
    # Stored and loaded once for a work tile.
    ("sm_90a-mla16-fp8-e4m3", 0): 8,
    ("sm_90a-mla16-invariant-decode", 1): 16,
    **{(f"{arch}-hd192x128-fp8-packed-e4m3-many", 0): 8 for arch in ("sm_100a", "sm_103a")},
    # Of the warps that transpose V: a word for a work tile, and one that they load for each stage.
    ("sm_90a-hd64-fp8-window-softcap-sinks-e4m3", 0): 8,
}
IDS = [subject.id for subject in attention_subjects()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.full,)) for n in IDS])
def test_registers_suffice(name: str) -> None:
    codes = found(name)
    for code in codes:
        assert code.registers > 0
        assert code.stack <= ALLOWED_STACK.get((name, code.kernel), 0), f"{code.stack} bytes of stack: {code}"
        assert not code.serialised, f"{code.products} products and {code.waits} waits for them: {code}"
    if machine_code.disassembler() is None:
        pytest.skip("nvdisasm is not installed: whether products run one at a time is not known")
    assert codes[0].products or not name.startswith("sm_90a")


def test_products_one_at_a_time_are_told_apart() -> None:
    """As ptxas made prefill with heads of 128 before weights were rounded ahead of the fence, and as it does now."""
    code = Code(id="", arch="sm_90a", config="", kernel=0, registers=168, stack=0, products=48, waits=48)
    assert code.serialised
    assert not replace(code, waits=6).serialised
    assert not replace(code, products=None, waits=None).serialised
