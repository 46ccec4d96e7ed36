# SPDX-License-Identifier: Apache-2.0
"""What GPUs did: on an H200 rows of docs/performance, which has their dates, commits and commands; on an H100 and an
H200 kernels of others (on_chip.py); on a B200 figures that others published for kernels of theirs.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from .peers import flops

PEERS_ON_HOPPER = Path(__file__).resolve().parents[2] / "docs/data/hopper-peers.jsonl"


@dataclass(frozen=True)
class Measured:
    """A row that was timed.

    Attributes:
        operator: softmax, linear, decode, prefill, mla-decode, mla-prefill or sampling; of others flash, flash-fp8,
            flash-decode, flash-mla, cutlass-gemm, cutlass-mla-fp8, quack-gemm, quack-gated or quack-softmax.
        row: the benchmark's name of it; of others' operators the sizes that peers.py reads in it.
        microseconds: that the kernel took.
        samples: clusters that the clock simulates; 0: all, where CTAs wait for each other (none of others' do).
        fitted: constants were chosen with it; all others are held out.
        chip: that took them.
        source: who says so.
    """

    operator: str
    row: str
    microseconds: float
    samples: int = 1
    fitted: bool = False
    chip: str = "H200"
    source: str = field(kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.operator} {self.row}"


def published(
    operator: str, row: str, teraflops: float, source: str, samples: int = 1, *, chip: str = "B200"
) -> Measured:
    """A figure in TFLOP/s that others published."""
    us = round(flops(operator, row) / teraflops * 1e-6, 2)
    return Measured(operator, row, us, samples, chip=chip, source=source)


# Pages of docs/performance that have the times of an operator's rows.
PAGES = {
    "softmax": "softmax-and-norm",
    "linear": "linear",
    "decode": "attention",
    "prefill": "attention",
    "mla-decode": "mla",
    "mla-prefill": "mla",
    "sampling": "sampling",
}


def ours(operator: str, row: str, us: float, samples: int = 1, *, fitted: bool = False) -> Measured:
    """A row of this package's kernels on an H200."""
    return Measured(operator, row, us, samples, fitted, source=f"docs/performance/{PAGES[operator]}.md")


# With a filter the work of a row of logits depends on them, and a batch takes as long as its slowest row: more of them
# are simulated. Top-p alone is left out: some rows read their logits two or three times, and which they are is chance.
MEASURED = (
    ours("softmax", "512x4096", 3.49),
    ours("softmax", "512x8192", 5.29, fitted=True),
    ours("softmax", "4096x8192", 32.69, fitted=True),
    ours("softmax", "2048x16384", 32.93),
    ours("softmax", "1024x32768", 33.0),
    ours("softmax", "32768x4096", 129.5),
    ours("softmax", "32768x32768", 994.5),
    ours("linear", "llama-8b-1", 53.91, samples=0),
    ours("linear", "llama-8b-64", 58.21, samples=0),
    ours("linear", "llama-8b-256", 93.68, fitted=True),
    ours("linear", "llama-8b-1024", 344.6),
    ours("linear", "qwen3-32b-256", 201.1),
    ours("linear", "held-out-deepseek-v2-lite-shared-640", 24.47),
    ours("linear", "plain-8192x8192x2048", 385.3, fitted=True),
    ours("decode", "hd128-h32x8-b1-k8k", 13.90, samples=2),
    ours("decode", "hd128-h32x8-b8-k8k", 66.77, samples=2, fitted=True),
    ours("decode", "hd64-h64x8-b8-k8k", 38.21, samples=2),
    ours("decode", "hd128-h8x1-b8-k8k", 14.22, samples=2),
    ours("decode", "hd128-h32x8-b64-k8k", 482.6, samples=2),
    ours("decode", "fp8-hd128-h32x8-b8-k8k", 48.1, samples=2),
    ours("prefill", "hd128-h32x8-16x1k", 299.8, fitted=True),
    ours("prefill", "hd128-h32x8-4x4k", 947.5),
    ours("prefill", "hd64-h64x8-16x1k", 396.7),
    ours("prefill", "hd256-h16x2-16x1k", 296.0),
    ours("prefill", "fp8-hd128-h32x8-16x1k", 313.5),
    ours("mla-decode", "h16-b8-k8k-q1", 30.53, samples=2),
    ours("mla-decode", "h128-b8-k8k-q1", 45.70, samples=2),
    ours("mla-prefill", "h16-16x1k", 186.7),
    # Rows with top-p alone read some of their logits once more, others not, so that one of them does not stand for all.
    ours("sampling", "none-1x151936", 7.84),
    ours("sampling", "none-16x151936", 11.3),
    ours("sampling", "none-64x151936", 15.9),
    ours("sampling", "none-256x151936", 41.0),
    ours("sampling", "k-1x151936", 9.93),
    ours("sampling", "k-64x151936", 19.65, samples=16),
    ours("sampling", "k-256x151936", 48.04, samples=16),
    ours("sampling", "k+p-1x151936", 10.16),
    ours("sampling", "k+p-16x151936", 13.3, samples=16),
    ours("sampling", "k+p-64x151936", 20.9, samples=16),
    ours("sampling", "k+p-256x151936", 48.2, samples=16),
    ours("sampling", "min-p-1x151936", 10.04),
    ours("sampling", "min-p-64x151936", 27.84, samples=16),
    ours("sampling", "min-p-256x151936", 67.76, samples=16),
)
# One sequence length after the other of FlashAttention's benchmark: 32k tokens, heads of 2048 elements together. Causal
# rows have CTAs of many lengths, so more of them are simulated. So have this package's kernels of the rows of MLA.
FLASH_TABLE, FLASH_2280 = "flash-attention #2605", "flash-attention #2280"
PUBLISHED = (
    published("flash", "hd128-h16-32x1k", 975, FLASH_TABLE),
    published("flash", "hd128-h16-16x2k", 1131, FLASH_TABLE),
    published("flash", "hd128-h16-8x4k", 1256, FLASH_TABLE),
    published("flash", "hd128-h16-4x8k", 1535, FLASH_2280),
    published("flash", "hd128-h16-32x1k-causal", 660, FLASH_TABLE, 8),
    published("flash", "hd128-h16-16x2k-causal", 899, FLASH_TABLE, 12),
    published("flash", "hd128-h16-8x4k-causal", 1062, FLASH_TABLE, 12),
    published("flash", "hd128-h16-4x8k-causal", 1418, FLASH_2280, 16),
    published("flash", "hd64-h32-32x1k", 619, FLASH_TABLE),
    published("flash", "hd64-h32-16x2k", 755, FLASH_TABLE),
    published("flash", "hd64-h32-8x4k", 825, FLASH_TABLE),
    published("flash", "hd64-h32-32x1k-causal", 384, FLASH_TABLE, 8),
    published("flash", "hd64-h32-16x2k-causal", 561, FLASH_TABLE, 12),
    published("flash", "hd64-h32-8x4k-causal", 708, FLASH_TABLE, 12),
    published("flash-mla", "h128-b128-k2k", 800, "flash-attention #2468", 7),
    published("flash-mla", "h128-b128-k4k", 1013, "flash-attention #2468", 7),
    published("flash-mla", "h128-b128-k8k", 1178, "flash-attention #2468", 7),
    published("flash-fp8", "hd128-h16-32x1k-causal", 832, "flash-attention #2642", 8),
    published("quack-gemm", "4096x4096x4096", 1047, "quack #82"),
    published("quack-gemm", "8192x8192x4096", 1276, "quack #82"),
    published("quack-gemm", "8192x8192x8192", 1233, "quack #82"),
    published("quack-gemm", "16384x16384x16384", 1225, "quack #82"),
)
# FlashAttention-4's forward in TFLOP/s, in files of 2026-07-24 of NVIDIA/cudnn-frontend's
# benchmark/sdpa_benchmark_training/results: llama3.1 (64 query heads) and dsv3 (128), each for gb200 and gb300.
CUDNN_FRONTEND = "cudnn-frontend's benchmark"
SUPERCHIPS = (
    ("hd128-h64x8-2x2k", 1, {"GB200": 1108, "GB300": 1916}),
    ("hd128-h64x8-2x4k", 1, {"GB200": 1203, "GB300": 2047}),
    ("hd128-h64x8-2x2k-causal", 8, {"GB200": 1066, "GB300": 1291}),
    ("hd192v128-h128-2x2k", 1, {"GB200": 1503, "GB300": 1755}),
    ("hd192v128-h128-2x2k-causal", 8, {"GB200": 1112, "GB300": 1262}),
)
ON_SUPERCHIPS = tuple(
    published("flash", row, figures[chip], CUDNN_FRONTEND, samples, chip=chip)
    for chip in ("GB200", "GB300")
    for row, samples, figures in SUPERCHIPS
)
# FlashAttention-4's dedicated kernel for heads of 256, as vLLM's fork of the package had it before that pull request.
FLASH_VLLM_183 = "vllm-project/flash-attention #183"
ON_B300 = (Measured("flash", "hd256-h8-16x1k-causal", 112, 8, chip="B300", source=FLASH_VLLM_183),)
# Kernels of others for Hopper. Causal rows have CTAs of many lengths, so more of them are simulated.
ON_HOPPER = (
    ("flash", "hd128-h16-16x1k", 1),
    ("flash", "hd128-h16-8x2k", 1),
    ("flash", "hd128-h16-4x4k", 1),
    ("flash", "hd128-h16-16x1k-causal", 8),
    ("flash", "hd128-h16-8x2k-causal", 12),
    ("flash", "hd128-h16-4x4k-causal", 12),
    ("flash", "hd64-h32-16x1k", 1),
    ("flash", "hd64-h32-8x2k", 1),
    ("flash", "hd64-h32-4x4k", 1),
    ("flash", "hd64-h32-16x1k-causal", 8),
    ("flash", "hd64-h32-8x2k-causal", 12),
    ("flash", "hd64-h32-4x4k-causal", 12),
    ("flash", "hd192v128-h16-16x1k", 1),
    ("flash", "hd192v128-h16-16x1k-causal", 8),
    ("flash", "hd256-h8-16x1k", 1),
    # A third of the clusters has a tile more than the others.
    ("quack-gemm", "2048x2048x2048", 2),
    ("quack-gemm", "4096x4096x4096", 2),
    ("quack-gemm", "8192x8192x2048", 1),
    ("quack-gemm", "8192x8192x3072", 1),
    ("quack-gemm", "8192x8192x4096", 1),
    ("quack-gemm", "8192x8192x8192", 1),
    ("quack-gated", "256x14336x4096", 1),
    ("quack-gated", "2048x14336x4096", 1),
    ("quack-softmax", "512x4096", 1),
    ("quack-softmax", "512x8192", 1),
    ("quack-softmax", "4096x8192", 1),
    ("quack-softmax", "2048x16384", 1),
    ("quack-softmax", "1024x32768", 1),
    ("quack-softmax", "32768x4096", 1),
    ("quack-softmax", "32768x32768", 1),
    ("cutlass-gemm", "2048x2048x2048", 1),
    ("cutlass-gemm", "4096x4096x4096", 1),
    ("cutlass-gemm", "8192x8192x4096", 1),
)


def on_hopper(path: Path = PEERS_ON_HOPPER) -> tuple[Measured, ...]:
    """The rows of ON_HOPPER that a file has times of, chip by chip."""
    timed = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    us = {(one["chip"], one["operator"], one["row"]): one["us"] for one in timed if "us" in one}
    return tuple(
        Measured(operator, row, us[chip, operator, row], samples, chip=chip, source=f"docs/data/{path.name}")
        for chip in ("H100", "H200")
        for operator, row, samples in ON_HOPPER
        if (chip, operator, row) in us
    )


ROWS = MEASURED + on_hopper() + PUBLISHED + ON_SUPERCHIPS + ON_B300
# Nobody published these: for `--beside` alone.
UNTIMED = tuple(
    Measured(operator, row, 0.0, samples, chip="B200", source="nobody")
    for operator, row, samples in (
        ("flash", "hd96-h16-32x1k", 1),
        ("flash", "hd96-h16-32x1k-causal", 8),
        ("flash", "hd192v128-h16-16x1k", 1),
        ("flash", "hd192v128-h16-16x1k-causal", 8),
        ("flash", "hd256-h8-16x1k", 1),
        ("flash-fp8", "hd128-h16-16x1k", 1),
        ("flash-fp8", "hd128-h16-32x1k", 1),
        ("flash-fp8", "hd128-h16-16x1k-causal", 8),
        ("flash-decode", "hd128-h32x8-b8-k8k-q1", 2),
        ("flash-decode", "hd128-h32x8-b8-k8k-q4", 2),
        ("flash-decode", "hd128-h32x8-b64-k4k-q1", 2),
        ("flash-decode", "hd128-h32x8-b64-k4k-q4", 2),
        ("flash-decode", "hd64-h64x8-b8-k8k-q1", 2),
        ("flash-decode", "hd64-h64x8-b64-k4k-q1", 2),
        ("flash-decode", "hd64-h64x8-b64-k4k-q4", 2),
        ("flash-mla", "h16-b64-k4k", 1),
        ("flash-mla", "h64-b64-k4k", 1),
        ("cutlass-mla-fp8", "h16-b64-k4k", 1),
        ("cutlass-mla-fp8", "h128-b128-k4k", 1),
        # CTAs of this package's kernel wait for each other's partial sums.
        ("quack-gated", "1x14336x4096", 0),
        ("quack-gated", "8x14336x4096", 0),
        ("quack-gated", "64x14336x4096", 1),
        # Of 74 clusters 38 have two tiles, the others one.
        ("quack-gated", "256x14336x4096", 2),
        ("quack-gated", "2048x14336x4096", 1),
        ("quack-gated", "8192x14336x4096", 1),
    )
)
