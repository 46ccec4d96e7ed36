# SPDX-License-Identifier: Apache-2.0
"""Errors of kernels that attend to an e4m3 cache, measured on a GPU: this package's and FlashAttention-3's.

`python -m benchmarks.attention.fp8_errors` prints a table of docs/attention-fp8.md. The inputs are those of the model
(fp8_accuracy.py), with QUERIES queries of one head behind the keys.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from dsl_backend.attention import api
from dsl_backend.attention.spec import AttentionSpec, Batch

from .fp8_accuracy import HEAD_DIM, INPUTS, Error, Sample

QUERIES, PAGE = 128, 16


@dataclass(frozen=True)
class Stored:
    """A sample on a device, causal: the last of its queries sees all keys.

    Attributes:
        q: [queries, 1, head_dim] bfloat16.
        cache: [pages, page size, 1, 2 * head_dim] e4m3, keys beside values; pages are in the order of the keys.
        k_scale, v_scale: [1] float32.
        exact: [queries, head_dim] float64.
    """

    q: torch.Tensor
    cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    exact: torch.Tensor

    @property
    def keys(self) -> int:
        return self.cache.shape[0] * PAGE

    @classmethod
    def of(cls, sample: Sample, device: torch.device) -> "Stored":
        q, k, v = (one.to(device) for one in (sample.q, sample.k.double(), sample.v.double()))
        rows, keys = len(q), len(k)
        unit = k.std()
        scores = q.double() @ k.T / unit / math.sqrt(HEAD_DIM)
        seen = torch.arange(keys, device=device) <= torch.arange(keys - rows, keys, device=device)[:, None]
        exact = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ v
        both = torch.cat([k, v], dim=-1).float().to(torch.float8_e4m3fn)
        return cls(
            q[:, None].contiguous(),
            both.view(torch.uint8).view(keys // PAGE, PAGE, 1, 2 * HEAD_DIM).view(torch.float8_e4m3fn),
            (1 / unit).float().view(1),
            torch.ones(1, device=device),
            exact,
        )

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache[..., :HEAD_DIM], self.cache[..., HEAD_DIM:]

    @property
    def batch(self) -> Batch:
        device = self.q.device
        return Batch(
            query_start_loc=torch.tensor([0, len(self.q)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([self.keys], dtype=torch.int32, device=device),
            num_tokens=len(self.q),
            max_query_len=len(self.q),
            max_seq_len=self.keys,
            block_table=torch.arange(self.keys // PAGE, dtype=torch.int32, device=device)[None],
        )


def ours(kernel: str | None) -> Callable[[Stored], torch.Tensor]:
    """This package's kernel of a name; the default one without."""

    def run(given: Stored) -> torch.Tensor:
        spec = AttentionSpec(
            heads_q=1,
            heads_kv=1,
            head_dim=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            dtype=torch.bfloat16,
            kv_dtype=torch.float8_e4m3fn,
            page_size=PAGE,
        )
        scales = {"k_scale": given.k_scale, "v_scale": given.v_scale}
        return api.run(api.plan(spec, given.batch, kernel=kernel), given.q, *given.halves, **scales)

    return run


def flash_attention(scaled: bool) -> Callable[[Stored], torch.Tensor]:
    """FlashAttention-3 as vLLM calls it. Queries have one scale: that of their largest element, or 1 if not `scaled`.

    vLLM's scale of queries is 1 unless the checkpoint has one.
    """

    def run(given: Stored) -> torch.Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        batch, q = given.batch, given.q.float()
        q_scale = q.abs().max().view(1) / 448.0 if scaled else torch.ones_like(given.v_scale)
        out = torch.empty_like(given.q)
        keys, values = given.halves
        flash_attn_varlen_func(
            q=(q / q_scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn),
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=HEAD_DIM**-0.5,
            causal=True,
            block_table=batch.block_table,
            fa_version=3,
            q_descale=q_scale.view(1, 1),
            k_descale=given.k_scale.view(1, 1),
            v_descale=given.v_scale.view(1, 1),
        )
        return out

    return run


KERNELS: dict[str, Callable[[Stored], torch.Tensor]] = {
    "16 bits (default)": ours(None),
    "e4m3 (`cute-fp8`)": ours("cute-fp8"),
    "FA3 fp8, queries' own scale": flash_attention(scaled=True),
    "FA3 fp8, queries' scale 1": flash_attention(scaled=False),
}


def cell(run: Callable[[Stored], torch.Tensor], given: Stored) -> str:
    """The error of all rows and, in brackets, of the worst one, in percent; or why there is none."""
    try:
        error = Error.of(run(given)[:, 0].double(), given.exact)
    except Exception as reason:  # a peer may raise anything
        return f"{type(reason).__name__}: {reason}"[:80]
    return f"{100 * error.total:.2f} ({100 * error.row:.2f})"


def table(device: torch.device) -> Iterator[str]:
    """Markdown: each kernel's error on each input."""
    yield "| kernel | " + " | ".join(INPUTS) + " |"
    yield "|---" * (len(INPUTS) + 1) + "|"
    samples = [
        Stored.of(make(torch.Generator().manual_seed(seed), QUERIES), device)
        for seed, make in enumerate(INPUTS.values())
    ]
    for name, run in KERNELS.items():
        yield f"| {name} | " + " | ".join(cell(run, given) for given in samples) + " |"


def main() -> int:
    if not torch.cuda.is_available():
        print("kernels need a GPU; `python -m benchmarks.attention.fp8_accuracy` has a model", file=sys.stderr)
        return 2
    for line in table(torch.device("cuda")):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
