# SPDX-License-Identifier: Apache-2.0
"""Everything in which the emulator and a chip differ, allowed or not.

    python tests/emulator/golden/report.py [FILE]

For each instruction: how many elements are wrong by its rule, how many have other bits, and the worst of them as a part
of what the rule allows (1 is the bound itself). Then the table of docs/emulator-chip.md. A difference is to be reported
with its line: the instruction, the element's number, both results; inputs are `micro.cases()[name].inputs`. Then either
the emulator is corrected, or the rule, with the section of the ISA that says so; a golden file is never edited.
"""

import sys
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from micro import FILE, Golden, cases  # noqa: E402
from micro_check import Mismatch, check, own_answer  # noqa: E402
from micro_compare import Comparison, compare_case  # noqa: E402


def table(families: dict[str, list[list[Comparison]]]) -> list[str]:
    """Markdown: of each family the kernels, and of their results the elements that have other bits."""
    families["all"] = [kernel for kernels in families.values() for kernel in kernels]
    lines = [
        "| family | kernels | with the same bits | elements | with other bits | worst |",
        "| --- |" + " ---: |" * 5,
    ]
    for family, kernels in families.items():
        results = [one for kernel in kernels for one in kernel]
        same = sum(not any(one.unequal for one in kernel) for kernel in kernels)
        unequal, worst = sum(one.unequal for one in results), max(one.worst for one in results)
        counts = f"{len(kernels):,} | {same:,} | {sum(one.count for one in results):,} | {unequal:,}"
        lines.append(f"| {family} | {counts} | {worst:.2f} |")
    return lines


def main() -> None:
    golden = Golden.load(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
    lines = [f"{golden.source}: {len(golden.outputs)} kernels"]
    families: dict[str, list[list[Comparison]]] = defaultdict(list)
    for name, case in cases().items():
        if name not in golden.outputs and name not in golden.errors:
            lines.append(f"not asked {name}: the next run of make.py answers it")
            continue
        try:
            found = check(case, golden)
        except Mismatch as error:
            lines.append(f"WRONG {name}: {str(error).splitlines()[0][:300]}")
            if name in golden.errors or name.startswith("question/") or golden.digests.get(name) != case.digest():
                continue
            try:
                own, magnitude = own_answer(case)
            except Mismatch:
                continue
            found = compare_case(case, golden.outputs[name], own, magnitude)
        if found:
            families[name.partition("/")[0]].append(found)
        lines += [f"  {'WRONG' if one.wrong else 'allowed'} {name}: {one}" for one in found if one.unequal]
    sys.stdout.write("\n".join([*lines, *table(families)]) + "\n")


if __name__ == "__main__":
    main()
