# SPDX-License-Identifier: Apache-2.0
"""Rows of others' kernels on the emulated chip, as their packages call them, with tensors of zeros.

The process believes that it has the chip (stand_in.py). The packages are in `.peers` (`make peers`).
"""

import re
from collections.abc import Callable

import torch

BF16 = torch.bfloat16
LATENT, ROPE = 512, 64
# Compiles and launches.
Run = Callable[[], None]

ATTENTION = re.compile(r"hd(?P<dim>\d+)-h(?P<heads>\d+)-(?P<batch>\d+)x(?P<length>\d+)k(?P<causal>-causal)?")
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
    return given


def flops(operator: str, row: str) -> float:
    """Operations of a row as its publishers count them: those that a causal mask hides are not counted."""
    match operator:
        case "flash":
            one = sizes(ATTENTION, row)
            return 4.0 * one["length"] ** 2 * one["dim"] * one["heads"] * one["batch"] / (1 + one["causal"])
        case "flash-mla":
            one = sizes(MLA, row)
            return 2.0 * one["batch"] * one["heads"] * one["length"] * (2 * LATENT + ROPE)
        case "quack-gemm":
            one = sizes(GEMM, row)
            return 2.0 * one["m"] * one["n"] * one["k"]
    raise KeyError(operator)


def flash(row: str) -> Run:
    """FlashAttention-4's forward; as many heads of keys as of queries."""
    from flash_attn.cute.interface import _flash_attn_fwd

    one = sizes(ATTENTION, row)
    q, k, v = (torch.zeros(one["batch"], one["length"], one["heads"], one["dim"], dtype=BF16) for _ in range(3))
    return lambda: _flash_attn_fwd(q, k, v, causal=bool(one["causal"]))


def flash_mla(row: str) -> Run:
    """FlashAttention-4's latent attention with absorbed weights, one query a request."""
    from flash_attn.cute.interface import _flash_attn_fwd

    one = sizes(MLA, row)
    q, qv = (torch.zeros(one["batch"], 1, one["heads"], width, dtype=BF16) for width in (ROPE, LATENT))
    k, v = (torch.zeros(one["batch"], one["length"], 1, width, dtype=BF16) for width in (ROPE, LATENT))
    return lambda: _flash_attn_fwd(q, k, v, qv=qv)


def quack_gemm(row: str) -> Run:
    """Quack's GEMM with the configuration that it takes without tuning."""
    from quack.gemm_config import default_config
    from quack.gemm_interface import gemm_tuned

    one = sizes(GEMM, row)
    a, b = (torch.zeros(one[rows], one["k"], dtype=BF16) for rows in ("m", "n"))
    out = torch.zeros(one["m"], one["n"], dtype=BF16)
    return lambda: gemm_tuned.fn(a, b.mT, out, config=default_config(a.device))


RUNS = {"flash": flash, "flash-mla": flash_mla, "quack-gemm": quack_gemm}
