# SPDX-License-Identifier: Apache-2.0
"""quack's kernels for SM90 and SM100, as quack-kernels ships them.

The references are torch in float64 on the same (quantized) inputs; the yardstick is torch in the outputs' dtype.
"""

from typing import Any

import torch
from peer_budgets import Expected
from peer_cases import SM90, SM100, Problem, Table, normal

QUACK = Table()
BF16 = torch.bfloat16
# Of ex2.approx, relative: 2 ulp (PTX ISA 9.2, 9.7.3.21); both sides of a quotient have it.
EX2_ERROR = 2.0**-22


# --- rows ---


def softmax(rows: int, columns: int, dtype: torch.dtype) -> Problem:
    from quack.softmax import softmax_fwd

    x = (4 * normal(rows, columns)).to(dtype)
    exact = x.double().softmax(-1)
    return Problem(
        lambda x: {"out": softmax_fwd(x)},
        {"x": x},
        {"out": Expected(exact, x.softmax(-1), absolute=2 * EX2_ERROR * float(exact.max()))},
    )


@QUACK.case(quick=(SM100,))
def softmax_bf16(arch: str) -> Problem:
    """Rows of 1000 in bfloat16."""
    return softmax(5, 1000, BF16)


@QUACK.case()
def softmax_f32(arch: str) -> Problem:
    """Rows of 2048 in float32."""
    return softmax(3, 2048, torch.float32)


@QUACK.case()
def softmax_cluster(arch: str) -> Problem:
    """A row is spread over four CTAs."""
    return softmax(2, 40960, BF16)


@QUACK.case()
def softmax_backward(arch: str) -> Problem:
    """Gradients of rows of 512."""
    from quack.softmax import softmax_bwd

    # By way of float64, whose errors float32 does not show: torch's own in float32 depends on the machine.
    y = normal(3, 512).double().softmax(-1).float()
    dy = normal(3, 512)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        a, b = y.to(dtype), dy.to(dtype)
        return a * (b - (a * b).sum(-1, keepdim=True))

    return Problem(
        lambda dy, y: {"dx": softmax_bwd(dy, y)},
        {"dy": dy, "y": y},
        {"dx": Expected(gradient(torch.float64), gradient(torch.float32))},
    )


@QUACK.case()
def cross_entropy(arch: str) -> Problem:
    """Loss, log-sum-exp and gradient of rows of 1024, one of them ignored."""
    from quack.cross_entropy import cross_entropy_fwd

    x = (2 * normal(6, 1024)).to(BF16)
    target = torch.tensor([0, 5, 1023, -100, 77, 512])
    seen = (target >= 0)[:, None]

    def want(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.to(dtype)
        lse = logits.logsumexp(-1)
        hit = torch.nn.functional.one_hot(target.clamp(min=0), 1024).to(dtype)
        loss = (lse - (hit * logits).sum(-1)) * seen[:, 0]
        return loss, lse, (logits.softmax(-1) - hit) * seen

    exact, single, naive = want(torch.float64), want(torch.float32), want(BF16)

    def call(x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        loss, lse, dx = cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
        return {"loss": loss[:, None], "lse": lse[:, None], "dx": dx}

    return Problem(
        call,
        {"x": x, "target": target},
        {
            "loss": Expected(exact[0][:, None], single[0][:, None], magnitude=float(x.abs().max())),
            "lse": Expected(exact[1][:, None], single[1][:, None], magnitude=float(x.abs().max())),
            "dx": Expected(exact[2], naive[2]),
        },
    )


def rmsnorm(rows: int, columns: int, residual: bool = False) -> Problem:
    from quack.rmsnorm import rmsnorm_fwd

    x, weight = normal(rows, columns).to(BF16), normal(columns).to(BF16)
    added = normal(rows, columns).to(BF16) if residual else None

    def want(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.to(dtype) + (0 if added is None else added.to(dtype))
        return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.to(dtype), total

    exact, naive = want(torch.float64), want(BF16)

    def call(x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None) -> dict[str, torch.Tensor]:
        out, total, _ = rmsnorm_fwd(x, weight, residual=added)
        return {"out": out, "residual": total} if residual else {"out": out}

    expected = {"out": Expected(exact[0], naive[0])}
    if residual:
        expected["residual"] = Expected(exact[1], naive[1])
    return Problem(call, {"x": x, "weight": weight, "added": added}, expected)


@QUACK.case(quick=(SM90,))
def rmsnorm_plain(arch: str) -> Problem:
    """Rows of 1024 in bfloat16, with weights."""
    return rmsnorm(5, 1024)


@QUACK.case()
def rmsnorm_residual(arch: str) -> Problem:
    """Rows of 4096 and a residual that is added first."""
    return rmsnorm(3, 4096, residual=True)


@QUACK.case()
def rmsnorm_cluster(arch: str) -> Problem:
    """Rows of 65536, spread over the CTAs of a cluster."""
    return rmsnorm(2, 65536)


@QUACK.case()
def topk(arch: str) -> Problem:
    """The 16 largest of 256 with their indices: a bitonic network in registers."""
    from quack.topk import topk_fwd

    # All different in float32, so that the indices are fixed as well.
    x = torch.stack([torch.randperm(256) for _ in range(5)]).float() - 100

    def call(x: torch.Tensor) -> dict[str, torch.Tensor]:
        values, indices = topk_fwd(x, 16)
        return {"values": values, "indices": indices.float()}

    right = x.topk(16)
    return Problem(
        call,
        {"x": x},
        {"values": Expected(right.values.double()), "indices": Expected(right.indices.double())},
    )


# --- matrices ---


def config(arch: str, **settings: Any) -> Any:
    from quack.gemm_config import GemmConfig

    plain = {"pingpong": False, "is_dynamic_persistent": False, "cluster_m": 1, "cluster_n": 1}
    return GemmConfig(**{**plain, "device_capacity": 9 if arch == SM90 else 10, **settings})


def gemm(
    arch: str, dtype: torch.dtype, m: int = 256, n: int = 256, k: int = 128, out: torch.dtype = BF16, **settings: Any
) -> Problem:
    """A [m, k] by B [k, n], both with their k contiguous."""
    from quack.gemm_interface import gemm_tuned

    a, b = normal(m, k).to(dtype), normal(n, k).to(dtype).mT
    chosen = config(arch, **settings)

    def call(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        made = torch.full((m, n), torch.nan, dtype=out, device=a.device)
        gemm_tuned.fn(a, b, made, config=chosen)
        return {"out": made}

    # What is summed: tensor cores of SM90 keep fewer bits of fp8 products than float32 has, and torch's bfloat16 is
    # the yardstick for that too.
    naive = (a.to(out) @ b.to(out)).to(out)
    return Problem(call, {"a": a, "b": b}, {"out": Expected(a.double() @ b.double(), naive)})


@QUACK.case(quick=(SM90, SM100))
def gemm_1cta(arch: str) -> Problem:
    """Tiles of 128 x 128 in bfloat16, persistent; wgmma on SM90, tcgen05 on SM100."""
    return gemm(arch, BF16, tile_m=128, tile_n=128)


@QUACK.case()
def gemm_2cta(arch: str) -> Problem:
    """On SM100 a pair of CTAs multiplies together; on SM90 the cluster shares its loads."""
    return gemm(arch, BF16, tile_m=256 if arch == SM100 else 128, tile_n=128, cluster_m=2)


@QUACK.case()
def gemm_pingpong(arch: str) -> Problem:
    """Two warpgroups take turns at tiles on SM90; clusters along N."""
    return gemm(arch, BF16, tile_m=128, tile_n=128, pingpong=arch == SM90, cluster_n=2)


@QUACK.case()
def gemm_edges(arch: str) -> Problem:
    """200 x 136 x 72 in float16: no dimension is a multiple of its tile."""
    return gemm(arch, torch.float16, m=200, n=136, k=72, out=torch.float16, tile_m=128, tile_n=128)


@QUACK.case(SM100)
def gemm_cluster_launch_control(arch: str) -> Problem:
    """Tiles are handed out by cluster launch control."""
    return gemm(arch, BF16, m=640, n=256, k=64, tile_m=128, tile_n=128, is_dynamic_persistent=True)


@QUACK.case()
def gemm_fp8(arch: str) -> Problem:
    """Operands in e4m3."""
    return gemm(arch, torch.float8_e4m3fn, tile_m=128, tile_n=128)


@QUACK.case(SM100)
def gemm_fp8_2cta(arch: str) -> Problem:
    """Operands in e4m3, pairs of CTAs."""
    return gemm(arch, torch.float8_e4m3fn, tile_m=256, tile_n=128, cluster_m=2)


@QUACK.case()
def gemm_default(arch: str) -> Problem:
    """With the configuration that quack chooses by itself."""
    from quack.gemm_interface import gemm as whole

    a, b = normal(256, 128).to(BF16), normal(256, 128).to(BF16).mT
    return Problem(
        lambda a, b: {"out": whole(a, b, tuned=False)},
        {"a": a, "b": b},
        {"out": Expected(a.double() @ b.double(), a @ b)},
    )


def gated(arch: str, **settings: Any) -> Problem:
    """A product whose odd columns are gated by its even ones."""
    from quack.gemm_interface import gemm_act

    m, n, k = 256, 256, 128
    a, b = normal(m, k).to(BF16), (normal(n, k) * k**-0.5).to(BF16).mT
    chosen = config(arch, **settings)

    def call(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        product, out = gemm_act(a, b, activation="swiglu", config=chosen)
        return {"product": product, "out": out}

    def want(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        product = a.to(dtype) @ b.to(dtype)
        return product, torch.nn.functional.silu(product[:, ::2]) * product[:, 1::2]

    exact, naive = want(torch.float64), want(BF16)
    return Problem(
        call, {"a": a, "b": b}, {"product": Expected(exact[0], naive[0]), "out": Expected(exact[1], naive[1])}
    )


@QUACK.case()
def gemm_swiglu(arch: str) -> Problem:
    """A gated activation in the epilogue, two outputs."""
    return gated(arch, tile_m=128, tile_n=128)


@QUACK.case(SM100)
def gemm_swiglu_2cta(arch: str) -> Problem:
    """The same on pairs of CTAs."""
    return gated(arch, tile_m=256, tile_n=128, cluster_m=2)


def block_scaled(arch: str, form: str, **settings: Any) -> Problem:
    from quack.blockscaled import BlockScaledOperand
    from quack.gemm_interface import gemm as whole
    from quack.gemm_interface import gemm_tuned

    m, n, k = 256, 256, 256
    # Rows of very different sizes, so that a wrong scale shows.
    a = BlockScaledOperand.quantize(normal(m, k) * torch.logspace(-3, 3, m, 2)[:, None], form)
    b = BlockScaledOperand.quantize(normal(n, k) * torch.logspace(-3, 3, k, 2), form)
    left, right = (x.dequantize(torch.float32) for x in (a, b))
    made = torch.full((m, n), torch.nan, dtype=BF16)
    chosen = config(arch, **settings) if settings else None

    def call(a: BlockScaledOperand, b: BlockScaledOperand) -> dict[str, torch.Tensor]:
        if chosen is None:
            return {"out": whole(a, b.mT, tuned=False)}
        made.fill_(torch.nan)
        gemm_tuned.fn(
            a.qdata, b.mT.qdata, made, config=chosen, SFA=a.scale, SFB=b.scale, bs_format_a=form, bs_format_b=form
        )
        return {"out": made}

    exact = left.double() @ right.double().mT
    return Problem(call, {"a": a, "b": b}, {"out": Expected(exact, (left @ right.mT).to(BF16))})


@QUACK.case(SM100)
def gemm_mxfp8(arch: str) -> Problem:
    """e4m3 with a scale for each 32 elements."""
    return block_scaled(arch, "mxfp8_e4m3", tile_m=128, tile_n=128)


@QUACK.case(SM100)
def gemm_mxfp8_default(arch: str) -> Problem:
    """The same with the configuration that quack chooses by itself."""
    return block_scaled(arch, "mxfp8_e4m3")


@QUACK.case(SM100)
def gemm_mxfp4(arch: str) -> Problem:
    """e2m1 with a scale for each 32 elements."""
    return block_scaled(arch, "mxfp4", tile_m=128, tile_n=128)


@QUACK.case(SM100, quick=(SM100,))
def gemm_nvfp4(arch: str) -> Problem:
    """e2m1 with a scale in e4m3 for each 16 elements."""
    return block_scaled(arch, "nvfp4", tile_m=128, tile_n=128)


@QUACK.case(SM100)
def gemm_nvfp4_2cta(arch: str) -> Problem:
    """The same on pairs of CTAs."""
    return block_scaled(arch, "nvfp4", tile_m=256, tile_n=128, cluster_m=2)
