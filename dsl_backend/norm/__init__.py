# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over the rows of a matrix, with addition of a residual before it, and outputs in 16 or 8 bits."""
