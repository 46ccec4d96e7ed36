# SPDX-License-Identifier: Apache-2.0
"""What GPUs did: rows of docs/performance.md, which has their dates, commits and commands."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A row that was timed.

    Attributes:
        operator: softmax, linear, decode, prefill, mla-decode or mla-prefill.
        row: the benchmark's name of it.
        microseconds: that this package's CuTe DSL kernel took.
        samples: clusters that the clock simulates; 0: all, where CTAs wait for each other.
        fitted: constants were chosen with it; all others are held out.
    """

    operator: str
    row: str
    microseconds: float
    samples: int = 1
    fitted: bool = False

    @property
    def name(self) -> str:
        return f"{self.operator} {self.row}"


CHIP = "H200"
ROWS = (
    Measured("softmax", "512x4096", 4.03),
    Measured("softmax", "512x8192", 5.36, fitted=True),
    Measured("softmax", "4096x8192", 34.00, fitted=True),
    Measured("softmax", "2048x16384", 34.29),
    Measured("softmax", "1024x32768", 34.30),
    Measured("softmax", "32768x4096", 132.1),
    Measured("softmax", "32768x32768", 1032.6),
    Measured("linear", "llama-8b-64", 58.21),
    Measured("linear", "llama-8b-256", 93.68, fitted=True),
    Measured("linear", "llama-8b-1024", 344.6),
    Measured("linear", "qwen3-32b-256", 201.1),
    Measured("linear", "held-out-deepseek-v2-lite-shared-640", 24.47),
    Measured("linear", "plain-8192x8192x2048", 385.3, fitted=True),
    Measured("decode", "hd128-h32x8-b1-k8k", 13.90, samples=2),
    Measured("decode", "hd128-h32x8-b8-k8k", 66.77, samples=2, fitted=True),
    Measured("decode", "hd64-h64x8-b8-k8k", 38.21, samples=2),
    Measured("decode", "hd128-h8x1-b8-k8k", 14.22, samples=2),
    Measured("prefill", "hd128-h32x8-16x1k", 299.8, fitted=True),
    Measured("prefill", "hd128-h32x8-4x4k", 947.5),
    Measured("prefill", "hd64-h64x8-16x1k", 396.7),
    Measured("prefill", "hd256-h16x2-16x1k", 296.0),
    Measured("mla-decode", "h16-b8-k8k-q1", 30.53, samples=2),
    Measured("mla-decode", "h128-b8-k8k-q1", 45.70, samples=2),
    Measured("mla-prefill", "h16-16x1k", 186.7),
)
