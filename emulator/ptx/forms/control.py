# SPDX-License-Identifier: Apache-2.0
"""Control flow and the rest (ISA 9.7.12, 9.7.19)."""

from emulator.ptx.grammar import parse_table

FORMS = parse_table(
    """
; 9.7.12
bra            .uni?                                         : target:label
brx.idx        .uni?                                         : index:u32, targets:label
call           .uni? \
               : results:names?, callee:function, args:names?, proto:label?
ret            .uni?                                         :
exit                                                         :
; 9.7.19
brkpt                                                        :
trap                                                         :
nanosleep      .type=u32                                     : ns:type
pmevent                                                      : n:imm
pmevent        .mask                                         : n:imm
setmaxnreg     .action=inc|dec .sync .aligned .type=u32      : n:imm
"""
)
