# SPDX-License-Identifier: Apache-2.0
"""Loads, atomics, asynchronous copies, clusters and barriers (PTX ISA 9.2, 9.7.9, 9.7.13)."""

import numpy as np
from micro_case import Array, Bits, Case, Result, Rule, bits, pick
from micro_lanes import size_of, table

BLOCK = 128
# %r7 is a thread's word of shared memory, %r4 an mbarrier, %p3 holds in thread 0; %rd4 is its word
# of p0, %rd5 of `out`.
START = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p3, %r1, 0;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 16384;
shl.b32 %r6, %r1, 2;
add.s32 %r7, %r3, %r6;
ld.param.b64 %rd2, [out];
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd5, %rd2, %rd3;
"""
INPUT = "ld.param.b64 %rd1, [p0];\nadd.s64 %rd4, %rd1, %rd3;\n"
SHARED = 16384 + 64
SYNC = "bar.sync 0;\n"
INIT = "@%p3 mbarrier.init.shared.b64 [%r4], {count};\nfence.mbarrier_init.release.cluster;\n"
# A chip must not hang where it differs: it gives up after a while, and results differ.
WAIT = """
mov.u32 %r290, 0;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@%p2 bra ARRIVED;
add.s32 %r290, %r290, 1;
setp.lt.u32 %p2, %r290, 2000;
@%p2 bra AGAIN;
ARRIVED:
"""
CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


def words(count: int, seed: int) -> Array:
    return bits(-(-count // 2), seed).view(np.uint32)[:count].copy()


def result(label: str, content: "Array | int", rule: Rule | None = None) -> Result:
    """Zeros where a number says how many words."""
    return Result(label, np.zeros(content, np.uint32) if isinstance(content, int) else content, rule or Bits())


# Loads


def loads() -> list[Case]:
    """Each thread loads 16 bytes in every way, from global and from shared memory, and stores 32-bit registers."""
    found = []
    content = words(BLOCK * 4, 1)
    for space in ("global", "shared"):
        address = "%r20" if space == "shared" else "%rd6"
        lines = [
            f"ld.{space}.{kind} %r{30 + index}, [{address}+{4 * (index % 4)}];"
            for index, kind in enumerate(("u8", "s8", "b8", "u16", "s16", "b16", "b32", "u32"))
        ]
        lines += [
            f"ld.{space}.s8 %rs1, [{address}+1];",
            "cvt.u32.u16 %r38, %rs1;",
            f"ld.{space}.s16 %rd10, [{address}+2];",
            "mov.b64 {%r39, %r40}, %rd10;",
            f"ld.{space}.v2.b16 {{%rs2, %rs3}}, [{address}+4];",
            "mov.b32 %r41, {%rs3, %rs2};",
            f"ld.{space}.v4.s8 {{%r42, %r43, %r44, %r45}}, [{address}+8];",
            f"ld.{space}.v2.b64 {{%rd11, %rd12}}, [{address}];",
            "xor.b64 %rd11, %rd11, %rd12;",
            "mov.b64 {%r46, %r47}, %rd11;",
            f"ld.{space}.v4.b32 {{%r48, %r49, %r50, %r51}}, [{address}];",
            f"ld.{space}.b128 %rq1, [{address}];",
            "mov.b128 {%rd13, %rd14}, %rq1;",
            "mov.b64 {%r52, %r53}, %rd14;",
        ]
        body = START + INPUT + "mul.wide.u32 %rd6, %r1, 16;\nadd.s64 %rd6, %rd6, %rd1;\nshl.b32 %r20, %r1, 4;\n"
        body += "add.s32 %r20, %r20, %r3;\nld.global.v4.b32 {%r21, %r22, %r23, %r24}, [%rd6];\n"
        body += "st.shared.v4.b32 [%r20], {%r21, %r22, %r23, %r24};\n" if space == "shared" else ""
        body += "\n".join(lines) + "\n"
        body += "".join(f"st.global.b32 [%rd5+{512 * index}], %r{30 + index};\n" for index in range(24))
        found.append(Case(f"load/{space}", body, (content,), (result(f"ld.{space}", 24 * BLOCK),), shared=SHARED))
    body = START + INPUT + "ld.global.b32 %r20, [%rd4];\nshl.b32 %r21, %r1, 4;\nadd.s32 %r22, %r3, %r21;\n"
    body += (
        "st.shared.v4.b32 [%r22], {%r1, %r1, %r1, %r1};\nst.shared.b8 [%r22], %r20;\nst.shared.b16 [%r22+2], %r20;\n"
    )
    body += (
        "cvt.u16.u32 %rs1, %r20;\nst.shared.v2.b8 [%r22+4], {%rs1, %rs1};\nst.shared.v2.b16 [%r22+8], {%rs1, %rs1};\n"
    )
    body += (
        "ld.shared.v4.b32 {%r23, %r24, %r25, %r26}, [%r22];\nmul.wide.u32 %rd6, %r1, 16;\nadd.s64 %rd6, %rd6, %rd2;\n"
    )
    body += "st.global.v4.b32 [%rd6], {%r23, %r24, %r25, %r26};\n"
    found.append(Case("load/stores", body, (words(BLOCK, 2),), (result("st.shared", 4 * BLOCK),), shared=SHARED))
    return found


# Atomics

ATOMS = [
    *((op, kind) for op in ("and", "or", "xor", "exch", "cas") for kind in ("b32", "b64")),
    ("cas", "b16"),
    *(("add", kind) for kind in ("u32", "s32", "u64", "f32", "f64")),
    *((op, kind) for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *((op, "u32") for op in ("inc", "dec")),
    *(("add.noftz", kind) for kind in ("f16", "f16x2", "bf16", "bf16x2")),
]
VECTORS = [
    ("add", "v2", "f32"),
    ("add", "v4", "f32"),
    *(
        (f"{op}.noftz", vec, kind)
        for op in ("add", "min", "max")
        for vec, kind in (("v2", "f16"), ("v4", "bf16"), ("v8", "f16"), ("v2", "f16x2"), ("v4", "bf16x2"))
    ),
]


def atom_case(op: str, kind: str, space: str, returns: bool) -> Case:
    """Every thread has a word of its own: what is left, and what was before."""
    size = size_of(kind)
    count = 256
    # Of compare-and-swap a half of the words is what is compared with.
    old, new, third = (table(kind, slot, 2, count) for slot in (0, 1, 1))
    if op == "cas":
        third = new[::-1].copy()
        new = np.where(np.arange(count) % 2, old, new)
    register = {2: "%rs", 4: "%r", 8: "%rd"}[size]
    body = "mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmad.lo.s32 %r8, %r2, 128, %r1;\nld.param.b64 %rd2, [out];\n"
    body += f"mul.wide.u32 %rd3, %r8, {size};\nadd.s64 %rd5, %rd2, %rd3;\n"
    for slot, number in ((0, 21), (1, 22)):
        body += f"ld.param.b64 %rd4, [p{slot}];\nadd.s64 %rd4, %rd4, %rd3;\n"
        body += f"ld.global.b{8 * size} {register}{number}, [%rd4];\n"
    address = "%rd5"
    if space == "shared":
        body += (
            f"mov.b32 %r3, shared;\nmad.lo.s32 %r9, %r1, {size}, %r3;\nld.global.b{8 * size} {register}23, [%rd5];\n"
        )
        body += f"st.shared.b{8 * size} [%r9], {register}23;\n"
        address = "%r9"
    name = f"{'atom' if returns else 'red'}.{space}.{op}.{kind}"
    third_operand = f", {register}22" if op == "cas" else ""
    rule = Bits(nan=kind) if kind[0] in "bf" and "f" in kind else Bits()
    results = [Result(f"{name} memory", old.astype(f"u{size}"), rule)]
    if returns:
        body += f"{name} {register}24, [{address}], {register}21{third_operand};\n"
        body += f"st.global.b{8 * size} [%rd5+{count * size}], {register}24;\n"
        results.append(Result(f"{name} old", np.zeros(count, f"u{size}")))
    else:
        body += f"{name} [{address}], {register}21{third_operand};\n"
    if space == "shared":
        body += f"ld.shared.b{8 * size} {register}25, [%r9];\nst.global.b{8 * size} [%rd5], {register}25;\n"
    return Case(
        f"atomic/{name}", body, (new.astype(f"u{size}"), third.astype(f"u{size}")), tuple(results), grid=2, shared=2048
    )


def vector_atom(op: str, vec: str, kind: str, returns: bool) -> Case:
    size, count = size_of(kind), int(vec[1:])
    register = {2: "%rs", 4: "%r"}[size]
    body = START + INPUT.replace("add.s64 %rd4, %rd1, %rd3;", "")
    body += f"mul.wide.u32 %rd6, %r1, {size * count};\nadd.s64 %rd7, %rd1, %rd6;\nadd.s64 %rd8, %rd2, %rd6;\n"
    body += "".join(f"ld.global.b{8 * size} {register}{10 + index}, [%rd7+{size * index}];\n" for index in range(count))
    names = [", ".join(f"{register}{first + index}" for index in range(count)) for first in (20, 10)]
    text = f"{'atom' if returns else 'red'}.global.{op}.{vec}.{kind}"
    old, new = (table(kind, slot, 2, BLOCK * count) for slot in (0, 1))
    results = [Result(f"{text} memory", old, Bits(nan=kind))]
    body += f"{text} {'{' + names[0] + '}, ' if returns else ''}[%rd8], {{{names[1]}}};\n"
    if returns:
        start = BLOCK * size * count
        body += "".join(
            f"st.global.b{8 * size} [%rd8+{start + size * index}], {register}{20 + index};\n" for index in range(count)
        )
        results.append(Result(f"{text} old", np.zeros_like(old)))
    return Case(f"atomic/{text}", body, (new,), tuple(results))


def atomics() -> list[Case]:
    found = [atom_case(op, kind, space, True) for op, kind in ATOMS for space in ("global", "shared")]
    found += [
        atom_case(op, kind, space, False)
        for op, kind in ATOMS
        for space in ("global", "shared")
        if op not in ("exch", "cas")
    ]
    found += [vector_atom(op, vec, kind, returns) for op, vec, kind in VECTORS for returns in (True, False)]
    # All threads of four CTAs at one word: what is left does not depend on the order.
    body = START + INPUT + "ld.global.b32 %r10, [%rd4];\n"
    ops = ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32")
    for place, op in enumerate(ops):
        value = "1000" if op == "inc.u32" else "%r10"
        body += f"red.relaxed.gpu.global.{op} [%rd2+{4 * place}], {value};\n"
    found.append(
        Case("atomic/contended", body, (words(BLOCK, 3),), (result("red of all threads", words(8, 4)),), grid=4)
    )
    return found


# Asynchronous copies


def cp_async() -> list[Case]:
    """Each thread copies to 16 bytes of its own, over a pattern."""
    found = []
    content = words(BLOCK * 4, 7)
    start = START + "ld.param.b64 %rd1, [p0];\nmul.wide.u32 %rd3, %r1, 16;\nadd.s64 %rd4, %rd1, %rd3;\n"
    start += "add.s64 %rd5, %rd2, %rd3;\nshl.b32 %r6, %r1, 4;\nadd.s32 %r7, %r3, %r6;\n"
    start += "st.shared.v4.b32 [%r7], {0x11111111, 0x22222222, 0x33333333, 0x44444444};\n"
    end = "cp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r7];\n"
    end += "st.global.v4.b32 [%rd5], {%r8, %r9, %r10, %r11};\n"
    copies = [
        (f"cp.async.{cache}.shared.global [%r7], [%rd4], {size};", "")
        for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16))
    ]
    for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        copies.append(
            (f"cp.async.{cache}.shared.global [%r7], [%rd4], {size}, %r20;", f"rem.u32 %r20, %r1, {size + 1};\n")
        )
        copies.append(
            (
                f"cp.async.{cache}.shared.global [%r7], [%rd4], {size}, %p5;",
                "and.b32 %r20, %r1, 5;\nsetp.eq.u32 %p5, %r20, 1;\n",
            )
        )
    copies.append(("cp.async.cg.shared.global.L2::128B [%r7], [%rd4], 16;", ""))
    for index, (copy, before) in enumerate(copies):
        found.append(
            Case(
                f"cp_async/{index}",
                start + before + copy + "\n" + end,
                (content,),
                (result(copy, 4 * BLOCK),),
                shared=SHARED,
            )
        )
    body = start + INIT.format(count=BLOCK) + SYNC + "cp.async.cg.shared.global [%r7], [%rd4], 16;\n"
    body += "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];\n" + WAIT + end.partition("0;\n")[2]
    found.append(
        Case(
            "cp_async/mbarrier", body, (content,), (result("cp.async.mbarrier.arrive.noinc", 4 * BLOCK),), shared=SHARED
        )
    )
    return found


BULK_BYTES = 512
FROM_SHARED = (
    START + INPUT + "ld.global.b32 %r10, [%rd4];\nst.shared.b32 [%r7], %r10;\nfence.proxy.async;\nbar.sync 0;\n"
)
GROUP = "@%p3 cp.async.bulk.commit_group;\n@%p3 cp.async.bulk.wait_group 0;\n"
# Types of the ISA's table of reductions (9.7.9.25.4.3).
REDUCTIONS = [
    *(("add", kind) for kind in ("u32", "s32", "u64", "f32", "f64")),
    ("add.noftz", "f16"),
    ("add.noftz", "bf16"),
    *((op, kind) for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64", "f16", "bf16")),
    ("inc", "u32"),
    ("dec", "u32"),
    *((op, kind) for op in ("and", "or", "xor") for kind in ("b32", "b64")),
]


def bulk() -> list[Case]:
    found = []
    body = START + INPUT + INIT.format(count=1) + "st.shared.b32 [%r7], 7;\nfence.proxy.async;\n" + SYNC
    body += f"@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {BULK_BYTES - 64};\n"
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body += f"@%p3 {load} [%r3+16], [%rd1+32], 304, [%r4];\n@%p3 {load} [%r3+320], [%rd1], 144, [%r4];\n"
    body += WAIT + "ld.shared.b32 %r10, [%r7];\nst.global.b32 [%rd5], %r10;\n"
    found.append(Case("bulk/load", body, (words(BLOCK, 8),), (result(load, BLOCK),), shared=SHARED))
    store = "cp.async.bulk.global.shared::cta.bulk_group"
    body = FROM_SHARED + f"@%p3 {store} [%rd2+32], [%r3+16], 400;\n" + GROUP
    found.append(Case("bulk/store", body, (words(BLOCK, 9),), (result(store, words(BLOCK, 10)),), shared=SHARED))
    for op, kind in REDUCTIONS:
        size = size_of(kind)
        old, new = (table(kind, slot, 2, BULK_BYTES // size) for slot in (0, 1))
        text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind}"
        body = FROM_SHARED + f"@%p3 {text} [%rd2], [%r3], {BULK_BYTES};\n" + GROUP
        rule = Bits(nan=kind) if "f" in kind else Bits()
        found.append(Case(f"bulk/{op}_{kind}", body, (new.view(np.uint32),), (Result(text, old, rule),), shared=SHARED))
    return found


# Clusters of two CTAs. %r20 is the rank, %r23 and %r24 the other one's word and mbarrier; %rd5 this thread's word.
PAIR = """
mov.u32 %r20, %cluster_ctarank;
xor.b32 %r21, %r20, 1;
mapa.shared::cluster.u32 %r23, %r7, %r21;
mapa.shared::cluster.u32 %r24, %r4, %r21;
mad.lo.s32 %r25, %r20, 128, %r1;
mul.wide.u32 %rd3, %r25, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
ld.global.b32 %r10, [%rd4];
st.shared.b32 [%r7], %r10;
st.shared.b32 [%r7+1024], %r1;
"""


def cluster() -> list[Case]:
    found = []
    content = words(2 * BLOCK, 11)
    store_own = "ld.shared.b32 %r11, [%r7+1024];\nst.global.b32 [%rd5], %r11;\n" + CLUSTER
    arm = INIT.format(count=1) + "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {bytes};\n"

    def add(name: str, label: str, body: str, armed: int = 0, values: Array = content) -> None:
        before = START + INPUT + (arm.format(bytes=armed) if armed else "") + PAIR + "fence.proxy.async;\n" + CLUSTER
        found.append(
            Case(
                f"cluster/{name}",
                before + body,
                (values,),
                (result(label, 2 * BLOCK),),
                grid=2,
                cluster=2,
                shared=SHARED,
            )
        )

    add("load", "ld.shared::cluster", "ld.shared::cluster.b32 %r11, [%r23];\nst.global.b32 [%rd5], %r11;\n" + CLUSTER)
    add("store", "st.shared::cluster", "st.shared::cluster.b32 [%r23+1024], %r10;\n" + CLUSTER + store_own)
    add(
        "generic",
        "ld through a generic address of mapa",
        "cvta.shared.u64 %rd9, shared;\nmapa.u64 %rd10, %rd9, %r21;\nmul.wide.u32 %rd11, %r1, 4;\n"
        "add.s64 %rd10, %rd10, %rd11;\nld.b32 %r11, [%rd10];\nst.global.b32 [%rd5], %r11;\n" + CLUSTER,
    )
    add(
        "rank",
        "getctarank, %cluster_nctarank",
        "getctarank.shared::cluster.u32 %r11, %r23;\nmov.u32 %r12, %cluster_nctarank;\n"
        "mad.lo.s32 %r11, %r12, 16, %r11;\nst.global.b32 [%rd5], %r11;\n" + CLUSTER,
    )
    add(
        "atom",
        "atom.shared::cluster",
        "atom.relaxed.cluster.shared::cluster.add.u32 %r12, [%r23+1024], %r10;\n" + CLUSTER + store_own,
    )
    add(
        "st_async",
        "st.async",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23+1024], %r10, [%r24];\n" + WAIT + store_own,
        armed=512,
    )
    add(
        "st_async_v2",
        "st.async.v2",
        "add.s32 %r23, %r23, %r6;\nsetp.lt.u32 %p4, %r1, 64;\n"
        "@%p4 st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r23+1024], {%r10, %r1}, [%r24];\n"
        + WAIT
        + store_own,
        armed=512,
    )
    for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32", "add.u64"):
        body = (
            f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op} [%r23+1024], %r10, [%r24];\n"
        )
        if op == "add.u64":
            body = (
                "setp.lt.u32 %p4, %r1, 64;\nadd.s32 %r23, %r23, %r6;\nmov.b64 %rd9, {%r10, %r1};\n@%p4 "
                + body.replace("%r10", "%rd9")
            )
        add(f"red_async_{op}", f"red.async.{op}", body + WAIT + store_own, armed=512)
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    add("bulk", copy, f"@%p3 {copy} [%r23+1024], [%r3], 512, [%r24];\n" + WAIT + store_own, armed=512)
    for op in (
        "add.u32",
        "add.s32",
        "add.u64",
        "min.s32",
        "min.u32",
        "max.s32",
        "max.u32",
        "inc.u32",
        "dec.u32",
        "and.b32",
        "or.b32",
        "xor.b32",
    ):
        kind = op.rpartition(".")[2].replace("b32", "u32")
        text = copy.replace("cp.", "cp.reduce.") + f".{op.partition('.')[0]}.{kind if kind[0] != 'b' else op}"
        text = text.replace(".u32", "." + op.rpartition(".")[2])
        values = pick([0, 1, 5, 127, 128, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF], 2 * BLOCK, 12, np.uint32)
        add(f"reduce_{op}", text, f"@%p3 {text} [%r23+1024], [%r3], 512, [%r24];\n" + WAIT + store_own, 512, values)
    multicast = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    add(
        "multicast",
        multicast,
        "mov.b16 %rs1, 3;\nsetp.eq.u32 %p5, %r20, 1;\nand.pred %p5, %p5, %p3;\n"
        f"@%p5 {multicast} [%r3+1024], [%rd1+64], 512, [%r4], %rs1;\n" + WAIT + store_own,
        armed=512,
    )
    add(
        "remote_arrive",
        "mbarrier.arrive.shared::cluster",
        "@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r24];\n"
        "@%p3 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23+1024], 77, [%r24];\n" + WAIT + store_own,
        armed=4,
    )
    # One arrival more than `arm` made: the remote one.
    last = found.pop()
    found.append(
        Case(
            last.name,
            last.body.replace("[%r4], 1;", "[%r4], 2;"),
            last.inputs,
            last.results,
            grid=2,
            cluster=2,
            shared=SHARED,
        )
    )
    return found


# mbarriers: one thread, step by step. A line is an instruction, or a question whose answer is stored.


def script(count: int, *lines: str) -> str:
    """Lines: `phase` asks which parities have passed, `done %rdN` whether a state's phase has.

    `pending %rdN` asks what was missing before a state's arrival, which must be one that does not complete its phase.
    """
    body = START + "@!%p3 bra END;\n" + f"mbarrier.init.shared.b64 [%r4], {count};\nmov.b32 %r30, 0;\n"
    place = 0
    for line in lines:
        word, _, of = line.partition(" ")
        if word == "phase":
            for parity in (0, 1):
                body += f"mbarrier.test_wait.parity.shared.b64 %p{5 + parity}, [%r4], {parity};\n"
            body += "selp.b32 %r10, 1, 0, %p5;\nselp.b32 %r11, 2, 0, %p6;\nadd.s32 %r10, %r10, %r11;\n"
        elif word == "pending":
            body += f"mbarrier.pending_count.b64 %r10, {of};\n"
        elif word == "done":
            body += f"mbarrier.test_wait.shared.b64 %p5, [%r4], {of};\nselp.b32 %r10, 1, 0, %p5;\n"
        else:
            body += line.replace("BAR", "[%r4]") + ";\n"
            continue
        body += f"st.global.b32 [%rd2+{4 * place}], %r10;\n"
        place += 1
    return body + "END:\n"


ARRIVE = "mbarrier.arrive.shared.b64 %rd{}, BAR"
SCRIPTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "arrive": (
        2,
        (
            "phase",
            ARRIVE.format(10),
            "done %rd10",
            "phase",
            ARRIVE.format(11),
            "done %rd10",
            "done %rd11",
            "phase",
            ARRIVE.format(12),
            "done %rd12",
            "phase",
            ARRIVE.format(13),
            "phase",
            "done %rd12",
        ),
    ),
    "count": (
        6,
        (
            "mbarrier.arrive.shared.b64 %rd10, BAR, 4",
            "phase",
            "mbarrier.arrive.shared.b64 %rd11, BAR, 2",
            "phase",
            "done %rd10",
            "mbarrier.arrive.shared.b64 %rd12, BAR, 6",
            "phase",
        ),
    ),
    "no_complete": (
        5,
        (
            "mbarrier.arrive.noComplete.shared.b64 %rd10, BAR, 3",
            "pending %rd10",
            "phase",
            "mbarrier.arrive.noComplete.shared.b64 %rd11, BAR, 1",
            "pending %rd11",
            ARRIVE.format(12),
            "phase",
            "done %rd10",
            "mbarrier.arrive.noComplete.shared.b64 %rd12, BAR, 2",
            "pending %rd12",
            "done %rd12",
        ),
    ),
    "drop_no_complete": (
        6,
        (
            "mbarrier.arrive_drop.noComplete.shared.b64 %rd10, BAR, 2",
            "pending %rd10",
            "mbarrier.arrive.shared.b64 %rd11, BAR, 4",
            "phase",
            "mbarrier.arrive.noComplete.shared.b64 %rd12, BAR, 1",
            "pending %rd12",
            "mbarrier.arrive.noComplete.shared.b64 %rd13, BAR, 2",
            "pending %rd13",
            "phase",
        ),
    ),
    "no_complete_wide": (
        1048575,
        (
            "mbarrier.arrive.noComplete.shared.b64 %rd10, BAR, 1048573",
            "pending %rd10",
            "mbarrier.arrive.noComplete.shared.b64 %rd11, BAR, 1",
            "pending %rd11",
            "phase",
        ),
    ),
    "drop": (
        3,
        (
            "mbarrier.arrive_drop.shared.b64 %rd10, BAR",
            ARRIVE.format(11),
            ARRIVE.format(12),
            "phase",
            ARRIVE.format(13),
            "phase",
            ARRIVE.format(14),
            "phase",
        ),
    ),
    "drop_count": (
        6,
        (
            "mbarrier.arrive_drop.shared.b64 %rd10, BAR, 2",
            "mbarrier.arrive.shared.b64 %rd11, BAR, 4",
            "phase",
            "mbarrier.arrive.shared.b64 %rd12, BAR, 4",
            "phase",
            "mbarrier.arrive_drop.noComplete.shared.b64 %rd13, BAR, 1",
            "pending %rd13",
        ),
    ),
    "transactions": (
        1,
        (
            "mbarrier.expect_tx.relaxed.cta.shared.b64 BAR, 64",
            ARRIVE.format(10),
            "phase",
            "mbarrier.complete_tx.relaxed.cta.shared.b64 BAR, 48",
            "phase",
            "mbarrier.complete_tx.relaxed.cta.shared.b64 BAR, 16",
            "phase",
            "done %rd10",
            "mbarrier.arrive.expect_tx.shared.b64 %rd11, BAR, 32",
            "phase",
            "mbarrier.complete_tx.relaxed.cta.shared.b64 BAR, 32",
            "phase",
            "done %rd11",
        ),
    ),
    "early": (
        2,
        (
            "mbarrier.expect_tx.relaxed.cta.shared.b64 BAR, 1024",
            "mbarrier.complete_tx.relaxed.cta.shared.b64 BAR, 1024",
            "phase",
            ARRIVE.format(10),
            ARRIVE.format(11),
            "phase",
            "done %rd10",
        ),
    ),
    "drop_expect": (
        2,
        (
            "mbarrier.arrive_drop.expect_tx.shared.b64 %rd10, BAR, 16",
            ARRIVE.format(11),
            "phase",
            "mbarrier.complete_tx.relaxed.cta.shared.b64 BAR, 16",
            "phase",
            ARRIVE.format(12),
            "phase",
        ),
    ),
    "again": (
        1,
        (
            ARRIVE.format(10),
            "phase",
            "mbarrier.inval.shared.b64 BAR",
            "mbarrier.init.shared.b64 BAR, 3",
            "phase",
            ARRIVE.format(11),
            "phase",
        ),
    ),
    "wide": (
        1048575,
        (
            "mbarrier.arrive.shared.b64 %rd10, BAR, 1048574",
            "phase",
            ARRIVE.format(11),
            "phase",
        ),
    ),
}


def barriers() -> list[Case]:
    found = []
    for name, (count, lines) in SCRIPTS.items():
        title = f"mbarrier/{name}"
        found.append(Case(title, script(count, *lines), (), (result(title, 24),), block=32, shared=SHARED))
    body = START + INPUT + "ld.global.b32 %r10, [%rd4];\nsetp.lt.s32 %p4, %r10, 0;\nsetp.ge.u32 %p5, %r1, 0;\n"
    body += "bar.red.popc.u32 %r11, 0, %p4;\nbar.red.and.pred %p6, 1, %p5;\nbar.red.or.pred %p7, 2, %p4;\n"
    body += (
        "bar.red.and.pred %p8, 3, 128, %p4;\nbarrier.red.popc.aligned.u32 %r12, 4, !%p4;\nselp.b32 %r13, 256, 0, %p6;\n"
    )
    body += "selp.b32 %r14, 512, 0, %p7;\nselp.b32 %r15, 1024, 0, %p8;\nmad.lo.s32 %r11, %r12, 65536, %r11;\n"
    body += (
        "add.s32 %r11, %r11, %r13;\nadd.s32 %r11, %r11, %r14;\nadd.s32 %r11, %r11, %r15;\nst.global.b32 [%rd5], %r11;\n"
    )
    found.append(Case("barrier/red", body, (words(BLOCK, 13),), (result("bar.red", BLOCK),)))
    return found


def cases() -> list[Case]:
    return [*loads(), *atomics(), *cp_async(), *bulk(), *cluster(), *barriers()]
