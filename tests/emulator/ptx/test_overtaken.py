# SPDX-License-Identifier: Apache-2.0
"""Which loads an arrival may overtake, and what first uses them."""

import pytest
from snippets import kernel

from emulator.ptx.overtaken import overtaken

ARRIVE = "mbarrier.arrive.shared.b64 %rd7, [%r9];"


def uses(body: str) -> dict[int, tuple[int, ...]]:
    return dict(overtaken(kernel(body)).uses)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (f"ld.shared.b32 %r1, [%r2]; {ARRIVE} add.s32 %r3, %r1, 1; add.s32 %r4, %r1, 2; ret;", {0: (2,)}),
        (f"ld.shared.b32 %r1, [%r2]; add.s32 %r3, %r1, 1; {ARRIVE} add.s32 %r4, %r1, 2; ret;", {}),
        (f"ld.shared.b32 %r1, [%r2]; {ARRIVE} ret;", {}),
        (f"ld.shared.b32 %r1, [%r2]; {ARRIVE} mov.b32 %r1, 1; add.s32 %r3, %r1, 1; ret;", {}),
        (f"ld.shared.b32 %r1, [%r2]; {ARRIVE} @%p1 mov.b32 %r1, 1; add.s32 %r3, %r1, 1; ret;", {0: (3,)}),
        (f"ld.shared.b32 %r1, [%r2]; mov.b32 %r3, %r1; {ARRIVE} add.s32 %r4, %r3, 1; ret;", {0: (3,)}),
        (f"ld.shared.b32 %r9, [%r2]; {ARRIVE} add.s32 %r3, %r9, 1; ret;", {}),
        (f"ld.shared.b32 %r1, [%r2]; fence.proxy.async; {ARRIVE} add.s32 %r3, %r1, 1; ret;", {}),
        (f"ld.global.b32 %r1, [%rd2]; {ARRIVE} add.s32 %r3, %r1, 1; ret;", {}),
        (f"ld.b32 %r1, [%rd2]; {ARRIVE} add.s32 %r3, %r1, 1; ret;", {0: (2,)}),
        ("ld.shared.b32 %r1, [%r2]; bar.sync 0; add.s32 %r3, %r1, 1; ret;", {}),
        # On one of two paths.
        (
            f"ld.shared.b32 %r1, [%r2]; @%p1 bra A; add.s32 %r3, %r1, 1; A: {ARRIVE} add.s32 %r4, %r1, 1; ret;",
            {0: (2, 4)},
        ),
        # In the next round, for which the load comes again behind the use.
        (f"A: add.s32 %r3, %r1, 1; ld.shared.b32 %r1, [%r2]; {ARRIVE} @%p1 bra A; ret;", {1: (0,)}),
        (f"A: ld.shared.b32 %r1, [%r2]; add.s32 %r3, %r1, 1; {ARRIVE} @%p1 bra A; ret;", {}),
        # The use is of what another round loaded, and is not followed beyond the load.
        (f"A: ld.shared.b32 %r1, [%r2]; {ARRIVE} @%p1 bra A; add.s32 %r3, %r1, 1; ret;", {0: (3,)}),
    ],
)
def test_first_uses(body: str, found: dict[int, tuple[int, ...]]) -> None:
    assert uses(body) == found


@pytest.mark.parametrize(
    ("arrival", "counts"),
    [
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 8;", True),
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];", True),
        ("mbarrier.arrive.noComplete.shared.b64 %rd7, [%r9], 1;", True),
        ("mbarrier.arrive_drop.shared.b64 %rd7, [%r9];", True),
        ("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r9];", False),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], 8;", False),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r9];", False),
        ("barrier.cluster.arrive.aligned;", True),
        ("barrier.cluster.arrive.relaxed.aligned;", False),
    ],
)
def test_arrivals(arrival: str, counts: bool) -> None:
    assert bool(uses(f"ld.shared.b32 %r1, [%r2]; {arrival} add.s32 %r3, %r1, 1; ret;")) is counts
