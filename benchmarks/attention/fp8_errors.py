# SPDX-License-Identifier: Apache-2.0
"""Errors of kernels that attend to an e4m3 cache, measured on a GPU: this package's, and vLLM's beside them.

`python -m benchmarks.attention.fp8_errors` prints tables of docs/attention-fp8.md. The inputs are those of the model
(fp8_accuracy.py), with ROWS rows behind the keys: queries of one head, or of absorbed MLA those of LATENT_HEADS.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from dsl_backend.attention import api
from dsl_backend.attention.spec import AttentionSpec, Batch

from .fp8_accuracy import INPUTS, Error, Sample, heading

ROWS, LATENT_HEADS = 128, 16
PAGE = 64  # FlashMLA's only one


@dataclass(frozen=True)
class Stored:
    """A sample on a device, causal: the last of its queries sees all keys.

    Attributes:
        q: [queries, heads, head_dim] bfloat16.
        cache: [pages, page size, 1, dim] e4m3, keys beside values, or of absorbed MLA keys; pages are in the order of
            the keys.
        k_scale, v_scale: [1] float32.
        exact: [queries, heads, head_dim_v] float64, in units of the stored values times v_scale.
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
        latent = sample.k.shape != sample.v.shape
        heads, keys = LATENT_HEADS if latent else 1, len(sample.k)
        q, k, v = (one.to(device) for one in (sample.q, sample.k.double(), sample.v.double()))
        unit = k.std()
        scores = q.double() @ k.T / unit / math.sqrt(q.shape[1])
        last = torch.arange(keys - len(q) // heads, keys, device=device).repeat_interleave(heads)
        seen = torch.arange(keys, device=device) <= last[:, None]
        exact = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ v
        both = (k if latent else torch.cat([k, v], dim=-1)).float().to(torch.float8_e4m3fn)
        k_scale = (1 / unit).float().view(1)
        # Values of MLA are keys.
        v_scale = k_scale if latent else torch.ones(1, device=device)
        return cls(
            q.unflatten(0, (-1, heads)).contiguous(),
            both.view(torch.uint8).view(keys // PAGE, PAGE, 1, -1).view(torch.float8_e4m3fn),
            k_scale,
            v_scale,
            (exact * v_scale.double()).unflatten(0, (-1, heads)),
        )

    @property
    def latent(self) -> bool:
        return self.q.shape[-1] == self.cache.shape[-1]

    @property
    def spec(self) -> AttentionSpec:
        head_dim = self.q.shape[-1]
        return AttentionSpec(
            heads_q=self.q.shape[1],
            heads_kv=1,
            head_dim=head_dim,
            head_dim_v=self.exact.shape[-1],
            scale=head_dim**-0.5,
            dtype=torch.bfloat16,
            kv_dtype=torch.float8_e4m3fn,
            page_size=PAGE,
            mla=self.latent,
        )

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        head_dim, head_dim_v = self.q.shape[-1], self.exact.shape[-1]
        values = self.cache[..., :head_dim_v] if self.latent else self.cache[..., head_dim:]
        return self.cache[..., :head_dim], values

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
        scales = {"k_scale": given.k_scale, "v_scale": given.v_scale}
        return api.run(api.plan(given.spec, given.batch, kernel=kernel), given.q, *given.halves, **scales)

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
            softmax_scale=given.spec.scale,
            causal=True,
            block_table=batch.block_table,
            fa_version=3,
            q_descale=q_scale.view(1, 1),
            k_descale=given.k_scale.view(1, 1),
            v_descale=given.v_scale.view(1, 1),
        )
        return out

    return run


def flash_mla(given: Stored) -> torch.Tensor:
    """FlashMLA's kernel as vLLM calls it, with a scale of 1 of queries."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8

    batch, (queries, heads) = given.batch, given.q.shape[:2]
    schedule, splits = get_mla_metadata_dense_fp8(batch.seq_lens, queries * heads, 1)
    out, _ = flash_mla_with_kvcache_fp8(
        q=given.q.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)[None],
        k_cache=given.cache,
        block_table=batch.block_table,
        cache_seqlens=batch.seq_lens,
        head_dim_v=given.exact.shape[-1],
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        softmax_scale=given.spec.scale,
        causal=True,
        descale_q=torch.ones_like(given.k_scale),
        descale_k=given.k_scale,
    )
    return out[0]


KERNELS: dict[str, Callable[[Stored], torch.Tensor]] = {
    "16 bits (default)": ours(None),
    "e4m3 (`cute-fp8`)": ours("cute-fp8"),
    "FA3 fp8, queries' own scale": flash_attention(scaled=True),
    "FA3 fp8, queries' scale 1": flash_attention(scaled=False),
}
LATENT_KERNELS = {
    "16 bits (default)": ours(None),
    "e4m3 (`cute-fp8`)": ours("cute-fp8"),
    "FlashMLA fp8, queries' scale 1": flash_mla,
}


def cell(run: Callable[[Stored], torch.Tensor], given: Stored) -> str:
    """The error of all rows and, in brackets, of the worst one, in percent; or why there is none."""
    try:
        error = Error.of(run(given).double().flatten(0, 1), given.exact.flatten(0, 1))
    except Exception as reason:  # a peer may raise anything
        return f"{type(reason).__name__}: {reason}"[:80]
    return f"{100 * error.total:.2f} ({100 * error.row:.2f})"


def table(device: torch.device, latent: bool) -> Iterator[str]:
    """Markdown: each kernel's error on each input."""
    yield from heading("absorbed MLA" if latent else "kernel", INPUTS)
    samples = [
        Stored.of(make(torch.Generator().manual_seed(seed), ROWS, latent), device)
        for seed, make in enumerate(INPUTS.values())
    ]
    for name, run in (LATENT_KERNELS if latent else KERNELS).items():
        yield f"| {name} | " + " | ".join(cell(run, given) for given in samples) + " |"


def main() -> int:
    if not torch.cuda.is_available():
        print("kernels need a GPU; `python -m benchmarks.attention.fp8_accuracy` has a model", file=sys.stderr)
        return 2
    for latent in (False, True):
        for line in table(torch.device("cuda"), latent):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
