# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of experts on SM90."""
