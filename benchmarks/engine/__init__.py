# SPDX-License-Identifier: Apache-2.0
"""Benchmark of whole vLLM engines with dummy weights: tokens per second with each attention backend."""
