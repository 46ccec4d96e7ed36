# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands: products of e4m3 with scales, gated activation and the next quantisation."""
