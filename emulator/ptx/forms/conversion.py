# SPDX-License-Identifier: Apache-2.0
"""mov, prmt, cvt and address conversions (ISA 9.7.9)."""

from emulator.ptx.grammar import parse_table

# Rows of packed conversions name operands in the order of the text: `a` is the upper half of the result.
FORMS = parse_table(
    """
; 9.7.9.3, 9.7.9.4: packing takes a vector apart or puts one together, so the other operand is one of the two
mov            .type=pred|<scalar>|f16|bf16|f16x2|bf16x2     : >d:type, a:type
mov#pack       .type=b16|b32|b64|b128|u32|u64                : >d:type, a:parts*
mov#unpack     .type=b16|b32|b64|b128|u32|u64                : >d:parts*, a:type
mov            .type=b128                                    : >d:type, a:type
mov            .vec=v2|v4 .type=<scalar>                     : >d:type*vec, a:type*vec
prmt           .type=b32 .mode=f4e|b4e|rc8|ecl|ecr|rc16?     : >d:type, a:type, b:type, c:b32
; 9.7.9.21, 9.7.9.22
cvt            .rnd=rni|rzi|rmi|rpi|<round>? .ftz? .sat? .dtype=<numbers> .atype=<numbers> : >d:dtype, a:atype
cvt            .rnd=rn|rz .relu? .satfinite? .dtype=f16|bf16 .atype=f32  : >d:dtype, a:atype
cvt            .rnd=rn|rz .satfinite .relu .dtype=f16|bf16 .atype=f32    : >d:dtype, a:atype
cvt            .rnd=rna .satfinite? .dtype=tf32 .atype=f32                   : >d:b32, a:atype
cvt            .rnd=rn|rz .satfinite? .relu? .dtype=tf32 .atype=f32      : >d:b32, a:atype
cvt#pack2      .rnd=rn|rz .relu? .satfinite? .dtype=f16x2|bf16x2 .atype=f32 : >d:dtype, a:atype, b:atype
cvt#pack2      .rnd=rn|rz .satfinite .relu .dtype=f16x2|bf16x2 .atype=f32 : >d:dtype, a:atype, b:atype
cvt#pack2rs    .rnd=rs .relu? .satfinite? .dtype=f16x2|bf16x2 .atype=f32     : >d:dtype, a:atype, b:atype, bits:b32
cvt#pack2      .rnd=rn .satfinite .relu? .dtype=<f8x2>|<f6x2> .atype=f32 : >d:b16, a:atype, b:atype
cvt#pack2f4    .rnd=rn .satfinite .relu? .dtype=e2m1x2 .atype=f32        : >d:b8, a:atype, b:atype
cvt#halves     .rnd=rn .satfinite .relu? .dtype=<f8x2>|<f6x2>|e2m1x2 .atype=f16x2|bf16x2 : >d:narrow, a:atype
cvt#widen      .rnd=rn .relu? .dtype=f16x2 .atype=<f8x2>|<f6x2>|e2m1x2   : >d:b32, a:narrow
cvt#widen      .rnd=rn .satfinite? .relu? .dtype=bf16x2 .atype=<f8x2>|<f6x2>|e2m1x2 : >d:b32, a:narrow
cvt#pack4      .rnd=rs .relu? .satfinite .dtype=e4m3x4|e5m2x4|e2m3x4|e3m2x4|e2m1x4 .atype=f32 \
               : >d:narrow, a:atype*, bits:b32
cvt#pack2      .rnd=rz|rp .satfinite? .dtype=ue8m0x2 .atype=f32          : >d:b16, a:atype, b:atype
cvt#halves     .rnd=rz|rp .satfinite? .dtype=ue8m0x2 .atype=bf16x2       : >d:b16, a:b32
cvt#widen      .rnd=rn .dtype=bf16x2 .atype=ue8m0x2                      : >d:b32, a:b16
cvt.pack       .sat .dtype=u16|s16 .atype=s32                            : >d:b32, a:atype, b:atype
cvt.pack       .sat .dtype=u2|s2|u4|s4|u8|s8 .atype=s32 .ctype=b32       : >d:b32, a:atype, b:atype, c:ctype
; 9.7.9.19, 9.7.9.20, 9.7.9.23, 9.7.9.24
cvta           .space=const|global|local|<shared>|param::entry|param .type=u32|u64    : >p:type, a:type
cvta#to        .to .space=const|global|local|<shared>|param::entry|param .type=u32|u64 : >p:type, a:type
isspacep       .space=const|global|local|<shared>|param::entry|param     : >p:pred, a:u64
mapa           .space=shared::cluster? .type=u32|u64                     : >d:type, a:type, b:u32
getctarank     .space=shared::cluster? .type=u32|u64                     : >d:u32, a:type
""",
    {
        "numbers": "u8|u16|u32|u64|s8|s16|s32|s64|bf16|f16|f32|f64",
        "f8x2": "e4m3x2|e5m2x2",
        "f6x2": "e2m3x2|e3m2x2",
    },
)
