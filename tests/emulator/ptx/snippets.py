# SPDX-License-Identifier: Apache-2.0
"""PTX around a few lines of a body."""

from emulator.ptx import Function, Instr, Module, parse

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
REGISTERS = """
.reg .pred %p<8>;
.reg .b16 %rs<8>;
.reg .b32 %r<200>;
.reg .b64 %rd<8>;
.reg .b128 %rq<2>;
.reg .f32 %f<8>;
"""


def text(body: str, params: str = "", directives: str = "", before: str = "") -> str:
    return f"{HEADER}{before}\n.visible .entry k({params}) {directives}\n{{{REGISTERS}{body}\n}}\n"


def module(body: str, params: str = "", directives: str = "", before: str = "") -> Module:
    return parse(text(body, params, directives, before))


def kernel(body: str, params: str = "", directives: str = "", before: str = "") -> Function:
    return module(body, params, directives, before).entries["k"]


def code(body: str, params: str = "", before: str = "") -> tuple[Instr, ...]:
    found = kernel(body, params, before=before).code
    assert found is not None
    return found


def one(line: str, params: str = "", before: str = "") -> Instr:
    (instr,) = code(line, params, before)
    return instr
