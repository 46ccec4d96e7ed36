# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions: mma, wgmma and tcgen05 (ISA 9.7.14 to 9.7.16)."""

from emulator.ptx.grammar import parse_table

M64 = "|".join(f"m64n{n}" for n in range(8, 257, 8))
FORMS = parse_table(
    """
; 9.7.14.5: a warp's
ldmatrix       .sync .aligned .shape=m8n8 .num=x1|x2|x4 .trans? .space=shared::cta|shared? .type=b16 \
               : >d:b32*, [a:space]
ldmatrix       .sync .aligned .shape=m16n16 .num=x1|x2 .trans .space=shared::cta|shared? .type=b8 : >d:b32*, [a:space]
ldmatrix       .sync .aligned .shape=m8n16 .num=x1|x2|x4 .space=shared::cta|shared? .type=b8x16 \
               .from=b6x16_p32|b4x16_p64 \
               : >d:b32*, [a:space]
ldmatrix       .sync .aligned .shape=m16n16 .num=x1|x2 .trans .space=shared::cta|shared? .type=b8x16 \
               .from=b6x16_p32|b4x16_p64 : >d:b32*, [a:space]
stmatrix       .sync .aligned .shape=m8n8 .num=x1|x2|x4 .trans? .space=shared::cta|shared? .type=b16 : [a:space], b:b32*
stmatrix       .sync .aligned .num=x1|x2|x4 .shape=m8n8 .trans? .space=shared::cta|shared? .type=b16 : [a:space], b:b32*
stmatrix       .sync .aligned .shape=m16n8 .num=x1|x2|x4 .trans .space=shared::cta|shared? .type=b8 : [a:space], b:b32*
movmatrix      .sync .aligned .shape=m8n8 .trans .type=b16                    : >d:b32, a:b32
mma            .sync .aligned .shape=m16n8k8|m16n8k16 .row .col .dtype=f16|f32 .atype=f16 .btype=f16 .ctype=f16|f32 \
               : >d:b32*, a:b32*, b:b32*, c:b32*
mma            .sync .aligned .shape=m16n8k8|m16n8k16 .row .col .dtype=f32 .atype=bf16 .btype=bf16 .ctype=f32 \
               : >d:b32*, a:b32*, b:b32*, c:b32*
mma            .sync .aligned .shape=m16n8k4|m16n8k8 .row .col .dtype=f32 .atype=tf32 .btype=tf32 .ctype=f32 \
               : >d:b32*, a:b32*, b:b32*, c:b32*
mma            .sync .aligned .shape=m16n8k16|m16n8k32 .row .col .dtype=f16|f32 .atype=<f8> .btype=<f8> .ctype=f16|f32 \
               : >d:b32*, a:b32*, b:b32*, c:b32*
mma            .sync .aligned .shape=m16n8k32 .row .col .kind::f8f6f4 .dtype=f16|f32 .atype=<f8>|<f6>|e2m1 \
               .btype=<f8>|<f6>|e2m1 .ctype=f16|f32 : >d:b32*, a:b32*, b:b32*, c:b32*
mma            .sync .aligned .shape=m16n8k16|m16n8k32 .row .col .satfinite? .dtype=s32 .atype=u8|s8 .btype=u8|s8 \
               .ctype=s32 \
               : >d:b32*, a:b32*, b:b32*, c:b32*
; 9.7.15: a warpgroup's. `a` lies in registers or behind a descriptor; scales and transpositions are constants
wgmma.fence    .sync .aligned                                                 :
wgmma.commit_group .sync .aligned                                             :
wgmma.wait_group .sync .aligned                                               : n:imm
wgmma.mma_async#ss .sync .aligned .shape=<k16> .dtype=f16|f32 .atype=f16 .btype=f16 \
               : +d:b32*, a:b64, b:b64, scale_d:pred, neg_a:imm, neg_b:imm, trans_a:imm, trans_b:imm
wgmma.mma_async#rs .sync .aligned .shape=<k16> .dtype=f16|f32 .atype=f16 .btype=f16 \
               : +d:b32*, a:b32*, b:b64, scale_d:pred, neg_a:imm, neg_b:imm, trans_b:imm
wgmma.mma_async#ss .sync .aligned .shape=<k16> .dtype=f32 .atype=bf16 .btype=bf16 \
               : +d:b32*, a:b64, b:b64, scale_d:pred, neg_a:imm, neg_b:imm, trans_a:imm, trans_b:imm
wgmma.mma_async#rs .sync .aligned .shape=<k16> .dtype=f32 .atype=bf16 .btype=bf16 \
               : +d:b32*, a:b32*, b:b64, scale_d:pred, neg_a:imm, neg_b:imm, trans_b:imm
wgmma.mma_async#ss .sync .aligned .shape=<k8> .dtype=f32 .atype=tf32 .btype=tf32 \
               : +d:b32*, a:b64, b:b64, scale_d:pred, neg_a:imm, neg_b:imm
wgmma.mma_async#rs .sync .aligned .shape=<k8> .dtype=f32 .atype=tf32 .btype=tf32 \
               : +d:b32*, a:b32*, b:b64, scale_d:pred, neg_a:imm, neg_b:imm
wgmma.mma_async#ss .sync .aligned .shape=<k32> .dtype=f16|f32 .atype=<f8> .btype=<f8> \
               : +d:b32*, a:b64, b:b64, scale_d:pred, neg_a:imm, neg_b:imm
wgmma.mma_async#rs .sync .aligned .shape=<k32> .dtype=f16|f32 .atype=<f8> .btype=<f8> \
               : +d:b32*, a:b32*, b:b64, scale_d:pred, neg_a:imm, neg_b:imm
wgmma.mma_async#ss .sync .aligned .shape=<k32> .satfinite? .dtype=s32 .atype=s8|u8 .btype=s8|u8 \
               : +d:b32*, a:b64, b:b64, scale_d:pred
wgmma.mma_async#rs .sync .aligned .shape=<k32> .satfinite? .dtype=s32 .atype=s8|u8 .btype=s8|u8 \
               : +d:b32*, a:b32*, b:b64, scale_d:pred
; 9.7.16.7: tensor memory
tcgen05.alloc  .group=<group> .sync .aligned .space=shared::cta? .b32         : [d:space], columns:u32
tcgen05.dealloc .group=<group> .sync .aligned .b32                            : a:b32, columns:u32
tcgen05.relinquish_alloc_permit .group=<group> .sync .aligned                 :
; 9.7.16.8
tcgen05.ld     .sync .aligned .shape=32x32b|16x64b|16x128b|16x256b .num=<nums> .pack=pack::16b? .b32 : >d:b32*, [a:tmem]
tcgen05.ld     .sync .aligned .shape=16x32bx2 .num=<nums> .pack=pack::16b? .b32 : >d:b32*, [a:tmem], split:imm
tcgen05.ld.red .sync .aligned .shape=32x32b .num=<nums> .op=min|max .abs? .nan=NaN? .type=f32|u32|s32 \
               : >d:b32*, >r:b32, [a:tmem]
tcgen05.ld.red .sync .aligned .shape=16x32bx2 .num=<nums> .op=min|max .abs? .nan=NaN? .type=f32|u32|s32 \
               : >d:b32*, >r:b32, [a:tmem], split:imm
tcgen05.st     .sync .aligned .shape=32x32b|16x64b|16x128b|16x256b .num=<nums> .unpack=unpack::16b? .b32 \
               : [a:tmem], b:b32*
tcgen05.st     .sync .aligned .shape=16x32bx2 .num=<nums> .unpack=unpack::16b? .b32 : [a:tmem], split:imm, b:b32*
tcgen05.wait::ld .sync .aligned                                               :
tcgen05.wait::st .sync .aligned                                               :
; 9.7.16.9
tcgen05.cp     .group=<group> .shape=128x256b|4x256b|128x128b .to=b8x16? .from=b6x16_p32|b4x16_p64? : [d:tmem], a:b64
tcgen05.cp     .group=<group> .shape=64x128b .multicast=warpx2::02_13|warpx2::01_23 .to=b8x16? \
               .from=b6x16_p32|b4x16_p64? \
               : [d:tmem], a:b64
tcgen05.cp     .group=<group> .shape=32x128b .multicast=warpx4 .to=b8x16? .from=b6x16_p32|b4x16_p64? : [d:tmem], a:b64
tcgen05.shift  .group=<group> .down                                           : [a:tmem]
; 9.7.16.10: `a` lies in tensor memory or behind a descriptor
tcgen05.mma#ss .group=<group> .kind=kind::f16|kind::tf32 .collector=<collector>? \
               : [d:tmem], a:b64, b:b64, idesc:b32, lanes:b32*?, enable_d:pred, scale_d:imm?
tcgen05.mma#ts .group=<group> .kind=kind::f16|kind::tf32 .ashift? .collector=<collector>? \
               : [d:tmem], [a:tmem], b:b64, idesc:b32, lanes:b32*?, enable_d:pred, scale_d:imm?
tcgen05.mma#ss .group=<group> .kind=kind::f8f6f4|kind::i8 .collector=<collector>? \
               : [d:tmem], a:b64, b:b64, idesc:b32, lanes:b32*?, enable_d:pred
tcgen05.mma#ts .group=<group> .kind=kind::f8f6f4|kind::i8 .ashift? .collector=<collector>? \
               : [d:tmem], [a:tmem], b:b64, idesc:b32, lanes:b32*?, enable_d:pred
tcgen05.mma#scaled_ss .group=<group> .kind=<scaled> .block_scale .size=<sizes>? .collector=<collector>? \
               : [d:tmem], a:b64, b:b64, idesc:b32, [scale_a:tmem], [scale_b:tmem], enable_d:pred
tcgen05.mma#scaled_ts .group=<group> .kind=<scaled> .block_scale .size=<sizes>? .ashift? .collector=<collector>? \
               : [d:tmem], [a:tmem], b:b64, idesc:b32, [scale_a:tmem], [scale_b:tmem], enable_d:pred
; 9.7.16.11, 9.7.16.12
tcgen05.fence::before_thread_sync                                             :
tcgen05.fence::after_thread_sync                                              :
tcgen05.commit .group=<group> .mbarrier::arrive::one .space=shared::cluster? .multicast=multicast::cluster? .b64 \
               : [mbar:space], mask:b16?multicast
""",
    {
        "k8": "|".join(f"{shape}k8" for shape in M64.split("|")),
        "k16": "|".join(f"{shape}k16" for shape in M64.split("|")),
        "k32": "|".join(f"{shape}k32" for shape in M64.split("|")),
        "f8": "e4m3|e5m2",
        "f6": "e2m3|e3m2",
        "nums": "x1|x2|x4|x8|x16|x32|x64|x128",
        "collector": "collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard",
        "scaled": "kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4",
        "sizes": "scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32",
    },
)
