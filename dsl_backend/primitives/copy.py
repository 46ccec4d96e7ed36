# SPDX-License-Identifier: Apache-2.0
"""Vectorised copies between global memory and registers, sums to it, zero-fill of shared memory, stores to a peer."""

from collections.abc import Sequence

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

VECTOR_BYTES = 16
# A policy of TMA loads: lines that L2 evicts first (CUTLASS, TMA::CacheHintSm90).
EVICT_FIRST = 0x12F0000000000000
# Priorities of lines in L1 and L2, and the policies of L2 that say the same.
PRIORITIES = {"evict_last": 0x14F0000000000000}


def vector_at(base: cute.Pointer, offset: cutlass.Int64, elements: int) -> cute.Tensor:
    """View `elements` consecutive elements of global memory as one vector access.

    Args:
        base: first element of the tensor, aligned to a vector.
        offset: in elements, a multiple of `elements`. 64 bits, since tensors of 2^31 elements are common.
    """
    size = elements * base.dtype.width // 8
    address = base.toint() + cutlass.Int64(offset) * (base.dtype.width // 8)
    pointer = cute.make_ptr(base.dtype, address, cute.AddressSpace.gmem, assumed_align=size)
    return cute.make_tensor(pointer, cute.make_layout(elements))


@cute.jit
def load_vector(base: cute.Pointer, offset: cutlass.Int64, fragment: cute.Tensor):
    """Load one vector from global memory; fragment [elements]."""
    cute.autovec_copy(vector_at(base, offset, cute.size(fragment)), fragment)


@cute.jit
def load_vector_as(priority: cutlass.Constexpr[str], base: cute.Pointer, offset: cutlass.Int64, fragment: cute.Tensor):
    """Load one vector of 16 bytes with an eviction priority, or any vector without; fragment [elements].

    Args:
        priority: of PRIORITIES, or empty.
    """
    if cutlass.const_expr(priority == ""):
        load_vector(base, offset, fragment)
    else:
        words = cute.recast_tensor(fragment, cutlass.Int32)
        address = base.toint() + cutlass.Int64(offset) * (base.dtype.width // 8)
        found = load_words_as(priority, address)
        for i in cutlass.range_constexpr(VECTOR_BYTES // 4):
            words[i] = found[i]


@dsl_user_op
def load_words_as(priority: str, address: cutlass.Int64, *, loc=None, ip=None) -> tuple[cutlass.Int32, ...]:
    """Four words at an address, with a priority of PRIORITIES."""
    return cute.arch.inline_ptx(
        f"ld.global.L1::{priority}.L2::cache_hint.v4.b32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}], {{$r1}};",
        write_only_types=[cutlass.Int32] * (VECTOR_BYTES // 4),
        read_only_args=[cutlass.Int64(address), cutlass.Int64(PRIORITIES[priority])],
        loc=loc,
        ip=ip,
    )


@cute.jit
def load_vector_if(
    inside, base: cute.Pointer, offset: cutlass.Int64, fragment: cute.Tensor, fill: cutlass.Constexpr[int]
):
    """Load one vector where `inside` is true, without a branch; no access is made where it is false.

    Args:
        fragment: [elements], of 4, 8 or 16 bytes.
        fill: every 32-bit word of the fragment where `inside` is false.
    """
    flat = cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))
    words = cute.recast_tensor(flat, cutlass.Int32)
    address = base.toint() + cutlass.Int64(offset) * (base.dtype.width // 8)
    found = load_words_if(cutlass.Boolean(inside), address, fill, cute.size(words))
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = found[i]


@dsl_user_op
def load_words_if(
    inside: cutlass.Boolean, address: cutlass.Int64, fill: int, count: int, *, loc=None, ip=None
) -> list[cutlass.Int32]:
    """`count` words of 32 bits, 1, 2 or 4: those at an address, or `fill` where `inside` is false."""
    own = [f"own{i}" for i in range(count)]
    width, together = ("", own[0]) if count == 1 else (f".v{count}", f"{{{', '.join(own)}}}")
    lines = ["{", ".reg .pred inside;", f".reg .b32 {', '.join(own)};", "setp.ne.s32 inside, {$r0}, 0;"]
    lines += [f"mov.b32 {name}, {fill & 0xFFFFFFFF};" for name in own]
    lines += [f"@inside ld.global{width}.b32 {together}, [{{$r1}}];"]
    lines += [f"mov.b32 {{$w{i}}}, {name};" for i, name in enumerate(own)]
    text = "\n".join([*lines, "}"])
    found = cute.arch.inline_ptx(
        text,
        write_only_types=[cutlass.Int32] * count,
        read_only_args=[cutlass.Int32(inside), cutlass.Int64(address)],
        loc=loc,
        ip=ip,
    )
    return [found] if count == 1 else list(found)


@cute.jit
def store_vector(fragment: cute.Tensor, base: cute.Pointer, offset: cutlass.Int64):
    """Store one vector to global memory; fragment [elements]."""
    cute.autovec_copy(fragment, vector_at(base, offset, cute.size(fragment)))


@cute.jit
def add_vector(fragment: cute.Tensor, base: cute.Pointer, offset: cutlass.Int64):
    """Add 8 elements of 16 bits to a vector of global memory; each one is atomic, and rounded. Arguments as above."""
    words = cute.recast_tensor(fragment, cutlass.Int32)
    kind = cutlass.const_expr("bf16x2" if base.dtype is cutlass.BFloat16 else "f16x2")
    address = base.toint() + cutlass.Int64(offset) * (base.dtype.width // 8)
    add_words(address, [words[i] for i in range(VECTOR_BYTES // 4)], kind)


@dsl_user_op
def add_words(address: cutlass.Int64, words: list, kind: str, *, loc=None, ip=None) -> None:
    """red.add of four words of two numbers each (PTX ISA 9.2, 9.7.13.6)."""
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.noftz.v4.{kind} [{{$r0}}], {{ {{$r1}}, {{$r2}}, {{$r3}}, {{$r4}} }};",
        read_only_args=[cutlass.Int64(address), *words],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_load(
    source: cutlass.Int64,
    target: cute.Pointer,
    size: int,
    mbar: cute.Pointer,
    cache_policy: int = EVICT_FIRST,
    *,
    loc=None,
    ip=None,
) -> None:
    """Copy so many neighbouring bytes from global to shared memory; the mbarrier counts them. By one thread.

    Args:
        source: an address. It, the target and the size are multiples of 16 bytes.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}], {{$r3}};",
        read_only_args=[
            cutlass.Int32(target.toint(loc=loc, ip=ip)),
            cutlass.Int64(source),
            cutlass.Int32(mbar.toint(loc=loc, ip=ip)),
            cutlass.Int64(cache_policy),
        ],
        loc=loc,
        ip=ip,
    )


@cute.jit
def exchange_vectors(vectors: cute.Tensor, thread: cutlass.Int32):
    """Transpose pairs of vectors between pairs of lanes, in place, so that two lanes store 32 bytes of a row together.

    A lane has a row. Of vectors 2i and 2i + 1, an even lane then has vector 2i of its own row and of the odd lane's, an
    odd lane vector 2i + 1 of both. By all lanes of a warp.

    Args:
        vectors: [element, vector], each of 16 bytes.
    """
    odd = thread % 2 != 0
    words = cute.recast_tensor(cute.make_tensor(vectors.iterator, cute.make_layout(cute.size(vectors))), cutlass.Int32)
    count = cutlass.const_expr(VECTOR_BYTES // 4)
    for i in cutlass.range_constexpr(0, cute.size(words), 2 * count):
        for j in cutlass.range_constexpr(i, i + count):
            first, second = words[j], words[j + count]
            received = cute.arch.shuffle_sync_bfly(first if odd else second, 1)
            words[j] = received if odd else first
            words[j + count] = second if odd else received


@cute.jit
def clear_rows(
    tensor: cute.Tensor,
    first: cutlass.Int32 | int,
    end: cutlass.Int32 | int,
    thread: cutlass.Int32,
    threads: cutlass.Int32 | int,
):
    """Zero-fill the rows first ... end - 1 of a tile in shared memory, 16 bytes a thread; tensor [row, column]."""
    vector = cutlass.const_expr(VECTOR_BYTES * 8 // tensor.element_type.width)
    vectors = cutlass.const_expr(cute.size(tensor, mode=[1]) // vector)
    zeros = cute.make_rmem_tensor(vector, tensor.element_type)
    zeros.fill(tensor.element_type(0))
    for i in cutlass.range(thread + first * vectors, end * vectors, threads, unroll=1):
        row = cute.local_tile(tensor, (1, vector), (i // vectors, i % vectors))
        cute.autovec_copy(zeros, cute.group_modes(row, 0, 2))


@dsl_user_op
def store_shared_remote(
    words: Sequence[cutlass.Int32 | cutlass.Float32],
    target: cute.Pointer,
    mbar: cute.Pointer,
    cta_rank: cutlass.Int32 | int,
    *,
    loc=None,
    ip=None,
) -> None:
    """st.async to the same shared-memory address of another CTA of the cluster, whose mbarrier counts the bytes.

    Args:
        words: one, two or four of 32 bits, all of one type; the address is aligned to all of them.
    """
    there = cute.arch.map_dsmem_ptr(target, cta_rank, loc=loc, ip=ip)
    signal = cute.arch.map_dsmem_ptr(mbar, cta_rank, loc=loc, ip=ip)
    count = len(words)
    kind = "f32" if isinstance(words[0], cutlass.Float32) else "b32"
    values = ", ".join(f"{{$r{1 + i}}}" for i in range(count))
    width, values = ("", values) if count == 1 else (f".v{count}", f"{{ {values} }}")
    cute.arch.inline_ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{width}.{kind} [{{$r0}}], {values}, "
        f"[{{$r{1 + count}}}];",
        read_only_args=[
            cutlass.Int32(there.toint(loc=loc, ip=ip)),
            *words,
            cutlass.Int32(signal.toint(loc=loc, ip=ip)),
        ],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_matrices_transposed(address: cutlass.Int32, *, loc=None, ip=None) -> tuple[cutlass.Int32, ...]:
    """Ldmatrix of four transposed matrices of 8 x 8 elements of 16 bits, by a warp.

    Args:
        address: in shared memory, of row lane % 8 of matrix lane / 8; 16 bytes.

    Returns:
        For each matrix elements (2 (lane % 4), lane / 4) and (2 (lane % 4) + 1, lane / 4), by (row in memory, place).
    """
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[cutlass.Int32] * 4,
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_matrices(address: cutlass.Int32, words: list, *, loc=None, ip=None) -> None:
    """Stmatrix of one, two or four matrices of 8 x 8 elements of 16 bits, by a warp; arguments as below.

    Row lane / 4 in memory has the words of four lanes.
    """
    store_matrix_words("", address, words, loc=loc, ip=ip)


@dsl_user_op
def store_matrices_transposed(address: cutlass.Int32, words: list, *, loc=None, ip=None) -> None:
    """Stmatrix of one, two or four transposed matrices of 8 x 8 elements of 16 bits, by a warp.

    Args:
        address: in shared memory, of row lane % 8 of matrix lane / 8; 16 bytes. Lanes without a matrix give any.
        words: for each matrix elements (lane / 4, 2 (lane % 4)) and (lane / 4, 2 (lane % 4) + 1). A row in memory has
            the first index from 0 to 7.
    """
    store_matrix_words(".trans", address, words, loc=loc, ip=ip)


def store_matrix_words(transposed: str, address: cutlass.Int32, words: list, *, loc, ip) -> None:
    count = len(words)
    registers = ", ".join(f"{{$r{1 + i}}}" for i in range(count))
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [{{$r0}}], {{ {registers} }};",
        read_only_args=[address, *words],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def cp_async_zfill(
    target: cutlass.Int32, source: cutlass.Int64, source_bytes: cutlass.Int32, *, loc=None, ip=None
) -> None:
    """cp.async of 16 bytes of global memory to an address in shared memory, past L1.

    Args:
        source_bytes: 0 to 16; the rest is zeros.
    """
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, source_bytes],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def cp_async_word(target: cutlass.Int32, source: cutlass.Int64, *, loc=None, ip=None) -> None:
    """cp.async of 4 bytes by way of L1, for readers whose next word is its neighbour."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[target, source], loc=loc, ip=ip
    )
