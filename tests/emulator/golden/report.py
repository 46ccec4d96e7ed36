# SPDX-License-Identifier: Apache-2.0
"""Everything in which the emulator and a chip differ, allowed or not.

    python tests/emulator/golden/report.py [FILE]

For each instruction: how many elements are wrong by its rule, how many have other bits, and the worst of them as a part
of what the rule allows (1 is the bound itself). A difference is to be reported with its line: the instruction, the
element's number, both results; inputs are `micro.cases()[name].inputs`. Then either the emulator is corrected, or the
rule, with the section of the ISA that says so; a golden file is never edited.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from micro import FILE, Golden, cases  # noqa: E402
from micro_check import Mismatch, check, own_answer  # noqa: E402
from micro_compare import compare_case  # noqa: E402


def main() -> None:
    golden = Golden.load(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
    lines = [f"{golden.source}: {len(golden.outputs)} kernels"]
    for name, case in cases().items():
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
        lines += [f"  {'WRONG' if one.wrong else 'allowed'} {name}: {one}" for one in found if one.unequal]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
