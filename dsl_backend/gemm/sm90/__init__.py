# SPDX-License-Identifier: Apache-2.0
"""GEMM kernels for SM90: wgmma, loads by TMA."""
