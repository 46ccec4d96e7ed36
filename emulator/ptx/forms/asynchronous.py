# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies, tensor maps and their groups (ISA 9.7.9.25 to 9.7.9.28)."""

from emulator.ptx.grammar import parse_table

FORMS = parse_table(
    """
; 9.7.9.25.3: groups are counted for each thread
cp.async       .cache=ca|cg .shared=<shared> .global .hint=L2::cache_hint? .fetch=L2::64B|L2::128B|L2::256B? \
               : [d:shared], [a:global], size:imm, src:b32?, policy:b64?hint
cp.async#ignore .cache=ca|cg .shared=<shared> .global .hint=L2::cache_hint? .fetch=L2::64B|L2::128B|L2::256B? \
               : [d:shared], [a:global], size:imm, ignore:pred, policy:b64?hint
cp.async.commit_group                                        :
cp.async.wait_group                                          : n:imm
cp.async.wait_all                                            :
cp.async.mbarrier.arrive .noinc? .space=<shared>? .b64       : [mbar:space]
; 9.7.9.25.4
cp.async.bulk#load .dst=shared::cluster|shared::cta .src=global .mbarrier::complete_tx::bytes \
               .multicast=multicast::cluster? .hint=L2::cache_hint? .ignore_oob? \
 \
                   : [d:dst], [a:src], size:b32, left:b32?ignore_oob, right:b32?ignore_oob, [mbar:shared], \
               mask:b16?multicast, \
               policy:b64?hint
cp.async.bulk#cluster .dst=shared::cluster .src=shared::cta .mbarrier::complete_tx::bytes \
               : [d:dst], [a:src], size:b32, [mbar:dst]
cp.async.bulk#store .dst=global .src=shared::cta .bulk_group .hint=L2::cache_hint? .cp_mask? \
               : [d:dst], [a:src], size:b32, policy:b64?hint, bytes:b16?cp_mask
cp.reduce.async.bulk#cluster .dst=shared::cluster .src=shared::cta .mbarrier::complete_tx::bytes .op=and|or|xor \
               .type=b32 : [d:dst], [a:src], size:b32, [mbar:dst]
cp.reduce.async.bulk#cluster .dst=shared::cluster .src=shared::cta .mbarrier::complete_tx::bytes .op=add \
               .type=u32|s32|u64 : [d:dst], [a:src], size:b32, [mbar:dst]
cp.reduce.async.bulk#cluster .dst=shared::cluster .src=shared::cta .mbarrier::complete_tx::bytes .op=inc|dec \
               .type=u32 : [d:dst], [a:src], size:b32, [mbar:dst]
cp.reduce.async.bulk#cluster .dst=shared::cluster .src=shared::cta .mbarrier::complete_tx::bytes .op=min|max \
               .type=u32|s32 : [d:dst], [a:src], size:b32, [mbar:dst]
cp.reduce.async.bulk#store .dst=global .src=shared::cta .bulk_group .hint=L2::cache_hint? .op=and|or|xor \
               .type=b32|b64 : [d:dst], [a:src], size:b32, policy:b64?hint
cp.reduce.async.bulk#store .dst=global .src=shared::cta .bulk_group .hint=L2::cache_hint? .op=add \
               .type=u32|s32|u64|f32|f64 : [d:dst], [a:src], size:b32, policy:b64?hint
cp.reduce.async.bulk#store .dst=global .src=shared::cta .bulk_group .hint=L2::cache_hint? .op=add .noftz \
               .type=f16|bf16 : [d:dst], [a:src], size:b32, policy:b64?hint
cp.reduce.async.bulk#store .dst=global .src=shared::cta .bulk_group .hint=L2::cache_hint? .op=inc|dec \
               .type=u32 : [d:dst], [a:src], size:b32, policy:b64?hint
cp.reduce.async.bulk#store .dst=global .src=shared::cta .bulk_group .hint=L2::cache_hint? .op=min|max \
               .type=u32|s32|u64|s64|f16|bf16 : [d:dst], [a:src], size:b32, policy:b64?hint
cp.async.bulk.prefetch .L2 .src=global .hint=L2::cache_hint? : [a:src], size:b32, policy:b64?hint
; 9.7.9.27: tensors
cp.async.bulk.tensor#load .dim=<dims> .dst=shared::cluster|shared::cta .src=global .mode=tile|tile::gather4? \
               .mbarrier::complete_tx::bytes .multicast=multicast::cluster? .group=<group>? .hint=L2::cache_hint? \
               : [d:dst], [map:tensor], [mbar:shared], mask:b16?multicast, policy:b64?hint
; the compiler prints these two the other way round
cp.async.bulk.tensor#load .dim=<dims> .dst=shared::cluster|shared::cta .src=global .mode=tile|tile::gather4? \
               .mbarrier::complete_tx::bytes .multicast=multicast::cluster? .hint=L2::cache_hint .group=<group> \
               : [d:dst], [map:tensor], [mbar:shared], mask:b16?multicast, policy:b64?hint
cp.async.bulk.tensor#store .dim=<dims> .dst=global .src=shared::cta .mode=tile|tile::scatter4? .bulk_group \
               .hint=L2::cache_hint? : [map:tensor], [a:src], policy:b64?hint
cp.reduce.async.bulk.tensor .dim=<dims> .dst=global .src=shared::cta .op=<ops> .mode=tile? .bulk_group \
               .hint=L2::cache_hint? : [map:tensor], [a:src], policy:b64?hint
cp.async.bulk.prefetch.tensor .dim=<dims> .L2 .src=global .mode=tile|tile::gather4? .hint=L2::cache_hint? \
               : [map:tensor], policy:b64?hint
; 9.7.9.25.2: bulk groups are counted for each thread, too
cp.async.bulk.commit_group                                   :
cp.async.bulk.wait_group .read?                              : n:imm
; 9.7.9.28
tensormap.replace .mode=tile .field=global_address .space=global|shared::cta? .b1024 .type=b64 : [a:space], value:type
tensormap.replace .mode=tile .field=rank .space=global|shared::cta? .b1024 .type=b32 : [a:space], value:type
tensormap.replace .mode=tile .field=box_dim|global_dim|element_stride .space=global|shared::cta? .b1024 .type=b32 \
               : [a:space], ord:imm, value:type
tensormap.replace .mode=tile .field=global_stride .space=global|shared::cta? .b1024 .type=b64 \
                   : [a:space], ord:imm, value:type
tensormap.replace .mode=tile .field=elemtype|interleave_layout|swizzle_mode|swizzle_atomicity|fill_mode \
               .space=global|shared::cta? .b1024 .type=b32 : [a:space], value:imm
tensormap.cp_fenceproxy .dst=global .src=<shared> .tensormap::generic .sem=release .scope=<scope> .sync .aligned \
               : [d:dst], [a:src], size:imm
""",
    {"ops": "and|or|xor|add|inc|dec|min|max", "dims": "1d|2d|3d|4d|5d"},
)
