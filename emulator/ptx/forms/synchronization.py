# SPDX-License-Identifier: Apache-2.0
"""Barriers, fences, warp-wide exchange, mbarriers, grid dependencies and launch control (ISA 9.7.9.6, 9.7.13)."""

from emulator.ptx.grammar import parse_table

FORMS = parse_table(
    """
; 9.7.13.1 to 9.7.13.3
bar.sync                                                     : id:u32, threads:u32?
bar.arrive                                                   : id:u32, threads:u32
bar.cta.sync                                                 : id:u32, threads:u32?
bar.cta.arrive                                               : id:u32, threads:u32
bar.red            .op=popc .type=u32                        : >d:type, id:u32, threads:u32?, a:pred
bar.red            .op=and|or .type=pred                     : >d:type, id:u32, threads:u32?, a:pred
bar.cta.red        .op=popc .type=u32                        : >d:type, id:u32, threads:u32?, a:pred
bar.cta.red        .op=and|or .type=pred                     : >d:type, id:u32, threads:u32?, a:pred
barrier.sync       .aligned?                                 : id:u32, threads:u32?
barrier.arrive     .aligned?                                 : id:u32, threads:u32
barrier.red        .op=popc .aligned? .type=u32              : >d:type, id:u32, threads:u32?, a:pred
barrier.red        .op=and|or .aligned? .type=pred           : >d:type, id:u32, threads:u32?, a:pred
barrier.cta.sync   .aligned?                                 : id:u32, threads:u32?
barrier.cta.arrive .aligned?                                 : id:u32, threads:u32
barrier.cta.red    .op=popc .aligned? .type=u32              : >d:type, id:u32, threads:u32?, a:pred
barrier.cta.red    .op=and|or .aligned? .type=pred           : >d:type, id:u32, threads:u32?, a:pred
bar.warp.sync                                                : mask:b32
barrier.cluster.arrive .sem=release|relaxed? .aligned?       :
barrier.cluster.wait   .sem=acquire? .aligned?               :
; 9.7.13.4
fence              .sem=sc|acq_rel|acquire|release? .scope=<scope>       :
fence#restrict     .sem=acquire .restrict=sync_restrict::shared::cluster .scope=cluster :
fence#restrict     .sem=release .restrict=sync_restrict::shared::cta .scope=cluster :
fence.mbarrier_init .sem=release .scope=cluster              :
fence.proxy.alias                                            :
fence.proxy.async  .space=global|shared::cta|shared::cluster? :
fence.proxy.tensormap::generic .sem=release .scope=<scope>   :
fence.proxy.tensormap::generic#acquire .sem=acquire .scope=<scope> : [a], size:imm
fence.proxy.async::generic .sem=acquire .restrict=sync_restrict::shared::cluster .scope=cluster :
fence.proxy.async::generic .sem=release .restrict=sync_restrict::shared::cta .scope=cluster :
membar             .level=cta|gl|sys                         :
membar.proxy       .kind=alias|async                         :
; 9.7.9.5, 9.7.9.6, 9.7.13.8 to 9.7.13.11, 9.7.13.17
shfl.sync          .mode=up|down|bfly|idx .type=b32          : >d|p:type, a:type, b:u32, c:u32, mask:b32
vote.sync          .mode=all|any|uni .type=pred              : >d:type, a:pred, mask:b32
vote.sync          .mode=ballot .type=b32                    : >d:type, a:pred, mask:b32
match.any.sync     .type=b32|b64                             : >d:b32, a:type, mask:b32
match.all.sync     .type=b32|b64                             : >d|p:b32, a:type, mask:b32
activemask         .type=b32                                 : >d:type
redux.sync         .op=add|min|max .type=u32|s32             : >d:type, a:type, mask:b32
redux.sync         .op=and|or|xor .type=b32                  : >d:type, a:type, mask:b32
redux.sync         .op=min|max .abs? .nan=NaN? .type=f32     : >d:type, a:type, mask:b32
elect.sync                                                   : >d|p:b32, mask:b32
; 9.7.13.12, 9.7.13.13
griddepcontrol.launch_dependents                             :
griddepcontrol.wait                                          :
; 9.7.13.15
mbarrier.init      .space=shared::cta|shared? .b64           : [mbar:space], count:u32
mbarrier.inval     .space=shared::cta|shared? .b64           : [mbar:space]
mbarrier.expect_tx .sem=relaxed? .scope=cta|cluster? .space=<shared>? .b64 : [mbar:space], bytes:u32
mbarrier.complete_tx .sem=relaxed? .scope=cta|cluster? .space=<shared>? .b64 : [mbar:space], bytes:u32
mbarrier.arrive    .sem=release|relaxed? .scope=cta|cluster? .space=<shared>? .b64 \
                   : >state:b64?, [mbar:space], count:u32?
mbarrier.arrive.expect_tx .sem=release|relaxed? .scope=cta|cluster? .space=<shared>? .b64 \
                   : >state:b64?, [mbar:space], bytes:u32
mbarrier.arrive.noComplete .sem=release? .scope=cta? .space=shared::cta|shared? .b64 \
                   : >state:b64, [mbar:space], count:u32
mbarrier.arrive_drop .sem=release|relaxed? .scope=cta|cluster? .space=<shared>? .b64 \
                   : >state:b64?, [mbar:space], count:u32?
mbarrier.arrive_drop.expect_tx .sem=release|relaxed? .scope=cta|cluster? .space=<shared>? .b64 \
                   : >state:b64?, [mbar:space], bytes:u32
mbarrier.arrive_drop.noComplete .sem=release? .scope=cta? .space=shared::cta|shared? .b64 \
                   : >state:b64, [mbar:space], count:u32
mbarrier.test_wait .sem=acquire|relaxed? .scope=cta|cluster? .space=shared::cta|shared? .b64 \
                   : >p:pred, [mbar:space], state:b64
mbarrier.test_wait.parity .sem=acquire|relaxed? .scope=cta|cluster? .space=shared::cta|shared? .b64 \
                   : >p:pred, [mbar:space], phase:b32
mbarrier.try_wait  .sem=acquire|relaxed? .scope=cta|cluster? .space=shared::cta|shared? .b64 \
                   : >p:pred, [mbar:space], state:b64, ns:u32?
mbarrier.try_wait.parity .sem=acquire|relaxed? .scope=cta|cluster? .space=shared::cta|shared? .b64 \
                   : >p:pred, [mbar:space], phase:b32, ns:u32?
mbarrier.pending_count .b64                                  : >count:u32, state:b64
; 9.7.13.18
clusterlaunchcontrol.try_cancel .async .space=shared::cta? .mbarrier::complete_tx::bytes \
                   .multicast=multicast::cluster::all? .b128 : [d:space], [mbar:space]
clusterlaunchcontrol.query_cancel.is_canceled .pred .b128    : >p:pred, handle:b128
clusterlaunchcontrol.query_cancel.get_first_ctaid .vec=v4 .b32 .b128 : >d:b32*vec, handle:b128
clusterlaunchcontrol.query_cancel#axis .axis=get_first_ctaid::x|get_first_ctaid::y|get_first_ctaid::z .b32 .b128 \
                   : >d:b32, handle:b128
"""
)
