# SPDX-License-Identifier: Apache-2.0
"""Tensor copies: loads, stores and reductions of tiles with all swizzles, ranks and types (PTX ISA 9.2, 5.5, 9.7.9.27).

im2col maps, interleaved layouts and fills that are not zero are not emulated and not asked.
"""

import re
from dataclasses import replace

import numpy as np
from micro_case import DATA_TYPES, Array, Bits, Case, Map, Result
from micro_lanes import size_of, table
from micro_memory import CLUSTER, INIT, SHARED, START, SYNC, WAIT, words
from numpy.typing import NDArray

TILE = 16384
BLOCK = 128


def strides_of(dims: tuple[int, ...], size: int, pad: int = 0) -> tuple[int, ...]:
    """Of a tensor whose rows are rounded up to 16 bytes, and `pad` more."""
    found = [-(-dims[0] * size // 16) * 16 + pad]
    for extent in dims[1:-1]:
        found.append(found[-1] * extent)
    return tuple(found[: len(dims) - 1])


def bytes_of(map_: Map) -> int:
    size = DATA_TYPES[map_.type][1]
    steps = map_.element_strides or (1,) * len(map_.box)
    return size * int(np.prod([-(-extent // step) for extent, step in zip(map_.box, steps, strict=True)]))


def span_of(map_: Map) -> int:
    size = DATA_TYPES[map_.type][1]
    rows = sum((extent - 1) * step for extent, step in zip(map_.dims[1:], map_.strides, strict=True))
    return -(-(rows + map_.dims[0] * size) // 16) * 16


FILL = "".join(f"st.shared.b32 [%r7+{512 * index}], 0x5a5a5a5a;\n" for index in range(8))
MAP = "mov.b64 %rd8, m0;\ncvta.param.u64 %rd8, %rd8;\n"
OUT = "".join(
    f"ld.shared.b32 %r10, [%r7+{512 * index}];\nst.global.b32 [%rd5+{512 * index}], %r10;\n" for index in range(8)
)
IMAGE = 1024  # words of shared memory that are looked at


def coordinates(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, at)) + "}"


def load(name: str, map_: Map, at: tuple[int, ...], content: "Array | None" = None) -> Case:
    rank = len(map_.dims)
    text = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    source = words(span_of(map_) // 4, 40 + rank) if content is None else content
    body = START + MAP + INIT.format(count=1) + FILL + "fence.proxy.async;\n" + SYNC
    body += f"@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {bytes_of(map_)};\n"
    body += f"@%p3 {text} [%r3], [%rd8, {coordinates(at)}], [%r4];\n" + WAIT + OUT
    return Case(
        f"tensor/load_{name}", body, (source,), (Result(text, np.zeros(IMAGE, np.uint32)),), shared=SHARED, maps=(map_,)
    )


def loads() -> list[Case]:
    found = []
    dims: tuple[int, ...]
    for swizzle in (0, 32, 64, 128):
        inner = swizzle or 64
        for kind in ("u8", "f16", "f32"):
            size = DATA_TYPES[kind][1]
            dims = (3 * inner // size, 40)
            map_ = Map(0, kind, dims, strides_of(dims, size, 32), (inner // size, 20), swizzle)
            found.append(load(f"{kind}_sw{swizzle}", map_, (inner // size, 7)))
        dims = (24, 9, 7)
        map_ = Map(0, "bf16", dims, strides_of(dims, 2), (16 if swizzle else 24, 5, 4), swizzle)
        found.append(load(f"3d_sw{swizzle}", map_, (-8, 6, -1)))
    for kind, (_, size) in DATA_TYPES.items():
        if kind in ("tf32", "s32", "s64"):
            continue
        dims = (40, 12)
        found.append(load(f"type_{kind}", Map(0, kind, dims, strides_of(dims, size), (32 // size, 8)), (16 // size, 2)))
    special = table("f32", 0, 1, 512)
    found.append(load("type_tf32", Map(0, "tf32", (16, 32), (64,), (16, 32)), (0, 0), special))
    found.append(load("type_f32_bits", Map(0, "f32", (16, 32), (64,), (16, 32)), (0, 0), special))
    # All ranks, over the tensor's edges on every side.
    found.append(load("1d", Map(0, "u32", (100,), (), (32,)), (88,)))
    found.append(load("1d_before", Map(0, "u32", (100,), (), (32,)), (-8,)))
    for at in ((0, 0), (-4, -3), (12, 9), (28, 30), (-40, 2), (4, 11)):
        dims = (17, 11)
        name = "_".join(str(one).replace("-", "m") for one in at)
        found.append(load(f"edge_{name}", Map(0, "u32", dims, strides_of(dims, 4), (8, 6)), at))
        found.append(load(f"edge_sw128_{name}", Map(0, "u32", dims, strides_of(dims, 4), (32, 6), 128), at))
    dims = (6, 5, 4, 3)
    found.append(load("4d", Map(0, "u32", dims, strides_of(dims, 4), (4, 3, 3, 2)), (4, -1, 2, 1)))
    dims = (5, 4, 3, 3, 2)
    found.append(load("5d", Map(0, "u16", dims, strides_of(dims, 2), (8, 2, 2, 2, 2)), (0, 1, -1, 2, 0)))
    found.append(load("5d_sw32", Map(0, "u16", dims, strides_of(dims, 2), (16, 2, 2, 2, 2), 32), (-8, 1, 1, 0, 1)))
    # Every second or third element.
    dims = (16, 20)
    found.append(load("steps", Map(0, "u32", dims, strides_of(dims, 4), (8, 12), 0, (1, 3)), (4, 4)))
    # Broadcast: a stride of zero is not possible, a small one is.
    found.append(load("overlapping", Map(0, "u32", (16, 8), (16,), (16, 8)), (0, 0)))
    # The destination's pattern goes by the address, not by the tile.
    last = load("sw128_at_256", Map(0, "u32", (32, 16), (128,), (32, 8), 128), (0, 3))
    found.append(
        Case(
            last.name,
            last.body.replace("[%r3], [%rd8", "[%r3+1024], [%rd8"),
            last.inputs,
            last.results,
            shared=SHARED,
            maps=last.maps,
        )
    )
    return found


FROM_SHARED = (
    START
    + "ld.param.b64 %rd1, [p0];\nadd.s64 %rd4, %rd1, %rd3;\n"
    + MAP
    + "".join(
        f"ld.global.b32 %r10, [%rd4+{512 * index}];\nst.shared.b32 [%r7+{512 * index}], %r10;\n" for index in range(8)
    )
    + "fence.proxy.async;\n"
    + SYNC
)
GROUP = "@%p3 cp.async.bulk.commit_group;\n@%p3 cp.async.bulk.wait_group{read} 0;\n"


def store(
    name: str, map_: Map, at: tuple[int, ...], op: str = "", old: "Array | None" = None, new: "Array | None" = None
) -> Case:
    """Map and coordinates are of the first result, which holds something before."""
    rank = len(map_.dims)
    text = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}.tile.bulk_group"
        if op
        else (f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group")
    )
    body = FROM_SHARED + f"@%p3 {text} [%rd8, {coordinates(at)}], [%r3];\n" + GROUP.format(read="")
    target = words(span_of(map_) // 4, 50 + rank) if old is None else old
    rule = Bits(nan=map_.type) if op and map_.type in ("f16", "bf16", "f32") else Bits()
    source = words(IMAGE, 60) if new is None else new
    return Case(
        f"tensor/{name}", body, (source,), (Result(f"{text} {map_.type}", target, rule),), shared=SHARED, maps=(map_,)
    )


# Operations by type (9.7.9.27.1.3); of integers a map says only how wide they are and, for 32 and 64 bits, the sign.
REDUCTIONS = {
    "u32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
    "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max", "and", "or", "xor"),
    "f16": ("add", "min", "max"),
    "bf16": ("add", "min", "max"),
    "f32": ("add",),
}


def stores() -> list[Case]:
    found = []
    dims: tuple[int, ...]
    for swizzle in (0, 32, 64, 128):
        inner = (swizzle or 64) // 2
        dims = (2 * inner + 8, 24)
        map_ = Map(None, "f16", dims, strides_of(dims, 2, 16), (inner, 12), swizzle)
        found.append(store(f"store_sw{swizzle}", map_, (inner // 2, 5)))
        found.append(store(f"store_edge_sw{swizzle}", map_, (2 * inner, 18)))
    found.append(store("store_1d", Map(None, "u32", (100,), (), (32,)), (80,)))
    dims = (8, 5, 4, 3)
    found.append(store("store_4d", Map(None, "u32", dims, strides_of(dims, 4), (4, 3, 3, 2)), (4, 3, 2, 1)))
    dims = (8, 4, 3, 3, 2)
    found.append(store("store_5d", Map(None, "u16", dims, strides_of(dims, 2), (8, 2, 2, 2, 2)), (0, 1, 2, 2, 0)))
    for kind, some in REDUCTIONS.items():
        if kind == "s32":
            continue
        size = size_of(kind)
        dims = (64 // size, 16)
        for op in some:
            old, new = (table(kind, slot, 2, count) for slot, count in ((0, 1024 // size), (1, 4096 // size)))
            map_ = Map(None, kind, dims, (64,), (32 // size, 12), 32 if op == "add" else 0)
            found.append(store(f"reduce_{op}_{kind}", map_, (16 // size, 3), op, old, new.view(np.uint32)))
    return found


def multicast() -> list[Case]:
    """CTA 1 of a pair loads a tile into both; each looks at its own."""
    dims = (32, 16)
    map_ = Map(0, "u32", dims, strides_of(dims, 4), (32, 8), 128)
    text = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    body = START + MAP + INIT.format(count=1) + FILL + "mov.u32 %r20, %cluster_ctarank;\nfence.proxy.async;\n"
    body += "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 1024;\n" + CLUSTER
    body += "mov.b16 %rs1, 3;\nsetp.eq.and.u32 %p5, %r20, 1, %p3;\n"
    body += f"@%p5 {text} [%r3], [%rd8, {{0, 4}}], [%r4], %rs1;\n" + WAIT
    body += "mul.wide.u32 %rd9, %r20, 4096;\nadd.s64 %rd5, %rd5, %rd9;\n" + OUT + CLUSTER
    return [
        Case(
            "tensor/multicast",
            body,
            (words(512, 70),),
            (Result(text, np.zeros(2 * IMAGE, np.uint32)),),
            grid=2,
            cluster=2,
            shared=SHARED,
            maps=(map_,),
        )
    ]


def changed() -> list[Case]:
    """A map that the kernel changes in shared memory, and publishes in p1: rows 1, 3, 5, ... of 12 columns."""
    map_ = Map(0, "u32", (16, 8), (64,), (8, 4))
    body = (
        START + "ld.param.b64 %rd1, [p0];\nld.param.b64 %rd8, [p1];\nadd.s64 %rd9, %rd1, 64;\nadd.s32 %r8, %r3, 8192;\n"
    )
    body += "".join(
        f"ld.param.b64 %rd10, [m0+{8 * index}];\n@%p3 st.shared.b64 [%r8+{8 * index}], %rd10;\n" for index in range(16)
    )
    for name, operands in (
        ("global_address", "%rd9"),
        ("global_dim", "0, 12"),
        ("global_dim", "1, 6"),
        ("global_stride", "0, 128"),
        ("box_dim", "0, 8"),
        ("box_dim", "1, 8"),
        ("rank", "1"),
        ("element_stride", "1, 1"),
    ):
        kind = "b64" if name in ("global_address", "global_stride") else "b32"
        body += f"@%p3 tensormap.replace.tile.{name}.shared::cta.b1024.{kind} [%r8], {operands};\n"
    copy = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    body += f"bar.sync 0;\nsetp.ge.u32 %p4, %r1, 32;\n@%p4 bra COPIED;\n{copy} [%rd8], [%r8], 128;\n"
    body += "fence.proxy.tensormap::generic.acquire.gpu [%rd8], 128;\nCOPIED:\n"
    body += INIT.format(count=1) + FILL.replace("\nst.shared", "\nst.shared") + "fence.proxy.async;\n" + SYNC
    body += "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 256;\n"
    load_text = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    body += f"@%p3 {load_text} [%r3], [%rd8, {{8, 1}}], [%r4];\n" + WAIT + OUT
    return [
        Case(
            "tensor/changed",
            body,
            (words(512, 71), np.zeros(32, np.uint32)),
            (Result("tensormap.replace", np.zeros(IMAGE, np.uint32)),),
            shared=SHARED,
            maps=(map_,),
        )
    ]


def questions() -> list[Case]:
    """Places that the emulator refuses: an H200 ends each of these launches with CUDA_ERROR_ILLEGAL_INSTRUCTION.

    A box starts at a multiple of 16 bytes of its row, and a store's coordinates are not negative.
    """
    found = []
    for swizzle in (0, 128):
        dims = (40, 16)
        of_load = Map(0, "u32", dims, strides_of(dims, 4), (32, 6), swizzle)
        of_store = Map(None, "u32", dims, strides_of(dims, 4), (32, 6), swizzle)
        for at in ((1, 2), (-3, 1), (38, 3)):
            name = f"{at[0]}_{at[1]}_sw{swizzle}".replace("-", "m")
            found.append(load(f"at_{name}", of_load, at))
            found.append(store(f"store_at_{name}", of_store, at))
        found.append(store(f"store_before_sw{swizzle}", of_store, (-8, -3)))
        found.append(store(f"reduce_before_sw{swizzle}", of_store, (-4, -2), "add"))
    dims = (40, 16)
    found.append(load("at_odd_bf16", Map(0, "bf16", dims, strides_of(dims, 2), (32, 6)), (3, 2)))
    found.append(load("at_odd_u8", Map(0, "u8", dims, strides_of(dims, 1), (32, 6)), (5, 2)))
    return [replace(case, name=case.name.replace("tensor/", "question/")) for case in found]


def plain(case: Case) -> NDArray[np.uint8]:
    """The output after the one copy of a load or a store, or an adding one of u32, of any box: by the definition."""
    (map_,) = case.maps
    at = tuple(int(one) for one in re.findall(r"\[%rd8, \{([^}]*)\}", case.body)[0].split(","))
    size, is_load, adds = DATA_TYPES[map_.type][1], map_.input is not None, ".add" in case.results[0].label
    image = (
        np.full(4 * IMAGE, 0x5A, np.uint8)
        if is_load
        else np.frombuffer(case.inputs[0].tobytes(), np.uint8)[: 4 * IMAGE]
    )
    tensor = np.frombuffer(case.inputs[0].tobytes(), np.uint8).copy() if is_load else case.output()
    steps = map_.element_strides or (1,) * len(map_.box)
    counts = [-(-extent // step) for extent, step in zip(map_.box, steps, strict=True)]
    for number, index in enumerate(np.ndindex(*reversed(counts))):
        place = [start + one * step for start, one, step in zip(at, reversed(index), steps, strict=True)]
        inside = all(0 <= one < extent for one, extent in zip(place, map_.dims, strict=True))
        there = place[0] * size + sum(one * step for one, step in zip(place[1:], map_.strides, strict=True))
        here = number * size
        here ^= here >> 3 & (max(map_.swizzle, 16) - 1 & ~15)
        if is_load:
            image[here : here + size] = tensor[there : there + size] if inside else 0
        elif inside and adds:
            word = tensor[there : there + size].view(f"u{size}")
            word += image[here : here + size].view(f"u{size}")
        elif inside:
            tensor[there : there + size] = image[here : here + size]
    return image if is_load else tensor


def cases() -> list[Case]:
    return [*loads(), *stores(), *multicast(), *changed(), *questions()]
