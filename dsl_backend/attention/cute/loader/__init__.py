# SPDX-License-Identifier: Apache-2.0
"""Producer warps: they copy queries, keys and values into shared memory by TMA."""
