# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics and cache control (ISA 9.7.9.8 to 9.7.9.18, 9.7.13)."""

from emulator.ptx.grammar import parse_table

FORMS = parse_table(
    """
; 9.7.9.8
ld             .weak? .space=<from>? .cop=ca|cg|cs|lu|cv? .hint=L2::cache_hint? .fetch=<fetch>? .vec=<vec>? \
               .type=<memory> \
               : >d:type*vec, [a:space], policy:b64?hint
ld             .weak? .space=<from>? .l1=<evict1>? .l2=<evict2>? .hint=L2::cache_hint? .fetch=<fetch>? .vec=<vec>? \
               .type=<memory> : >d:type*vec, [a:space], policy:b64?hint
ld             .sem=volatile .space=<from>? .fetch=<fetch>? .vec=<vec>? .type=<memory> : >d:type*vec, [a:space]
ld             .sem=relaxed|acquire .scope=<scope> .space=<from>? .l1=<evict1>? .l2=<evict2>? .hint=L2::cache_hint? \
               .fetch=<fetch>? .vec=<vec>? .type=<memory> : >d:type*vec, [a:space], policy:b64?hint
ld             .mmio .sem=relaxed .scope=sys .space=global? .type=<memory> : >d:type, [a:space]
; 9.7.9.9
ld#nc          .space=global .cop=ca|cg|cs? .nc .hint=L2::cache_hint? .fetch=<fetch>? .vec=<vec>? .type=<memory> \
               : >d:type*vec, [a:space], policy:b64?hint
ld#nc          .space=global .nc .l1=<evict1>? .l2=<evict2>? .hint=L2::cache_hint? .fetch=<fetch>? .vec=<vec>? \
               .type=<memory> : >d:type*vec, [a:space], policy:b64?hint
; 9.7.9.11
st             .weak? .space=<to>? .cop=wb|cg|cs|wt? .hint=L2::cache_hint? .vec=<vec>? .type=<memory> \
               : [a:space], b:type*vec, policy:b64?hint
st             .weak? .space=<to>? .l1=<evict1>? .l2=<evict2>? .hint=L2::cache_hint? .vec=<vec>? .type=<memory> \
               : [a:space], b:type*vec, policy:b64?hint
st             .sem=volatile .space=<to>? .vec=<vec>? .type=<memory> : [a:space], b:type*vec
st             .sem=relaxed|release .scope=<scope> .space=<to>? .l1=<evict1>? .l2=<evict2>? .hint=L2::cache_hint? \
               .vec=<vec>? .type=<memory> : [a:space], b:type*vec, policy:b64?hint
st             .mmio .sem=relaxed .scope=sys .space=global? .type=<memory> : [a:space], b:type
; 9.7.9.12: completes on an mbarrier of the cluster
st.async       .weak? .space=shared::cluster? .mbarrier::complete_tx::bytes .vec=v2|v4? \
               .type=b32|b64|u32|u64|s32|s64|f32|f64 \
               : [a:space], b:type*vec, [mbar:space]
; 9.7.9.15 to 9.7.9.18
prefetch       .space=global|local? .level=L1|L2             : [a:space]
prefetch       .space=global .level=L2::evict_last|L2::evict_normal : [a:space]
prefetchu      .level=L1                                     : [a]
prefetch#tensormap .space=const|param? .tensormap            : [a:space]
applypriority  .space=global? .level=L2::evict_normal        : [a:space], size:imm
discard        .space=global? .level=L2                      : [a:space], size:imm
createpolicy.fractional .first=<policy> .second=L2::evict_first|L2::evict_unchanged? .b64 : >policy:b64, fraction:f32?
createpolicy.range .space=global? .first=<policy> .second=L2::evict_first|L2::evict_unchanged? .b64 \
               : >policy:b64, [a:space], primary:u32, total:u32
createpolicy.cvt .L2 .b64                                    : >policy:b64, a:b64
; 9.7.13.5 to 9.7.13.7
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=and|or|xor .hint=L2::cache_hint? .type=b32|b64 \
               : >d:type, [a:space], b:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=exch .hint=L2::cache_hint? .type=b32|b64|b128 \
               : >d:type, [a:space], b:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=cas .hint=L2::cache_hint? .type=b16|b32|b64|b128 \
               : >d:type, [a:space], b:type, c:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=add .hint=L2::cache_hint? .type=<added> \
               : >d:type, [a:space], b:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=inc|dec .hint=L2::cache_hint? .type=u32 \
               : >d:type, [a:space], b:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=min|max .hint=L2::cache_hint? .type=<compared> \
               : >d:type, [a:space], b:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=<where>? .op=add .noftz .hint=L2::cache_hint? .type=<half> \
               : >d:type, [a:space], b:type, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=global? .op=add .hint=L2::cache_hint? .vec=v2|v4 .type=f32 \
               : >d:type*vec, [a:space], b:type*vec, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=global? .op=add|min|max .noftz .hint=L2::cache_hint? \
               .vec=v2|v4|v8 .type=f16|bf16 : >d:type*vec, [a:space], b:type*vec, policy:b64?hint
atom           .sem=<sems>? .scope=<scope>? .space=global? .op=add|min|max .noftz .hint=L2::cache_hint? \
               .vec=v2|v4 .type=f16x2|bf16x2 : >d:type*vec, [a:space], b:type*vec, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=<where>? .op=and|or|xor .hint=L2::cache_hint? .type=b32|b64 \
               : [a:space], b:type, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=<where>? .op=add .hint=L2::cache_hint? .type=<added> \
               : [a:space], b:type, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=<where>? .op=inc|dec .hint=L2::cache_hint? .type=u32 \
               : [a:space], b:type, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=<where>? .op=min|max .hint=L2::cache_hint? .type=<compared> \
               : [a:space], b:type, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=<where>? .op=add .noftz .hint=L2::cache_hint? .type=<half> \
               : [a:space], b:type, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=global? .op=add .hint=L2::cache_hint? .vec=v2|v4 .type=f32 \
               : [a:space], b:type*vec, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=global? .op=add|min|max .noftz .hint=L2::cache_hint? \
               .vec=v2|v4|v8 .type=f16|bf16 : [a:space], b:type*vec, policy:b64?hint
red            .sem=<stores>? .scope=<scope>? .space=global? .op=add|min|max .noftz .hint=L2::cache_hint? \
               .vec=v2|v4 .type=f16x2|bf16x2 : [a:space], b:type*vec, policy:b64?hint
; compilers print the space, the scope, then the semantics
atom           .space=<where> .scope=<scope> .sem=<sems>? .op=and|or|xor|exch .type=b32|b64 : >d:type, [a:space], b:type
atom           .space=<where> .scope=<scope> .sem=<sems>? .op=cas .type=b16|b32|b64 : >d:type, [a:space], b:type, c:type
atom           .space=<where> .scope=<scope> .sem=<sems>? .op=add .type=<added> : >d:type, [a:space], b:type
atom           .space=<where> .scope=<scope> .sem=<sems>? .op=add .noftz .type=<half> : >d:type, [a:space], b:type
atom           .space=<where> .scope=<scope> .sem=<sems>? .op=inc|dec .type=u32 : >d:type, [a:space], b:type
atom           .space=<where> .scope=<scope> .sem=<sems>? .op=min|max .type=<compared> : >d:type, [a:space], b:type
red            .space=<where> .scope=<scope> .sem=<stores>? .op=and|or|xor .type=b32|b64 : [a:space], b:type
red            .space=<where> .scope=<scope> .sem=<stores>? .op=add .type=<added> : [a:space], b:type
red            .space=<where> .scope=<scope> .sem=<stores>? .op=add .noftz .type=<half> : [a:space], b:type
red            .space=<where> .scope=<scope> .sem=<stores>? .op=inc|dec .type=u32 : [a:space], b:type
red            .space=<where> .scope=<scope> .sem=<stores>? .op=min|max .type=<compared> : [a:space], b:type
red.async      .sem=relaxed .scope=cluster .space=shared::cluster? .mbarrier::complete_tx::bytes .op=inc|dec \
               .type=u32 : [a:space], b:type, [mbar:space]
red.async      .sem=relaxed .scope=cluster .space=shared::cluster? .mbarrier::complete_tx::bytes .op=min|max \
               .type=u32|s32 : [a:space], b:type, [mbar:space]
red.async      .sem=relaxed .scope=cluster .space=shared::cluster? .mbarrier::complete_tx::bytes .op=and|or|xor \
               .type=b32 : [a:space], b:type, [mbar:space]
red.async      .sem=relaxed .scope=cluster .space=shared::cluster? .mbarrier::complete_tx::bytes .op=add \
               .type=u32|s32|u64 : [a:space], b:type, [mbar:space]
""",
    {
        "from": "const|global|local|param::entry|param::func|param|<shared>",
        "to": "global|local|param::func|param|<shared>",
        "where": "global|<shared>",
        "vec": "v2|v4|v8",
        "fetch": "L2::64B|L2::128B|L2::256B",
        "evict1": "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate",
        "evict2": "L2::evict_normal|L2::evict_first|L2::evict_last",
        "policy": "L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged",
        "sems": "relaxed|acquire|release|acq_rel",
        "stores": "relaxed|release",
        "added": "u32|s32|u64|f32|f64",
        "compared": "u32|s32|u64|s64",
        "half": "f16|f16x2|bf16|bf16x2",
    },
)
