# SPDX-License-Identifier: Apache-2.0
"""Integer, floating-point, comparison, logic and shift instructions (ISA 9.7.1 to 9.7.8)."""

from emulator.ptx.grammar import parse_table

FORMS = parse_table(
    """
; 9.7.1 integer
add#int        .type=<int>|u16x2|s16x2                       : >d:type, a:type, b:type
add#int        .sat .type=s32                                : >d:type, a:type, b:type
sub#int        .type=<int>                                   : >d:type, a:type, b:type
sub#int        .sat .type=s32                                : >d:type, a:type, b:type
mul#int        .mode=lo|hi|wide .type=<int>                  : >d:type, a:type, b:type
mad#int        .mode=lo|hi|wide .type=<int>                  : >d:type, a:type, b:type, c:type
mad#int        .mode=hi .sat .type=s32                       : >d:type, a:type, b:type, c:type
mul24          .mode=lo|hi .type=u32|s32                     : >d:type, a:type, b:type
mad24          .mode=lo|hi .type=u32|s32                     : >d:type, a:type, b:type, c:type
mad24          .mode=hi .sat .type=s32                       : >d:type, a:type, b:type, c:type
sad            .type=<int>                                   : >d:type, a:type, b:type, c:type
div#int        .type=<int>                                   : >d:type, a:type, b:type
rem            .type=<int>                                   : >d:type, a:type, b:type
abs#int        .type=s16|s32|s64                             : >d:type, a:type
neg#int        .type=s16|s32|s64                             : >d:type, a:type
min#int        .type=<int>|u16x2|s16x2                       : >d:type, a:type, b:type
min#int        .relu .type=s32|s16x2                         : >d:type, a:type, b:type
max#int        .type=<int>|u16x2|s16x2                       : >d:type, a:type, b:type
max#int        .relu .type=s32|s16x2                         : >d:type, a:type, b:type
popc           .type=b32|b64                                 : >d:u32, a:type
clz            .type=b32|b64                                 : >d:u32, a:type
bfind          .shiftamt? .type=u32|u64|s32|s64              : >d:u32, a:type
fns            .type=b32                                     : >d:type, mask:b32, base:b32, offset:s32
brev           .type=b32|b64                                 : >d:type, a:type
bfe            .type=u32|u64|s32|s64                         : >d:type, a:type, b:u32, c:u32
bfi            .type=b32|b64                                 : >d:type, a:type, b:type, c:u32, len:u32
szext          .mode=clamp|wrap .type=u32|s32                : >d:type, a:type, b:u32
bmsk           .mode=clamp|wrap .type=b32                    : >d:type, a:type, b:u32
dp4a           .atype=u32|s32 .btype=u32|s32                 : >d:b32, a:b32, b:b32, c:b32
dp2a           .mode=lo|hi .atype=u32|s32 .btype=u32|s32     : >d:b32, a:b32, b:b32, c:b32
; 9.7.2 extended precision: .cc is a carry flag of the thread
add#carry      .cc .type=u32|s32|u64|s64                     : >d:type, a:type, b:type
addc           .cc? .type=u32|s32|u64|s64                    : >d:type, a:type, b:type
sub#carry      .cc .type=u32|s32|u64|s64                     : >d:type, a:type, b:type
subc           .cc? .type=u32|s32|u64|s64                    : >d:type, a:type, b:type
mad#carry      .mode=lo|hi .cc .type=u32|s32|u64|s64         : >d:type, a:type, b:type, c:type
madc           .mode=lo|hi .cc? .type=u32|s32|u64|s64        : >d:type, a:type, b:type, c:type
; 9.7.3 floating point
testp          .test=finite|infinite|number|notanumber|normal|subnormal .type=f32|f64 : >p:pred, a:type
copysign       .type=f32|f64                                 : >d:type, a:type, b:type
add#float      .rnd=<round>? .ftz? .sat? .type=f32           : >d:type, a:type, b:type
add#float      .rnd=<round>? .type=f64                       : >d:type, a:type, b:type
add#packed     .rnd=<round>? .ftz? .type=f32x2               : >d:type, a:type, b:type
sub#float      .rnd=<round>? .ftz? .sat? .type=f32           : >d:type, a:type, b:type
sub#float      .rnd=<round>? .type=f64                       : >d:type, a:type, b:type
sub#packed     .rnd=<round>? .ftz? .type=f32x2               : >d:type, a:type, b:type
mul#float      .rnd=<round>? .ftz? .sat? .type=f32           : >d:type, a:type, b:type
mul#float      .rnd=<round>? .type=f64                       : >d:type, a:type, b:type
mul#packed     .rnd=<round>? .ftz? .type=f32x2               : >d:type, a:type, b:type
fma#float      .rnd=<round> .ftz? .sat? .type=f32            : >d:type, a:type, b:type, c:type
fma#float      .rnd=<round> .type=f64                        : >d:type, a:type, b:type, c:type
fma#packed     .rnd=<round> .ftz? .type=f32x2                : >d:type, a:type, b:type, c:type
mad#float      .rnd=<round> .ftz? .sat? .type=f32            : >d:type, a:type, b:type, c:type
mad#float      .rnd=<round> .type=f64                        : >d:type, a:type, b:type, c:type
div#float      .mode=approx .ftz? .type=f32                       : >d:type, a:type, b:type
div#float      .mode=full .ftz? .type=f32                         : >d:type, a:type, b:type
div#float      .rnd=<round> .ftz? .type=f32                  : >d:type, a:type, b:type
div#float      .rnd=<round> .type=f64                        : >d:type, a:type, b:type
abs#float      .ftz? .type=f32                               : >d:type, a:type
abs#float      .type=f64                                     : >d:type, a:type
neg#float      .ftz? .type=f32                               : >d:type, a:type
neg#float      .type=f64                                     : >d:type, a:type
min#float      .ftz? .nan=NaN? .type=f32 : >d:type, a:type, b:type, c:type?
min#float      .ftz? .nan=NaN? .xorsign .abs .type=f32       : >d:type, a:type, b:type
min#float      .type=f64                                     : >d:type, a:type, b:type
max#float      .ftz? .nan=NaN? .type=f32 : >d:type, a:type, b:type, c:type?
max#float      .ftz? .nan=NaN? .xorsign .abs .type=f32       : >d:type, a:type, b:type
max#float      .type=f64                                     : >d:type, a:type, b:type
rcp            .mode=approx|<round> .ftz? .type=f32          : >d:type, a:type
rcp            .mode=<round> .type=f64                       : >d:type, a:type
rcp            .mode=approx .ftz .type=f64                   : >d:type, a:type
sqrt           .mode=approx|<round> .ftz? .type=f32          : >d:type, a:type
sqrt           .mode=<round> .type=f64                       : >d:type, a:type
rsqrt          .approx .ftz? .type=f32|f64                   : >d:type, a:type
sin            .approx .ftz? .type=f32                       : >d:type, a:type
cos            .approx .ftz? .type=f32                       : >d:type, a:type
lg2            .approx .ftz? .type=f32                       : >d:type, a:type
ex2            .approx .ftz? .type=f32                       : >d:type, a:type
tanh           .approx .type=f32                             : >d:type, a:type
; 9.7.4 half precision
add#half       .rnd=rn? .ftz? .sat? .type=f16|f16x2          : >d:type, a:type, b:type
add#half       .rnd=rn? .type=bf16|bf16x2                    : >d:type, a:type, b:type
sub#half       .rnd=rn? .ftz? .sat? .type=f16|f16x2          : >d:type, a:type, b:type
sub#half       .rnd=rn? .type=bf16|bf16x2                    : >d:type, a:type, b:type
mul#half       .rnd=rn? .ftz? .sat? .type=f16|f16x2          : >d:type, a:type, b:type
mul#half       .rnd=rn? .type=bf16|bf16x2                    : >d:type, a:type, b:type
fma#half       .rnd=rn .ftz? .sat? .type=f16|f16x2           : >d:type, a:type, b:type, c:type
fma#half       .rnd=rn .ftz? .relu .type=f16|f16x2           : >d:type, a:type, b:type, c:type
fma#half       .rnd=rn .relu? .type=bf16|bf16x2              : >d:type, a:type, b:type, c:type
fma#half       .rnd=rn .oob .relu? .type=f16|f16x2|bf16|bf16x2 : >d:type, a:type, b:type, c:type
abs#half       .ftz? .type=f16|f16x2                         : >d:type, a:type
abs#half       .type=bf16|bf16x2                             : >d:type, a:type
neg#half       .ftz? .type=f16|f16x2                         : >d:type, a:type
neg#half       .type=bf16|bf16x2                             : >d:type, a:type
min#half       .ftz? .nan=NaN? .type=f16|f16x2 : >d:type, a:type, b:type
min#half       .ftz? .nan=NaN? .xorsign .abs .type=f16|f16x2 : >d:type, a:type, b:type
min#half       .nan=NaN? .type=bf16|bf16x2 : >d:type, a:type, b:type
min#half       .nan=NaN? .xorsign .abs .type=bf16|bf16x2 : >d:type, a:type, b:type
max#half       .ftz? .nan=NaN? .type=f16|f16x2 : >d:type, a:type, b:type
max#half       .ftz? .nan=NaN? .xorsign .abs .type=f16|f16x2 : >d:type, a:type, b:type
max#half       .nan=NaN? .type=bf16|bf16x2 : >d:type, a:type, b:type
max#half       .nan=NaN? .xorsign .abs .type=bf16|bf16x2 : >d:type, a:type, b:type
tanh           .approx .type=f16|f16x2|bf16|bf16x2           : >d:type, a:type
ex2            .approx .type=f16|f16x2                       : >d:type, a:type
ex2            .approx .ftz .type=bf16|bf16x2                : >d:type, a:type
; 9.7.5 mixed precision
add#mixed      .rnd=<round>? .sat? .type=f32 .atype=f16|bf16 : >d:type, a:atype, b:type
sub#mixed      .rnd=<round>? .sat? .type=f32 .atype=f16|bf16 : >d:type, a:atype, b:type
fma#mixed      .rnd=<round> .sat? .type=f32 .atype=f16|bf16  : >d:type, a:atype, b:atype, c:type
; 9.7.6 comparison and selection, 9.7.7 the same in half precision
set            .cmp=<compare> .ftz? .dtype=u32|s32|f32 .type=<scalar> : >d:dtype, a:type, b:type
set            .cmp=<compare> .bool=and|or|xor .ftz? .dtype=u32|s32|f32 .type=<scalar> \
               : >d:dtype, a:type, b:type, c:pred
set            .cmp=<compare> .ftz? .dtype=f16|bf16|u16|s16|u32|s32 .type=f16|bf16 : >d:dtype, a:type, b:type
set            .cmp=<compare> .ftz? .dtype=f16x2|bf16x2|u32|s32 .type=f16x2|bf16x2 : >d:dtype, a:type, b:type
setp           .cmp=<compare> .ftz? .type=<scalar>|f16|bf16  : >p|q:pred, a:type, b:type
setp           .cmp=<compare> .bool=and|or|xor .ftz? .type=<scalar>|f16|bf16 : >p|q:pred, a:type, b:type, c:pred
setp           .cmp=<compare> .ftz? .type=f16x2|bf16x2       : >p|q:pred, a:type, b:type
setp           .cmp=<compare> .bool=and|or|xor .ftz? .type=f16x2|bf16x2 : >p|q:pred, a:type, b:type, c:pred
selp           .type=<scalar>                                : >d:type, a:type, b:type, c:pred
slct           .dtype=<scalar> .ctype=s32                    : >d:dtype, a:dtype, b:dtype, c:ctype
slct           .ftz? .dtype=<scalar> .ctype=f32              : >d:dtype, a:dtype, b:dtype, c:ctype
; 9.7.8 logic and shift
and            .type=pred|<bits>                             : >d:type, a:type, b:type
or             .type=pred|<bits>                             : >d:type, a:type, b:type
xor            .type=pred|<bits>                             : >d:type, a:type, b:type
not            .type=pred|<bits>                             : >d:type, a:type
cnot           .type=<bits>                                  : >d:type, a:type
lop3           .type=b32                                     : >d:type, a:type, b:type, c:type, lut:imm
lop3#pred      .bool=or|and .type=b32                        : >d|p:type, a:type, b:type, c:type, lut:imm, q:pred
shf            .dir=l|r .mode=clamp|wrap .type=b32           : >d:type, a:type, b:type, c:u32
shl            .type=<bits>                                  : >d:type, a:type, b:u32
shr            .type=<bits>|<int>                            : >d:type, a:type, b:u32
"""
)
