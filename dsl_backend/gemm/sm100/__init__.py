# SPDX-License-Identifier: Apache-2.0
"""GEMM kernels for SM100 and SM103: tcgen05 with accumulators in tensor memory, loads by TMA."""
