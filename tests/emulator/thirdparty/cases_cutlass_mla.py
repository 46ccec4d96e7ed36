# SPDX-License-Identifier: Apache-2.0
"""CUTLASS's examples of latent attention: queries of 128 heads and absorbed weights over paged keys, on pairs of CTAs.

`cases_cutlass` has the first ones and says how they are run.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from cases_cutlass import F16, KERNELS, example, stream
from cases_cutlass_more import Once
from cases_cutlass_variants import CUTLASS
from peer_budgets import Expected
from peer_cases import SM100, Problem, normal

from benchmarks.clock.stand_in import SMS

HEADS, LATENT, ROPE = 128, 512, 64
PAGE = 128  # keys of a page, and of a tile
E4M3 = torch.float8_e4m3fn
# Bytes of e4m3 that are no number.
NAN = 0x7F
SCALE = 192**-0.5


def weighted(scores: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """softmax(scores) @ values with weights of the dtype, as the kernels have them: tile by tile, against the largest
    score so far, while their sum takes them whole.

    scores: [heads, keys]; values: [keys, LATENT].
    """
    most = torch.full_like(scores[:, :1], -torch.inf)
    total, out = torch.zeros_like(most), torch.zeros(len(scores), values.shape[1])
    for tile, part in zip(scores.split(PAGE, 1), values.split(PAGE), strict=True):
        now = torch.maximum(most, tile.amax(1, keepdim=True))
        weights, change = torch.exp(tile - now), torch.exp(most - now)
        total = total * change + weights.sum(1, keepdim=True)
        out = out * change + weights.to(dtype).float() @ part
        most = now
    return out / total


def latent(file: str, dtype: torch.dtype, lengths: tuple[int, ...], splits: int = 1) -> Problem:
    """One query a request, over so many keys.

    Args:
        splits: of each request's keys, which a second kernel combines.
    """
    batch, pages = len(lengths), max(-(-length // PAGE) for length in lengths)
    q, q_rope = (normal(batch, 1, HEADS, width).to(dtype) for width in (LATENT, ROPE))
    keys, keys_rope = (normal(batch * pages, PAGE, width).to(dtype) for width in (LATENT, ROPE))
    # Pages in no order, each request's last ones unused where it is shorter.
    table = torch.arange(batch * pages, dtype=torch.int32).flip(0).view(batch, pages)
    inputs = {"q": q, "q_rope": q_rope, "keys": keys, "keys_rope": keys_rope, "table": table}
    inputs["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    run = decoder(file, dtype, splits)

    def call(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        device = given["q"].device
        out = torch.empty(q.shape, dtype=dtype, device=device)
        out.view(torch.uint8).fill_(NAN)
        lse = torch.full((batch, 1, HEADS), torch.nan, device=device)
        run(given, out, lse)
        return {"out": out[:, 0], "lse": lse[:, 0]}

    def attended(wide: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Scores and values of each request."""
        found = []
        for request, length in enumerate(lengths):
            values, rope = (x[table[request].long()].flatten(0, 1)[:length].to(wide) for x in (keys, keys_rope))
            query = torch.cat((q[request, 0], q_rope[request, 0]), 1).to(wide)
            found.append((SCALE * query @ torch.cat((values, rope), 1).mT, values))
        return found

    exact, single = attended(torch.float64), attended(torch.float32)
    # Log-sum-exps are to the base 2.
    lse, naive_lse = (torch.stack([scores.logsumexp(1) / math.log(2) for scores, _ in one]) for one in (exact, single))
    return Problem(
        call,
        inputs,
        {
            "out": Expected(
                torch.stack([scores.softmax(1) @ values for scores, values in exact]),
                torch.stack([weighted(*one, dtype).to(dtype).float() for one in single]),
            ),
            "lse": Expected(lse, naive_lse, magnitude=8.0),
        },
    )


def decoder(
    file: str, dtype: torch.dtype, splits: int
) -> Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], None]:
    """What launches an example on the inputs, with the options of its script."""
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    (kind,) = (
        one for name, one in vars(example(f"{KERNELS}/attention/mla/{file}.py")).items() if name.startswith("Blackwell")
    )
    made = kind(cutlass.Float32, cutlass.Float32, (128, 128), (128, 256), SMS // 2, PAGE, 0.0, True, True, False)
    kernel = Once(made, (), "--opt-level 2")
    eight_bits = dtype.itemsize == 1
    element = cutlass.Float8E4M3FN if eight_bits else cutlass.Float16

    def view(x: torch.Tensor, order: tuple[int, ...], stride_order: tuple[int, ...]) -> Any:
        found = from_dlpack((x.view(torch.uint8) if eight_bits else x).permute(order), assumed_align=16)
        found.element_type = element
        found = found.mark_layout_dynamic(leading_dim=1)
        return found.mark_compact_shape_dynamic(mode=1, stride_order=stride_order, divisibility=128 // element.width)

    def run(given: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> None:
        of_heads, of_pages = ((2, 3, 1, 0), (3, 2, 0, 1)), ((1, 2, 0), (2, 0, 1))
        batch = len(out)
        size = kind.get_workspace_size(HEADS, 1, LATENT, batch, splits, cutlass.Float32)
        workspace = from_dlpack(torch.zeros(size, dtype=torch.int8, device=out.device), assumed_align=32)
        kernel(
            *(view(given[name], *of_heads) for name in ("q", "q_rope")),
            *(view(given[name], *of_pages) for name in ("keys", "keys_rope")),
            from_dlpack(given["table"].mT, assumed_align=16).mark_layout_dynamic(leading_dim=0),
            view(out, *of_heads),
            from_dlpack(lse.permute(2, 1, 0), assumed_align=16).mark_layout_dynamic(leading_dim=0),
            workspace if size else None,
            splits,
            from_dlpack(given["lengths"], assumed_align=16).mark_layout_dynamic(),
            None,
            SCALE,
            1.0,
            stream(),
        )

    return run


@CUTLASS.case(SM100, known={SM100: ("RACE",)})
def cutlass_mla_fp8(arch: str) -> Problem:
    """Latent attention in e4m3: requests of 128 and 100 keys, 128 heads, pages of 128.

    Two warps store each row's log-sum-exp (mla_decode_fp8.py:3054), and each of them twice, once for each half of the
    output's columns; they store the same bits. Should it be one of them?
    """
    return latent("mla_decode_fp8", E4M3, (128, 100))


@CUTLASS.case(SM100, known={SM100: ("RACE",)})
def cutlass_mla_fp8_split(arch: str) -> Problem:
    """The same for one request of 256 keys, split in two, and the kernel that combines them.

    Partial log-sum-exps are stored as there.
    """
    return latent("mla_decode_fp8", E4M3, (256,), splits=2)


@CUTLASS.case(SM100, known={SM100: ("RACE", "TENSOR_ORDER")}, raced=("out",))
def cutlass_mla_fp8_tiles(arch: str) -> Problem:
    """The same for 300 keys, three tiles one after the other.

    A warp stores its rows' largest scores (mla_decode_fp8.py:2563), waits for the other half's at a barrier (2564) and
    loads them (2567). For the next tile it stores in the same places. What keeps it from that before the other half has
    loaded? In between it waits for mbarriers alone, and none says that. A half that is a tile ahead gives the other one
    another maximum, and their outputs have different scales. On a chip the load follows the barrier at once, and the
    next store comes a tile's exponentials later. And what a warp of the correction loads from tensor memory (2841) it
    releases (2851) without `tcgen05.wait::ld`. Two tiles later the softmax stores there (2406). Is that wait missing?
    """
    return latent("mla_decode_fp8", E4M3, (300,))


@CUTLASS.case(SM100, known={SM100: ("RACE",)})
def cutlass_mla_f16(arch: str) -> Problem:
    """Latent attention in float16: requests of 128 and 100 keys.

    Log-sum-exps are stored as by cutlass-mla-fp8 (mla_decode_fp16.py:3054).
    """
    return latent("mla_decode_fp16", F16, (128, 100))


@CUTLASS.case(SM100, known={SM100: ("RACE",)})
def cutlass_mla_f16_split(arch: str) -> Problem:
    """The same for one request of 256 keys, split in two.

    Partial log-sum-exps are stored as there.
    """
    return latent("mla_decode_fp16", F16, (256,), splits=2)


@CUTLASS.case(SM100, known={SM100: ("RACE", "TENSOR_ORDER")}, raced=("out",))
def cutlass_mla_f16_tiles(arch: str) -> Problem:
    """The same for 300 keys, three tiles one after the other.

    Largest scores are exchanged (mla_decode_fp16.py:2563-2567) and factors are loaded (2841) as in
    cutlass-mla-fp8-tiles.
    """
    return latent("mla_decode_fp16", F16, (300,))
