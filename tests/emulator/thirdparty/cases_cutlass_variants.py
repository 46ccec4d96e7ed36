# SPDX-License-Identifier: Apache-2.0
"""More of CUTLASS's examples: other ways to the same products, scales for blocks of rows, copies and norms.

`cases_cutlass` has the first ones and says how they are run.
"""

from collections.abc import Callable
from typing import Any

import torch
from cases_cutlass import BF16, F16, HOPPER, KERNELS, TUTORIAL, example, matrices, product, stream
from cases_cutlass_more import CUTLASS, Once, blocked, by_address, scaled_by_pointers, scales_of
from peer_budgets import Expected
from peer_cases import SM90, SM100, Problem, normal

from benchmarks.clock.stand_in import EXAMPLES, PEERS, SMS

DENSE = f"{KERNELS}/dense_gemm"
COPIES = "cute/blackwell/tutorial/tutorial_tma"
# Elements of k that a scale is for in the products with scales in float32.
BLOCK = 128


# --- products ---


def dense(file: str, m: int, n: int, k: int, tile: tuple[int, int], cluster: tuple[int, int], **how: bool) -> Problem:
    """A product that is not persistent, or whose tiles are handed out by cluster launch control.

    Args:
        how: `pairs` of CTAs multiply together, and `tma_store`.
    """
    import cutlass

    module = example(f"{DENSE}/{file}.py")
    (name,) = {"DenseGemmKernel", "PersistentDenseGemmKernel"} & vars(module).keys()
    made = getattr(module, name)(cutlass.Float32, how["pairs"], tile, cluster, how["tma_store"])
    kernel = Once(made, ())
    return product(m, n, k, BF16, lambda a, b, c: kernel(*matrices(a, b, c), stream()))


@CUTLASS.case(SM100)
def cutlass_dense(arch: str) -> Problem:
    """256 x 384 x 192: a tile a CTA, one after the other in the same warps."""
    return dense("dense_gemm", 256, 384, 192, (128, 128), (1, 1), pairs=False, tma_store=True)


@CUTLASS.case(SM100)
def cutlass_dense_2cta(arch: str) -> Problem:
    """The same on pairs of CTAs, stores by threads, clusters of 2 x 2."""
    return dense("dense_gemm", 256, 256, 192, (256, 128), (2, 2), pairs=True, tma_store=False)


@CUTLASS.case(SM100)
def cutlass_software_pipeline(arch: str) -> Problem:
    """One warp copies and multiplies; the compiler puts copies of later stages in front of products."""
    return dense("dense_gemm_software_pipeline", 256, 256, 320, (128, 128), (1, 1), pairs=False, tma_store=True)


@CUTLASS.case(SM100)
def cutlass_dynamic(arch: str) -> Problem:
    """Tiles are handed out by cluster launch control."""
    return dense("dense_gemm_persistent_dynamic", 512, 384, 192, (128, 128), (1, 1), pairs=False, tma_store=True)


@CUTLASS.case(SM100)
def cutlass_prefetch(arch: str) -> Problem:
    """Stages are fetched into L2 before there is room for them."""
    import cutlass

    module = example(f"{DENSE}/dense_gemm_persistent_prefetch.py")
    made = module.PersistentDenseGemmKernel(cutlass.Float32, False, (128, 128), (1, 1), True)
    kernel = Once(made, (3,))
    return product(256, 384, 640, BF16, lambda a, b, c: kernel(*matrices(a, b, c), SMS, stream()))


@CUTLASS.case(SM100)
def cutlass_alpha_beta(arch: str) -> Problem:
    """D = A B / 2 - 2 C: a warp of its own loads C by TMA."""
    import cutlass

    module = example(f"{DENSE}/dense_gemm_alpha_beta_persistent.py")
    made = module.SM100PersistentDenseGemmAlphaBetaKernel(cutlass.Float32, cutlass.Float32, False, (128, 128), (1, 1))
    kernel = Once(made, (6,))
    m, n, k = 256, 384, 192
    a, b, c = (normal(rows, columns).to(BF16) for rows, columns in ((m, k), (n, k), (m, n)))
    alpha, beta = 0.5, -2.0

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.full((m, n), torch.nan, dtype=BF16, device=a.device)
        factors = (cutlass.Float32(one) for one in (alpha, beta))
        kernel(*matrices(a, b, c, out), *factors, SMS, stream())
        return {"out": out}

    exact, single = (alpha * (a.to(one) @ b.to(one).mT) + beta * c.to(one) for one in (torch.float64, torch.float32))
    return Problem(call, {"a": a, "b": b, "c": c}, {"out": Expected(exact, single.to(BF16))})


# --- products with a scale for each block of k ---


def nvfp4_tutorial(step: int) -> Problem:
    module = example(f"{TUTORIAL}/nvfp4_gemm_{step}.py")
    kernel = Once(module.Sm100BlockScaledDenseGemmKernel(), ())
    m, n, k = 256, 256, 512

    def run(pointers: tuple[Any, ...]) -> None:
        kernel(*pointers, (m, n, k, 1), stream())

    return scaled_by_pointers(m, n, k, 16, F16, run)


@CUTLASS.case(SM100)
def cutlass_nvfp4_tutorial_0(arch: str) -> Problem:
    """The first step of the tutorial of products with scales: tiles of 128 x 256."""
    return nvfp4_tutorial(0)


@CUTLASS.case(SM100, known={SM100: ("RACE",)})
def cutlass_nvfp4_tutorial_1(arch: str) -> Problem:
    """Its second step, on pairs of CTAs.

    The mbarrier by which a pair gives tensor memory back (nvfp4_gemm_1.py:885) is initialised behind all that the two
    synchronize at, as in cutlass-tutorial-1: is the cluster's barrier missing?
    """
    return nvfp4_tutorial(1)


def scaled_by_tensors(file: str, largest: bool) -> Problem:
    """MXFP8 by a kernel that takes tensors, scales as [32, 4, tiles of rows, 4, tiles of k, 1].

    Args:
        largest: the kernel returns the largest magnitude of the output as well.
    """
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    module = example(f"{KERNELS}/blockscaled_gemm/dense_blockscaled_gemm_persistent_{file}.py")
    m, n, k = 256, 384, 512
    made = module.Sm100BlockScaledPersistentDenseGemmKernel(32, (128, 128), (1, 1))
    kernel = Once(made, (6 if largest else 5,))
    a, b = (normal(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    a_scales, b_scales = (scales_of(rows, k, 32, torch.float8_e8m0fnu) for rows in (m, n))

    def scales(x: torch.Tensor) -> Any:
        view = from_dlpack(x.view(torch.uint8).permute(2, 3, 0, 4, 1)[..., None], assumed_align=16)
        view.element_type = cutlass.Float8E8M0FNU
        return view.mark_layout_dynamic(leading_dim=3)

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        device = given["a"].device
        out = torch.full((m, n), torch.nan, dtype=BF16, device=device)
        most = torch.full((1, 1), -torch.inf, device=device)
        *factors, made, found = matrices(*(given[name].view(torch.uint8) for name in ("a", "b")), out, most)
        for one in factors:
            one.element_type = cutlass.Float8E4M3FN
        outs = (made, found) if largest else (made,)
        kernel(*factors, *(scales(given[name]) for name in ("a_scales", "b_scales")), *outs, SMS, stream())
        return {"out": out, "largest": most} if largest else {"out": out}

    left, right = (
        x.double() * factors.double().repeat_interleave(32, 1) for x, factors in ((a, a_scales), (b, b_scales))
    )
    exact, single = left @ right.mT, left.float() @ right.float().mT
    expected = {"out": Expected(exact, single.to(BF16))}
    if largest:
        expected["largest"] = Expected(exact.abs().amax()[None, None], single.abs().amax()[None, None])
    inputs = {"a": a, "b": b, "a_scales": blocked(a_scales), "b_scales": blocked(b_scales)}
    return Problem(call, inputs, expected)


@CUTLASS.case(SM100)
def cutlass_mxfp8_largest(arch: str) -> Problem:
    """e4m3 with a scale for each 32 elements; the output's largest magnitude as well, by atomic maxima."""
    return scaled_by_tensors("amax", largest=True)


@CUTLASS.case(SM100)
def cutlass_mxfp8_prefetch(arch: str) -> Problem:
    """The same without it; stages are fetched into L2 before there is room for them."""
    return scaled_by_tensors("prefetch", largest=False)


# --- products with scales in float32, for rows of A and blocks of B ---


def blockwise(
    file: str, name: str, rows: tuple[int, ...], place: Callable[[tuple[int, ...]], torch.Tensor] | None
) -> Problem:
    """e4m3 with a scale for each row of A and each 128 x 128 of B, by 128 of k.

    Args:
        rows: of A, of each group.
        place: what says which rows are whose; None: there is one group, and the kernel is not told.
    """
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    n, k = 256, 384
    module = example(f"{KERNELS}/blockwise_gemm/{file}.py")
    kernel = Once(getattr(module, name)(cutlass.Float32, False, (128, 128), (1, 1)), (5 if place is None else 6,))
    held = sum(rows)
    a, b = (normal(*shape).to(torch.float8_e4m3fn) for shape in ((1, held, k), (len(rows), n, k)))
    a_scales, b_scales = (
        torch.exp2(torch.randint(-3, 4, shape).float())
        for shape in ((1, k // BLOCK, held), (len(rows), n // BLOCK, k // BLOCK))
    )
    inputs = {"a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales}
    if place is not None:
        inputs["place"] = place(rows)

    def view(x: torch.Tensor, leading: int, order: tuple[int, int, int] = (1, 2, 0)) -> Any:
        eight_bits = x.dtype == torch.float8_e4m3fn
        made = from_dlpack((x.view(torch.uint8) if eight_bits else x).permute(order), assumed_align=16)
        if eight_bits:
            made.element_type = cutlass.Float8E4M3FN
        return made.mark_layout_dynamic(leading_dim=leading)

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.full((1, held, n), torch.nan, dtype=BF16, device=given["a"].device)
        operands = view(given["a"], 1), view(given["b"], 1), view(out, 1)
        scales = view(given["a_scales"], 0, (2, 1, 0)), view(given["b_scales"], 1)
        groups = [] if place is None else [from_dlpack(given["place"]).mark_layout_dynamic()]
        kernel(*operands, *scales, *groups, SMS, stream())
        return {f"out{group}": part for group, part in enumerate(out[0].split(rows))}

    left = a.double() * a_scales.double().mT.repeat_interleave(BLOCK, 2)
    right = b.double() * b_scales.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    expected = {
        f"out{group}": Expected(x @ y.mT, (x.float() @ y.float().mT).to(BF16))
        for group, (x, y) in enumerate(zip(left[0].split(rows), right, strict=True))
    }
    return Problem(call, inputs, expected)


@CUTLASS.case(SM100)
def cutlass_blockwise(arch: str) -> Problem:
    """e4m3 with a scale for each row and 128 of k; four warps add scaled sums up in registers."""
    return blockwise("blockwise_gemm", "BlockwiseGemmKernel", (256,), None)


@CUTLASS.case(SM100)
def cutlass_blockwise_contiguous(arch: str) -> Problem:
    """Three groups of rows that follow each other; each row says whose it is."""

    def groups(rows: tuple[int, ...]) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(rows))

    name = "BlockwiseContiguousGroupedGemmKernel"
    return blockwise("contiguous_grouped_gemm", name, (128, 256, 128), groups)


# --- copies ---


def copied(step: int, name: str, *, transposed: bool, more: tuple[Any, ...] = ()) -> Problem:
    """A matrix of 256 x 384 in float16, as it is or transposed."""
    from cutlass.cute.runtime import from_dlpack

    kernel = Once(getattr(example(f"{COPIES}/tma_v{step}.py"), name)(), (2,))
    x = normal(256, 384).to(F16)

    def view(x: torch.Tensor) -> Any:
        dynamic = from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=1)
        return dynamic.mark_compact_shape_dynamic(mode=1, divisibility=16)

    def call(x: torch.Tensor) -> dict[str, torch.Tensor]:
        shape = (384, 256) if transposed else (256, 384)
        out = torch.full(shape, torch.nan, dtype=F16, device=x.device)
        kernel(view(x), view(out), *more)
        return {"out": out}

    return Problem(call, {"x": x}, {"out": Expected((x.mT if transposed else x).double())})


@CUTLASS.case(SM100, known={SM100: ("UNFINISHED",)})
def cutlass_copy(arch: str) -> Problem:
    """Tiles of 128 x 128 by TMA, in and out.

    The kernel ends behind its store (tma_v0.py:314), which it neither commits nor waits for: is that missing?
    """
    return copied(0, "Sm100SimpleCopyKernel", transposed=False)


@CUTLASS.case(SM100, known={SM100: ("UNFINISHED",)})
def cutlass_transpose(arch: str) -> Problem:
    """The same transposed: warps that copy in, transpose and copy out.

    Its store (tma_v1.py:335) ends the kernel as there.
    """
    return copied(1, "Sm100MatrixTransposeKernelV1", transposed=True)


@CUTLASS.case(SM100)
def cutlass_transpose_persistent(arch: str) -> Problem:
    """The same, persistent, in stages."""
    return copied(2, "Sm100MatrixTransposeKernelV2", transposed=True, more=(SMS,))


# --- norms ---


def normalised(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, eps: float
) -> torch.Tensor:
    """LayerNorm where there is a bias, else RMSNorm, of [rows, n] in the dtype."""
    x = x.to(dtype)
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    return scaled if bias is None else scaled + bias.to(dtype)


def norm(rows: int, columns: int, run: Callable[..., None], *, layer: bool) -> Problem:
    """In float16; `run` gets the output, the input, weights, a bias or None, and eps."""
    eps = 1e-5
    x, weight = (2 * normal(rows, columns)).to(F16), normal(columns).to(F16)
    inputs = {"x": x, "weight": weight}
    if layer:
        inputs["bias"] = normal(columns).to(F16)

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = torch.full((rows, columns), torch.nan, dtype=F16, device=x.device)
        run(out, x, weight, bias, eps)
        return {"out": out}

    exact, single = (normalised(x, weight, inputs.get("bias"), one, eps) for one in (torch.float64, torch.float32))
    return Problem(call, inputs, {"out": Expected(exact, single.to(F16))})


def cta_norm(kind: str) -> Problem:
    """A CTA for each row."""
    from cutlass import Float32
    from cutlass.cute.runtime import from_dlpack

    columns = 2048
    kernel = Once(example(f"{HOPPER}/cta_norm/cta_norm.py").CtaNorm(columns, kind, 128), ())

    def run(*given: Any) -> None:
        *tensors, eps = given
        kernel(*(None if one is None else from_dlpack(one, assumed_align=16) for one in tensors), Float32(eps))

    return norm(5, columns, run, layer=kind == "layer")


@CUTLASS.case(SM90, SM100)
def cutlass_layer_norm(arch: str) -> Problem:
    """LayerNorm of rows of 2048, a CTA for each."""
    return cta_norm("layer")


@CUTLASS.case(SM90, SM100, quick=(SM90,))
def cutlass_cta_rmsnorm(arch: str) -> Problem:
    """RMSNorm by the same kernel."""
    return cta_norm("rms")


def rmsnorm(rows: int, columns: int) -> Problem:
    import sys

    import cutlass
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import make_ptr

    # The example looks for the reductions that it shares below this folder.
    folder = str(PEERS / EXAMPLES / "cute")
    if folder not in sys.path:
        sys.path.append(folder)
    module = example(f"{KERNELS}/rmsnorm/rmsnorm.py")
    kernel = Once(module.RMSNormKernel(cutlass.Float16, columns), ())

    def pointer(x: torch.Tensor) -> Any:
        return make_ptr(cutlass.Float16, x.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)

    def run(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _: None, eps: float) -> None:
        by_address(out, x, weight)
        kernel(pointer(x), pointer(weight), pointer(out), Int32(rows), Float32(eps), stream())

    return norm(rows, columns, run, layer=False)


@CUTLASS.case(SM100)
def cutlass_rmsnorm(arch: str) -> Problem:
    """Rows of 1000 by copies of 16 bytes, several of them to a CTA, the last ones partial."""
    return rmsnorm(13, 1000)


@CUTLASS.case(SM100)
def cutlass_rmsnorm_cluster(arch: str) -> Problem:
    """Rows of 20480, each spread over two CTAs, which send their sums to each other."""
    return rmsnorm(2, 20480)
