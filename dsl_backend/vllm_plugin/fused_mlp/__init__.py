# SPDX-License-Identifier: Apache-2.0
"""Gate and up projections and their activation as one kernel: find the pairs, replace them, run them."""
