# SPDX-License-Identifier: Apache-2.0
"""Linear layers by the CuTe DSL kernels in `gemm/`."""
