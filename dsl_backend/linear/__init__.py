# SPDX-License-Identifier: Apache-2.0
"""Linear layers: a GEMM with bias, gated activation and residual in one kernel."""
