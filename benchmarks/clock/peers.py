# SPDX-License-Identifier: Apache-2.0
"""Rows of others' kernels, as their packages call them.

On the emulated chip tensors are zeros, and the process believes that it has the chip (stand_in.py). On a GPU
(on_chip.py) they are normal. Those of attention in 8 bits are normal on both: how often a kernel rescales its output
depends on scores. The packages are in `.peers` (`make peers`).
"""

import importlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..attention.inputs import normal

BF16 = torch.bfloat16
LATENT, ROPE = 512, 64
# Keys of a page, where keys are paged and the row names no other: the tile of FlashAttention's kernel, which copies
# whole pages then.
PAGE = 128
# Compiles and launches.
Run = Callable[[], None]

ATTENTION = re.compile(
    r"hd(?P<dim>\d+)(v(?P<dim_v>\d+))?-h(?P<heads>\d+)(x(?P<heads_kv>\d+))?-(?P<batch>\d+)x(?P<length>\d+)k"
    r"(?P<causal>-causal)?"
)
DECODE = re.compile(
    r"hd(?P<dim>\d+)-h(?P<heads>\d+)x(?P<heads_kv>\d+)-b(?P<batch>\d+)-k(?P<length>\d+)k-q(?P<queries>\d+)"
    r"(-p(?P<page>\d+))?"
)
MLA = re.compile(r"h(?P<heads>\d+)-b(?P<batch>\d+)-k(?P<length>\d+)k")
GEMM = re.compile(r"(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)")


def sizes(pattern: re.Pattern[str], row: str) -> dict[str, int]:
    """The numbers in a row's name; lengths in k are multiplied out, and `causal` is 0 or 1.

    Raises:
        KeyError: the name is none of the pattern's.
    """
    found = pattern.fullmatch(row)
    if found is None:
        raise KeyError(row)
    given = {
        name: int(value) if (value or "").isdigit() else int(bool(value)) for name, value in found.groupdict().items()
    }
    if "length" in given:
        given["length"] *= 1024
    for optional, default in (("dim_v", "dim"), ("heads_kv", "heads")):
        if optional in given:
            given[optional] = given[optional] or given[default]
    if "page" in given:
        given["page"] = given["page"] or PAGE
    return given


def given(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """An operand on torch's default device: zeros on a CPU, as the emulator does not need values; else normal."""
    if torch.get_default_device().type == "cpu":
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype)


def normal_e4m3(*shape: int) -> torch.Tensor:
    return normal(shape, torch.float8_e4m3fn, torch.Generator(torch.get_default_device()).manual_seed(0))


def flops(operator: str, row: str) -> float:
    """Operations of a row as its publishers count them: those that a causal mask hides are not counted."""
    match operator:
        case "flash" | "flash-fp8":
            one = sizes(ATTENTION, row)
            dims = one["dim"] + one["dim_v"]
            return 2.0 * one["length"] ** 2 * dims * one["heads"] * one["batch"] / (1 + one["causal"])
        case "flash-decode":
            one = sizes(DECODE, row)
            return 4.0 * one["queries"] * one["length"] * one["dim"] * one["heads"] * one["batch"]
        case "flash-mla" | "cutlass-mla-fp8":
            one = sizes(MLA, row)
            return 2.0 * one["batch"] * one["heads"] * one["length"] * (2 * LATENT + ROPE)
        case "quack-gemm" | "quack-gated" | "cutlass-gemm":
            one = sizes(GEMM, row)
            return 2.0 * (1 + (operator == "quack-gated")) * one["m"] * one["n"] * one["k"]
    raise KeyError(operator)


def packed_shapes(one: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """Of queries, keys and values of a row of ATTENTION: (batch, length, heads, size of a head)."""
    heads = (one["heads"], one["dim"]), (one["heads_kv"], one["dim"]), (one["heads_kv"], one["dim_v"])
    return tuple((one["batch"], one["length"], count, dim) for count, dim in heads)


def flash(row: str) -> Run:
    """FlashAttention-4's forward."""
    from flash_attn.cute.interface import _flash_attn_fwd

    one = sizes(ATTENTION, row)
    q, k, v = (given(*shape) for shape in packed_shapes(one))
    return lambda: _flash_attn_fwd(q, k, v, causal=bool(one["causal"]))


def flash_fp8(row: str) -> Run:
    """The same with normal queries, keys and values in e4m3, without scales."""
    from flash_attn.cute.interface import _flash_attn_fwd

    one = sizes(ATTENTION, row)
    q, k, v = (normal_e4m3(*shape) for shape in packed_shapes(one))
    return lambda: _flash_attn_fwd(q, k, v, causal=bool(one["causal"]))


def flash_decode(row: str) -> Run:
    """FlashAttention-4's forward for few queries, over pages.

    Without splits: it chooses two for batch 8, and 4.0.0b20 does not compile them with CuTe DSL 4.6.0.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    one = sizes(DECODE, row)
    pages = one["length"] // one["page"]
    q = given(one["batch"], one["queries"], one["heads"], one["dim"])
    k, v = (given(one["batch"] * pages, one["page"], one["heads_kv"], one["dim"]) for _ in range(2))
    table = torch.arange(one["batch"] * pages, dtype=torch.int32).view(one["batch"], pages)
    lengths = torch.full((one["batch"],), one["length"], dtype=torch.int32)
    return lambda: _flash_attn_fwd(q, k, v, seqused_k=lengths, page_table=table, causal=True)


def flash_mla(row: str) -> Run:
    """FlashAttention-4's latent attention with absorbed weights, one query a request."""
    from flash_attn.cute.interface import _flash_attn_fwd

    one = sizes(MLA, row)
    q, qv = (given(one["batch"], 1, one["heads"], width) for width in (ROPE, LATENT))
    k, v = (given(one["batch"], one["length"], 1, width) for width in (ROPE, LATENT))
    return lambda: _flash_attn_fwd(q, k, v, qv=qv)


def quack_gemm(row: str) -> Run:
    """Quack's GEMM with the configuration that it takes without tuning."""
    from quack.gemm_config import default_config
    from quack.gemm_interface import gemm_tuned

    one = sizes(GEMM, row)
    a, b = (given(one[rows], one["k"]) for rows in ("m", "n"))
    out = given(one["m"], one["n"])
    return lambda: gemm_tuned.fn(a, b.mT, out, config=default_config(a.device))


def quack_gated(row: str) -> Run:
    """Quack's product with SwiGLU, gate and up rows alternating, with the configuration that it takes without tuning.

    None of those that it tries for gated products swaps its operands.
    """
    from quack.gemm_interface import gemm_gated

    one = sizes(GEMM, row)
    x, weight = given(one["m"], one["k"]), given(2 * one["n"], one["k"])
    out = given(one["m"], one["n"])
    return lambda: gemm_gated(x, weight.mT, activation="swiglu", postact_out=out, store_preact=False, tuned=False)


def quack_softmax(row: str) -> Run:
    from quack.softmax import _softmax_fwd

    rows, width = map(int, row.split("x"))
    x, out = given(rows, width), given(rows, width)
    return lambda: _softmax_fwd(x, out)


def cutlass_gemm(row: str) -> Run:
    """CUTLASS's dense GEMM for Hopper with tiles of 128 x 256, by clusters of two CTAs that share loads of B."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    kernel = importlib.import_module("cute.hopper.kernel.dense_gemm.dense_gemm")
    one = sizes(GEMM, row)
    matrices = given(one["m"], one["k"]), given(one["n"], one["k"]), given(one["m"], one["n"])
    views = [from_dlpack(x[..., None], assumed_align=16).mark_layout_dynamic(leading_dim=1) for x in matrices]
    made = kernel.HopperWgmmaGemmKernel(cutlass.Float32, (128, 256), (2, 1))

    @cache
    def compiled() -> Any:
        return cute.compile(made, *views, stream())

    return lambda: compiled()(*views, stream())


def stream() -> Any:
    from cuda.bindings.driver import CUstream

    return CUstream(torch.cuda.current_stream().cuda_stream)


def cutlass_mla_fp8(row: str) -> Run:
    """CUTLASS's example of latent attention in e4m3, by pairs of CTAs, with pages of 128 and its script's options.

    Queries and outputs are e4m3 as well. It splits keys only where a pair has 128 heads.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    kernel = importlib.import_module("cute.blackwell.kernel.attention.mla.mla_decode_fp8")
    one = sizes(MLA, row)
    heads, batch, pages = one["heads"], one["batch"], one["length"] // PAGE
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    tile = (128, 128)
    splits = (
        1
        if heads < tile[0]
        else kernel.BlackwellMultiHeadLatentAttentionForwardFP8.get_split_kv(
            batch, 1, one["length"], tile, 2 * clusters
        )
    )
    assert splits == 1, f"{row}: a workspace for {splits} splits"

    def e4m3(*shape: int, order: tuple[int, ...], stride_order: tuple[int, ...]) -> Any:
        view = from_dlpack(torch.zeros(shape, dtype=torch.uint8).permute(order), assumed_align=16)
        view.element_type = cutlass.Float8E4M3FN
        view = view.mark_layout_dynamic(leading_dim=1)
        return view.mark_compact_shape_dynamic(mode=1, stride_order=stride_order, divisibility=16)

    of_heads = {"order": (2, 3, 1, 0), "stride_order": (3, 2, 0, 1)}
    of_pages = {"order": (1, 2, 0), "stride_order": (2, 0, 1)}
    q, q_rope, out = (e4m3(batch, 1, heads, width, **of_heads) for width in (LATENT, ROPE, LATENT))
    keys, keys_rope = (e4m3(batch * pages, PAGE, width, **of_pages) for width in (LATENT, ROPE))
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages).permute(1, 0)
    lengths = torch.full((batch,), one["length"], dtype=torch.int32)
    lse = torch.zeros(batch, 1, heads).permute(2, 1, 0)
    operands = (
        q,
        q_rope,
        keys,
        keys_rope,
        from_dlpack(table, assumed_align=16).mark_layout_dynamic(leading_dim=0),
        out,
        from_dlpack(lse, assumed_align=16).mark_layout_dynamic(leading_dim=0),
        None,
        splits,
        from_dlpack(lengths, assumed_align=16).mark_layout_dynamic(),
        None,
        192**-0.5,
        1.0,
        stream(),
    )
    made = kernel.BlackwellMultiHeadLatentAttentionForwardFP8(
        cutlass.Float32, cutlass.Float32, tile, (128, 256), clusters, PAGE, 0.0, True, True, False
    )
    return lambda: cute.compile(made, *operands, options="--opt-level 2")(*operands)


RUNS = {
    "flash": flash,
    "flash-fp8": flash_fp8,
    "flash-decode": flash_decode,
    "flash-mla": flash_mla,
    "cutlass-gemm": cutlass_gemm,
    "cutlass-mla-fp8": cutlass_mla_fp8,
    "quack-gemm": quack_gemm,
    "quack-gated": quack_gated,
    "quack-softmax": quack_softmax,
}
# In which the emulator finds data races: warps exchange row maxima through one buffer without a second barrier, and two
# warps store each log-sum-exp (docs/emulator-thirdparty.md).
FAULTY = frozenset({"cutlass-mla-fp8"})
# Of CUTLASS's examples.
OF_EXAMPLES = frozenset({"cutlass-gemm", "cutlass-mla-fp8"})
