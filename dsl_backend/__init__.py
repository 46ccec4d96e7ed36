# SPDX-License-Identifier: Apache-2.0
"""CuTe-DSL, Triton and reference kernels for serving models with vLLM."""

__version__ = "0.1.0"
