# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over the rows of a matrix, with a residual before it and 8-bit outputs behind it."""
