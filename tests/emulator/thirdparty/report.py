# SPDX-License-Identifier: Apache-2.0
"""The table of docs/emulator-thirdparty.md: what came out of each case of others' kernels.

python tests/emulator/thirdparty/report.py [--reports FILE ...] > docs/emulator-thirdparty.md

Runs all cases, one at a time, or reads what run_case.py printed.
"""

import argparse
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from peer_answers import Answers  # noqa: E402  of this folder
from peer_cases import SCHEDULES  # noqa: E402
from peer_rules import rule_of  # noqa: E402
from run_case import CASES  # noqa: E402

HEAD = """# Others' kernels on the emulator

This page tests the emulator with kernels that others wrote and that work on hardware: FlashAttention-4 (flash-attn-4
4.0.0b20), quack (quack-kernels 0.6.3) and examples of CUTLASS's CuTe DSL (v4.6.0), unmodified, as CuTe DSL 4.6.0
compiles them, in three schedules. A finding is either a defect of the kernel or a mistake of the emulator. The reason
of each finding is below the table.

- **error**: the largest error of an element divided by its tolerance. The tolerance is twice torch's own error in the
  output's dtype (row by row, against float64) plus two ulps of the row's largest element. Above 1 the case fails,
  except where a race of the kernel's own makes outputs wrong in some schedule. Then the error is that of the others.
- **findings**: errors that the checks report. **warnings**: what kernels in production do without harm (the emulator's
  README). Both are counted in one schedule, and are the same in all three unless there are two numbers.

Made by `python tests/emulator/thirdparty/report.py > docs/emulator-thirdparty.md`. The same cases are tests: `make
peers`, then `pytest tests/emulator/thirdparty`; `-m 'not full'` runs a selection.
"""
LEFT_OUT = """
## What is left out

- Split keys (`num_splits` > 1): flash-attn-4 4.0.0b20 does not compile them for SM100 with CuTe DSL 4.6.0
  (`TYPE_UNSTABLE_JOIN: n_block_first has type None on one path and Int32 on another`, flash_fwd_sm100.py:1476) and has
  none for SM90 (`SplitKV not supported on SM 9.0`). The kernel that combines splits is covered.
- fp8 attention on SM90: FlashAttention-4 has it for SM100 alone.
- im2col, sparse matrices and several GPUs: the emulator refuses them by name.
- Of CUTLASS's examples, those that are not in the table: Ampere's and SM120's, those for several GPUs, of experts, of
  the EFC, of attention with operands of two types, attention's backward pass, `fp16_gemm_6`, SM103's scaled products,
  and grouped products with scales or operands of two types.

## Questions about CUTLASS's examples

What the emulator found in examples that are not cases here, or what it only warns of, and may be a mistake of theirs.
Paths are below `examples/python/CuTeDSL`, lines those of v4.7.0 unless said; CuTe DSL 4.8.0 compiled those.

- `experimental/primitives/mapa.py:131-144`: a CTA signals the next one of the ring (131), waits until the one before it
  has signalled (136), and reads the data of the next one (144). What orders that read behind the write that it reads?
  And what keeps the next CTA from ending before? Nothing waits for readers at the end. In the schedule `lazy` the read
  finds a CTA that has ended.
- `experimental/primitives/tutorial/05_minimal_tensor_mma.py:71-75`: each of the 8 warps elects a lane, and each of
  these initialises the same two mbarriers. Should one warp do it? The ISA leaves `mbarrier.init` of a valid mbarrier
  undefined.
- The same file, line 201: what `tcgen05.ld` has loaded is stored without `tcgen05.wait::ld`. Is the compiler relied
  upon to wait? CUTLASS's tutorials of products do the same.
- `experimental/primitives/tcgen05/1cta_mma_a_from_tmem.py:204`: all four warps give `tcgen05.st` the address of lane 0.
  Is the lane in an address without meaning? The ISA lets a warp reach its own quarter of the lanes alone. The emulator
  reports it and goes on in the warp's own lanes.
- `experimental/primitives/reduction/cluster_tmem_reduce.py:275` and `:307`: other CTAs read shared memory behind a
  relaxed arrival at the cluster's barrier, in front of which there is no fence of the cluster's scope. Is `bar.sync`
  meant to be one?
- The same file, line 245: what `tcgen05.cp` copies (238) is loaded (260) behind `tcgen05.wait::st`. By the ISA that
  waits for `tcgen05.st` alone, and a copy is complete when a `tcgen05.commit` behind it says so. Should it be a commit?
  (Read, not run. The 19 examples of v4.7.0 that store with `tcgen05.st` have a `tcgen05.wait::st` each.)
- `cute/blackwell/kernel/attention/fmha/fmha_bwd.py:1195`: a warp of the eight that compute gives tensor memory back.
  They have met at a barrier of their own (1187), and have waited for dK's products (2547). The product for dQ comes
  behind those (1918-1929), and four other warps load dQ (2313). What keeps the first from giving it back while that
  product runs? Nothing else can take it before the CTA ends, as long as an SM has room for one CTA. (Read, not run.)
- `cute/blackwell/kernel/attention/mla/mla_decode_fp8.py`, and `mla_decode_fp16.py`: two warps store each log-sum-exp
  (3054); row maxima go through one buffer without a second barrier (2563-2567); a release without `tcgen05.wait::ld`
  (2841-2851). They are cases, with what the emulator finds, [above](#findings-that-are-the-kernels-own). (v4.6.0)
- `cute/blackwell/kernel/blockwise_gemm/masked_grouped_gemm.py:1021`: the warp that looks for the next tile reads
  `gidx_mapping` of a tile before it knows whether there is such a tile. Behind the last one that is an element past the
  tensor's end. Should `is_valid_tile` be asked first? (v4.6.0)

## Attention in fp8

FlashAttention-4 stores P in e4m3, scaled by 2^8, relative to a row maximum that may be too low by 2^4. An element of P
can then be 2^12. e4m3 ends at 448, so the conversion saturates, while the row's sum includes the full value. The result
is too small in rows whose later keys have larger scores (keys are processed from the last to the first): of 256 rows of
random inputs with 384 keys, 30 are off by more than 0.03 and the worst by 0.2, while rounding to e4m3 alone causes
0.01. The emulator agrees with this arithmetic to 0.0011. So the difference is the kernel's own, and the case compares
with that arithmetic.
"""


def ran(arch: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(HERE / "run_case.py"), arch, name, "--schedules", *SCHEDULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def words(of_schedules: list[dict[str, int]]) -> str:
    """Kinds with their numbers, of which there are two where schedules differ: the least and the most."""
    first = of_schedules[0]
    assert all(one.keys() == first.keys() for one in of_schedules)
    found = []
    for kind in first:
        least, most = (pick(one[kind] for one in of_schedules) for pick in (min, max))
        found.append(f"{kind.lower().replace('_', ' ')} {least}" + (f" to {most}" if most > least else ""))
    return ", ".join(found)


def row(report: dict[str, Any]) -> str:
    told = report["schedules"]
    assert list(told) == list(SCHEDULES)
    one = told["lazy"]
    outputs = [output for other in told.values() for output in other["outputs"].values()]
    worst = max(
        output["error"] / output["budget"] if output["budget"] else 0.0 for output in outputs if not output["wrong"]
    )
    error = f"{worst:.2f}"
    if wrong := [name for name, other in told.items() if any(output["wrong"] for output in other["outputs"].values())]:
        error = f"{error}, WRONG in {', '.join(wrong)}"
    found = (words([other[kind] for other in told.values()]) for kind in ("findings", "warnings"))
    cells = (report["case"], report["arch"], doc(report["case"]).splitlines()[0], f"{one['instructions']:,}", error)
    return f"| {' | '.join((*cells, *found))} |"


def doc(name: str) -> str:
    found = inspect.getdoc(CASES[name].make)
    assert found, f"{name} does not say what it is"
    return found


def lines(reports: list[dict[str, Any]]) -> Iterator[str]:
    yield HEAD
    found = [report for report in reports if report["schedules"]["lazy"]["findings"]]
    yield f"{len(reports)} cases, each in three schedules: {len(reports) - len(found)} without a finding.\n"
    yield "| case | arch | what | warp instructions | error | findings | warnings |"
    yield "| --- | --- | --- | ---: | ---: | --- | --- |"
    yield from map(row, reports)
    yield "\n## Findings that are the kernels' own\n"
    for name in dict.fromkeys(report["case"] for report in found):
        archs = ", ".join(report["arch"] for report in found if report["case"] == name)
        why = doc(name).partition("\n")[2]
        yield f"- {name} ({archs}): {' '.join(why.split())}"
    yield LEFT_OUT.rstrip()


CHIP = """
## Beside a chip

The same inputs on {gpu} ({date}, commit {commit}, torch {torch}).
Of each output some elements are kept and a digest of all. Largest difference: in units in the last place of its row's
largest; the worst of three schedules. Allowed: so many units, and of the elements such a part with other bits
(`tests/emulator/thirdparty/peer_rules.py`, with reasons).
"""


def chip_lines(reports: list[dict[str, Any]], answers: Answers) -> Iterator[str]:
    if not answers.cases:
        return
    yield CHIP.format(**answers.source)
    yield "| case | output | elements | with other bits | largest difference | allowed | all bits the same |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for report in reports:
        each = [told["chip"] for told in report["schedules"].values() if "chip" in told]
        for output in each[0] if each else ():
            some = [one[output] for one in each]
            unequal, worst = max(one["unequal"] for one in some), max(one["worst"] for one in some)
            same = "yes" if all(one["identical"] for one in some) else ""
            cells = (output, f"{some[0]['compared']:,}", f"{unequal:,}", f"{worst:.2f}")
            rule = rule_of(report["case"], output)
            allowed = f"{rule.ulps:g}, {rule.share:.4g}"
            yield f"| {' | '.join((report['case'], *cells, allowed, same))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run all cases and print the table of what came out.")
    parser.add_argument("--reports", nargs="*", type=Path, help="what run_case.py printed, in place of running it")
    options = parser.parse_args()
    known = {}
    for path in options.reports or ():
        report = json.loads(path.read_text().splitlines()[-1])
        known[report["case"], report["arch"]] = report
    every = [(name, arch) for name, case in CASES.items() for arch in case.archs]
    reports = [known[name, arch] if options.reports else ran(arch, name) for name, arch in every]
    sys.stdout.write("\n".join([*lines(reports), *chip_lines(reports, Answers.load())]) + "\n")


if __name__ == "__main__":
    main()
