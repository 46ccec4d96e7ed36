# SPDX-License-Identifier: Apache-2.0
"""Linear layers in CuTe DSL: keys and launches of the kernels in `gemm/`."""
