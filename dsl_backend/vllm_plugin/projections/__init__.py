# SPDX-License-Identifier: Apache-2.0
"""Serves projections without an activation for the few rows of a decode step: q, k and v, o, down, the logits."""
