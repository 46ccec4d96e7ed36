# SPDX-License-Identifier: Apache-2.0
"""Examples of CUTLASS's CuTe DSL on emulated devices, by the kernel that they show, with their own layouts.

The files are as CUTLASS has them; their scripts, which make tensors on a GPU and time it, do not run.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from peer_budgets import Expected
from peer_cases import SM90, SM100, Problem, Table, normal

from benchmarks.clock.stand_in import PEERS, SMS

CUTLASS = Table()
EXAMPLES = PEERS / "cutlass_examples"
TUTORIAL = "cute/blackwell/tutorial/tutorial_gemm"
KERNELS = "cute/blackwell/kernel"
HOPPER = "cute/hopper/kernel"
F16, BF16 = torch.float16, torch.bfloat16


@cache
def example(path: str) -> ModuleType:
    """An example as a module."""
    if str(EXAMPLES) not in sys.path:
        # Last: what the examples share is called helpers and cute.
        sys.path.append(str(EXAMPLES))
    name = "cutlass_example_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream() -> Any:
    from cuda.bindings.driver import CUstream

    return CUstream(torch.cuda.current_stream().cuda_stream)


def product(
    m: int, n: int, k: int, dtype: torch.dtype, run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
) -> Problem:
    """C [m, n] = A [m, k] by B [n, k], all with their last dimension contiguous."""
    a, b = normal(m, k).to(dtype), normal(n, k).to(dtype)

    def call(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        c = torch.full((m, n), torch.nan, dtype=dtype, device=a.device)
        run(a, b, c)
        return {"out": c}

    return Problem(call, {"a": a, "b": b}, {"out": Expected(a.double() @ b.double().mT, a @ b.mT)})


# --- tutorials ---


def tutorial(number: str, m: int = 512, n: int = 512, k: int = 192, clusters: tuple[int, ...] = ()) -> Problem:
    """One of the products of the tutorial, in float16; `clusters` are blocks of each cluster that it asks about."""
    from cutlass.cute.runtime import from_dlpack

    module = example(f"{TUTORIAL}/fp16_gemm_{number}.py")

    def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        views = []
        for x in (a, b, c):
            view = from_dlpack(x, assumed_align=32).mark_layout_dynamic(leading_dim=1)
            views.append(view.mark_compact_shape_dynamic(mode=1, divisibility=x.shape[1]))
        module.host_function(*views, *(max(1, SMS // one) for one in clusters), no_cache=True)

    return product(m, n, k, F16, run)


@CUTLASS.case(SM100, quick=(SM100,))
def cutlass_tutorial_0(arch: str) -> Problem:
    """A tile of 128 x 256: the first step of the tutorial."""
    return tutorial("0", m=128, n=256)


@CUTLASS.case(SM100, known={SM100: ("RACE",)})
def cutlass_tutorial_1(arch: str) -> Problem:
    """Pairs of CTAs and multicast.

    The mbarrier at which the second CTA of a pair says that tensor memory may be given back (fp16_gemm_1.py:353) is
    initialised, by the first one, behind all that the two synchronize at: is the cluster's barrier missing?
    """
    return tutorial("1", m=256, n=256)


@CUTLASS.case(SM100)
def cutlass_tutorial_2(arch: str) -> Problem:
    """Warps have roles."""
    return tutorial("2", m=256, n=256)


@CUTLASS.case(SM100)
def cutlass_tutorial_3(arch: str) -> Problem:
    """Persistent, its epilogue beside the next tile's products."""
    return tutorial("3", clusters=(2,))


@CUTLASS.case(SM100)
def cutlass_tutorial_3_1(arch: str) -> Problem:
    """The same with tiles handed out by cluster launch control."""
    return tutorial("3_1", clusters=(2,))


@CUTLASS.case(SM100)
def cutlass_tutorial_4(arch: str) -> Problem:
    """Preferred clusters of 8, which 4 SMs have no room for, and others of 2."""
    return tutorial("4", m=512, n=1024, k=64, clusters=(8, 2))


@CUTLASS.case(SM100)
def cutlass_tutorial_5(arch: str) -> Problem:
    """Clusters of 4 and tiles of 256 x 64."""
    return tutorial("5", m=512, n=256, clusters=(4,))


# --- products ---


def matrices(*tensors: torch.Tensor) -> list[Any]:
    """[rows, columns] as [rows, columns, 1], the columns contiguous."""
    from cutlass.cute.runtime import from_dlpack

    return [from_dlpack(x[..., None], assumed_align=16).mark_layout_dynamic(leading_dim=1) for x in tensors]


def persistent(m: int, n: int, k: int, tile: tuple[int, int], cluster: tuple[int, int], **how: bool) -> Problem:
    """The persistent product of Blackwell."""
    import cutlass

    module = example(f"{KERNELS}/dense_gemm/dense_gemm_persistent.py")

    def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        kernel = module.PersistentDenseGemmKernel(cutlass.Float32, how["pairs"], tile, cluster, how["tma_store"])
        kernel(*matrices(a, b, c), SMS // (cluster[0] * cluster[1]), stream())

    return product(m, n, k, BF16, run)


@CUTLASS.case(SM100, quick=(SM100,))
def cutlass_persistent(arch: str) -> Problem:
    """256 x 384 x 192: a warp asks for the next stage before it has issued this one's products."""
    return persistent(256, 384, 192, (128, 128), (1, 1), pairs=False, tma_store=True)


@CUTLASS.case(SM100)
def cutlass_persistent_2cta(arch: str) -> Problem:
    """Pairs of CTAs, stores by threads."""
    return persistent(256, 256, 192, (256, 128), (2, 1), pairs=True, tma_store=False)


def hopper_product(file: str, cluster: tuple[int, int], **more: Any) -> Problem:
    import cutlass

    module = example(f"{HOPPER}/dense_gemm/{file}.py")
    (name,) = [one for one in vars(module) if one.startswith("HopperWgmmaGemm") and one.endswith("Kernel")]

    def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        kernel = getattr(module, name)(cutlass.Float32, (128, 128), cluster, *more.get("made", ()))
        kernel(*matrices(a, b, c), *more.get("called", ()), stream())

    return product(256, 256, 192, F16, run)


@CUTLASS.case(SM90, quick=(SM90,))
def cutlass_hopper(arch: str) -> Problem:
    """Tiles of 128 x 128 in float16 by wgmma."""
    return hopper_product("dense_gemm", (1, 1))


@CUTLASS.case(SM90)
def cutlass_hopper_multicast(arch: str) -> Problem:
    """Clusters of 2 x 1, which share their loads of B."""
    return hopper_product("dense_gemm", (2, 1))


# --- attention ---


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [b, q, h, d] and log-sum-exps [b, q, h] of [b, tokens, heads, d], computed in the dtype."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).mT


def attention(arch: str, heads: int, kv_heads: int, tokens: int, dim: int, causal: bool) -> Problem:
    """The forward pass in float16, over one sequence."""
    shapes = ((1, tokens, heads, dim), (1, tokens, kv_heads, dim), (1, tokens, kv_heads, dim))
    q, k, v = (normal(*shape).to(F16) for shape in shapes)
    exact, naive = attended(q, k, v, torch.float64, causal), attended(q, k, v, torch.float32, causal)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.full(shapes[0], torch.nan, dtype=F16, device=q.device)
        lse = torch.full(shapes[0][:3], torch.nan, device=q.device)
        (blackwell_attention if arch == SM100 else hopper_attention)(q, k, v, out, lse, causal)
        return {"out": out[0], "lse": lse[0]}

    # The log-sum-exps of Blackwell's example are to the base 2.
    lse, single = (one[1][0] / (math.log(2) if arch == SM100 else 1) for one in (exact, naive))
    half = attended(q, k, v, F16, causal)[0]
    return Problem(
        call,
        {"q": q, "k": k, "v": v},
        {"out": Expected(exact[0][0], half[0]), "lse": Expected(lse, single, magnitude=8.0)},
    )


def masked(module: ModuleType, causal: bool) -> tuple[Any, Any]:
    """The mask's kind, as the example knows it, and its right side."""
    from cutlass import Int32

    return module.fmha_utils.MaskEnum.WINDOW_MASK, Int32(0) if causal else None


def blackwell_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> None:
    from cutlass import Float32
    from cutlass.cute.runtime import from_dlpack

    module = example(f"{KERNELS}/attention/fmha/fmha.py")
    (_, tokens, heads, dim), kv_heads = q.shape, k.shape[2]

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (kv_heads, x.shape[2] // kv_heads))

    views = [
        from_dlpack(grouped(x), assumed_align=32).mark_layout_dynamic(leading_dim=leading)
        for x, leading in ((q, 4), (k, 4), (v, 4), (out, 4), (lse, 3))
    ]
    kind, right = masked(module, causal)
    kernel = module.BlackwellFusedMultiHeadAttentionForward(
        Float32, Float32, (128, 128), dim, False, kind, False, False
    )
    scale = 1 / math.sqrt(dim)
    size = (1, tokens, tokens, tokens, heads, kv_heads, dim, dim)
    scales = [Float32(one) for one in (scale * math.log2(math.e), scale, 1.0)]
    kernel(*views[:4], size, None, None, views[4], None, *scales, None, None, right, None, None, stream(), False)


def hopper_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> None:
    from cutlass import Float32
    from cutlass.cute.runtime import from_dlpack

    module = example(f"{HOPPER}/attention/fmha.py")
    kv_heads, dim = k.shape[2], q.shape[3]

    def placed(x: torch.Tensor) -> Any:
        """As [tokens, d, heads of a group, groups, b]."""
        x = x if x.dim() == 4 else x[..., None]
        moved = x.unflatten(2, (kv_heads, x.shape[2] // kv_heads)).permute(1, 4, 3, 2, 0)
        return from_dlpack(moved, assumed_align=16).mark_layout_dynamic(leading_dim=1)

    kind, right = masked(module, causal)
    kernel = module.HopperFusedMultiHeadAttentionForward(Float32, Float32, (64, 128, dim), False, kind)
    scale = 1 / math.sqrt(dim)
    scales = [Float32(one) for one in (scale * math.log2(math.e), scale, 1.0)]
    kernel(*map(placed, (q, k, v, out, lse)), *scales, None, right, stream())


@CUTLASS.case(SM90, SM100, known={SM90: ("UNFINISHED",)})
def cutlass_attention(arch: str) -> Problem:
    """256 queries and keys, 2 heads of 64.

    Hopper's kernel ends behind its last stores (fmha.py:1244-1251) and nobody waits until they have read shared memory:
    is the pipeline's `producer_tail` missing?
    """
    return attention(arch, 2, 2, 256, 64, causal=False)


@CUTLASS.case(SM90, SM100, known={SM90: ("UNFINISHED",)})
def cutlass_attention_causal(arch: str) -> Problem:
    """The same with a causal mask and 2 heads of queries to one of keys.

    Hopper's stores end as there.
    """
    return attention(arch, 2, 1, 256, 64, causal=True)
