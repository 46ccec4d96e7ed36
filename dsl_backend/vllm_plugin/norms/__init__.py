# SPDX-License-Identifier: Apache-2.0
"""Serves the norms of a model's hidden states, with the addition of the residual in front of them."""
