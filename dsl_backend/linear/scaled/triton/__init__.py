# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands in Triton, for SMs without kernels of their own."""
