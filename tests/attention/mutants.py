# SPDX-License-Identifier: Apache-2.0
"""The main attention kernels as kernels whose mutants are judged, on problems in which every ring goes round twice."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from judge import Kernel
from suite import Rows, Suite

from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig as HopperConfig
from dsl_backend.attention.cute.sm90.dense_host import Prefill as HopperPrefill
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm100.dense_host import Prefill, SplitKV
from dsl_backend.attention.cute.sm100.mla_configs import MlaConfig, TwoCtaMlaConfig
from dsl_backend.attention.cute.sm100.mla_host import MlaSplitKV
from dsl_backend.attention.protocol import Operands
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import FULL, Case, mla
from dsl_backend.testing.check import Result
from dsl_backend.testing.inputs import Problem

SM90, SM100 = "sm_90a", "sm_100a"


class Spoiled(Workspace):
    """Scratch that never holds the partial results of an earlier run."""

    def partials(self, count: int) -> torch.Tensor:
        return super().partials(count).fill_(torch.nan)

    def integers(self, count: int) -> torch.Tensor:
        return super().integers(count).fill_(-1)


Judge = Callable[[Result, Problem], None]  # raises AssertionError where a result is wrong


def exact(problem: Problem) -> Judge:
    """Against the exact result, within the budget of 16 bits."""
    expected, magnitude = problem.expected(), problem.score_magnitude()
    return lambda result, _: check.judge(result, expected, magnitude)


def call(
    kernel_type: type[Any], config: Any, arch: str, sms: int, of: Case, judge: Judge | None = None
) -> Callable[[], bool]:
    """A call of a kernel that says whether its results are right; judged as `exact` says if not otherwise."""
    problem, workspace = of.problem(), Spoiled(torch.device("cpu"))
    target = replace(from_arch(arch), sm_count=sms)
    kernel = kernel_type(problem.spec, target, workspace, config)
    assert not config.objections(problem.spec, target.smem_bytes)
    scales = problem.k_scale, problem.v_scale, problem.q_scale
    if judge is None:
        judge = exact(problem)

    def run() -> bool:
        # A mutant that was stopped in the middle of a launch leaves them as they were there.
        workspace.reset()
        result = check.empty_result(problem)
        given = problem.q, None, problem.keys, problem.values, result.out, result.lse
        operands = Operands(*given, None, None, *scales)
        kernel.bind(problem.batch, 0, problem.batch.max_query_len)(operands)
        try:
            judge(result, problem)
        except AssertionError:
            return False
        return not workspace.flags(0).any()

    return run


def subject(
    name: str,
    kernel_type: type[Any],
    config: Any,
    of: Sequence[Case],
    arch: str = SM100,
    sms: int = 1,
    judge: Judge | None = None,
) -> Kernel:
    """A kernel, called on several problems; the calls are built at the first one."""
    calls: list[Callable[[], bool]] = []

    def run() -> bool:
        if not calls:
            calls.extend(call(kernel_type, config, arch, sms, one, judge) for one in of)
        return all(one() for one in calls)

    return Kernel(name, arch, run, sms=sms, most=2, by_instruction=True)


# One block makes three tiles of 64 queries, against five tiles of keys at most: as many as the ring has places, so that
# no wait for one of these knows of the queries before.
LONG = Case(q_lens=(150,), kv_lens=(160,), heads=(4, 1), dim=128, page=32)
# Ten tiles through the three places of a ring that keys and values share, three times over. The last one ends in the
# middle.
SHARED = Case(q_lens=(140,), kv_lens=(150,), heads=(4, 1), dim=192, dim_v=128, page=None)
# All items are short, so claimed ahead: when the third one is posted, roles have not heard of each other as they have
# at a long one's end. Some rows of a warp see nothing of its first keys.
BRIEF, SHARED_BRIEF = (replace(of, q_lens=(60,) * 5, kv_lens=(63,) * 5) for of in (LONG, SHARED))
# Six key tiles first, an odd number of them masked: arrivals that nobody waits for do not make up rounds. Behind the
# last key are eleven rows of values: so many that both groups clear some. Then short ones, which are claimed ahead.
ODD = Case(q_lens=(60, 60, *[120] * 8), kv_lens=(181, 181, *[120] * 8), heads=(1, 1), dim=128, page=32)
# Row tiles of a pair of blocks, of which one has rows that are there in part, or none. All are short and claimed ahead.
PAIRED = Case(
    q_lens=(300, 300, 60, 20),
    kv_lens=(128, 120, 60, 90),
    heads=(2, 1),
    dim=160,
    page=32,
    causality=FULL,
    q_gain=8.0,
)
# Shares begin and end in the middle of requests, and one request is whole: its rows are those of several warps. Some of
# them rest in the next one, whose keys fill their tiles, so that no values are cleared and warps do not meet.
SHORT = Case(q_lens=(1, 20, 2), kv_lens=(300, 20, 192), heads=(4, 2), dim=128, page=32)
# The same with few rows, so many tiles of 128 keys that rings go round, and scores that grow.
FEW = Case(q_lens=(1, 4, 2), kv_lens=(900, 20, 384), heads=(8, 2), dim=128, page=32, q_gain=8.0)
# Ranges so many and so unlike that they are cut, three and more for each block: the mailbox's places come round.
MLA = mla(16, q_lens=(1,) * 6, kv_lens=(260, 130, 70, 33, 100, 64), q_gain=8.0, page=64)
MLA_PAIRS = mla(128, q_lens=(1, 1), kv_lens=(260, 70), q_gain=8.0, page=16)

KERNELS = {
    kernel.name: kernel
    for kernel in (
        subject("SM100 forward", Prefill, DenseConfig(tile_n=32, stages=5, query_stages=2), (LONG, BRIEF)),
        subject(
            "SM100 shared ring",
            Prefill,
            DenseConfig(tile_n=32, query_stages=2, shared_kv_stages=True),
            (SHARED, SHARED_BRIEF),
        ),
        subject(
            "SM100 pairs",
            Prefill,
            DenseConfig(softmax_warpgroups=1, two_cta=True, tile_n=32, stages=4, query_stages=2),
            (PAIRED,),
            sms=2,
        ),
        subject(
            "SM100 split-KV",
            SplitKV,
            DenseConfig(alternate=True, tile_n=32, query_stages=2, min_split_tiles=1),
            (SHORT,),
            sms=2,
        ),
        subject(
            "SM100 swapped",
            SplitKV,
            DenseConfig(alternate=True, swap_ab=16, query_stages=2, ex2_emulation=0, min_split_tiles=1),
            (FEW,),
            sms=2,
        ),
        subject("SM100 MLA", MlaSplitKV, MlaConfig(tile_n=32, stages=3, min_split_tiles=1), (MLA,), sms=2),
        subject("SM100 MLA pairs", MlaSplitKV, TwoCtaMlaConfig(tile_n=32), (MLA_PAIRS,), sms=2),
        subject(
            "SM90 forward",
            HopperPrefill,
            HopperConfig(groups=2, tile_n=32, stages=2, ping_pong=True),
            (ODD,),
            SM90,
            sms=2,
        ),
    )
}

# (pattern of the kernel, pattern of `kind: what`, reason)
EQUIVALENT: Rows = [
    (
        "SM100",
        "drop: .*relinquish_alloc_permit",
        "no other block allocates: a block has all of an SM's shared memory, and gives the permit back at its end",
    ),
    (
        "SM",
        "descriptor leading: .*(4611756662049538048|-9223301530671579136|4611686293305360384)",
        "the leading dimension's offset has no meaning for K-major operands with a swizzle (9.7.15.5.1.2, 9.7.16.4.1)",
    ),
    (
        "SM100 split-KV",
        r"swap: .*fence.proxy.async.*behind `bar.sync.*\(dense_correction.py:\d+ in clear_v_after_end",
        "every thread fences behind the barrier, when it knows of all writes, and before it arrives: as good",
    ),
    (
        "SM100 (forward|shared ring|pairs)",
        r"swap: .*before_thread_sync.*behind `bar.sync.*\(tmem.py:\d+ in before_sync",
        "where no warp is idle, every thread arrives for itself, behind its fence: as good",
    ),
    (
        "SM100 MLA",
        "swap: .*tcgen05.wait::ld.*behind `ld.shared",
        "the wait still comes before the first use, and is in no order with an ordinary load of something else",
    ),
    (
        "SM100 MLA$",
        r"relaxed: .*mbarrier.try_wait.*in online_softmax\)",
        "S is in tensor memory, which tcgen05.fence orders; values are cleared behind a wait for their own copies",
    ),
    (
        "SM100 (MLA|swapped)",
        "swap: .*fence.proxy.async.*behind `tcgen05.fence::before_thread_sync",
        "two fences, for different accesses, before the same arrival",
    ),
    (
        "SM100 MLA pairs",
        r"swap: .*after_thread_sync.*behind `st.shared",
        "the fence still comes before the first access to tensor memory, and is in no order with an ordinary store",
    ),
    (
        "SM100 (MLA )?pairs",
        r"relaxed: .*barrier.cluster.arrive.* in (kernel|meet|cluster_sync)\)",
        "what the other block is to know, initialised barriers, fence.mbarrier_init has released",
    ),
    (
        "SM100 MLA pairs",
        "swap: .*arrive.expect_tx.*behind `.*cp.async.bulk.tensor",
        "the phase waits for this arrival, whatever came before it: the other block's copies may as well",
    ),
    (
        "SM100 swapped",
        r"swap: .*tcgen05.wait::ld.*behind `bar.sync.*in epilogue\)",
        "the wait still comes before the first use, and what is behind the barrier is told through shared memory",
    ),
    (
        "SM100 swapped",
        "descriptor leading: .*-4611615580963733504",
        "16 query rows are one piece of the swizzle wide: there is no other to step to",
    ),
    (
        "SM100 swapped",
        r"wrong barrier: .*the one 2 further \(kv_stages.py:\d+ in load_item\)",
        "at an item's first tile the loader has waited for sums that come behind the scores which free the keys' place",
    ),
    (
        "(SM90|SM100 swapped)",
        "drop: .*setmaxnreg",
        "all warps together ask for fewer registers than the SM has, in either order; values do not depend on it",
    ),
    (
        "SM90",
        r"(drop|swap): .*wgmma.fence.*behind dense_mma.py:\d+ in issue_pv",
        "the scores' fence, before it, already comes behind the last access to these registers",
    ),
    (
        "SM90",
        r"swap: .*fence.proxy.async.*behind `bar.sync.*\(dense_mma.py:\d+ in sync_smem_writes",
        "every thread fences behind the barrier, when it knows of all writes, and before its products: as good",
    ),
    (
        "SM90",
        "(parity|drop): .*mbarrier.try_wait.* in wait_consumed",
        "it is about balance, when the next item is claimed: whoever posts it waits for its place",
    ),
    (
        "SM90",
        r"relaxed: .*mbarrier.try_wait.*\(load.py:\d+ in load_keys\)",
        "of an item's first keys: values have been loaded before, into a place that was left after this one",
    ),
    (
        "SM90",
        "swap: .*wgmma.commit_group.*behind `bar.arrive",
        "the barrier says whose turn it is: it is about time, and nothing is shared by it",
    ),
    (
        "SM90",
        "swap: .*wgmma.wait_group.*behind `bar.warp.sync",
        "the whole warp waits, and does so before one of its lanes arrives",
    ),
]
UNSEEN: Rows = [
    (
        "SM",
        "(drop: .*bar.warp.sync|swap: .*behind `bar.warp.sync)",
        "order between lanes of a warp: a warp has one clock",
    ),
    (
        "SM",
        "drop: .*fence.acq_rel.gpu.* in reset_semaphore",
        "the block that leaves last has also claimed last, and of a word's writers only the last one is known",
    ),
]
HEAD = """# Mutants of the attention kernels

This page shows which mistakes in our attention kernels the emulator finds. The mistakes are those of
[emulator-mutants.md](emulator-mutants.md), one at a time in the PTX of a kernel. Tiles are small, and problems are long
enough for each ring of stages to wrap around twice.

- Of each kind of mistake and each instruction at most two mutants are taken, by a fixed seed.
- A mutant is found by "check" if one of the emulator's checks reports it, and by "value" if no check does and the
  error of the result is above the computed tolerance.
- Kernels run on a strict device, where a warning is a finding.
- The schedules lazy, eager and random run in this order until one finds the mutant.
- Files, functions and lines are those of the commit at which the page was made.

Made by `python tests/emulator/mutants/report.py --suite tests.attention.mutants > docs/attention-mutants.md`. The same
mutants are tests: `pytest tests/attention/test_mutants.py` runs all of them, `-m 'not full'` a selection.
"""

SUITE = Suite([*KERNELS], KERNELS.__getitem__, EQUIVALENT, UNSEEN, HEAD)
