# SPDX-License-Identifier: Apache-2.0
"""Linear layers: a matrix product with what follows it, a gated activation above all, in one kernel."""
