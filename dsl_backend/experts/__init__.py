# SPDX-License-Identifier: Apache-2.0
"""Routed experts of a mixture: both products of each expert, the activation between them, and the weighted sum."""
