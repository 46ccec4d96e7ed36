# SPDX-License-Identifier: Apache-2.0
"""More of CUTLASS's examples: products with scales for blocks, of groups and of mixed types, and a state space model.

`cases_cutlass` has the others and says how they are run.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases_cutlass import BF16, CUTLASS, F16, HOPPER, KERNELS, example, matrices, product, stream
from peer_budgets import Expected
from peer_cases import SM90, SM100, Problem, normal

from benchmarks.clock.stand_in import SMS

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def by_address(*tensors: torch.Tensor) -> None:
    """Let a kernel touch what it is only given addresses of; a chip does not ask."""
    if tensors[0].device.type == "cpu":
        from emulator.host.runtime import runtime

        device = runtime().target
        assert device is not None
        for x in tensors:
            device.register(x)


class Once:
    """A kernel's host function, compiled by its first call.

    Args:
        constants: the places of its arguments that are constants of the compiled function.
        options: of the compiler.
    """

    def __init__(self, kernel: Any, constants: tuple[int, ...], options: str = "") -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        self.made: Any = None

    def __call__(self, *arguments: Any) -> None:
        from cutlass import cute

        more = {"options": self.options} if self.options else {}
        self.made = self.made or cute.compile(self.kernel, *arguments, **more)
        self.made(*(one for place, one in enumerate(arguments) if place not in self.constants))


# --- products with a scale for each block of k ---


def blocked(scales: torch.Tensor) -> torch.Tensor:
    """[rows, blocks of k] as the tensor core reads them: 128 rows by 4 blocks, the rows as 32 times 4."""
    rows, columns = scales.shape
    whole = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
    whole[:rows, :columns] = scales.view(torch.uint8)
    tiles = whole.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).contiguous()


def scales_of(rows: int, k: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Powers of two from 1/8 to 8, other ones in each row and block, so that one in a wrong place shows."""
    exponents = torch.randint(-3, 4, (rows, k // block))
    return torch.exp2(exponents.float()).to(dtype)


def scaled_by_pointers(
    m: int, n: int, k: int, block: int, dtype: torch.dtype, run: Callable[[tuple[Any, ...]], None]
) -> Problem:
    """Blocks of 16: e2m1 with scales in e4m3, NVFP4; of 32: e4m3 with scales in e8m0, MXFP8.

    Args:
        dtype: of the output.
        run: launches with pointers to A, B, their scales and the output.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    narrow = block == 16
    scale_dtype = torch.float8_e4m3fn if narrow else torch.float8_e8m0fnu
    element: Any = cutlass.Float4E2M1FN if narrow else cutlass.Float8E4M3FN
    scale: Any = cutlass.Float8E4M3FN if narrow else cutlass.Float8E8M0FNU
    result: Any = cutlass.BFloat16 if dtype == BF16 else cutlass.Float16

    def operand(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values as the kernel has them, scales, and their product in float64."""
        scales = scales_of(rows, k, block, scale_dtype)
        if narrow:
            codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
            values = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
            stored = codes[:, ::2] | codes[:, 1::2] << 4
        else:
            stored = normal(rows, k).to(torch.float8_e4m3fn)
            values = stored.float()
        return stored, scales, values.double() * scales.double().repeat_interleave(block, 1)

    a, a_scales, left = operand(m)
    b, b_scales, right = operand(n)

    def pointer(dtype: Any, x: torch.Tensor, align: int) -> Any:
        return make_ptr(dtype, x.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)

    def call(
        a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        out = torch.full((m, n), torch.nan, dtype=dtype, device=a.device)
        by_address(a, b, a_scales, b_scales, out)
        pointers = (
            pointer(element, a, 16),
            pointer(element, b, 16),
            pointer(scale, a_scales, 32),
            pointer(scale, b_scales, 32),
            pointer(result, out, 16),
        )
        run(pointers)
        return {"out": out}

    exact = left @ right.mT
    inputs = {"a": a, "b": b, "a_scales": blocked(a_scales), "b_scales": blocked(b_scales)}
    return Problem(call, inputs, {"out": Expected(exact, (left.float() @ right.float().mT).to(dtype))})


def block_scaled(m: int, n: int, k: int, tile: tuple[int, int], cluster: tuple[int, int], block: int) -> Problem:
    """The persistent product with scales for blocks."""
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.utils import LayoutEnum

    module = example(f"{KERNELS}/blockscaled_gemm/dense_blockscaled_gemm_persistent.py")
    kernel = Once(module.Sm100BlockScaledPersistentDenseGemmKernel(block, tile, cluster), (5, 7))
    layouts = (OperandMajorMode.K, OperandMajorMode.K, LayoutEnum.ROW_MAJOR)

    def run(pointers: tuple[Any, ...]) -> None:
        kernel(*pointers, layouts, (m, n, k, 1), SMS // (cluster[0] * cluster[1]), stream())

    return scaled_by_pointers(m, n, k, block, BF16, run)


@CUTLASS.case(SM100)
def cutlass_mxfp8(arch: str) -> Problem:
    """e4m3 with a scale for each 32 elements; two tiles of 128 x 128 a CTA."""
    return block_scaled(256, 512, 384, (128, 128), (1, 1), 32)


@CUTLASS.case(SM100, quick=(SM100,))
def cutlass_nvfp4(arch: str) -> Problem:
    """e2m1 with a scale in e4m3 for each 16 elements."""
    return block_scaled(256, 256, 512, (128, 128), (1, 1), 16)


@CUTLASS.case(SM100)
def cutlass_nvfp4_2cta(arch: str) -> Problem:
    """The same on pairs of CTAs; tiles of 256 x 64, whose scales of B are half of what a copy has."""
    return block_scaled(256, 192, 512, (256, 64), (2, 1), 16)


# --- groups ---

SIZES = ((128, 128, 64), (200, 136, 128), (64, 256, 192))


def grouped_kernel(arch: str, mode: str, tile: tuple[int, int]) -> Once:
    """The example's kernel, whose tensor maps are written in the memory that `mode` says: SMEM or GMEM."""
    import cutlass
    from cutlass.utils import TensorMapUpdateMode

    update = getattr(TensorMapUpdateMode, mode)
    if arch == SM100:
        module = example(f"{KERNELS}/grouped_gemm/grouped_gemm.py")
        made = module.GroupedGemmKernel(cutlass.Float32, False, tile, (1, 1), update)
    else:
        module = example(f"{HOPPER}/grouped_gemm/grouped_gemm.py")
        made = module.HopperGroupedGemmPersistentKernel(cutlass.Float32, tile, (1, 1), 1, True, update)
    return Once(made, (3, 7, 9))


Group = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def launch_grouped(kernel: Once, groups: Sequence[Group], tile: tuple[int, int], sms: int) -> None:
    """Products a [m, k] by b [n, k] to out [m, n] of each group in one launch, all dense and of one dtype."""
    from cutlass.cute.runtime import from_dlpack

    by_address(*(one for group in groups for one in group))
    device, dtype = groups[0][0].device, groups[0][0].dtype
    sizes = [(len(a), len(b), a.shape[1]) for a, b, _ in groups]

    def fixed(rows: Any, dtype: torch.dtype) -> Any:
        return from_dlpack(torch.tensor(rows, dtype=dtype, device=device), assumed_align=16)

    # A tensor map begins at a multiple of 128 bytes.
    room = torch.zeros(sms * 48 + 16, dtype=torch.int64, device=device)
    first = -room.data_ptr() % 128 // 8
    maps = room[first : first + sms * 48].view(sms, 3, 16)
    kernel(
        *matrices(*(torch.zeros(8, 8, dtype=dtype, device=device) for _ in range(3))),
        len(sizes),
        fixed([(*size, 1) for size in sizes], torch.int32),
        fixed([[(x.shape[1], 1) for x in group] for group in groups], torch.int32),
        fixed([[x.data_ptr() for x in group] for group in groups], torch.int64),
        sum(math.ceil(m / tile[0]) * math.ceil(n / tile[1]) for m, n, _ in sizes),
        from_dlpack(maps),
        sms,
        stream(),
    )


def grouped(arch: str, mode: str) -> Problem:
    """Products [m, n, k] of their own in one launch, whose tensor maps the kernel writes."""
    tile = (128, 64)
    kernel = grouped_kernel(arch, mode, tile)
    pairs = [(normal(m, k).to(F16), normal(n, k).to(F16)) for m, n, k in SIZES]
    inputs = {f"{name}{group}": x for group, pair in enumerate(pairs) for name, x in zip("ab", pair, strict=True)}

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        device = given["a0"].device
        outs = [torch.full((m, n), torch.nan, dtype=F16, device=device) for m, n, _ in SIZES]
        groups = [(given[f"a{group}"], given[f"b{group}"], out) for group, out in enumerate(outs)]
        launch_grouped(kernel, groups, tile, SMS)
        return {f"out{group}": out for group, out in enumerate(outs)}

    expected = {f"out{group}": Expected(a.double() @ b.double().mT, a @ b.mT) for group, (a, b) in enumerate(pairs)}
    return Problem(call, inputs, expected)


@CUTLASS.case(SM90, SM100)
def cutlass_grouped(arch: str) -> Problem:
    """Three products in one launch; the kernel writes their tensor maps in shared memory."""
    return grouped(arch, "SMEM")


@CUTLASS.case(SM90, SM100)
def cutlass_grouped_in_memory(arch: str) -> Problem:
    """The same, with tensor maps that are written in global memory."""
    return grouped(arch, "GMEM")


# --- Hopper's persistent products ---


@CUTLASS.case(SM90)
def cutlass_hopper_persistent(arch: str) -> Problem:
    """Tiles of 128 x 128, persistent, with warps that only copy."""
    import cutlass

    module = example(f"{HOPPER}/dense_gemm/dense_gemm_persistent.py")
    kernel = Once(module.HopperWgmmaGemmPersistentKernel(cutlass.Float32, (128, 128), (1, 1), 1, True), (3,))
    return product(384, 384, 192, F16, lambda a, b, c: kernel(*matrices(a, b, c), SMS, stream()))


@CUTLASS.case(SM90, known={SM90: ("MATRIX_ORDER",)})
def cutlass_hopper_fp8(arch: str) -> Problem:
    """e4m3 with scales of whole tensors; sums of four products are added up in registers.

    The products behind such an addition (dense_gemm_fp8_2xacc.py:864) write the accumulators that it has read (887),
    and the only wgmma.fence (810) is in front of the first products: is one missing behind the addition? The ISA asks
    for it between any other access to a register and a product that has it.
    """
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    module = example(f"{HOPPER}/dense_gemm/dense_gemm_fp8_2xacc.py")
    kernel = Once(module.HopperFP8WarpSpecialized2xAccGemmKernel((128, 128), (1, 1), 1, True, 4), (5,))
    m, n, k = 256, 384, 1024
    a, b = (normal(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    scales = torch.tensor([0.5]), torch.tensor([0.25])

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.full((m, n), torch.nan, dtype=BF16, device=given["a"].device)
        bytes_of = (given[name].view(torch.uint8) for name in ("a", "b"))
        *factors, made = matrices(*bytes_of, out)
        for one in factors:
            one.element_type = cutlass.Float8E4M3FN
        sizes = (from_dlpack(given[name]).mark_layout_dynamic() for name in ("a_scale", "b_scale"))
        kernel(*factors, made, *sizes, SMS, stream())
        return {"out": out}

    exact = a.double() @ b.double().mT / 8
    inputs = {"a": a, "b": b, "a_scale": scales[0], "b_scale": scales[1]}
    return Problem(call, inputs, {"out": Expected(exact, (a.float() @ b.float().mT / 8).to(BF16))})


# --- operands of two types ---


def mixed(m: int, n: int, k: int, bits: int, block: int) -> Problem:
    """A of integers, with a scale for each row and block of k where there are blocks, by B in bfloat16."""
    import cutlass
    from cutlass.cute.runtime import from_dlpack
    from cutlass.utils.mixed_input_helpers import is_shuffle_a

    module = example(f"{KERNELS}/mixed_input_gemm/mixed_input_gemm.py")
    most = 1 << bits - 1
    codes = torch.randint(-most, most, (m, k), dtype=torch.int8)
    b = normal(n, k).to(BF16)
    inputs = {"a": codes, "b": b}
    values = codes.double()
    element: Any = cutlass.Int4 if bits == 4 else cutlass.Int8
    shuffled = is_shuffle_a("k", k, element, cutlass.BFloat16, block)
    granularity = (1, block) if block else (0, 0)
    made = module.MixedInputGemmKernel(*granularity, cutlass.Float32, False, (128, 64, 128), (1, 1), True, shuffled)
    kernel = Once(made, (4,))
    if block:
        # The kernel's scales are contiguous along m.
        inputs["scales"] = scales_of(m, k, block, BF16).mT.contiguous()
        values = values * inputs["scales"].mT.double().repeat_interleave(block, 1)
    if bits == 4:
        placed = codes.unflatten(1, (-1, 8))[..., [0, 2, 1, 3, 4, 6, 5, 7]].flatten(1) if shuffled else codes
        inputs["a"] = placed[:, ::2] & 15 | placed[:, 1::2] << 4

    def call(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = torch.full((m, n), torch.nan, dtype=BF16, device=a.device)
        # A view with as many elements as the matrix has: those of 4 bits lie in its first half.
        stored = torch.zeros(m, k, dtype=torch.int8, device=a.device)
        stored.flatten()[: a.numel()] = a.flatten()
        left = from_dlpack(stored[..., None], assumed_align=16)
        left.element_type = element
        factors = None
        if scales is not None:
            factors = from_dlpack(scales.mT[..., None], assumed_align=16).mark_layout_dynamic(leading_dim=0)
        right, result = matrices(b, out)
        result = result.mark_compact_shape_dynamic(mode=1, stride_order=(2, 0, 1), divisibility=8)
        kernel(left.mark_layout_dynamic(leading_dim=1), factors, right, result, SMS, stream())
        return {"out": out}

    # The kernel rounds what it scales to bfloat16, which is exact for these scales.
    exact = values @ b.double().mT
    return Problem(call, inputs, {"out": Expected(exact, (values.to(BF16) @ b.mT))})


@CUTLASS.case(SM100)
def cutlass_int8_weights(arch: str) -> Problem:
    """A in 8 bits without scales: four warps convert it, into tensor memory."""
    return mixed(256, 192, 384, 8, 0)


@CUTLASS.case(SM100)
def cutlass_int4_weights(arch: str) -> Problem:
    """A in 4 bits with a scale for each 128 elements of a row."""
    return mixed(256, 128, 384, 4, 128)


# --- state space model ---


def scan(
    x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [heads, dim, tokens] and last states [heads, dim, n] of one token after the other, in float64."""
    x, delta, a, b, c, d = (one.double() for one in (x, delta, a, b, c, d))
    state = torch.zeros(x.shape[0], x.shape[1], b.shape[0], dtype=torch.float64)
    outputs = []
    for token in range(x.shape[2]):
        gain = delta[:, token, None]
        state = state * torch.exp(gain * a[:, None])[..., None]
        state = state + (gain * x[..., token])[..., None] * b[:, token]
        outputs.append(state @ c[:, token] + d * x[..., token])
    return torch.stack(outputs, -1), state


def mamba(heads: int, chunks: int, dims_of_d: bool) -> Problem:
    """One sequence in chunks of 128 tokens, heads of 64, states of 128."""
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    module = example(f"{KERNELS}/attention/mamba2_ssd/mamba2_ssd.py")
    reference = example(f"{KERNELS}/attention/mamba2_ssd/mamba2_ssd_reference.py")
    length, dim, n = 128, 64, 128
    tokens = chunks * length
    dtypes = cutlass.BFloat16, cutlass.Float32, cutlass.Float32
    kernel = Once(module.SSDKernel(*dtypes, length, dim, n, True, dims_of_d), (8,))
    x = (normal(heads, dim, tokens) / 2).to(BF16)
    delta = torch.nn.functional.softplus(normal(heads, tokens) / 2 - 4).to(BF16)
    a = (-torch.exp(normal(heads) / 2)).to(BF16)
    b, c = ((normal(n, tokens) / 2).to(BF16) for _ in range(2))
    d = (normal(heads, dim if dims_of_d else 1) / 2).to(BF16)
    sums = (delta.double() * a.double()[:, None]).unflatten(1, (chunks, length)).cumsum(-1).float()

    def views(
        x: torch.Tensor, sums: torch.Tensor, delta: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
    ) -> list[torch.Tensor]:
        """As the example's layouts are: [d, l, c, h, 1], [l, c, h, 1] twice, [l, n, c, 1, 1] twice, [d, h]."""
        in_chunks = (chunks, length)
        return [
            x.unflatten(2, in_chunks)[None].permute(2, 4, 3, 1, 0),
            sums[None].permute(3, 2, 1, 0),
            delta.unflatten(1, in_chunks)[None].permute(3, 2, 1, 0),
            *(one.unflatten(1, in_chunks)[None, None].permute(4, 2, 3, 1, 0) for one in (b, c)),
            d.mT,
        ]

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        device = given["x"].device
        y = torch.full((heads, dim, tokens), torch.nan, dtype=BF16, device=device)
        state = torch.full((heads, dim, n), torch.nan, dtype=BF16, device=device)
        *ins, last = views(**given)
        outs = y.unflatten(2, (chunks, length))[None].permute(4, 2, 3, 1, 0), state[None].permute(2, 3, 1, 0)
        dynamic = ((2, 3, 4), (1, 2, 3), (1, 2, 3), (2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 3), (1,))
        tensors = []
        for one, modes in zip((*ins, *outs, last), dynamic, strict=True):
            view = from_dlpack(one, assumed_align=16)
            for mode in modes:
                view = view.mark_compact_shape_dynamic(mode=mode, stride_order=one.dim_order())
            tensors.append(view)
        kernel(*tensors, SMS, stream())
        return {"y": y, "state": state}

    exact_y, exact_state = scan(x, delta, a, b, c, d)
    naive_y = torch.empty(length, dim, chunks, heads, 1)
    naive_state = torch.empty(dim, n, heads, 1)
    inputs = {"x": x, "sums": sums, "delta": delta, "b": b, "c": c, "d": d}
    placed = [one.float() for one in views(**inputs)]
    reference.ssd_reference_lowprecision_intermediates(
        placed[0], a.float(), *placed[2:5], naive_y, naive_state, BF16, placed[5], True, dims_of_d
    )
    naive = naive_y[..., 0].permute(3, 1, 2, 0).flatten(2), naive_state[..., 0].permute(2, 0, 1)
    return Problem(call, inputs, {"y": Expected(exact_y, naive[0]), "state": Expected(exact_state, naive[1])})


@CUTLASS.case(SM100)
def cutlass_mamba2(arch: str) -> Problem:
    """Mamba2's state space model, two heads, three chunks of 128 tokens; D is a number for each head."""
    return mamba(2, 3, dims_of_d=False)


@CUTLASS.case(SM100)
def cutlass_mamba2_vector(arch: str) -> Problem:
    """The same with a vector D."""
    return mamba(2, 3, dims_of_d=True)
