# SPDX-License-Identifier: Apache-2.0
"""Cases of real sizes, which run on a GPU."""

from typing import Any

from dsl_backend.testing.cases.case import BF16, FP16, FULL, Case, mla
from dsl_backend.testing.inputs import Layout, Surroundings

LONG_DECODE = (1,) * 64


def real(id: str, why: str, **facts: Any) -> Case:
    """A case of real size."""
    return Case(id=f"real-{id}", why=why, tier="gpu", **{"heads": (32, 8), "dim": 128, **facts})


GPU = [
    real("decode", "Llama 3 8B, a batch of 64", q_lens=LONG_DECODE, kv_lens=tuple(37 + 131 * i for i in range(64))),
    real("decode-long", "one long request: every program works on it", q_lens=(1,), kv_lens=(131072,)),
    real(
        "decode-skewed",
        "one long request among short ones",
        q_lens=LONG_DECODE,
        kv_lens=(100_003, *(17 + i for i in range(63))),
        seed=1,
    ),
    real("decode-256", "a large batch", q_lens=(1,) * 256, kv_lens=tuple(700 + i for i in range(256))),
    real("decode-fp8", "a cache of e4m3", q_lens=LONG_DECODE, kv_lens=tuple(99 + 61 * i for i in range(64)), fp8=True),
    real("decode-page-528", "pages of a hybrid model", q_lens=(1,) * 16, kv_lens=(5000,) * 16, page=528),
    real("speculative", "four drafts a request", q_lens=(5,) * 32, kv_lens=tuple(500 + 97 * i for i in range(32))),
    real("prefill", "a fresh prompt", q_lens=(4096,), kv_lens=(4096,)),
    real("prefill-batch", "prompts of unequal length", q_lens=(1, 777, 2048, 129), kv_lens=(1, 777, 2048, 129)),
    real("extend", "a chunk over a long context", q_lens=(2048,), kv_lens=(16384,), heads=(8, 2)),
    real(
        "mixed",
        "chunked prefill: decodes ride along",
        q_lens=(*(1,) * 30, 1024, 600),
        kv_lens=(*(100 + 171 * i for i in range(30)), 3000, 600),
    ),
    real("prefill-fp8", "a prompt over a cache of e4m3", q_lens=(1500,), kv_lens=(4000,), fp8=True),
    real(
        "gpt-oss",
        "window and sinks, 64 heads of 64",
        q_lens=(*(1,) * 8, 1500),
        kv_lens=(*(900 + 333 * i for i in range(8)), 2500),
        heads=(64, 8),
        dim=64,
        window=(127, None),
        sinks=True,
    ),
    real(
        "gemma-2",
        "softcap and window, heads of 256",
        q_lens=(*(1,) * 8, 1200),
        kv_lens=(*(700 + 501 * i for i in range(8)), 5000),
        heads=(16, 8),
        dim=256,
        window=(4095, None),
        softcap=50.0,
        q_gain=4.0,
    ),
    real("qwen-2", "groups of seven", q_lens=(1, 1, 900), kv_lens=(3000, 40, 1000), heads=(28, 4)),
    real("dim-512", "the widest heads", q_lens=(1, 1, 300), kv_lens=(3000, 40, 1000), heads=(8, 1), dim=512),
    real(
        "encoder",
        "packed and bidirectional",
        q_lens=(512, 77, 1, 1500),
        kv_lens=(512, 77, 1, 1500),
        heads=(16, 16),
        dim=64,
        page=None,
        causality=FULL,
    ),
    real(
        "mla-prefill",
        "192 against 128, packed",
        q_lens=(1024, 300),
        kv_lens=(1024, 300),
        heads=(16, 16),
        dim=192,
        dim_v=128,
        page=None,
        around=Surroundings(layout=Layout.SEPARATE),
    ),
    real("alibi", "slopes at long distances", q_lens=(1, 1, 700), kv_lens=(9000, 77, 700), heads=(32, 32), alibi=True),
    mla(128, id="real-mla-128", tier="gpu", q_lens=(1,) * 32, kv_lens=(4096,) * 32, page=64, why="DeepSeek V3 decode"),
    mla(
        16,
        id="real-mla-16",
        tier="gpu",
        q_lens=(1,) * 64,
        kv_lens=tuple(50 + 201 * i for i in range(64)),
        page=64,
        split_q=True,
        why="V3 sharded over eight GPUs, unequal lengths",
    ),
    mla(
        128,
        id="real-mla-speculative",
        tier="gpu",
        q_lens=(2, 3, 1, 4) * 4,
        kv_lens=tuple(900 + 777 * i for i in range(16)),
        page=64,
        why="drafts with 128 heads: several row tiles a request",
    ),
    mla(
        128,
        id="real-mla-fp8",
        tier="gpu",
        q_lens=(1,) * 16,
        kv_lens=tuple(100 + 1001 * i for i in range(16)),
        page=64,
        fp8=True,
        why="a latent cache in e4m3",
    ),
]
GPU += [
    real(
        f"dim-{dim}-{str(dtype).removeprefix('torch.')}",
        "every head size in real tiles",
        q_lens=(1, 3, 300, 129),
        kv_lens=(777, 65, 1000, 129),
        heads=(8, 2),
        dim=dim,
        dtype=dtype,
    )
    for dim in (64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 200, 248, 256)
    for dtype in (BF16, FP16)
]
