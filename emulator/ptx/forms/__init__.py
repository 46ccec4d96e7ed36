# SPDX-License-Identifier: Apache-2.0
"""Every form of every instruction that the emulator reads, written from the PTX ISA manual, version 9.2.

`emulator.ptx.grammar` explains the rows. What is not in a table is refused; REFUSED says why for what may be missed.
"""

from collections.abc import Mapping
from functools import cache

from emulator.ptx.forms import arithmetic, asynchronous, control, conversion, matrix, memory, synchronization
from emulator.ptx.grammar import Form, Op

FORMS: tuple[Form, ...] = (
    *arithmetic.FORMS,
    *conversion.FORMS,
    *memory.FORMS,
    *asynchronous.FORMS,
    *synchronization.FORMS,
    *matrix.FORMS,
    *control.FORMS,
)

# Words that an instruction begins with -> why it is refused. Words after `+` may stand anywhere behind them.
REFUSED: Mapping[str, str] = {
    "cp.async.bulk.tensor +im2col": "im2col tensor maps are not emulated",
    "cp.async.bulk.tensor +im2col_no_offs": "im2col tensor maps are not emulated",
    "cp.async.bulk.tensor +im2col::w": "im2col tensor maps are not emulated",
    "cp.async.bulk.tensor +im2col::w::128": "im2col tensor maps are not emulated",
    "cp.reduce.async.bulk.tensor +im2col_no_offs": "im2col tensor maps are not emulated",
    "cp.async.bulk.prefetch.tensor +im2col": "im2col tensor maps are not emulated",
    "tcgen05.mma.sp": "sparse matrices are not emulated",
    "tcgen05.mma.ws": "weight-stationary MMAs are not emulated",
    "wgmma.mma_async.sp": "sparse matrices are not emulated",
    "mma.sp": "sparse matrices are not emulated",
    "mma.sp::ordered_metadata": "sparse matrices are not emulated",
    "multimem": "multicast objects join several GPUs; one is emulated",
    "cvt +s2f6x2": "s2f6 is not emulated",
    "tex": "textures are not emulated",
    "tld4": "textures are not emulated",
    "suld": "surfaces are not emulated",
    "sust": "surfaces are not emulated",
    "sured": "surfaces are not emulated",
    "wmma": "wmma is not emulated; mma.sync is",
    "alloca": "stack allocation is not emulated",
}


@cache
def _by_first_word() -> dict[str, tuple[Form, ...]]:
    found: dict[str, list[Form]] = {}
    for form in FORMS:
        found.setdefault(form.words[0], []).append(form)
    return {word: tuple(forms) for word, forms in found.items()}


@cache
def candidates(text: str) -> tuple[Op, ...]:
    """The forms that an opcode with its modifiers fits, in the tables' order. Operands decide between them."""
    words = tuple(text.split("."))
    matches = ((form, form.match(words)) for form in _by_first_word().get(words[0], ()))
    return tuple(Op(text, form, mods) for form, mods in matches if mods is not None)


def why_refused(text: str) -> str:
    """The reason for an opcode that `candidates` knows nothing of."""
    words = text.split(".")
    for key, reason in REFUSED.items():
        *start, anywhere = key.split(" +") if " +" in key else (key, "")
        first = start[0].split(".")
        if words[: len(first)] == first and (not anywhere or anywhere in words):
            return reason
    heads = {form.opcode for form in _by_first_word().get(words[0], ())}
    if not heads:
        return "no such opcode in the emulator's tables"
    fitting = sorted((h for h in heads if words[: h.count(".") + 1] == h.split(".")), key=len)
    if not fitting:
        return f"no such opcode in the emulator's tables; known: {', '.join(sorted(heads))}"
    opcode = fitting[-1]
    values = {v for form in _by_first_word()[words[0]] if form.opcode == opcode for g in form.groups for v in g.values}
    unknown = [word for word in words[opcode.count(".") + 1 :] if word not in values]
    if unknown:
        return f"{opcode} has no modifier {', '.join('.' + word for word in unknown)} in the emulator's tables"
    return f"{opcode} has these modifiers, but not together or not in this order"
